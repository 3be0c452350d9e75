//! Ledgers: one region per client process, in which it names the slots it is using.
//!
//! ```text
//!   0      4096                          cells_end               counts_end                        touch_end
//!   ├ page ─┤─ groups of 16 cells of 8 B ─┤─ 128 B counts a group ─┤─ touch bitmap, a bit per slot ──┤
//! ```
//!
//! The node makes the region and passes it; from then on only the client writes cells, counts and touch bits, and
//! only the node reads them. When the client's process ends, the node drops the ledger whole: nothing is
//! decremented, so nothing can be decremented twice or not at all.
//!
//! `groups_used` lets the node's scan stop early. It is raised before a cell of a new group is filled, and the
//! fence of that cell's acquire orders both before the look at the word, so the argument in
//! [`cell`](crate::cell) covers it.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use moontide_types::{ClientId, SegmentId, SlotId};

use crate::cell::{CELLS_PER_GROUP, Cell, CellGroup, SlotName, scan};
use crate::index::prefetch;
use crate::shm::reads::{LocalReads, ReadCounts};
use crate::shm::region::{HugePages, Protection, Region, RegionError};
use crate::sync::{AtomicU64, Ordering};

const PAGE_BYTES: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"MTLEDGR2");
const GROUP_BYTES: u64 = (CELLS_PER_GROUP * size_of::<Cell>()) as u64;
const COUNTS_BYTES: u64 = size_of::<ReadCounts>() as u64;

/// Counts and touch words stand where they are aligned.
const _: () = assert!(PAGE_BYTES.is_multiple_of(COUNTS_BYTES) && GROUP_BYTES.is_multiple_of(COUNTS_BYTES));

/// Groups of a ledger: 256 threads that read, or fewer that hold many guards; 4,096 cells in 32 KiB.
pub const GROUPS_PER_LEDGER: u64 = 256;

/// Groups that readers may keep for long. The others are for those who take one for a moment, to copy or to write: they
/// must find one, however many threads hold theirs.
pub(crate) const GROUPS_KEPT_MAX: usize = GROUPS_PER_LEDGER as usize / 4 * 3;

/// Processes that may use one node's memory at the same time: every reclaim scans their ledgers.
pub const CLIENTS_MAX: usize = 4096;

/// How often one process may join: its ledgers last until it ends, also those of a join that failed half-way.
pub const JOINS_PER_PROCESS_MAX: usize = 64;

/// The first page of a ledger.
#[derive(Debug)]
#[repr(C)]
struct LedgerPage {
    magic: u64,
    groups: u64,
    touch_words: u64,
    groups_used: AtomicU64,
}

/// Why a region is not a ledger.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// It could not be made or mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// As many clients are there as may be.
    #[error(
        "{CLIENTS_MAX} processes use this node's memory already, or this one has joined {JOINS_PER_PROCESS_MAX} \
         times; end one, or use the network"
    )]
    TooMany,
    /// Its first page is not one of ours.
    #[error("not a ledger: magic {found:#018x}")]
    Magic {
        /// What stood there.
        found: u64,
    },
    /// Its parts do not add up to its length.
    #[error("a ledger of {len} bytes cannot hold {groups} groups and {touch_words} touch words")]
    Shape {
        /// Length of the region.
        len: u64,
        /// Groups according to the page.
        groups: u64,
        /// Words of the touch bitmap according to the page.
        touch_words: u64,
    },
}

/// A ledger's region, from either side. The shape is the owner's own knowledge, or was checked on import;
/// it is never read again from memory that the other side can write.
#[derive(Debug)]
struct Ledger {
    region: Region,
    groups: u64,
    touch_words: u64,
}

impl Ledger {
    fn create(slots_max: u64) -> Result<Ledger, LedgerError> {
        let (groups, touch_words) = (GROUPS_PER_LEDGER, slots_max.div_ceil(64));
        let parts = PAGE_BYTES + groups * (GROUP_BYTES + COUNTS_BYTES) + touch_words * 8;
        let len = parts.next_multiple_of(PAGE_BYTES);
        let region = Region::create("moontide-ledger", len, HugePages::IfAllowed, Protection::AllWrite)?;
        let page = LedgerPage { magic: MAGIC, groups, touch_words, groups_used: AtomicU64::new(0) };
        // SAFETY: the region is at least a page long, page-aligned, and nobody else has seen it yet.
        unsafe { region.base().cast::<LedgerPage>().write(page) };
        Ok(Ledger { region, groups, touch_words })
    }

