//! [`Ground`]: where the bytes and flags of all ranks' records are, in memory of the host or of devices.
//!
//! The two differ in how a processor gets at them. Memory of the host it reads and writes, and its atomics are those of
//! everybody. To a device's memory it sends copies: so flags there are counted by kernels, or a process counts for itself and says at
//! the end that all pages are there, but never both ([`FlagCopy`]).

use std::sync::Arc;

use moontide_heap::{
    DeviceRegion, DeviceWorld, FLAG_BYTES, FlagCopy, Progress, Rank, RankProcess, Sharing, World,
};
use moontide_proto::Medium;
use moontide_types::{ErrorCode, Span};

use super::sight::Sight;
use super::ticket::Ticket;
use crate::error::StoreError;

/// Both worlds of a rank.
#[derive(Clone, Debug)]
pub(super) struct Ground {
    world: Arc<World>,
    /// Where the records are, if not in the other one.
    device: Option<Arc<DeviceWorld>>,
    /// The ranks' processes, if their memory ends with them.
    owners: Option<Arc<[RankProcess]>>,
    sight: Arc<Sight>,
}

/// A record's memory on a device.
#[derive(Debug)]
pub(super) struct OnDevice<'a> {
    region: &'a DeviceRegion,
    /// Without whom there is no memory.
    owner: Option<&'a RankProcess>,
    ticket: Ticket,
}

impl Ground {
    pub(super) fn of_host(world: Arc<World>) -> Ground {
        Ground { world, device: None, owners: None, sight: Arc::default() }
    }

    /// All ranks are there. Fails if one has ended.
    pub(super) fn of_device(world: Arc<World>, device: Arc<DeviceWorld>) -> Result<Ground, StoreError> {
        let ranks = || (0..world.shape().ranks).map(Rank);
        let ends_with_owner = ranks().any(|rank| device.region(rank).sharing() == Sharing::Handle);
        let gone = StoreError::refused(ErrorCode::Gone);
        let owners = match ends_with_owner {
            true => Some(ranks().map(|rank| world.process(rank).ok_or(gone.clone())).collect::<Result<_, _>>()?),
            false => None,
        };
        Ok(Ground { world, device: Some(device), owners, sight: Arc::default() })
    }

    pub(super) fn world(&self) -> &Arc<World> {
        &self.world
    }

    pub(super) fn device(&self) -> Option<&Arc<DeviceWorld>> {
        self.device.as_ref()
    }

    pub(super) fn sight(&self) -> &Sight {
        &self.sight
    }

    /// What the master calls memory like this.
    pub(super) fn medium(&self) -> Medium {
        if self.device.is_some() { Medium::Device } else { Medium::Memory }
    }

    /// A record's memory, if that is a device's.
    pub(super) fn on_device(&self, ticket: &Ticket) -> Option<OnDevice<'_>> {
        let region = self.device.as_ref()?.region(ticket.rank);
        let owner = self.owners.as_ref().map(|owners| &owners[ticket.rank.index()]);
        Some(OnDevice { region, owner, ticket: *ticket })
    }

    /// Waits for kernels of this process, which may use what is about to be let go of. `false`: nobody can say that they have
    /// ended.
    pub(super) fn settle(&self) -> bool {
        self.device.as_ref().is_none_or(|device| device.region(device.rank()).settle().is_ok())
    }

    /// Where the ranks' regions lie in this process, for kernels.
    pub(super) fn bases(&self) -> Vec<u64> {
        match &self.device {
            Some(device) => device.bases().to_vec(),
            None => self.world.bases().iter().map(|base| base.addr().get() as u64).collect(),
        }
    }

    /// Gets a record's flag ready, before anybody knows of the record.
    pub(super) fn prepare(&self, ticket: &Ticket, span: Span) -> Result<(), StoreError> {
        let (epoch, pages) = (ticket.epoch, ticket.pages());
        match self.on_device(ticket) {
            Some(there) => {
                let flag = FlagCopy::prepared(epoch, pages, span).encode();
                there.write_flag(0, &flag)
            }
            None => {
                self.world.flag(ticket.rank, ticket.flag_offset).prepare(epoch, pages, span);
                Ok(())
            }
        }
    }

    /// How far a record is, by its flag.
    pub(super) fn progress(&self, ticket: &Ticket) -> Result<Progress, StoreError> {
        Ok(match self.on_device(ticket) {
            Some(there) => there.flag()?.progress(ticket.epoch),
            None => self.world.flag(ticket.rank, ticket.flag_offset).progress(ticket.epoch),
        })
    }

    /// Which bytes of its segment a record is in, by its flag.
    pub(super) fn span(&self, ticket: &Ticket) -> Result<Option<Span>, StoreError> {
        Ok(match self.on_device(ticket) {
            Some(there) => there.flag()?.span(ticket.epoch),
            None => self.world.flag(ticket.rank, ticket.flag_offset).span(ticket.epoch),
        })
    }
}

impl OnDevice<'_> {
    /// Where the bytes are, for kernels of this process.
    pub(super) fn address(&self) -> u64 {
        self.region.address() + self.ticket.payload_offset
    }

    /// Waits for kernels of this process.
    pub(super) fn settle(&self) -> Result<(), StoreError> {
        Ok(self.region.settle()?)
    }

    /// The flag as it is now.
    pub(super) fn flag(&self) -> Result<FlagCopy, StoreError> {
        let mut bytes = [0; FLAG_BYTES as usize];
        self.region.read(self.ticket.flag_offset, &mut bytes)?;
        self.still_there()?;
        Ok(FlagCopy::decode(&bytes))
    }

    /// Writes words of the flag.
    pub(super) fn write_flag(&self, at: u64, bytes: &[u8]) -> Result<(), StoreError> {
        self.region.write(self.ticket.flag_offset + at, bytes)?;
        self.still_there()
    }

    /// Writes bytes of the record.
    pub(super) fn write(&self, at: u64, bytes: &[u8]) -> Result<(), StoreError> {
        self.region.write(self.ticket.payload_offset + at, bytes)?;
        self.still_there()
    }

    /// # Safety
    /// As [`DeviceRegion::write_from_device`].
    #[expect(unsafe_code, reason = "an address of a device")]
    pub(super) unsafe fn write_from(&self, at: u64, source: u64, len: u64) -> Result<(), StoreError> {
        // SAFETY: says the caller.
        unsafe { self.region.write_from_device(self.ticket.payload_offset + at, source, len) }?;
        self.still_there()
    }

    /// Copies the whole record.
    pub(super) fn read(&self, room: &mut [u8]) -> Result<(), StoreError> {
        self.region.read(self.ticket.payload_offset, room)?;
        self.still_there()
    }

    /// # Safety
    /// As [`DeviceRegion::read_to_device`].
    #[expect(unsafe_code, reason = "an address of a device")]
    pub(super) unsafe fn read_to(&self, target: u64) -> Result<(), StoreError> {
        // SAFETY: says the caller.
        unsafe { self.region.read_to_device(self.ticket.payload_offset, target, self.ticket.bytes) }?;
        self.still_there()
    }

    /// What was copied is worth something if its owner was there after that.
    fn still_there(&self) -> Result<(), StoreError> {
        match self.owner {
            Some(owner) if owner.has_ended() => Err(StoreError::refused(ErrorCode::Gone)),
            _ => Ok(()),
        }
    }
}
