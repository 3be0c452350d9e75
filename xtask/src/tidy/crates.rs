//! Checks on dependencies: crates depend on lower layers only, some crates use neither async nor the network, and
//! what ships contains no code for tests.
//!
//! Owns the tables of these rules. [`direction`] and [`testing_feature`] read `cargo metadata --no-deps`; [`banned`] reads `cargo tree`, which
//! resolves features for the one crate instead of for the whole workspace.
//!
//! Invariants: every crate of the workspace is in [`CRATES`]; every allowed dependency is on a lower layer.

use serde_json::Value;

use super::Finding;

/// A crate of the workspace: its layer, and what it may depend on.
struct CrateRule {
    name: &'static str,
    /// 0 is the lowest. Dev-dependencies may be on the same layer.
    layer: u8,
    may_use: MayUse,
}

enum MayUse {
    Only(&'static [&'static str]),
    /// Every crate on a lower layer.
    Below,
    /// Tools that no crate depends on.
    Anything,
}

/// All crates. Names are package names without `moontide-`.
const CRATES: &[CrateRule] = &[
    crate_rule("rt", 0, &[]),
    // Tests load it at run time; no crate links it.
    crate_rule("fakedriver", 0, &[]),
    crate_rule("types", 1, &["rt"]),
    crate_rule("auth", 2, &["types", "rt"]),
    crate_rule("proto", 2, &["types", "rt"]),
    crate_rule("heap", 2, &["types", "rt"]),
    crate_rule("settings", 2, &["types"]),
    crate_rule("tasks", 3, &["rt", "auth"]),
    crate_rule("transfer", 3, &["types", "rt", "auth", "proto", "heap"]),
    crate_rule("disk", 3, &["types", "rt", "heap"]),
    crate_rule("meta", 3, &["types", "rt", "heap"]),
    crate_rule("blocks", 3, &["types", "rt", "heap"]),
    crate_rule("symmetric", 3, &["types", "rt", "heap"]),
    crate_rule("ep", 4, &["rt", "symmetric"]),
    crate_rule("master", 4, &["types", "rt", "auth", "tasks", "proto", "heap", "settings", "meta"]),
    crate_rule("node", 4, &["types", "rt", "auth", "tasks", "proto", "heap", "settings", "transfer", "disk"]),
    crate_rule(
        "client",
        5,
        &["types", "rt", "auth", "tasks", "proto", "heap", "settings", "symmetric", "transfer", "blocks"],
    ),
    CrateRule { name: "bench", layer: 6, may_use: MayUse::Below },
    // No `proto`, `meta`, `blocks` or `ep`: commands use public interfaces, only benchmarks reach below them.
    crate_rule(
        "cli",
        7,
        &[
            "types",
            "rt",
            "auth",
            "heap",
            "settings",
            "symmetric",
            "transfer",
            "disk",
            "master",
            "node",
            "client",
            "bench",
        ],
    ),
    // No `heap`: the simulation runs nodes and does not decide about their memory.
    crate_rule(
        "sim",
        8,
        &["types", "rt", "tasks", "proto", "meta", "transfer", "disk", "master", "node", "client"],
    ),
    CrateRule { name: "python", layer: 8, may_use: MayUse::Anything },
    CrateRule { name: "fuzz", layer: 8, may_use: MayUse::Anything },
    CrateRule { name: "xtask", layer: 8, may_use: MayUse::Anything },
];

/// Crates without an async runtime or a network stack, at any depth.
const BANS: &[(&str, &[&str])] = &[
    ("types", &["tokio", "tonic", "hyper"]),
    ("rt", &["tokio", "tonic", "hyper"]),
    ("heap", &["tokio", "tonic", "hyper"]),
    ("meta", &["tokio", "tonic", "hyper"]),
    ("settings", &["tokio", "tonic", "hyper", "clap"]),
    ("blocks", &["tokio", "tonic", "hyper"]),
    ("symmetric", &["tokio", "tonic", "hyper"]),
    ("ep", &["tokio", "tonic", "hyper"]),
];

