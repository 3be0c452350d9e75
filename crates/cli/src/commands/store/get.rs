//! `moontide get`: an object's bytes, or a range of them, to standard output or a file.

use std::ffi::OsString;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use serde_json::json;

use super::super::{EXIT_CODES, Failure, written};
use super::{StoreArgs, not_found};
use crate::text;

const EXAMPLES: &str = "\
Examples:
  moontide get hello                          to standard output
  moontide get model/7b/prefix-0001 -o block.bin
  moontide get hello --range 0:4              the first four bytes
  moontide get hello --range 4:               from the fifth to the end
  moontide get hello > /dev/null || echo \"exit code $?\"";

/// What is read, and where it goes.
#[derive(Debug, ClapArgs)]
struct Args {
    /// The key
    key: OsString,
    /// Write to a file, which is made when the bytes are there
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Only so many bytes from an offset on; without LEN to the end
    #[arg(long, value_name = "OFFSET:LEN", value_parser = range)]
    range: Option<Range>,
    #[command(flatten)]
    store: StoreArgs,
}

/// A part of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    offset: u64,
    len: Option<u64>,
}

fn range(text: &str) -> Result<Range, String> {
    let wrong = || format!("{text:?} is no range; write OFFSET:LEN, as 0:4096, or OFFSET: up to the end");
    let (offset, len) = text.split_once(':').ok_or_else(wrong)?;
    let len = if len.is_empty() { None } else { Some(text::size(len).map_err(|_| wrong())?) };
    Ok(Range { offset: text::size(offset).map_err(|_| wrong())?, len })
}

/// What can go wrong beside the store.
#[derive(Debug, thiserror::Error)]
enum GetError {
    #[error("--json says what was read, on standard output; name a file for the bytes with -o")]
    JsonNeedsFile,
    #[error(
        "the object has bytes that a terminal does not show; name a file with -o, or redirect the output"
    )]
    Binary,
    #[error(
        "the object's bytes do not match their digest and were not written; remove the object and put it again"
    )]
    Corrupt,
    #[error("the object has {len} bytes; the range begins behind them")]
    Behind { len: u64 },
    #[error("{file}: {source}")]
    Unwritable { file: String, source: std::io::Error },
}

pub(crate) fn command() -> Command {
    let get = Command::new("get");
    // After the arguments, whose own description would stand in its place.
    Args::augment_args(get)
        .about("Print an object, or write it to a file")
        .after_help(format!("{EXAMPLES}\n\n{EXIT_CODES}"))
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let args = Args::from_arg_matches(matches).map_err(Failure::usage)?;
    if args.store.json && args.output.is_none() {
        return Err(Failure::usage(GetError::JsonNeedsFile));
    }
    let key = args.store.key(&args.key)?;
    let store = args.store.connect()?;
    let none = || not_found(std::slice::from_ref(&key));
    match args.range {
        None => {
            let object = store.get_ref(&key)?.ok_or_else(none)?;
            // A copy was verified when it was made; what is read in place is verified here.
            if !object.verify() {
                return Err(Failure::failed(GetError::Corrupt));
            }
            deliver(&args, &key, &object, object.is_in_place())
        }
        Some(range) => {
            // Its length says how much room is needed, whatever was asked for.
            let len = store.stat(&key)?.ok_or_else(none)?.len;
            let left =
                len.checked_sub(range.offset).ok_or_else(|| Failure::usage(GetError::Behind { len }))?;
            let mut bytes = vec![0; range.len.unwrap_or(left).min(left) as usize];
            let n = store.get_range(&key, range.offset, &mut bytes)?.ok_or_else(none)?;
            deliver(&args, &key, &bytes[..n.min(bytes.len())], false)
        }
    }
}

fn deliver(args: &Args, key: &[u8], bytes: &[u8], is_in_place: bool) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let Some(path) = &args.output else {
        if out.is_terminal()
            && bytes.iter().any(|byte| byte.is_ascii_control() && !byte.is_ascii_whitespace())
        {
            return Err(Failure::usage(GetError::Binary));
        }
        return written(out.write_all(bytes).and_then(|()| out.flush()));
    };
    let unwritable =
        |source| Failure::failed(GetError::Unwritable { file: path.display().to_string(), source });
    File::create(path).and_then(|mut file| file.write_all(bytes)).map_err(unwritable)?;
    if !args.store.json {
        return Ok(());
    }
    let line = json!({
        "key": text::escaped(key),
        "bytes": bytes.len(),
        "file": path.display().to_string(),
        "in_place": is_in_place,
    });
    written(writeln!(out, "{line}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_read_as_people_write_them() {
        assert_eq!(range("0:4"), Ok(Range { offset: 0, len: Some(4) }));
        assert_eq!(range("4KiB:1M"), Ok(Range { offset: 4096, len: Some(1 << 20) }));
        assert_eq!(range("7:"), Ok(Range { offset: 7, len: None }));
        for wrong in ["", "4", ":4", "-1:4", "a:b", "1:2:3"] {
            assert!(range(wrong).is_err(), "{wrong}");
        }
    }
}