    fn import(region: Region) -> Result<Ledger, LedgerError> {
        let len = region.len();
        let shape = |groups, touch_words| LedgerError::Shape { len, groups, touch_words };
        if len < PAGE_BYTES {
            return Err(shape(0, 0));
        }
        let page = page_of(&region);
        if page.magic != MAGIC {
            return Err(LedgerError::Magic { found: page.magic });
        }
        let (groups, touch_words) = (page.groups, page.touch_words);
        let end = groups
            .checked_mul(GROUP_BYTES + COUNTS_BYTES)
            .and_then(|parts| touch_words.checked_mul(8)?.checked_add(parts)?.checked_add(PAGE_BYTES));
        let fits = (1..=GROUPS_PER_LEDGER).contains(&groups) && end.is_some_and(|end| end <= len);
        if !fits || !region.is_writable() {
            return Err(shape(groups, touch_words));
        }
        Ok(Ledger { region, groups, touch_words })
    }

    fn cells(&self, first_group: u64, groups: u64) -> &[Cell] {
        let offset = PAGE_BYTES + first_group * GROUP_BYTES;
        // SAFETY: a cell is an atomic integer.
        unsafe { self.region.slice(offset, groups * CELLS_PER_GROUP as u64) }
    }

    fn counts(&self, first_group: u64, groups: u64) -> &[ReadCounts] {
        let offset = PAGE_BYTES + self.groups * GROUP_BYTES + first_group * COUNTS_BYTES;
        // SAFETY: counts are atomic integers, and spare ones that nobody looks at.
        unsafe { self.region.slice(offset, groups) }
    }

    fn touched(&self) -> &[AtomicU64] {
        let offset = PAGE_BYTES + self.groups * (GROUP_BYTES + COUNTS_BYTES);
        self.region.atomics(offset, self.touch_words)
    }

    /// Not through the page: its other fields are plain, and the client can write them.
    fn groups_used(&self) -> &AtomicU64 {
        let offset = std::mem::offset_of!(LedgerPage, groups_used) as u64;
        &self.region.atomics(offset, 1)[0]
    }
}

fn page_of(region: &Region) -> &LedgerPage {
    // SAFETY: integers and atomics accept every bit pattern; after creation only the atomic is written.
    unsafe { &region.slice::<LedgerPage>(0, 1)[0] }
}

/// A client's own ledger.
#[derive(Debug)]
pub(crate) struct OwnLedger {
    ledger: Ledger,
    /// Which groups have a thread. Process-private.
    taken: Vec<AtomicBool>,
}

impl OwnLedger {
    pub(crate) fn import(region: Region) -> Result<OwnLedger, LedgerError> {
        let ledger = Ledger::import(region)?;
        let taken = (0..ledger.groups).map(|_| AtomicBool::new(false)).collect();
        Ok(OwnLedger { ledger, taken })
    }

    /// A group for one thread to fill, until it is given back: one of the first `below`.
    pub(crate) fn take_group(&self, below: usize) -> Option<u32> {
        // AcqRel: the next thread sees the cells as the last one left them.
        let mut groups = self.taken.iter().take(below);
        let group = groups.position(|taken| !taken.swap(true, Ordering::AcqRel))? as u32;
        self.ledger.groups_used().fetch_max(u64::from(group) + 1, Ordering::Relaxed);
        Some(group)
    }

    pub(crate) fn give_group(&self, group: u32) {
        self.taken[group as usize].store(false, Ordering::Release);
    }

