//! Ledgers: one region per client process, in which it pins the slots that it is using.
//!
//! ```text
//!   0      4096                         cells_end                  counters_end                      touch_end
//!   ├ page ─┤─ lanes of 16 cells of 8 B ─┤─ 128 B counters per lane ─┤─ touch bitmap, a bit per slot ──┤
//! ```
//!
//! The node creates the region and sends it; from then on only the client writes cells, counters and touch bits, and
//! only the node reads them. When the client's process exits, the node drops the whole ledger: nothing is
//! decremented, so nothing can be decremented twice or not at all.
//!
//! `groups_used`, the number of lanes in use, lets the node's scan stop early. It is raised before a cell of a new
//! lane is filled, and the fence of that cell's acquire orders both before the load of the word, so the argument in
//! [`cell`](crate::cell) covers it.

use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard};

use moontide_rt::sync::{AtomicU64, Ordering};
use moontide_types::{ClientId, SegmentId, SlotId};

use crate::cell::{CELLS_PER_LANE, Cell, CellLane, SlotRef, scan};
use crate::index::prefetch;
use crate::shm::read_counters::{LaneReadCounters, LocalReadStats};
use crate::shm::region::{HugePages, Protection, Region, RegionError};

const PAGE_BYTES: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"MTLEDGR2");
const LANE_BYTES: u64 = (CELLS_PER_LANE * size_of::<Cell>()) as u64;
const COUNTERS_BYTES: u64 = size_of::<LaneReadCounters>() as u64;

// Counters and touch words are aligned.
const _: () = assert!(PAGE_BYTES.is_multiple_of(COUNTERS_BYTES) && LANE_BYTES.is_multiple_of(COUNTERS_BYTES));

/// Lanes of a ledger: for 256 threads that read, or fewer that hold many guards; 4,096 cells in 32 KiB.
pub const LANES_PER_LEDGER: u64 = 256;

/// Lanes that readers may keep for long. The others are for short use, to copy or to write: such a reader must get
/// one, however many threads keep theirs.
pub(crate) const LONG_LIVED_LANES_MAX: usize = LANES_PER_LEDGER as usize / 4 * 3;

/// Maximum number of processes that use one node's memory at the same time: every reclaim scans their ledgers.
pub const CLIENTS_MAX: usize = 4096;

/// Maximum number of connections of one process: its ledgers exist until it exits, also those of a connection that
/// failed half-way.
pub const LEDGERS_PER_PROCESS_MAX: usize = 64;

/// First page of a ledger.
#[derive(Debug)]
#[repr(C)]
struct LedgerHeader {
    magic: u64,
    /// Number of lanes.
    groups: u64,
    touch_words: u64,
    /// Number of lanes, from the first on, that may have a pin.
    groups_used: AtomicU64,
}

/// Reason why a region is not a ledger, or a client gets none.
#[derive(Debug, thiserror::Error)]
pub enum LedgerError {
    /// The region could not be created or mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The limit of clients is reached.
    #[error(
        "{CLIENTS_MAX} processes already use this node's memory, or this one has connected {LEDGERS_PER_PROCESS_MAX} \
         times; stop one, or use the network"
    )]
    TooMany,
    /// The first page has another magic number.
    #[error("not a ledger: magic {found:#018x}")]
    Magic {
        /// Magic number of the page.
        found: u64,
    },
    /// The region is too short for its contents.
    #[error("ledger of {len} bytes cannot hold {lanes} lanes and {touch_words} touch words")]
    Shape {
        /// Length of the region in bytes.
        len: u64,
        /// Number of lanes according to the page.
        lanes: u64,
        /// Words of the touch bitmap according to the page.
        touch_words: u64,
    },
}

/// Region of a ledger, at the node or at the client. The shape is the owner's own, or was checked on import; it is
/// never read again from memory that the other process can write.
#[derive(Debug)]
struct Ledger {
    region: Region,
    lanes: u64,
    touch_words: u64,
}

impl Ledger {
    fn create(slots_max: u64) -> Result<Ledger, LedgerError> {
        let (lanes, touch_words) = (LANES_PER_LEDGER, slots_max.div_ceil(64));
        let parts = PAGE_BYTES + lanes * (LANE_BYTES + COUNTERS_BYTES) + touch_words * 8;
        let len = parts.next_multiple_of(PAGE_BYTES);
        let region = Region::create("moontide-ledger", len, HugePages::Auto, Protection::AllWrite)?;
        let page = LedgerHeader { magic: MAGIC, groups: lanes, touch_words, groups_used: AtomicU64::new(0) };
        // SAFETY: the region is at least a page long, page-aligned, and no other thread or process has seen it yet.
        unsafe { region.base().cast::<LedgerHeader>().write(page) };
        Ok(Ledger { region, lanes, touch_words })
    }

