//! `moontide bench local`, `remote`, `load`, `mixed` and `trace`: the store as an application sees it, in a cluster of real
//! processes that the benchmark starts from its own program, or in one that is there already.
//!
//! | file | what |
//! |---|---|
//! | `cluster` | the processes |
//! | `turns` | ours and the bare limit in turns, and what a case's line says |
//! | `local` | memory of this host: in place, copies, puts |
//! | `remote` | the same over TCP |
//! | `load` | the same, from a node's disk |
//! | `mixed` | many callers, reads and writes, also more than can be served |
//! | `replay` | a trace of KV-cache traffic |

mod cluster;
mod load;
mod local;
mod mixed;
mod remote;
mod replay;
mod turns;

use std::time::Duration;

use clap::Args as ClapArgs;
use moontide_meta::Rng;

pub(super) use cluster::{BenchCluster, Size};
pub(super) use load::{Args as LoadArgs, EXAMPLES as LOAD_EXAMPLES, run as load};
pub(super) use local::{Args as LocalArgs, EXAMPLES as LOCAL_EXAMPLES, run as local};
pub(super) use mixed::{Args as MixedArgs, EXAMPLES as MIXED_EXAMPLES, run as mixed};
pub(super) use remote::{Args as RemoteArgs, EXAMPLES as REMOTE_EXAMPLES, run as remote};
pub(super) use replay::{Args as ReplayArgs, EXAMPLES as REPLAY_EXAMPLES, run as replay};

/// How `local` and `remote` are measured.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Effort {
    /// How often ours and the bare limit take turns [default: 5; quick: 3].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: Option<u16>,
    /// How long one measurement takes [default: 0.3; quick: 0.05].
    #[arg(long, value_parser = super::transfer::seconds)]
    seconds: Option<f64>,
    /// Sizes of objects, in bytes or with K or M behind them [default: 64K,256K,1M,4M,16M; quick: 256K,4M].
    #[arg(long, value_delimiter = ',', value_parser = super::transfer::size)]
    sizes: Option<Vec<u64>>,
    /// Decides in which order objects are read.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fewer sizes, fewer and shorter measurements.
    #[arg(long)]
    quick: bool,
    /// Fail if a figure misses its target by more than a factor of two.
    #[arg(long)]
    gate: bool,
}

impl Effort {
    fn repeats(&self) -> u64 {
        self.repeats.unwrap_or(if self.quick { 3 } else { 5 }).into()
    }

    fn span(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(if self.quick { 0.05 } else { 0.3 }))
    }

    fn sizes(&self) -> Vec<u64> {
        let default: &[u64] = if self.quick {
            &[256 << 10, 4 << 20]
        } else {
            &[64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20]
        };
        self.sizes.clone().unwrap_or_else(|| default.to_vec())
    }

    /// Bytes of objects that are read at random: more than any cache.
    fn set_bytes(&self) -> u64 {
        if self.quick { 256 << 20 } else { 1 << 30 }
    }
}

/// Bytes that are not all the same, for objects.
fn noise(seed: u64, len: usize) -> Vec<u8> {
    let mut rng = Rng::new(seed);
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&rng.next_u64().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}
