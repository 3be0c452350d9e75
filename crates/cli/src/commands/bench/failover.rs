//! `moontide bench failover`: a master is killed and started again at once; how long until readers and writers go on, and
//! until the index is whole again.
//!
//! ```text
//!   master ── kill -9 ── started again, same directory, same addresses
//!     │                         │
//!     t = 0                     nodes come back, tell what they hold ──▶ first hit ──▶ first put ──▶ 99 % ──▶ all
//! ```
//!
//! Times count from just before the signal. A hit is a get by a caller who remembers no places and maps no memory: it has to
//! ask the new master. Callers who remember places, or read memory of their host, need no master for what they know; for
//! them the longest time between two hits is told.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::{PutItem, PutOptions, Store, StoreConfig};
use moontide_meta::Rng;
use rustix::process::{Pid, Signal, kill_process};

use super::figures::{BenchError, Line, Progress, io, median, nothing_is_grossly_slow, spread};
use super::transfer::wrong;
use crate::scratch::Scratch;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench failover                                 a million objects, five kills: 2 GiB, half a minute
  moontide bench failover --objects 100000 --repeats 2    the same in some seconds
  moontide bench failover --nodes 4

Every result is one JSON object per line on standard output: one per kill, then a summary. Seconds count from the kill.
  serving_s      the new master has opened its doors
  sessions_s     all nodes have a session with it
  first_hit_s    the first get of a caller who remembers nothing and has to ask the master
  first_put_s    the first object that was stored
  indexed_99_s   the new master knows 99 % of the objects
  indexed_all_s  it knows all
  gap_far_s      longest time between two hits of a caller who remembers places
  gap_near_s     the same of a caller that reads memory of its host
  target, met    what we aim for at a million objects on two cores, for the slowest of the kills";

/// How it is measured.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Objects that are stored when the master is killed.
    #[arg(long, default_value_t = 1_000_000, value_parser = clap::value_parser!(u64).range(1000..=100_000_000))]
    objects: u64,
    /// Bytes of each.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u64).range(16..=65536))]
    bytes: u64,
    /// Nodes that hold them.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..=64))]
    nodes: u16,
    /// Groups that share them.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    groups: u16,
    /// How often the master is killed.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: u16,
    /// The master's setting of the same name: how long it gives out no memory that its predecessor may have promised to
    /// one-sided readers, of whom there are none here.
    #[arg(long, default_value_t = 0)]
    reallocate_wait_ms: u32,
    /// Decides which keys are asked for.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fail if a figure misses its target by more than a factor of two.
    #[arg(long)]
    gate: bool,
}

/// Objects of one batch while the cluster is filled.
const BATCH: u64 = 1000;
/// Callers that fill it: enough to keep two cores busy.
const FILLERS: u64 = 4;
/// Whatever is waited for has happened by then, or the benchmark fails.
const SOON: Duration = Duration::from_secs(120);
/// How long a process may take to end by itself.
const END_WAIT: Duration = Duration::from_secs(10);
/// How often the master's page is read while it learns everything again. Reading costs it a tenth of this at most.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Quiet time before each kill, in which callers show that all is well.
const CALM: Duration = Duration::from_millis(500);
/// What a single call may take. Short: a caller that gives up asks again.
const CALL: Duration = Duration::from_millis(500);

/// Targets, for a million objects.
const FIRST_HIT_S: f64 = 3.0;
const INDEXED_99_S: f64 = 5.0;

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let scratch =
        Scratch::new(&std::env::temp_dir(), "moontide-failover").map_err(io("making a directory"))?;
    let mut scene = Scene::start(args, scratch.path())?;
    scene.fill(args)?;
    let mut kills = Vec::with_capacity(args.repeats.into());
    for repeat in 0..args.repeats {
        eprintln!("kill {} of {} …", repeat + 1, args.repeats);
        let kill = scene.kill_master(args, repeat)?;
        kill.print(args, repeat);
        kills.push(kill);
    }
    summary(args, &kills);
    if args.gate { nothing_is_grossly_slow() } else { Ok(()) }
}

/// What came of one kill, in seconds after it.
#[derive(Clone, Debug, Default)]
struct Kill {
    serving: f64,
    sessions: f64,
    first_hit: f64,
    first_put: f64,
    indexed_99: f64,
    indexed_all: f64,
    gap_far: f64,
    gap_near: f64,
    /// Of all keys, asked for at the end.
    found: f64,
}

