//! [`NodeDisk`]: the disk of the node in the row `moontide`. It carries out the commands of the groups at once.

use std::collections::HashMap;

use moontide_meta::{ReportRecord, ReportState, StripeRange, TenantIndex};
use moontide_types::record::PinClass;
use moontide_types::{Epoch, Extent, ObjectId, SlotId};

use super::TierCounts;
use super::list::Lists;

/// Order in which a full disk evicts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum DiskEviction {
    /// Oldest write first: the default of a node
    Fifo,
    /// Least recently read or written first
    Lru,
}

impl DiskEviction {
    /// Returns its name in results.
    pub(crate) fn name(self) -> &'static str {
        match self {
            DiskEviction::Fifo => "fifo",
            DiskEviction::Lru => "lru",
        }
    }
}

pub(super) struct NodeDisk {
    /// Blocks on the disk, the next one to evict first.
    order: Lists,
    /// Version of each block on the disk.
    epochs: Vec<Epoch>,
    /// Blocks by id: commands name ids only.
    blocks: HashMap<ObjectId, u32>,
    capacity: usize,
    eviction: DiskEviction,
    pub(super) counts: TierCounts,
}

impl NodeDisk {
    pub(super) fn new(ids: &[ObjectId], capacity: usize, eviction: DiskEviction) -> NodeDisk {
        NodeDisk {
            order: Lists::new(ids.len(), 1),
            epochs: vec![Epoch::ZERO; ids.len()],
            blocks: ids.iter().copied().zip(0..).collect(),
            capacity: capacity.max(1),
            eviction,
            counts: TierCounts::default(),
        }
    }

    pub(super) fn block(&self, id: ObjectId) -> u32 {
        self.blocks[&id]
    }

    /// Returns the block that has to leave the disk before another one is written, and its version.
    pub(super) fn pop_victim(&mut self) -> Option<(u32, Epoch)> {
        if self.order.len(0) < self.capacity {
            return None;
        }
        let victim = self.order.first(0)?;
        self.order.remove(victim);
        Some((victim, self.epochs[victim as usize]))
    }

    pub(super) fn write(&mut self, block: u32, epoch: Epoch) {
        self.order.push(0, block);
        self.epochs[block as usize] = epoch;
        self.counts.written += 1;
    }

    pub(super) fn remove(&mut self, block: u32) {
        self.order.remove(block);
    }

    /// Handles a read of a block from the disk.
    pub(super) fn read(&mut self, block: u32) {
        if self.eviction == DiskEviction::Lru && self.order.list(block).is_some() {
            self.order.push(0, block);
        }
    }
}

/// Record that the node reports after it has written it.
pub(super) fn written_record<'a>(
    (id, epoch): (ObjectId, Epoch),
    key: &'a [u8],
    tenant: TenantIndex,
    object_len: u64,
) -> ReportRecord<'a> {
    ReportRecord {
        slot: SlotId(0),
        state: ReportState::Ready,
        epoch,
        id,
        tenant,
        key,
        object_len,
        stripe: StripeRange { index: 0, count: 1, offset: 0, len: object_len },
        root: 1,
        extent: Extent::default(),
        payload_offset: 0,
        digestless: false,
        one_sided: false,
        touched: false,
        pin: PinClass::None,
        expires: None,
        cohort: None,
        parent: None,
        extra_replicas: 0,
        spread: None,
        disk_replicas: 0,
    }
}
