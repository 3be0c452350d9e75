//! `moontide bench`: figures that anyone can repeat, as JSON lines.
//!
//! Progress goes to standard error, one JSON object per result to standard output; `disk` and `ep` print a
//! table unless they are told to print JSON. Every figure that the machine limits stands beside the bare limit measured in the same run.

mod blocks;
mod disk;
mod ep;
mod failover;
mod figures;
mod masters;
mod meta;
mod push;
mod store;
mod trace;
mod transfer;

use clap::{ArgMatches, Command, FromArgMatches, Subcommand};

use super::Failure;

/// What is measured.
#[derive(Debug, Subcommand)]
enum Bench {
    /// The master's index: memory, lookups, eviction and reports in process; both doors on loopback
    #[command(after_help = meta::EXAMPLES)]
    Meta(meta::Args),
    /// Bytes between two processes: every engine beside the bare limit
    #[command(after_help = transfer::EXAMPLES)]
    Transfer(transfer::Args),
    /// The process whose memory `bench transfer` reads and writes
    #[command(hide = true)]
    TransferOwner(transfer::OwnerArgs),
    /// Records on an SSD: reads and writes of a disk tier beside `fio`
    #[command(after_help = disk::EXAMPLES)]
    Disk(disk::Args),
    /// Tokens to experts and back, between processes of this host, beside the bare copies
    #[command(after_help = ep::EXAMPLES)]
    Ep(ep::Args),
    /// A rank of `bench ep`
    #[command(hide = true)]
    EpRank(ep::RankArgs),
    /// Pages written straight into another process's memory, beside the bare copies
    #[command(after_help = push::EXAMPLES)]
    Push(push::Args),
    /// The consumer of `bench push`
    #[command(hide = true)]
    PushRank(push::RankArgs),
    /// Objects in memory of this host: in place, copied, put
    #[command(after_help = store::LOCAL_EXAMPLES)]
    Local(store::LocalArgs),
    /// Objects in another process's memory, over TCP
    #[command(after_help = store::REMOTE_EXAMPLES)]
    Remote(store::RemoteArgs),
    /// Objects on another process's disk, over TCP
    #[command(after_help = store::LOAD_EXAMPLES)]
    Load(store::LoadArgs),
    /// Many callers who read and write; also more than can be served
    #[command(after_help = store::MIXED_EXAMPLES)]
    Mixed(store::MixedArgs),
    /// The engine's own paged cache: operations, sharing on a trace, a sequence from the store
    #[command(after_help = blocks::EXAMPLES)]
    Blocks(blocks::Args),
    /// A master that is killed and started again: how long until everything goes on
    #[command(after_help = failover::EXAMPLES)]
    Failover(failover::Args),
    /// One master beside three that share the groups; one of them is killed, another one added
    #[command(after_help = masters::EXAMPLES)]
    Masters(masters::Args),
    /// Replay a trace of KV-cache traffic
    #[command(after_help = store::REPLAY_EXAMPLES)]
    Trace(store::ReplayArgs),
    /// Make a trace of KV-cache traffic: users, conversations, shared system prompts
    #[command(after_help = trace::GENERATE_EXAMPLES)]
    TraceGen(trace::GenerateArgs),
    /// Sum up a trace: its size, its working set, what an infinite cache would make of it
    #[command(after_help = trace::INFO_EXAMPLES)]
    TraceInfo(trace::InfoArgs),
}

pub(crate) fn command() -> Command {
    let bench =
        Command::new("bench").about("Measure, and print results as JSON lines").subcommand_required(true);
    Bench::augment_subcommands(bench)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let bench = Bench::from_arg_matches(matches).map_err(Failure::usage)?;
    let measured = match bench {
        Bench::Meta(args) => meta::run(&args),
        Bench::Transfer(args) => transfer::run(&args),
        Bench::TransferOwner(args) => transfer::run_owner(&args),
        Bench::Disk(args) => disk::run(&args),
        Bench::Ep(args) => ep::run(&args),
        Bench::EpRank(args) => ep::run_rank(&args),
        Bench::Push(args) => push::run(&args),
        Bench::PushRank(args) => push::run_rank(&args),
        Bench::Local(args) => store::local(&args),
        Bench::Remote(args) => store::remote(&args),
        Bench::Load(args) => store::load(&args),
        Bench::Mixed(args) => store::mixed(&args),
        Bench::Blocks(args) => blocks::run(&args),
        Bench::Failover(args) => failover::run(&args),
        Bench::Masters(args) => masters::run(&args),
        Bench::Trace(args) => store::replay(&args),
        Bench::TraceGen(args) => trace::generate(&args),
        Bench::TraceInfo(args) => trace::info(&args),
    };
    measured.map_err(Failure::failed)
}
