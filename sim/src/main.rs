//! Runs seeds, and stops at the first broken promise.
//!
//! `moontide-sim [--seed N] [--seeds M] [--seconds S] [--threads T] [--trace]`

use std::process::ExitCode;
use std::time::Duration;

use moontide_sim::{Campaign, LENGTH_DEFAULT, run};

const USAGE: &str = "usage: moontide-sim [--seed N] [--seeds M] [--seconds S] [--threads T] [--trace]";

fn main() -> ExitCode {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let mut campaign = Campaign { first: 1, seeds: 1, length: LENGTH_DEFAULT, threads };
    let mut trace = false;
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let mut number = || args.next().and_then(|value| value.parse::<u64>().ok());
        let known = match arg.as_str() {
            "--seed" => number().map(|value| campaign.first = value),
            "--seeds" => number().map(|value| campaign.seeds = value),
            "--seconds" => number().map(|value| campaign.length = Duration::from_secs(value)),
            "--threads" => number().map(|value| campaign.threads = value as usize),
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
    let ended = if campaign.seeds == 1 { one(&campaign, trace) } else { many(&campaign) };
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

fn one(campaign: &Campaign, trace: bool) -> Result<String, moontide_sim::Violation> {
    let plan = campaign.plan(campaign.first);
    println!("{plan:?}");
    run(campaign.first, &plan, trace).map(|done| format!("{done:?}\n"))
}

fn many(campaign: &Campaign) -> Result<String, moontide_sim::Violation> {
    campaign.run(&|line| println!("{line}"))
}
