//! `moontide get`: writes an object, or a range of it, to standard output or a file.

use std::ffi::OsString;
use std::fs::File;
use std::io::{IsTerminal, Write};
use std::path::PathBuf;

use clap::{ArgMatches, Args as ClapArgs, Command};
use moontide_settings::parse_size;
use serde_json::json;

use super::super::{CommandError, EXIT_CODES, ignore_broken_pipe};
use super::{StoreArgs, not_found, parse};
use crate::format;
use crate::settings::PRINT_CONFIG;

const EXAMPLES: &str = "\
Examples:
  moontide get hello                          to standard output
  moontide get model/7b/prefix-0001 -o block.bin
  moontide get hello --range 0:4              the first four bytes
  moontide get hello --range 4:               from the fifth to the end
  moontide get hello > /dev/null || echo \"exit code $?\"";

#[derive(Debug, ClapArgs)]
struct Args {
    /// Key of the object
    #[arg(required = false, required_unless_present = PRINT_CONFIG)]
    key: OsString,
    /// Output file, created after the object was read [default: standard output]
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Read only LEN bytes from OFFSET; without LEN up to the end
    #[arg(long, value_name = "OFFSET:LEN", value_parser = range)]
    range: Option<Range>,
    #[command(flatten)]
    store: StoreArgs,
}

/// Byte range of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    offset: u64,
    len: Option<u64>,
}

fn range(text: &str) -> Result<Range, String> {
    let wrong = || format!("{text:?} is not a range; use OFFSET:LEN, e.g. 0:4096, or OFFSET: up to the end");
    let (offset, len) = text.split_once(':').ok_or_else(wrong)?;
    let len = if len.is_empty() { None } else { Some(parse_size(len).map_err(|_| wrong())?) };
    Ok(Range { offset: parse_size(offset).map_err(|_| wrong())?, len })
}

/// Errors besides those of the store.
#[derive(Debug, thiserror::Error)]
enum GetError {
    #[error("--json prints a summary to standard output; pass a file for the object with -o")]
    JsonNeedsFile,
    #[error("object contains bytes that are not printable; pass a file with -o, or redirect the output")]
    Binary,
    #[error("object does not match its digest and was not written; remove the object and put it again")]
    Corrupt,
    #[error("range starts after the end of the object; it has {len} bytes")]
    Behind { len: u64 },
    #[error("{file}: {source}")]
    Unwritable { file: String, source: std::io::Error },
}

pub(crate) fn command() -> Command {
    let get = Command::new("get");
    // Set after the arguments: the doc comment of the struct would replace it otherwise.
    Args::augment_args(get)
        .about("Print an object, or write it to a file")
        .after_help(format!("{EXAMPLES}\n\n{EXIT_CODES}"))
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    let Some(args) = parse::<Args>(matches)? else { return Ok(()) };
    if args.store.json && args.output.is_none() {
        return Err(CommandError::usage(GetError::JsonNeedsFile));
    }
    let key = args.store.key(&args.key)?;
    let store = args.store.connect()?;
    let none = || not_found(std::slice::from_ref(&key));
    match args.range {
        None => {
            let object = store.get_ref(&key)?.ok_or_else(none)?;
            // The client verified a copy when it made it; a zero-copy read is verified here.
            if !object.verify() {
                return Err(CommandError::failed(GetError::Corrupt));
            }
            deliver(&args, &key, &object, object.is_zero_copy())
        }
        Some(range) => {
            // The buffer is sized by the object, not only by the requested length.
            let len = store.stat(&key)?.ok_or_else(none)?.len;
            let left =
                len.checked_sub(range.offset).ok_or_else(|| CommandError::usage(GetError::Behind { len }))?;
            let mut bytes = vec![0; range.len.unwrap_or(left).min(left) as usize];
            let n = store.get_range(&key, range.offset, &mut bytes)?.ok_or_else(none)?;
            deliver(&args, &key, &bytes[..n.min(bytes.len())], false)
        }
    }
}

fn deliver(args: &Args, key: &[u8], bytes: &[u8], is_zero_copy: bool) -> Result<(), CommandError> {
    let mut out = std::io::stdout().lock();
    let Some(path) = &args.output else {
        if out.is_terminal()
            && bytes.iter().any(|byte| byte.is_ascii_control() && !byte.is_ascii_whitespace())
        {
            return Err(CommandError::usage(GetError::Binary));
        }
        return ignore_broken_pipe(out.write_all(bytes).and_then(|()| out.flush()));
    };
    let unwritable =
        |source| CommandError::failed(GetError::Unwritable { file: path.display().to_string(), source });
    File::create(path).and_then(|mut file| file.write_all(bytes)).map_err(unwritable)?;
    if !args.store.json {
        return Ok(());
    }
    let line = json!({
        "key": format::escaped(key),
        "bytes": bytes.len(),
        "file": path.display().to_string(),
        "zero_copy": is_zero_copy,
    });
    ignore_broken_pipe(writeln!(out, "{line}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_parsed_with_units_and_open_end() {
        assert_eq!(range("0:4"), Ok(Range { offset: 0, len: Some(4) }));
        assert_eq!(range("4KiB:1M"), Ok(Range { offset: 4096, len: Some(1 << 20) }));
        assert_eq!(range("7:"), Ok(Range { offset: 7, len: None }));
        for wrong in ["", "4", ":4", "-1:4", "a:b", "1:2:3"] {
            assert!(range(wrong).is_err(), "{wrong}");
        }
    }
}
