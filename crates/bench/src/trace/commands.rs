//! `moontide bench trace-gen`, `trace-sessions` and `trace-info`: generate, convert and summarize traces.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args as ClapArgs;
use moontide_rt::SplitMix64;

use super::session_files::{SessionFiles, SessionOptions};
use super::{
    BLOCK_BYTES_DEFAULT, BLOCK_BYTES_MAX, BLOCK_REFERENCES_MAX, BLOCK_TOKENS_DEFAULT, BLOCK_TOKENS_MAX,
    Generator, Header, REQUESTS_MAX, Request, Summary, TraceParams, Writer, default_block_bytes, open,
    unread,
};
use crate::results::{BenchError, Progress, io};

pub(crate) const GENERATE_EXAMPLES: &str = "\
Examples:
  moontide bench trace-gen --users 1000 --requests 100000 --seed 1 -o chat.jsonl
  moontide bench trace-gen --users 10 --requests 100 --seed 1 --rate 50 -o - | head
  moontide bench trace-gen --users 200 --requests 10000 --seed 2 --system-prompts 1 --block-tokens 256 -o agents.jsonl

Equal flags and seed give equal files. The summary is one JSON object on standard output, or on standard error if the
trace itself goes to standard output. docs/trace.md describes the format.";

pub(crate) const SESSIONS_EXAMPLES: &str = "\
Examples:
  moontide bench trace-sessions traces/*.json --seed 1 -o agents.jsonl
  moontide bench trace-sessions traces/*.json --sessions 200 --within 4h --longest 6h --no-agents --seed 1 -o chats.jsonl

The files are those of callanjfox/kv-cache-tester. Each has the requests of one session, with times since its start. The
sessions begin at random times. Equal flags and seed give equal files. docs/trace.md describes the format.";

pub(crate) const INFO_EXAMPLES: &str = "\
Examples:
  moontide bench trace-info chat.jsonl
  moontide bench trace-info conversation_trace.jsonl     a public Mooncake trace, with 512 tokens per block
  moontide bench trace-info requests.jsonl.gz            a trace of Dynamo, compressed

  blocks, bytes                        of all requests, with repetitions
  distinct_blocks, working_set_bytes   without repetitions: final size of an infinite cache
  ideal_hit_rate                       share of the blocks that an infinite cache would hit";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct GenerateArgs {
    /// Number of users
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    users: u32,
    /// Number of requests
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=REQUESTS_MAX))]
    requests: u64,
    /// Seed of the random numbers
    #[arg(long)]
    seed: u64,
    /// Zipf exponent of users and system prompts; 0 for a uniform distribution
    #[arg(long, default_value_t = 1.1, value_parser = zipf)]
    zipf: f64,
    /// Number of system prompts
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    system_prompts: u32,
    /// Requests per second of all users
    #[arg(long, default_value_t = 10.0, value_parser = rate)]
    rate: f64,
    /// Probability that a session ends after a turn
    #[arg(long, default_value_t = 0.2, value_parser = share)]
    end: f64,
    /// Tokens per block
    #[arg(long, default_value_t = BLOCK_TOKENS_DEFAULT, value_parser = clap::value_parser!(u32).range(1..=i64::from(BLOCK_TOKENS_MAX)))]
    block_tokens: u32,
    /// Bytes per block
    #[arg(long, default_value_t = BLOCK_BYTES_DEFAULT, value_parser = clap::value_parser!(u64).range(1..=BLOCK_BYTES_MAX))]
    block_bytes: u64,
    /// Output file; - for standard output
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct SessionsArgs {
    /// Files of sessions
    #[arg(required = true)]
    files: Vec<PathBuf>,
    /// Number of sessions, drawn at random [default: all]
    #[arg(long)]
    sessions: Option<usize>,
    /// Seed of the random numbers
    #[arg(long)]
    seed: u64,
    /// Time within which the sessions begin
    #[arg(long, value_name = "TIME", value_parser = moontide_settings::parse_duration, default_value = "4h")]
    within: Duration,
    /// Time after which the rest of a session is left out
    #[arg(long, value_name = "TIME", value_parser = moontide_settings::parse_duration, default_value = "6h")]
    longest: Duration,
    /// Leave out the agents that a session starts
    #[arg(long)]
    no_agents: bool,
    /// Tokens per block: a multiple of those of the files
    #[arg(long, default_value_t = BLOCK_TOKENS_DEFAULT, value_parser = clap::value_parser!(u32).range(1..=i64::from(BLOCK_TOKENS_MAX)))]
    block_tokens: u32,
    /// Output file; - for standard output
    #[arg(short, long, value_name = "FILE")]
    output: PathBuf,
}

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct InfoArgs {
    /// Trace of Moontide, Mooncake, Bailian or Dynamo; gzip and zstd are recognized
    file: PathBuf,
}

/// Generates a trace and prints its summary.
pub(crate) fn generate(args: &GenerateArgs) -> Result<(), BenchError> {
    let header = Header { block_bytes: args.block_bytes, block_tokens: args.block_tokens, seed: args.seed };
    let params = TraceParams {
        users: args.users,
        requests: args.requests,
        zipf: args.zipf,
        system_prompts: args.system_prompts,
        rate: args.rate,
        end: args.end,
    };
    let requests = Generator::new(params, header).map(Ok);
    write_to(&args.output, header, Some(Progress::new("generating requests", params.requests)), requests)
}

/// Converts recorded sessions to a trace and prints its summary.
pub(crate) fn sessions(args: &SessionsArgs) -> Result<(), BenchError> {
    let mut random = SplitMix64::new(args.seed);
    let mut files = args.files.clone();
    // The order of the arguments must not matter, nor the directory that they are in.
    files.sort_by(|one, other| one.file_name().cmp(&other.file_name()));
    for taken in 0..files.len() {
        let rest = files.len() - taken;
        files.swap(taken, taken + random.below(rest as u64) as usize);
    }
    files.truncate(args.sessions.unwrap_or(usize::MAX));
    let within_us = (args.within.as_micros() as u64).max(1);
    let starts: Vec<_> = files.into_iter().map(|file| (random.below(within_us), file)).collect();
    let options = SessionOptions {
        block_tokens: args.block_tokens,
        longest_us: args.longest.as_micros() as u64,
        agents: !args.no_agents,
    };
    let requests = SessionFiles::new(starts, options)?;
    let header = Header {
        block_bytes: default_block_bytes(args.block_tokens),
        block_tokens: args.block_tokens,
        seed: args.seed,
    };
    write_to(&args.output, header, None, requests)
}

/// Writes a trace and prints its summary.
fn write_to(
    output: &Path,
    header: Header,
    progress: Option<Progress>,
    requests: impl Iterator<Item = Result<Request, BenchError>>,
) -> Result<(), BenchError> {
    if output == Path::new("-") {
        let summary = write(requests, header, progress, std::io::stdout().lock())?;
        eprintln!("{}", summary.to_json());
    } else {
        let file = File::create(output).map_err(io("creating the trace"))?;
        print(&write(requests, header, progress, file)?)?;
    }
    Ok(())
}

fn write(
    requests: impl Iterator<Item = Result<Request, BenchError>>,
    header: Header,
    mut progress: Option<Progress>,
    out: impl Write,
) -> Result<Summary, BenchError> {
    let failed = "writing the trace";
    let mut writer = Writer::new(BufWriter::with_capacity(1 << 20, out), header).map_err(io(failed))?;
    let mut summary = Summary::new(header);
    for (done, request) in (1..).zip(requests) {
        let request = request?;
        summary.add(&request);
        if summary.references() > BLOCK_REFERENCES_MAX {
            let what = format!(
                "trace exceeds the limit of {BLOCK_REFERENCES_MAX} blocks after {done} requests; use fewer \
                 requests or larger blocks"
            );
            return Err(BenchError::Wrong(what));
        }
        writer.write(&request).map_err(io(failed))?;
        progress.iter_mut().for_each(|progress| progress.at(done));
    }
    writer.finish().map_err(io(failed))?;
    Ok(summary)
}

/// Prints the summary of a trace.
pub(crate) fn info(args: &InfoArgs) -> Result<(), BenchError> {
    let reader = open(&args.file)?;
    let mut summary = Summary::new(reader.header());
    for request in reader {
        summary.add(&request.map_err(unread(&args.file))?);
    }
    print(&summary)
}

fn print(summary: &Summary) -> Result<(), BenchError> {
    writeln!(std::io::stdout(), "{}", summary.to_json()).map_err(io("writing the summary"))
}

fn zipf(text: &str) -> Result<f64, String> {
    number(text, 0.0, 10.0)
}

fn rate(text: &str) -> Result<f64, String> {
    number(text, 0.001, 1e6)
}

fn share(text: &str) -> Result<f64, String> {
    number(text, 0.0, 1.0)
}

fn number(text: &str, from: f64, to: f64) -> Result<f64, String> {
    let number = text.parse::<f64>().ok().filter(|number| (from..=to).contains(number));
    number.ok_or_else(|| format!("not a number from {from} to {to}"))
}
