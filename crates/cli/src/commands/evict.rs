//! `moontide evict`: frees memory before the masters would do it themselves.

use std::io::Write;

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use moontide_bench::format_bytes;
use serde_json::json;

use super::{CommandError, EXIT_CODES, Target, ignore_broken_pipe, refuse_tenant};

const EXAMPLES: &str = "\
Examples:
  moontide evict --usage 50%       until at most half of the memory of each group is used
  moontide evict --usage 0%        all objects that are not leased, hard-pinned or being written

The objects of all tenants are evicted, in the order of an eviction under pressure. With a disk tier the objects move to disk in the background; without one
they are gone. Memory becomes free when no reader uses it any more.";

#[derive(Debug, ClapArgs)]
struct Args {
    /// Share of the memory that may stay in use, such as 50% or 37.5%
    #[arg(long, value_name = "PERCENT", value_parser = parse_percent)]
    usage: u32,
    #[command(flatten)]
    target: Target,
}

pub(crate) fn command() -> Command {
    Args::augment_args(Command::new("evict"))
        .about("Evict objects until less memory is used")
        .after_help(format!("{EXAMPLES}\n{EXIT_CODES}"))
}

/// Parses a percentage to thousandths.
fn parse_percent(text: &str) -> Result<u32, String> {
    let wrong = || format!("{text:?} is not a percentage from 0% to 100% with at most one decimal");
    let number = text.strip_suffix('%').unwrap_or(text);
    let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
    let is_digits = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    if !is_digits(whole) || !is_digits(tenths) || tenths.len() > 1 || whole.len() > 3 {
        return Err(wrong());
    }
    let (whole, tenths): (u32, u32) =
        (whole.parse().map_err(|_| wrong())?, tenths.parse().map_err(|_| wrong())?);
    Some(whole * 10 + tenths).filter(|permille| *permille <= 1000).ok_or_else(wrong)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    refuse_tenant(matches)?;
    let Args { usage, target } = Args::from_arg_matches(matches).map_err(CommandError::usage)?;
    let evicted = target.connect()?.evict(usage)?;
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(match target.json {
        true => writeln!(out, "{}", json!({ "objects": evicted.objects, "bytes": evicted.bytes })),
        false => writeln!(out, "evicted {} objects, {}", evicted.objects, format_bytes(evicted.bytes)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentages_become_thousandths() {
        for (text, expected) in [("50%", 500), ("0", 0), ("100%", 1000), ("37.5%", 375), ("99.9", 999)] {
            assert_eq!(parse_percent(text), Ok(expected), "{text}");
        }
        for text in ["", "%", "100.1%", "-1%", "1.25%", ".5", "5.", "1e1", "+5"] {
            assert!(parse_percent(text).is_err(), "{text}");
        }
    }
}
