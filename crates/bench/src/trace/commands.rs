//! `moontide bench trace-gen` and `trace-info`: generate and summarize traces.

use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use clap::Args as ClapArgs;

use super::{
    BLOCK_BYTES_DEFAULT, BLOCK_BYTES_MAX, BLOCK_REFERENCES_MAX, BLOCK_TOKENS_DEFAULT, BLOCK_TOKENS_MAX,
    Generator, Header, REQUESTS_MAX, Summary, TraceParams, Writer, open, unread,
};
use crate::results::{BenchError, Progress, io};

pub(crate) const GENERATE_EXAMPLES: &str = "\
Examples:
  moontide bench trace-gen --users 1000 --requests 100000 --seed 1 -o chat.jsonl
  moontide bench trace-gen --users 10 --requests 100 --seed 1 --rate 50 -o - | head
  moontide bench trace-gen --users 200 --requests 10000 --seed 2 --system-prompts 1 --block-tokens 256 -o agents.jsonl

Equal flags and seed give equal files. The summary is one JSON object on standard output, or on standard error if the
trace itself goes to standard output. docs/trace.md describes the format.";

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
    if args.output == Path::new("-") {
        let summary = write(params, header, std::io::stdout().lock())?;
        eprintln!("{}", summary.to_json());
    } else {
        let file = File::create(&args.output).map_err(io("creating the trace"))?;
        print(&write(params, header, file)?)?;
    }
    Ok(())
}

fn write(params: TraceParams, header: Header, out: impl Write) -> Result<Summary, BenchError> {
    let failed = "writing the trace";
    let mut writer = Writer::new(BufWriter::with_capacity(1 << 20, out), header).map_err(io(failed))?;
    let mut summary = Summary::new(header);
    let mut progress = Progress::new("generating requests", params.requests);
    for (done, request) in (1..).zip(Generator::new(params, header)) {
        summary.add(&request);
        if summary.references() > BLOCK_REFERENCES_MAX {
            let what = format!(
                "trace exceeds the limit of {BLOCK_REFERENCES_MAX} blocks after {done} requests; use fewer \
                 requests or larger blocks"
            );
            return Err(BenchError::Wrong(what));
        }
        writer.write(&request).map_err(io(failed))?;
        progress.at(done);
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
