//! The packages that a program is made of: what `cargo metadata` and Cargo.lock say about one crate and one target.
//!
//! Owns [`Closure`], and [`Shipped`], those of what people install. A closure has every package that a normal or build dependency reaches from the crate, for the target, with the
//! features that the whole workspace enables: a package too many, perhaps, but none too few. Development dependencies are
//! not part of it.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use serde_json::Value;

use crate::command::{Command, CommandError};

/// Source of packages from the default registry, in the words of cargo.
const REGISTRY: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// What people install: the program, and the extension of Python.
pub(crate) struct Shipped {
    pub(crate) program: Closure,
    pub(crate) extension: Closure,
}

/// A crate of the workspace with all that it depends on.
#[derive(Debug)]
pub(crate) struct Closure {
    pub(crate) root: PackageId,
    pub(crate) packages: BTreeMap<PackageId, Package>,
}

/// Unique in a closure, because packages come from the workspace and from one registry only (`deny.toml`).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PackageId {
    pub(crate) name: String,
    pub(crate) version: String,
}

/// A package of a closure.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Package {
    pub(crate) is_local: bool,
    /// Whether its code is in the program. Otherwise it only runs while the program is built: build scripts, procedural
    /// macros and what these depend on.
    pub(crate) is_linked: bool,
    /// SPDX expression.
    pub(crate) license: Option<String>,
    /// SHA-256 of the archive in the registry.
    pub(crate) checksum: Option<String>,
    pub(crate) dependencies: BTreeSet<PackageId>,
}

/// Why there is no closure.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ClosureError {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error("cannot read Cargo.lock: {0}")]
    Lock(std::io::Error),
    #[error("cargo metadata did not answer with JSON: {0}")]
    NotJson(#[from] serde_json::Error),
    #[error("cargo metadata answered without {0}")]
    Missing(&'static str),
    #[error(
        "{name} {version} comes from {source_name}, which is neither the workspace nor the default registry"
    )]
    Source { name: String, version: String, source_name: String },
}

impl Shipped {
    pub(crate) fn of(root: &Path) -> Result<Self, ClosureError> {
        Ok(Self { program: Closure::of(root, "crates/cli")?, extension: Closure::of(root, "python")? })
    }
}

impl Closure {
    /// Of the crate in `directory`, for systems such as this one.
    fn of(root: &Path, directory: &str) -> Result<Self, ClosureError> {
        let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
        let question = format!(
            "metadata --format-version 1 --locked --filter-platform {target} --manifest-path {directory}/Cargo.toml"
        );
        let lock = std::fs::read_to_string(root.join("Cargo.lock")).map_err(ClosureError::Lock)?;
        Self::parse(&Command::cargo(&question).output(root)?, &lock)
    }

    fn parse(metadata: &str, lock: &str) -> Result<Self, ClosureError> {
        let metadata: Value = serde_json::from_str(metadata)?;
        let checksums = checksums(lock);
        let packages: BTreeMap<&str, &Value> =
            list(&metadata["packages"], "packages")?.iter().map(by_id).collect::<Result<_, _>>()?;
        let nodes: BTreeMap<&str, &Value> =
            list(&metadata["resolve"]["nodes"], "nodes")?.iter().map(by_id).collect::<Result<_, _>>()?;
        let graph = Graph { packages, nodes };
        let root = metadata["resolve"]["root"].as_str().ok_or(ClosureError::Missing("a root"))?;

        let linked = graph.reachable(root, false)?;
        let mut closure = Self { root: graph.id(root)?, packages: BTreeMap::new() };
        for id in graph.reachable(root, true)? {
            let package = graph.package(id)?;
            let key = graph.id(id)?;
            let is_local = match package["source"].as_str() {
                None => true,
                Some(REGISTRY) => false,
                Some(other) => {
                    let PackageId { name, version } = key;
                    return Err(ClosureError::Source { name, version, source_name: other.to_owned() });
                }
            };
            let dependencies = graph.dependencies(id, true)?;
            let package = Package {
                is_local,
                is_linked: linked.contains(id),
                license: package["license"].as_str().map(spdx),
                checksum: checksums.get(&key).cloned(),
                dependencies: dependencies.into_iter().map(|id| graph.id(id)).collect::<Result<_, _>>()?,
            };
            closure.packages.insert(key, package);
        }
        Ok(closure)
    }
}

