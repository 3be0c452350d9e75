//! Runs seeds, and stops at the first violation.
//!
//! `moontide-sim [--seed N] [--seeds M] [--seconds S] [--threads T] [--trace]`

use std::process::ExitCode;
use std::time::Duration;

use moontide_sim::{LENGTH_DEFAULT, SeedSweep, run};

const USAGE: &str = "usage: moontide-sim [--seed N] [--seeds M] [--seconds S] [--threads T] [--trace]";

fn main() -> ExitCode {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut sweep = SeedSweep { first: 1, seeds: 1, length: LENGTH_DEFAULT, threads };
    let mut trace = false;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|value| value.parse::<u64>().ok());
        let known = match arg.as_str() {
            "--seed" => number().map(|value| sweep.first = value),
            "--seeds" => number().map(|value| sweep.seeds = value),
            "--seconds" => number().map(|value| sweep.length = Duration::from_secs(value)),
            "--threads" => number().map(|value| sweep.threads = value as usize),
            "--trace" => {
                trace = true;
                Some(())
            }
            _ => None,
        };
        if known.is_none() {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    }
    let ended = if sweep.seeds == 1 { one(&sweep, trace) } else { many(&sweep) };
    match ended {
        Ok(page) => {
            print!("{page}");
            ExitCode::SUCCESS
        }
        Err(violation) => {
            eprintln!("{violation}");
            ExitCode::FAILURE
        }
    }
}

fn one(sweep: &SeedSweep, trace: bool) -> Result<String, moontide_sim::Violation> {
    let plan = sweep.plan(sweep.first);
    println!("{plan:?}");
    run(sweep.first, &plan, trace).map(|done| format!("{done:?}\n"))
}

fn many(sweep: &SeedSweep) -> Result<String, moontide_sim::Violation> {
    sweep.run(&|line| println!("{line}"))
}
