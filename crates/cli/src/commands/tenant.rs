//! `moontide tenant`: quotas and usage of tenants.

use std::io::Write;

use clap::{ArgGroup, ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use moontide_bench::format_bytes;
use moontide_client::TenantInfo;
use moontide_settings::parse_size;
use serde_json::json;

use super::{CommandError, EXIT_CODES, Target, ignore_broken_pipe};

const LS_EXAMPLES: &str = "\
Examples:
  moontide tenant ls                 usage and quota of each tenant
  moontide tenant ls --json          one JSON object per tenant; a limit of 0 is no limit";

const QUOTA_EXAMPLES: &str = "\
Examples:
  moontide tenant quota team-a --bytes 10GiB --objects 1000000
  moontide tenant quota team-a --bytes 20GiB      the limit of objects stays
  moontide tenant quota team-a --bytes 0          no limit of bytes

Bytes count in memory, not on disk. When a tenant reaches its quota, its new objects evict its older ones. A quota below the
usage evicts nothing at once, but the tenant's objects are the first that an eviction takes.";

#[derive(Debug, ClapArgs)]
struct LsArgs {
    // --tenant is the tenant of a store; this command lists all.
    #[command(flatten)]
    target: Target,
}

#[derive(Debug, ClapArgs)]
#[command(group = ArgGroup::new("limit").required(true).multiple(true).args(["bytes", "objects"]))]
struct QuotaArgs {
    /// Name of the tenant
    name: String,
    /// Maximum number of bytes in memory, such as 10GiB; 0 for no limit
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    bytes: Option<u64>,
    /// Maximum number of objects; 0 for no limit
    #[arg(long, value_name = "N")]
    objects: Option<u64>,
    #[command(flatten)]
    target: Target,
}

pub(crate) fn command() -> Command {
    let ls = LsArgs::augment_args(Command::new("ls"))
        .about("List tenants with their usage and quotas")
        .after_help(format!("{LS_EXAMPLES}\n\n{EXIT_CODES}"));
    let quota = QuotaArgs::augment_args(Command::new("quota"))
        .about("Set the quota of a tenant")
        .after_help(format!("{QUOTA_EXAMPLES}\n{EXIT_CODES}"));
    Command::new("tenant")
        .about("List tenants, and set their quotas")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .after_help(format!(
            "Examples:\n  moontide tenant ls\n  moontide tenant quota team-a --bytes 10GiB\n\n{EXIT_CODES}"
        ))
        .subcommand(ls)
        .subcommand(quota)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    match matches.subcommand() {
        Some(("ls", matches)) => list(matches),
        Some(("quota", matches)) => set_quota(matches),
        _ => unreachable!("clap requires one of the subcommands above"),
    }
}

fn list(matches: &ArgMatches) -> Result<(), CommandError> {
    let LsArgs { target } = LsArgs::from_arg_matches(matches).map_err(CommandError::usage)?;
    let tenants = target.connect()?.tenants()?;
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(tenants.iter().try_for_each(|tenant| match target.json {
        true => writeln!(out, "{}", to_json(tenant)),
        false => {
            let bytes = of_limit(tenant.bytes, tenant.bytes_max, format_bytes);
            let objects = of_limit(tenant.objects, tenant.objects_max, |n| n.to_string());
            writeln!(out, "{:<24} {bytes:>22} {objects:>22} objects", tenant.name)
        }
    }))
}

fn to_json(tenant: &TenantInfo) -> serde_json::Value {
    json!({
        "tenant": tenant.name,
        "bytes": tenant.bytes,
        "objects": tenant.objects,
        "bytes_max": tenant.bytes_max,
        "objects_max": tenant.objects_max,
        "generation": tenant.generation,
    })
}

/// Formats a usage with its limit, if there is one.
fn of_limit(used: u64, limit: u64, format: impl Fn(u64) -> String) -> String {
    match limit {
        0 => format(used),
        limit => format!("{} of {}", format(used), format(limit)),
    }
}

fn set_quota(matches: &ArgMatches) -> Result<(), CommandError> {
    let QuotaArgs { name, bytes, objects, target } =
        QuotaArgs::from_arg_matches(matches).map_err(CommandError::usage)?;
    let store = target.connect()?;
    let (bytes_max, objects_max) = match (bytes, objects) {
        (Some(bytes), Some(objects)) => (bytes, objects),
        _ => {
            // The call sets both limits: the one that is not named stays.
            let known = store.tenants()?.into_iter().find(|tenant| tenant.name == name).unwrap_or_default();
            (bytes.unwrap_or(known.bytes_max), objects.unwrap_or(known.objects_max))
        }
    };
    store.set_tenant_quota(&name, bytes_max, objects_max)?;
    let limit = |limit: u64, format: fn(u64) -> String| match limit {
        0 => "no limit of".to_owned(),
        limit => format!("at most {} of", format(limit)),
    };
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(match target.json {
        true => {
            let object = json!({ "tenant": name, "bytes_max": bytes_max, "objects_max": objects_max });
            writeln!(out, "{object}")
        }
        false => {
            let (bytes, objects) = (limit(bytes_max, format_bytes), limit(objects_max, |n| n.to_string()));
            writeln!(out, "tenant {name}: {bytes} memory, {objects} objects")
        }
    })
}
