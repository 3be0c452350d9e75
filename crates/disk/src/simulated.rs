//! [`SimulatedDisk`]: a disk in memory that fails, fills up and loses power when it is told to.
//!
//! What it promises is what POSIX promises, and no more:
//!
//! * **Data.** A write is in the cache until a sync of its file. When the power goes, each sector of 512 bytes that was
//!   not synced is old or new, each for itself: blocks are torn, and later writes survive where earlier ones do not. A
//!   file's new length survives, or does not, in the same way.
//! * **Names.** A file that is made, renamed or removed has its new name after a sync of the directory. When the power
//!   goes, some number of the changes that were not synced has happened, the oldest ones, for each directory by itself.
//!   A rename within a directory happens as one; between directories the new name and the removal of the old one are
//!   two changes, so that both names may survive, or none. A sync of a file does nothing for its name.
//! * **Failed syncs.** What was to be synced is on the disk or not, sector by sector, and the cache believes that it is:
//!   a later sync succeeds without it.
//!
//! All that is drawn comes from the seed: one thread that does the same again meets the same fate.
//!
//! Clones are the same disk. The disk outlives its power: [`SimulatedDisk::restart`] turns it on again, and files that
//! were opened before are of no use then, as their process is gone.

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

use parking_lot::Mutex;

use crate::storage::{Entry, File, FileInner, Mode, Queue, QueueConfig, Space, Storage};
use state::{Kind, State};

pub use faults::{Counters, Faults};

/// Bytes that a disk holds or loses as one.
pub const SECTOR_BYTES: usize = 512;

/// A disk in memory.
#[derive(Clone)]
pub struct SimulatedDisk {
    state: Arc<Mutex<State>>,
}

/// An open file.
pub(crate) struct Inode {
    disk: SimulatedDisk,
    id: u64,
    /// Which start of the disk it was opened in.
    boot: u64,
    writable: bool,
}

impl SimulatedDisk {
    /// An empty disk without faults. Everything that is left to chance follows from the seed.
    pub fn new(seed: u64) -> SimulatedDisk {
        SimulatedDisk { state: Arc::new(Mutex::new(State::new(seed))) }
    }

    /// What goes wrong from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.state.lock().faults = faults;
    }

    /// What goes wrong now.
    pub fn faults(&self) -> Faults {
        self.state.lock().faults
    }

    /// What happened so far.
    pub fn counters(&self) -> Counters {
        self.state.lock().counters
    }

    /// Operations so far that change something or make it durable: writes, syncs, allocations, and changes and syncs of
    /// names. Those that failed count, but not those without power.
    pub fn operations(&self) -> u64 {
        self.state.lock().operations
    }

    /// The power goes off after this many of the operations that [`SimulatedDisk::operations`] counts, from now. All
    /// that come later fail and change nothing. 0 turns it off at once.
    pub fn crash_after(&self, operations: u64) {
        let mut state = self.state.lock();
        state.crash_at = Some(state.operations + operations);
    }

    /// Whether the power is off.
    pub fn is_off(&self) -> bool {
        self.state.lock().is_off()
    }

    /// The power is gone, if it was not already, and comes back: what was not synced is kept or lost by chance. Faults
    /// stay as they are.
    pub fn restart(&self) {
        self.state.lock().restart();
    }

    /// The bytes of a file as whoever opens it would see them; works without power.
    ///
    /// # Panics
    /// If there is no such file, as all of these functions for tests do.
    pub fn read_file(&self, path: impl AsRef<Path>) -> Vec<u8> {
        self.state.lock().read_file(path.as_ref())
    }

    /// Makes a file of these bytes, directories included, or replaces what is in it. Durable at once, with the names
    /// around it.
    pub fn write_file(&self, path: impl AsRef<Path>, bytes: &[u8]) {
        self.state.lock().write_file(path.as_ref(), bytes);
    }

    /// Cuts a file, or appends zeros. Durable at once.
    pub fn truncate(&self, path: impl AsRef<Path>, len: u64) {
        self.state.lock().damage(path.as_ref(), |content| content.set_len(len));
    }

    /// Flips a bit of a file, counted from the lowest one of the first byte. Durable at once.
    pub fn flip_bit(&self, path: impl AsRef<Path>, bit: u64) {
        self.state.lock().damage(path.as_ref(), |content| {
            let mut byte = [0];
            // What was never synced may not be there on the disk.
            if content.read(bit / 8, &mut byte) == 1 {
                content.write(bit / 8, &[byte[0] ^ (1 << (bit % 8))]);
            }
        });
    }

    /// Paths and lengths of all files, by path.
    pub fn files(&self) -> Vec<(String, u64)> {
        self.state.lock().files()
    }

    fn begin(&self, kind: Kind) -> io::Result<parking_lot::MutexGuard<'_, State>> {
        let latency = self.faults().latency;
        if let Some(latency) = latency {
            std::thread::sleep(latency);
        }
        let mut state = self.state.lock();
        state.begin(kind)?;
        Ok(state)
    }

    fn open_inode(&self, state: &mut State, id: u64, writable: bool) -> File {
        state.opened(id);
        let boot = state.boot;
        File(Arc::new(FileInner::Simulated(Inode { disk: self.clone(), id, boot, writable })))
    }

    fn inode<'f>(&self, file: &'f File) -> &'f Inode {
        match &*file.0 {
            FileInner::Simulated(inode) if Arc::ptr_eq(&inode.disk.state, &self.state) => inode,
            _ => panic!("a file of another storage"),
        }
    }
}

impl Drop for Inode {
    fn drop(&mut self) {
        self.disk.state.lock().closed(self.id, self.boot);
    }
}

impl Storage for SimulatedDisk {
    fn open(&self, path: &Path, mode: Mode) -> io::Result<File> {
        let kind = if mode == Mode::Create { Kind::Name } else { Kind::Look };
        let mut state = self.begin(kind)?;
        let id = match mode {
            Mode::Create => state.create(path)?,
            Mode::Read | Mode::Write => state.find(path)?,
        };
        Ok(self.open_inode(&mut state, id, mode != Mode::Read))
    }

    fn len(&self, file: &File) -> io::Result<u64> {
        let inode = self.inode(file);
        let mut state = self.begin(Kind::Look)?;
        Ok(state.node(inode.id, inode.boot)?.current.len())
    }

    fn allocate(&self, file: &File, bytes: u64) -> io::Result<()> {
        let inode = self.inode(file);
        self.begin(Kind::Write)?.allocate(inode, bytes)
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.begin(Kind::Name)?.rename(from, to)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.begin(Kind::Name)?.remove(path)
    }

    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.begin(Kind::Name)?.create_dir(path)
    }

    fn list(&self, dir: &Path) -> io::Result<Vec<Entry>> {
        self.begin(Kind::Look)?.list(dir)
    }

    fn sync_dir(&self, dir: &Path) -> io::Result<()> {
        self.begin(Kind::Sync)?.sync_dir(dir)
    }

    fn space(&self) -> io::Result<Space> {
        Ok(self.begin(Kind::Look)?.space())
    }

    fn queue(&self, config: &QueueConfig) -> Box<dyn Queue> {
        let seed = self.state.lock().rng.next();
        Box::new(queue::SimulatedQueue::new(self.clone(), config.depth, seed))
    }
}

impl fmt::Debug for SimulatedDisk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Without the lock: whoever prints it may hold it.
        f.write_str("SimulatedDisk")
    }
}

impl fmt::Debug for Inode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Inode({})", self.id)
    }
}
