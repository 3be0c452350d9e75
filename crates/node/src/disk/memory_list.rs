//! The objects that were in memory when the node was stopped: a file beside the disk tier, from which the node marks them
//! for the masters after its start.
//!
//! The list is a hint. An object that is missing in it, or in it by mistake, is on disk or not all the same, and is only
//! loaded into memory later or for nothing.

use std::io;
use std::path::Path;
use std::time::Duration;

use moontide_heap::Segment;
use moontide_proto::{Packed, PackedBuilder, VersionedId};
use moontide_rt::collections::HashSet;
use moontide_rt::time::Instant;
use moontide_types::record::State;
use moontide_types::{Epoch, ObjectId};

use crate::memory::NodeMemory;
use moontide_rt::fs;

/// Name of the file in a directory of the disk: packed [`VersionedId`]s.
pub(super) const FILE: &str = "memory.list";

/// Time after the start in which masters are told. A master that asks later has seen what was read since.
const PERIOD: Duration = Duration::from_secs(300);

/// Maximum number of objects in the list: 384 MiB.
const OBJECTS_MAX: usize = 16 << 20;

/// Objects that were in memory when the node was stopped.
#[derive(Debug)]
pub(super) struct MemoryList {
    until: Instant,
    versions: HashSet<(ObjectId, Epoch)>,
}

impl MemoryList {
    /// Reads the list and removes its file: after a crash it would be out of date.
    pub(super) fn take(dir: &Path) -> io::Result<MemoryList> {
        let path = dir.join(FILE);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Vec::new(),
            Err(error) => return Err(error),
        };
        if !bytes.is_empty() {
            fs::remove(&path)?;
        }
        let packed = Packed::<VersionedId>::decode(&bytes, OBJECTS_MAX);
        let packed = packed.map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let versions = packed.iter().map(|version| (version.id, version.epoch)).collect();
        Ok(MemoryList { until: Instant::now() + PERIOD, versions })
    }

    /// An empty list.
    pub(super) fn empty() -> MemoryList {
        MemoryList { until: Instant::now(), versions: HashSet::new() }
    }

    /// Adds the objects of another list.
    pub(super) fn extend(&mut self, other: MemoryList) {
        self.until = self.until.max(other.until);
        self.versions.extend(other.versions);
    }

    /// Number of objects.
    pub(super) fn len(&self) -> usize {
        self.versions.len()
    }

    /// Whether the masters are to be told that an object was in memory.
    pub(super) fn contains(&mut self, id: ObjectId, version: Epoch) -> bool {
        self.expire();
        self.versions.contains(&(id, version))
    }

    /// Frees the list when its time is over.
    pub(super) fn expire(&mut self) {
        if !self.versions.is_empty() && Instant::now() > self.until {
            self.versions = HashSet::new();
        }
    }

    /// Writes the list of what is in memory now. Returns the number of objects.
    pub(super) fn write(dir: &Path, memory: &NodeMemory) -> io::Result<usize> {
        let mut versions = Vec::new();
        for node_segment in memory.segments() {
            let segment: &Segment = node_segment.segment();
            segment.for_each_record(|_, header, _| {
                if header.word.state() == State::Ready && versions.len() < OBJECTS_MAX {
                    versions.push(VersionedId { id: header.id, epoch: header.word.epoch() });
                }
            });
        }
        let packed: PackedBuilder<VersionedId> = versions.iter().copied().collect();
        fs::replace(dir, FILE, &packed.finish())?;
        Ok(versions.len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn list_is_read_once_and_bad_lists_are_refused() {
        let dir = std::env::temp_dir().join(format!("moontide-memory-list-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        assert_eq!(MemoryList::take(&dir).unwrap().len(), 0);
        let version = VersionedId { id: ObjectId([7; 16]), epoch: Epoch::from_bits(9).unwrap() };
        let packed: PackedBuilder<VersionedId> = [version].into_iter().collect();
        fs::replace(&dir, FILE, &packed.finish()).unwrap();
        let mut list = MemoryList::take(&dir).unwrap();
        assert!(list.contains(version.id, version.epoch));
        assert!(!list.contains(version.id, Epoch::from_bits(8).unwrap()));
        list.until = Instant::now() - Duration::from_millis(1);
        assert!(!list.contains(version.id, version.epoch), "it is out of date");
        assert_eq!(MemoryList::take(&dir).unwrap().len(), 0);
        std::fs::write(dir.join(FILE), [1; 25]).unwrap();
        assert!(MemoryList::take(&dir).is_err());
        assert_eq!(MemoryList::take(&dir).unwrap().len(), 0, "the bad one is removed");
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