impl Kill {
    fn print(&self, args: &Args, repeat: u16) {
        Line::new("failover", "master_kill")
            .with("objects", args.objects)
            .with("nodes", args.nodes)
            .with("repeat", repeat)
            .number("serving_s", self.serving)
            .number("sessions_s", self.sessions)
            .number("first_hit_s", self.first_hit)
            .number("first_put_s", self.first_put)
            .number("indexed_99_s", self.indexed_99)
            .number("indexed_all_s", self.indexed_all)
            .number("gap_far_s", self.gap_far)
            .number("gap_near_s", self.gap_near)
            .number("found_share", self.found)
            .print();
    }
}

fn summary(args: &Args, kills: &[Kill]) {
    let of = |figure: fn(&Kill) -> f64| -> Vec<f64> { kills.iter().map(figure).collect() };
    let cases: [(&str, Vec<f64>, Option<f64>); 4] = [
        ("first_hit", of(|kill| kill.first_hit), Some(FIRST_HIT_S)),
        ("first_put", of(|kill| kill.first_put), None),
        ("indexed_99", of(|kill| kill.indexed_99), Some(INDEXED_99_S)),
        ("indexed_all", of(|kill| kill.indexed_all), None),
    ];
    for (case, figures, target) in cases {
        let worst = figures.iter().copied().fold(0.0, f64::max);
        let line = Line::new("failover", case)
            .with("objects", args.objects)
            .with("nodes", args.nodes)
            .with("kills", kills.len())
            .number("median_s", median(figures.clone()))
            .number("spread", spread(&figures));
        match target {
            Some(target) => line.against("worst_s", worst, target, false),
            None => line.number("worst_s", worst),
        }
        .print();
    }
}

// ------------------------------------------------------------------------------------------------------- processes

/// A process of this program. Ended with this value.
#[derive(Debug)]
struct Process {
    child: Child,
    out: BufReader<ChildStdout>,
}

impl Process {
    /// Starts it and takes its lines up to one that begins like this.
    fn start(words: &[String], last: &str) -> Result<Process, BenchError> {
        let program = std::env::current_exe().map_err(io("finding this program"))?;
        let mut command = Command::new(program);
        // A group of its own: a signal from the terminal ends the benchmark, which then ends its processes.
        command.args(words).stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
        command.env("MOONTIDE_LOG", std::env::var("MOONTIDE_LOG").unwrap_or_else(|_| "error".into()));
        let mut child = command.spawn().map_err(io("starting a process"))?;
        let out = BufReader::new(child.stdout.take().expect("it is piped"));
        let mut process = Process { child, out };
        loop {
            let mut line = String::new();
            let count = process.out.read_line(&mut line).map_err(io("reading a process's output"))?;
            if count == 0 {
                return Err(wrong(format!("a process ended before it said {last:?}; its error is above")));
            }
            if line.starts_with(last) {
                return Ok(process);
            }
        }
    }

