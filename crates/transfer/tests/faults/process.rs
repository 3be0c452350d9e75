//! An owner in a separate process: this binary, started again.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_transfer::Metrics;
use moontide_transfer::sample::{SampleNode, SampleNodeConfig};
use moontide_transfer::tcp::{TcpServer, TcpServerConfig, TcpServerError};
use rustix::process::{Pid, Signal};

/// A running owner process. Dropping it kills the process.
pub struct OwnerProcess {
    child: Child,
    config: SampleNodeConfig,
    pub addresses: Vec<SocketAddr>,
}

impl OwnerProcess {
    /// Starts an owner on a free port of loopback.
    pub fn start(config: &SampleNodeConfig) -> OwnerProcess {
        OwnerProcess::start_at(config, &[SocketAddr::from(([127, 0, 0, 1], 0))], &[])
    }

    /// Starts an owner at these addresses. `wrapper` is a command that runs it elsewhere, or empty.
    pub fn start_at(config: &SampleNodeConfig, listen: &[SocketAddr], wrapper: &[String]) -> OwnerProcess {
        let exe = std::env::current_exe().expect("path of this test").into_os_string();
        let mut words = wrapper.iter().map(Into::into).chain([exe]);
        let mut command = Command::new(words.next().expect("at least the path of this test"));
        let listen: Vec<String> = listen.iter().map(SocketAddr::to_string).collect();
        command.args(words).args(["--role".into(), "owner".into(), std::process::id().to_string()]).args([
            listen.join(","),
            config.record_bytes.to_string(),
            config.readable.to_string(),
            config.writable.to_string(),
            config.digests.to_string(),
        ]);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start this test again");
        let mut line = String::new();
        let mut out = BufReader::new(child.stdout.take().expect("stdout is piped"));
        out.read_line(&mut line).expect("the owner prints its addresses");
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
        let pid = Pid::from_raw(self.child.id() as i32).expect("a child has a process id");
        rustix::process::kill_process(pid, signal).expect("signal a child process");
    }

    /// Kills this owner and starts another one at the same addresses.
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

/// Returns whether this process has a role other than the test.
pub fn is_role(arguments: &[String]) -> bool {
    arguments.first().is_some_and(|word| word == "--role")
}

/// Makes the kernel kill this process when the test ends for any reason.
pub fn die_with_parent() {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("prctl");
}

/// Runs an owner until its standard input ends.
pub fn owner(arguments: &[String]) -> ! {
    die_with_parent();
    let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let ["--role", "owner", _, listen, record_bytes, readable, writable, digests] = words[..] else {
        panic!("unknown role {words:?}")
    };
    let number = |word: &str| word.parse::<u64>().expect("a number");
    let config = SampleNodeConfig {
        record_bytes: number(record_bytes),
        readable: number(readable) as u32,
        writable: number(writable) as u32,
        digests: digests == "true",
        ..SampleNodeConfig::default()
    };
    let listen: Vec<SocketAddr> = listen.split(',').map(|word| word.parse().expect("an address")).collect();
    let sample = Arc::new(SampleNode::new(config).expect("memory for a sample"));
    let until = Instant::now() + Duration::from_secs(10);
    let server = loop {
        let config = TcpServerConfig { listen: listen.clone(), ..TcpServerConfig::default() };
        match TcpServer::start(config, Arc::clone(&sample) as _, Metrics::new()) {
            Ok(server) => break server,
            // The kernel may still hold the port of a killed owner.
            Err(TcpServerError::Listen { .. }) if Instant::now() < until => {
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
