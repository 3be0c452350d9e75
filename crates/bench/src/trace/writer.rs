//! Formatter of traces.

use std::io::Write;

use serde_json::json;

use super::{Header, Request, VERSION};

/// Writes a trace, line by line.
pub(crate) struct Writer<W> {
    out: W,
    line: String,
}

impl<W: Write> Writer<W> {
    /// Writes the first line.
    pub(crate) fn new(mut out: W, header: Header) -> std::io::Result<Writer<W>> {
        let Header { block_bytes, block_tokens, seed } = header;
        let first = json!({
            "moontide_trace": VERSION, "block_bytes": block_bytes, "block_tokens": block_tokens, "seed": seed,
        });
        writeln!(out, "{first}")?;
        Ok(Writer { out, line: String::new() })
    }

    /// Writes a request. Numbers and hexadecimal digits need no escaping, so the line is formatted by hand.
    pub(crate) fn write(&mut self, request: &Request) -> std::io::Result<()> {
        use std::fmt::Write;
        let Request { at_us, session, turn, input_tokens, output_tokens, blocks } = request;
        let (ms, us) = (at_us / 1000, at_us % 1000);
        let line = &mut self.line;
        line.clear();
        let _ = write!(
            line,
            r#"{{"at_ms":{ms}.{us:03},"session":{session},"turn":{turn},"input_tokens":{input_tokens},"output_tokens":{output_tokens},"blocks":["#
        );
        for (at, block) in blocks.iter().enumerate() {
            let _ = write!(line, r#"{}"{:016x}""#, if at == 0 { "" } else { "," }, block.0);
        }
        line.push_str("]}\n");
        self.out.write_all(line.as_bytes())
    }

    /// Flushes the output.
    pub(crate) fn finish(mut self) -> std::io::Result<()> {
        self.out.flush()
    }
}
