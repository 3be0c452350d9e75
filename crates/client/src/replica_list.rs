//! [`ReplicaList`]: locations of an object, as returned by the master.

use std::ops::Range;

use moontide_proto::convert::ConvertError;
use moontide_proto::{Handle, HandleFlags, ObjectEntry};
use moontide_types::record::{DigestContext, object_root};
use moontide_types::{Epoch, Medium, MonoTime, NodeId, ObjectId};

use crate::error::StoreError;
use crate::link::LookupEntry;

/// Replicas of an object.
#[derive(Clone, Debug)]
pub(crate) struct ReplicaList {
    object: ObjectEntry,
    handles: Box<[Handle]>,
    /// Range of `handles` of each replica; one handle per stripe, in order.
    replicas: Box<[Range<usize>]>,
    /// End of the lease: one-sided reads may use the locations until then.
    pub(crate) lease_expires_at: Option<MonoTime>,
}

impl ReplicaList {
    /// Checks an entry of a look-up: its digests must be consistent.
    pub(crate) fn new(
        entry: LookupEntry,
        lease_expires_at: Option<MonoTime>,
    ) -> Result<ReplicaList, StoreError> {
        let LookupEntry { object, handles } = entry;
        let mut replicas: Vec<Range<usize>> = Vec::with_capacity(object.replica_count.into());
        for (at, handle) in handles.iter().enumerate() {
            match replicas.last_mut() {
                Some(range) if handles[range.start].replica == handle.replica => range.end = at + 1,
                _ => replicas.push(at..at + 1),
            }
        }
        let list =
            ReplicaList { object, handles: handles.into(), replicas: replicas.into(), lease_expires_at };
        list.check()?;
        Ok(list)
    }

    /// Checks that stripe roots lead to the object's root, and that all replicas have the same stripes.
    fn check(&self) -> Result<(), StoreError> {
        let wrong = |rule| StoreError::InvalidResponse(ConvertError::Relation { field: "handles", rule });
        let first = self.replicas.first().ok_or(wrong("at least one replica"))?;
        let mut end = 0;
        for (index, handle) in self.handles[first.clone()].iter().enumerate() {
            if usize::from(handle.stripe_index) != index || handle.stripe_offset != end {
                return Err(wrong("the stripes of a replica follow each other"));
            }
            end = handle.stripe_offset.saturating_add(handle.stripe_len);
        }
        if end != self.len() {
            return Err(wrong("the stripes of a replica are as long as the object"));
        }
        let cut = |handle: &Handle| (handle.stripe_index, handle.stripe_offset, handle.stripe_len);
        for replica in &self.replicas {
            if !self.handles[replica.clone()].iter().map(cut).eq(self.handles[first.clone()].iter().map(cut))
            {
                return Err(wrong("all replicas have the same stripes"));
            }
            if self.is_digestless() {
                continue;
            }
            let roots: Vec<u64> = self.handles[replica.clone()].iter().map(|h| h.stripe_root).collect();
            if object_root(self.id(), self.epoch(), self.len(), &roots) != self.object.root {
                return Err(wrong("the stripe roots lead to the object's root"));
            }
        }
        Ok(())
    }

    pub(crate) fn id(&self) -> ObjectId {
        self.object.id
    }

    pub(crate) fn epoch(&self) -> Epoch {
        self.object.epoch
    }

    pub(crate) fn len(&self) -> u64 {
        self.object.object_len
    }

    pub(crate) fn entry(&self) -> &ObjectEntry {
        &self.object
    }

    pub(crate) fn handles(&self) -> &[Handle] {
        &self.handles
    }

    pub(crate) fn is_digestless(&self) -> bool {
        self.handles.first().is_some_and(|handle| handle.flags.contains(HandleFlags::DIGESTLESS))
    }

    pub(crate) fn stripes(&self) -> usize {
        self.replicas.first().map_or(0, Range::len)
    }

    pub(crate) fn replica_count(&self) -> usize {
        self.replicas.len()
    }

    /// Returns the handle of one stripe of one replica.
    pub(crate) fn handle(&self, replica: usize, stripe: usize) -> &Handle {
        &self.handles[self.replicas[replica].start + stripe]
    }

    /// Returns the context that the digests of a stripe are bound to.
    pub(crate) fn digest_context(&self, handle: &Handle) -> DigestContext {
        digest_context(self.id(), self.epoch(), handle)
    }

    /// Returns whether any stripe of a replica is on disk and must be loaded before it is read.
    pub(crate) fn is_on_disk(&self, replica: usize) -> bool {
        self.handles[self.replicas[replica].clone()].iter().any(|handle| handle.medium == Medium::Disk)
    }

    /// Returns the nodes that have the stripe.
    pub(crate) fn nodes(&self, stripe: usize) -> impl Iterator<Item = NodeId> + '_ {
        (0..self.replica_count()).map(move |replica| self.handle(replica, stripe).node)
    }
}

/// Returns the context that the digests of a stripe are bound to.
pub(crate) fn digest_context(id: ObjectId, version: Epoch, handle: &Handle) -> DigestContext {
    DigestContext { id, version, stripe: handle.stripe_index, len: handle.stripe_len }
}

#[cfg(test)]
mod tests {
    use moontide_proto::Capability;
    use moontide_types::{ErrorCode, Extent, Generation, SegmentId, SlotId, Term};

    use super::*;

    /// Returns a list of replicas, each given by the lengths of its stripes.
    fn list(replicas: &[&[u64]]) -> Result<ReplicaList, StoreError> {
        let (id, epoch, len) = (ObjectId([7; 16]), Epoch::from_bits(9).unwrap(), 100);
        let mut handles = vec![];
        for (replica, stripes) in (0..).zip(replicas) {
            let mut stripe_offset = 0;
            for (stripe_index, &stripe_len) in (0..).zip(*stripes) {
                let stripe_count = stripes.len() as u16;
                handles.push(Handle {
                    node: NodeId(1),
                    segment: SegmentId(0),
                    slot: SlotId(0),
                    generation: Generation(1),
                    extent: Extent::default(),
                    payload_offset: 0,
                    stripe_offset,
                    stripe_len,
                    stripe_root: 0,
                    capability: Capability::default(),
                    term: Term::ZERO,
                    stripe_index,
                    stripe_count,
                    replica,
                    medium: Medium::Memory,
                    flags: HandleFlags::NONE,
                });
                stripe_offset += stripe_len;
            }
        }
        let root = object_root(id, epoch, len, &vec![0; replicas[0].len()]);
        let replica_count = replicas.len() as u8;
        let none = ObjectEntry { code: None, ..ObjectEntry::failed(ErrorCode::NotFound, 0) };
        let object = ObjectEntry { id, epoch, object_len: len, root, replica_count, ..none };
        ReplicaList::new(LookupEntry { object, handles }, None)
    }

    /// Regression: only the numbers of stripes were compared, and a read from the second replica panicked.
    #[test]
    fn replicas_cut_differently_are_rejected() {
        assert!(list(&[&[60, 40], &[60, 40]]).is_ok());
        assert!(list(&[&[100], &[100], &[100]]).is_ok());
        for wrong in [&[&[60, 40][..], &[40, 60]][..], &[&[60, 40], &[100]], &[&[60, 30]], &[&[60, 50]]] {
            assert!(list(wrong).is_err(), "{wrong:?}");
        }
    }
}
