//! Lines of other projects' traces. `docs/trace.md` has an example of each.

use std::collections::HashMap;

use serde::Deserialize;

use super::{BLOCK_TOKENS_DEFAULT, BlockHash};

/// Tokens of a block in Bailian's traces.
const BAILIAN_BLOCK_TOKENS: u32 = 16;

/// Format of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Moontide,
    /// Public traces of Mooncake: no sessions.
    Mooncake,
    /// Public traces of Alibaba's Bailian: seconds, and the chat that a request continues.
    Bailian,
    /// Schema `dynamo.request.trace.v1` of NVIDIA Dynamo: sessions with names.
    Dynamo,
}

impl Format {
    /// Returns the format of a request and its tokens per block; `None` if it has none of these formats.
    pub(super) fn of(first: &serde_json::Value) -> Option<(Format, u32)> {
        let has = |name: &str| first.get(name).is_some();
        if let Some(event) = first.get("event") {
            let replay = event.get("request")?.get("replay")?;
            let tokens = u32::try_from(replay.get("trace_block_size")?.as_u64()?).ok()?;
            return Some((Format::Dynamo, tokens));
        }
        match (has("timestamp") && has("hash_ids"), has("chat_id")) {
            (true, true) => Some((Format::Bailian, BAILIAN_BLOCK_TOKENS)),
            (true, false) => Some((Format::Mooncake, BLOCK_TOKENS_DEFAULT)),
            (false, _) => None,
        }
    }
}

/// Whether a line of Dynamo's traces is an event other than a request.
pub(super) fn is_other_event(line: &serde_json::Value) -> bool {
    line.get("event").is_some_and(|event| event.get("schema").is_some() && event.get("request").is_none())
}

/// Fields of a request in Mooncake's public traces.
#[derive(Deserialize)]
pub(super) struct MooncakeLine {
    /// Milliseconds.
    pub(super) timestamp: f64,
    pub(super) input_length: u64,
    pub(super) output_length: u64,
    pub(super) hash_ids: Vec<u64>,
}

/// Fields of a request in Bailian's public traces.
#[derive(Deserialize)]
pub(super) struct BailianLine {
    pub(super) chat_id: i64,
    /// The chat that this one continues; negative for a new one.
    #[serde(default = "no_parent")]
    pub(super) parent_chat_id: i64,
    /// Seconds.
    pub(super) timestamp: f64,
    pub(super) input_length: u64,
    pub(super) output_length: u64,
    pub(super) hash_ids: Vec<u64>,
}

fn no_parent() -> i64 {
    -1
}

/// Fields of an event in Dynamo's traces.
#[derive(Deserialize)]
pub(super) struct DynamoLine {
    /// Milliseconds, at the end of the request.
    pub(super) timestamp: f64,
    pub(super) event: DynamoEvent,
}

#[derive(Deserialize)]
pub(super) struct DynamoEvent {
    pub(super) agent_context: Option<DynamoContext>,
    /// Missing in other events, such as the calls of tools.
    pub(super) request: Option<DynamoRequest>,
}

#[derive(Deserialize)]
pub(super) struct DynamoContext {
    pub(super) session_id: String,
}

#[derive(Deserialize)]
pub(super) struct DynamoRequest {
    pub(super) input_tokens: u64,
    pub(super) output_tokens: u64,
    pub(super) replay: DynamoReplay,
}

#[derive(Deserialize)]
pub(super) struct DynamoReplay {
    pub(super) trace_block_size: u32,
    pub(super) input_sequence_hashes: Vec<u64>,
}

/// Numbers of sessions and turns, for formats that name sessions otherwise. Keeps a few words per session.
#[derive(Debug, Default)]
pub(super) struct Sessions {
    /// Session and last turn, by name.
    by_name: HashMap<Box<str>, (u64, u32)>,
    /// Session and turn of each chat.
    by_chat: HashMap<i64, (u64, u32)>,
    count: u64,
}

impl Sessions {
    /// Numbers a request of the session with this name.
    pub(super) fn named(&mut self, name: &str) -> (u64, u32) {
        if let Some((session, turn)) = self.by_name.get_mut(name) {
            *turn = turn.saturating_add(1);
            return (*session, *turn);
        }
        let numbers = self.first_turn();
        self.by_name.insert(name.into(), numbers);
        numbers
    }

    /// Numbers a chat that continues `parent`.
    pub(super) fn continued(&mut self, chat: i64, parent: i64) -> (u64, u32) {
        let numbers = match self.by_chat.get(&parent) {
            Some((session, turn)) => (*session, turn.saturating_add(1)),
            None => self.first_turn(),
        };
        self.by_chat.insert(chat, numbers);
        numbers
    }

    /// Numbers of the first request of a new session.
    pub(super) fn first_turn(&mut self) -> (u64, u32) {
        self.count += 1;
        (self.count - 1, 0)
    }
}

pub(super) fn blocks(hashes: Vec<u64>) -> Vec<BlockHash> {
    hashes.into_iter().map(BlockHash).collect()
}
