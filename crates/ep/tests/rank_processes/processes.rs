//! Rank processes: starting them, reading their output, killing and stopping them.

use std::cell::Cell;
use std::io::{BufRead, BufReader};
use std::os::unix::process::ExitStatusExt;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use moontide_rt::SplitMix64;
use rustix::process::{Pid, Signal};

/// Command line of a rank process.
#[derive(Clone, Debug)]
pub struct Role {
    pub scenario: String,
    pub path: PathBuf,
    pub rank: u32,
    pub ranks: u32,
    pub seed: u64,
    /// Number whose meaning depends on the scenario.
    pub extra: u64,
}

impl Role {
    fn arguments(&self) -> Vec<String> {
        let Role { scenario, path, rank, ranks, seed, extra } = self;
        let path = path.to_str().expect("a UTF-8 path").to_string();
        let numbers = [std::process::id().into(), u64::from(*rank), u64::from(*ranks), *seed, *extra];
        let words = ["--rank".to_string(), scenario.clone(), path].into_iter();
        words.chain(numbers.map(|number| number.to_string())).collect()
    }

    /// Returns the role of this process, if it has one. Then the process is killed when its parent exits.
    pub fn of_this_process(arguments: &[String]) -> Option<Role> {
        let [flag, scenario, path, numbers @ ..] = arguments else { return None };
        if flag != "--rank" {
            return None;
        }
        let numbers: Vec<u64> = numbers.iter().map(|word| word.parse().expect("a number")).collect();
        let [parent, rank, ranks, seed, extra] = numbers[..] else { panic!("five numbers") };
        rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("prctl");
        let current = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get() as u64);
        if current != Some(parent) {
            std::process::exit(0); // the parent exited before the signal was requested
        }
        let (rank, ranks) = (rank as u32, ranks as u32);
        Some(Role { scenario: scenario.clone(), path: path.into(), rank, ranks, seed, extra })
    }
}

/// A line printed by a rank, or the end of its output.
#[derive(Debug)]
pub struct RankOutput {
    pub rank: u32,
    pub line: Option<String>,
}

/// Processes of the ranks of a world, and their output.
pub struct RankProcesses {
    path: PathBuf,
    scenario: &'static str,
    ranks: u32,
    pub seed: u64,
    children: Vec<Option<Child>>,
    output: Receiver<RankOutput>,
    output_sender: Sender<RankOutput>,
    /// Number of processes started, and of those whose output has ended.
    started: usize,
    ended: Cell<usize>,
}

impl RankProcesses {
    /// Starts a rank process for each rank.
    pub fn start(scenario: &'static str, ranks: u32, seed: u64, extra: impl Fn(u32) -> u64) -> RankProcesses {
        let name = format!("moontide-ep-{}-{scenario}-{seed:x}", std::process::id());
        let (output_sender, output) = channel();
        let path = std::env::temp_dir().join(name);
        let children = (0..ranks).map(|_| None).collect();
        let mut processes = RankProcesses {
            path,
            scenario,
            ranks,
            seed,
            children,
            output,
            output_sender,
            started: 0,
            ended: Cell::new(0),
        };
        (0..ranks).for_each(|rank| processes.spawn(rank, extra(rank)));
        processes
    }

    /// Starts a process for one rank.
    pub fn spawn(&mut self, rank: u32, extra: u64) {
        let (scenario, path) = (self.scenario.to_string(), self.path.clone());
        let role = Role { scenario, path, rank, ranks: self.ranks, seed: self.seed, extra };
        let mut child = Command::new(std::env::current_exe().expect("path of this test"))
            .args(role.arguments())
            .stdout(Stdio::piped())
            .spawn()
            .expect("start a process");
        let lines = BufReader::new(child.stdout.take().expect("stdout is piped")).lines();
        let sender = self.output_sender.clone();
        std::thread::spawn(move || {
            for line in lines.map_while(Result::ok) {
                let _ = sender.send(RankOutput { rank, line: Some(line) });
            }
            let _ = sender.send(RankOutput { rank, line: None });
        });
        self.children[rank as usize] = Some(child);
        self.started += 1;
    }

    /// Returns the next output of any rank. Fails if there is none within `timeout`.
    pub fn next_output(&self, timeout: Duration) -> RankOutput {
        match self.try_next_output(timeout) {
            Some(output) => output,
            None => panic!("seed {}: no output of any rank for {timeout:?}", self.seed),
        }
    }

    /// Returns the next output of any rank within `timeout`, if any.
    pub fn try_next_output(&self, timeout: Duration) -> Option<RankOutput> {
        let output = self.output.recv_timeout(timeout).ok()?;
        self.ended.set(self.ended.get() + usize::from(output.line.is_none()));
        Some(output)
    }

    pub fn signal(&self, rank: u32, signal: Signal) {
        let child = self.children[rank as usize].as_ref().expect("started");
        // The child was not waited for, so its process id is not reused.
        let _ = rustix::process::kill_process(Pid::from_child(child), signal);
    }

    /// Waits for a process that was killed, or killed itself.
    pub fn wait_killed(&mut self, rank: u32) {
        let signal = self.ended_by(rank);
        assert_eq!(signal, Some(9), "seed {}: rank {rank} was not killed", self.seed);
    }

    /// Waits for a process to end, and returns the signal that ended it.
    pub fn ended_by(&mut self, rank: u32) -> Option<i32> {
        let mut child = self.children[rank as usize].take().expect("started");
        child.wait().expect("wait for a child").signal()
    }

    /// Waits until all processes have exited, and returns their lines by rank. Every exit status must be success.
    pub fn finish(mut self, within: Duration) -> Vec<Vec<String>> {
        let deadline = Instant::now() + within;
        let mut lines = vec![Vec::new(); self.ranks as usize];
        while self.ended.get() < self.started {
            let output = self.next_output(deadline.saturating_duration_since(Instant::now()));
            if let RankOutput { rank, line: Some(line) } = output {
                lines[rank as usize].push(line);
            }
        }
        for (rank, child) in self.children.iter_mut().enumerate() {
            let Some(child) = child else { continue };
            let status = child.wait().expect("wait for a child");
            assert!(status.success(), "seed {}: rank {rank} exited with {status}", self.seed);
        }
        lines
    }
}

impl Drop for RankProcesses {
    fn drop(&mut self) {
        for child in self.children.iter_mut().flatten() {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Sends a line to the driver.
pub fn print_line(line: &str) {
    println!("{line}");
}

/// Returns the seed of a run, from `MOONTIDE_SEED` or the clock, and prints it.
pub fn seed() -> u64 {
    let given = std::env::var("MOONTIDE_SEED").ok().and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.expect("after 1970").subsec_nanos().into()
    });
    eprintln!("MOONTIDE_SEED={seed}");
    seed
}

/// Random numbers of a rank.
#[derive(Clone, Debug)]
pub struct Rng(SplitMix64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(SplitMix64::new(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.0.below(end.max(1) as u64) as usize
    }

    /// Draws a number between −1 and 1.
    pub fn number(&mut self) -> f32 {
        (self.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }
}