/// Feature of a crate that adds code for tests: simulated devices, samples, fuzz targets, audits.
const TESTING: &str = "testing";

/// Crates that do not ship and may enable [`TESTING`] in normal dependencies. The others may in dev-dependencies only.
const TEST_TOOLS: &[&str] = &["sim", "fuzz"];

const fn crate_rule(name: &'static str, layer: u8, may_use: &'static [&'static str]) -> CrateRule {
    CrateRule { name, layer, may_use: MayUse::Only(may_use) }
}

/// A package of the workspace, as far as tidy cares.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Package {
    name: String,
    dependencies: Vec<Dependency>,
    /// Features other than [`TESTING`] that enable [`TESTING`], of this package or of a dependency.
    testing_enabled_by: Vec<String>,
}

#[derive(Debug, PartialEq, Eq)]
struct Dependency {
    name: String,
    kind: DependencyKind,
    /// Whether the feature [`TESTING`] of the dependency is enabled.
    testing: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum DependencyKind {
    /// Normal and build dependencies.
    Built,
    Dev,
}

/// The output of `cargo metadata` does not have the expected form.
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
        let testing = list(dependency, "features")?.iter().any(|feature| feature == TESTING);
        Ok(Dependency { name: text(dependency, "name")?, kind, testing })
    });
    let features = package["features"].as_object().ok_or(MetadataError::Missing("features"))?;
    let enables_testing = |enabled: &Value| {
        let enabled = enabled.as_str().unwrap_or_default();
        enabled.rsplit('/').next() == Some(TESTING)
    };
    let testing_enabled_by = features
        .iter()
        .filter(|(name, enabled)| {
            *name != TESTING && enabled.as_array().is_some_and(|all| all.iter().any(enables_testing))
        })
        .map(|(name, _)| name.clone());
    Ok(Package {
        name: text(package, "name")?,
        dependencies: dependencies.collect::<Result<_, MetadataError>>()?,
        testing_enabled_by: testing_enabled_by.collect(),
    })
}

pub(super) fn list<'a>(value: &'a Value, field: &'static str) -> Result<&'a [Value], MetadataError> {
    value[field].as_array().map(Vec::as_slice).ok_or(MetadataError::Missing(field))
}

pub(super) fn text(value: &Value, field: &'static str) -> Result<String, MetadataError> {
    value[field].as_str().map(str::to_owned).ok_or(MetadataError::Missing(field))
}

/// Every dependency between our crates is one that [`CRATES`] allows.
pub(super) fn direction(packages: &[Package]) -> Vec<Finding> {
    let is_ours =
        |name: &str| name.starts_with("moontide-") || packages.iter().any(|package| package.name == name);
    let mut findings = Vec::new();
    for package in packages {
        let Some(from) = rule_of(&package.name) else {
            findings.push(Finding::new(
                &package.name,
                "is not in the table of our crates; add it to CRATES in xtask/src/tidy/crates.rs",
            ));
            continue;
        };
        for Dependency { name, kind, .. } in
            package.dependencies.iter().filter(|dependency| is_ours(&dependency.name))
        {
            // A package that is not in the table is reported once, as itself.
            let Some(to) = rule_of(name) else { continue };
            if !is_allowed(from, to, *kind) {
                let what = match kind {
                    DependencyKind::Built => format!("must not depend on {name}: {}", from.rule()),
                    DependencyKind::Dev => {
                        format!("must not depend on {name} even in tests: it is on a higher layer")
                    }
                };
                findings.push(Finding::new(&package.name, what));
            }
        }
    }
    findings
}