    #[inline]
    pub(crate) fn group(&self, group: u32) -> CellGroup<'_> {
        CellGroup::new(self.ledger.cells(group.into(), 1))
    }

    /// What the group's thread has read in place.
    pub(crate) fn counts(&self, group: u32) -> &ReadCounts {
        &self.ledger.counts(group.into(), 1)[0]
    }

    /// Leaves a mark that the slot with this number was used. Costs a store only the first time.
    #[inline]
    pub(crate) fn touch(&self, number: u64) {
        let Some(word) = self.ledger.touched().get((number / 64) as usize) else { return };
        let bit = 1 << (number % 64);
        // Relaxed: a hint for eviction, ordered with nothing.
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Asks for the line of that mark ahead of its use.
    #[inline]
    pub(crate) fn prefetch_touch(&self, number: u64) {
        if let Some(word) = self.ledger.touched().get((number / 64) as usize) {
            prefetch(word);
        }
    }

    /// How many groups there are.
    pub(crate) fn groups(&self) -> u64 {
        self.ledger.groups
    }

    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.ledger.region.is_here()
    }
}

/// The node's side of a client's ledger.
#[derive(Debug)]
pub struct ClientLedger {
    client: ClientId,
    pid: u32,
    slots_max: u64,
    ledger: Ledger,
}

impl ClientLedger {
    /// Whose it is.
    pub fn client(&self) -> ClientId {
        self.client
    }

    /// The region, to be passed to the client.
    pub fn region(&self) -> &Region {
        &self.ledger.region
    }

    /// The cells in which the client may name something.
    pub(crate) fn cells_in_use(&self) -> &[Cell] {
        self.ledger.cells(0, self.groups_used())
    }

    fn groups_used(&self) -> u64 {
        // The client may write anything here; more groups than there are means all.
        self.ledger.groups_used().load(Ordering::Relaxed).min(self.ledger.groups)
    }

    /// What the client says to have read in place so far.
    pub fn reads(&self) -> LocalReads {
        let mut sum = LocalReads::default();
        self.ledger.counts(0, self.groups_used()).iter().for_each(|counts| sum.add(counts.load()));
        sum
    }

    /// Takes the marks that the client left, clearing them: the numbers of slots that were used.
    pub fn take_touched(&self, mut touched: impl FnMut(u64)) {
        for (index, word) in self.ledger.touched().iter().enumerate() {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = word.swap(0, Ordering::Relaxed);
            while bits != 0 {
                let number = index as u64 * 64 + u64::from(bits.trailing_zeros());
                bits &= bits - 1;
                // The client may set the bits behind the last slot, too.
                if number < self.slots_max {
                    touched(number);
                }
            }
        }
    }
}

/// All ledgers of a node: its clients' and its own.
#[derive(Debug)]
pub struct Ledgers {
    clients: RwLock<BTreeMap<ClientId, Arc<ClientLedger>>>,
    own: OwnCells,
    slots_max: u64,
    last_client: AtomicU64,
    /// Reads of those who were forgotten. Changed under the write lock of `clients`.
    past_reads: Mutex<LocalReads>,
}

impl Ledgers {
    /// No client yet. `slots_max` is the board's.
    pub fn new(slots_max: u64) -> Ledgers {
        Ledgers {
            clients: RwLock::default(),
            own: OwnCells::default(),
            slots_max,
            last_client: AtomicU64::new(0),
            past_reads: Mutex::default(),
        }
    }

    /// Makes a ledger for a new client. It is scanned from now on, before the client can have named anything.
    pub fn admit(&self, pid: u32) -> Result<Arc<ClientLedger>, LedgerError> {
        let ledger = Ledger::create(self.slots_max)?;
        let number = self.last_client.fetch_add(1, Ordering::Relaxed) + 1;
        let client = ClientId(u32::try_from(number).expect("fewer than 2³² clients in a node's life"));
        let ledger = Arc::new(ClientLedger { client, pid, slots_max: self.slots_max, ledger });
        let mut clients = self.clients.write().unwrap_or_else(PoisonError::into_inner);
        let of_process = clients.values().filter(|other| other.pid == pid).count();
        if clients.len() >= CLIENTS_MAX || of_process >= JOINS_PER_PROCESS_MAX {
            return Err(LedgerError::TooMany);
        }
        clients.insert(client, Arc::clone(&ledger));
        Ok(ledger)
    }

