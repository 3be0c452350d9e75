//! Runs seeds, and stops at the first violation.

use std::process::ExitCode;
use std::time::Duration;

use moontide_sim::{LENGTH_DEFAULT, MUTATIONS, SeedSweep, SweepError, run};

const USAGE: &str = "\
usage: moontide-sim [options]

  --seed N         first seed (1)
  --seeds N        number of seeds (1); with --mutations, the largest number for each
  --seconds N      virtual time of faults in each run (600)
  --threads N      threads (one per CPU)
  --trace          print every event of the one seed
  --mutation NAME  enable a deliberate bug
  --mutations      enable each deliberate bug that the simulation must detect, and print at which seed it does
  --coverage N     fail if a coincidence was reached less than N times

examples:
  cargo xtask sim --seeds 1000 --seconds 60
  cargo xtask sim --seed 7 --seconds 60 --trace
  cargo xtask sim --mutations --seeds 1000 --seconds 60
";

/// What the arguments ask for.
struct Arguments {
    sweep: SeedSweep,
    shows_trace: bool,
    all_mutations: bool,
}

/// Runs the command with the arguments of the process.
pub(crate) fn main() -> ExitCode {
    let Some(arguments) = parse(std::env::args().skip(1)) else {
        eprint!("{USAGE}");
        return ExitCode::from(2);
    };
    let Arguments { sweep, shows_trace, all_mutations } = arguments;
    let ended = if all_mutations {
        detect_all(&sweep)
    } else if sweep.seeds == 1 {
        one(&sweep, shows_trace).map_err(|violation| violation.to_string())
    } else {
        sweep.run(&|line| println!("{line}")).map_err(|error| error.to_string())
    };
    match ended {
        Ok(page) => {
            print!("{page}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Option<Arguments> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let sweep =
        SeedSweep { first: 1, seeds: 1, length: LENGTH_DEFAULT, threads, mutation: None, coverage_min: 0 };
    let mut arguments = Arguments { sweep, shows_trace: false, all_mutations: false };
    while let Some(word) = words.next() {
        let sweep = &mut arguments.sweep;
        let mut number = || words.next().and_then(|value| value.parse::<u64>().ok());
        match word.as_str() {
            "--seed" => sweep.first = number()?,
            "--seeds" => sweep.seeds = number()?,
            "--seconds" => sweep.length = Duration::from_secs(number()?),
            "--threads" => sweep.threads = number()? as usize,
            "--coverage" => sweep.coverage_min = number()?,
            "--trace" => arguments.shows_trace = true,
            "--mutations" => arguments.all_mutations = true,
            // A name is needed until the process ends.
            "--mutation" => sweep.mutation = Some(words.next()?.leak()),
            _ => return None,
        }
    }
    Some(arguments)
}

fn one(sweep: &SeedSweep, shows_trace: bool) -> Result<String, moontide_sim::Violation> {
    let plan = sweep.plan(sweep.first);
    println!("{plan:?}");
    run(sweep.first, &plan, shows_trace, sweep.mutation).map(|done| format!("{done:?}\n"))
}

/// Runs seeds with each deliberate bug until one violates a guarantee.
fn detect_all(sweep: &SeedSweep) -> Result<String, String> {
    let mut survivors = vec![];
    for &mutation in MUTATIONS {
        let sweep = SeedSweep { mutation: Some(mutation), coverage_min: 0, ..*sweep };
        match sweep.run(&|_| ()) {
            Err(SweepError::Violation(violation)) if violation.is_wrong_answer() => {
                println!("{mutation}: detected at seed {}: {}", violation.seed, violation.what);
            }
            Err(SweepError::Violation(violation)) => {
                println!(
                    "{mutation}: NOT detected; seed {} failed otherwise: {}",
                    violation.seed, violation.what
                );
                survivors.push(mutation);
            }
            _ => {
                println!("{mutation}: NOT detected within {} seeds", sweep.seeds);
                survivors.push(mutation);
            }
        }
    }
    if survivors.is_empty() {
        return Ok(format!("{} of {} deliberate bugs detected\n", MUTATIONS.len(), MUTATIONS.len()));
    }
    Err(format!("not detected: {}", survivors.join(", ")))
}
