//! [`Files`]: small files of a world, which are replaced as a whole. They outlive processes.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::threads::sleep;
use super::world::World;

/// Bounds of the time that a replacement takes, in microseconds.
const REPLACE_MICROS: (u64, u64) = (100, 20_000);

/// Files of a world.
#[derive(Debug, Default)]
pub(super) struct Files {
    files: BTreeMap<PathBuf, Vec<u8>>,
    /// Directories whose files cannot be changed.
    failing: Vec<PathBuf>,
}

/// Returns the content of a file; `None` outside a world.
pub(crate) fn read(path: &Path) -> Option<io::Result<Vec<u8>>> {
    let world = World::current()?;
    let found = world.files().borrow().files.get(path).cloned();
    Some(found.ok_or_else(|| io::ErrorKind::NotFound.into()))
}

/// Replaces a file; `None` outside a world. If the process is killed meanwhile, the file is the old one.
pub(crate) fn replace(path: &Path, content: &[u8]) -> Option<io::Result<()>> {
    let world = World::current()?;
    let (min, max) = REPLACE_MICROS;
    sleep(Duration::from_micros(min + world.draw(max - min)));
    Some(change(&world, path, |files| {
        files.insert(path.to_owned(), content.to_owned());
    }))
}

/// Removes a file; `None` outside a world.
pub(crate) fn remove(path: &Path) -> Option<io::Result<()>> {
    let world = World::current()?;
    let removed = change(&world, path, |files| files.remove(path));
    Some(removed.and_then(|removed| removed.map(drop).ok_or_else(|| io::ErrorKind::NotFound.into())))
}

fn change<T>(
    world: &World,
    path: &Path,
    change: impl FnOnce(&mut BTreeMap<PathBuf, Vec<u8>>) -> T,
) -> io::Result<T> {
    let mut files = world.files().borrow_mut();
    if files.failing.iter().any(|dir| path.starts_with(dir)) {
        return Err(io::Error::other("the disk fails"));
    }
    Ok(change(&mut files.files))
}

/// Sets whether files below a directory can be changed.
///
/// # Panics
/// Outside a world.
pub fn set_files_fail(dir: &Path, fail: bool) {
    let world = World::current().expect("files are simulated within a world");
    let failing = &mut world.files().borrow_mut().failing;
    failing.retain(|failing| failing != dir);
    failing.extend(fail.then(|| dir.to_owned()));
}
