//! Parser of traces. Input is untrusted: every bound is checked, and every error names its line.

use std::io::{BufRead, Read};

use serde::Deserialize;

use super::formats::{
    BailianLine, DynamoLine, DynamoRequest, Format, MooncakeLine, Sessions, blocks, is_other_event,
};
use super::{
    AT_MS_MAX, BLOCK_BYTES_DEFAULT, BLOCK_BYTES_MAX, BLOCK_REFERENCES_MAX, BLOCK_TOKENS_DEFAULT,
    BLOCK_TOKENS_MAX, BLOCKS_MAX, BlockHash, Header, REQUESTS_MAX, Request, TOKENS_MAX, VERSION,
    default_block_bytes,
};

/// Maximum length of a line. The longest Moontide request is 312 KB, the longest one of Dynamo 345 KB.
const LINE_BYTES_MAX: usize = 512 << 10;

/// Error of reading a trace. Line numbers start at 1.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    /// An I/O error.
    #[error("line {line}: {source}")]
    Io { line: u64, source: std::io::Error },
    /// A line is longer than any valid request.
    #[error("line {line} is longer than {LINE_BYTES_MAX} bytes; a trace has one request per line")]
    LongLine { line: u64 },
    /// A line is not JSON of the expected form.
    #[error("line {line} is not a request of a trace ({source}); see docs/trace.md for the format")]
    NotARequest { line: u64, source: serde_json::Error },
    /// The first line is neither a Moontide header nor a request of another known format.
    #[error(
        "line 1 is neither the header of a Moontide trace nor a request of a Mooncake, Bailian or Dynamo trace; see docs/trace.md for the formats"
    )]
    NotATrace,
    /// The trace has a version that this program does not support.
    #[error("trace has version {version}, this program reads version {VERSION}; use a newer moontide")]
    Version { version: u64 },
    /// A value is out of range.
    #[error("line {line}: {what} must be {rule}")]
    Value { line: u64, what: &'static str, rule: String },
    /// The trace exceeds the limit of requests or blocks.
    #[error(
        "line {line}: a trace holds at most {REQUESTS_MAX} requests and {BLOCK_REFERENCES_MAX} blocks; split it"
    )]
    TooMuch { line: u64 },
}

/// Fields of a Moontide header besides the version.
#[derive(Deserialize)]
struct HeaderLine {
    block_bytes: u64,
    block_tokens: u32,
    #[serde(default)]
    seed: u64,
}

/// Fields of a Moontide request.
#[derive(Deserialize)]
struct RequestLine<'a> {
    at_ms: f64,
    session: u64,
    turn: u32,
    input_tokens: u64,
    output_tokens: u64,
    #[serde(borrow)]
    blocks: Vec<&'a str>,
}

/// Iterator over the requests of a trace. It ends after an error.
pub(crate) struct Reader<R> {
    input: R,
    header: Header,
    format: Format,
    line: Vec<u8>,
    /// Number of the line in `line`, from 1.
    number: u64,
    /// `line` is a request that was read ahead.
    is_ahead: bool,
    is_over: bool,
    last_at_us: u64,
    sessions: Sessions,
    requests: u64,
    references: u64,
}

impl<R: BufRead> Reader<R> {
    /// Reads the first line, which determines the format.
    pub(crate) fn new(input: R) -> Result<Reader<R>, TraceError> {
        let header = Header { block_bytes: BLOCK_BYTES_DEFAULT, block_tokens: BLOCK_TOKENS_DEFAULT, seed: 0 };
        let mut reader = Reader {
            input,
            header,
            format: Format::Mooncake,
            line: vec![],
            number: 0,
            is_ahead: false,
            is_over: false,
            last_at_us: 0,
            sessions: Sessions::default(),
            requests: 0,
            references: 0,
        };
        if !reader.next_line()? {
            return Err(TraceError::NotATrace);
        }
        let mut first: serde_json::Value =
            serde_json::from_slice(&reader.line).map_err(|_| TraceError::NotATrace)?;
        while is_other_event(&first) && reader.next_line()? {
            first = reader.parse()?;
        }
        if let Some(version) = first.get("moontide_trace") {
            if version.as_u64() != Some(VERSION.into()) {
                return Err(TraceError::Version { version: version.as_u64().unwrap_or(0) });
            }
            reader.header = reader.read_header()?;
            reader.format = Format::Moontide;
        } else {
            let (format, block_tokens) = Format::of(&first).ok_or(TraceError::NotATrace)?;
            reader.check_block_tokens(block_tokens)?;
            reader.header = Header { block_bytes: default_block_bytes(block_tokens), block_tokens, seed: 0 };
            reader.format = format;
            reader.is_ahead = true;
        }
        Ok(reader)
    }

