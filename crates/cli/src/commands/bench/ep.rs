//! `moontide bench ep`: how long an expert-parallel exchange takes, beside the bare work that it cannot avoid.
//!
//! | file | what |
//! |---|---|
//! | `rank` | a rank's process: its steps, the bare loop, a cache line to and fro |
//! | `routes` | which tokens go to which experts |
//!
//! All ranks are processes of this program. Ours and the bare loop take turns in the same processes, round by round; an
//! efficiency is of two neighbours in time, the middle of them counts, and their spread stands beside it.

mod rank;
mod routes;

use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use clap::Args as ClapArgs;
use moontide_ep::Returns;
use serde::{Deserialize, Serialize};

use super::figures::{BenchError, Line, io, median, nothing_is_grossly_slow, spread};
use super::transfer::wrong;
use crate::scratch::Scratch;
use routes::Routes;

pub(super) use rank::{RankArgs, run as run_rank};

pub(super) const EXAMPLES: &str = "\
Examples:
  moontide bench ep                                   two ranks, 1 to 32 tokens each: half a minute
  moontide bench ep --ranks 8 --tokens 32 --routes any,one-rank --json
  moontide bench ep --quick                           a few seconds; figures are rough

One process per rank, pinned to a core each if there are enough. In every step a rank sends its tokens to where their
experts are, copies what it got into what goes back (in place of real experts), and sums what comes back.

  dispatch, combine   microseconds: the middle of a round's steps, of the slowest rank, the middle of the rounds
  bare                the same for a loop without any protocol, in the same processes, in turns with ours: each token
                      copied once to each remote rank that has one of its experts; then for each token the sum of the
                      rows made of it, on whichever rank. No copies to oneself, no notes, no waiting. Of the rank that
                      copies longest plus of the one that sums longest
  eta                 bare / (dispatch + combine of the slowest rank): the middle over the rounds; ± (largest -
                      smallest) / middle.
                      The target, 0.7, is for 2 ranks with 32 tokens of 7168 bf16 numbers and 8 experts
                      Where one rank has more to copy than others, their combine includes waiting for it
  step                dispatch, copying and combine together: by this, pull and push are to be compared
  lines               a whole step in transfers of one cache line between two ranks (half of a ping-pong), for 1 token
  sleeps              calls to the futex per step, of one rank
--json prints one object per line instead.";

/// What is aimed for, in the case that has a target.
const ETA_TARGET: f64 = 0.7;

/// How it is measured.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Ranks.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=64), default_value_t = 2)]
    ranks: u32,
    /// Tokens of each rank in a step; a channel has room for the largest number.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(0..=65536), default_value = "1,4,8,16,32")]
    tokens: Vec<u32>,
    /// Where tokens go: any expert, experts of one-rank for all, or of two-ranks each.
    #[arg(long, value_delimiter = ',', value_enum, default_value = "any,one-rank,two-ranks")]
    routes: Vec<Routes>,
    /// Numbers of a token, in bf16.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1 << 20), default_value_t = 7168)]
    hidden: u32,
    /// Experts of a token.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=32), default_value_t = 8)]
    top_k: u32,
    /// Experts of a rank.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=65535), default_value_t = 32)]
    experts: u32,
    /// Who moves what comes back.
    #[arg(long, value_delimiter = ',', value_enum, default_value = "pull,push")]
    returns: Vec<Way>,
    /// How often ours and the bare loop take turns.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000), default_value_t = 15)]
    rounds: u32,
    /// Steps of a round.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000), default_value_t = 200)]
    steps: u32,
    /// Decides about routes.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Leave the ranks to the scheduler instead of giving each a core.
    #[arg(long)]
    no_pin: bool,
    /// Fewer cases, shorter rounds.
    #[arg(long)]
    quick: bool,
    /// Print JSON, an object per line.
    #[arg(long)]
    json: bool,
    /// Fail if a figure misses its target by more than a factor of two.
    #[arg(long)]
    gate: bool,
}

