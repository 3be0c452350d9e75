//! `moontide stat`: everything the master knows about an object.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::io::Write;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use moontide_client::{Medium, ObjectInfo, StripePlace};
use moontide_types::record::PinClass;
use serde_json::{Value, json};

use super::super::{EXIT_CODES, Failure, written};
use super::{StoreArgs, not_found};
use crate::text;

const EXAMPLES: &str = "\
Examples:
  moontide stat hello
  moontide stat hello --json | jq .stripes

Looking does not count as a use: it keeps nothing from being evicted.";

/// Which object.
#[derive(Debug, ClapArgs)]
struct Args {
    /// The key
    key: OsString,
    #[command(flatten)]
    store: StoreArgs,
}

pub(crate) fn command() -> Command {
    let stat = Command::new("stat");
    // After the arguments, whose own description would stand in its place.
    Args::augment_args(stat)
        .about("Say everything that is known about an object")
        .after_help(format!("{EXAMPLES}\n\n{EXIT_CODES}"))
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let args = Args::from_arg_matches(matches).map_err(Failure::usage)?;
    let key = args.store.key(&args.key)?;
    let store = args.store.connect()?;
    let info = store.stat(&key)?.ok_or_else(|| not_found(std::slice::from_ref(&key)))?;
    let shown = text::escaped(&key);
    let mut out = std::io::stdout().lock();
    written(if args.store.json {
        writeln!(out, "{}", to_json(&shown, &info))
    } else {
        print(&mut out, &shown, &info)
    })
}

/// How many copies there are.
pub(super) fn replicas(info: &ObjectInfo) -> usize {
    // They may have gaps: one whose node is gone is not among them.
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

fn medium_name(medium: Medium) -> &'static str {
    match medium {
        Medium::Memory => "memory",
        Medium::Device => "device",
        Medium::Disk => "disk",
    }
}

fn to_json(key: &str, info: &ObjectInfo) -> Value {
    let stripe = |stripe: &StripePlace| {
        json!({
            "replica": stripe.replica,
            "node": format!("{:016x}", stripe.node.0),
            "medium": medium_name(stripe.medium),
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
        // Numbers of 64 bits do not survive every reader of JSON.
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
    writeln!(out, "length   {} ({})", info.len, text::bytes(info.len))?;
    writeln!(out, "root     {:016x}", info.root)?;
    writeln!(out, "state    {state}, pin {}", pin_name(info.pin))?;
    writeln!(out, "lease    {} ms", info.leased_ms)?;
    writeln!(out, "expires  {}", expiry(info.expires_unix_ms))?;
    writeln!(out, "copies   {}", replicas(info))?;
    for stripe in &info.stripes {
        let StripePlace { replica, node, medium, segment, slot, payload_offset, offset, len, .. } = stripe;
        let place = match medium {
            Medium::Disk => "disk".to_owned(),
            Medium::Memory | Medium::Device => {
                format!("segment {segment}  slot {slot}  at {payload_offset}")
            }
        };
        writeln!(out, "  copy {replica}  bytes {offset}..{}  node {:016x}  {place}", offset + len, node.0)?;
    }
    Ok(())
}

fn expiry(unix_ms: u64) -> String {
    if unix_ms == 0 {
        return "when room is needed".to_owned();
    }
    let at = UNIX_EPOCH + Duration::from_millis(unix_ms);
    match at.duration_since(SystemTime::now()) {
        Ok(left) => format!("in {} s", left.as_secs()),
        Err(_) => "any moment: its time is over".to_owned(),
    }
}
