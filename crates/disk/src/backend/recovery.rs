//! [`Recovery`]: result of the scan at the start, and [`OpenError`]: failure to open a tier.

use std::io;

/// Maximum number of corrupt records that are listed; more are only counted.
const BAD_LISTED_MAX: usize = 1000;

/// Result of the scan at the start.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Recovery {
    /// Files that were scanned.
    pub files: u64,
    /// Records that can be found.
    pub records: u64,
    /// Bytes in use.
    pub bytes: u64,
    /// Records that are on the disk but were removed.
    pub removed: u64,
    /// The first corrupt records.
    pub bad: Vec<BadRecord>,
    /// Number of corrupt records.
    pub bad_count: u64,
}

/// Invalid data at the location of a record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BadRecord {
    /// File, relative to the root of the tier.
    pub file: String,
    /// Offset in the file.
    pub offset: u64,
    /// Description of the corruption.
    pub reason: String,
}

impl Recovery {
    /// Counts a corrupt record, and lists it up to the limit.
    pub(crate) fn bad(&mut self, file: &str, offset: u64, reason: impl ToString) {
        self.bad_count += 1;
        if self.bad.len() < BAD_LISTED_MAX {
            self.bad.push(BadRecord { file: file.into(), offset, reason: reason.to_string() });
        }
    }
}

/// Failure to open a tier.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// An I/O error. Single corrupt records or files do not fail the open.
    #[error("{what}: {source}")]
    Io {
        /// The failed operation.
        what: &'static str,
        /// I/O error.
        source: io::Error,
    },
    /// A setting is out of range.
    #[error("{what} is {value}; it must be at least {min} and at most {max}")]
    Config {
        /// Name of the setting.
        what: &'static str,
        /// Its value.
        value: u64,
        /// Minimum.
        min: u64,
        /// Maximum.
        max: u64,
    },
    /// A file on the disk is not of this release and must not be overwritten.
    #[error("{file}: {reason}")]
    Foreign {
        /// Path of the file.
        file: String,
        /// Description of the mismatch.
        reason: String,
    },
}

impl OpenError {
    /// Returns a function for `map_err`; `what` names the failed operation.
    pub(crate) fn io(what: &'static str) -> impl FnOnce(io::Error) -> OpenError {
        move |source| OpenError::Io { what, source }
    }
}
