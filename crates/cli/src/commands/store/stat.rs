//! `moontide stat`: shows metadata of an object.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{ArgMatches, Args as ClapArgs, Command};
use moontide_bench::format_bytes;
use moontide_client::{ObjectInfo, StripeLocation};
use moontide_types::Medium;
use moontide_types::record::PinClass;
use serde_json::{Value, json};

use super::super::{CommandError, EXIT_CODES, ignore_broken_pipe};
use super::{StoreArgs, not_found, parse};
use crate::format;
use crate::settings::PRINT_CONFIG;

const EXAMPLES: &str = "\
Examples:
  moontide stat hello
  moontide stat hello --json | jq .stripes

stat does not count as an access for eviction.";

#[derive(Debug, ClapArgs)]
struct Args {
    /// Key of the object
    #[arg(required = false, required_unless_present = PRINT_CONFIG)]
    key: OsString,
    #[command(flatten)]
    store: StoreArgs,
}

pub(crate) fn command() -> Command {
    let stat = Command::new("stat");
    // Set after the arguments: the doc comment of the struct would replace it otherwise.
    Args::augment_args(stat)
        .about("Show metadata of an object")
        .after_help(format!("{EXAMPLES}\n\n{EXIT_CODES}"))
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    let Some(args) = parse::<Args>(matches)? else { return Ok(()) };
    let key = args.store.key(&args.key)?;
    let store = args.store.connect()?;
    let info = store.stat(&key)?.ok_or_else(|| not_found(std::slice::from_ref(&key)))?;
    let shown = format::escaped(&key);
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(if args.store.json {
        writeln!(out, "{}", to_json(&shown, &info))
    } else {
        print(&mut out, &shown, &info)
    })
}

/// Number of replicas.
pub(super) fn replicas(info: &ObjectInfo) -> usize {
    // Replica numbers may have gaps: a replica on a lost node is not listed.
    let replicas: BTreeSet<u8> = info.stripes.iter().map(|stripe| stripe.replica).collect();
    replicas.len()
}

pub(super) fn pin_name(pin: PinClass) -> &'static str {
    match pin {
        PinClass::None => "none",
        PinClass::Soft => "soft",
        PinClass::Hard => "hard",
    }
}

fn to_json(key: &str, info: &ObjectInfo) -> Value {
    let stripe = |stripe: &StripeLocation| {
        json!({
            "replica": stripe.replica,
            "node": stripe.node.to_string(),
            "medium": stripe.medium.name(),
            "segment": stripe.segment.0,
            "slot": stripe.slot.0,
            "payload_offset": stripe.payload_offset,
            "offset": stripe.offset,
            "bytes": stripe.len,
        })
    };
    json!({
        "key": key,
        "id": info.id.to_string(),
        "epoch": info.epoch.to_string(),
        "bytes": info.len,
        // Text: some JSON readers lose bits of 64-bit numbers.
        "root": format!("{:016x}", info.root),
        "writing": info.writing,
        "pin": pin_name(info.pin),
        "leased_ms": info.leased_ms,
        "expires_unix_ms": (info.expires_unix_ms != 0).then_some(info.expires_unix_ms),
        "replicas": replicas(info),
        "stripes": info.stripes.iter().map(stripe).collect::<Vec<_>>(),
    })
}

fn print(out: &mut impl Write, key: &str, info: &ObjectInfo) -> std::io::Result<()> {
    let state = if info.writing { "being written" } else { "ready" };
    writeln!(out, "key      {key}")?;
    writeln!(out, "id       {}", info.id)?;
    writeln!(out, "epoch    {}", info.epoch)?;
    writeln!(out, "length   {} ({})", info.len, format_bytes(info.len))?;
    writeln!(out, "root     {:016x}", info.root)?;
    writeln!(out, "state    {state}, pin {}", pin_name(info.pin))?;
    writeln!(out, "lease    {} ms", info.leased_ms)?;
    writeln!(out, "expires  {}", expiry(info.expires_unix_ms))?;
    writeln!(out, "replicas {}", replicas(info))?;
    for stripe in &info.stripes {
        let StripeLocation { replica, node, medium, segment, slot, payload_offset, offset, len, .. } = stripe;
        let location = match medium {
            Medium::Disk => medium.to_string(),
            Medium::Memory | Medium::Device => {
                format!("segment {segment}  slot {slot}  at {payload_offset}")
            }
        };
        writeln!(out, "  replica {replica}  bytes {offset}..{}  node {node}  {location}", offset + len)?;
    }
    Ok(())
}

fn expiry(unix_ms: u64) -> String {
    if unix_ms == 0 {
        return "never".to_owned();
    }
    let at = UNIX_EPOCH + Duration::from_millis(unix_ms);
    match at.duration_since(SystemTime::now()) {
        Ok(left) => format!("in {} s", left.as_secs()),
        Err(_) => "expired".to_owned(),
    }
}
