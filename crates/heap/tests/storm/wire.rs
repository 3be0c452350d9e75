//! How the processes of the storm are started and talk.
//!
//! Client → owner: [`Request`] and [`Answer`] of 48 bytes on the socket that the door left open. Child →
//! conductor: lines on one shared pipe, each in a single write of less than PIPE_BUF bytes, so that a killed
//! process leaves whole lines or none.

use std::os::fd::AsFd;
use std::path::PathBuf;

use moontide_types::{Epoch, SegmentId, SlotId};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags};
use rustix::process::Signal;

/// Keys of the storm: `0..KEYS`. More than there is room for.
pub const KEYS: u64 = 2000;

pub fn key_bytes(key: u64) -> Vec<u8> {
    format!("key {key}").into_bytes()
}

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Writer,
    Reader,
    Reclaimer,
}

/// What a child process is.
pub enum Role {
    Owner { parent: u32, plant: bool },
    Client { parent: u32, kind: Kind, door: PathBuf, seed: u64 },
}

impl Role {
    pub fn arguments(&self) -> Vec<String> {
        let words = match self {
            Role::Owner { parent, plant } => ["owner".into(), parent.to_string(), plant.to_string()].to_vec(),
            Role::Client { parent, kind, door, seed } => {
                let kind = match kind {
                    Kind::Writer => "writer",
                    Kind::Reader => "reader",
                    Kind::Reclaimer => "reclaimer",
                };
                let door = door.to_str().expect("a path of ours").to_string();
                [kind.into(), parent.to_string(), door, seed.to_string()].to_vec()
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
            "owner" => return Some(Role::Owner { parent, plant: rest[0] == "true" }),
            "writer" => Kind::Writer,
            "reader" => Kind::Reader,
            "reclaimer" => Kind::Reclaimer,
            other => panic!("no role {other}"),
        };
        Some(Role::Client { parent, kind, door: rest[0].into(), seed: rest[1].parse().ok()? })
    }

    pub fn parent(&self) -> u32 {
        match *self {
            Role::Owner { parent, .. } | Role::Client { parent, .. } => parent,
        }
    }
}

/// No child outlives the conductor, whatever ends it.
pub fn die_with_parent(parent: u32) {
    rustix::process::set_parent_process_death_signal(Some(Signal::KILL)).expect("prctl");
    let still = rustix::process::getppid().map(|pid| pid.as_raw_nonzero().get() as u32);
    if still != Some(parent) {
        std::process::exit(0); // it ended before the signal was asked for
    }
}

/// Tells the conductor something.
pub fn say(line: &str) {
    let line = format!("{line}\n");
    assert!(line.len() <= 4096, "PIPE_BUF: longer lines may be torn");
    let _ = rustix::io::write(std::io::stdout(), line.as_bytes());
}

/// A slot in a version, as it travels.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placed {
    pub segment: SegmentId,
    pub slot: SlotId,
    pub epoch: Epoch,
}

/// What clients ask of the owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    Begin {
        key: u64,
        len: u64,
    },
    Commit {
        placed: Placed,
        root: u64,
    },
    Abort(Placed),
    /// Kills the key's complete version, and with `writing` the one that is being written.
    Kill {
        key: u64,
        writing: bool,
    },
    Reclaim,
}

/// What the owner says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    Granted(Placed),
    Done,
    /// After a reclaim: how much of the scarcer of space and slots is free.
    Room {
        percent: u64,
    },
    /// No room, or the key is being written.
    NotNow,
    /// The reservation ended before the commit came.
    Late,
    /// What cannot be: the caller reports it.
    Broken,
}

type Words = [u64; 6];
const BYTES: usize = size_of::<Words>();

impl Placed {
    fn words(self) -> [u64; 3] {
        [self.segment.0.into(), self.slot.0.into(), self.epoch.bits()]
    }

    fn from_words(words: &[u64]) -> Placed {
        Placed {
            segment: SegmentId(words[0] as u32),
            slot: SlotId(words[1] as u32),
            epoch: Epoch::from_bits(words[2]).expect("an epoch of ours"),
        }
    }
}

impl Request {
    fn words(self) -> Words {
        match self {
            Request::Begin { key, len } => [1, key, len, 0, 0, 0],
            Request::Commit { placed, root } => {
                let [segment, slot, epoch] = placed.words();
                [2, segment, slot, epoch, root, 0]
            }
            Request::Abort(placed) => {
                let [segment, slot, epoch] = placed.words();
                [3, segment, slot, epoch, 0, 0]
            }
            Request::Kill { key, writing } => [4, key, writing.into(), 0, 0, 0],
            Request::Reclaim => [5, 0, 0, 0, 0, 0],
        }
    }

    fn from_words(words: Words) -> Request {
        match words[0] {
            1 => Request::Begin { key: words[1], len: words[2] },
            2 => Request::Commit { placed: Placed::from_words(&words[1..]), root: words[4] },
            3 => Request::Abort(Placed::from_words(&words[1..])),
            4 => Request::Kill { key: words[1], writing: words[2] == 1 },
            5 => Request::Reclaim,
            other => panic!("no request {other}"),
        }
    }

    /// The next request; `None` when the client's end is closed, which says nothing about its process.
    pub fn receive(socket: impl AsFd) -> Option<Request> {
        receive(socket).map(Request::from_words)
    }
}

impl Answer {
    /// `false`: the client is not listening any more.
    pub fn send(self, socket: impl AsFd) -> bool {
        send(
            socket,
            match self {
                Answer::Granted(placed) => {
                    let [segment, slot, epoch] = placed.words();
                    [1, segment, slot, epoch, 0, 0]
                }
                Answer::Done => [2, 0, 0, 0, 0, 0],
                Answer::NotNow => [3, 0, 0, 0, 0, 0],
                Answer::Late => [4, 0, 0, 0, 0, 0],
                Answer::Broken => [5, 0, 0, 0, 0, 0],
                Answer::Room { percent } => [6, percent, 0, 0, 0, 0],
            },
        )
    }
}

/// One request and its answer. Without an owner a client has no purpose and ends.
pub fn ask(socket: impl AsFd, request: Request) -> Answer {
    let answer = if send(&socket, request.words()) { receive(&socket) } else { None };
    match answer {
        Some(words @ [1, ..]) => Answer::Granted(Placed::from_words(&words[1..])),
        Some([2, ..]) => Answer::Done,
        Some([3, ..]) => Answer::NotNow,
        Some([4, ..]) => Answer::Late,
        Some([6, percent, ..]) => Answer::Room { percent },
        Some(_) => Answer::Broken,
        None => std::process::exit(0),
    }
}

fn send(socket: impl AsFd, words: Words) -> bool {
    let mut bytes = [0; BYTES];
    for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
        place.copy_from_slice(&word.to_le_bytes());
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