/// No crate that ships enables [`TESTING`] outside of dev-dependencies.
pub(super) fn testing_feature(packages: &[Package]) -> Vec<Finding> {
    let mut findings = Vec::new();
    let ships = |package: &&Package| {
        !TEST_TOOLS.contains(&package.name.strip_prefix("moontide-").unwrap_or(&package.name))
    };
    for package in packages.iter().filter(ships) {
        let enabled = package.dependencies.iter().filter(|dependency| dependency.testing);
        for Dependency { name, .. } in enabled.filter(|dependency| dependency.kind == DependencyKind::Built) {
            let what = format!("must not enable `{TESTING}` of {name}: move it to the dev-dependencies");
            findings.push(Finding::new(&package.name, what));
        }
        for feature in &package.testing_enabled_by {
            let what = format!("feature `{feature}` must not enable `{TESTING}`");
            findings.push(Finding::new(&package.name, what));
        }
    }
    findings
}

impl CrateRule {
    fn rule(&self) -> String {
        match self.may_use {
            MayUse::Only([]) => "it may use none of our crates".to_owned(),
            MayUse::Only(names) => format!("it may use {}", names.join(", ")),
            MayUse::Below => "it may use lower layers".to_owned(),
            MayUse::Anything => "it may use anything".to_owned(),
        }
    }
}

fn is_allowed(from: &CrateRule, to: &CrateRule, kind: DependencyKind) -> bool {
    let is_listed = match from.may_use {
        MayUse::Only(names) => names.contains(&to.name),
        MayUse::Below => to.layer < from.layer,
        MayUse::Anything => true,
    };
    is_listed || (kind == DependencyKind::Dev && to.layer <= from.layer)
}

fn rule_of(package: &str) -> Option<&'static CrateRule> {
    let name = package.strip_prefix("moontide-").unwrap_or(package);
    CRATES.iter().find(|rule| rule.name == name)
}

/// The bans that apply to crates that exist.
pub(super) fn bans_for(packages: &[Package]) -> Vec<Ban> {
    let bans = BANS.iter().map(|(name, names)| Ban { package: format!("moontide-{name}"), names });
    bans.filter(|ban| packages.iter().any(|package| package.name == ban.package)).collect()
}

