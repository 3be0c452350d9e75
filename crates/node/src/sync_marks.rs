//! [`SyncMarkStore`]: the [`SyncMarks`] of this process, and the file in which those of a node with a disk outlive it.
//!
//! The file may be older than the marks in memory. Then a master drops records that it could have kept.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moontide_proto::v1;
use moontide_types::{GroupId, MonoTime};
use parking_lot::Mutex;
use tracing::warn;

use crate::durable_file;
use crate::logic::sync_marks::SyncMarks;

/// Name of the file in the disk's directory.
const FILE: &str = "sync.marks";

/// Marks of this process, shared by its sessions.
#[derive(Debug)]
pub(crate) struct SyncMarkStore {
    marks: Mutex<SyncMarks>,
    /// Directory of the disk. Held while the file is written.
    dir: Mutex<Option<PathBuf>>,
}

impl SyncMarkStore {
    /// Opens the marks of a node with a disk in this directory, or without a disk.
    pub(crate) fn open(dir: Option<&Path>) -> Arc<SyncMarkStore> {
        let marks = dir.map(read).unwrap_or_default();
        Arc::new(SyncMarkStore { marks: Mutex::new(marks), dir: Mutex::new(dir.map(Path::to_owned)) })
    }

    /// As [`SyncMarks::record`].
    pub(crate) fn record(&self, in_sync: &[(GroupId, u32)], at: MonoTime) -> bool {
        self.marks.lock().record(in_sync, at)
    }

    /// As [`SyncMarks::to_wire`].
    pub(crate) fn to_wire(&self, now: MonoTime) -> Vec<v1::SyncMark> {
        self.marks.lock().to_wire(now)
    }

    /// Writes the file durably, if the node has a disk.
    pub(crate) fn write(&self) {
        let dir = self.dir.lock();
        let Some(dir) = &*dir else { return };
        let text = self.marks.lock().to_text();
        if let Err(error) = durable_file::replace(dir, FILE, text.as_bytes()) {
            let file = dir.join(FILE);
            warn!(file = %file.display(), %error, "cannot write; masters may drop the records on disk after a restart");
        }
    }
}

fn read(dir: &Path) -> SyncMarks {
    let file = dir.join(FILE);
    let text = match std::fs::read_to_string(&file) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return SyncMarks::default(), // a new disk
        Err(error) => {
            warn!(file = %file.display(), %error, "cannot read; masters may drop the records on disk");
            return SyncMarks::default();
        }
    };
    SyncMarks::from_text(&text).unwrap_or_else(|| {
        warn!(file = %file.display(), "malformed; masters may drop the records on disk");
        SyncMarks::default()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_read_from_the_directory_of_the_disk() {
        let dir = std::env::temp_dir().join(format!("moontide-marks-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let store = SyncMarkStore::open(Some(&dir));
        assert!(store.to_wire(MonoTime(0)).is_empty());
        assert!(store.record(&[(GroupId(9), 4)], MonoTime(0)));
        store.write();
        let read = SyncMarkStore::open(Some(&dir)).to_wire(MonoTime(0));
        assert_eq!(read, [v1::SyncMark { group: 9, exclusion: 4, ago_ms: u64::MAX }]);
        std::fs::write(dir.join(FILE), "torn").unwrap();
        assert!(SyncMarkStore::open(Some(&dir)).to_wire(MonoTime(0)).is_empty());
        std::fs::remove_dir_all(&dir).unwrap();
        store.write(); // only warns
    }
}
