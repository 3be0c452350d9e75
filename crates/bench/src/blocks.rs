//! `moontide bench blocks`: benchmarks of the paged KV cache: cost of operations, savings by prefix sharing and waste
//! of contiguous placement on a trace, and restore of a sequence from the store.
//!
//! | file | content |
//! |---|---|
//! | `speed` | single operations, with a million blocks |
//! | `traffic` | a synthetic trace of chat sessions, in virtual time |
//! | `restore` | a long sequence from a local node, compared with plain copies |

mod restore;
mod speed;
mod traffic;

use clap::Args as ClapArgs;

use crate::results::{BenchError, check_gates};

pub(super) const EXAMPLES: &str = "\
Examples:
  moontide bench blocks                    all parts: 90 seconds, 3 GiB of memory
  moontide bench blocks --quick            smaller, less precise
  moontide bench blocks --only speed       one of speed, traffic, restore

Every result is one JSON object per line on standard output:
  pool               allocating and freeing one block, with one thread and with two threads on one pool; baseline: a Vec
                     behind a mutex
  allocate, free     a prompt of 1,024 tokens, per block; `hash_ns` is the cost of hashing a block
  append, view       one token; one view of a sequence, by its owner and by an entered reader
  traffic            chat sessions: paged and shared, paged only, contiguous with and without reserve; `ideal_hit_rate`
                     is that of an infinite cache of prompts; this cache also keeps outputs, so it can exceed it
  restore            4,096 tokens from a local node into blocks; baseline: copies of the same pieces from memory of this
                     process";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Run only this part
    #[arg(long, value_parser = ["speed", "traffic", "restore"])]
    only: Option<String>,
    /// Measurements per result [default: 5; quick: 3]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: Option<u16>,
    /// Seed of the random numbers
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Use smaller parameters
    #[arg(long)]
    quick: bool,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

impl Args {
    fn repeats(&self) -> u64 {
        self.repeats.unwrap_or(if self.quick { 3 } else { 5 }).into()
    }
}

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let is_selected = |part: &str| args.only.as_deref().is_none_or(|only| only == part);
    if is_selected("speed") {
        speed::run(args)?;
    }
    if is_selected("traffic") {
        traffic::run(args)?;
    }
    if is_selected("restore") {
        restore::run(args)?;
    }
    if args.gate { check_gates() } else { Ok(()) }
}