/// The answer of cargo by package id.
struct Graph<'a> {
    packages: BTreeMap<&'a str, &'a Value>,
    nodes: BTreeMap<&'a str, &'a Value>,
}

impl<'a> Graph<'a> {
    /// What is reached from `root`, itself included: what is linked, or also what is built for the build.
    fn reachable(&self, root: &'a str, with_build: bool) -> Result<BTreeSet<&'a str>, ClosureError> {
        let mut found = BTreeSet::from([root]);
        let mut next = vec![root];
        while let Some(id) = next.pop() {
            for dependency in self.dependencies(id, with_build)? {
                if found.insert(dependency) {
                    next.push(dependency);
                }
            }
        }
        Ok(found)
    }

    fn dependencies(&self, id: &str, with_build: bool) -> Result<Vec<&'a str>, ClosureError> {
        let node = self.nodes.get(id).ok_or(ClosureError::Missing("a node"))?;
        let mut found = vec![];
        for dependency in list(&node["deps"], "deps")? {
            let kinds = list(&dependency["dep_kinds"], "dep_kinds")?;
            let id = text(&dependency["pkg"], "pkg")?;
            let is_normal = kinds.iter().any(|kind| kind["kind"].is_null());
            let is_build = kinds.iter().any(|kind| kind["kind"] == "build");
            let is_linked = is_normal && !self.is_macro(id)?;
            if is_linked || (with_build && (is_normal || is_build)) {
                found.push(id);
            }
        }
        Ok(found)
    }

    /// Procedural macros are normal dependencies, but run in the compiler.
    fn is_macro(&self, id: &str) -> Result<bool, ClosureError> {
        let targets = list(&self.package(id)?["targets"], "targets")?;
        let is_macro = |target: &Value| target["kind"][0] == "proc-macro";
        Ok(targets.iter().any(is_macro))
    }

    fn package(&self, id: &str) -> Result<&'a Value, ClosureError> {
        self.packages.get(id).copied().ok_or(ClosureError::Missing("a package"))
    }

    fn id(&self, id: &str) -> Result<PackageId, ClosureError> {
        let package = self.package(id)?;
        Ok(PackageId {
            name: text(&package["name"], "name")?.to_owned(),
            version: text(&package["version"], "version")?.to_owned(),
        })
    }
}

fn by_id(value: &Value) -> Result<(&str, &Value), ClosureError> {
    Ok((text(&value["id"], "id")?, value))
}

fn list<'a>(value: &'a Value, name: &'static str) -> Result<&'a [Value], ClosureError> {
    value.as_array().map(Vec::as_slice).ok_or(ClosureError::Missing(name))
}

fn text<'a>(value: &'a Value, name: &'static str) -> Result<&'a str, ClosureError> {
    value.as_str().ok_or(ClosureError::Missing(name))
}

/// Older manifests separate licences by a slash.
fn spdx(license: &str) -> String {
    license.split('/').map(str::trim).collect::<Vec<_>>().join(" OR ")
}

