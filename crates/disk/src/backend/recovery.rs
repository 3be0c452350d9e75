//! [`Recovery`]: what the scan at the start found, and [`OpenError`], why there was none.

use std::io;

/// Bad records that are listed; more are only counted. Who has more needs a new disk, not a longer list.
const BAD_LISTED_MAX: usize = 1000;

/// What the scan at the start found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Files that were looked at.
    pub files: u64,
    /// Records that can be found.
    pub records: u64,
    /// Bytes that are in use.
    pub bytes: u64,
    /// Records that are on the disk but were removed.
    pub removed: u64,
    /// The first bad ones.
    pub bad: Vec<BadRecord>,
    /// How many were bad.
    pub bad_count: u64,
}

/// Something that is no record where one should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRecord {
    /// The file, relative to the tier's root.
    pub file: String,
    /// Where in it.
    pub offset: u64,
    /// What is wrong.
    pub why: String,
}

impl Recovery {
    /// Counts a bad record, and lists it while there is room.
    pub(crate) fn bad(&mut self, file: &str, offset: u64, why: impl ToString) {
        self.bad_count += 1;
        if self.bad.len() < BAD_LISTED_MAX {
            self.bad.push(BadRecord { file: file.into(), offset, why: why.to_string() });
        }
    }
}

/// Why a tier cannot be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The disk failed. Single bad records or files are no reason.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// How it failed.
        source: io::Error,
    },
    /// The configuration makes no sense.
    #[error("{what} is {value}, it must be at least {min} and at most {max}")]
    Config {
        /// Which value.
        what: &'static str,
        /// What it is.
        value: u64,
        /// The least that it may be.
        min: u64,
        /// The most that it may be.
        max: u64,
    },
    /// There is something on the disk that this release cannot use, and that it must not overwrite.
    #[error("{file}: {why}")]
    Foreign {
        /// The file.
        file: String,
        /// What is wrong with it.
        why: String,
    },
}

impl OpenError {
    /// For `map_err`: what was tried when the disk failed.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> OpenError {
        move |source| OpenError::Io { what, source }
    }
}