    /// Header of the trace, or the defaults for its format.
    pub(crate) fn header(&self) -> Header {
        self.header
    }

    fn read_header(&self) -> Result<Header, TraceError> {
        let HeaderLine { block_bytes, block_tokens, seed } = self.parse()?;
        self.check("block_bytes", (1..=BLOCK_BYTES_MAX).contains(&block_bytes), || {
            format!("1 to {BLOCK_BYTES_MAX}")
        })?;
        self.check_block_tokens(block_tokens)?;
        Ok(Header { block_bytes, block_tokens, seed })
    }

    fn check_block_tokens(&self, block_tokens: u32) -> Result<(), TraceError> {
        self.check("the tokens of a block", (1..=BLOCK_TOKENS_MAX).contains(&block_tokens), || {
            format!("1 to {BLOCK_TOKENS_MAX}")
        })
    }

    /// Reads the next line that is not empty; returns false at the end.
    fn next_line(&mut self) -> Result<bool, TraceError> {
        loop {
            self.line.clear();
            self.number += 1;
            let mut bounded = self.input.by_ref().take(LINE_BYTES_MAX as u64 + 1);
            let n = bounded
                .read_until(b'\n', &mut self.line)
                .map_err(|source| TraceError::Io { line: self.number, source })?;
            if n > LINE_BYTES_MAX {
                return Err(TraceError::LongLine { line: self.number });
            }
            if n == 0 {
                return Ok(false);
            }
            if !self.line.trim_ascii().is_empty() {
                return Ok(true);
            }
        }
    }

    fn parse<'a, T: Deserialize<'a>>(&'a self) -> Result<T, TraceError> {
        let not = |source| TraceError::NotARequest { line: self.number, source };
        serde_json::from_slice(&self.line).map_err(not)
    }

    fn check(
        &self,
        what: &'static str,
        holds: bool,
        rule: impl FnOnce() -> String,
    ) -> Result<(), TraceError> {
        if holds { Ok(()) } else { Err(TraceError::Value { line: self.number, what, rule: rule() }) }
    }

    fn read_request(&mut self) -> Result<Option<Request>, TraceError> {
        if !std::mem::take(&mut self.is_ahead) && !self.next_line()? {
            return Ok(None);
        }
        let request = match self.format {
            Format::Moontide => self.moontide()?,
            Format::Mooncake => self.mooncake()?,
            Format::Bailian => self.bailian()?,
            Format::Dynamo => match self.dynamo()? {
                Some(request) => request,
                None => return Ok(None),
            },
        };
        self.check("input tokens", request.input_tokens <= TOKENS_MAX, || format!("at most {TOKENS_MAX}"))?;
        self.check("output tokens", request.output_tokens <= TOKENS_MAX, || format!("at most {TOKENS_MAX}"))?;
        self.check("the number of blocks", request.blocks.len() <= BLOCKS_MAX, || {
            format!("at most {BLOCKS_MAX}")
        })?;
        let (at_us, last) = (request.at_us, self.last_at_us);
        self.check("the time", at_us >= last, || {
            "no earlier than that of the line before; sort the trace".into()
        })?;
        self.last_at_us = at_us;
        self.requests += 1;
        self.references += request.blocks.len() as u64;
        if self.requests > REQUESTS_MAX || self.references > BLOCK_REFERENCES_MAX {
            return Err(TraceError::TooMuch { line: self.number });
        }
        Ok(Some(request))
    }

    fn at_us(&self, ms: f64) -> Result<u64, TraceError> {
        self.check("the time", (0.0..=AT_MS_MAX).contains(&ms), || format!("0 to {AT_MS_MAX} milliseconds"))?;
        Ok((ms * 1000.0).round() as u64)
    }

