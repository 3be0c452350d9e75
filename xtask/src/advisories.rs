//! The step `advisories`: dependencies with known vulnerabilities, of unsound code, withdrawn, or without a maintainer.
//!
//! Owns where the advisories come from; `deny.toml` owns what is wrong with one. The RustSec database is a git repository on
//! GitHub, and no package registry carries it. So the step cannot run on every machine that can run all others: without a
//! network to GitHub it uses the copy that cargo-deny keeps, and without a copy it is not run, even under `CI=true`. What it
//! finds is always a failure.

use std::path::{Path, PathBuf};

use crate::command::{Command, CommandError};

/// Time to fetch the database, which has 2 MB. A firewall that drops packets would keep the run waiting.
const FETCH_SECONDS_MAX: &str = "120";

/// What the check is made against.
#[derive(Debug, PartialEq, Eq)]
enum Database {
    /// As published today.
    Current,
    /// What an earlier run has fetched.
    Copy {
        note: String,
    },
    None {
        reason: String,
    },
}

/// Checks Cargo.lock. Returns why it could not, if there is no database.
pub(crate) fn run(root: &Path) -> Result<Option<String>, CommandError> {
    let fetch = Command::new("timeout", &[FETCH_SECONDS_MAX, "cargo", "deny", "--locked", "fetch", "db"]);
    println!("$ {fetch}");
    let check = match database(fetch.output(root), || date_of_copy(root)) {
        Database::Current => Command::cargo("deny --locked check advisories"),
        Database::Copy { note } => {
            println!("NOTE: {note}");
            // Offline, cargo-deny does not ask the registry for withdrawn versions.
            Command::cargo("deny --locked --offline check advisories")
        }
        Database::None { reason } => return Ok(Some(reason)),
    };
    println!("$ {check}");
    check.run(root)?;
    Ok(None)
}

fn database(fetched: Result<String, CommandError>, copy: impl FnOnce() -> Option<String>) -> Database {
    let Err(error) = fetched else { return Database::Current };
    match copy() {
        Some(date) => Database::Copy {
            note: format!("using the advisories of {date}, because they cannot be updated: {error}"),
        },
        None => Database::None { reason: format!("there is no database of advisories: {error}") },
    }
}

/// The day of the newest advisory that cargo-deny has fetched before.
fn date_of_copy(root: &Path) -> Option<String> {
    let home = std::env::var_os("CARGO_HOME").map(PathBuf::from);
    let home = home.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cargo")))?;
    // The name ends with a hash of the address.
    let copies = std::fs::read_dir(home.join("advisory-dbs")).ok()?.flatten().map(|entry| entry.path());
    let copy = copies.into_iter().find(|path| path.join(".git").is_dir())?;
    let log = ["-C", &copy.to_string_lossy(), "log", "-1", "--format=%cs"];
    let date = Command::new("git", &log).output(root).ok()?;
    Some(date.trim().to_owned()).filter(|date| !date.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn database_is_current_else_a_copy_else_none() {
        let failed = || Command::new("sh", &["-c", "echo no route >&2; exit 1"]).output(Path::new("/"));
        let date = || Some("2026-08-20".to_owned());
        assert_eq!(database(Ok(String::new()), || panic!("a copy is not needed")), Database::Current);
        let Database::Copy { note } = database(failed(), date) else { panic!("there is a copy") };
        assert!(note.contains("of 2026-08-20") && note.contains("no route"), "{note}");
        let Database::None { reason } = database(failed(), || None) else { panic!("there is no copy") };
        assert!(reason.contains("no route"), "{reason}");
    }
}
