//! Start and communication of the processes of the stress test.
//!
//! Client → owner: [`Request`] and [`Response`] of 48 bytes on the socket of the handshake. Child → driver: lines on
//! one shared pipe, each in a single write of less than PIPE_BUF bytes, so that a killed process leaves whole lines
//! or none.

use std::os::fd::AsFd;
use std::path::PathBuf;

use moontide_types::{Epoch, SegmentId, SlotId};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::Signal;

/// Keys of the test: `0..KEYS`. More than fit into the memory.
pub const KEYS: u64 = 2000;

pub fn key_bytes(key: u64) -> Vec<u8> {
    format!("key {key}").into_bytes()
}

/// Task of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Writer,
    Reader,
    Reclaimer,
}

/// Role of a child process.
pub enum Role {
    Owner { parent: u32, mutation: bool },
    Client { parent: u32, kind: Kind, socket: PathBuf, seed: u64 },
}

impl Role {
    pub fn arguments(&self) -> Vec<String> {
        let words = match self {
            Role::Owner { parent, mutation } => {
                ["owner".into(), parent.to_string(), mutation.to_string()].to_vec()
            }
            Role::Client { parent, kind, socket, seed } => {
                let kind = match kind {
                    Kind::Writer => "writer",
                    Kind::Reader => "reader",
                    Kind::Reclaimer => "reclaimer",
                };
                let socket = socket.to_str().expect("a path in UTF-8").to_string();
                [kind.into(), parent.to_string(), socket, seed.to_string()].to_vec()
            }
        };
        std::iter::once("--role".into()).chain(words).collect()
    }

    pub fn from_arguments(arguments: &[String]) -> Option<Role> {
        let words: Vec<&str> = arguments.iter().map(String::as_str).collect();
        let (role, parent, rest) = match words[..] {
            ["--role", role, parent, ref rest @ ..] => (role, parent.parse().ok()?, rest),
            _ => return None,
        };
        let kind = match role {
            "owner" => return Some(Role::Owner { parent, mutation: rest[0] == "true" }),
            "writer" => Kind::Writer,
            "reader" => Kind::Reader,
            "reclaimer" => Kind::Reclaimer,
            other => panic!("unknown role {other}"),
        };
        Some(Role::Client { parent, kind, socket: rest[0].into(), seed: rest[1].parse().ok()? })
    }

    pub fn parent(&self) -> u32 {
        match *self {
            Role::Owner { parent, .. } | Role::Client { parent, .. } => parent,
        }
    }
}

/// Makes the kernel kill this process when the driver exits, for whatever reason.
pub fn exit_with_parent(parent: u32) {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("prctl");
    let current = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get() as u32);
    if current != Some(parent) {
        std::process::exit(0); // the driver exited before the signal was requested
    }
}

/// Sends a line to the driver.
pub fn report(line: &str) {
    let line = format!("{line}\n");
    assert!(line.len() <= 4096, "PIPE_BUF: longer lines may be torn");
    let _ = rustix::io::write(std::io::stdout(), line.as_bytes());
}

/// A version in a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotVersion {
    pub segment: SegmentId,
    pub slot: SlotId,
    pub epoch: Epoch,
}

/// Request of a client to the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    Begin {
        key: u64,
        len: u64,
    },
    Commit {
        location: SlotVersion,
        root: u64,
    },
    Abort(SlotVersion),
    /// Kills the key's complete version, and with `writing` the one that is being written.
    Kill {
        key: u64,
        writing: bool,
    },
    Reclaim,
}

/// Response of the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Response {
    Granted(SlotVersion),
    Done,
    /// After a reclaim: free percentage of space or slots, whichever is scarcer.
    Free {
        percent: u64,
    },
    /// No space, or the key is being written.
    Busy,
    /// The reservation ended before the commit arrived.
    Late,
    /// An impossible error: the caller reports it.
    Broken,
}

type Words = [u64; 6];
const BYTES: usize = size_of::<Words>();

