//! `moontide bench blocks`: the engine's own paged cache. What its operations cost, what sharing saves and what contiguous
//! runs waste on a trace, and how fast a sequence comes back from the store.
//!
//! | file | what |
//! |---|---|
//! | `speed` | single operations, with a million blocks |
//! | `traffic` | a made-up trace of conversations, in virtual time |
//! | `restore` | a long sequence from a node of this host, beside plain copies |

mod restore;
mod speed;
mod traffic;

use clap::Args as ClapArgs;

use super::figures::{BenchError, nothing_is_grossly_slow};

pub(super) const EXAMPLES: &str = "\
Examples:
  moontide bench blocks                    everything: a minute and a half, 3 GiB of memory
  moontide bench blocks --quick            smaller and rougher
  moontide bench blocks --only speed       one of speed, traffic, restore

Every result is one JSON object per line on standard output:
  pool               taking and giving back one block, by one thread and by two at the same pool; bare: the same on a Vec
                     behind a mutex
  allocate, free     a prompt of 1,024 tokens, per block; `hash_ns` is the part that naming a block takes
  append, view       one token; one look at a sequence, by its owner and by a reader that is in
  traffic            conversations that come and go: paged and shared, paged alone, contiguous with and without a reserve;
                     `ideal_hit_rate` is that of an infinite cache which keeps prompts; this one keeps answers too, so
                     that it can have more
  restore            4,096 tokens from a node on this host into blocks; bare: copies of the same pieces from this process's
                     own memory";

/// How it is measured.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Only this part.
    #[arg(long, value_parser = ["speed", "traffic", "restore"])]
    only: Option<String>,
    /// How often each figure is taken [default: 5; quick: 3].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: Option<u16>,
    /// Decides what is random.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Smaller and rougher.
    #[arg(long)]
    quick: bool,
    /// Fail if a figure misses its target by more than a factor of two.
    #[arg(long)]
    gate: bool,
}

impl Args {
    fn repeats(&self) -> u64 {
        self.repeats.unwrap_or(if self.quick { 3 } else { 5 }).into()
    }
}

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let wanted = |part: &str| args.only.as_deref().is_none_or(|only| only == part);
    if wanted("speed") {
        speed::run(args)?;
    }
    if wanted("traffic") {
        traffic::run(args)?;
    }
    if wanted("restore") {
        restore::run(args)?;
    }
    if args.gate { nothing_is_grossly_slow() } else { Ok(()) }
}
