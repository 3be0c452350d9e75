//! The backends under test. A new one needs a line in [`kinds`] with its name and its open function.

use std::sync::Arc;

use moontide_disk::{
    Backend, BucketBackend, BucketConfig, EvictionPolicy, FileBackend, FileConfig, OffsetBackend,
    OffsetConfig, OpenError, Queue, Recovery, ScannedRecord, Storage,
};

/// Limit of a tier. Small: some backends have a file of this size.
const LIMIT_BYTES: u64 = 4 << 20;

pub(crate) type Opened = Result<(Box<dyn Backend>, Recovery), OpenError>;

type Open = fn(Arc<dyn Storage>, &mut dyn Queue, &mut dyn FnMut(ScannedRecord<'_>)) -> Opened;

/// A backend under test.
#[derive(Clone, Copy)]
pub(crate) struct Kind {
    pub(crate) name: &'static str,
    pub(crate) open: Open,
}

/// Returns all backends.
pub(crate) fn kinds() -> Vec<Kind> {
    vec![
        Kind {
            name: "bucket",
            open: |storage, queue, found| bucket(EvictionPolicy::Fifo, storage, queue, found),
        },
        Kind {
            name: "bucket-lru",
            open: |storage, queue, found| bucket(EvictionPolicy::Lru, storage, queue, found),
        },
        Kind { name: "file", open: file },
        Kind { name: "offset", open: offset },
    ]
}

/// Returns the backend with this name. Used for mutations, which exist in debug builds only.
#[cfg(debug_assertions)]
pub(crate) fn kind(name: &str) -> Kind {
    kinds().into_iter().find(|kind| kind.name == name).expect("a backend under test")
}

/// The default backend.
pub(crate) fn default_kind() -> Kind {
    kinds()[0]
}

fn bucket(
    eviction_policy: EvictionPolicy,
    storage: Arc<dyn Storage>,
    queue: &mut dyn Queue,
    found: &mut dyn FnMut(ScannedRecord<'_>),
) -> Opened {
    let config = BucketConfig {
        bucket_bytes_max: 100_000,
        bucket_records_max: 8,
        eviction_policy,
        open_files_max: 3,
        ..BucketConfig::with_limit(LIMIT_BYTES)
    };
    let (backend, recovery) = BucketBackend::open(storage, queue, config, found)?;
    Ok((Box::new(backend), recovery))
}

fn file(
    storage: Arc<dyn Storage>,
    queue: &mut dyn Queue,
    found: &mut dyn FnMut(ScannedRecord<'_>),
) -> Opened {
    let config = FileConfig { open_files_max: 3, ..FileConfig::with_limit(LIMIT_BYTES) };
    let (backend, recovery) = FileBackend::open(storage, queue, config, found)?;
    Ok((Box::new(backend), recovery))
}

fn offset(
    storage: Arc<dyn Storage>,
    queue: &mut dyn Queue,
    found: &mut dyn FnMut(ScannedRecord<'_>),
) -> Opened {
    let config = OffsetConfig { entries: Some(256), ..OffsetConfig::with_limit(LIMIT_BYTES) };
    let (backend, recovery) = OffsetBackend::open(storage, queue, config, found)?;
    Ok((Box::new(backend), recovery))
}
