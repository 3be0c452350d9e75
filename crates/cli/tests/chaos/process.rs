//! [`Process`]: a program on a host, which can be killed, stopped and restarted. Like a supervisor, it restarts a
//! program that has exited by itself.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::net::{Host, Net};

/// Delay before a process that exited by itself is restarted.
const PAUSE: Duration = Duration::from_millis(200);

/// Returns arguments and environment, given the number of earlier starts: a client has a new role each time.
pub type Words = Box<dyn FnMut(u32) -> (Vec<String>, Vec<(String, String)>)>;

/// A program on a host, which is killed on drop.
pub struct Process {
    pub name: String,
    pub host: Host,
    through: Vec<String>,
    words: Words,
    log: PathBuf,
    child: Option<Child>,
    /// It should run.
    should_run: bool,
    stopped: bool,
    /// Number of starts, and of exits by itself.
    pub starts: u32,
    pub ended_by_itself: u32,
    again_at: Instant,
}

impl Process {
    /// Creates a description; [`start`](Process::start) starts it. `words`: program, arguments and environment.
    pub fn new(net: &Net, folder: &Path, name: impl Into<String>, host: &Host, words: Words) -> Process {
        let name = name.into();
        let mut through = net.inside(host);
        // The kernel kills it when this test exits.
        through.extend(["setpriv", "--pdeathsig", "KILL"].map(str::to_owned));
        Process {
            log: folder.join(format!("{name}.log")),
            name,
            host: host.clone(),
            through,
            words,
            child: None,
            should_run: false,
            stopped: false,
            starts: 0,
            ended_by_itself: 0,
            again_at: Instant::now(),
        }
    }

    pub fn start(&mut self) {
        assert!(self.child.is_none(), "{} is already running", self.name);
        let (words, variables) = (self.words)(self.starts);
        let log = || File::options().create(true).append(true).open(&self.log).expect("a log");
        let mut command = Command::new(&self.through[0]);
        command.args(&self.through[1..]).args(words).envs(variables);
        command.stdin(Stdio::null()).stdout(log()).stderr(log());
        self.child = Some(command.spawn().expect("ip starts"));
        (self.should_run, self.stopped) = (true, false);
        self.starts += 1;
    }

    pub fn is_running(&self) -> bool {
        self.child.is_some() && !self.stopped
    }

    /// Number of the current life, from 1.
    pub fn life(&self) -> u32 {
        self.starts
    }

    /// Kills it with SIGKILL, also if it is stopped.
    pub fn kill(&mut self) {
        self.should_run = false;
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Stops it with SIGSTOP.
    pub fn stop(&mut self) {
        self.signal(Signal::STOP);
        self.stopped = true;
    }

    pub fn resume(&mut self) {
        self.signal(Signal::CONT);
        self.stopped = false;
    }

    fn signal(&self, signal: Signal) {
        if let Some(child) = &self.child {
            kill_process(Pid::from_child(child), signal).expect("the child process exists");
        }
    }

    /// Restarts it if it has exited by itself, as a node does that reaches no master for long enough.
    pub fn supervise(&mut self) {
        if let Some(child) = &mut self.child
            && let Some(status) = child.try_wait().expect("our child")
        {
            let log = std::fs::read_to_string(&self.log).unwrap_or_default();
            println!("{} exited by itself: {status}: {}", self.name, log.lines().last().unwrap_or_default());
            self.child = None;
            self.ended_by_itself += 1;
            self.again_at = Instant::now() + PAUSE;
        }
        if self.should_run && self.child.is_none() && Instant::now() >= self.again_at {
            self.start();
        }
    }

    /// Waits until it has exited; fails if it did not succeed.
    pub fn wait(&mut self, within: Duration) -> Result<(), String> {
        self.should_run = false;
        let end = Instant::now() + within;
        let Some(mut child) = self.child.take() else { return Ok(()) };
        loop {
            match child.try_wait().expect("our child") {
                Some(status) if status.success() => return Ok(()),
                Some(status) => return Err(format!("{}: {status}", self.name)),
                None if Instant::now() > end => {
                    let _ = child.kill();
                    let _ = child.wait();
                    return Err(format!("{} did not exit within {within:?}", self.name));
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