    /// Forgets a client whose process has ended, or that never got its ledger. Everything that it had pinned is
    /// free after the next reclaim. `false` if it was forgotten before.
    pub(crate) fn forget(&self, client: ClientId) -> bool {
        let mut clients = self.clients.write().unwrap_or_else(PoisonError::into_inner);
        let Some(gone) = clients.remove(&client) else { return false };
        // Under the lock: whoever adds up finds the client's reads in one of the two places.
        self.past_reads.lock().unwrap_or_else(PoisonError::into_inner).add(gone.reads());
        true
    }

    /// What all clients of this node have read in place, those that have ended included. Falls only if a client lies.
    pub fn reads(&self) -> LocalReads {
        let clients = self.read();
        let mut sum = *self.past_reads.lock().unwrap_or_else(PoisonError::into_inner);
        clients.values().for_each(|client| sum.add(client.reads()));
        sum
    }

    /// The ledger of a client that was admitted and not forgotten.
    pub fn get(&self, client: ClientId) -> Option<Arc<ClientLedger>> {
        self.read().get(&client).cloned()
    }

    /// The ledgers of all clients at this moment.
    pub fn clients(&self) -> Vec<Arc<ClientLedger>> {
        self.read().values().cloned().collect()
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<ClientId, Arc<ClientLedger>>> {
        self.clients.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The cells in which the node's own threads name what they read, send or stage.
    pub fn own(&self) -> &OwnCells {
        &self.own
    }

    /// What is pinned now. Slots that are to be freed must be DEAD before this is called.
    pub fn pins(&self) -> Pins {
        // The list is taken after the caller's DEAD: a client that is admitted later than that gets its ledger
        // through a lock and a socket, which order its first look at a word after the DEAD.
        let clients = self.clients();
        let own = self.own.cells();
        let mut named = HashSet::new();
        // Lazy on purpose: how many groups a client uses must be read after the fence in `scan`, like its cells.
        let cells = clients.iter().flat_map(|ledger| ledger.cells_in_use()).chain(own.iter().map(|c| &**c));
        scan(cells, |name| {
            named.insert(name);
        });
        Pins { named }
    }
}

/// Everything that some ledger named when the scan passed it.
#[derive(Debug)]
pub struct Pins {
    named: HashSet<SlotName>,
}

impl Pins {
    /// Whether the slot is in use.
    pub fn contains(&self, segment: SegmentId, slot: SlotId) -> bool {
        self.named.contains(&SlotName::new(segment, slot))
    }

    /// How many slots are in use.
    pub fn len(&self) -> usize {
        self.named.len()
    }

    /// Whether nothing is in use.
    pub fn is_empty(&self) -> bool {
        self.named.is_empty()
    }
}

/// The node's own cells. They follow the same rule, but lie in ordinary memory and grow on demand, since the
/// node must always be able to serve.
#[derive(Debug, Default)]
pub struct OwnCells {
    cells: Mutex<OwnCellList>,
}

#[derive(Debug, Default)]
struct OwnCellList {
    all: Vec<Arc<Cell>>,
    vacant: Vec<Arc<Cell>>,
}

impl OwnCells {
    fn lock(&self) -> MutexGuard<'_, OwnCellList> {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cells(&self) -> Vec<Arc<Cell>> {
        self.lock().all.clone()
    }

    /// A cell for one pin.
    pub(crate) fn take(&self) -> Arc<Cell> {
        let mut list = self.lock();
        list.vacant.pop().unwrap_or_else(|| {
            let cell = Arc::new(Cell::vacant());
            list.all.push(Arc::clone(&cell));
            cell
        })
    }

    /// Gives a cell back, released.
    pub(crate) fn give(&self, cell: Arc<Cell>) {
        self.lock().vacant.push(cell);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::{fields_of, page};

    #[test]
    fn the_page_is_drawn_as_it_is() {
        page::assert_fields("Ledger", &fields_of!(LedgerPage: magic, groups, touch_words, groups_used));
    }
}