    fn import(region: Region) -> Result<Ledger, LedgerError> {
        let len = region.len();
        let shape = |lanes, touch_words| LedgerError::Shape { len, lanes, touch_words };
        if len < PAGE_BYTES {
            return Err(shape(0, 0));
        }
        let page = page_of(&region);
        if page.magic != MAGIC {
            return Err(LedgerError::Magic { found: page.magic });
        }
        let (lanes, touch_words) = (page.groups, page.touch_words);
        let end = lanes
            .checked_mul(LANE_BYTES + COUNTERS_BYTES)
            .and_then(|parts| touch_words.checked_mul(8)?.checked_add(parts)?.checked_add(PAGE_BYTES));
        let fits = (1..=LANES_PER_LEDGER).contains(&lanes) && end.is_some_and(|end| end <= len);
        if !fits || !region.is_writable() {
            return Err(shape(lanes, touch_words));
        }
        Ok(Ledger { region, lanes, touch_words })
    }

    fn cells(&self, first_lane: u64, lanes: u64) -> &[Cell] {
        let offset = PAGE_BYTES + first_lane * LANE_BYTES;
        // SAFETY: a cell is an atomic integer.
        unsafe { self.region.slice(offset, lanes * CELLS_PER_LANE as u64) }
    }

    fn counters(&self, first_lane: u64, lanes: u64) -> &[LaneReadCounters] {
        let offset = PAGE_BYTES + self.lanes * LANE_BYTES + first_lane * COUNTERS_BYTES;
        // SAFETY: counters are atomic integers, and reserved ones that are never read.
        unsafe { self.region.slice(offset, lanes) }
    }

    fn touched(&self) -> &[AtomicU64] {
        let offset = PAGE_BYTES + self.lanes * (LANE_BYTES + COUNTERS_BYTES);
        self.region.atomics(offset, self.touch_words)
    }

    /// Not read through the page: its other fields are not atomic, and the client can write them.
    fn lanes_used(&self) -> &AtomicU64 {
        let offset = std::mem::offset_of!(LedgerHeader, groups_used) as u64;
        &self.region.atomics(offset, 1)[0]
    }
}

fn page_of(region: &Region) -> &LedgerHeader {
    // SAFETY: integers and atomics accept every bit pattern; after creation only the atomic is written.
    unsafe { &region.slice::<LedgerHeader>(0, 1)[0] }
}

/// Ledger as its client uses it.
#[derive(Debug)]
pub(crate) struct LedgerWriter {
    ledger: Ledger,
    /// Whether a thread holds the lane, by lane. Process-private.
    acquired: Vec<AtomicBool>,
}

impl LedgerWriter {
    pub(crate) fn import(region: Region) -> Result<LedgerWriter, LedgerError> {
        let ledger = Ledger::import(region)?;
        let acquired = (0..ledger.lanes).map(|_| AtomicBool::new(false)).collect();
        Ok(LedgerWriter { ledger, acquired })
    }

    /// Acquires one of the first `below` lanes for one thread, until it is released.
    pub(crate) fn acquire_lane(&self, below: usize) -> Option<u32> {
        // AcqRel: the next thread sees the cells as the last one left them.
        let mut lanes = self.acquired.iter().take(below);
        let lane = lanes.position(|acquired| !acquired.swap(true, Ordering::AcqRel))? as u32;
        self.ledger.lanes_used().fetch_max(u64::from(lane) + 1, Ordering::Relaxed);
        Some(lane)
    }

    pub(crate) fn release_lane(&self, lane: u32) {
        self.acquired[lane as usize].store(false, Ordering::Release);
    }

