//! [`Scratch`]: temporary directory that is removed with the process.

use std::path::{Path, PathBuf};

/// A new directory. Dropping this removes it with its content.
#[derive(Debug)]
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates a directory under `parent`, and `parent` itself if it does not exist.
    pub fn new(parent: &Path, name: &str) -> std::io::Result<Scratch> {
        std::fs::create_dir_all(parent)?;
        let path = parent.join(format!("{name}-{}", std::process::id()));
        std::fs::create_dir(&path)?;
        Ok(Scratch(path))
    }

    /// Path of the directory.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.0) {
            eprintln!("moontide: cannot remove {}: {error}; remove it by hand", self.0.display());
        }
    }
}
