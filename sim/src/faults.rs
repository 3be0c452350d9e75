//! [`Fault`]s: what breaks, and when. Drawn from the seed before anything runs.

use std::time::Duration;

use moontide_meta::Rng;
use moontide_types::MonoTime;

use crate::event::{Event, Events};

/// How often things break: mean times between two faults of a kind, in milliseconds.
#[derive(Clone, Copy, Debug)]
pub struct FaultPlan {
    /// The master's process ends.
    pub master_every_ms: u64,
    /// A node is cut off for a while.
    pub silence_every_ms: u64,
    /// A node's process ends.
    pub restart_every_ms: u64,
    /// A client's process ends.
    pub client_every_ms: u64,
}

impl Default for FaultPlan {
    fn default() -> FaultPlan {
        FaultPlan {
            master_every_ms: 50_000,
            silence_every_ms: 25_000,
            restart_every_ms: 90_000,
            client_every_ms: 5_000,
        }
    }
}

/// Something breaks.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Fault {
    MasterCrashes { for_ms: u64 },
    NodeSilent { node: usize, for_ms: u64 },
    NodeRestarts { node: usize },
    ClientCrashes { client: usize },
}

/// Schedules all faults of a run.
pub(crate) fn schedule(
    plan: &FaultPlan,
    seed: u64,
    length: Duration,
    nodes: usize,
    clients: usize,
    events: &mut Events,
) -> u64 {
    let mut rng = Rng::new(seed);
    let length = length.as_millis() as u64;
    let mut count = 0;
    let kinds = [plan.master_every_ms, plan.silence_every_ms, plan.restart_every_ms, plan.client_every_ms];
    for (kind, every) in kinds.into_iter().enumerate().filter(|&(_, every)| every > 0) {
        let mut at = rng.below(2 * every as usize) as u64;
        while at < length {
            let fault = match kind {
                0 => Fault::MasterCrashes { for_ms: 50 + rng.below(3_000) as u64 },
                1 => {
                    // Mostly within the session's time, sometimes beyond it, seldom beyond any memory.
                    let longest = [3_000, 8_000, 8_000, 20_000, 80_000][rng.below(5)];
                    Fault::NodeSilent { node: rng.below(nodes), for_ms: rng.below(longest) as u64 }
                }
                2 => Fault::NodeRestarts { node: rng.below(nodes) },
                _ => Fault::ClientCrashes { client: rng.below(clients) },
            };
            events.at(MonoTime(at * 1_000_000), Event::Fault(fault));
            count += 1;
            at += 1 + rng.below(2 * every as usize) as u64;
        }
    }
    count
}