    #[inline]
    pub(crate) fn lane(&self, lane: u32) -> CellLane<'_> {
        CellLane::new(self.ledger.cells(lane.into(), 1))
    }

    /// Returns the read counters of the lane's thread.
    pub(crate) fn counters(&self, lane: u32) -> &LaneReadCounters {
        &self.ledger.counters(lane.into(), 1)[0]
    }

    /// Sets the touch bit of a slot, by its global number. Costs a store only the first time.
    #[inline]
    pub(crate) fn touch(&self, global_slot: u64) {
        let Some(word) = self.ledger.touched().get((global_slot / 64) as usize) else { return };
        let bit = 1 << (global_slot % 64);
        // Relaxed: a hint for eviction, ordered with nothing.
        if word.load(Ordering::Relaxed) & bit == 0 {
            word.fetch_or(bit, Ordering::Relaxed);
        }
    }

    /// Prefetches the cache line of that bit.
    #[inline]
    pub(crate) fn prefetch_touch(&self, global_slot: u64) {
        if let Some(word) = self.ledger.touched().get((global_slot / 64) as usize) {
            prefetch(word);
        }
    }

    /// Returns the number of lanes.
    pub(crate) fn lanes(&self) -> u64 {
        self.ledger.lanes
    }

    #[inline]
    pub(crate) fn is_mapped_here(&self) -> bool {
        self.ledger.region.is_mapped_here()
    }
}

/// Ledger of a client as the node uses it.
#[derive(Debug)]
pub struct ClientLedger {
    client: ClientId,
    pid: u32,
    slots_max: u64,
    ledger: Ledger,
}

impl ClientLedger {
    /// Returns the client of the ledger.
    pub fn client(&self) -> ClientId {
        self.client
    }

    /// Returns the region, to be sent to the client.
    pub fn region(&self) -> &Region {
        &self.ledger.region
    }

    /// Returns the cells of all lanes that may have a pin.
    pub(crate) fn cells_in_use(&self) -> &[Cell] {
        self.ledger.cells(0, self.lanes_used())
    }

    fn lanes_used(&self) -> u64 {
        // The client may write any value; a value above the number of lanes means all.
        self.ledger.lanes_used().load(Ordering::Relaxed).min(self.ledger.lanes)
    }

    /// Returns the client's own count of its local reads.
    pub fn reads(&self) -> LocalReadStats {
        let mut sum = LocalReadStats::default();
        self.ledger.counters(0, self.lanes_used()).iter().for_each(|counters| sum.add(counters.load()));
        sum
    }

    /// Clears the client's touch bits, and passes the global numbers of the touched slots to `touched`.
    pub fn take_touched(&self, mut touched: impl FnMut(u64)) {
        for (index, word) in self.ledger.touched().iter().enumerate() {
            if word.load(Ordering::Relaxed) == 0 {
                continue;
            }
            let mut bits = word.swap(0, Ordering::Relaxed);
            while bits != 0 {
                let global_slot = index as u64 * 64 + u64::from(bits.trailing_zeros());
                bits &= bits - 1;
                // The client may also set bits beyond the last slot.
                if global_slot < self.slots_max {
                    touched(global_slot);
                }
            }
        }
    }
}

/// All ledgers of a node: those of its clients and its own.
#[derive(Debug)]
pub struct Ledgers {
    clients: RwLock<BTreeMap<ClientId, Arc<ClientLedger>>>,
    own: NodeCells,
    slots_max: u64,
    last_client: AtomicU64,
    /// Reads of forgotten clients. Changed under the write lock of `clients`.
    past_reads: Mutex<LocalReadStats>,
}

impl Ledgers {
    /// Creates the ledgers of a node without clients. `slots_max` is that of the index region.
    pub fn new(slots_max: u64) -> Ledgers {
        Ledgers {
            clients: RwLock::default(),
            own: NodeCells::default(),
            slots_max,
            last_client: AtomicU64::new(0),
            past_reads: Mutex::default(),
        }
    }

    /// Creates a ledger for a new client. It is scanned from now on, before the client can have pinned anything.
    pub fn admit(&self, pid: u32) -> Result<Arc<ClientLedger>, LedgerError> {
        let ledger = Ledger::create(self.slots_max)?;
        let number = self.last_client.fetch_add(1, Ordering::Relaxed) + 1;
        let client = ClientId(u32::try_from(number).expect("fewer than 2³² clients in a node's life"));
        let ledger = Arc::new(ClientLedger { client, pid, slots_max: self.slots_max, ledger });
        let mut clients = self.clients.write().unwrap_or_else(PoisonError::into_inner);
        let of_process = clients.values().filter(|other| other.pid == pid).count();
        if clients.len() >= CLIENTS_MAX || of_process >= LEDGERS_PER_PROCESS_MAX {
            return Err(LedgerError::TooMany);
        }
        clients.insert(client, Arc::clone(&ledger));
        Ok(ledger)
    }

