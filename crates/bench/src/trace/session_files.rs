//! [`SessionFiles`]: recorded sessions of coding agents, one file each, merged into one trace.
//!
//! The files are those of callanjfox/kv-cache-tester. The times of a file start with its session, and its block ids have a
//! meaning within the file only. So the caller chooses when each session begins. Only files of running sessions are in memory.
//! Input is untrusted: every bound is checked, and every error names its file.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use super::{
    AT_MS_MAX, BLOCK_REFERENCES_MAX, BLOCK_TOKENS_MAX, BLOCKS_MAX, BlockHash, REQUESTS_MAX, Request,
    TOKENS_MAX,
};
use crate::results::{BenchError, io};

/// Maximum length of a file. The longest public one has 4 MB.
const FILE_BYTES_MAX: u64 = 32 << 20;

/// Bits of a block id within its file. The session number is above them.
const BLOCK_ID_BITS: u32 = 40;

/// Maximum number of files.
const FILES_MAX: usize = (1 << (64 - BLOCK_ID_BITS)) - 1;

/// A file.
#[derive(Deserialize)]
struct SessionFile {
    /// Tokens of a block.
    block_size: u32,
    hash_id_scope: Scope,
    requests: Vec<SessionRequest>,
}

/// Where a block id has a meaning.
#[derive(Clone, Copy, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum Scope {
    /// In its file.
    Local,
    Global,
}

/// A request, or the requests of an agent that the session started.
#[derive(Deserialize)]
struct SessionRequest {
    /// Seconds since the start of the session, or of the agent. For the requests of an agent: the end of its work.
    t: f64,
    /// Time that an agent worked, if it ended.
    duration_ms: Option<f64>,
    #[serde(rename = "in", default)]
    input_tokens: u64,
    #[serde(rename = "out", default)]
    output_tokens: u64,
    #[serde(default)]
    hash_ids: Vec<u64>,
    requests: Option<Vec<SessionRequest>>,
}

/// How files become a trace.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SessionOptions {
    /// Tokens of a block of the trace: a multiple of those of the files.
    pub(crate) block_tokens: u32,
    /// Later requests of a session are left out.
    pub(crate) longest_us: u64,
    /// Whether requests of agents that a session starts are part of the trace, as sessions of their own.
    pub(crate) agents: bool,
}

/// Iterator over the requests of all sessions, in order of time. It ends after an error.
pub(crate) struct SessionFiles {
    options: SessionOptions,
    /// Sessions that have not begun: (start in microseconds, number, file), the next one first.
    waiting: VecDeque<(u64, u64, PathBuf)>,
    /// Rest of each session that has begun.
    running: Vec<VecDeque<Request>>,
    /// Time and index of the next request of each session.
    next: BinaryHeap<Reverse<(u64, usize)>>,
    /// Sessions so far, those of agents included.
    sessions: u64,
    requests: u64,
    references: u64,
}

impl SessionFiles {
    /// `starts` has the start of each session in microseconds, and its file.
    pub(crate) fn new(
        mut starts: Vec<(u64, PathBuf)>,
        options: SessionOptions,
    ) -> Result<SessionFiles, BenchError> {
        if starts.len() > FILES_MAX {
            return Err(BenchError::Wrong(format!("more than {FILES_MAX} files")));
        }
        starts.sort();
        let waiting = (0..).zip(starts).map(|(number, (start, path))| (start, number, path)).collect();
        Ok(SessionFiles {
            options,
            waiting,
            running: vec![],
            next: BinaryHeap::new(),
            sessions: 0,
            requests: 0,
            references: 0,
        })
    }

    fn next_request(&mut self) -> Result<Option<Request>, BenchError> {
        loop {
            let next = self.next.peek().map(|Reverse((at_us, _))| *at_us);
            let begins = |&(start, ..): &(u64, u64, PathBuf)| next.is_none_or(|next| start <= next);
            let Some((start_us, number, path)) = self.waiting.pop_front_if(|waiting| begins(waiting)) else {
                break;
            };
            let wrong = |what: String| BenchError::Wrong(format!("{}: {what}", path.display()));
            let bytes = read(&path)?;
            let requests = self.session(&bytes, start_us, number).map_err(wrong)?;
            self.requests += requests.len() as u64;
            self.references += requests.iter().map(|request| request.blocks.len() as u64).sum::<u64>();
            if self.requests > REQUESTS_MAX || self.references > BLOCK_REFERENCES_MAX {
                return Err(wrong(format!(
                    "a trace holds at most {REQUESTS_MAX} requests and {BLOCK_REFERENCES_MAX} blocks; use fewer sessions or \
                     larger blocks"
                )));
            }
            let first = requests.front().map(|first| first.at_us);
            self.next.extend(first.map(|first| Reverse((first, self.running.len()))));
            self.running.push(requests);
        }
        let Some(Reverse((_, index))) = self.next.pop() else { return Ok(None) };
        let session = &mut self.running[index];
        let request = session.pop_front();
        match session.front() {
            Some(following) => self.next.push(Reverse((following.at_us, index))),
            None => *session = VecDeque::new(),
        }
        Ok(request)
    }

