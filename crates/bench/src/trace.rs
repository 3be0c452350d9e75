//! Traces of KV-cache traffic: the blocks and arrival time of each request.
//!
//! `docs/trace.md` describes the format. A trace contains no text and no tokens: a block is identified by a hash of the
//! whole prefix up to its end. Equal prefixes have equal leading hashes; a trace reveals nothing else.
//!
//! | file | content |
//! |---|---|
//! | `open` | trace files, plain or compressed |
//! | `reader` | parser of lines into requests, checks every bound |
//! | `formats` | lines of other projects' traces: Mooncake, Bailian, Dynamo |
//! | `session_files` | sessions of coding agents, one file each, merged into requests in order of time |
//! | `writer` | formatter of requests as lines |
//! | `generate` | synthetic requests from a seed |
//! | `summary` | totals of a trace |
//! | `commands` | `moontide bench trace-gen`, `trace-sessions` and `trace-info` |
//!
//! Invariants: arrival times do not decrease; a request has at most [`BLOCKS_MAX`] blocks; requests that are read pass
//! the same checks as requests that are written.

mod commands;
mod formats;
mod generate;
mod open;
mod reader;
mod session_files;
mod summary;
mod writer;

pub(crate) use commands::{
    GENERATE_EXAMPLES, GenerateArgs, INFO_EXAMPLES, InfoArgs, SESSIONS_EXAMPLES, SessionsArgs, generate,
    info, sessions,
};
pub(crate) use generate::{Generator, TraceParams};
pub(crate) use open::{open, unread};
pub(crate) use summary::Summary;
pub(crate) use writer::Writer;

/// Version in the first line of a trace.
pub(crate) const VERSION: u32 = 1;
/// Maximum number of blocks of a request: a million tokens at 64 each, or 262,144 at 16.
pub(crate) const BLOCKS_MAX: usize = 16_384;
/// Maximum number of requests of a trace: days of a busy cluster. Readers may keep a few words per request.
pub(crate) const REQUESTS_MAX: u64 = 10_000_000;
/// Maximum number of block references of all requests together: 2 GiB of hashes for a reader that keeps them.
pub(crate) const BLOCK_REFERENCES_MAX: u64 = 1 << 28;
/// Maximum number of input tokens, and of output tokens, of a request.
pub(crate) const TOKENS_MAX: u64 = 1 << 32;
/// Latest arrival, about thirty years: far below the value at which an `f64` loses microseconds.
pub(crate) const AT_MS_MAX: f64 = 1e12;
/// Default number of tokens of a block. Mooncake's traces use 512.
pub(crate) const BLOCK_TOKENS_DEFAULT: u32 = 512;
/// Default number of bytes of a block: 256 bytes per token.
pub(crate) const BLOCK_BYTES_DEFAULT: u64 = 131_072;
/// Maximum number of bytes of a block: an object of 64 MiB.
pub(crate) const BLOCK_BYTES_MAX: u64 = 64 << 20;
/// Maximum number of tokens of a block.
pub(crate) const BLOCK_TOKENS_MAX: u32 = 1 << 20;

/// Bytes of a block in traces that do not name them: they depend on the model.
fn default_block_bytes(block_tokens: u32) -> u64 {
    let bytes = BLOCK_BYTES_DEFAULT * u64::from(block_tokens) / u64::from(BLOCK_TOKENS_DEFAULT);
    bytes.clamp(1, BLOCK_BYTES_MAX)
}

/// Properties of a whole trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Bytes that a replay stores for a block.
    pub(crate) block_bytes: u64,
    /// Tokens of a block.
    pub(crate) block_tokens: u32,
    /// Seed of a generated trace; 0 for a recorded trace.
    pub(crate) seed: u64,
}

/// Hash of the whole prefix up to the end of a block; identifies the block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockHash(pub(crate) u64);

/// One request of an inference engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// Arrival time in microseconds since the start of the trace.
    pub(crate) at_us: u64,
    /// Session (chat) of the request.
    pub(crate) session: u64,
    /// Index of the request in its session, from 0.
    pub(crate) turn: u32,
    /// Tokens of the prompt, including all earlier turns.
    pub(crate) input_tokens: u64,
    /// Tokens of the generated output.
    pub(crate) output_tokens: u64,
    /// Blocks of the prompt, in order.
    pub(crate) blocks: Vec<BlockHash>,
}

#[cfg(test)]
mod tests {
    use super::reader::{Reader, TraceError};
    use super::*;
    use proptest::prelude::*;

    fn requests() -> impl Strategy<Value = Vec<Request>> {
        let request = (
            any::<u32>(),
            any::<u64>(),
            any::<u32>(),
            0..TOKENS_MAX,
            proptest::collection::vec(any::<u64>(), 0..40),
        );
        proptest::collection::vec(request, 0..20).prop_map(|list| {
            let mut at_us = 0;
            list.into_iter()
                .map(|(later, session, turn, output_tokens, blocks)| {
                    at_us += u64::from(later);
                    let input_tokens = blocks.len() as u64 * 512;
                    let blocks = blocks.into_iter().map(BlockHash).collect();
                    Request { at_us, session, turn, input_tokens, output_tokens, blocks }
                })
                .collect()
        })
    }

    fn write(header: Header, requests: &[Request]) -> Vec<u8> {
        let mut bytes = vec![];
        let mut writer = Writer::new(&mut bytes, header).unwrap();
        requests.iter().for_each(|request| writer.write(request).unwrap());
        writer.finish().unwrap();
        bytes
    }

    proptest! {
        #[test]
        fn trace_round_trips(requests in requests(), seed: u64) {
            let header = Header { block_bytes: 4096, block_tokens: 512, seed };
            let bytes = write(header, &requests);
            let reader = Reader::new(&bytes[..]).unwrap();
            prop_assert_eq!(reader.header(), header);
            let read: Result<Vec<Request>, TraceError> = reader.collect();
            prop_assert_eq!(read.unwrap(), requests);
        }
    }

    #[test]
    fn largest_request_round_trips() {
        let blocks: Vec<BlockHash> = (0..BLOCKS_MAX as u64).map(|n| BlockHash(u64::MAX - n)).collect();
        let longest = Request {
            at_us: (AT_MS_MAX * 1000.0) as u64,
            session: u64::MAX,
            turn: u32::MAX,
            input_tokens: TOKENS_MAX,
            output_tokens: TOKENS_MAX,
            blocks,
        };
        let header =
            Header { block_bytes: BLOCK_BYTES_MAX, block_tokens: BLOCK_TOKENS_DEFAULT, seed: u64::MAX };
        let bytes = write(header, std::slice::from_ref(&longest));
        let read: Result<Vec<Request>, TraceError> = Reader::new(&bytes[..]).unwrap().collect();
        assert_eq!(read.unwrap(), [longest]);
    }
}
