//! An owner in a process of its own: this binary, started again.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_transfer::Metrics;
use moontide_transfer::sample::{Sample, SampleConfig};
use moontide_transfer::tcp::{ServeError, Server, ServerConfig};
use rustix::process::{Pid, Signal};

/// A running owner. Killed when it is dropped.
pub struct OwnerProcess {
    child: Child,
    config: SampleConfig,
    pub addresses: Vec<SocketAddr>,
}

impl OwnerProcess {
    /// Starts one on any port of loopback.
    pub fn start(config: &SampleConfig) -> OwnerProcess {
        OwnerProcess::start_at(config, &[SocketAddr::from(([127, 0, 0, 1], 0))], &[])
    }

    /// Starts one at these addresses, behind these words (of a command that starts it elsewhere).
    pub fn start_at(config: &SampleConfig, listen: &[SocketAddr], through: &[String]) -> OwnerProcess {
        let me = std::env::current_exe().expect("a path to this test").into_os_string();
        let mut words = through.iter().map(Into::into).chain([me]);
        let mut command = Command::new(words.next().expect("at least this test"));
        let listen: Vec<String> = listen.iter().map(SocketAddr::to_string).collect();
        command.args(words).args(["--role".into(), "owner".into(), std::process::id().to_string()]).args([
            listen.join(","),
            config.record_bytes.to_string(),
            config.readable.to_string(),
            config.writable.to_string(),
            config.digests.to_string(),
        ]);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("this test can be started");
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("it is piped"));
        out.read_line(&mut line).expect("the owner says where it listens");
        let addresses = line.trim().split(',').map(|word| word.parse().expect("an address")).collect();
        OwnerProcess { child, config: config.clone(), addresses }
    }

    pub fn address(&self) -> SocketAddr {
        self.addresses[0]
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(self.child.id() as i32).expect("a child has a number");
        rustix::process::kill_process(pid, signal).expect("our child takes our signals");
    }

    /// Starts another at the same addresses, after this one was killed.
    pub fn restart(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        *self = OwnerProcess::start_at(&self.config, &self.addresses, &[]);
    }
}

impl Drop for OwnerProcess {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether this process is to be something else than the test.
pub fn is_role(arguments: &[String]) -> bool {
    arguments.first().is_some_and(|word| word == "--role")
}

/// No child outlives the test, whatever ends it.
pub fn die_with_parent() {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("prctl");
}

/// An owner's life: serves until its input ends.
pub fn owner(arguments: &[String]) -> ! {
    die_with_parent();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ["--role", "owner", _, listen, record_bytes, readable, writable, digests] = words[..] else {
        panic!("no role {words:?}")
    };
    let number = |word: &str| word.parse::<u64>().expect("a number");
    let config = SampleConfig {
        record_bytes: number(record_bytes),
        readable: number(readable) as u32,
        writable: number(writable) as u32,
        digests: digests == "true",
        ..SampleConfig::default()
    };
    let listen: Vec<SocketAddr> = listen.split(',').map(|word| word.parse().expect("an address")).collect();
    let sample = Arc::new(Sample::new(config).expect("room for a sample"));
    let until = Instant::now() + Duration::from_secs(10);
    let server = loop {
        let config = ServerConfig { listen: listen.clone(), ..ServerConfig::default() };
        match Server::start(config, Arc::clone(&sample) as _, Metrics::new()) {
            Ok(server) => break server,
            // Of an owner that was killed, the kernel may still hold the port.
            Err(ServeError::Listen { .. }) if Instant::now() < until => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(error) => panic!("{error}"),
        }
    };
    let addresses: Vec<String> = server.addresses().iter().map(SocketAddr::to_string).collect();
    println!("{}", addresses.join(","));
    let _ = std::io::stdin().read_to_end(&mut Vec::new());
    drop(server);
    std::process::exit(0)
}
