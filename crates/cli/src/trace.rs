//! Traces of KV-cache traffic: which blocks which request would ask for, and when.
//!
//! The format is described in `docs/trace.md`. A trace holds no text and no token: a block is known by a hash that
//! covers the whole prefix up to its end, so that equal prefixes have equal leading hashes, and nothing else is told.
//!
//! | file | what |
//! |---|---|
//! | `reader` | from lines to requests, every bound checked; takes the public Mooncake format as well |
//! | `writer` | from requests to lines |
//! | `generate` | requests of made-up users, from a seed |
//! | `summary` | what a trace amounts to |
//!
//! Invariants: times do not go back; a request has at most [`BLOCKS_MAX`] blocks; whatever is read has passed the same
//! checks as what is written.

mod generate;
mod reader;
mod summary;
mod writer;

pub(crate) use generate::{Generator, Shape};
pub(crate) use reader::Reader;
pub(crate) use summary::Summary;
pub(crate) use writer::Writer;

/// The version that the first line names.
pub(crate) const VERSION: u32 = 1;
/// Blocks of one request: two million tokens at 512 each, more than any context.
pub(crate) const BLOCKS_MAX: usize = 4096;
/// Requests of a trace: days of a busy cluster. What reads traces may keep a few words per request.
pub(crate) const REQUESTS_MAX: u64 = 10_000_000;
/// Blocks of all requests together, counted as often as they are named: 2 GiB of hashes for whoever keeps them.
pub(crate) const BLOCK_REFERENCES_MAX: u64 = 1 << 28;
/// Tokens of one request, in or out.
pub(crate) const TOKENS_MAX: u64 = 1 << 32;
/// Latest arrival: thirty years, far below where a float loses microseconds.
pub(crate) const AT_MS_MAX: f64 = 1e12;
/// What a block holds unless told otherwise. Mooncake's traces have 512 tokens.
pub(crate) const BLOCK_TOKENS_DEFAULT: u32 = 512;
/// What a block weighs unless told otherwise: 256 bytes per token.
pub(crate) const BLOCK_BYTES_DEFAULT: u64 = 131_072;
/// The largest block: an object of 64 MiB.
pub(crate) const BLOCK_BYTES_MAX: u64 = 64 << 20;
/// The largest block in tokens.
pub(crate) const BLOCK_TOKENS_MAX: u32 = 1 << 20;

/// What holds for a whole trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Header {
    /// Bytes that a replay stores for a block.
    pub(crate) block_bytes: u64,
    /// Tokens that a block stands for.
    pub(crate) block_tokens: u32,
    /// From what the trace was made; 0 if from life.
    pub(crate) seed: u64,
}

/// A block, by a hash of everything up to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockHash(pub(crate) u64);

/// One request of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// When it arrives, since the beginning.
    pub(crate) at_us: u64,
    /// The conversation that it belongs to.
    pub(crate) session: u64,
    /// The how-manieth request of its conversation this is, from 0.
    pub(crate) turn: u32,
    /// Tokens of the prompt, with everything said before.
    pub(crate) input_tokens: u64,
    /// Tokens of the answer.
    pub(crate) output_tokens: u64,
    /// The blocks of the prompt, in order.
    pub(crate) blocks: Vec<BlockHash>,
}

#[cfg(test)]
mod tests {
    use super::reader::TraceError;
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
        fn what_is_written_is_read(requests in requests(), seed: u64) {
            let header = Header { block_bytes: 4096, block_tokens: 512, seed };
            let bytes = write(header, &requests);
            let reader = Reader::new(&bytes[..]).unwrap();
            prop_assert_eq!(reader.header(), header);
            let read: Result<Vec<Request>, TraceError> = reader.collect();
            prop_assert_eq!(read.unwrap(), requests);
        }
    }

    #[test]
    fn the_longest_request_is_written_and_read() {
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