    fn moontide(&self) -> Result<Request, TraceError> {
        let RequestLine { at_ms, session, turn, input_tokens, output_tokens, blocks } = self.parse()?;
        let blocks_max = input_tokens.div_ceil(self.header.block_tokens.into());
        self.check("the number of blocks", blocks.len() as u64 <= blocks_max, || {
            format!("at most {blocks_max} for its input tokens")
        })?;
        let blocks: Option<Vec<BlockHash>> = blocks.into_iter().map(hash).collect();
        let Some(blocks) = blocks else {
            let rule = "1 to 16 hexadecimal digits each".to_owned();
            return Err(TraceError::Value { line: self.number, what: "blocks", rule });
        };
        Ok(Request { at_us: self.at_us(at_ms)?, session, turn, input_tokens, output_tokens, blocks })
    }

    /// Mooncake's traces do not identify sessions: every request is a session of its own.
    fn mooncake(&self) -> Result<Request, TraceError> {
        let MooncakeLine { timestamp, input_length, output_length, hash_ids } = self.parse()?;
        Ok(Request {
            at_us: self.at_us(timestamp)?,
            session: self.requests,
            turn: 0,
            input_tokens: input_length,
            output_tokens: output_length,
            blocks: blocks(hash_ids),
        })
    }

    fn bailian(&mut self) -> Result<Request, TraceError> {
        let line: BailianLine = self.parse()?;
        let (session, turn) = self.sessions.continued(line.chat_id, line.parent_chat_id);
        Ok(Request {
            at_us: self.at_us(line.timestamp * 1000.0)?,
            session,
            turn,
            input_tokens: line.input_length,
            output_tokens: line.output_length,
            blocks: blocks(line.hash_ids),
        })
    }

    /// Reads on to the next event that is a request.
    fn dynamo(&mut self) -> Result<Option<Request>, TraceError> {
        let (timestamp, context, request) = loop {
            let DynamoLine { timestamp, event } = self.parse()?;
            match event.request {
                Some(request) => break (timestamp, event.agent_context, request),
                None if self.next_line()? => {}
                None => return Ok(None),
            }
        };
        let (session, turn) = match context {
            Some(context) => self.sessions.named(&context.session_id),
            None => self.sessions.first_turn(),
        };
        let DynamoRequest { input_tokens, output_tokens, replay } = request;
        let block_tokens = self.header.block_tokens;
        self.check("trace_block_size", replay.trace_block_size == block_tokens, || {
            format!("{block_tokens}, as in the first line")
        })?;
        Ok(Some(Request {
            at_us: self.at_us(timestamp)?,
            session,
            turn,
            input_tokens,
            output_tokens,
            blocks: blocks(replay.input_sequence_hashes),
        }))
    }
}

/// Parses a block hash of hexadecimal digits only.
fn hash(digits: &str) -> Option<BlockHash> {
    let is_plain = (1..=16).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_plain.then(|| u64::from_str_radix(digits, 16).ok().map(BlockHash))?
}

impl<R: BufRead> Iterator for Reader<R> {
    type Item = Result<Request, TraceError>;

