//! `moontide bench transfer`: how fast bytes move between two processes, beside what the machine allows.
//!
//! | file | what |
//! |---|---|
//! | `measure` | shapes of a case, timed callers, what a case's lines say |
//! | `owner` | the process that owns the memory: `bench transfer-owner` |
//! | `bare` | the bare limit of streams: sockets and nothing else |
//! | `tcp` | the cases of the TCP engine |
//! | `shm` | the cases of shared memory |
//!
//! Ours and the bare limit take turns, repeat by repeat, with the same sizes, the same number of threads and the same
//! order of records, on the same memory of the same process. A ratio is of two neighbours in time; the middle of the
//! ratios counts, and their spread stands beside it.

mod bare;
mod measure;
mod owner;
mod shm;
mod tcp;

use std::time::Duration;

use clap::Args as ClapArgs;

use super::figures::{BenchError, Line, nothing_is_grossly_slow};
use measure::Tally;

pub(super) use bare::Bare;
pub(super) use measure::{Run, timed};
pub(super) use owner::{OwnerArgs, OwnerProcess, serve as run_owner, wrong};

pub(super) const EXAMPLES: &str = "\
Examples:
  moontide bench transfer                             tcp, 4 KiB to 16 MiB, and shm, from 64 KiB on: 2 GiB, some ten minutes
  moontide bench transfer --quick                     three sizes, half a minute; figures are rough
  moontide bench transfer --only tcp --sizes 1M,4M    one engine, two sizes

Every result is one JSON object per line on standard output:
  gb_per_s, bare_gb_per_s   ours and the bare limit: the same transfers with nothing around them (tcp: plain blocking
                            sockets; shm: copies of memory), in turns with ours. With digests, the bare side hashes
                            every page as well
  ratio, ratio_spread       the middle of ours / bare over the repeats; (largest - smallest) / middle of them
  target, met               what we aim for, and whether the ratio reaches it
  *cpu_s_per_gb             processor time of both processes per 10^9 bytes
  *p50_us, *p99_us, *max_us how long one transfer took
  connections_lost          connections that broke, and
  resubmitted               frames that were sent again because of that; there should be none of either
  callers_4_over_1          what four callers move together, over what one moves on the same connections";

/// Sizes that are measured unless others are asked for.
const SIZES: [u64; 6] = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// The same for a quick look.
const SIZES_QUICK: [u64; 3] = [4 << 10, 256 << 10, 4 << 20];
const REPEATS: u16 = 5;
const REPEATS_QUICK: u16 = 3;
const SECONDS: f64 = 0.3;
const SECONDS_QUICK: f64 = 0.05;
/// More than any cache.
const MEMORY_MIB: u64 = 1024;
const MEMORY_MIB_QUICK: u64 = 256;

/// How it is measured.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Sizes of a transfer, in bytes or with K or M behind them [default: 4K,64K,256K,1M,4M,16M; quick: 4K,256K,4M].
    #[arg(long, value_delimiter = ',', value_parser = size)]
    sizes: Option<Vec<u64>>,
    /// How often ours and the bare limit take turns [default: 5; quick: 3].
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: Option<u16>,
    /// How long one measurement takes [default: 0.3; quick: 0.05].
    #[arg(long, value_parser = seconds)]
    seconds: Option<f64>,
    /// Memory of the owner in MiB: half of it is read, half written [default: 1024; quick: 256].
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(64..=65536))]
    memory: Option<u64>,
    /// Decides in which order records are moved.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only one engine.
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Fewer sizes, fewer and shorter measurements, less memory.
    #[arg(long)]
    quick: bool,
    /// Fail if a figure misses its target by more than a factor of two.
    #[arg(long)]
    gate: bool,
}

/// An engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// Streams on loopback.
    Tcp,
    /// Memory that both processes map.
    Shm,
}

impl Args {
    fn sizes(&self) -> Vec<u64> {
        let default = if self.quick { &SIZES_QUICK[..] } else { &SIZES[..] };
        self.sizes.clone().unwrap_or_else(|| default.to_vec())
    }

    fn repeats(&self) -> u16 {
        self.repeats.unwrap_or(if self.quick { REPEATS_QUICK } else { REPEATS })
    }

    fn span(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(if self.quick { SECONDS_QUICK } else { SECONDS }))
    }

    /// How many records of a size are read, and as many written.
    fn records(&self, bytes: u64) -> u32 {
        let mib = self.memory.unwrap_or(if self.quick { MEMORY_MIB_QUICK } else { MEMORY_MIB });
        // Every caller needs some of its own.
        ((mib << 20) / 2 / bytes).max(8) as u32
    }
}

/// Runs the cases.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let wanted = |part| args.only.is_none_or(|only| only == part);
    let mut tally = Tally::default();
    if wanted(Part::Tcp) {
        tcp::run(args, &mut tally)?;
    }
    if wanted(Part::Shm) {
        shm::run(args, &mut tally)?;
    }
    let Tally { targets, met } = tally;
    if targets == 0 && args.gate {
        let what = "nothing that has a target was measured: shm is measured from 64K on, tcp has targets from 256K on";
        return Err(BenchError::Wrong(what.into()));
    }
    Line::new("transfer", "summary").with("targets", targets).with("met", met).print();
    if args.gate { nothing_is_grossly_slow() } else { Ok(()) }
}

/// Reads `4096`, `64K` or `16M`.
pub(super) fn size(text: &str) -> Result<u64, String> {
    let (digits, shift) = match text.as_bytes().last() {
        Some(b'K' | b'k') => (&text[..text.len() - 1], 10),
        Some(b'M' | b'm') => (&text[..text.len() - 1], 20),
        _ => (text, 0),
    };
    let bytes = digits.parse::<u64>().ok().and_then(|number| number.checked_mul(1 << shift));
    match bytes {
        Some(bytes @ 0x1000..=0x400_0000) => Ok(bytes),
        _ => Err("a size from 4K to 64M, such as 4096, 64K or 16M".into()),
    }
}

pub(super) fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.001..=60.0).contains(&seconds) => Ok(seconds),
        _ => Err("seconds from 0.001 to 60".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        assert_eq!(size("4096"), Ok(4096));
        assert_eq!(size("64K"), Ok(65536));
        assert_eq!(size("16m"), Ok(16 << 20));
        for wrong in ["", "0", "K", "4095", "-1", "65M", "1G", "99999999999999999999K"] {
            assert!(size(wrong).is_err(), "{wrong}");
        }
    }
}
