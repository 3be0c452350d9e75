//! [`BackendKind`]: the three backends by name, opened in one way.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::backend::{
    Backend, BucketBackend, BucketConfig, EvictionOrder, FileBackend, FileConfig, Found,
    OPEN_FILES_MAX_DEFAULT, OffsetBackend, OffsetConfig, OpenError, Recovery, inspect_buckets, inspect_files,
    inspect_offset,
};
use crate::record::Inspected;
use crate::storage::{Queue, Storage};

/// Which backend.
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

/// A name that no backend has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("no backend is called {name:?}; there are bucket, file and offset")]
pub struct UnknownBackend {
    /// The name.
    pub name: String,
}

/// How a backend is opened, whichever it is.
#[derive(Clone, Copy, Debug)]
pub struct BackendConfig {
    /// Bytes that it may use.
    pub limit_bytes: u64,
    /// Who goes first when they are used up.
    pub order: EvictionOrder,
}

impl BackendKind {
    /// All of them.
    pub const ALL: [BackendKind; 3] = [BackendKind::Bucket, BackendKind::File, BackendKind::Offset];

    /// The name in configuration files.
    pub fn name(self) -> &'static str {
        match self {
            BackendKind::Bucket => "bucket",
            BackendKind::File => "file",
            BackendKind::Offset => "offset",
        }
    }

    /// Opens it, and finds what is there.
    pub fn open(
        self,
        storage: Arc<dyn Storage>,
        queue: &mut dyn Queue,
        config: BackendConfig,
        found: &mut dyn FnMut(Found<'_>),
    ) -> Result<(Box<dyn Backend>, Recovery), OpenError> {
        let BackendConfig { limit_bytes, order } = config;
        Ok(match self {
            BackendKind::Bucket => {
                let config = BucketConfig { order, ..BucketConfig::with_limit(limit_bytes) };
                let (backend, recovery) = BucketBackend::open(storage, queue, config, found)?;
                (Box::new(backend), recovery)
            }
            BackendKind::File => {
                let config = FileConfig { limit_bytes, order, open_files_max: OPEN_FILES_MAX_DEFAULT };
                let (backend, recovery) = FileBackend::open(storage, queue, config, found)?;
                (Box::new(backend), recovery)
            }
            BackendKind::Offset => {
                let config = OffsetConfig { limit_bytes, entries: None, order };
                let (backend, recovery) = OffsetBackend::open(storage, queue, config, found)?;
                (Box::new(backend), recovery)
            }
        })
    }

    /// Looks at what is there without changing anything; with `verify`, at every byte of it.
    pub fn inspect(
        self,
        storage: &Arc<dyn Storage>,
        queue: &mut dyn Queue,
        verify: bool,
        each: &mut dyn FnMut(Inspected<'_>),
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
        let named = |kind: &BackendKind| kind.name() == name;
        BackendKind::ALL.into_iter().find(named).ok_or_else(|| UnknownBackend { name: name.into() })
    }
}
