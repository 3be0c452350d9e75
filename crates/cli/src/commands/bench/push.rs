//! `moontide bench push`: pages that one process writes straight into another one's memory, beside a bare copy of them.
//!
//! Two ranks: this process is the producer, and runs the master; a child is the consumer, in whose memory objects go. Each
//! object is reserved, copied page by page, flagged, seen by the consumer, committed and later removed. Copies of the same
//! pages into memory of the same kind that no store knows take turns with it.

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::{Counted, Cut, Hop, Store, StoreConfig, Ticket, Wait};
use moontide_heap::{HugePages, Protection, Rank, Region, World, WorldConfig, WorldShape};
use moontide_master::{MasterConfig, Server};
use moontide_node::{LentMemory, Node, NodeConfig};
use moontide_types::{Clock, SystemClock};

use super::figures::{BenchError, Line, Percentiles, Progress, io, median, nothing_is_grossly_slow, spread};
use super::transfer::wrong;
use crate::scratch::Scratch;

pub(super) const EXAMPLES: &str = "\
Examples:
  moontide bench push                    pages of 128, 256 and 512 KiB, objects of 8 MiB: ten seconds
  moontide bench push --object-mib 64 --page-kib 256
  moontide bench push --quick            rough figures

Every result is one JSON object per line on standard output, one for each size of pages:
  ratio        bare / ours: time to copy an object's pages into the other rank's memory and to raise the flag, beside the
               same copies without any of it; the middle over the rounds, and the spread over them
  push_us      reserving, copying, flagging and committing: the whole put, p50 and p99
  open_us      reserving alone: a call to the master and one to the node
  seen_us      from the raised flag until the other process has seen it, p50 and p99";

const PATIENCE: Duration = Duration::from_secs(30);
/// Objects that are there at a time: more bytes than caches hold.
const LIVE: usize = 8;
const SLOT_BYTES: u64 = 64 << 10;
/// What a page at 256 KiB is to reach.
const TARGET: f64 = 0.9;

/// How it is measured.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Sizes of a page.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1 << 20), default_value = "128,256,512")]
    page_kib: Vec<u64>,
    /// Size of an object.
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1024), default_value_t = 8)]
    object_mib: u64,
    /// How often ours and the bare copies take turns.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000), default_value_t = 15)]
    rounds: u32,
    /// Objects of a round.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000), default_value_t = 20)]
    objects: u32,
    /// Fewer rounds.
    #[arg(long)]
    quick: bool,
    /// Fail if a figure misses its target by more than a factor of two.
    #[arg(long)]
    gate: bool,
}

/// What the consumer is told.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct RankArgs {
    #[arg(long)]
    path: PathBuf,
    #[arg(long)]
    master: String,
    #[arg(long)]
    memory_bytes: u64,
}

/// Runs the producer.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let mut args = args.clone();
    if args.quick {
        (args.rounds, args.objects) = (5, 5);
    }
    let bytes = args.object_mib << 20;
    // Room for what is there at a time, in each group's segment, and for what is being given back.
    let memory_bytes = (bytes * (LIVE as u64 + 4) * 2).max(64 << 20);
    let scratch =
        Scratch::new(&std::env::temp_dir(), "moontide-bench-push").map_err(io("making a directory"))?;
    let server = Server::start(MasterConfig {
        grpc_listen: "127.0.0.1:0".parse().expect("an address"),
        frame_listen: "127.0.0.1:0".parse().expect("an address"),
        admin_listen: "127.0.0.1:0".parse().expect("an address"),
        groups: 1,
        reallocate_wait_ms: 0,
        ..MasterConfig::default()
    })
    .map_err(wrong)?;
    let master = server.addresses().grpc.to_string();
    let path = scratch.path().join("world");
    let mut consumer = Consumer::start(&path, &master, memory_bytes)?;
    let (hop, _node) = join(&path, &master, Rank(0), memory_bytes)?;
    let source: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    let bare = Region::create(
        "moontide-bare",
        (bytes * LIVE as u64).next_multiple_of(4096),
        HugePages::IfAllowed,
        Protection::AllWrite,
    )
    .map_err(wrong)?;
    for &page_kib in &args.page_kib {
        measure(&args, page_kib << 10, &hop, &mut consumer, &source, &bare)?;
    }
    if args.gate { nothing_is_grossly_slow() } else { Ok(()) }
}

