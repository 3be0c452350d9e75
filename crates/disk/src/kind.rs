//! [`BackendKind`]: the three backends by name, with a common way to open them.

use std::fmt;
use std::path::Path;
use std::str::FromStr;
use std::sync::Arc;

use crate::backend::{
    Backend, BucketBackend, BucketConfig, EvictionPolicy, FileBackend, FileConfig, OPEN_FILES_MAX_DEFAULT,
    OffsetBackend, OffsetConfig, OpenError, Recovery, ScannedRecord, inspect_buckets, inspect_files,
    inspect_offset,
};
use crate::record::InspectedRecord;
use crate::storage::{Queue, Storage};

/// Disk layout.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum BackendKind {
    /// Many records in a file.
    #[default]
    Bucket,
    /// A file for each record.
    File,
    /// One large file.
    Offset,
}

/// An unknown backend name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown backend {name:?}; use bucket, file or offset")]
pub struct UnknownBackend {
    /// The name as given.
    pub name: String,
}

/// Settings common to all backends.
#[derive(Clone, Copy, Debug)]
pub struct BackendConfig {
    /// Maximum number of bytes on the disk.
    pub limit_bytes: u64,
    /// Eviction policy.
    pub eviction_policy: EvictionPolicy,
}

impl BackendKind {
    /// All backends.
    pub const ALL: [BackendKind; 3] = [BackendKind::Bucket, BackendKind::File, BackendKind::Offset];

    /// Returns the name in configuration files.
    pub fn name(self) -> &'static str {
        match self {
            BackendKind::Bucket => "bucket",
            BackendKind::File => "file",
            BackendKind::Offset => "offset",
        }
    }

    /// Whether a backend made the file or directory of this path, relative to the directory of the disk. All others are of
    /// other programs, or of the node.
    pub fn owns(path: &Path, is_dir: bool) -> bool {
        let words: Option<Vec<&str>> = path.iter().map(|word| word.to_str()).collect();
        let is_hex = |word: &str, len| word.len() == len && word.bytes().all(|byte| byte.is_ascii_hexdigit());
        match (words.as_deref(), is_dir) {
            (Some(directories), true) => directories.iter().all(|word| is_hex(word, 2)),
            (Some(["removed.log" | "removed.tmp" | "data.moontide" | "data.moontide.tmp"]), false) => true,
            (Some([file]), false) => {
                let number = file.strip_suffix(".bucket").or(file.strip_suffix(".tmp"));
                number.is_some_and(|number| is_hex(number, 16))
            }
            (Some([directories @ .., file]), false) => {
                // The id of the object, its version, and the number of the stripe.
                let is_record = file.len() > 32 && is_hex(&file[..32], 32);
                let is_record = is_record && (file.ends_with(".rec") || file.ends_with(".rec.tmp"));
                directories.iter().all(|word| is_hex(word, 2)) && is_record
            }
            (Some([]) | None, _) => false,
        }
    }

    /// Opens the backend, and scans the disk. Calls `found` for each record.
    pub fn open(
        self,
        storage: Arc<dyn Storage>,
        queue: &mut dyn Queue,
        config: BackendConfig,
        found: &mut dyn FnMut(ScannedRecord<'_>),
    ) -> Result<(Box<dyn Backend>, Recovery), OpenError> {
        let BackendConfig { limit_bytes, eviction_policy } = config;
        Ok(match self {
            BackendKind::Bucket => {
                let config = BucketConfig { eviction_policy, ..BucketConfig::with_limit(limit_bytes) };
                let (backend, recovery) = BucketBackend::open(storage, queue, config, found)?;
                (Box::new(backend), recovery)
            }
            BackendKind::File => {
                let config =
                    FileConfig { limit_bytes, eviction_policy, open_files_max: OPEN_FILES_MAX_DEFAULT };
                let (backend, recovery) = FileBackend::open(storage, queue, config, found)?;
                (Box::new(backend), recovery)
            }
            BackendKind::Offset => {
                let config = OffsetConfig { limit_bytes, entries: None, eviction_policy };
                let (backend, recovery) = OffsetBackend::open(storage, queue, config, found)?;
                (Box::new(backend), recovery)
            }
        })
    }

    /// Visits all records without changes to the disk; with `verify`, also verifies their payloads.
    pub fn inspect(
        self,
        storage: &Arc<dyn Storage>,
        queue: &mut dyn Queue,
        verify: bool,
        each: &mut dyn FnMut(InspectedRecord<'_>),
    ) -> Result<(), OpenError> {
        match self {
            BackendKind::Bucket => inspect_buckets(storage, queue, verify, each),
            BackendKind::File => inspect_files(storage, queue, verify, each),
            BackendKind::Offset => inspect_offset(storage, queue, verify, each),
        }
    }
}

impl fmt::Display for BackendKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for BackendKind {
    type Err = UnknownBackend;

    fn from_str(name: &str) -> Result<BackendKind, UnknownBackend> {
        let has_name = |kind: &BackendKind| kind.name() == name;
        BackendKind::ALL.into_iter().find(has_name).ok_or_else(|| UnknownBackend { name: name.into() })
    }
}
