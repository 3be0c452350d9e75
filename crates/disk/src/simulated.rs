//! [`SimulatedDisk`]: a disk in memory with injected I/O errors, limited capacity and power failures.
//!
//! It guarantees what POSIX guarantees, and no more:
//!
//! * **Data.** A write is in the cache until a sync of its file. After a power failure, each unsynced sector of 512
//!   bytes is old or new, independently: blocks are torn, and later writes may survive where earlier ones do not. The
//!   same holds for a new length of the file.
//! * **Names.** A created, renamed or removed name is durable after a sync of its directory. After a power failure, a
//!   prefix of the unsynced changes of each directory has happened, independently of other directories. A rename within
//!   a directory is atomic; between directories, the new name and the removal of the old one are two changes, so that
//!   both names may survive, or none. A sync of a file does not sync its name.
//! * **Failed syncs.** Each sector of a failed sync is on the disk or not, but the cache treats all as clean: a later
//!   sync succeeds without them.
//!
//! All random decisions follow from the seed: a single thread that repeats its operations gets the same results.
//!
//! Clones refer to the same disk. The disk survives a power failure: [`SimulatedDisk::restart`] turns it on again.
//! Files that were opened before are then unusable, like those of an exited process.

mod content;
mod faults;
mod names;
mod queue;
mod state;

#[cfg(test)]
mod tests;

use std::fmt;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use moontide_rt::sync::{Condvar, Mutex};
use moontide_rt::thread;
use moontide_rt::time::Instant;

use crate::storage::{DirEntry, DiskSpace, File, OpenMode, Queue, QueueConfig, Storage, StorageFile};
use state::{Kind, State};

pub use faults::{Counters, Faults, Times};

/// Size of a sector: the unit that a disk keeps or loses.
pub const SECTOR_BYTES: usize = 512;

/// Waits from this length on are stalls.
const STALL_MIN: Duration = Duration::from_millis(50);

/// A disk in memory.
#[derive(Clone)]
pub struct SimulatedDisk {
    state: Arc<Mutex<State>>,
    /// Notified when operations under way need not wait longer.
    hurried: Arc<Condvar>,
}

/// A time that an operation takes before or after its effect.
struct Pause {
    duration: Duration,
    /// How often stalls had been ended when it was drawn.
    stalls_ended: u64,
}

/// An open file.
pub(crate) struct Inode {
    disk: SimulatedDisk,
    id: u64,
    /// Number of restarts of the disk when the file was opened.
    boot: u64,
    writable: bool,
}

impl SimulatedDisk {
    /// Creates an empty disk without faults. All random decisions follow from the seed.
    pub fn new(seed: u64) -> SimulatedDisk {
        SimulatedDisk { state: Arc::new(Mutex::new(State::new(seed))), hurried: Arc::default() }
    }

