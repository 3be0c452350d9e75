//! The consumer of `moontide bench push`: a child process, `bench push-rank`, and the producer's handle of it.

use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Stdio};

use clap::Args as ClapArgs;
use moontide_client::{Ticket, WaitOutcome};
use moontide_symmetric::Rank;
use moontide_types::{Clock, SystemClock};

use super::{STEP_TIMEOUT, join};
use crate::process::this_program;
use crate::results::{BenchError, io, wrong};

/// Arguments of the consumer.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct RankArgs {
    #[arg(long)]
    path: PathBuf,
    #[arg(long)]
    master: String,
    #[arg(long)]
    memory_bytes: u64,
}

/// Consumer process, which is killed on drop.
pub(super) struct Consumer {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
}

impl Consumer {
    pub(super) fn start(path: &Path, master: &str, memory_bytes: u64) -> Result<Consumer, BenchError> {
        let mut child = this_program()?
            .args(["bench", "push-rank"])
            .arg("--path")
            .arg(path)
            .args([format!("--master={master}"), format!("--memory-bytes={memory_bytes}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(io("starting the consumer"))?;
        let to = child.stdin.take().expect("stdin is piped");
        let from = BufReader::new(child.stdout.take().expect("stdout is piped"));
        Ok(Consumer { child, to, from })
    }

    fn send(&mut self, line: &str) -> Result<(), BenchError> {
        writeln!(self.to, "{line}").map_err(io("writing to the consumer"))
    }

    fn receive(&mut self) -> Result<String, BenchError> {
        let mut line = String::new();
        self.from.read_line(&mut line).map_err(io("reading from the consumer"))?;
        if line.is_empty() { Err(wrong("consumer exited")) } else { Ok(line.trim().to_owned()) }
    }

    /// Sends a ticket and returns when the consumer waits for it.
    pub(super) fn expect(&mut self, ticket: Ticket) -> Result<(), BenchError> {
        self.send(&ticket.words().map(|word| word.to_string()).join(" "))?;
        match &*self.receive()? {
            "waiting" => Ok(()),
            other => Err(wrong(format!("unexpected output of the consumer: {other:?}"))),
        }
    }

    /// Returns the time at which the consumer saw the flag, by the common monotonic clock.
    pub(super) fn seen(&mut self) -> Result<u64, BenchError> {
        let line = self.receive()?;
        line.parse().map_err(|_| wrong(format!("unexpected output of the consumer: {line:?}")))
    }
}

impl Drop for Consumer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ticket_of(line: &str) -> Option<Ticket> {
    let words: Vec<u64> = line.split(' ').map(|word| word.parse().ok()).collect::<Option<_>>()?;
    Ticket::from_words(words.try_into().ok()?)
}

/// Runs the consumer: waits for each ticket from standard input, checks the object, and prints the time at which it saw
/// the flag. Ends with its standard input.
pub(crate) fn run(args: &RankArgs) -> Result<(), BenchError> {
    let (rank_store, _node) = join(&args.path, &args.master, Rank(1), args.memory_bytes)?;
    for line in std::io::stdin().lines() {
        let line = line.map_err(io("reading from the producer"))?;
        let ticket = ticket_of(&line).ok_or_else(|| wrong(format!("not a ticket: {line:?}")))?;
        let Some(pending) = rank_store.open_for_read(ticket).map_err(wrong)? else {
            return Err(wrong("object of the ticket no longer exists"));
        };
        println!("waiting");
        let WaitOutcome::Ready(arrived) = pending.wait(STEP_TIMEOUT).map_err(wrong)? else {
            return Err(wrong("timed out waiting for the object"));
        };
        let seen = SystemClock.now();
        let bytes = arrived.bytes().ok_or_else(|| wrong("object is not in host memory"))?;
        let is_right = bytes.iter().zip((0..251u8).cycle()).step_by(4093).all(|(got, made)| *got == made)
            && bytes.last() == Some(&(((ticket.bytes - 1) % 251) as u8));
        if !is_right {
            return Err(wrong("object has wrong content"));
        }
        drop(arrived);
        println!("{}", seen.0);
    }
    Ok(())
}
