//! [`Placed`]: where an object is, as the master said.

use std::ops::Range;

use moontide_proto::convert::ConvertError;
use moontide_proto::{Handle, HandleFlags, Medium, ObjectEntry};
use moontide_types::record::{DigestContext, object_root};
use moontide_types::{Epoch, MonoTime, NodeId, ObjectId};

use crate::error::StoreError;
use crate::link::Located;

/// An object's replicas.
#[derive(Clone, Debug)]
pub(crate) struct Placed {
    object: ObjectEntry,
    handles: Box<[Handle]>,
    /// For each replica its handles, which are its stripes in order.
    replicas: Box<[Range<usize>]>,
    /// Until when a one-sided reader may rely on it.
    pub(crate) leased_until: Option<MonoTime>,
}

impl Placed {
    /// Takes the master's answer, whose digests must be of one piece.
    pub(crate) fn new(located: Located, leased_until: Option<MonoTime>) -> Result<Placed, StoreError> {
        let Located { object, handles } = located;
        let mut replicas: Vec<Range<usize>> = Vec::with_capacity(object.replica_count.into());
        for (at, handle) in handles.iter().enumerate() {
            match replicas.last_mut() {
                Some(range) if handles[range.start].replica == handle.replica => range.end = at + 1,
                _ => replicas.push(at..at + 1),
            }
        }
        let placed = Placed { object, handles: handles.into(), replicas: replicas.into(), leased_until };
        placed.check()?;
        Ok(placed)
    }

    /// Roots of stripes lead to the object's root, and all replicas are cut alike.
    fn check(&self) -> Result<(), StoreError> {
        let wrong = |rule| StoreError::Answer(ConvertError::Relation { field: "handles", rule });
        let first = self.replicas.first().ok_or(wrong("there is a replica"))?;
        for replica in &self.replicas {
            if replica.len() != first.len() {
                return Err(wrong("all replicas have the same stripes"));
            }
            if self.is_digestless() {
                continue;
            }
            let roots: Vec<u64> = self.handles[replica.clone()].iter().map(|h| h.stripe_root).collect();
            if object_root(self.id(), self.epoch(), self.len(), &roots) != self.object.root {
                return Err(wrong("the stripes' roots lead to the object's"));
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

    /// One stripe of one replica.
    pub(crate) fn handle(&self, replica: usize, stripe: usize) -> &Handle {
        &self.handles[self.replicas[replica].start + stripe]
    }

    /// What the digests of a stripe are bound to.
    pub(crate) fn digest_context(&self, handle: &Handle) -> DigestContext {
        digest_context(self.id(), self.epoch(), handle)
    }

    /// Whether a stripe of a replica can be read where it is; what is on disk has to be loaded first.
    pub(crate) fn is_on_disk(&self, replica: usize) -> bool {
        self.handles[self.replicas[replica].clone()].iter().any(|handle| handle.medium == Medium::Disk)
    }

    /// Nodes that have the stripe.
    pub(crate) fn nodes(&self, stripe: usize) -> impl Iterator<Item = NodeId> + '_ {
        (0..self.replica_count()).map(move |replica| self.handle(replica, stripe).node)
    }
}

/// What the digests of a stripe are bound to.
pub(crate) fn digest_context(id: ObjectId, version: Epoch, handle: &Handle) -> DigestContext {
    DigestContext { id, version, stripe: handle.stripe_index, len: handle.stripe_len }
}