    fn next(&mut self) -> Option<Result<Request, TraceError>> {
        if self.is_over {
            return None;
        }
        let next = self.read_request().transpose();
        self.is_over = !matches!(next, Some(Ok(_)));
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const HEADER: &str = r#"{"moontide_trace":1,"block_bytes":131072,"block_tokens":512,"seed":7}"#;

    fn read(text: &[u8]) -> Result<Vec<Request>, TraceError> {
        Reader::new(text)?.collect()
    }

    fn request(change: impl FnOnce(&mut serde_json::Value)) -> String {
        let mut request = serde_json::json!({
            "at_ms": 1.5, "session": 3, "turn": 1, "input_tokens": 1100, "output_tokens": 20, "blocks": ["0a", "ff"],
        });
        change(&mut request);
        format!("{HEADER}\n\n{request}\n")
    }

    #[test]
    fn all_request_fields_are_parsed() {
        let expected = Request {
            at_us: 1500,
            session: 3,
            turn: 1,
            input_tokens: 1100,
            output_tokens: 20,
            blocks: vec![BlockHash(10), BlockHash(255)],
        };
        assert_eq!(read(request(|_| {}).as_bytes()).unwrap(), [expected]);
        // Unknown fields are ignored; the final newline is optional.
        assert_eq!(read(request(|r| r["model"] = "x".into()).trim_end().as_bytes()).unwrap().len(), 1);
        assert_eq!(read(HEADER.as_bytes()).unwrap(), []);
    }

    #[test]
    fn mooncake_traces_are_parsed() {
        let text = r#"{"timestamp": 0, "input_length": 6758, "output_length": 500, "hash_ids": [0, 1, 2]}
{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [0, 1, 46]}"#;
        let reader = Reader::new(text.as_bytes()).unwrap();
        assert_eq!(reader.header().block_tokens, 512);
        let requests: Result<Vec<Request>, TraceError> = reader.collect();
        let requests = requests.unwrap();
        assert_eq!(requests.len(), 2);
        assert_eq!(requests[1].at_us, 27_482_000);
        assert_eq!((requests[1].session, requests[1].turn), (1, 0));
        assert_eq!(requests[1].blocks, [BlockHash(0), BlockHash(1), BlockHash(46)]);
    }

    #[test]
    fn bailian_traces_are_parsed_with_sessions() {
        let text = r#"{"chat_id": 159, "parent_chat_id": -1, "timestamp": 61.114, "input_length": 521, "output_length": 132, "type": "text", "turn": 1, "hash_ids": [1, 2]}
{"chat_id": 160, "parent_chat_id": -1, "timestamp": 62.0, "input_length": 30, "output_length": 1, "type": "text", "turn": 1, "hash_ids": [9]}
{"chat_id": 161, "parent_chat_id": 159, "timestamp": 70.5, "input_length": 700, "output_length": 2, "type": "text", "turn": 2, "hash_ids": [1, 2, 3]}"#;
        let reader = Reader::new(text.as_bytes()).unwrap();
        assert_eq!(reader.header(), Header { block_bytes: 4096, block_tokens: 16, seed: 0 });
        let requests = reader.collect::<Result<Vec<Request>, TraceError>>().unwrap();
        let numbers: Vec<_> = requests.iter().map(|r| (r.at_us, r.session, r.turn)).collect();
        assert_eq!(numbers, [(61_114_000, 0, 0), (62_000_000, 1, 0), (70_500_000, 0, 1)]);
        assert_eq!(requests[2].blocks, [BlockHash(1), BlockHash(2), BlockHash(3)]);
    }

    #[test]
    fn dynamo_traces_are_parsed_with_sessions() {
        let line = |at: u64, session: &str, size: u32, hashes: &str| {
            format!(
                "{{\"timestamp\":{at},\"event\":{{\"schema\":\"dynamo.request.trace.v1\",\"agent_context\":{{\"session_id\":\
                 \"{session}\"}},\"request\":{{\"input_tokens\":40,\"output_tokens\":3,\"replay\":{{\"trace_block_size\":{size},\
                 \"input_length\":40,\"input_sequence_hashes\":[{hashes}]}}}}}}}}\n"
            )
        };
        let tool = r#"{"timestamp":4,"event":{"schema":"dynamo.request.trace.v1","event_type":"tool_start","tool":{}}}"#;
        let tool = format!("{tool}\n");
        let text = tool.clone()
            + &line(5, "a:root", 16, "18446744073709551615,2")
            + &tool
            + &line(7, "b\\u002droot", 16, "4")
            + &line(9, "a:root", 16, "18446744073709551615,2,3")
            + &tool;
        let reader = Reader::new(text.as_bytes()).unwrap();
        assert_eq!(reader.header().block_tokens, 16);
        let requests = reader.collect::<Result<Vec<Request>, TraceError>>().unwrap();
        let numbers: Vec<_> = requests.iter().map(|r| (r.at_us, r.session, r.turn, r.blocks.len())).collect();
        assert_eq!(numbers, [(5000, 0, 0, 2), (7000, 1, 0, 1), (9000, 0, 1, 3)]);
        let mixed = line(5, "a", 16, "1") + &line(7, "a", 32, "1");
        let error = read(mixed.as_bytes()).unwrap_err().to_string();
        assert!(error.contains("line 2: trace_block_size must be 16"), "{error}");
        let huge = line(5, "a", u32::MAX, "1");
        assert!(
            read(huge.as_bytes()).unwrap_err().to_string().contains("the tokens of a block must be 1 to")
        );
    }

    #[test]
    fn invalid_request_is_rejected_with_position() {
        let check = |text: String, part: &str| {
            let error = read(text.as_bytes()).unwrap_err().to_string();
            assert!(error.contains("line 3") && error.contains(part), "{error}");
        };
        check(request(|r| r["at_ms"] = (-1).into()), "the time must be 0 to");
        check(request(|r| r["at_ms"] = 1e13.into()), "the time must be 0 to");
        check(request(|r| r["at_ms"] = "soon".into()), "docs/trace.md");
        check(request(|r| r["input_tokens"] = 1024u64.pow(4).into()), "input tokens");
        check(request(|r| r["output_tokens"] = 1024u64.pow(4).into()), "output tokens");
        check(request(|r| r["input_tokens"] = 512.into()), "at most 1");
        check(request(|r| r["blocks"] = vec!["+1"].into()), "hexadecimal");
        check(request(|r| r["blocks"] = vec![""].into()), "hexadecimal");
        check(request(|r| r["blocks"] = vec!["00112233445566778"].into()), "hexadecimal");
        check(
            request(|r| {
                r["input_tokens"] = 10_000_000.into();
                r["blocks"] = vec!["0"; BLOCKS_MAX + 1].into();
            }),
            "at most 16384",
        );
        check(request(|r| r.as_object_mut().unwrap().retain(|name, _| name != "turn")), "turn");
    }

    #[test]
    fn unsorted_timestamps_are_rejected() {
        let text = r#"{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": []}
{"timestamp": 4, "input_length": 1, "output_length": 1, "hash_ids": []}"#;
        let error = read(text.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("line 2") && error.contains("sort"), "{error}");
    }

    #[test]
    fn overlong_input_without_newline_is_rejected() {
        let mut text = HEADER.as_bytes().to_vec();
        text.push(b'\n');
        let endless = std::io::BufReader::new(text.chain(std::io::repeat(b' ')));
        let read: Result<Vec<Request>, TraceError> = Reader::new(endless).unwrap().collect();
        assert!(matches!(read, Err(TraceError::LongLine { line: 2 })), "{read:?}");
    }

    #[test]
    fn non_trace_input_and_newer_version_are_rejected() {
        for other in ["", "\n\n", "{}", "[1]", "moontide", r#"{"timestamp": 1}"#] {
            assert!(matches!(read(other.as_bytes()), Err(TraceError::NotATrace)), "{other}");
        }
        let newer = HEADER.replace(":1,", ":2,");
        assert!(matches!(read(newer.as_bytes()), Err(TraceError::Version { version: 2 })));
        assert!(read(HEADER.replace("512", "0").as_bytes()).is_err());
    }

    #[test]
    fn reader_ends_after_first_error() {
        let text = format!("{HEADER}\nwhat?\n{HEADER}\n");
        let mut reader = Reader::new(text.as_bytes()).unwrap();
        assert!(matches!(reader.next(), Some(Err(TraceError::NotARequest { line: 2, .. }))));
        assert!(reader.next().is_none());
    }

    proptest! {
        #[test]
        fn reader_never_panics_on_arbitrary_bytes(garbage: Vec<u8>, behind_header: bool) {
            let text = if behind_header { [HEADER.as_bytes(), b"\n", &garbage].concat() } else { garbage };
            if let Err(error) = read(&text) {
                prop_assert!(error.to_string().contains("line"), "{}", error);
            }
        }

        #[test]
        fn reader_never_panics_on_changed_byte(at: prop::sample::Index, byte: u8) {
            let mut text = request(|_| {}).into_bytes();
            let at = at.index(text.len());
            text[at] = byte;
            let _ = read(&text);
        }
    }
}