/// Joins the world with a node in the rank's memory.
fn join(
    path: &std::path::Path,
    master: &str,
    rank: Rank,
    memory_bytes: u64,
) -> Result<(Hop, Node), BenchError> {
    let shape = WorldShape { ranks: 2, bytes: Hop::region_bytes(memory_bytes, SLOT_BYTES) };
    let config =
        WorldConfig { path: path.to_owned(), rank, shape, huge: HugePages::IfAllowed, timeout: PATIENCE };
    // SAFETY: both ranks are this program, and use their regions by `Hop` alone.
    let world = Arc::new(unsafe { World::join(&config) }.map_err(wrong)?);
    // SAFETY: as above.
    let memory = unsafe { LentMemory::new(Arc::clone(&world), 0, memory_bytes) };
    let config = NodeConfig {
        master: master.to_owned(),
        memory_bytes,
        slot_bytes: SLOT_BYTES,
        listen: vec!["127.0.0.1:0".parse().expect("an address")],
        admin_listen: None,
        ..NodeConfig::default()
    };
    let node = Node::start_in(config, memory).map_err(wrong)?;
    if !node.wait_until_mounted(PATIENCE) {
        return Err(wrong("the master does not take the node in"));
    }
    let plan = node.segments();
    let own = Cut { node: node.id(), segments: plan.count, segment_bytes: plan.bytes(), slots: plan.slots };
    let store = Store::connect(StoreConfig::new(master)).map_err(wrong)?;
    // SAFETY: as above.
    let hop = unsafe { Hop::open(world, store, memory_bytes, own, PATIENCE) }.map_err(wrong)?;
    Ok((hop, node))
}

/// Of copies alone, round by round; of whole puts and their parts, in nanoseconds.
#[derive(Default)]
struct Times {
    ratios: Vec<f64>,
    ours_gb_per_s: Vec<f64>,
    bare_gb_per_s: Vec<f64>,
    puts: Vec<u32>,
    opens: Vec<u32>,
    seen: Vec<u32>,
}

fn measure(
    args: &Args,
    page_bytes: u64,
    hop: &Hop,
    consumer: &mut Consumer,
    source: &[u8],
    bare: &Region,
) -> Result<(), BenchError> {
    let mut times = Times::default();
    let mut live: Vec<String> = Vec::new();
    let mut progress = Progress::new(format!("pages of {} KiB", page_bytes >> 10), args.rounds.into());
    let nanos = |took: Duration| took.as_nanos() as u32;
    // The first rounds find memory that nobody has touched: they do not count.
    let warm = (LIVE as u32 * 2).div_ceil(args.objects).max(2);
    for round in 0..args.rounds + warm {
        let (mut ours, mut theirs) = (Duration::ZERO, Duration::ZERO);
        for object in 0..args.objects {
            let key = format!("push-{page_bytes}-{round}-{object}");
            let begun = Instant::now();
            let push = hop
                .open_for_write(key.as_bytes(), source.len() as u64, page_bytes, Some(Rank(1)))
                .map_err(wrong)?;
            let opened = begun.elapsed();
            consumer.expect(push.ticket())?;
            let copying = Instant::now();
            let mut last = Counted::More;
            for (page, bytes) in (0..).zip(source.chunks(page_bytes as usize)) {
                last = push.write_page(page, bytes).map_err(wrong)?;
            }
            let raised = SystemClock.now();
            let copied = copying.elapsed();
            if last != Counted::Complete {
                return Err(wrong(format!("the last page has not completed {key}: {last:?}")));
            }
            let seen = consumer.seen()?;
            let committing = Instant::now();
            push.commit().map_err(wrong)?;
            let put = opened + copied + committing.elapsed();
            live.push(key);
            if live.len() > LIVE {
                hop.store().remove(live.remove(0).as_bytes(), true).map_err(wrong)?;
            }

            let copying = Instant::now();
            copy_bare(source, page_bytes as usize, bare, object as usize % LIVE);
            theirs += copying.elapsed();
            ours += copied;
            if round >= warm {
                times.puts.push(nanos(put));
                times.opens.push(nanos(opened));
                times.seen.push(seen.saturating_sub(raised.0) as u32);
            }
        }
        if round >= warm {
            let bytes = source.len() as f64 * f64::from(args.objects) / 1e9;
            times.ratios.push(theirs.as_secs_f64() / ours.as_secs_f64());
            times.ours_gb_per_s.push(bytes / ours.as_secs_f64());
            times.bare_gb_per_s.push(bytes / theirs.as_secs_f64());
            progress.at(u64::from(round - warm));
        }
    }
    for key in live {
        hop.store().remove(key.as_bytes(), true).map_err(wrong)?;
    }
    let ratio = median(times.ratios.clone());
    let [puts, opens, seen] = [times.puts, times.opens, times.seen].map(Percentiles::new);
    let line = Line::new("push", "pages")
        .with("page_kib", page_bytes >> 10)
        .with("object_mib", args.object_mib)
        .number("ratio_spread", spread(&times.ratios))
        .number("gb_per_s", median(times.ours_gb_per_s))
        .number("bare_gb_per_s", median(times.bare_gb_per_s))
        .number("push_us_p50", puts.micros(0.5))
        .number("push_us_p99", puts.micros(0.99))
        .number("open_us_p50", opens.micros(0.5))
        .number("seen_us_p50", seen.micros(0.5))
        .number("seen_us_p99", seen.micros(0.99));
    if page_bytes == 256 << 10 {
        line.against("ratio", ratio, TARGET, true).print();
    } else {
        line.number("ratio", ratio).print();
    }
    Ok(())
}

