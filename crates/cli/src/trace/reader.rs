//! From lines to requests. A trace comes from anywhere: every bound is checked, and every error names its line.

use std::io::{BufRead, Read};

use serde::Deserialize;

use super::{
    AT_MS_MAX, BLOCK_BYTES_DEFAULT, BLOCK_BYTES_MAX, BLOCK_REFERENCES_MAX, BLOCK_TOKENS_DEFAULT,
    BLOCK_TOKENS_MAX, BLOCKS_MAX, BlockHash, Header, REQUESTS_MAX, Request, TOKENS_MAX, VERSION,
};

/// Longest line: the longest request of ours is 78 KB; Mooncake's are shorter.
const LINE_BYTES_MAX: usize = 128 << 10;

/// Why a trace cannot be read on.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    /// The file does not let itself be read.
    #[error("line {line}: {source}")]
    Io {
        /// Where, from 1.
        line: u64,
        /// Why.
        source: std::io::Error,
    },
    /// A line is longer than any request.
    #[error("line {line} is longer than {LINE_BYTES_MAX} bytes; a trace has one request per line")]
    LongLine {
        /// Where, from 1.
        line: u64,
    },
    /// A line is not JSON of the expected form.
    #[error("line {line} is no request of a trace ({source}); docs/trace.md describes the format")]
    NotARequest {
        /// Where, from 1.
        line: u64,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// The first line is neither our header nor a request as Mooncake writes them.
    #[error(
        "line 1 is neither the header of a Moontide trace nor a request of a Mooncake trace; docs/trace.md describes both"
    )]
    NotATrace,
    /// A later format.
    #[error("the trace has version {version}, this program reads {VERSION}; use a newer moontide")]
    Version {
        /// The version found.
        version: u64,
    },
    /// A value makes no sense.
    #[error("line {line}: {what} must be {rule}")]
    Value {
        /// Where, from 1.
        line: u64,
        /// Which field.
        what: &'static str,
        /// What it must be.
        rule: String,
    },
    /// More than a trace may hold.
    #[error(
        "line {line}: a trace holds at most {REQUESTS_MAX} requests and {BLOCK_REFERENCES_MAX} blocks; split it"
    )]
    TooMuch {
        /// Where, from 1.
        line: u64,
    },
}

/// Our header, as it stands in the file behind the version.
#[derive(Deserialize)]
struct HeaderLine {
    block_bytes: u64,
    block_tokens: u32,
    #[serde(default)]
    seed: u64,
}

/// Our request, as it stands in the file.
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

/// A request as Mooncake's public traces have it.
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

/// Reads a trace, request by request. After an error it is at its end.
pub(crate) struct Reader<R> {
    input: R,
    header: Header,
    format: Format,
    line: Vec<u8>,
    /// The number of the line that `line` holds, from 1.
    number: u64,
    /// Whether `line` is a request that was read ahead.
    is_ahead: bool,
    is_over: bool,
    last_at_us: u64,
    requests: u64,
    references: u64,
}

impl<R: BufRead> Reader<R> {
    /// Reads the first line, which says what the others are.
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

    /// What holds for all requests.
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

    /// The next line that is not empty; false at the end.
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
        let room = input_tokens.div_ceil(self.header.block_tokens.into());
        self.check("the number of blocks", blocks.len() as u64 <= room, || {
            format!("at most {room}, which is what its input tokens fill")
        })?;
        let blocks: Option<Vec<BlockHash>> = blocks.into_iter().map(hash).collect();
        let Some(blocks) = blocks else {
            let rule = "1 to 16 hexadecimal digits each".to_owned();
            return Err(TraceError::Value { line: self.number, what: "blocks", rule });
        };
        Ok(Request { at_us: self.at_us(at_ms)?, session, turn, input_tokens, output_tokens, blocks })
    }

    /// Mooncake does not tell conversations apart: every request is one.
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

/// A block's hash, from hexadecimal digits and nothing else.
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
    fn a_request_is_read_with_all_its_fields() {
        let expected = Request {
            at_us: 1500,
            session: 3,
            turn: 1,
            input_tokens: 1100,
            output_tokens: 20,
            blocks: vec![BlockHash(10), BlockHash(255)],
        };
        assert_eq!(read(request(|_| {}).as_bytes()).unwrap(), [expected]);
        // Fields of later writers are passed over, as is a missing newline at the end.
        assert_eq!(read(request(|r| r["model"] = "x".into()).trim_end().as_bytes()).unwrap().len(), 1);
        assert_eq!(read(HEADER.as_bytes()).unwrap(), []);
    }

    #[test]
    fn mooncakes_public_traces_are_read() {
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
    fn what_makes_no_sense_is_refused_with_its_line() {
        let check = |text: String, part: &str| {
            let told = read(text.as_bytes()).unwrap_err().to_string();
            assert!(told.contains("line 3") && told.contains(part), "{told}");
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
    fn time_does_not_go_back() {
        let text = r#"{"timestamp": 5, "input_length": 1, "output_length": 1, "hash_ids": []}
{"timestamp": 4, "input_length": 1, "output_length": 1, "hash_ids": []}"#;
        let told = read(text.as_bytes()).unwrap_err().to_string();
        assert!(told.starts_with("line 2") && told.contains("sort"), "{told}");
    }

    #[test]
    fn a_line_without_an_end_is_given_up_early() {
        let mut text = HEADER.as_bytes().to_vec();
        text.push(b'\n');
        let endless = std::io::BufReader::new(text.chain(std::io::repeat(b' ')));
        let read: Result<Vec<Request>, TraceError> = Reader::new(endless).unwrap().collect();
        assert!(matches!(read, Err(TraceError::LongLine { line: 2 })), "{read:?}");
    }

    #[test]
    fn what_is_no_trace_is_told_so() {
        for other in ["", "\n\n", "{}", "[1]", "moontide", r#"{"timestamp": 1}"#] {
            assert!(matches!(read(other.as_bytes()), Err(TraceError::NotATrace)), "{other}");
        }
        let newer = HEADER.replace(":1,", ":2,");
        assert!(matches!(read(newer.as_bytes()), Err(TraceError::Version { version: 2 })));
        assert!(read(HEADER.replace("512", "0").as_bytes()).is_err());
    }

    #[test]
    fn after_an_error_it_is_over() {
        let text = format!("{HEADER}\nwhat?\n{HEADER}\n");
        let mut reader = Reader::new(text.as_bytes()).unwrap();
        assert!(matches!(reader.next(), Some(Err(TraceError::NotARequest { line: 2, .. }))));
        assert!(reader.next().is_none());
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_and_never_a_panic(garbage: Vec<u8>, behind_header: bool) {
            let text = if behind_header { [HEADER.as_bytes(), b"\n", &garbage].concat() } else { garbage };
            if let Err(error) = read(&text) {
                prop_assert!(error.to_string().contains("line"), "{}", error);
            }
        }

        #[test]
        fn a_damaged_request_is_an_error_or_a_request(at: prop::sample::Index, byte: u8) {
            let mut text = request(|_| {}).into_bytes();
            let at = at.index(text.len());
            text[at] = byte;
            let _ = read(&text);
        }
    }
}
