//! `moontide bench ep`: duration of an expert-parallel exchange, compared with a baseline of the unavoidable work.
//!
//! | file | content |
//! |---|---|
//! | `rank` | process of a rank: steps, baseline loop, ping-pong of a cache line |
//! | `routes` | assignment of tokens to experts |
//!
//! All ranks are processes of this program. Exchange and baseline loop alternate in the same processes, round by round.
//! An efficiency compares two consecutive measurements; the result is the median and the range.

mod rank;
mod routes;

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Stdio};

use clap::Args as ClapArgs;
use moontide_ep::CombineMode;
use serde::{Deserialize, Serialize};

use crate::measure::{median, relative_range};
use crate::process::this_program;
use crate::results::{BenchError, ResultRow, check_gates, io, wrong};
use crate::scratch::Scratch;
use routes::Routes;

pub(super) use rank::{RankArgs, run as run_rank};

pub(super) const EXAMPLES: &str = "\
Examples:
  moontide bench ep                                   two ranks, 1 to 32 tokens each: half a minute
  moontide bench ep --ranks 8 --tokens 32 --routes any,one-rank --json
  moontide bench ep --quick                           a few seconds, less precise

One process per rank, each pinned to a core if there are enough. In every step a rank dispatches its tokens to the ranks
of their experts, copies received rows to the outputs (instead of real experts), and combines the returned rows.

    dispatch, combine   microseconds: median of the steps of a round, of the slowest rank, median of the rounds
    baseline            the same for a loop without any protocol, in the same processes, alternating with the exchange:
                        each token copied once to each remote rank that has one of its experts; then, for each token, the
                        sum of its rows on all ranks. No local copies, no metadata, no waiting. Time of the rank that
                        copies longest plus time of the rank that sums longest
    efficiency          baseline / (dispatch + combine of the slowest rank): median over the rounds; ± (largest -
                        smallest) / median.
                        The target, 0.7, is for 2 ranks with 32 tokens of 7168 bf16 numbers and 8 experts.
                        If one rank has more to copy than others, their combine includes waiting for it
    step                dispatch, copy and combine together: compares pull and push
    lines               duration of a step in transfers of one cache line between two ranks (half of a ping-pong), for 1
                        token
    sleeps              futex calls per step, of one rank
--json prints one object per line instead.";

/// Target of the efficiency, in the case that has a target.
const EFFICIENCY_TARGET: f64 = 0.7;

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Number of ranks
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64), default_value_t = 2)]
    ranks: u32,
    /// Tokens per rank and step; the largest number determines the size of a channel
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(0..=65536), default_value = "1,4,8,16,32")]
    tokens: Vec<u32>,
    /// Routes of tokens: to any experts, to experts of one-rank, or of two-ranks per token
    #[arg(long, value_delimiter = ',', value_enum, default_value = "any,one-rank,two-ranks")]
    routes: Vec<Routes>,
    /// Numbers per token, in bf16
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 20), default_value_t = 7168)]
    hidden: u32,
    /// Experts per token
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=32), default_value_t = 8)]
    top_k: u32,
    /// Experts per rank
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65535), default_value_t = 32)]
    experts: u32,
    /// Combine mode
    #[arg(long, value_delimiter = ',', value_enum, default_value = "pull,push")]
    combine_mode: Vec<CombineModeArg>,
    /// Rounds of exchange and baseline loop
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000), default_value_t = 15)]
    rounds: u32,
    /// Steps per round
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000), default_value_t = 200)]
    steps: u32,
    /// Seed of the routes
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Do not pin ranks to cores
    #[arg(long)]
    no_pin: bool,
    /// Use fewer cases and shorter rounds
    #[arg(long)]
    quick: bool,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

/// [`CombineMode`], for the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum CombineModeArg {
    /// The owner of a token reads the outputs from the ranks of the experts
    Pull,
    /// The ranks of the experts write the outputs to the owner of the token
    Push,
}