/// [`Returns`], for the command line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Way {
    /// The owner of a token reads it where it was made.
    Pull,
    /// Who made it writes it to the owner.
    Push,
}

impl Way {
    fn returns(self) -> Returns {
        match self {
            Way::Pull => Returns::Pull,
            Way::Push => Returns::Push,
        }
    }

    fn name(self) -> &'static str {
        match self {
            Way::Pull => "pull",
            Way::Push => "push",
        }
    }
}

/// One line of results: what is the same for all ranks and steps.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Case {
    tokens: u32,
    routes: Routes,
    way: Way,
}

impl Args {
    /// The cases, in the order in which all ranks run them.
    fn cases(&self) -> Vec<Case> {
        let mut cases = Vec::new();
        for &way in &self.returns {
            for &routes in &self.routes {
                cases.extend(self.tokens.iter().map(|&tokens| Case { tokens, routes, way }));
            }
        }
        cases
    }

    fn quickly(mut self) -> Args {
        if self.quick {
            (self.tokens, self.routes) = (vec![1, 32], vec![Routes::Any]);
            (self.rounds, self.steps) = (5, 50);
        }
        self
    }
}

/// The middle of a round's steps on one rank, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
struct Round {
    dispatch: f64,
    work: f64,
    combine: f64,
    bare_dispatch: f64,
    bare_combine: f64,
}

/// What a rank says about a case.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Told {
    rounds: Vec<Round>,
    /// Half of a ping-pong of one cache line; of ranks 0 and 1 only.
    line_ns: Option<f64>,
    futex_calls_per_step: f64,
}

/// Runs the cases.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let args = args.clone().quickly();
    let scratch =
        Scratch::new(&std::env::temp_dir(), "moontide-bench-ep").map_err(io("making a directory"))?;
    let mut ranks = (0..args.ranks)
        .map(|rank| RankProcess::start(&args, rank, &scratch.path().join("world")))
        .collect::<Result<Vec<_>, _>>()?;
    if !args.json {
        println!(
            "{:>6} {:<9} {:<5} {:>9} {:>9} {:>9} {:>9} {:>6} {:>6} {:>9} {:>7} {:>7}",
            "tokens",
            "routes",
            "back",
            "dispatch",
            "combine",
            "bare",
            "step",
            "eta",
            "±",
            "",
            "lines",
            "sleeps"
        );
    }
    for case in args.cases() {
        let told = ranks.iter_mut().map(RankProcess::listen).collect::<Result<Vec<_>, _>>()?;
        report(&args, case, &told);
    }
    for rank in &mut ranks {
        rank.end()?;
    }
    if args.gate { nothing_is_grossly_slow() } else { Ok(()) }
}

