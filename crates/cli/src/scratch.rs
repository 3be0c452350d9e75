//! [`Scratch`]: a directory of this process that goes with it.

use std::path::{Path, PathBuf};

/// A new directory. It and everything in it go when this is dropped.
pub(crate) struct Scratch(PathBuf);

impl Scratch {
    /// Makes one under `parent`, which is made if it is not there.
    pub(crate) fn new(parent: &Path, name: &str) -> std::io::Result<Scratch> {
        std::fs::create_dir_all(parent)?;
        let path = parent.join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        Ok(Scratch(path))
    }

    /// Where it is.
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("moontide: {} stays behind: {error}", self.0.display());
        }
    }
}