impl CombineModeArg {
    fn mode(self) -> CombineMode {
        match self {
            CombineModeArg::Pull => CombineMode::Pull,
            CombineModeArg::Push => CombineMode::Push,
        }
    }

    fn name(self) -> &'static str {
        match self {
            CombineModeArg::Pull => "pull",
            CombineModeArg::Push => "push",
        }
    }
}

/// Parameters of a case, equal for all ranks and steps.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Case {
    tokens: u32,
    routes: Routes,
    combine_mode: CombineModeArg,
}

impl Args {
    /// Returns the cases in the order in which all ranks run them.
    fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for &combine_mode in &self.combine_mode {
            for &routes in &self.routes {
                cases.extend(self.tokens.iter().map(|&tokens| Case { tokens, routes, combine_mode }));
            }
        }
        cases
    }

    fn with_quick(mut self) -> Args {
        if self.quick {
            (self.tokens, self.routes) = (vec![1, 32], vec![Routes::Any]);
            (self.rounds, self.steps) = (5, 50);
        }
        self
    }
}

/// Medians of the steps of a round on one rank, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Round {
    dispatch: f64,
    work: f64,
    combine: f64,
    baseline_dispatch: f64,
    baseline_combine: f64,
}

/// Result of a case on one rank.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct RankReport {
    rounds: Vec<Round>,
    /// Half of a ping-pong of one cache line; only of ranks 0 and 1.
    line_ns: Option<f64>,
    futex_calls_per_step: f64,
}

/// Runs the cases.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let args = args.clone().with_quick();
    let scratch =
        Scratch::new(&std::env::temp_dir(), "moontide-bench-ep").map_err(io("creating a directory"))?;
    let mut ranks = (0..args.ranks)
        .map(|rank| RankProcess::start(&args, rank, &scratch.path().join("world")))
        .collect::<Result<Vec<_>, _>>()?;
    if !args.json {
        println!(
            "{:>6} {:<9} {:<5} {:>9} {:>9} {:>9} {:>9} {:>10} {:>6} {:>9} {:>7} {:>7}",
            "tokens",
            "routes",
            "mode",
            "dispatch",
            "combine",
            "baseline",
            "step",
            "efficiency",
            "±",
            "",
            "lines",
            "sleeps"
        );
    }
    for case in args.cases() {
        let reports = ranks.iter_mut().map(RankProcess::read_report).collect::<Result<Vec<_>, _>>()?;
        report(&args, case, &reports);
    }
    for rank in &mut ranks {
        rank.end()?;
    }
    if args.gate { check_gates() } else { Ok(()) }
}

