//! The first lines that a newcomer types: the quick start of README.md, run exactly as it stands there.
//!
//! Invariant: nothing is added between the lines. Before them stands only what a script needs and a person does not: the
//! end at the first failure, and the end of what was left running.

use std::path::Path;

use crate::command::{Command, CommandError};

/// The heading under which the lines stand.
const HEADING: &str = "## Quick start";

/// Long enough for a cold build on two cores.
const TIME_MAX: &str = "1500";

/// In front of the lines: `kill %1` needs job control, as at a terminal.
const PREAMBLE: &str =
    "set -euo pipefail -m; unset CARGO_TARGET_DIR; trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n";

/// Why the quick start does not work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum QuickstartError {
    #[error("cannot read README.md: {0}")]
    Read(#[from] std::io::Error),
    #[error("README.md has no block of `sh` under \"{HEADING}\"")]
    Missing,
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// Runs the lines.
pub(crate) fn run(root: &Path) -> Result<(), QuickstartError> {
    let page = std::fs::read_to_string(root.join("README.md"))?;
    let lines = block(&page).ok_or(QuickstartError::Missing)?;
    println!("{lines}");
    let script = format!("{PREAMBLE}{lines}");
    Ok(Command::new("timeout", &[TIME_MAX, "bash", "-c", &script]).run(root)?)
}

/// The first block of shell under the heading.
fn block(page: &str) -> Option<&str> {
    let (_, section) = page.split_once(&format!("\n{HEADING}\n"))?;
    let section = section.split_once("\n## ").map_or(section, |(section, _)| section);
    let (_, block) = section.split_once("```sh\n")?;
    block.split_once("```").map(|(block, _)| block)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_is_taken_from_quick_start_section_only() {
        let page = "# x\n```sh\nno\n```\n\n## Quick start\n\nwords\n```sh\none\ntwo\n```\n```sh\nno\n```\n";
        assert_eq!(block(page), Some("one\ntwo\n"));
        assert_eq!(block("# x\n\n## Quick start\n\nwords\n\n## Next\n```sh\nno\n```\n"), None);
        assert_eq!(block("no heading"), None);
    }

    #[test]
    fn readme_has_quick_start_block() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
        let page = std::fs::read_to_string(root.join("README.md")).unwrap();
        assert!(block(&page).unwrap().contains("moontide put"));
    }
}