/// Reports banned crates in `listing`, the output of `cargo tree --prefix depth`.
///
/// A line is a depth, a name, a version: `2syn v2.0.1`. Names cannot start with a digit. The finding contains the path
/// from the package to the banned crate.
pub(super) fn banned(ban: &Ban, listing: &str) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    let mut path: Vec<&str> = Vec::new();
    for line in listing.lines() {
        let digits = line.len() - line.trim_start_matches(|c: char| c.is_ascii_digit()).len();
        let Ok(depth) = line[..digits].parse::<usize>() else { continue };
        let name = line[digits..].split(' ').next().unwrap_or_default();
        path.truncate(depth);
        path.push(name);
        if ban.names.contains(&name) {
            findings.push(Finding::new(&ban.package, format!("must not reach {name}: {}", path.join(" → "))));
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
            .map(|(name, kind)| Dependency { name: (*name).to_owned(), kind: *kind, testing: false })
            .collect();
        Package { name: name.to_owned(), dependencies, testing_enabled_by: vec![] }
    }

    fn check(package: Package, expected: &[&str]) {
        let findings: Vec<String> = direction(&[package]).iter().map(Finding::to_string).collect();
        assert_eq!(findings.len(), expected.len(), "{findings:?}");
        findings
            .iter()
            .zip(expected)
            .for_each(|(findings, part)| assert!(findings.contains(part), "{findings}"));
    }

    #[test]
    fn dependency_on_lower_layer_is_allowed() {
        check(package("moontide-types", &[("blake3", Built)]), &[]);
        check(package("moontide-heap", &[("moontide-types", Built), ("rustix", Built)]), &[]);
        check(package("moontide-bench", &[("moontide-meta", Built), ("moontide-client", Built)]), &[]);
        check(package("moontide-cli", &[("moontide-bench", Built), ("moontide-master", Built)]), &[]);
        check(package("moontide-fuzz", &[("moontide-heap", Built), ("moontide-proto", Built)]), &[]);
    }

    #[test]
    fn dependency_on_same_or_higher_layer_is_rejected() {
        check(package("moontide-rt", &[("moontide-types", Built)]), &["it may use none of our crates"]);
        check(package("moontide-heap", &[("moontide-proto", Built)]), &["must not depend on moontide-proto"]);
        check(
            package("moontide-client", &[("moontide-master", Built)]),
            &["must not depend on moontide-master"],
        );
        check(package("moontide-bench", &[("moontide-cli", Built)]), &["it may use lower layers"]);
        check(package("moontide-cli", &[("moontide-meta", Built)]), &["must not depend on moontide-meta"]);
    }

    #[test]
    fn dev_dependency_on_higher_layer_is_rejected() {
        check(package("moontide-heap", &[("moontide-proto", Dev), ("moontide-types", Dev)]), &[]);
        check(package("moontide-client", &[("moontide-node", Dev)]), &[]);
        check(package("moontide-types", &[("moontide-heap", Dev)]), &["even in tests"]);
    }

    #[test]
    fn unlisted_crate_is_reported_with_hint() {
        check(package("moontide-utils", &[]), &["add it to CRATES"]);
        check(package("helpers", &[]), &["add it to CRATES"]);
    }

    #[test]
    fn every_allowed_dependency_is_on_lower_layer() {
        for from in CRATES {
            let MayUse::Only(names) = from.may_use else { continue };
            for name in names {
                let to = rule_of(name).unwrap_or_else(|| panic!("{name} is not in the table"));
                assert!(to.layer < from.layer, "{} → {name}", from.name);
            }
        }
        for (name, _) in BANS {
            assert!(rule_of(name).is_some(), "{name} is not in the table");
        }
    }

    #[test]
    fn cargo_metadata_is_parsed_with_dependency_kinds() {
        let json = r#"{"packages": [{"name": "moontide-heap", "features": {}, "dependencies": [
            {"name": "moontide-types", "kind": null, "features": []},
            {"name": "cc", "kind": "build", "features": ["parallel"]},
            {"name": "loom", "kind": "dev", "features": []}
        ]}]}"#;
        let expected = package("moontide-heap", &[("moontide-types", Built), ("cc", Built), ("loom", Dev)]);
        assert_eq!(parse_metadata(json).unwrap(), [expected]);
        assert!(matches!(parse_metadata("{}"), Err(MetadataError::Missing("packages"))));
        assert!(matches!(parse_metadata("no"), Err(MetadataError::NotJson(_))));
    }

    #[test]
    fn testing_feature_is_rejected_outside_of_dev_dependencies() {
        let findings = |name: &str, kind: &str, features: &str| {
            let json = format!(
                r#"{{"packages": [{{"name": "{name}", "features": {features}, "dependencies": [
                    {{"name": "moontide-disk", "kind": {kind}, "features": ["testing"]}}
                ]}}]}}"#
            );
            let packages = parse_metadata(&json).unwrap();
            testing_feature(&packages).iter().map(Finding::to_string).collect::<Vec<_>>()
        };
        let own = r#"{"testing": ["moontide-disk/testing"], "default": ["other"]}"#;
        assert!(findings("moontide-node", r#""dev""#, own).is_empty());
        assert!(findings("moontide-sim", "null", "{}").is_empty());
        let normal = findings("moontide-cli", "null", "{}");
        assert!(matches!(&normal[..], [one] if one.contains("`testing` of moontide-disk")), "{normal:?}");
        for enabled in ["testing", "moontide-disk/testing"] {
            let feature = findings("moontide-cli", r#""dev""#, &format!(r#"{{"default": ["{enabled}"]}}"#));
            assert!(matches!(&feature[..], [one] if one.contains("feature `default`")), "{feature:?}");
        }
    }

    #[test]
    fn bans_apply_only_to_existing_crates() {
        let bans = bans_for(&[package("moontide-heap", &[]), package("moontide-proto", &[])]);
        assert_eq!(bans.len(), 1);
        assert_eq!(bans[0].package, "moontide-heap");
    }

    #[test]
    fn banned_transitive_dependency_is_reported_with_path() {
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