    /// Forgets a client whose process has exited, or that never got its ledger. The next reclaim can free everything
    /// that it had pinned. Returns `false` if the client was forgotten before.
    pub(crate) fn forget(&self, client: ClientId) -> bool {
        let mut clients = self.clients.write().unwrap_or_else(PoisonError::into_inner);
        let Some(removed) = clients.remove(&client) else { return false };
        // Under the lock: a concurrent sum includes the client's reads exactly once.
        self.past_reads.lock().unwrap_or_else(PoisonError::into_inner).add(removed.reads());
        true
    }

    /// Returns the local reads of all clients of this node, exited ones included. Decreases only if a client writes
    /// invalid counters.
    pub fn reads(&self) -> LocalReadStats {
        let clients = self.read();
        let mut sum = *self.past_reads.lock().unwrap_or_else(PoisonError::into_inner);
        clients.values().for_each(|client| sum.add(client.reads()));
        sum
    }

    /// Returns the ledger of a client that was admitted and not forgotten.
    pub fn get(&self, client: ClientId) -> Option<Arc<ClientLedger>> {
        self.read().get(&client).cloned()
    }

    /// Returns the ledgers of all current clients.
    pub fn clients(&self) -> Vec<Arc<ClientLedger>> {
        self.read().values().cloned().collect()
    }

    fn read(&self) -> RwLockReadGuard<'_, BTreeMap<ClientId, Arc<ClientLedger>>> {
        self.clients.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the cells in which the node's own threads pin the records that they read, send or stage.
    pub fn own(&self) -> &NodeCells {
        &self.own
    }

    /// Scans for pins. Slots that are to be freed must be DEAD before the call.
    pub fn pins(&self) -> PinSet {
        // The list is read after the caller's DEAD: a client that is admitted later gets its ledger through a lock
        // and a socket, which order its first load of a word after the DEAD.
        let clients = self.clients();
        let own = self.own.cells();
        let mut pinned = HashSet::new();
        // Lazy on purpose: the number of lanes in use must be loaded after the fence in `scan`, like the cells.
        let cells = clients.iter().flat_map(|ledger| ledger.cells_in_use()).chain(own.iter().map(|c| &**c));
        scan(cells, |slot| {
            pinned.insert(slot);
        });
        PinSet { pinned }
    }
}

/// Slots that a ledger pinned when the scan passed it.
#[derive(Debug)]
pub struct PinSet {
    pinned: HashSet<SlotRef>,
}

impl PinSet {
    /// Returns whether the slot is pinned.
    pub fn contains(&self, segment: SegmentId, slot: SlotId) -> bool {
        self.pinned.contains(&SlotRef::new(segment, slot))
    }

    /// Returns the number of pinned slots.
    pub fn len(&self) -> usize {
        self.pinned.len()
    }

    /// Returns whether no slot is pinned.
    pub fn is_empty(&self) -> bool {
        self.pinned.is_empty()
    }
}

/// Cells of the node itself. They follow the same protocol, but are in ordinary memory and grow on demand, since the
/// node must always be able to serve.
#[derive(Debug, Default)]
pub struct NodeCells {
    cells: Mutex<NodeCellList>,
}

#[derive(Debug, Default)]
struct NodeCellList {
    all: Vec<Arc<Cell>>,
    vacant: Vec<Arc<Cell>>,
}

impl NodeCells {
    fn lock(&self) -> MutexGuard<'_, NodeCellList> {
        self.cells.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn cells(&self) -> Vec<Arc<Cell>> {
        self.lock().all.clone()
    }

    /// Returns a cell for one pin.
    pub(crate) fn acquire(&self) -> Arc<Cell> {
        let mut list = self.lock();
        list.vacant.pop().unwrap_or_else(|| {
            let cell = Arc::new(Cell::vacant());
            list.all.push(Arc::clone(&cell));
            cell
        })
    }

    /// Takes a cell back that the caller has released.
    pub(crate) fn release(&self, cell: Arc<Cell>) {
        self.lock().vacant.push(cell);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::{fields_of, page};

    #[test]
    fn ledger_header_matches_formats_doc() {
        page::assert_fields("Ledger", &fields_of!(LedgerHeader: magic, groups, touch_words, groups_used));
    }
}
