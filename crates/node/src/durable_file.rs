//! [`replace`]: a small file that is old or new after a crash, never torn.

use std::io::{self, Write as _};
use std::path::Path;

/// Replaces the content of a file durably: writes another file, syncs it, renames it, and syncs the directory.
pub(crate) fn replace(dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    let new = dir.join(format!("{name}.new"));
    let mut file = std::fs::File::create(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&new, dir.join(name))?;
    std::fs::File::open(dir)?.sync_all()
}