impl SlotVersion {
    fn words(self) -> [u64; 3] {
        [self.segment.0.into(), self.slot.0.into(), self.epoch.bits()]
    }

    fn from_words(words: &[u64]) -> SlotVersion {
        SlotVersion {
            segment: SegmentId(words[0] as u32),
            slot: SlotId(words[1] as u32),
            epoch: Epoch::from_bits(words[2]).expect("a valid epoch"),
        }
    }
}

impl Request {
    fn words(self) -> Words {
        match self {
            Request::Begin { key, len } => [1, key, len, 0, 0, 0],
            Request::Commit { location, root } => {
                let [segment, slot, epoch] = location.words();
                [2, segment, slot, epoch, root, 0]
            }
            Request::Abort(location) => {
                let [segment, slot, epoch] = location.words();
                [3, segment, slot, epoch, 0, 0]
            }
            Request::Kill { key, writing } => [4, key, writing.into(), 0, 0, 0],
            Request::Reclaim => [5, 0, 0, 0, 0, 0],
        }
    }

    fn from_words(words: Words) -> Request {
        match words[0] {
            1 => Request::Begin { key: words[1], len: words[2] },
            2 => Request::Commit { location: SlotVersion::from_words(&words[1..]), root: words[4] },
            3 => Request::Abort(SlotVersion::from_words(&words[1..])),
            4 => Request::Kill { key: words[1], writing: words[2] == 1 },
            5 => Request::Reclaim,
            other => panic!("unknown request {other}"),
        }
    }

    /// Receives the next request; `None` if the client's end is closed, which does not mean that its process has
    /// exited.
    pub fn receive(socket: impl AsFd) -> Option<Request> {
        receive(socket).map(Request::from_words)
    }
}

impl Response {
    /// Returns `false` if the client has closed its end.
    pub fn send(self, socket: impl AsFd) -> bool {
        send(
            socket,
            match self {
                Response::Granted(location) => {
                    let [segment, slot, epoch] = location.words();
                    [1, segment, slot, epoch, 0, 0]
                }
                Response::Done => [2, 0, 0, 0, 0, 0],
                Response::Busy => [3, 0, 0, 0, 0, 0],
                Response::Late => [4, 0, 0, 0, 0, 0],
                Response::Broken => [5, 0, 0, 0, 0, 0],
                Response::Free { percent } => [6, percent, 0, 0, 0, 0],
            },
        )
    }
}

/// Sends a request and returns its response. Exits if the owner is gone.
pub fn call(socket: impl AsFd, request: Request) -> Response {
    let response = if send(&socket, request.words()) { receive(&socket) } else { None };
    match response {
        Some(words @ [1, ..]) => Response::Granted(SlotVersion::from_words(&words[1..])),
        Some([2, ..]) => Response::Done,
        Some([3, ..]) => Response::Busy,
        Some([4, ..]) => Response::Late,
        Some([6, percent, ..]) => Response::Free { percent },
        Some(_) => Response::Broken,
        None => std::process::exit(0),
    }
}

fn send(socket: impl AsFd, words: Words) -> bool {
    let mut bytes = [0; BYTES];
    for (target, word) in bytes.chunks_exact_mut(8).zip(words) {
        target.copy_from_slice(&word.to_le_bytes());
    }
    loop {
        match rustix::net::send(&socket, &bytes, SendFlags::NOSIGNAL) {
            Err(Errno::INTR) => {}
            sent => return sent == Ok(BYTES),
        }
    }
}

fn receive(socket: impl AsFd) -> Option<Words> {
    let mut bytes = [0; BYTES];
    loop {
        match rustix::net::recv(&socket, &mut bytes[..], RecvFlags::empty()) {
            Err(Errno::INTR) => {}
            Ok((_, BYTES)) => break,
            _ => return None,
        }
    }
    let mut words = [0; 6];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(8)) {
        *word = u64::from_le_bytes(bytes.try_into().expect("8 bytes"));
    }
    Some(words)
}
