//! What this machine and this checkout offer: which tools and interpreters are installed, where builds go, which fuzz targets exist.
//!
//! Owns [`Machine`], gathered once and then passed as an argument, so that the plans made from it are pure.

use std::path::Path;

use crate::command::Command;
use crate::venv::{self, Interpreter};

/// Facts on which the plan of a CI run depends.
#[derive(Debug, Clone)]
pub(crate) struct Machine {
    pub(crate) has_nextest: bool,
    pub(crate) has_nightly: bool,
    pub(crate) has_cargo_fuzz: bool,
    pub(crate) has_cargo_deny: bool,
    /// Whether network namespaces with nft rules can be created.
    pub(crate) has_namespaces: bool,
    pub(crate) has_etcd: bool,
    /// Python interpreters, oldest first.
    pub(crate) interpreters: Vec<Interpreter>,
    /// `CI=true`: a step that cannot run fails.
    pub(crate) is_ci: bool,
    /// As the caller set it, or `target`; relative paths start at the workspace root.
    pub(crate) target_dir: String,
    /// Names of `fuzz/fuzz_targets/*.rs`, sorted.
    pub(crate) fuzz_targets: Vec<String>,
}

impl Machine {
    pub(crate) fn probe(root: &Path) -> Self {
        // `cargo +nightly` could install a toolchain as a side effect; the list does not.
        let toolchains = Command::new("rustup", &["toolchain", "list"]).output(root).unwrap_or_default();
        Self {
            has_nextest: Command::cargo("nextest --version").succeeds(root),
            has_nightly: toolchains.lines().any(|line| line.starts_with("nightly")),
            has_cargo_fuzz: Command::cargo("fuzz --version").succeeds(root),
            has_cargo_deny: Command::cargo("deny --version").succeeds(root),
            has_namespaces: Command::new("unshare", &["--net", "nft", "list", "ruleset"]).succeeds(root),
            has_etcd: Command::new("etcd", &["--version"]).succeeds(root),
            interpreters: venv::interpreters(root),
            is_ci: std::env::var("CI").is_ok_and(|value| value == "true"),
            target_dir: std::env::var("CARGO_TARGET_DIR").unwrap_or_else(|_| "target".to_owned()),
            fuzz_targets: fuzz_targets(root),
        }
    }
}

fn fuzz_targets(root: &Path) -> Vec<String> {
    let Ok(entries) = std::fs::read_dir(root.join("fuzz/fuzz_targets")) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut targets: Vec<String> =
        names.filter_map(|name| name.strip_suffix(".rs").map(str::to_owned)).collect();
    targets.sort();
    targets
}
