//! Parser of traces. Input is untrusted: every bound is checked, and every error names its line.

use std::io::{BufRead, Read};

use serde::Deserialize;

use super::{
    AT_MS_MAX, BLOCK_BYTES_DEFAULT, BLOCK_BYTES_MAX, BLOCK_REFERENCES_MAX, BLOCK_TOKENS_DEFAULT,
    BLOCK_TOKENS_MAX, BLOCKS_MAX, BlockHash, Header, REQUESTS_MAX, Request, TOKENS_MAX, VERSION,
};

/// Maximum length of a line. The longest Moontide request is 78 KB; Mooncake's are shorter.
const LINE_BYTES_MAX: usize = 128 << 10;

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
    /// The first line is neither a Moontide header nor a Mooncake request.
    #[error(
        "line 1 is neither the header of a Moontide trace nor a request of a Mooncake trace; see docs/trace.md for both formats"
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

/// Fields of a request in Mooncake's public traces.
#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u64>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Format {
    Moontide,
    Mooncake,
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
            requests: 0,
            references: 0,
        };
        if !reader.next_line()? {
            return Err(TraceError::NotATrace);
        }
        let first: serde_json::Value =
            serde_json::from_slice(&reader.line).map_err(|_| TraceError::NotATrace)?;
        if let Some(version) = first.get("moontide_trace") {
            if version.as_u64() != Some(VERSION.into()) {
                return Err(TraceError::Version { version: version.as_u64().unwrap_or(0) });
            }
            reader.header = reader.read_header()?;
            reader.format = Format::Moontide;
        } else if first.get("timestamp").is_some() && first.get("hash_ids").is_some() {
            reader.is_ahead = true;
        } else {
            return Err(TraceError::NotATrace);
        }
        Ok(reader)
    }

    /// Header of the trace, or the defaults for a Mooncake trace.
    pub(crate) fn header(&self) -> Header {
        self.header
    }

    fn read_header(&self) -> Result<Header, TraceError> {
        let HeaderLine { block_bytes, block_tokens, seed } = self.parse()?;
        self.check("block_bytes", (1..=BLOCK_BYTES_MAX).contains(&block_bytes), || {
            format!("1 to {BLOCK_BYTES_MAX}")
        })?;
        self.check("block_tokens", (1..=BLOCK_TOKENS_MAX).contains(&block_tokens), || {
            format!("1 to {BLOCK_TOKENS_MAX}")
        })?;
        Ok(Header { block_bytes, block_tokens, seed })
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
            blocks: hash_ids.into_iter().map(BlockHash).collect(),
        })
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
            "at most 4096",
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
