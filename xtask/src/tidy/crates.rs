//! Checks on dependencies: arrows between our crates point down, and some crates stay free of async and network.
//!
//! Owns the tables that say so. [`direction`] reads `cargo metadata --no-deps`; [`banned`] reads `cargo tree`, which
//! resolves features for the one crate instead of for the whole workspace.
//!
//! Invariants: every crate of the workspace is in [`CRATES`]; every edge allowed there goes to a lower floor.

use serde_json::Value;

use super::Finding;

/// One crate of ours: its floor, and what it may depend on.
struct Room {
    name: &'static str,
    /// 0 is the lowest. Dev-dependencies may go to any room that is not higher.
    floor: u8,
    may_use: MayUse,
}

enum MayUse {
    Only(&'static [&'static str]),
    /// Every room on a lower floor.
    Below,
    /// Tools around the house that nobody depends on.
    Anything,
}

/// The house. Names are package names without `moontide-`.
const CRATES: &[Room] = &[
    room("types", 0, &[]),
    // Tests load it; nothing is built on it.
    room("fakedriver", 0, &[]),
    room("proto", 1, &["types"]),
    room("heap", 1, &["types"]),
    room("transfer", 2, &["types", "proto", "heap"]),
    room("disk", 2, &["types", "heap"]),
    room("meta", 2, &["types", "heap"]),
    room("blocks", 2, &["types", "heap"]),
    room("ep", 2, &["types", "heap"]),
    room("master", 3, &["types", "proto", "heap", "meta"]),
    room("node", 3, &["types", "proto", "heap", "transfer", "disk"]),
    room("client", 4, &["types", "proto", "heap", "transfer", "blocks"]),
    Room { name: "cli", floor: 5, may_use: MayUse::Below },
    Room { name: "python", floor: 6, may_use: MayUse::Anything },
    Room { name: "sim", floor: 6, may_use: MayUse::Anything },
    Room { name: "fuzz", floor: 6, may_use: MayUse::Anything },
    Room { name: "xtask", floor: 6, may_use: MayUse::Anything },
];

/// Crates that decide or share memory wait for nobody: no async runtime, no network stack, at any depth.
const BANS: &[(&str, &[&str])] = &[
    ("types", &["tokio", "tonic", "hyper"]),
    ("heap", &["tokio", "tonic", "hyper"]),
    ("meta", &["tokio", "tonic", "hyper"]),
    ("blocks", &["tokio", "tonic", "hyper"]),
    ("ep", &["tokio", "tonic", "hyper"]),
];

const fn room(name: &'static str, floor: u8, may_use: &'static [&'static str]) -> Room {
    Room { name, floor, may_use: MayUse::Only(may_use) }
}

/// A package of the workspace, as far as tidy cares.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Package {
    name: String,
    dependencies: Vec<Dependency>,
}

#[derive(Debug, PartialEq, Eq)]
struct Dependency {
    name: String,
    kind: DependencyKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DependencyKind {
    /// Normal and build dependencies.
    Built,
    Dev,
}

/// The answer of `cargo metadata` is not what we take it for.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MetadataError {
    #[error("cargo metadata did not answer with JSON: {0}")]
    NotJson(#[from] serde_json::Error),
    #[error("cargo metadata answered without `{0}`")]
    Missing(&'static str),
}

/// A package together with what must not appear among its normal dependencies.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Ban {
    pub(super) package: String,
    names: &'static [&'static str],
}

pub(super) fn parse_metadata(json: &str) -> Result<Vec<Package>, MetadataError> {
    let metadata: Value = serde_json::from_str(json)?;
    list(&metadata, "packages")?.iter().map(parse_package).collect()
}

fn parse_package(package: &Value) -> Result<Package, MetadataError> {
    let dependencies = list(package, "dependencies")?.iter().map(|dependency| {
        let kind = match dependency["kind"].as_str() {
            Some("dev") => DependencyKind::Dev,
            _ => DependencyKind::Built,
        };
        Ok(Dependency { name: text(dependency, "name")?, kind })
    });
    Ok(Package {
        name: text(package, "name")?,
        dependencies: dependencies.collect::<Result<_, MetadataError>>()?,
    })
}

