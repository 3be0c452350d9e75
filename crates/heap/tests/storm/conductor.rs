//! The conductor: starts everyone, kills and stops at random, keeps the score, and judges it at the end.

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
use crate::payload::Dice;
use crate::wire::{Kind, Role};

const WRITERS: usize = 3;
const READERS: usize = 4;

/// "Everything a dead process held is free within 1 s."
const FREE_MAX: Duration = Duration::from_secs(1);

/// Mean pause between kills: 220 of them in less than half a minute.
const KILL_EVERY_MS: (u64, u64) = (40, 180);
const STOP_EVERY_MS: (u64, u64) = (20, 120);
const STOP_FOR_MS: (u64, u64) = (50, 1500);

/// So many stand still at most: somebody must write, read and press.
const STOPPED_MAX: usize = 3;

/// How long the planted bug may stay unseen.
const PLANTED_MAX: Duration = Duration::from_secs(15);

/// The real thing: nothing goes wrong, and the storm was one.
pub fn storm_holds() {
    let kills = from_environment("MOONTIDE_STORM_KILLS").unwrap_or(220);
    let plant = std::env::var("MOONTIDE_STORM_PLANT").is_ok_and(|bug| bug == "forget-living");
    let mut storm = Storm::start(plant);
    let started = Instant::now();
    while storm.kills < kills {
        storm.step();
        assert!(storm.wrong.is_empty(), "seed {}: wrong bytes: {:#?}", storm.seed, storm.wrong);
    }
    let lasted = started.elapsed();
    storm.finish();
    storm.judge(lasted);
}

/// With a bug in the owner, somebody must see wrong bytes.
pub fn planted_bug_is_seen() {
    let mut storm = Storm::start(true);
    let started = Instant::now();
    // Other complaints may come first, such as a commit whose digests do not lead to its root.
    let seen = loop {
        if let Some(seen) = storm.wrong.iter().find(|wrong| wrong.contains("bytes differ")) {
            break seen;
        }
        assert!(started.elapsed() < PLANTED_MAX, "seed {}: the planted bug stayed unseen", storm.seed);
        storm.step();
    };
    println!("planted bug seen after {:.1?} and {} kills: {seen}", started.elapsed(), storm.kills);
}

fn from_environment(name: &str) -> Option<u64> {
    let value = std::env::var(name).ok()?;
    Some(value.parse().unwrap_or_else(|_| panic!("{name}={value} is not a number")))
}

/// What reaches the conductor.
enum Event {
    /// A line of some client.
    Said(String),
    /// A line of the owner.
    Owner(String),
    /// The owner's end of the control socket is closed.
    OwnerGone,
}

/// A process that does not outlive its value.
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

struct Player {
    kind: Kind,
    process: Process,
    joined: bool,
    /// When it was stopped, and when it goes on.
    stopped: Option<(MonoTime, MonoTime)>,
}

struct Storm {
    seed: u64,
    dice: Dice,
    players: Vec<Player>,
    owner: Process,
    control: UnixStream,
    door: PathBuf,
    pipe: PipeWriter,
    events: Receiver<Event>,
    next_kill: MonoTime,
    next_stop: MonoTime,
    // The score.
    kills: u64,
    kills_of_stopped: u64,
    kills_of_newcomers: u64,
    stops: u64,
    stopped_survived: u64,
    /// Process → when it was killed, until the owner says that it is gone.
    dying: HashMap<u32, MonoTime>,
    free_times: Vec<Duration>,
    /// Process → when it stood still.
    pauses: HashMap<u32, Vec<(MonoTime, MonoTime)>>,
    tally: BTreeMap<String, u64>,
    wrong: Vec<String>,
    clean: bool,
}

impl Storm {
    fn start(plant: bool) -> Storm {
        let seed = from_environment("MOONTIDE_SEED").unwrap_or_else(|| now().0);
        println!("MOONTIDE_SEED={seed}");
        let (ours, theirs) = UnixStream::pair().expect("a socket pair");
        let role = Role::Owner { parent: std::process::id(), plant };
        let owner = Process::start(&role, OwnedFd::from(theirs).into(), Stdio::null());
        let (from_children, pipe) = std::io::pipe().expect("a pipe");
        let (sender, events) = channel();
        let control = ours.try_clone().expect("a descriptor");
        listen(sender.clone(), from_children, Event::Said, None);
        listen(sender, ours, Event::Owner, Some(Event::OwnerGone));
        let door = match events.recv_timeout(Duration::from_secs(10)) {
            Ok(Event::Owner(line)) => line.strip_prefix("door ").expect("the door comes first").into(),
            _ => panic!("the owner did not start"),
        };
        let mut storm = Storm {
            seed,
            dice: Dice::new(seed),
            players: Vec::new(),
            owner,
            control,
            door,
            pipe,
            events,
            next_kill: now().after(Duration::from_millis(300)),
            next_stop: now(),
            kills: 0,
            kills_of_stopped: 0,
            kills_of_newcomers: 0,
            stops: 0,
            stopped_survived: 0,
            dying: HashMap::new(),
            free_times: Vec::new(),
            pauses: HashMap::new(),
            tally: BTreeMap::new(),
            wrong: Vec::new(),
            clean: false,
        };
        let kinds = [Kind::Writer; WRITERS].into_iter().chain([Kind::Reader; READERS]);
        for kind in kinds.chain([Kind::Reclaimer]) {
            let player = storm.new_player(kind);
            storm.players.push(player);
        }
        storm
    }

