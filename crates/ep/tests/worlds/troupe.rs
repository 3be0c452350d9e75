//! Processes that are ranks: starting, listening, killing and stopping them.

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// What a rank process is told on its command line.
#[derive(Clone, Debug)]
pub struct Role {
    pub scene: String,
    pub path: PathBuf,
    pub rank: u32,
    pub ranks: u32,
    pub seed: u64,
    /// A scene's own number.
    pub extra: u64,
}

impl Role {
    fn arguments(&self) -> Vec<String> {
        let Role { scene, path, rank, ranks, seed, extra } = self;
        let path = path.to_str().expect("a path of ours").to_string();
        let numbers = [std::process::id().into(), u64::from(*rank), u64::from(*ranks), *seed, *extra];
        let words = ["--rank".to_string(), scene.clone(), path].into_iter();
        words.chain(numbers.map(|number| number.to_string())).collect()
    }

    /// The role of this process, if it has one. It ends with its parent.
    pub fn of_this_process(arguments: &[String]) -> Option<Role> {
        let [flag, scene, path, numbers @ ..] = arguments else { return None };
        if flag != "--rank" {
            return None;
        }
        let numbers: Vec<u64> = numbers.iter().map(|word| word.parse().expect("a number")).collect();
        let [parent, rank, ranks, seed, extra] = numbers[..] else { panic!("five numbers") };
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("prctl");
        let still = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get() as u64);
        if still != Some(parent) {
            std::process::exit(0); // it ended before the signal was asked for
        }
        let (rank, ranks) = (rank as u32, ranks as u32);
        Some(Role { scene: scene.clone(), path: path.into(), rank, ranks, seed, extra })
    }
}

/// A line that a rank said, or that it has ended.
#[derive(Debug)]
pub struct Said {
    pub rank: u32,
    pub line: Option<String>,
}

/// The ranks of a world, and what they say.
pub struct Troupe {
    path: PathBuf,
    scene: &'static str,
    ranks: u32,
    pub seed: u64,
    children: Vec<Option<Child>>,
    said: Receiver<Said>,
    sayer: Sender<Said>,
    /// Processes that were started, and those whose end was heard.
    started: usize,
    ended: Cell<usize>,
}

impl Troupe {
    /// Starts a rank process for each rank.
    pub fn start(scene: &'static str, ranks: u32, seed: u64, extra: impl Fn(u32) -> u64) -> Troupe {
        let name = format!("moontide-ep-{}-{scene}-{seed:x}", std::process::id());
        let (sayer, said) = channel();
        let path = std::env::temp_dir().join(name);
        let children = (0..ranks).map(|_| None).collect();
        let mut troupe =
            Troupe { path, scene, ranks, seed, children, said, sayer, started: 0, ended: Cell::new(0) };
        (0..ranks).for_each(|rank| troupe.enter(rank, extra(rank)));
        troupe
    }

    /// Starts a process for one rank.
    pub fn enter(&mut self, rank: u32, extra: u64) {
        let (scene, path) = (self.scene.to_string(), self.path.clone());
        let role = Role { scene, path, rank, ranks: self.ranks, seed: self.seed, extra };
        let mut child = Command::new(std::env::current_exe().expect("this program"))
            .args(role.arguments())
            .stdout(Stdio::piped())
            .spawn()
            .expect("a process");
        let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
        let sayer = self.sayer.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = sayer.send(Said { rank, line: Some(line) });
            }
            let _ = sayer.send(Said { rank, line: None });
        });
        self.children[rank as usize] = Some(child);
        self.started += 1;
    }

    /// The next thing that somebody says, within a time in which all of it should be over.
    pub fn listen(&self, patience: Duration) -> Said {
        match self.try_listen(patience) {
            Some(said) => said,
            None => panic!("seed {}: no rank has said anything for {patience:?}", self.seed),
        }
    }

    /// What somebody says within `patience`, if anything.
    pub fn try_listen(&self, patience: Duration) -> Option<Said> {
        let said = self.said.recv_timeout(patience).ok()?;
        self.ended.set(self.ended.get() + usize::from(said.line.is_none()));
        Some(said)
    }

    pub fn signal(&self, rank: u32, signal: Signal) {
        let child = self.children[rank as usize].as_ref().expect("started");
        // Not waited for, so its number is still its own.
        let _ = rustix::process::kill_process(Pid::from_child(child), signal);
    }

    /// Waits for a process that was killed, or killed itself.
    pub fn wait_killed(&mut self, rank: u32) {
        let signal = self.ended_by(rank);
        assert_eq!(signal, Some(9), "seed {}: rank {rank} was not killed", self.seed);
    }

    /// Waits for a process to end, and says which signal ended it.
    pub fn ended_by(&mut self, rank: u32) -> Option<i32> {
        let mut child = self.children[rank as usize].take().expect("started");
        child.wait().expect("a child").signal()
    }

    /// Waits until all are done, and returns what they said, by rank. Anything but success is a failure.
    pub fn finish(mut self, within: Duration) -> Vec<Vec<String>> {
        let deadline = Instant::now() + within;
        let mut lines = vec![Vec::new(); self.ranks as usize];
        while self.ended.get() < self.started {
            let said = self.listen(deadline.saturating_duration_since(Instant::now()));
            if let Said { rank, line: Some(line) } = said {
                lines[rank as usize].push(line);
            }
        }
        for (rank, child) in self.children.iter_mut().enumerate() {
            let Some(child) = child else { continue };
            let status = child.wait().expect("a child");
            assert!(status.success(), "seed {}: rank {rank} ended with {status}", self.seed);
        }
        lines
    }
}

impl Drop for Troupe {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Tells the conductor something.
pub fn say(line: &str) {
    println!("{line}");
}

/// The seed of a run: printed, and taken from `MOONTIDE_SEED` if it is there.
pub fn seed() -> u64 {
    let given = std::env::var("MOONTIDE_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.expect("after 1970").subsec_nanos().into()
    });
    eprintln!("MOONTIDE_SEED={seed}");
    seed
}

/// Random numbers (splitmix64).
#[derive(Clone, Debug)]
pub struct Dice(pub u64);

impl Dice {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ self.0 >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ mixed >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ mixed >> 31
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end.max(1) as u64) as usize
    }

    /// Between −1 and 1.
    pub fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
