//! [`RankMemory`]: bytes and flags of all ranks' records, in host or device memory.
//!
//! The CPU reads and writes host memory directly, and its atomics are shared by all processes. To device memory it
//! sends copies: flags there are counted either by kernels, or by one process that counts locally and sets the flag at
//! the end, but never by both ([`ReadyFlagSnapshot`]).

use std::sync::Arc;

use moontide_heap::LocalHeap;
use moontide_symmetric::{
    DeviceRegion, DeviceWorld, HandleType, HostAccess, READY_FLAG_BYTES, Rank, RankProcess,
    ReadyFlagSnapshot, RecordProgress, World,
};
use moontide_types::{ErrorCode, Medium, SegmentId, SlotId, Span};

use super::device_map::DeviceMappings;
use super::ticket::Ticket;
use crate::error::StoreError;

/// World and device world of a rank.
#[derive(Clone, Debug)]
pub(super) struct RankMemory {
    world: Arc<World>,
    /// World of the records, if they are in device memory.
    device: Option<Arc<DeviceWorld>>,
    /// Processes of the ranks, if the memory ends with its process.
    owners: Option<Arc<[RankProcess]>>,
    mappings: Arc<DeviceMappings>,
}

/// Record in device memory.
#[derive(Debug)]
pub(super) struct DeviceRecord<'a> {
    region: &'a DeviceRegion,
    /// Process with which the memory ends.
    owner: Option<&'a RankProcess>,
    ticket: Ticket,
}

impl RankMemory {
    pub(super) fn of_host(world: Arc<World>) -> RankMemory {
        RankMemory { world, device: None, owners: None, mappings: Arc::default() }
    }

    /// Creates the memory of a device world that all ranks have joined. Fails if a rank has exited.
    pub(super) fn of_device(world: Arc<World>, device: Arc<DeviceWorld>) -> Result<RankMemory, StoreError> {
        let ranks = || (0..world.shape().ranks).map(Rank);
        let ends_with_owner = ranks().any(|rank| device.region(rank).sharing() == HandleType::Ipc);
        let gone = StoreError::refused(ErrorCode::Gone);
        let owners = match ends_with_owner {
            true => {
                Some(ranks().map(|rank| world.process(rank).ok_or(gone.clone())).collect::<Result<_, _>>()?)
            }
            false => None,
        };
        Ok(RankMemory { world, device: Some(device), owners, mappings: Arc::default() })
    }

    pub(super) fn world(&self) -> &Arc<World> {
        &self.world
    }

    pub(super) fn device(&self) -> Option<&Arc<DeviceWorld>> {
        self.device.as_ref()
    }

    pub(super) fn mappings(&self) -> &DeviceMappings {
        &self.mappings
    }

    /// Returns the medium of the records.
    pub(super) fn medium(&self) -> Medium {
        if self.device.is_some() { Medium::Device } else { Medium::Memory }
    }

