//! The files of a checkout, by path from the workspace root with `/` between parts.
//!
//! Owns [`Tree`] and its globs. Build products and git's own files are not part of a checkout. A directory exists
//! exactly if it holds a file, as in git.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::Path;

/// Files whose text is kept; of all others only the name matters.
const TEXT_EXTENSIONS: &[&str] = &["c", "h", "md", "proto", "py", "pyi", "rs", "sh", "toml", "yml"];
/// Directories with these names hold no sources, wherever they are.
const SKIPPED_NAMES: &[&str] = &[".git", ".venv", "__pycache__", "node_modules", "target"];
/// Directories at these places hold what fuzzing writes.
const SKIPPED_PATHS: &[&str] = &["fuzz/artifacts", "fuzz/coverage"];

/// A checkout in memory.
#[derive(Debug, Default)]
pub(super) struct Tree {
    /// Text is empty for files that are not text.
    files: BTreeMap<String, String>,
    directories: BTreeSet<String>,
}

impl Tree {
    pub(super) fn load(root: &Path) -> io::Result<Self> {
        let mut tree = Self::default();
        tree.load_directory(root, "")?;
        Ok(tree)
    }

    #[cfg(test)]
    pub(super) fn of(files: &[(&str, &str)]) -> Self {
        let mut tree = Self::default();
        files.iter().for_each(|(path, text)| tree.insert((*path).to_owned(), (*text).to_owned()));
        tree
    }

    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    /// Path and text of every file, sorted by path.
    pub(super) fn files(&self) -> impl Iterator<Item = (&str, &str)> {
        self.files.iter().map(|(path, text)| (path.as_str(), text.as_str()))
    }

    pub(super) fn text(&self, path: &str) -> Option<&str> {
        self.files.get(path).map(String::as_str)
    }

    /// Whether `pattern` names a file or directory; `*` stands for part of a name, `**` for any number of names.
    /// A pattern that ends in `/` names directories only; the empty one names the root.
    pub(super) fn has(&self, pattern: &str) -> bool {
        let (pattern, only_directories) = match pattern.strip_suffix('/') {
            Some(stem) => (stem, true),
            None => (pattern, false),
        };
        if !pattern.contains('*') {
            return pattern.is_empty()
                || self.directories.contains(pattern)
                || (!only_directories && self.files.contains_key(pattern));
        }
        let parts: Vec<&str> = pattern.split('/').collect();
        let matches = |path: &String| path_matches(&parts, &path.split('/').collect::<Vec<_>>());
        self.directories.iter().any(matches) || (!only_directories && self.files.keys().any(matches))
    }

    fn insert(&mut self, path: String, text: String) {
        let slashes = path.match_indices('/').map(|(at, _)| at);
        self.directories.extend(slashes.map(|at| path[..at].to_owned()));
        self.files.insert(path, text);
    }

    fn load_directory(&mut self, directory: &Path, prefix: &str) -> io::Result<()> {
        for entry in std::fs::read_dir(directory)? {
            let entry = entry?;
            let Ok(name) = entry.file_name().into_string() else { continue };
            let path = format!("{prefix}{name}");
            if entry.file_type()?.is_dir() {
                if !is_skipped(&path, &name) {
                    self.load_directory(&entry.path(), &format!("{path}/"))?;
                }
            } else if is_text(&name) {
                let bytes = std::fs::read(entry.path())?;
                self.insert(path, String::from_utf8_lossy(&bytes).into_owned());
            } else {
                self.insert(path, String::new());
            }
        }
        Ok(())
    }
}

fn is_skipped(path: &str, name: &str) -> bool {
    // At the root, `target-something` are target directories too; .gitignore says the same.
    let is_target = !path.contains('/') && name.starts_with("target");
    is_target || SKIPPED_NAMES.contains(&name) || SKIPPED_PATHS.contains(&path)
}

fn is_text(name: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(_, extension)| TEXT_EXTENSIONS.contains(&extension))
}

fn path_matches(pattern: &[&str], path: &[&str]) -> bool {
    match (pattern, path) {
        ([], []) => true,
        (["**", rest @ ..], _) => {
            path_matches(rest, path) || (!path.is_empty() && path_matches(pattern, &path[1..]))
        }
        ([part, pattern @ ..], [name, path @ ..]) => {
            name_matches(part.as_bytes(), name.as_bytes()) && path_matches(pattern, path)
        }
        _ => false,
    }
}

fn name_matches(pattern: &[u8], name: &[u8]) -> bool {
    match (pattern, name) {
        ([], []) => true,
        ([b'*', rest @ ..], _) => {
            name_matches(rest, name) || (!name.is_empty() && name_matches(pattern, &name[1..]))
        }
        ([expected, pattern @ ..], [found, name @ ..]) => expected == found && name_matches(pattern, name),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tree_matches_files_directories_and_globs() {
        let tree =
            Tree::of(&[("Cargo.toml", ""), ("crates/heap/src/lib.rs", ""), ("fuzz/corpus/frame/a", "")]);
        for found in [
            "",
            "Cargo.toml",
            "crates",
            "crates/",
            "crates/heap/src",
            "crates/*/src",
            "crates/*/src/*.rs",
            "crates/**/lib.rs",
            "crates/**",
            "fuzz/corpus/*/",
            "*.toml",
        ] {
            assert!(tree.has(found), "{found}");
        }
        for missing in
            ["Cargo", "Cargo.toml/", "crates/hea", "crates/*.rs", "crates/*/lib.rs", "fuzz/**/*.bin"]
        {
            assert!(!tree.has(missing), "{missing}");
        }
    }

    #[test]
    fn build_artifacts_are_skipped() {
        for (path, name) in [("target", "target"), ("target-loom", "target-loom"), (".git", ".git")] {
            assert!(is_skipped(path, name), "{path}");
        }
        assert!(is_skipped("fuzz/target", "target"));
        assert!(is_skipped("fuzz/artifacts", "artifacts"));
        assert!(!is_skipped("crates/meta/src/targeting", "targeting"));
    }
}
