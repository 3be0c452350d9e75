//! Small files that are old or new after a crash, never torn, and that only this user may read.

use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Returns the content of a file.
///
/// # Errors
/// If it cannot be read; [`io::ErrorKind::NotFound`] if there is none.
pub fn read(path: &Path) -> io::Result<Vec<u8>> {
    #[cfg(sim)]
    if let Some(content) = crate::sim::files::read(path) {
        return content;
    }
    std::fs::read(path)
}

/// Returns the content of a text file.
///
/// # Errors
/// As [`read`]; [`io::ErrorKind::InvalidData`] if it is not UTF-8.
pub fn read_to_string(path: &Path) -> io::Result<String> {
    String::from_utf8(read(path)?).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
}

/// Replaces the content of a file durably: writes another file, syncs it, renames it, and syncs the directory. The new file has
/// mode 0600, whatever the mode of the old one.
///
/// # Errors
/// If one of these fails. Then the file is the old or the new one.
pub fn replace(dir: &Path, name: &str, content: &[u8]) -> io::Result<()> {
    #[cfg(sim)]
    if let Some(replaced) = crate::sim::files::replace(&dir.join(name), content) {
        return replaced;
    }
    let new = dir.join(format!("{name}.new"));
    // Left behind by a crash, perhaps with another mode.
    let _ = std::fs::remove_file(&new);
    let mut file = std::fs::File::options().write(true).create_new(true).mode(0o600).open(&new)?;
    file.write_all(content)?;
    file.sync_all()?;
    std::fs::rename(&new, dir.join(name))?;
    std::fs::File::open(dir)?.sync_all()
}

/// Removes a file. Not durable before the directory is synced.
///
/// # Errors
/// If it cannot be removed.
pub fn remove(path: &Path) -> io::Result<()> {
    #[cfg(sim)]
    if let Some(removed) = crate::sim::files::remove(path) {
        return removed;
    }
    std::fs::remove_file(path)
}