fn list<'a>(value: &'a Value, field: &'static str) -> Result<&'a [Value], MetadataError> {
    value[field].as_array().map(Vec::as_slice).ok_or(MetadataError::Missing(field))
}

fn text(value: &Value, field: &'static str) -> Result<String, MetadataError> {
    value[field].as_str().map(str::to_owned).ok_or(MetadataError::Missing(field))
}

/// Every dependency between our crates is one that [`CRATES`] allows.
pub(super) fn direction(packages: &[Package]) -> Vec<Finding> {
    let is_ours =
        |name: &str| name.starts_with("moontide-") || packages.iter().any(|package| package.name == name);
    let mut findings = Vec::new();
    for package in packages {
        let Some(from) = room_of(&package.name) else {
            findings.push(Finding::new(
                &package.name,
                "is not in the table of our crates; add it to CRATES in xtask/src/tidy/crates.rs",
            ));
            continue;
        };
        for Dependency { name, kind } in
            package.dependencies.iter().filter(|dependency| is_ours(&dependency.name))
        {
            // A package that is not in the table is reported once, as itself.
            let Some(to) = room_of(name) else { continue };
            if !is_allowed(from, to, *kind) {
                let what = match kind {
                    DependencyKind::Built => format!("must not depend on {name}: {}", from.rule()),
                    DependencyKind::Dev => {
                        format!("must not depend on {name} even in tests: it is on a higher floor")
                    }
                };
                findings.push(Finding::new(&package.name, what));
            }
        }
    }
    findings
}

impl Room {
    fn rule(&self) -> String {
        match self.may_use {
            MayUse::Only([]) => "it may use none of our crates".to_owned(),
            MayUse::Only(names) => format!("it may use {}", names.join(", ")),
            MayUse::Below => "it may use lower floors".to_owned(),
            MayUse::Anything => "it may use anything".to_owned(),
        }
    }
}

fn is_allowed(from: &Room, to: &Room, kind: DependencyKind) -> bool {
    let is_listed = match from.may_use {
        MayUse::Only(names) => names.contains(&to.name),
        MayUse::Below => to.floor < from.floor,
        MayUse::Anything => true,
    };
    is_listed || (kind == DependencyKind::Dev && to.floor <= from.floor)
}

fn room_of(package: &str) -> Option<&'static Room> {
    let name = package.strip_prefix("moontide-").unwrap_or(package);
    CRATES.iter().find(|room| room.name == name)
}

/// The bans that apply to crates that exist.
pub(super) fn bans_for(packages: &[Package]) -> Vec<Ban> {
    let bans = BANS.iter().map(|(name, names)| Ban { package: format!("moontide-{name}"), names });
    bans.filter(|ban| packages.iter().any(|package| package.name == ban.package)).collect()
}

