//! [`SyncMarkStore`]: the [`SyncMarks`] of this process, and the files in which those of a node with a disk outlive it.
//!
//! Each directory of the disk has a file, and the newest one counts. It may be older than the marks in memory. Then a master
//! drops records that it could have kept.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use moontide_proto::v1;
use moontide_rt::sync::Mutex;
use moontide_types::{GroupId, MonoTime};
use tracing::warn;

use crate::logic::sync_marks::SyncMarks;
use moontide_rt::fs;

/// Name of the file in a directory of the disk.
pub(crate) const FILE: &str = "sync.marks";

/// Time a write waits for the one before it.
const WRITE_WAIT: Duration = Duration::from_secs(10);

/// Marks of this process, shared by its sessions.
#[derive(Debug)]
pub(crate) struct SyncMarkStore {
    marks: Mutex<SyncMarks>,
    /// Directories of the disk. Each is locked while its file is written.
    dirs: Vec<Mutex<PathBuf>>,
}

impl SyncMarkStore {
    /// Opens the marks of a node with a disk in these directories; none: without a disk.
    pub(crate) fn open(dirs: &[PathBuf]) -> Arc<SyncMarkStore> {
        let mut marks = SyncMarks::default();
        dirs.iter().for_each(|dir| marks.merge(read(dir)));
        let dirs = dirs.iter().cloned().map(Mutex::new).collect();
        Arc::new(SyncMarkStore { marks: Mutex::new(marks), dirs })
    }

    /// Returns the number of files.
    pub(crate) fn files(&self) -> usize {
        self.dirs.len()
    }

    /// As [`SyncMarks::record`].
    pub(crate) fn record(&self, in_sync: &[(GroupId, u32)], at: MonoTime) -> bool {
        self.marks.lock().record(in_sync, at)
    }

    /// As [`SyncMarks::to_wire`].
    pub(crate) fn to_wire(&self, now: MonoTime) -> Vec<v1::SyncMark> {
        self.marks.lock().to_wire(now)
    }

    /// Writes one of the files durably. A directory that does not respond delays no other.
    pub(crate) fn write(&self, file: usize) {
        // A writer that does not end is not waited for: the next change of the marks tries again.
        let Some(dir) = self.dirs[file].try_lock_for(WRITE_WAIT) else { return };
        let text = self.marks.lock().to_text();
        if let Err(error) = fs::replace(&dir, FILE, text.as_bytes()) {
            let file = dir.join(FILE);
            warn!(file = %file.display(), %error, "cannot write; masters may drop the records on disk after a restart");
        }
    }
}

fn read(dir: &Path) -> SyncMarks {
    let file = dir.join(FILE);
    let text = match fs::read_to_string(&file) {
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
    fn newest_marks_of_all_directories_count() {
        let base = std::env::temp_dir().join(format!("moontide-marks-{}", std::process::id()));
        let dirs = [base.join("a"), base.join("b")];
        dirs.iter().for_each(|dir| std::fs::create_dir_all(dir).unwrap());
        let store = SyncMarkStore::open(&dirs);
        assert!(store.to_wire(MonoTime(0)).is_empty());
        assert!(store.record(&[(GroupId(9), 3), (GroupId(10), 1)], MonoTime(0)));
        store.write(0);
        assert!(store.record(&[(GroupId(9), 4)], MonoTime(0)));
        store.write(1);
        let mark = |group, exclusion| v1::SyncMark { group, exclusion, ago_ms: u64::MAX };
        let of = |dirs: &[PathBuf]| SyncMarkStore::open(dirs).to_wire(MonoTime(0));
        assert_eq!(of(&dirs), [mark(9, 4), mark(10, 1)]);
        assert_eq!(of(&dirs[..1]), [mark(9, 3), mark(10, 1)]);
        std::fs::write(dirs[1].join(FILE), "torn").unwrap();
        assert_eq!(of(&dirs), [mark(9, 3), mark(10, 1)]);
        assert!(of(&dirs[1..]).is_empty());
        std::fs::remove_dir_all(&base).unwrap();
        store.write(0); // only warns
    }
}
