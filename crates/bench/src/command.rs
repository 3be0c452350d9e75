//! The subcommands of `moontide bench`.

use clap::{ArgMatches, Command, FromArgMatches, Subcommand};

use crate::moves::{drain, fanout, join, rolling};
use crate::results::BenchError;
use crate::{blocks, disk, ep, failover, masters, meta, policies, push, store, trace, transfer};

/// Subcommands.
#[derive(Debug, Subcommand)]
enum Bench {
    /// Master index: memory, lookups, eviction and reports in process; gRPC and frame server on loopback
    #[command(after_help = meta::EXAMPLES)]
    Meta(meta::Args),
    /// Transfers between two processes with every engine, compared with a baseline
    #[command(after_help = transfer::EXAMPLES)]
    Transfer(transfer::Args),
    /// Owner process of `bench transfer`
    #[command(hide = true)]
    TransferOwner(transfer::OwnerArgs),
    /// Reads and writes of a disk tier, compared with `fio`
    #[command(after_help = disk::EXAMPLES)]
    Disk(disk::Args),
    /// Dispatch and combine between local ranks, compared with plain copies
    #[command(after_help = ep::EXAMPLES)]
    Ep(ep::Args),
    /// Rank process of `bench ep`
    #[command(hide = true)]
    EpRank(ep::RankArgs),
    /// Writes of pages into another process's memory, compared with plain copies
    #[command(after_help = push::EXAMPLES)]
    Push(push::Args),
    /// Consumer process of `bench push`
    #[command(hide = true)]
    PushRank(push::RankArgs),
    /// Local objects: zero-copy reads, copies, puts
    #[command(after_help = store::LOCAL_EXAMPLES)]
    Local(store::LocalArgs),
    /// Objects in the memory of another process, over TCP
    #[command(after_help = store::REMOTE_EXAMPLES)]
    Remote(store::RemoteArgs),
    /// What mutual TLS costs: gets, puts and look-ups with and without it, and a bare loop with rustls
    #[command(after_help = store::TLS_EXAMPLES)]
    Tls(store::TlsArgs),
    /// Process of `bench tls` with the bare loop
    #[command(hide = true)]
    TlsServer(store::TlsServerArgs),
    /// Objects on the disk of another process
    #[command(after_help = store::LOAD_EXAMPLES)]
    Load(store::LoadArgs),
    /// Puts while every object is also written to disk, compared with puts alone
    #[command(after_help = store::WRITE_BACK_EXAMPLES)]
    WriteBack(store::WriteBackArgs),
    /// Mixed reads and writes of many callers, also under overload
    #[command(after_help = store::MIXED_EXAMPLES)]
    Mixed(store::MixedArgs),
    /// Paged KV cache: block operations, prefix sharing on a trace, restore of a sequence from the store
    #[command(after_help = blocks::EXAMPLES)]
    Blocks(blocks::Args),
    /// Recovery time after a master is killed and restarted
    #[command(after_help = failover::EXAMPLES)]
    Failover(failover::Args),
    /// A node is emptied while clients get and put, compared with bare sockets
    #[command(after_help = drain::EXAMPLES)]
    Drain(drain::Args),
    /// A node joins full ones while clients get and put, and is filled by moves
    #[command(after_help = join::EXAMPLES)]
    Join(join::Args),
    /// All nodes restart one after the other, each after a drain, while clients get and put
    #[command(after_help = rolling::EXAMPLES)]
    Rolling(rolling::Args),
    /// Clients on four hosts read the same objects, without and with copies of hot objects; needs root
    #[command(after_help = fanout::EXAMPLES)]
    Fanout(fanout::Args),
    /// Client process of `bench fanout`
    #[command(hide = true)]
    FanoutClient(fanout::ClientArgs),
    /// Process of `bench fanout` that reads a metric
    #[command(hide = true)]
    FanoutMetric(fanout::MetricArgs),
    /// One master compared with three; failover and rebalancing when one is killed and one added
    #[command(after_help = masters::EXAMPLES)]
    Masters(masters::Args),
    /// Replay a trace of KV-cache traffic
    #[command(after_help = store::REPLAY_EXAMPLES)]
    Trace(store::ReplayArgs),
    /// Hit rates of eviction policies on a trace: the shipped one, LRU, S3-FIFO, ARC, W-TinyLFU, Belady
    #[command(after_help = policies::EXAMPLES)]
    Policies(policies::Args),
    /// Generate a trace of KV-cache traffic: users, sessions, shared system prompts
    #[command(after_help = trace::GENERATE_EXAMPLES)]
    TraceGen(trace::GenerateArgs),
    /// Convert recorded sessions of coding agents, one file each, to a trace
    #[command(after_help = trace::SESSIONS_EXAMPLES)]
    TraceSessions(trace::SessionsArgs),
    /// Summarize a trace: size, working set, hit rate of an infinite cache
    #[command(after_help = trace::INFO_EXAMPLES)]
    TraceInfo(trace::InfoArgs),
}

/// Returns the definition of the command `bench`.
pub fn command() -> Command {
    let bench = Command::new("bench").about("Run benchmarks").subcommand_required(true);
    Bench::augment_subcommands(bench)
}

/// Runs the benchmark that the arguments of [`command`] select, and prints its results.
pub fn run(matches: &ArgMatches) -> Result<(), BenchError> {
    match Bench::from_arg_matches(matches).map_err(BenchError::Arguments)? {
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
        Bench::Tls(args) => store::tls(&args),
        Bench::TlsServer(args) => store::tls_server(&args),
        Bench::Load(args) => store::load(&args),
        Bench::WriteBack(args) => store::write_back(&args),
        Bench::Mixed(args) => store::mixed(&args),
        Bench::Blocks(args) => blocks::run(&args),
        Bench::Failover(args) => failover::run(&args),
        Bench::Drain(args) => drain::run(&args),
        Bench::Join(args) => join::run(&args),
        Bench::Rolling(args) => rolling::run(&args),
        Bench::Fanout(args) => fanout::run(&args),
        Bench::FanoutClient(args) => fanout::run_client(&args),
        Bench::FanoutMetric(args) => fanout::run_metric(&args),
        Bench::Masters(args) => masters::run(&args),
        Bench::Trace(args) => store::replay(&args),
        Bench::Policies(args) => policies::run(&args),
        Bench::TraceGen(args) => trace::generate(&args),
        Bench::TraceSessions(args) => trace::sessions(&args),
        Bench::TraceInfo(args) => trace::info(&args),
    }
}