/// Nothing that `ban` names is in `listing`, the answer of `cargo tree --prefix depth`.
///
/// A line is a depth, a name, a version: `2syn v2.0.1`. Names cannot start with a digit. The finding tells the way
/// from the package to the banned crate.
pub(super) fn banned(ban: &Ban, listing: &str) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    let mut way: Vec<&str> = Vec::new();
    for line in listing.lines() {
        let digits = line.len() - line.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let Ok(depth) = line[..digits].parse::<usize>() else { continue };
        let name = line[digits..].split(' ').next().unwrap_or_default();
        way.truncate(depth);
        way.push(name);
        if ban.names.contains(&name) {
            findings.push(Finding::new(&ban.package, format!("must not reach {name}: {}", way.join(" → "))));
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use DependencyKind::{Built, Dev};

    fn package(name: &str, dependencies: &[(&str, DependencyKind)]) -> Package {
        let dependencies = dependencies
            .iter()
            .map(|(name, kind)| Dependency { name: (*name).to_owned(), kind: *kind })
            .collect();
        Package { name: name.to_owned(), dependencies }
    }

    fn check(package: Package, expected: &[&str]) {
        let told: Vec<String> = direction(&[package]).iter().map(Finding::to_string).collect();
        assert_eq!(told.len(), expected.len(), "{told:?}");
        told.iter().zip(expected).for_each(|(told, part)| assert!(told.contains(part), "{told}"));
    }

    #[test]
    fn arrows_that_point_down_pass() {
        check(package("moontide-types", &[("blake3", Built)]), &[]);
        check(package("moontide-heap", &[("moontide-types", Built), ("rustix", Built)]), &[]);
        check(package("moontide-cli", &[("moontide-client", Built), ("moontide-master", Built)]), &[]);
        check(package("moontide-fuzz", &[("moontide-heap", Built), ("moontide-proto", Built)]), &[]);
    }

    #[test]
    fn an_arrow_that_points_up_or_aside_is_found() {
        check(package("moontide-types", &[("moontide-heap", Built)]), &["it may use none of our crates"]);
        check(package("moontide-heap", &[("moontide-proto", Built)]), &["must not depend on moontide-proto"]);
        check(
            package("moontide-client", &[("moontide-master", Built)]),
            &["must not depend on moontide-master"],
        );
        check(package("moontide-cli", &[("moontide-sim", Built)]), &["it may use lower floors"]);
    }

    #[test]
    fn tests_may_reach_aside_and_down_but_not_up() {
        check(package("moontide-heap", &[("moontide-proto", Dev), ("moontide-types", Dev)]), &[]);
        check(package("moontide-client", &[("moontide-node", Dev)]), &[]);
        check(package("moontide-types", &[("moontide-heap", Dev)]), &["even in tests"]);
    }

    #[test]
    fn an_unknown_crate_is_told_to_join_the_table() {
        check(package("moontide-utils", &[]), &["add it to CRATES"]);
        check(package("helpers", &[]), &["add it to CRATES"]);
    }

    #[test]
    fn every_edge_of_the_table_goes_to_a_lower_floor() {
        for from in CRATES {
            let MayUse::Only(names) = from.may_use else { continue };
            for name in names {
                let to = room_of(name).unwrap_or_else(|| panic!("{name} is not in the table"));
                assert!(to.floor < from.floor, "{} → {name}", from.name);
            }
        }
        for (name, _) in BANS {
            assert!(room_of(name).is_some(), "{name} is not in the table");
        }
    }

    #[test]
    fn metadata_is_read_with_kinds() {
        let json = r#"{"packages": [{"name": "moontide-heap", "dependencies": [
            {"name": "moontide-types", "kind": null}, {"name": "cc", "kind": "build"}, {"name": "loom", "kind": "dev"}
        ]}]}"#;
        let expected = package("moontide-heap", &[("moontide-types", Built), ("cc", Built), ("loom", Dev)]);
        assert_eq!(parse_metadata(json).unwrap(), [expected]);
        assert!(matches!(parse_metadata("{}"), Err(MetadataError::Missing("packages"))));
        assert!(matches!(parse_metadata("no"), Err(MetadataError::NotJson(_))));
    }

    #[test]
    fn bans_apply_to_crates_that_exist() {
        let bans = bans_for(&[package("moontide-heap", &[]), package("moontide-proto", &[])]);
        assert_eq!(bans.len(), 1);
        assert_eq!(bans[0].package, "moontide-heap");
    }

    #[test]
    fn a_banned_crate_is_found_at_any_depth_with_the_way_to_it() {
        let ban = Ban { package: "moontide-heap".to_owned(), names: &["tokio", "hyper"] };
        let clean = "0moontide-heap v0.1.0 (/x)\n1rustix v1.1.2\n2bitflags v2.9.0\n1tokio-like v1.0.0\n";
        assert_eq!(banned(&ban, clean), []);
        let dirty =
            "0moontide-heap v0.1.0 (/x)\n1rustix v1.1.2\n2bitflags v2.9.0\n1reqwest v0.12.0\n2hyper v1.0.0\n";
        let findings = banned(&ban, dirty);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].what.ends_with("moontide-heap → reqwest → hyper"), "{}", findings[0]);
    }
}