    fn new_player(&mut self, kind: Kind) -> Player {
        let door = self.door.clone();
        let role = Role::Client { parent: std::process::id(), kind, door, seed: self.dice.next() };
        let pipe = self.pipe.try_clone().expect("a descriptor");
        Player {
            kind,
            process: Process::start(&role, Stdio::null(), pipe.into()),
            joined: false,
            stopped: None,
        }
    }

    /// Waits for the next thing that is due or said, and does it.
    fn step(&mut self) {
        let resumes = self.players.iter().filter_map(|player| player.stopped).map(|(_, until)| until);
        let due = resumes.chain([self.next_kill, self.next_stop]).min().expect("at least two");
        match self.events.recv_timeout(due.since(now())) {
            Ok(event) => self.hear(event),
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => panic!("both listeners ended"),
        }
        if due <= now() {
            self.act(now());
        }
    }

    fn act(&mut self, time: MonoTime) {
        for at in 0..self.players.len() {
            if self.players[at].stopped.is_some_and(|(_, until)| until <= time) {
                self.resume(at);
            }
            self.notice_end(at);
        }
        if self.next_stop <= time {
            self.next_stop = time.after(self.millis(STOP_EVERY_MS));
            self.stop_one();
        }
        if self.next_kill <= time {
            self.next_kill = time.after(self.millis(KILL_EVERY_MS));
            self.kill_one();
        }
        for (pid, killed) in &self.dying {
            let waited = now().since(*killed);
            assert!(waited < 3 * FREE_MAX, "process {pid} was killed {waited:?} ago and is not gone");
        }
    }

    fn millis(&mut self, (first, last): (u64, u64)) -> Duration {
        Duration::from_millis(self.dice.between(first, last))
    }

    /// One of the players that `wanted` holds for.
    fn choose(&mut self, wanted: impl Fn(&Player) -> bool) -> Option<usize> {
        let fitting: Vec<usize> = (0..self.players.len()).filter(|&at| wanted(&self.players[at])).collect();
        let count = fitting.len() as u64;
        (count > 0).then(|| fitting[self.dice.below(count) as usize])
    }

    fn stop_one(&mut self) {
        let stopped = self.players.iter().filter(|player| player.stopped.is_some()).count();
        let wanted = |player: &Player| player.stopped.is_none() && player.kind != Kind::Reclaimer;
        if stopped < STOPPED_MAX
            && let Some(at) = self.choose(wanted)
        {
            self.stop(at);
        }
    }

    fn stop(&mut self, at: usize) {
        let pause = self.millis(STOP_FOR_MS);
        let player = &mut self.players[at];
        player.process.signal(Signal::STOP);
        let time = now();
        player.stopped = Some((time, time.after(pause)));
        self.stops += 1;
    }

    fn resume(&mut self, at: usize) {
        let player = &mut self.players[at];
        let (since, _) = player.stopped.take().expect("it is stopped");
        let pid = player.process.id();
        self.pauses.entry(pid).or_default().push((since, now()));
        player.process.signal(Signal::CONT);
    }

    /// One kill in twenty hits a process that stands still; one newcomer in ten is hit on the doorstep, another
    /// one stopped there.
    fn kill_one(&mut self) {
        let stopped = self.dice.percent(5);
        let chosen = self.choose(|player| player.stopped.is_some() == stopped);
        let Some(at) = chosen.or_else(|| self.choose(|player| player.stopped.is_none())) else { return };
        self.kill(at);
        let startled = self.dice.below(10);
        if startled < 2 {
            // About as long as a child takes from its start to its first request.
            std::thread::sleep(Duration::from_micros(self.dice.below(12_000)));
            if startled == 0 { self.kill(at) } else { self.stop(at) }
        }
    }

    fn kill(&mut self, at: usize) {
        let player = &mut self.players[at];
        let (pid, time) = (player.process.id(), now());
        player.process.signal(Signal::KILL);
        player.process.0.wait().expect("a child");
        self.kills += 1;
        self.kills_of_stopped += u64::from(player.stopped.is_some());
        if player.joined {
            self.dying.insert(pid, time);
        } else {
            // It may not have been let in at all; that nothing of it is left shows at the end.
            self.kills_of_newcomers += 1;
        }
        let kind = player.kind;
        self.players[at] = self.new_player(kind);
    }