/// Prints the result of a case.
fn report(args: &Args, case: Case, reports: &[RankReport]) {
    let slowest = |round: usize, value: fn(&Round) -> f64| {
        reports.iter().map(|report| value(&report.rounds[round])).fold(0.0, f64::max) / 1e3
    };
    let rounds = 0..reports[0].rounds.len();
    let over_rounds =
        |value: fn(&Round) -> f64| rounds.clone().map(|round| slowest(round, value)).collect::<Vec<_>>();
    let (dispatch, combine) = (over_rounds(|round| round.dispatch), over_rounds(|round| round.combine));
    let exchange = over_rounds(|round| round.dispatch + round.combine);
    let step = median(over_rounds(|round| round.dispatch + round.work + round.combine));
    let (copies, sums) =
        (over_rounds(|round| round.baseline_dispatch), over_rounds(|round| round.baseline_combine));
    let baseline: Vec<f64> = copies.iter().zip(&sums).map(|(copy, sum)| copy + sum).collect();
    let efficiencies: Vec<f64> =
        baseline.iter().zip(&exchange).map(|(baseline, exchange)| baseline / exchange).collect();
    let efficiency = median(efficiencies.clone());
    let line_us = reports.iter().find_map(|report| report.line_ns).unwrap_or(0.0) / 1e3;
    let lines = (case.tokens == 1 && line_us > 0.0).then(|| median(exchange.clone()) / line_us);
    let sleeps = reports.iter().map(|report| report.futex_calls_per_step).sum::<f64>() / reports.len() as f64;
    let has_target = case.tokens == 32
        && (args.ranks, args.hidden, args.top_k) == (2, 7168, 8)
        && (case.routes, case.combine_mode) == (Routes::Any, CombineModeArg::Pull);

    let line = ResultRow::new("ep", "exchange")
        .with("ranks", args.ranks)
        .with("tokens", case.tokens)
        .with("routes", case.routes.name())
        .with("combine_mode", case.combine_mode.name())
        .with("hidden", args.hidden)
        .with("top_k", args.top_k)
        .number("dispatch_us", median(dispatch.clone()))
        .number("dispatch_us_range", relative_range(&dispatch))
        .number("combine_us", median(combine.clone()))
        .number("combine_us_range", relative_range(&combine))
        .number("baseline_us", median(baseline.clone()))
        .number("baseline_us_range", relative_range(&baseline))
        .number("step_us", step)
        .number("efficiency_range", relative_range(&efficiencies))
        .number("line_us", line_us)
        .with("lines", lines.map(f64::round))
        .number("futex_calls_per_step", sleeps);
    // Also for the table: the row counts the gate failures.
    let line = match has_target {
        true => line.with_target("efficiency", efficiency, EFFICIENCY_TARGET, true),
        false => line.number("efficiency", efficiency),
    };
    if args.json {
        return line.print();
    }
    let met = match (has_target, efficiency >= EFFICIENCY_TARGET) {
        (false, _) => "",
        (true, true) => "met",
        (true, false) => "below 0.7",
    };
    println!(
        "{:>6} {:<9} {:<5} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>10.2} {:>6.2} {:>9} {:>7} {:>7.2}",
        case.tokens,
        case.routes.name(),
        case.combine_mode.name(),
        median(dispatch),
        median(combine),
        median(baseline),
        step,
        efficiency,
        relative_range(&efficiencies),
        met,
        lines.map_or(String::new(), |lines| format!("{lines:.0}")),
        sleeps,
    );
}

/// Process of a rank, which is killed on drop.
struct RankProcess {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
}

impl RankProcess {
    fn start(args: &Args, rank: u32, path: &Path) -> Result<RankProcess, BenchError> {
        let mut command = this_program()?;
        command.args(["bench", "ep-rank"]).arg("--path").arg(path);
        let list = |words: Vec<String>| words.join(",");
        command.arg(format!("--rank={rank}"));
        command.arg(format!("--ranks={}", args.ranks));
        command.arg(format!("--tokens={}", list(args.tokens.iter().map(u32::to_string).collect())));
        command.arg(format!("--routes={}", list(args.routes.iter().map(|it| it.name().into()).collect())));
        command.arg(format!(
            "--combine-mode={}",
            list(args.combine_mode.iter().map(|it| it.name().into()).collect())
        ));
        command.arg(format!("--hidden={}", args.hidden)).arg(format!("--top-k={}", args.top_k));
        command.arg(format!("--experts={}", args.experts)).arg(format!("--rounds={}", args.rounds));
        command.arg(format!("--steps={}", args.steps)).arg(format!("--seed={}", args.seed));
        if args.no_pin {
            command.arg("--no-pin");
        }
        // A rank exits at the end of its standard input.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(io("starting a rank"))?;
        let out = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Ok(RankProcess { child, out })
    }

    fn read_report(&mut self) -> Result<RankReport, BenchError> {
        let mut line = String::new();
        self.out.read_line(&mut line).map_err(io("reading the output of a rank"))?;
        serde_json::from_str(&line).map_err(|_| wrong("rank exited before it printed its result"))
    }

    fn end(&mut self) -> Result<(), BenchError> {
        let status = self.child.wait().map_err(io("waiting for a rank"))?;
        if status.success() { Ok(()) } else { Err(wrong(format!("rank failed: {status}"))) }
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
