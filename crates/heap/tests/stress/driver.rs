//! Driver: starts all processes, kills and stops them at random, collects counters, and checks them at the end.

use std::collections::{BTreeMap, HashMap};
use std::io::{BufRead, BufReader, PipeWriter, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use moontide_types::MonoTime;
use rustix::process::{Pid, Signal, kill_process};

use crate::clients::WRONG;
use crate::common::now;
use crate::payload::Rng;
use crate::wire::{Kind, Role};

const WRITERS: usize = 3;
const READERS: usize = 4;

/// Time in which everything that a dead process held is freed, in 99 of 100 cases.
const FREE_P99_MAX: Duration = Duration::from_secs(1);
/// The same in all cases: a busy machine may let the owner's process wait for some seconds.
const FREE_MAX: Duration = Duration::from_secs(5);

/// Range of the pause between kills: 220 of them take less than half a minute.
const KILL_EVERY_MS: (u64, u64) = (40, 180);
const STOP_EVERY_MS: (u64, u64) = (20, 120);
const STOP_FOR_MS: (u64, u64) = (50, 1500);

/// Maximum number of stopped processes: the others must write, read and reclaim.
const STOPPED_MAX: usize = 3;

/// Time limit for the detection of the mutation.
const DETECTION_MAX: Duration = Duration::from_secs(15);

/// Runs without a mutation: no error occurs, and the run covers enough cases.
pub fn stress_passes() {
    let kills = from_environment("MOONTIDE_STRESS_KILLS").unwrap_or(220);
    let mutation = std::env::var("MOONTIDE_STRESS_MUTATION").is_ok_and(|name| name == "forget-living");
    let mut stress = Stress::start(mutation);
    let started = Instant::now();
    while stress.kills < kills {
        stress.step();
        assert!(stress.wrong.is_empty(), "seed {}: wrong bytes: {:#?}", stress.seed, stress.wrong);
    }
    let duration = started.elapsed();
    stress.finish();
    stress.check(duration);
}

/// With the mutation in the owner, a client must see wrong bytes.
pub fn mutation_is_detected() {
    let mut stress = Stress::start(true);
    let started = Instant::now();
    // Other errors may come first, such as a commit whose digests do not lead to its root.
    let detected = loop {
        if let Some(detected) = stress.wrong.iter().find(|wrong| wrong.contains("bytes differ")) {
            break detected;
        }
        assert!(started.elapsed() < DETECTION_MAX, "seed {}: mutation was not detected", stress.seed);
        stress.step();
    };
    println!("mutation detected after {:.1?} and {} kills: {detected}", started.elapsed(), stress.kills);
}

fn from_environment(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

/// Event of a child process.
enum Event {
    /// A line of a client.
    Client(String),
    /// A line of the owner.
    Owner(String),
    /// The owner closed its end of the control socket.
    OwnerClosed,
}

/// A process that is killed with its value.
struct Process(Child);

impl Process {
    fn start(role: &Role, stdin: Stdio, stdout: Stdio) -> Process {
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command.args(role.arguments()).stdin(stdin).stdout(stdout);
        Process(command.spawn().expect("a child"))
    }

    fn id(&self) -> u32 {
        self.0.id()
    }

    fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.id() as i32).expect("a process number");
        kill_process(pid, signal).expect("a child that was not waited for");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

struct ClientProcess {
    kind: Kind,
    process: Process,
    connected: bool,
    /// Time at which it was stopped, and at which it is resumed.
    stopped: Option<(MonoTime, MonoTime)>,
}

struct Stress {
    seed: u64,
    rng: Rng,
    clients: Vec<ClientProcess>,
    owner: Process,
    control: UnixStream,
    socket: PathBuf,
    pipe: PipeWriter,
    events: Receiver<Event>,
    next_kill: MonoTime,
    next_stop: MonoTime,
    // Counters.
    kills: u64,
    kills_of_stopped: u64,
    kills_of_newcomers: u64,
    stops: u64,
    stopped_survived: u64,
    /// Process id → time of its kill, until the owner reports that everything is free.
    killed: HashMap<u32, MonoTime>,
    free_times: Vec<Duration>,
    /// Process id → times at which it was stopped and resumed.
    pauses: HashMap<u32, Vec<(MonoTime, MonoTime)>>,
    counters: BTreeMap<String, u64>,
    wrong: Vec<String>,
    clean: bool,
}

impl Stress {
    fn start(mutation: bool) -> Stress {
        let seed = from_environment("MOONTIDE_SEED").unwrap_or_else(|| now().0);
        println!("MOONTIDE_SEED={seed}");
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let role = Role::Owner { parent: std::process::id(), mutation };
        let owner = Process::start(&role, OwnedFd::from(theirs).into(), Stdio::null());
        let (from_children, pipe) = std::io::pipe().expect("a pipe");
        let (sender, events) = channel();
        let control = ours.try_clone().expect("a descriptor");
        forward_lines(sender.clone(), from_children, Event::Client, None);
        forward_lines(sender, ours, Event::Owner, Some(Event::OwnerClosed));
        let socket = match events.recv_timeout(Duration::from_secs(10)) {
            Ok(Event::Owner(line)) => line.strip_prefix("socket ").expect("the socket comes first").into(),
            _ => panic!("the owner did not start"),
        };
        let mut stress = Stress {
            seed,
            rng: Rng::new(seed),
            clients: Vec::new(),
            owner,
            control,
            socket,
            pipe,
            events,
            next_kill: now().after(Duration::from_millis(300)),
            next_stop: now(),
            kills: 0,
            kills_of_stopped: 0,
            kills_of_newcomers: 0,
            stops: 0,
            stopped_survived: 0,
            killed: HashMap::new(),
            free_times: Vec::new(),
            pauses: HashMap::new(),
            counters: BTreeMap::new(),
            wrong: Vec::new(),
            clean: false,
        };
        let kinds = [Kind::Writer; WRITERS].into_iter().chain([Kind::Reader; READERS]);
        for kind in kinds.chain([Kind::Reclaimer]) {
            let client = stress.new_client(kind);
            stress.clients.push(client);
        }
        stress
    }

    fn new_client(&mut self, kind: Kind) -> ClientProcess {
        let socket = self.socket.clone();
        let role = Role::Client { parent: std::process::id(), kind, socket, seed: self.rng.next() };
        let pipe = self.pipe.try_clone().expect("a descriptor");
        ClientProcess {
            kind,
            process: Process::start(&role, Stdio::null(), pipe.into()),
            connected: false,
            stopped: None,
        }
    }

    /// Waits for the next event or action that is due, and handles it.
    fn step(&mut self) {
        let resumes = self.clients.iter().filter_map(|client| client.stopped).map(|(_, until)| until);
        let due = resumes.chain([self.next_kill, self.next_stop]).min().expect("at least two");
        match self.events.recv_timeout(due.since(now())) {
            Ok(event) => self.handle(event),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => panic!("both reader threads ended"),
        }
        if due <= now() {
            self.act(now());
        }
    }

    fn act(&mut self, time: MonoTime) {
        for at in 0..self.clients.len() {
            if self.clients[at].stopped.is_some_and(|(_, until)| until <= time) {
                self.resume(at);
            }
            self.replace_if_exited(at);
        }
        if self.next_stop <= time {
            self.next_stop = time.after(self.millis(STOP_EVERY_MS));
            self.stop_one();
        }
        if self.next_kill <= time {
            self.next_kill = time.after(self.millis(KILL_EVERY_MS));
            self.kill_one();
        }
        for (pid, killed) in &self.killed {
            let waited = now().since(*killed);
            assert!(
                waited < 3 * FREE_MAX,
                "process {pid} was killed {waited:?} ago, and its memory is not free"
            );
        }
    }

    fn millis(&mut self, (first, last): (u64, u64)) -> Duration {
        Duration::from_millis(self.rng.between(first, last))
    }

    /// Chooses one of the clients for which `condition` is true.
    fn choose(&mut self, condition: impl Fn(&ClientProcess) -> bool) -> Option<usize> {
        let fitting: Vec<usize> =
            (0..self.clients.len()).filter(|&at| condition(&self.clients[at])).collect();
        let count = fitting.len() as u64;
        (count > 0).then(|| fitting[self.rng.below(count) as usize])
    }

    fn stop_one(&mut self) {
        let stopped = self.clients.iter().filter(|client| client.stopped.is_some()).count();
        let condition = |client: &ClientProcess| client.stopped.is_none() && client.kind != Kind::Reclaimer;
        if stopped < STOPPED_MAX
            && let Some(at) = self.choose(condition)
        {
            self.stop(at);
        }
    }

    fn stop(&mut self, at: usize) {
        let pause = self.millis(STOP_FOR_MS);
        let client = &mut self.clients[at];
        client.process.signal(Signal::STOP);
        let time = now();
        client.stopped = Some((time, time.after(pause)));
        self.stops += 1;
    }

    fn resume(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let (since, _) = client.stopped.take().expect("it is stopped");
        let pid = client.process.id();
        self.pauses.entry(pid).or_default().push((since, now()));
        client.process.signal(Signal::CONT);
    }

    /// One kill in twenty hits a stopped process; one new process in ten is killed while it connects, another one is
    /// stopped then.
    fn kill_one(&mut self) {
        let stopped = self.rng.percent(5);
        let chosen = self.choose(|client| client.stopped.is_some() == stopped);
        let Some(at) = chosen.or_else(|| self.choose(|client| client.stopped.is_none())) else { return };
        self.kill(at);
        let chance = self.rng.below(10);
        if chance < 2 {
            // About as long as a child takes from its start to its first request.
            std::thread::sleep(Duration::from_micros(self.rng.below(12_000)));
            if chance == 0 { self.kill(at) } else { self.stop(at) }
        }
    }

    fn kill(&mut self, at: usize) {
        let client = &mut self.clients[at];
        let (pid, time) = (client.process.id(), now());
        client.process.signal(Signal::KILL);
        client.process.0.wait().expect("a child");
        self.kills += 1;
        self.kills_of_stopped += u64::from(client.stopped.is_some());
        if client.connected {
            self.killed.insert(pid, time);
        } else {
            // It may not have connected at all; the final check shows whether anything of it is left.
            self.kills_of_newcomers += 1;
        }
        let kind = client.kind;
        self.clients[at] = self.new_client(kind);
    }

    /// Replaces a client that exited by itself: it has reported an error, or is broken.
    fn replace_if_exited(&mut self, at: usize) {
        let ClientProcess { kind, process, .. } = &mut self.clients[at];
        let Some(status) = process.0.try_wait().expect("a child") else { return };
        let pid = process.id();
        if status.code() != Some(WRONG) {
            self.wrong.push(format!("{kind:?} {pid} exited by itself: {status}"));
        }
        let kind = *kind;
        self.clients[at] = self.new_client(kind);
    }

    fn handle(&mut self, event: Event) {
        match event {
            Event::Client(line) => self.handle_client_line(&line),
            Event::Owner(line) => self.handle_owner_line(&line),
            Event::OwnerClosed if self.clean => {}
            Event::OwnerClosed => panic!("seed {}: the owner exited; its error is above", self.seed),
        }
    }

    fn handle_client_line(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["connected", pid] => {
                let pid = number(pid) as u32;
                let connected = self.clients.iter_mut().find(|client| client.process.id() == pid);
                connected.into_iter().for_each(|client| client.connected = true);
            }
            ["counters", ref counts @ ..] => self.count(counts),
            ["survived", pid, acquired, checked] => {
                let (acquired, checked) = (MonoTime(number(acquired)), MonoTime(number(checked)));
                let pauses = self.pauses.get(&(number(pid) as u32)).map_or(&[][..], Vec::as_slice);
                let inside = |&(from, to): &(MonoTime, MonoTime)| acquired < from && to < checked;
                self.stopped_survived += u64::from(pauses.iter().any(inside));
            }
            ["wrong", pid, ref text @ ..] => self.wrong.push(format!("process {pid}: {}", text.join(" "))),
            _ => panic!("unexpected line of a client: {line:?}"),
        }
    }

    fn handle_owner_line(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["freed", pid, at] => {
                if let Some(killed) = self.killed.remove(&(number(pid) as u32)) {
                    self.free_times.push(MonoTime(number(at)).since(killed));
                }
            }
            ["clean", ref counts @ ..] => {
                self.count(counts);
                self.clean = true;
            }
            _ => panic!("unexpected line of the owner: {line:?}"),
        }
    }

    fn count(&mut self, counts: &[&str]) {
        for count in counts.iter().filter(|count| !count.is_empty()) {
            let (name, count) = count.split_once('=').expect("name=count");
            *self.counters.entry(name.to_string()).or_default() += number(count);
        }
    }

    /// Kills all clients, and waits until the owner has checked that nothing is left.
    fn finish(&mut self) {
        self.clients.clear();
        writeln!(self.control, "finish").expect("the owner");
        let deadline = Instant::now() + Duration::from_secs(15);
        while !self.clean {
            let left = deadline.saturating_duration_since(Instant::now());
            let event =
                self.events.recv_timeout(left).expect("timed out waiting for the owner's final check");
            self.handle(event);
        }
        assert!(self.owner.0.wait().expect("a child").success());
        assert!(self.wrong.is_empty(), "seed {}: {:#?}", self.seed, self.wrong);
        assert!(self.killed.is_empty(), "memory of killed processes was not freed: {:?}", self.killed);
    }

    /// Prints the counters, and fails a run that covers too little.
    fn check(mut self, duration: Duration) {
        self.free_times.sort();
        let at = |part: f64| self.free_times[((self.free_times.len() - 1) as f64 * part) as usize];
        println!(
            "{} kills ({} of stopped processes, {} of newcomers), {} stops in {duration:.1?}",
            self.kills, self.kills_of_stopped, self.kills_of_newcomers, self.stops
        );
        println!("free after a kill: p50 {:.1?}, p99 {:.1?}, max {:.1?}", at(0.5), at(0.99), at(1.0));
        println!("guards of stopped processes checked after their object's kill: {}", self.stopped_survived);
        println!("{:?}", self.counters);
        let of = |name: &str| self.counters.get(name).copied().unwrap_or(0);
        assert!(
            at(0.99) <= FREE_P99_MAX,
            "seed {}: 1 % of the dead held memory for {:?}",
            self.seed,
            at(0.99)
        );
        assert!(at(1.0) <= FREE_MAX, "seed {}: a dead process held memory for {:?}", self.seed, at(1.0));
        let enough = [
            ("hits", of("hits"), 10_000),
            ("rechecks", of("rechecks"), 2_000),
            ("reused", of("reused"), 1_000),
            ("rechecks_dead", of("rechecks_dead"), 100),
            ("stopped_survived", self.stopped_survived, 1),
            ("commits_late", of("commits_late"), 1),
            ("claims_refused", of("claims_refused"), 1),
            ("dead_claims", of("dead_claims"), 1),
            ("dead_pins", of("dead_pins"), 1),
            ("begins_refused", of("begins_refused"), 1),
            ("kills_of_stopped", self.kills_of_stopped, 1),
            ("kills_of_newcomers", self.kills_of_newcomers, 1),
        ];
        for (name, count, least) in enough {
            assert!(count >= least, "seed {}: only {count} {name}: the run covers too little", self.seed);
        }
        assert_eq!(of("closed"), 0, "the owner sent no heartbeat for seconds");
    }
}

impl Drop for Stress {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

fn number(word: &str) -> u64 {
    word.parse().unwrap_or_else(|_| panic!("{word:?} is not a number"))
}

/// Turns lines into events until the other end is closed.
fn forward_lines(
    sender: Sender<Event>,
    from: impl std::io::Read + Send + 'static,
    event: fn(String) -> Event,
    end: Option<Event>,
) {
    std::thread::spawn(move || {
        for line in BufReader::new(from).lines().map_while(Result::ok) {
            if sender.send(event(line)).is_err() {
                return;
            }
        }
        end.map(|end| sender.send(end));
    });
}