    /// A player that ended by itself has something to say, or is broken.
    fn notice_end(&mut self, at: usize) {
        let Player { kind, process, .. } = &mut self.players[at];
        let Some(status) = process.0.try_wait().expect("a child") else { return };
        let pid = process.id();
        if status.code() != Some(WRONG) {
            self.wrong.push(format!("{kind:?} {pid} ended by itself: {status}"));
        }
        let kind = *kind;
        self.players[at] = self.new_player(kind);
    }

    fn hear(&mut self, event: Event) {
        match event {
            Event::Said(line) => self.hear_client(&line),
            Event::Owner(line) => self.hear_owner(&line),
            Event::OwnerGone if self.clean => {}
            Event::OwnerGone => panic!("seed {}: the owner ended; its words are above", self.seed),
        }
    }

    fn hear_client(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["joined", pid] => {
                let pid = number(pid) as u32;
                let joined = self.players.iter_mut().find(|player| player.process.id() == pid);
                joined.into_iter().for_each(|player| player.joined = true);
            }
            ["tally", ref counts @ ..] => self.count(counts),
            ["survived", pid, acquired, checked] => {
                let (acquired, checked) = (MonoTime(number(acquired)), MonoTime(number(checked)));
                let pauses = self.pauses.get(&(number(pid) as u32)).map_or(&[][..], Vec::as_slice);
                let inside = |&(from, to): &(MonoTime, MonoTime)| acquired < from && to < checked;
                self.stopped_survived += u64::from(pauses.iter().any(inside));
            }
            ["wrong", pid, ref text @ ..] => self.wrong.push(format!("process {pid}: {}", text.join(" "))),
            _ => panic!("a client says {line:?}"),
        }
    }

    fn hear_owner(&mut self, line: &str) {
        let words: Vec<&str> = line.split(' ').collect();
        match words[..] {
            ["gone", pid, at] => {
                if let Some(killed) = self.dying.remove(&(number(pid) as u32)) {
                    self.free_times.push(MonoTime(number(at)).since(killed));
                }
            }
            ["clean", ref counts @ ..] => {
                self.count(counts);
                self.clean = true;
            }
            _ => panic!("the owner says {line:?}"),
        }
    }

    fn count(&mut self, counts: &[&str]) {
        for count in counts.iter().filter(|count| !count.is_empty()) {
            let (name, count) = count.split_once('=').expect("name=count");
            *self.tally.entry(name.to_string()).or_default() += number(count);
        }
    }

    /// Everybody goes, then the owner looks whether anything is left.
    fn finish(&mut self) {
        self.players.clear();
        writeln!(self.control, "finish").expect("the owner");
        let deadline = Instant::now() + Duration::from_secs(15);
        while !self.clean {
            let left = deadline.saturating_duration_since(Instant::now());
            let event = self.events.recv_timeout(left).expect("the owner finds everything empty in time");
            self.hear(event);
        }
        assert!(self.owner.0.wait().expect("a child").success());
        assert!(self.wrong.is_empty(), "seed {}: {:#?}", self.seed, self.wrong);
        assert!(self.dying.is_empty(), "killed and never gone: {:?}", self.dying);
    }

    /// Prints the score, and fails a storm that proved nothing.
    fn judge(mut self, lasted: Duration) {
        self.free_times.sort();
        let at = |part: f64| self.free_times[((self.free_times.len() - 1) as f64 * part) as usize];
        println!(
            "{} kills ({} of stopped processes, {} of newcomers), {} stops in {lasted:.1?}",
            self.kills, self.kills_of_stopped, self.kills_of_newcomers, self.stops
        );
        println!("free after a kill: p50 {:.1?}, p99 {:.1?}, max {:.1?}", at(0.5), at(0.99), at(1.0));
        println!("guards of stopped processes checked after their object's death: {}", self.stopped_survived);
        println!("{:?}", self.tally);
        let of = |name: &str| self.tally.get(name).copied().unwrap_or(0);
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
            ("begins_refused", of("begins_refused"), 10),
            ("kills_of_stopped", self.kills_of_stopped, 1),
            ("kills_of_newcomers", self.kills_of_newcomers, 1),
        ];
        for (name, count, least) in enough {
            assert!(count >= least, "seed {}: only {count} {name}: this storm proved nothing", self.seed);
        }
        assert_eq!(of("closed"), 0, "the owner was silent for seconds");
    }
}

impl Drop for Storm {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.door);
    }
}

fn number(word: &str) -> u64 {
    word.parse().unwrap_or_else(|_| panic!("{word:?} is not a number"))
}

/// Turns lines into events until the other end is closed.
fn listen(
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
