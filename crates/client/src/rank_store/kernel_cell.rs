//! [`DeviceKernelCell`]: ledger cell, mapped for the kernels of this process.

use std::ptr::NonNull;

use moontide_heap::KernelCell;
use moontide_symmetric::{HostAccess, Rank};
use moontide_types::{SegmentId, SlotId};

use super::RankStore;
use super::memory::RankMemory;
use crate::error::StoreError;

/// Unit of registration.
const PAGE_BYTES: usize = 4096;

/// Ledger cell in which kernels of this process pin what they read of one rank's memory. Drop it only after these
/// kernels have ended.
#[derive(Debug)]
pub struct DeviceKernelCell {
    /// `None` only during drop.
    cell: Option<KernelCell>,
    address: u64,
    memory: RankMemory,
}

impl DeviceKernelCell {
    /// Returns the address of the cell for kernels.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the value that a kernel writes into the cell to pin a slot.
    pub fn name(segment: SegmentId, slot: SlotId) -> u64 {
        KernelCell::name(segment, slot)
    }
}

impl Drop for DeviceKernelCell {
    fn drop(&mut self) {
        let cell = self.cell.take();
        if !self.memory.synchronize() {
            // A kernel may still write the cell: keep it until the process exits.
            std::mem::forget(cell);
        }
    }
}

impl RankStore {
    /// Returns a cell for kernels of this process that read a rank's memory.
    pub fn kernel_cell(&self, rank: Rank) -> Result<DeviceKernelCell, StoreError> {
        let layout = self
            .layout(rank)
            .ok_or(StoreError::InvalidArgument { what: "rank", rule: "a rank of the world" })?;
        let cell = self.store().kernel_cell(layout.node)?;
        let offset = cell.address() % PAGE_BYTES;
        // Only the address is used; the pointer is never dereferenced here.
        let page =
            NonNull::new(std::ptr::without_provenance_mut(cell.address() - offset)).expect("a mapped page");
        let (device, heap) = (self.memory.device().map(|device| &**device), cell.heap());
        let address = self.memory.mappings().map(device, heap, (page, PAGE_BYTES), HostAccess::ReadWrite)?;
        Ok(DeviceKernelCell {
            address: address + offset as u64,
            cell: Some(cell),
            memory: self.memory.clone(),
        })
    }
}