    /// Returns the requests of a file in order of time.
    fn session(&mut self, json: &[u8], start_us: u64, number: u64) -> Result<VecDeque<Request>, String> {
        let not =
            |error| format!("not a session of kv-cache-tester ({error}); see docs/trace.md for the format");
        let SessionFile { block_size, hash_id_scope, requests } =
            serde_json::from_slice(json).map_err(not)?;
        let block_tokens = self.options.block_tokens;
        if !(1..=BLOCK_TOKENS_MAX).contains(&block_size) || !block_tokens.is_multiple_of(block_size) {
            return Err(format!(
                "its blocks have {block_size} tokens, and {block_tokens} is no multiple of that"
            ));
        }
        let prefix = match hash_id_scope {
            // Above the ids of files with global ones.
            Scope::Local => (number + 1) << BLOCK_ID_BITS,
            Scope::Global => 0,
        };
        let mut parser = SessionParser {
            options: self.options,
            session_start_us: start_us,
            step: (block_tokens / block_size) as usize,
            prefix,
            sessions: &mut self.sessions,
            requests: vec![],
        };
        parser.add(requests, start_us)?;
        let mut requests = parser.requests;
        requests.sort_by_key(|request| request.at_us);
        Ok(requests.into())
    }
}

struct SessionParser<'a> {
    options: SessionOptions,
    session_start_us: u64,
    /// Blocks of the file per block of the trace.
    step: usize,
    prefix: u64,
    sessions: &'a mut u64,
    requests: Vec<Request>,
}

impl SessionParser<'_> {
    /// Adds the requests of a session, or of an agent, that started at a time. serde_json bounds the depth of the recursion.
    fn add(&mut self, requests: Vec<SessionRequest>, start_us: u64) -> Result<(), String> {
        let (session, mut turn) = (*self.sessions, 0);
        *self.sessions += 1;
        for request in requests {
            let seconds = 0.0..=AT_MS_MAX / 1000.0;
            let duration = request.duration_ms.unwrap_or(0.0) / 1000.0;
            if !seconds.contains(&request.t) || !seconds.contains(&duration) {
                return Err(format!("a time must be 0 to {} seconds", AT_MS_MAX / 1000.0));
            }
            let at_us = start_us + (request.t * 1e6).round() as u64;
            if let Some(agent) = request.requests {
                if self.options.agents {
                    let began_us = at_us.saturating_sub((duration * 1e6).round() as u64);
                    self.add(agent, began_us.max(start_us))?;
                }
                continue;
            }
            if request.input_tokens > TOKENS_MAX || request.output_tokens > TOKENS_MAX {
                return Err(format!("a request must have at most {TOKENS_MAX} tokens"));
            }
            // A hash covers the whole prefix, so that the last one of some blocks stands for all of them.
            let hashes = request.hash_ids.into_iter().skip(self.step - 1).step_by(self.step);
            let blocks: Vec<BlockHash> = hashes.map(|id| self.hash(id)).collect::<Result<_, _>>()?;
            if blocks.len() > BLOCKS_MAX {
                return Err(format!("a request must have at most {BLOCKS_MAX} blocks; use larger ones"));
            }
            if at_us - self.session_start_us > self.options.longest_us || blocks.is_empty() {
                continue;
            }
            self.requests.push(Request {
                at_us,
                session,
                turn,
                input_tokens: request.input_tokens,
                output_tokens: request.output_tokens,
                blocks,
            });
            turn += 1;
        }
        Ok(())
    }

    fn hash(&self, id: u64) -> Result<BlockHash, String> {
        match id >> BLOCK_ID_BITS {
            0 => Ok(BlockHash(self.prefix | id)),
            _ => Err(format!("a block id must be less than {}", 1u64 << BLOCK_ID_BITS)),
        }
    }
}

fn read(path: &Path) -> Result<Vec<u8>, BenchError> {
    let file = File::open(path).map_err(io("opening a session"))?;
    let mut bytes = vec![];
    file.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io("reading a session"))?;
    if bytes.len() as u64 > FILE_BYTES_MAX {
        return Err(BenchError::Wrong(format!("{}: longer than {FILE_BYTES_MAX} bytes", path.display())));
    }
    Ok(bytes)
}

impl Iterator for SessionFiles {
    type Item = Result<Request, BenchError>;