    /// Returns the record, if it is in device memory.
    pub(super) fn on_device(&self, ticket: &Ticket) -> Option<DeviceRecord<'_>> {
        let region = self.device.as_ref()?.region(ticket.rank);
        let owner = self.owners.as_ref().map(|owners| &owners[ticket.rank.index()]);
        Some(DeviceRecord { region, owner, ticket: *ticket })
    }

    /// Waits for kernels of this process, which may use memory that is about to be released. `false`: it is unknown
    /// whether they have ended.
    pub(super) fn synchronize(&self) -> bool {
        self.device.as_ref().is_none_or(|device| device.region(device.rank()).synchronize().is_ok())
    }

    /// Returns the addresses of the ranks' regions in this process, for kernels.
    pub(super) fn bases(&self) -> Vec<u64> {
        match &self.device {
            Some(device) => device.bases().to_vec(),
            None => self.world.bases().iter().map(|base| base.addr().get() as u64).collect(),
        }
    }

    /// Prepares the flag of a record, before its ticket is handed out.
    pub(super) fn prepare(&self, ticket: &Ticket, span: Span) -> Result<(), StoreError> {
        let (epoch, pages) = (ticket.epoch, ticket.pages());
        match self.on_device(ticket) {
            Some(record) => {
                let flag = ReadyFlagSnapshot::prepared(epoch, pages, span).encode();
                record.write_flag(0, &flag)
            }
            None => {
                self.world.flag(ticket.rank, ticket.flag_offset).prepare(epoch, pages, span);
                Ok(())
            }
        }
    }

    /// Returns the address at which kernels of this process can read a header word. `None`: the device cannot map
    /// read-only memory. Then kernels rely on the flag, which has the same information except that the producer has
    /// exited.
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
        let address = self.mappings().map(device, heap, (base, len as usize), HostAccess::Read)?;
        Ok(Some(address + (word.addr().get() - base.addr().get()) as u64))
    }

    /// Returns the progress of a record, by its flag.
    pub(super) fn progress(&self, ticket: &Ticket) -> Result<RecordProgress, StoreError> {
        Ok(match self.on_device(ticket) {
            Some(record) => record.flag()?.progress(ticket.epoch),
            None => self.world.flag(ticket.rank, ticket.flag_offset).progress(ticket.epoch),
        })
    }

    /// Returns the bytes of its segment that a record occupies, by its flag.
    pub(super) fn span(&self, ticket: &Ticket) -> Result<Option<Span>, StoreError> {
        Ok(match self.on_device(ticket) {
            Some(record) => record.flag()?.span(ticket.epoch),
            None => self.world.flag(ticket.rank, ticket.flag_offset).span(ticket.epoch),
        })
    }
}

impl DeviceRecord<'_> {
    /// Returns the address of the bytes for kernels of this process.
    pub(super) fn address(&self) -> u64 {
        self.region.address() + self.ticket.payload_offset
    }

    /// Waits for kernels of this process.
    pub(super) fn synchronize(&self) -> Result<(), StoreError> {
        Ok(self.region.synchronize()?)
    }

    /// Reads the flag.
    pub(super) fn flag(&self) -> Result<ReadyFlagSnapshot, StoreError> {
        let mut bytes = [0; READY_FLAG_BYTES as usize];
        self.region.read(self.ticket.flag_offset, &mut bytes)?;
        self.check_owner()?;
        Ok(ReadyFlagSnapshot::decode(&bytes))
    }

    /// Writes words of the flag.
    pub(super) fn write_flag(&self, at: u64, bytes: &[u8]) -> Result<(), StoreError> {
        self.region.write(self.ticket.flag_offset + at, bytes)?;
        self.check_owner()
    }

    /// Writes bytes of the record.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), StoreError> {
        self.region.write(self.ticket.payload_offset + at, bytes)?;
        self.check_owner()
    }

    /// # Safety
    /// As [`DeviceRegion::write_from_device`].
    #[expect(unsafe_code, reason = "an address of a device")]
    pub(super) unsafe fn write_from(&self, at: u64, source: u64, len: u64) -> Result<(), StoreError> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.region.write_from_device(self.ticket.payload_offset + at, source, len) }?;
        self.check_owner()
    }

    /// Copies the whole record.
    pub(super) fn read(&self, buffer: &mut [u8]) -> Result<(), StoreError> {
        self.region.read(self.ticket.payload_offset, buffer)?;
        self.check_owner()
    }

    /// # Safety
    /// As [`DeviceRegion::read_to_device`].
    #[expect(unsafe_code, reason = "an address of a device")]
    pub(super) unsafe fn read_to(&self, target: u64) -> Result<(), StoreError> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.region.read_to_device(self.ticket.payload_offset, target, self.ticket.bytes) }?;
        self.check_owner()
    }

    /// Fails if the owner has exited: bytes that were copied after that are invalid.
    fn check_owner(&self) -> Result<(), StoreError> {
        match self.owner {
            Some(owner) if owner.has_ended() => Err(StoreError::refused(ErrorCode::Gone)),
            _ => Ok(()),
        }
    }
}
