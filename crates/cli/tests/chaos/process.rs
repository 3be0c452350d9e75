//! [`Process`]: a program with a name at a host, which can be killed, stopped and started again, and is looked after: one
//! that ended although it should run is started again, as a supervisor would.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::net::{Host, Net};

/// Before a process that ended by itself is started again.
const PAUSE: Duration = Duration::from_millis(200);

/// What is started, given how often it was started before: a client is somebody else each time.
pub type Words = Box<dyn Fn(u32) -> (Vec<String>, Vec<(String, String)>)>;

/// A program at a host. Killed when it is dropped.
pub struct Process {
    pub name: String,
    pub host: Host,
    through: Vec<String>,
    words: Words,
    log: PathBuf,
    child: Option<Child>,
    /// Whether it is meant to run.
    wanted: bool,
    stopped: bool,
    /// How often it was started, and how often it had ended by itself.
    pub starts: u32,
    pub ended_by_itself: u32,
    again_at: Instant,
}

impl Process {
    /// Describes it; [`start`](Process::start) starts it. `words`: the program with its arguments, and variables.
    pub fn new(net: &Net, folder: &Path, name: impl Into<String>, host: &Host, words: Words) -> Process {
        let name = name.into();
        let mut through = net.inside(host);
        // It goes when this test goes, however that ends.
        through.extend(["setpriv", "--pdeathsig", "KILL"].map(str::to_owned));
        Process {
            log: folder.join(format!("{name}.log")),
            name,
            host: host.clone(),
            through,
            words,
            child: None,
            wanted: false,
            stopped: false,
            starts: 0,
            ended_by_itself: 0,
            again_at: Instant::now(),
        }
    }

    pub fn start(&mut self) {
        assert!(self.child.is_none(), "{} runs already", self.name);
        let (words, variables) = (self.words)(self.starts);
        let log = || File::options().create(true).append(true).open(&self.log).expect("a log");
        let mut command = Command::new(&self.through[0]);
        command.args(&self.through[1..]).args(words).envs(variables);
        command.stdin(Stdio::null()).stdout(log()).stderr(log());
        self.child = Some(command.spawn().expect("ip starts"));
        (self.wanted, self.stopped) = (true, false);
        self.starts += 1;
    }

    pub fn is_running(&self) -> bool {
        self.child.is_some() && !self.stopped
    }

    /// Which of its lives this is, from 1.
    pub fn life(&self) -> u32 {
        self.starts
    }

    /// Ends it without a word, also if it is stopped.
    pub fn kill(&mut self) {
        self.wanted = false;
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// It stands still, and does not know.
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
        self.stopped = true;
    }

    pub fn go_on(&mut self) {
        self.signal(Signal::CONT);
        self.stopped = false;
    }

    fn signal(&self, signal: Signal) {
        if let Some(child) = &self.child {
            kill_process(Pid::from_child(child), signal).expect("our child takes our signals");
        }
    }

    /// Starts it again if it has ended by itself. A node that finds no master for long enough may.
    pub fn tend(&mut self) {
        if let Some(child) = &mut self.child
            && let Some(status) = child.try_wait().expect("our child")
        {
            println!("{} has ended by itself: {status}", self.name);
            self.child = None;
            self.ended_by_itself += 1;
            self.again_at = Instant::now() + PAUSE;
        }
        if self.wanted && self.child.is_none() && Instant::now() >= self.again_at {
            self.start();
        }
    }

    /// Waits until it has ended by itself; whether it went well.
    pub fn wait(&mut self, within: Duration) -> Result<(), String> {
        self.wanted = false;
        let end = Instant::now() + within;
        let Some(mut child) = self.child.take() else { return Ok(()) };
        loop {
            match child.try_wait().expect("our child") {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("{}: {status}", self.name)),
                None if Instant::now() > end => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(format!("{} has not ended within {within:?}", self.name));
                }
                None => std::thread::sleep(Duration::from_millis(10)),
            }
        }
    }

    pub fn log_text(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