    fn next(&mut self) -> Option<Result<Request, BenchError>> {
        let next = self.next_request().transpose();
        if matches!(next, Some(Err(_))) {
            (self.waiting, self.next) = Default::default();
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HOUR_US: u64 = 3_600_000_000;

    /// Excerpt of a public file: three requests, and an agent with two.
    fn excerpt() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/traces/session.json")
    }

    fn options(block_tokens: u32, agents: bool) -> SessionOptions {
        SessionOptions { block_tokens, longest_us: HOUR_US, agents }
    }

    fn requests(starts: &[u64], options: SessionOptions) -> Vec<Request> {
        let starts = starts.iter().map(|&start| (start, excerpt())).collect();
        SessionFiles::new(starts, options).unwrap().collect::<Result<_, _>>().unwrap()
    }

    fn parse(json: &[u8]) -> Result<VecDeque<Request>, String> {
        SessionFiles::new(vec![], options(64, true)).unwrap().session(json, 0, 0)
    }

    #[test]
    fn requests_of_agents_are_sessions_of_their_own() {
        let all = requests(&[0], options(64, true));
        assert!(all.is_sorted_by_key(|request| request.at_us));
        let turns = |session: u64| -> Vec<u32> {
            all.iter().filter(|request| request.session == session).map(|request| request.turn).collect()
        };
        assert_eq!((turns(0), turns(1)), (vec![0, 1, 2], vec![0, 1]));
        // The file has the end of the agent and the time that it worked.
        let first = all.iter().find(|request| request.session == 1).map(|request| request.at_us);
        assert_eq!(first, Some(134_227_000 - 126_015_000));
        let without = requests(&[0], options(64, false));
        assert_eq!(without.len(), 3);
        assert!(without.iter().all(|request| request.session == 0));
    }

    #[test]
    fn agent_that_did_not_end_begins_at_its_time() {
        let json = br#"{"block_size":64,"hash_id_scope":"local","requests":[
            {"t":5,"duration_ms":null,"requests":[{"t":1,"in":64,"out":1,"hash_ids":[1]}]}]}"#;
        assert_eq!(parse(json).unwrap()[0].at_us, 6_000_000);
    }

    #[test]
    fn larger_blocks_have_the_hash_of_their_last_part() {
        let (small, large) = (requests(&[0], options(64, true)), requests(&[0], options(128, true)));
        for (small, large) in small.iter().zip(&large) {
            let expected: Vec<BlockHash> = small.blocks.iter().copied().skip(1).step_by(2).collect();
            assert_eq!(large.blocks, expected);
        }
    }

    #[test]
    fn sessions_begin_at_their_start_and_share_no_blocks() {
        let all = requests(&[5_000_000, 0], options(64, false));
        assert!(all.is_sorted_by_key(|request| request.at_us));
        let of = |session: u64| all.iter().filter(move |request| request.session == session);
        let times = |session| of(session).map(|request| request.at_us).collect::<Vec<_>>();
        assert_eq!(times(1), times(0).iter().map(|at_us| at_us + 5_000_000).collect::<Vec<_>>());
        assert!(
            of(0)
                .flat_map(|request| &request.blocks)
                .all(|block| of(1).all(|other| !other.blocks.contains(block)))
        );
    }

    #[test]
    fn late_requests_are_left_out() {
        let options = SessionOptions { longest_us: 0, ..options(64, true) };
        assert!(requests(&[7], options).iter().all(|request| request.at_us == 7));
    }

    #[test]
    fn values_out_of_range_are_rejected() {
        let session = |request: &str, block_size: &str, scope: &str| {
            format!(r#"{{"block_size":{block_size},"hash_id_scope":"{scope}","requests":[{request}]}}"#)
        };
        let request = r#"{"t":1,"in":100,"out":1,"hash_ids":[1]}"#;
        assert_eq!(parse(session(request, "64", "local").as_bytes()).unwrap().len(), 1);
        for (json, reason) in [
            (session(request, "0", "local"), "0 tokens"),
            (session(request, "48", "local"), "no multiple"),
            (session(request, "64", "country"), "docs/trace.md"),
            (session(&request.replace("\"t\":1", "\"t\":-1"), "64", "local"), "a time must be"),
            (session(&request.replace("100", "99999999999"), "64", "local"), "tokens"),
            (session(&request.replace("[1]", "[99999999999999]"), "64", "local"), "a block id"),
            (session(r#"{"in":1}"#, "64", "local"), "docs/trace.md"),
            (session(&r#"{"t":0,"requests":["#.repeat(500), "64", "local"), "docs/trace.md"),
        ] {
            let error = parse(json.as_bytes()).unwrap_err();
            assert!(error.contains(reason), "{error}");
        }
    }

    #[test]
    fn iterator_ends_after_unreadable_file() {
        let starts = vec![(0, PathBuf::from("/nonexistent")), (1, excerpt())];
        let mut files = SessionFiles::new(starts, options(64, true)).unwrap();
        assert!(files.next().unwrap().is_err());
        assert!(files.next().is_none());
    }

    proptest! {
        #[test]
        fn parser_never_panics_on_changed_bytes(changes: Vec<(prop::sample::Index, u8)>) {
            let mut json = std::fs::read(excerpt()).unwrap();
            for (at, byte) in changes {
                let at = at.index(json.len());
                json[at] = byte;
            }
            let _ = parse(&json);
        }
    }
}