fn checksums(lock: &str) -> BTreeMap<PackageId, String> {
    let packages = lock.split("[[package]]").filter_map(|package| {
        let value = |key: &str| {
            let line = package.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(" = "))?;
            Some(line.trim_matches('"').to_owned())
        };
        Some((PackageId { name: value("name")?, version: value("version")? }, value("checksum")?))
    });
    packages.collect()
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn id(name: &str) -> PackageId {
        PackageId { name: name.to_owned(), version: "1.0.0".to_owned() }
    }

    /// A program that links `a` and `c`, and runs `m`, `b` and `c` while it is built.
    pub(crate) fn sample() -> Closure {
        let package = |name: &str, source: &str, kind: &str, deps: &str| {
            let package = format!(
                r#"{{"id": "{name}", "name": "{name}", "version": "1.0.0", "source": {source}, "license": "MIT/Apache-2.0",
                     "targets": [{{"kind": ["{kind}"]}}, {{"kind": ["test"]}}]}}"#
            );
            (package, format!(r#"{{"id": "{name}", "deps": [{deps}]}}"#))
        };
        let dep = |name: &str, kinds: &[&str]| {
            let kinds: Vec<String> = kinds.iter().map(|kind| format!(r#"{{"kind": {kind}}}"#)).collect();
            format!(r#"{{"pkg": "{name}", "dep_kinds": [{}]}}"#, kinds.join(","))
        };
        let (normal, build, dev) = ("null", r#""build""#, r#""dev""#);
        let registry = format!("\"{REGISTRY}\"");
        let deps_of_root =
            [dep("a", &[normal, dev]), dep("b", &[build]), dep("d", &[dev]), dep("m", &[normal])].join(",");
        let all = [
            package("program", "null", "bin", &deps_of_root),
            package("a", &registry, "lib", &dep("c", &[normal])),
            package("b", &registry, "lib", &dep("c", &[normal])),
            package("c", &registry, "lib", ""),
            package("d", &registry, "lib", ""),
            package("m", &registry, "proc-macro", &dep("b", &[normal])),
        ];
        let packages: Vec<&str> = all.iter().map(|(package, _)| package.as_str()).collect();
        let nodes: Vec<&str> = all.iter().map(|(_, node)| node.as_str()).collect();
        let metadata = format!(
            r#"{{"packages": [{}], "resolve": {{"root": "program", "nodes": [{}]}}}}"#,
            packages.join(","),
            nodes.join(",")
        );
        let lock = "version = 4\n\n[[package]]\nname = \"a\"\nversion = \"1.0.0\"\nsource = \"x\"\nchecksum = \"12ab\"\n\n\
                    [[package]]\nname = \"a\"\nversion = \"2.0.0\"\nchecksum = \"34cd\"\n";
        Closure::parse(&metadata, lock).unwrap()
    }

    #[test]
    fn closure_follows_normal_and_build_dependencies() {
        let closure = sample();
        let linked: Vec<(&str, bool)> =
            closure.packages.iter().map(|(id, package)| (id.name.as_str(), package.is_linked)).collect();
        assert_eq!(linked, [("a", true), ("b", false), ("c", true), ("m", false), ("program", true)]);
        assert_eq!(closure.root, id("program"));
        let program = &closure.packages[&id("program")];
        assert!(program.is_local && program.checksum.is_none());
        assert_eq!(program.dependencies, BTreeSet::from([id("a"), id("b"), id("m")]));
        let a = &closure.packages[&id("a")];
        assert!(!a.is_local);
        assert_eq!(a.license.as_deref(), Some("MIT OR Apache-2.0"));
        assert_eq!(a.checksum.as_deref(), Some("12ab"));
    }

    #[test]
    fn package_from_elsewhere_is_an_error() {
        let metadata = r#"{"packages": [{"id": "p", "name": "p", "version": "1.0.0", "source": "git+https://x", "targets": []}],
                           "resolve": {"root": "p", "nodes": [{"id": "p", "deps": []}]}}"#;
        assert!(matches!(Closure::parse(metadata, ""), Err(ClosureError::Source { .. })));
        assert!(matches!(Closure::parse("{}", ""), Err(ClosureError::Missing("packages"))));
    }

    /// Against what cargo would build, which it says in another way.
    #[test]
    fn closure_of_the_program_has_all_that_is_compiled() {
        let root = crate::workspace_root();
        let closure = Closure::of(&root, "crates/cli").unwrap();
        let line = "tree -p moontide-cli --edges normal,build --prefix none --locked --format {p}";
        let tree = Command::cargo(line).output(&root).unwrap();
        let mut packages = 0;
        for line in tree.lines().filter(|line| !line.is_empty()) {
            let mut words = line.split(' ');
            let (name, version) = (words.next().unwrap(), words.next().unwrap().trim_start_matches('v'));
            let id = PackageId { name: name.to_owned(), version: version.to_owned() };
            let package = closure.packages.get(&id).unwrap_or_else(|| panic!("{id:?} is missing"));
            assert!(package.is_local || package.checksum.is_some(), "{id:?} has no checksum");
            packages += 1;
        }
        assert!(packages > 100, "{tree}");
    }
}
