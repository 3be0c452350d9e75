//! What kernels see of the host's memory: the words of headers, which they look at, and ledger cells, in which they name what
//! they read. A kernel that is emulated sees what its process sees; a device sees what its driver was told of ([`HostWindow`]).
//!
//! Invariant: what was shown once stays mapped and shown until the last user of the ground is gone. A kernel may have got the address.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ptr::NonNull;
use std::sync::Arc;

use moontide_heap::{DeviceWorld, HostWindow, KernelCell, LocalHeap, Rank, WindowAccess};
use moontide_types::{ErrorCode, SegmentId, SlotId};
use parking_lot::Mutex;

use super::Hop;
use super::ground::Ground;
use crate::error::StoreError;

/// What a driver is told of memory by, and the unit of it.
const PAGE_BYTES: usize = 4096;

/// Memory that kernels of this process have been told of, by its address here.
#[derive(Debug, Default)]
pub(super) struct Sight {
    shown: Mutex<HashMap<usize, Shown>>,
}

/// Dropped in this order: the driver forgets the memory before it is unmapped.
#[derive(Debug)]
struct Shown {
    /// `None`: kernels see what this process sees.
    window: Option<HostWindow>,
    _heap: Arc<LocalHeap>,
}

impl Sight {
    /// Shows memory of a heap to kernels of this process. Where it is for them.
    #[expect(unsafe_code, reason = "a device looks at memory that the compiler does not know it looks at")]
    fn show(
        &self,
        device: Option<&DeviceWorld>,
        heap: &Arc<LocalHeap>,
        (at, len): (NonNull<u8>, usize),
        access: WindowAccess,
    ) -> Result<u64, StoreError> {
        let mut shown = self.shown.lock();
        let here = at.addr().get();
        let shown = match shown.entry(here) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(vacant) => {
                let window = match device {
                    // SAFETY: shared memory of atomics, which the heap keeps mapped, and which is kept beside the window.
                    Some(device) => Some(unsafe { device.window(at, len, access) }?),
                    None => None,
                };
                vacant.insert(Shown { window, _heap: Arc::clone(heap) })
            }
        };
        Ok(shown.window.as_ref().map_or(here as u64, HostWindow::address))
    }
}

impl Ground {
    /// Where kernels of this process find the word of a header, for looks alone. `None`: its device cannot be shown memory that
    /// is mapped read-only; the flag says as much of a record, but that its producer has died.
    pub(super) fn word_address(
        &self,
        heap: &Arc<LocalHeap>,
        segment: SegmentId,
        slot: SlotId,
    ) -> Result<Option<u64>, StoreError> {
        let device = self.device().map(|device| &**device);
        if let Some(device) = device
            && !device.can_show_read_only()?
        {
            return Ok(None);
        }
        let found = heap.headers(segment).zip(heap.word_at(segment, slot));
        let ((base, len), word) = found.ok_or(StoreError::refused(ErrorCode::Gone))?;
        let shown = self.sight().show(device, heap, (base, len as usize), WindowAccess::Read)?;
        Ok(Some(shown + (word.addr().get() - base.addr().get()) as u64))
    }
}

/// A cell in which kernels of this process name what they read of one rank's memory.
/// Dropped when such kernels have ended.
#[derive(Debug)]
pub struct SightCell {
    /// There until this is dropped.
    cell: Option<KernelCell>,
    address: u64,
    ground: Ground,
}

impl SightCell {
    /// Where kernels find it.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// What a kernel writes into it to name a slot.
    pub fn name(segment: SegmentId, slot: SlotId) -> u64 {
        KernelCell::name(segment, slot)
    }
}

impl Drop for SightCell {
    fn drop(&mut self) {
        let cell = self.cell.take();
        if !self.ground.settle() {
            // A kernel that may still write it keeps it: until this process ends.
            std::mem::forget(cell);
        }
    }
}

impl Hop {
    /// A cell for kernels of this process that read a rank's memory.
    pub fn kernel_cell(&self, rank: Rank) -> Result<SightCell, StoreError> {
        let cut = self.cut(rank).ok_or(StoreError::Argument { what: "rank", rule: "one of the world" })?;
        let cell = self.store().kernel_cell(cut.node)?;
        let inside = cell.address() % PAGE_BYTES;
        // Only the number of it goes anywhere.
        let page = NonNull::new(std::ptr::without_provenance_mut(cell.address() - inside)).expect("a mapped page");
        let (device, heap) = (self.ground.device().map(|device| &**device), cell.heap());
        let shown = self.ground.sight().show(device, heap, (page, PAGE_BYTES), WindowAccess::ReadWrite)?;
        Ok(SightCell { address: shown + inside as u64, cell: Some(cell), ground: self.ground.clone() })
    }
}
