//! Runs seeds one after the other, one line each, and stops at the first broken promise.
//!
//! `moontide-sim --seed N --seeds M [--seconds S] [--trace]`

use std::process::ExitCode;
use std::time::{Duration, Instant};

use moontide_sim::{Plan, run};

fn main() -> ExitCode {
    let (mut seed, mut seeds, mut plan, mut trace) = (1u64, 1u64, Plan::default(), false);
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|value| value.parse::<u64>().ok());
        let known = match arg.as_str() {
            "--seed" => number().map(|value| seed = value),
            "--seeds" => number().map(|value| seeds = value),
            "--seconds" => number().map(|value| plan.length = Duration::from_secs(value)),
            "--trace" => {
                trace = true;
                Some(())
            }
            _ => None,
        };
        if known.is_none() {
            eprintln!("usage: moontide-sim [--seed N] [--seeds M] [--seconds S] [--trace]");
            return ExitCode::from(2);
        }
    }
    for seed in seed..seed.saturating_add(seeds) {
        let started = Instant::now();
        match run(seed, &plan, trace) {
            Ok(done) => println!(
                "seed {seed}: {} events, {} ops, {} puts, {} removals, {} hits, {} misses, {} faults, {} lost, \
                 {} terms, trace {:016x}, {} ms",
                done.events,
                done.ops,
                done.puts,
                done.removals,
                done.hits,
                done.misses,
                done.faults,
                done.lost,
                done.terms,
                done.trace,
                started.elapsed().as_millis()
            ),
            Err(violation) => {
                eprintln!("{violation}");
                return ExitCode::FAILURE;
            }
        }
    }
    ExitCode::SUCCESS
}