    /// Ends it without a word.
    fn kill(&mut self) -> Result<(), BenchError> {
        self.child.kill().map_err(io("killing the master"))?;
        self.child.wait().map(drop).map_err(io("waiting for the master's end"))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = kill_process(Pid::from_child(&self.child), Signal::TERM);
        let end = Instant::now() + END_WAIT;
        while Instant::now() < end {
            if !matches!(self.child.try_wait(), Ok(None)) {
                return;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A free port of loopback that the kernel gives to nobody by itself: the master must find it free again.
fn free_address(taken: &mut Vec<u16>) -> Result<String, BenchError> {
    // Below those that the kernel gives away, which begin at 32768.
    let first = 12_000 + std::process::id() % 10_000;
    for port in (first..32_000).map(|port| port as u16) {
        if !taken.contains(&port) && TcpListener::bind(("127.0.0.1", port)).is_ok() {
            taken.push(port);
            return Ok(format!("127.0.0.1:{port}"));
        }
    }
    Err(wrong("no port below 32000 is free"))
}

// ----------------------------------------------------------------------------------------------------------- scene

/// The processes and the callers.
#[derive(Debug)]
struct Scene {
    /// Callers first: they hold memory of the nodes.
    asking: Store,
    remembering: Store,
    near: Store,
    putting: Store,
    _nodes: Vec<Process>,
    /// None between a kill and the start that follows.
    master: Option<Process>,
    master_words: Vec<String>,
    admin: String,
}

impl Scene {
    fn start(args: &Args, dir: &Path) -> Result<Scene, BenchError> {
        let mut taken = vec![];
        let [grpc, frame, admin] =
            [free_address(&mut taken)?, free_address(&mut taken)?, free_address(&mut taken)?];
        let master_words: Vec<String> = [
            "master",
            "--grpc-listen",
            &grpc,
            "--frame-listen",
            &frame,
            "--admin-listen",
            &admin,
            "--groups",
            &args.groups.to_string(),
            "--reallocate-wait-ms",
            &args.reallocate_wait_ms.to_string(),
            "--data-dir",
            &dir.join("master").display().to_string(),
        ]
        .map(str::to_owned)
        .into();
        let master = Process::start(&master_words, "admin ")?;
        // An object takes its payload and some 64 bytes of digests and key, in units of 512 bytes. Twice that, so that
        // nothing is evicted although groups fill unevenly; as many slots as units.
        let object_bytes = (args.bytes + 64).next_multiple_of(512).max(1024);
        let node_bytes =
            (2 * args.objects * object_bytes / u64::from(args.nodes)).max(u64::from(args.groups) * (4 << 20));
        eprintln!("a master and {} node(s) of {} MiB …", args.nodes, node_bytes >> 20);
        let mut nodes = vec![];
        for number in 0..args.nodes {
            let door = dir.join(format!("node-{number}.sock")).display().to_string();
            let words = [
                "node",
                "--master",
                &grpc,
                "--memory-bytes",
                &node_bytes.to_string(),
                "--slot-bytes",
                &object_bytes.to_string(),
                "--door",
                &door,
            ];
            nodes.push(Process::start(&words.map(str::to_owned), "ready")?);
        }
        let store = |change: fn(&mut StoreConfig)| {
            let mut config = StoreConfig { deadline: CALL, ..StoreConfig::new(&grpc) };
            change(&mut config);
            Store::connect(config).map_err(wrong)
        };
        Ok(Scene {
            asking: store(|config| (config.local, config.locations) = (false, 0))?,
            remembering: store(|config| config.local = false)?,
            near: store(|_| ())?,
            putting: store(|config| config.local = false)?,
            _nodes: nodes,
            master: Some(master),
            master_words,
            admin,
        })
    }

    /// Stores all objects.
    fn fill(&self, args: &Args) -> Result<(), BenchError> {
        let mut progress = Progress::new(format!("{} objects", args.objects), args.objects);
        let (next, done, failed) = (AtomicU64::new(0), AtomicU64::new(0), Mutex::new(None));
        let fill = || -> Result<(), BenchError> {
            let config = StoreConfig { deadline: Duration::from_secs(20), ..StoreConfig::new(self.grpc()) };
            let store = Store::connect(config).map_err(wrong)?;
            loop {
                let from = next.fetch_add(BATCH, Ordering::Relaxed);
                if from >= args.objects || failed.lock().expect("no holder panics").is_some() {
                    return Ok(());
                }
                let objects: Vec<(String, Vec<u8>)> = (from..(from + BATCH).min(args.objects))
                    .map(|number| (key(number), content(number, args.bytes)))
                    .collect();
                let parts: Vec<[&[u8]; 1]> = objects.iter().map(|(_, bytes)| [&bytes[..]]).collect();
                let items: Vec<PutItem<'_>> = objects
                    .iter()
                    .zip(&parts)
                    .map(|((key, _), parts)| PutItem { key: key.as_bytes(), parts })
                    .collect();
                for outcome in store.put_batch(&items, &PutOptions::default()) {
                    outcome.map_err(wrong)?;
                }
                done.fetch_add(items.len() as u64, Ordering::Relaxed);
            }
        };
        std::thread::scope(|scope| {
            let fillers: Vec<_> = (0..FILLERS)
                .map(|_| {
                    scope.spawn(|| {
                        if let Err(error) = fill() {
                            failed.lock().expect("no holder panics").get_or_insert(error);
                        }
                    })
                })
                .collect();
            while fillers.iter().any(|filler| !filler.is_finished()) {
                progress.at(done.load(Ordering::Relaxed));
                std::thread::sleep(Duration::from_millis(50));
            }
        });
        if let Some(error) = failed.into_inner().expect("no holder panics") {
            return Err(error);
        }
        let known = self.page()?.stored_objects;
        if known < args.objects {
            return Err(wrong(format!("{known} of {} objects are there: too little memory", args.objects)));
        }
        Ok(())
    }

    fn grpc(&self) -> &str {
        &self.master_words[2]
    }

    fn page(&self) -> Result<Page, BenchError> {
        let bytes = crate::http::get(&self.admin, "/metrics", CALL).map_err(wrong)?;
        Ok(Page::read(&String::from_utf8_lossy(&bytes)))
    }

    /// Kills the master, starts it again, and waits until it knows everything.
    fn kill_master(&mut self, args: &Args, repeat: u16) -> Result<Kill, BenchError> {
        let (stop, seed) = (AtomicBool::new(false), args.seed + 10 * u64::from(repeat));
        let [asking, remembering, near] =
            [Reader::new(&self.asking), Reader::new(&self.remembering), Reader::new(&self.near)];
        let putter = Putter::new(&self.putting);
        // What a caller remembers has to be asked for once.
        for number in 0..REMEMBERED.min(args.objects) {
            self.remembering.get(key(number).as_bytes()).map_err(wrong)?;
        }
        std::thread::scope(|scope| {
            let _stop = StopAtEnd(&stop);
            scope.spawn(|| asking.run(&stop, args.objects, args.bytes, seed));
            scope.spawn(|| remembering.run(&stop, REMEMBERED.min(args.objects), args.bytes, seed + 1));
            scope.spawn(|| near.run(&stop, args.objects, args.bytes, seed + 2));
            scope.spawn(|| putter.run(&stop, repeat, args.bytes));
            std::thread::sleep(CALM);
            // Those of the putter included; what it stores later is a thousandth of all.
            let all = self.page()?.stored_objects;

            let killed_at = Instant::now();
            let mut master = self.master.take().expect("a master runs");
            master.kill()?;
            drop(master);
            self.master = Some(Process::start(&self.master_words, "admin ")?);
            let mut kill = Kill { serving: killed_at.elapsed().as_secs_f64(), ..Kill::default() };
            let end = killed_at + SOON;
            while kill.indexed_all == 0.0 {
                if Instant::now() > end {
                    return Err(wrong(format!("the master has not learned everything within {SOON:?}")));
                }
                // The page is of this moment or an earlier one; the time is taken after it was read.
                if let Ok(page) = self.page() {
                    let now = killed_at.elapsed().as_secs_f64();
                    let first = |figure: &mut f64, is_so: bool| {
                        if *figure == 0.0 && is_so {
                            *figure = now;
                        }
                    };
                    first(&mut kill.sessions, page.open_sessions == u64::from(args.nodes));
                    first(&mut kill.indexed_99, page.stored_objects >= all / 100 * 99);
                    first(&mut kill.indexed_all, page.stored_objects >= all);
                }
                std::thread::sleep(LOOK_EVERY);
            }
            kill.first_hit = first_after(&asking.hits, killed_at, end, "a get")?;
            kill.first_put = first_after(&putter.stored, killed_at, end, "a put")?;
            std::thread::sleep(CALM);
            kill.gap_far = longest_gap(&remembering.hits);
            kill.gap_near = longest_gap(&near.hits);
            for reader in [&asking, &remembering, &near] {
                if let Some(what) = reader.wrong.lock().expect("no holder panics").take() {
                    return Err(wrong(what));
                }
            }
            kill.found = self.found(args)?;
            Ok(kill)
        })
    }

    /// The share of all keys that the master knows, each of them asked for.
    fn found(&self, args: &Args) -> Result<f64, BenchError> {
        let mut found = 0;
        for from in (0..args.objects).step_by(BATCH as usize) {
            let keys: Vec<String> = (from..(from + BATCH).min(args.objects)).map(key).collect();
            let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
            let there = self.asking.exists_batch(&keys).map_err(wrong)?;
            found += there.iter().filter(|there| **there).count();
        }
        Ok(found as f64 / args.objects as f64)
    }
}

fn key(number: u64) -> String {
    format!("failover-{number:09}")
}

/// An object's bytes follow from its number.
fn content(number: u64, len: u64) -> Vec<u8> {
    let mut rng = Rng::new(number);
    let mut bytes = Vec::with_capacity(len as usize + 8);
    while (bytes.len() as u64) < len {
        bytes.extend_from_slice(&rng.next_u64().to_le_bytes());
    }
    bytes.truncate(len as usize);
    bytes
}

/// The two numbers of the master's page that are watched.
#[derive(Debug)]
struct Page {
    stored_objects: u64,
    open_sessions: u64,
}

impl Page {
    fn read(text: &str) -> Page {
        let number = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
            line.and_then(|value| value.parse().ok()).unwrap_or(0)
        };
        Page {
            stored_objects: number("moontide_master_stored_objects"),
            open_sessions: number("moontide_master_open_sessions"),
        }
    }
}

// --------------------------------------------------------------------------------------------------------- callers

/// Keys whose places a caller remembers: fewer than it has room for.
const REMEMBERED: u64 = 10_000;

/// When calls went well: began, ended.
type Moments = Mutex<Vec<(Instant, Instant)>>;

/// Gets random objects and notes when it had them.
struct Reader {
    store: Store,
    hits: Moments,
    wrong: Mutex<Option<String>>,
}

impl Reader {
    fn new(store: &Store) -> Reader {
        Reader { store: store.clone(), hits: Mutex::default(), wrong: Mutex::default() }
    }

    fn run(&self, stop: &AtomicBool, objects: u64, bytes: u64, seed: u64) {
        let mut rng = Rng::new(seed);
        while !stop.load(Ordering::Relaxed) {
            let number = rng.below(objects as usize) as u64;
            let began = Instant::now();
            if let Ok(Some(got)) = self.store.get(key(number).as_bytes()) {
                self.hits.lock().expect("no holder panics").push((began, Instant::now()));
                if got[..] != content(number, bytes)[..] {
                    let what = format!("{} came with wrong bytes", key(number));
                    self.wrong.lock().expect("no holder panics").get_or_insert(what);
                    return;
                }
            }
            // A pace at which readers leave the machine to what is measured.
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

/// Puts new objects and notes when they were stored.
struct Putter {
    store: Store,
    stored: Moments,
}

impl Putter {
    fn new(store: &Store) -> Putter {
        Putter { store: store.clone(), stored: Mutex::default() }
    }

    fn run(&self, stop: &AtomicBool, repeat: u16, bytes: u64) {
        let mut number = 0u64;
        while !stop.load(Ordering::Relaxed) {
            let key = format!("put-{repeat}-{number}");
            let began = Instant::now();
            if self.store.put(key.as_bytes(), &content(number, bytes)).is_ok() {
                self.stored.lock().expect("no holder panics").push((began, Instant::now()));
            }
            number += 1;
            std::thread::sleep(Duration::from_millis(5));
        }
        // Nothing of it stays: only what was filled in is counted.
        for number in 0..number {
            let _ = self.store.remove(format!("put-{repeat}-{number}").as_bytes(), true);
        }
    }
}

/// When the first call ended well that began after a moment, in seconds after it.
fn first_after(
    moments: &Moments,
    moment: Instant,
    end: Instant,
    what: &'static str,
) -> Result<f64, BenchError> {
    loop {
        let moments = moments.lock().expect("no holder panics");
        if let Some((_, ended)) = moments.iter().find(|(began, _)| *began > moment) {
            return Ok((*ended - moment).as_secs_f64());
        }
        drop(moments);
        if Instant::now() > end {
            return Err(wrong(format!("not {what} has succeeded within {SOON:?} after the kill")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The longest time between two calls that ended well.
fn longest_gap(moments: &Moments) -> f64 {
    let moments = moments.lock().expect("no holder panics");
    let gaps = moments.windows(2).map(|pair| (pair[1].1 - pair[0].1).as_secs_f64());
    gaps.fold(0.0, f64::max)
}

/// Tells callers to stop, also where a measurement fails: a scope waits for its threads.
struct StopAtEnd<'a>(&'a AtomicBool);

impl Drop for StopAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