    /// Sets the faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.state.lock().faults = faults;
    }

    /// Ends the stalls of operations under way.
    pub fn end_stalls(&self) {
        self.state.lock().stalls_ended += 1;
        self.hurried.notify_all();
    }

    /// Returns the current faults.
    pub fn faults(&self) -> Faults {
        self.state.lock().faults
    }

    /// Returns the counters since the creation.
    pub fn counters(&self) -> Counters {
        self.state.lock().counters
    }

    /// Number of operations that change something or make it durable: writes, syncs, allocations, and changes and syncs
    /// of names. Includes failed ones, but not those without power.
    pub fn operations(&self) -> u64 {
        self.state.lock().operations
    }

    /// Turns the power off after `operations` further operations as counted by [`SimulatedDisk::operations`]. All later
    /// ones fail and change nothing. 0 turns it off at once.
    pub fn crash_after(&self, operations: u64) {
        let mut state = self.state.lock();
        state.crash_at = Some(state.operations + operations);
    }

    /// Whether the power is off.
    pub fn is_off(&self) -> bool {
        self.state.lock().is_off()
    }

    /// Turns the power off, if it is on, and on again: unsynced changes are kept or lost at random. Faults do not
    /// change.
    pub fn restart(&self) {
        self.state.lock().restart();
    }

    /// Closes all files, as when a process exits without a power failure: all that it wrote remains.
    pub fn end_process(&self) {
        self.state.lock().close_files();
    }

    /// Returns the bytes of a file as a reader would see them; works without power.
    ///
    /// # Panics
    /// If there is no such file, like all of these test functions.
    pub fn read_file(&self, path: impl AsRef<Path>) -> Vec<u8> {
        self.state.lock().read_file(path.as_ref())
    }

    /// Creates a file with these bytes, including its directories, or replaces its content. Durable at once, including
    /// the names.
    pub fn write_file(&self, path: impl AsRef<Path>, bytes: &[u8]) {
        self.state.lock().write_file(path.as_ref(), bytes);
    }

    /// Truncates a file, or appends zeros. Durable at once.
    pub fn truncate(&self, path: impl AsRef<Path>, len: u64) {
        self.state.lock().overwrite(path.as_ref(), |content| content.set_len(len));
    }

    /// Flips a bit of a file, counted from the lowest bit of the first byte. Durable at once.
    pub fn flip_bit(&self, path: impl AsRef<Path>, bit: u64) {
        self.state.lock().overwrite(path.as_ref(), |content| {
            let mut byte = [0];
            // Bytes that were never synced may not be on the disk.
            if content.read(bit / 8, &mut byte) == 1 {
                content.write(bit / 8, &[byte[0] ^ (1 << (bit % 8))]);
            }
        });
    }

    /// Returns paths and lengths of all files, sorted by path.
    pub fn files(&self) -> Vec<(String, u64)> {
        self.state.lock().files()
    }

    /// Runs an operation. Takes the time that it takes without the lock, before and after its effect.
    fn run<T>(&self, kind: Kind, operation: impl FnOnce(&mut State) -> io::Result<T>) -> io::Result<T> {
        let after = self.wait_before(kind);
        let result = {
            let mut state = self.state.lock();
            state.begin(kind).and_then(|()| operation(&mut state))
        };
        self.pause(after);
        result
    }

    /// Waits for the time before the effect of an operation, and returns the time after it.
    fn wait_before(&self, kind: Kind) -> Pause {
        let (latency, (before, after), stalls_ended) = {
            let mut state = self.state.lock();
            (state.faults.latency.unwrap_or_default(), state.draw_times(kind), state.stalls_ended)
        };
        self.pause(Pause { duration: latency + before, stalls_ended });
        Pause { duration: after, stalls_ended }
    }

    /// Waits. A zero time is none: a wait of zero would still let other threads run.
    fn pause(&self, pause: Pause) {
        let Pause { duration, stalls_ended } = pause;
        if duration.is_zero() {
            return;
        }
        if duration < STALL_MIN {
            return thread::sleep(duration);
        }
        let until = Instant::now() + duration;
        let mut state = self.state.lock();
        // Without a look at the clock under the lock, at which the world may stop this thread.
        while state.stalls_ended == stalls_ended && !self.hurried.wait_until(&mut state, until).timed_out() {}
    }

    fn open_inode(&self, state: &mut State, id: u64, writable: bool) -> File {
        state.opened(id);
        let boot = state.boot;
        File::new(Inode { disk: self.clone(), id, boot, writable })
    }

    fn inode<'f>(&self, file: &'f File) -> &'f Inode {
        let inode: &Inode = file.downcast();
        assert!(Arc::ptr_eq(&inode.disk.state, &self.state), "file of another disk");
        inode
    }
}

impl StorageFile for Inode {}

impl Drop for Inode {
    fn drop(&mut self) {
        self.disk.state.lock().closed(self.id, self.boot);
    }
}

impl Storage for SimulatedDisk {
    fn open(&self, path: &Path, mode: OpenMode) -> io::Result<File> {
        let kind = if mode == OpenMode::Create { Kind::Name } else { Kind::Metadata };
        self.run(kind, |state| {
            let id = match mode {
                OpenMode::Create => state.create(path)?,
                OpenMode::Read | OpenMode::Write => state.find(path)?,
            };
            Ok(self.open_inode(state, id, mode != OpenMode::Read))
        })
    }

    fn len(&self, file: &File) -> io::Result<u64> {
        let inode = self.inode(file);
        self.run(Kind::Metadata, |state| Ok(state.node(inode.id, inode.boot)?.current.len()))
    }

    fn allocate(&self, file: &File, bytes: u64) -> io::Result<()> {
        let inode = self.inode(file);
        self.run(Kind::Write, |state| state.allocate(inode, bytes))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.run(Kind::Name, |state| state.rename(from, to))
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.run(Kind::Name, |state| state.remove(path))
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.run(Kind::Name, |state| state.create_dir(path))
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<DirEntry>> {
        self.run(Kind::Metadata, |state| state.list(dir))
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.run(Kind::Sync, |state| state.sync_dir(dir))
    }

    fn space(&self) -> io::Result<DiskSpace> {
        self.run(Kind::Metadata, |state| Ok(state.space()))
    }

    fn queue(&self, config: &QueueConfig) -> Box<dyn Queue> {
        let seed = self.state.lock().rng.next_u64();
        Box::new(queue::SimulatedQueue::new(self.clone(), config.depth, seed))
    }
}

impl fmt::Debug for SimulatedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the lock: the caller may hold it.
        f.write_str("SimulatedDisk")
    }
}

impl fmt::Debug for Inode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Inode({})", self.id)
    }
}