fn copy_bare(source: &[u8], page_bytes: usize, bare: &Region, place: usize) {
    let start = place * source.len();
    assert!(start + source.len() <= bare.len() as usize);
    for (page, bytes) in source.chunks(page_bytes).enumerate() {
        // SAFETY: inside of the region, which nobody else has.
        unsafe {
            let to = bare.base().as_ptr().add(start + page * page_bytes);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }
}

/// The child, from the producer's side. It ends with this value.
struct Consumer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Consumer {
    fn start(path: &std::path::Path, master: &str, memory_bytes: u64) -> Result<Consumer, BenchError> {
        let program = std::env::current_exe().map_err(io("finding this program"))?;
        let mut child = Command::new(program)
            .args(["bench", "push-rank"])
            .arg("--path")
            .arg(path)
            .args([format!("--master={master}"), format!("--memory-bytes={memory_bytes}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(io("starting the consumer"))?;
        let to = child.stdin.take().expect("it is piped");
        let from = BufReader::new(child.stdout.take().expect("it is piped"));
        Ok(Consumer { child, to, from })
    }

    fn say(&mut self, line: &str) -> Result<(), BenchError> {
        writeln!(self.to, "{line}").map_err(io("telling the consumer"))
    }

    fn hear(&mut self) -> Result<String, BenchError> {
        let mut line = String::new();
        self.from.read_line(&mut line).map_err(io("listening to the consumer"))?;
        if line.is_empty() { Err(wrong("the consumer has ended")) } else { Ok(line.trim().to_owned()) }
    }

    /// Until it waits for this one.
    fn expect(&mut self, ticket: Ticket) -> Result<(), BenchError> {
        self.say(&ticket.words().map(|word| word.to_string()).join(" "))?;
        match &*self.hear()? {
            "waiting" => Ok(()),
            other => Err(wrong(format!("the consumer says {other:?}"))),
        }
    }

    /// When it saw the flag, by the clock of all processes.
    fn seen(&mut self) -> Result<u64, BenchError> {
        let said = self.hear()?;
        said.parse().map_err(|_| wrong(format!("the consumer says {said:?}")))
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ticket_of(line: &str) -> Option<Ticket> {
    let words: Vec<u64> = line.split(' ').map(|word| word.parse().ok()).collect::<Option<_>>()?;
    Ticket::from_words(words.try_into().ok()?)
}

/// Runs the consumer: waits for what it is told to, says when it saw it, and looks whether it is right. Ends with its
/// standard input.
pub(super) fn run_rank(args: &RankArgs) -> Result<(), BenchError> {
    let (hop, _node) = join(&args.path, &args.master, Rank(1), args.memory_bytes)?;
    for line in std::io::stdin().lines() {
        let line = line.map_err(io("listening to the producer"))?;
        let ticket = ticket_of(&line).ok_or_else(|| wrong(format!("no ticket: {line:?}")))?;
        let Some(awaited) = hop.expect(ticket).map_err(wrong)? else {
            return Err(wrong("what is to be waited for has ended"));
        };
        println!("waiting");
        let Wait::Arrived(arrived) = awaited.wait(PATIENCE).map_err(wrong)? else {
            return Err(wrong("it has not come"));
        };
        let seen = SystemClock.now();
        let bytes = arrived.bytes().ok_or_else(|| wrong("it is not in memory of the host"))?;
        let is_right = bytes.iter().zip((0..251u8).cycle()).step_by(4093).all(|(got, made)| *got == made)
            && bytes.last() == Some(&(((ticket.bytes - 1) % 251) as u8));
        if !is_right {
            return Err(wrong("other bytes have come than were sent"));
        }
        drop(arrived);
        println!("{}", seen.0);
    }
    Ok(())
}