/// Prints a case.
fn report(args: &Args, case: Case, told: &[Told]) {
    let slowest = |round: usize, figure: fn(&Round) -> f64| {
        told.iter().map(|told| figure(&told.rounds[round])).fold(0.0, f64::max) / 1e3
    };
    let rounds = 0..told[0].rounds.len();
    let over_rounds =
        |figure: fn(&Round) -> f64| rounds.clone().map(|round| slowest(round, figure)).collect::<Vec<_>>();
    let (dispatch, combine) = (over_rounds(|round| round.dispatch), over_rounds(|round| round.combine));
    let exchange = over_rounds(|round| round.dispatch + round.combine);
    let step = median(over_rounds(|round| round.dispatch + round.work + round.combine));
    let (copies, sums) = (over_rounds(|round| round.bare_dispatch), over_rounds(|round| round.bare_combine));
    let bare: Vec<f64> = copies.iter().zip(&sums).map(|(copy, sum)| copy + sum).collect();
    let etas: Vec<f64> = bare.iter().zip(&exchange).map(|(bare, ours)| bare / ours).collect();
    let eta = median(etas.clone());
    let line_us = told.iter().find_map(|told| told.line_ns).unwrap_or(0.0) / 1e3;
    let lines = (case.tokens == 1 && line_us > 0.0).then(|| median(exchange.clone()) / line_us);
    let sleeps = told.iter().map(|told| told.futex_calls_per_step).sum::<f64>() / told.len() as f64;
    let has_target = case.tokens == 32
        && (args.ranks, args.hidden, args.top_k) == (2, 7168, 8)
        && (case.routes, case.way) == (Routes::Any, Way::Pull);

    let line = Line::new("ep", "exchange")
        .with("ranks", args.ranks)
        .with("tokens", case.tokens)
        .with("routes", case.routes.name())
        .with("returns", case.way.name())
        .with("hidden", args.hidden)
        .with("top_k", args.top_k)
        .number("dispatch_us", median(dispatch.clone()))
        .number("dispatch_us_spread", spread(&dispatch))
        .number("combine_us", median(combine.clone()))
        .number("combine_us_spread", spread(&combine))
        .number("bare_us", median(bare.clone()))
        .number("bare_us_spread", spread(&bare))
        .number("step_us", step)
        .number("eta_spread", spread(&etas))
        .number("line_us", line_us)
        .with("lines", lines.map(f64::round))
        .number("futex_calls_per_step", sleeps);
    // Also when a table is printed: it keeps the count for --gate.
    let line = match has_target {
        true => line.against("eta", eta, ETA_TARGET, true),
        false => line.number("eta", eta),
    };
    if args.json {
        return line.print();
    }
    let met = match (has_target, eta >= ETA_TARGET) {
        (false, _) => "",
        (true, true) => "met",
        (true, false) => "below 0.7",
    };
    println!(
        "{:>6} {:<9} {:<5} {:>9.1} {:>9.1} {:>9.1} {:>9.1} {:>6.2} {:>6.2} {:>9} {:>7} {:>7.2}",
        case.tokens,
        case.routes.name(),
        case.way.name(),
        median(dispatch),
        median(combine),
        median(bare),
        step,
        eta,
        spread(&etas),
        met,
        lines.map_or(String::new(), |lines| format!("{lines:.0}")),
        sleeps,
    );
}

/// A rank that ends with this value.
struct RankProcess {
    child: Child,
    out: BufReader<std::process::ChildStdout>,
}

impl RankProcess {
    fn start(args: &Args, rank: u32, path: &Path) -> Result<RankProcess, BenchError> {
        let program = std::env::current_exe().map_err(io("finding this program"))?;
        let mut command = Command::new(program);
        command.args(["bench", "ep-rank"]).arg("--path").arg(path);
        let list = |words: Vec<String>| words.join(",");
        command.arg(format!("--rank={rank}"));
        command.arg(format!("--ranks={}", args.ranks));
        command.arg(format!("--tokens={}", list(args.tokens.iter().map(u32::to_string).collect())));
        command.arg(format!("--routes={}", list(args.routes.iter().map(|it| it.name().into()).collect())));
        command.arg(format!("--returns={}", list(args.returns.iter().map(|it| it.name().into()).collect())));
        command.arg(format!("--hidden={}", args.hidden)).arg(format!("--top-k={}", args.top_k));
        command.arg(format!("--experts={}", args.experts)).arg(format!("--rounds={}", args.rounds));
        command.arg(format!("--steps={}", args.steps)).arg(format!("--seed={}", args.seed));
        if args.no_pin {
            command.arg("--no-pin");
        }
        // A rank whose standard input ends is no longer wanted.
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(io("starting a rank"))?;
        let out = BufReader::new(child.stdout.take().expect("it is piped"));
        Ok(RankProcess { child, out })
    }

    fn listen(&mut self) -> Result<Told, BenchError> {
        let mut line = String::new();
        self.out.read_line(&mut line).map_err(io("listening to a rank"))?;
        serde_json::from_str(&line).map_err(|_| wrong("a rank ended before it was done"))
    }

    fn end(&mut self) -> Result<(), BenchError> {
        let status = self.child.wait().map_err(io("waiting for a rank"))?;
        if status.success() { Ok(()) } else { Err(wrong(format!("a rank ended with {status}"))) }
    }
}

impl Drop for RankProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
