//! Child processes of the benchmarks, and what the kernel says about a process.
//!
//! Every child is this program with other arguments, so the calling program must be `moontide`.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

use crate::results::{BenchError, io, wrong};

/// Time for a process to exit after SIGTERM, before it is killed. A node with a disk writes its memory to it.
const END_WAIT: Duration = Duration::from_secs(60);

/// A server of this program, i.e. a master or a node, which is stopped on drop.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    child: Child,
    /// Kept open: the program exits when its standard output is closed.
    out: BufReader<ChildStdout>,
}

impl ServerProcess {
    /// Starts a server and reads its output up to a line that starts with `last`. Returns these lines too.
    pub(crate) fn start<A: AsRef<OsStr>>(
        args: &[A],
        last: &str,
    ) -> Result<(ServerProcess, Vec<String>), BenchError> {
        ServerProcess::start_in(&[], args, last)
    }

    /// As [`ServerProcess::start`], with words before the command. They must execute it, not start it, so that the process is
    /// the server.
    pub(crate) fn start_in<A: AsRef<OsStr>>(
        before: &[String],
        args: &[A],
        last: &str,
    ) -> Result<(ServerProcess, Vec<String>), BenchError> {
        let mut command = this_program()?;
        if let Some((first, rest)) = before.split_first() {
            let program = std::mem::replace(&mut command, Command::new(first));
            command.args(rest).arg(program.get_program());
        }
        command.args(args);
        command.env("MOONTIDE_LOG", std::env::var("MOONTIDE_LOG").unwrap_or_else(|_| "error".into()));
        let mut server = ServerProcess::spawn(command)?;
        match server.read_until(last)? {
            Some(lines) => Ok((server, lines)),
            None => Err(wrong(format!("process exited before it printed {last:?}; see its error above"))),
        }
    }

    /// As [`ServerProcess::start`], for a master that writes its log of level info to the file `log`.
    pub(crate) fn start_with_log<A: AsRef<OsStr>>(
        args: &[A],
        last: &str,
        log: &Path,
    ) -> Result<(ServerProcess, Vec<String>), BenchError> {
        let file = File::create(log).map_err(io("creating a log"))?;
        let mut command = this_program()?;
        command.args(args).stderr(file).env("MOONTIDE_LOG", "moontide_master=info,warn");
        let mut server = ServerProcess::spawn(command)?;
        match server.read_until(last)? {
            Some(lines) => Ok((server, lines)),
            None => {
                let _ = server.child.wait();
                let log = std::fs::read_to_string(log).unwrap_or_default();
                Err(wrong(format!("process exited before it printed {last:?}\n{log}")))
            }
        }
    }

    fn spawn(mut command: Command) -> Result<ServerProcess, BenchError> {
        // A separate process group: a signal from the terminal ends the benchmark, which then stops its processes.
        command.stdin(Stdio::null()).stdout(Stdio::piped()).process_group(0);
        let mut child = command.spawn().map_err(io("starting a process"))?;
        let out = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Ok(ServerProcess { child, out })
    }

    /// Returns the lines up to one that starts with `last`, or `None` if the output ends before.
    fn read_until(&mut self, last: &str) -> Result<Option<Vec<String>>, BenchError> {
        let mut lines = vec![];
        loop {
            let mut line = String::new();
            if self.out.read_line(&mut line).map_err(io("reading a process's output"))? == 0 {
                return Ok(None);
            }
            lines.push(line.trim_end().to_owned());
            if line.starts_with(last) {
                return Ok(Some(lines));
            }
        }
    }

    /// Process id.
    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// Kills it with SIGKILL.
    pub(crate) fn kill(&mut self) -> Result<(), BenchError> {
        self.child.kill().map_err(io("killing a master"))?;
        self.child.wait().map(drop).map_err(io("waiting for a master to exit"))
    }
}

impl Drop for ServerProcess {
    fn drop(&mut self) {
        stop(&mut self.child);
    }
}

/// Settings of the certificate of a process. One certificate cannot be that of a master and that of a node, and the clusters of
/// the benchmarks listen on loopback.
const CERTIFICATE_VARIABLES: [&str; 3] = ["MOONTIDE_CA", "MOONTIDE_CERT", "MOONTIDE_KEY"];

/// Returns a command that runs this program, without the certificate of the environment.
pub(crate) fn this_program() -> Result<Command, BenchError> {
    let mut command = std::env::current_exe().map(Command::new).map_err(io("finding this program"))?;
    for variable in CERTIFICATE_VARIABLES {
        command.env_remove(variable);
    }
    Ok(command)
}

/// Sends SIGTERM to a process and waits for it; kills it after [`END_WAIT`].
pub(crate) fn stop(child: &mut Child) {
    if !matches!(child.try_wait(), Ok(None)) {
        return;
    }
    let _ = kill_process(Pid::from_child(child), Signal::TERM);
    let until = Instant::now() + END_WAIT;
    while Instant::now() < until {
        if !matches!(child.try_wait(), Ok(None)) {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let _ = child.kill();
    let _ = child.wait();
}

/// Resident memory of a process in bytes.
pub(crate) fn resident_bytes(pid: u32) -> Result<u64, BenchError> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).map_err(io("reading /proc"))?;
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    Ok(pages * 4096)
}

/// Processor time that a process has used, of all its threads.
pub(crate) fn cpu_time(pid: u32) -> Result<Duration, BenchError> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).map_err(io("reading /proc"))?;
    // User and system time are fields 14 and 15, counted after the name in parentheses, which may contain anything.
    let fields = stat.rsplit(')').next().unwrap_or("");
    let ticks: u64 = fields.split_whitespace().skip(11).take(2).filter_map(|t| t.parse::<u64>().ok()).sum();
    Ok(Duration::from_millis(ticks * 10)) // 100 ticks per second on every Linux
}
