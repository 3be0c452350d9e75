//! [`WritePlan`]: put in steps, for callers that need the locations before they have the bytes.
//!
//! ```text
//!   open_for_write ──▶ WritePlan ── write ──▶ … ── commit(epoch) ──▶ stored
//!                          └──────── dropped, or abort ──▶ released
//! ```

use moontide_proto::convert::{CallerId, Wire};
use moontide_proto::{FixedRecord, Handle, VersionedId, v1};
use moontide_rt::time::Instant;
use moontide_types::{Epoch, ErrorCode, Generation, Key, Medium, NodeId, ObjectId, SegmentId, SlotId};

use crate::cluster::{Rounds, random_u64};
use crate::config::PutOptions;
use crate::error::StoreError;
use crate::put::{PutOutcome, PutParams, PutStartOutcome};
use crate::replica_list::ReplicaList;
use crate::store::Store;
use crate::write::{ObjectWrite, Reservation};

/// Location of one stripe of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripeLocation {
    /// Number of the replica.
    pub replica: u8,
    /// Node that has the stripe.
    pub node: NodeId,
    /// Medium of the stripe. On disk there is no segment, slot or offset: these are 0.
    pub medium: Medium,
    /// Segment of the node.
    pub segment: SegmentId,
    /// Incarnation of the segment.
    pub generation: Generation,
    /// Slot of the record's header.
    pub slot: SlotId,
    /// Offset of the payload in the segment, in bytes.
    pub payload_offset: u64,
    /// Offset of the stripe in the object, in bytes.
    pub offset: u64,
    /// Length of the stripe, in bytes.
    pub len: u64,
}

/// Location of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectLocation {
    /// Id of the object.
    pub id: ObjectId,
    /// Version of the object.
    pub epoch: Epoch,
    /// Length of the object, in bytes.
    pub len: u64,
    /// Root digest.
    pub root: u64,
    /// Locations of the stripes, by replica.
    pub stripes: Vec<StripeLocation>,
}

impl ObjectLocation {
    pub(crate) fn of(location: &ReplicaList) -> ObjectLocation {
        ObjectLocation {
            id: location.id(),
            epoch: location.epoch(),
            len: location.len(),
            root: location.entry().root,
            stripes: location.handles().iter().map(StripeLocation::of).collect(),
        }
    }
}

impl StripeLocation {
    pub(crate) fn of(handle: &Handle) -> StripeLocation {
        StripeLocation {
            replica: handle.replica,
            node: handle.node,
            medium: handle.medium,
            segment: handle.segment,
            generation: handle.generation,
            slot: handle.slot,
            payload_offset: handle.payload_offset,
            offset: handle.stripe_offset,
            len: handle.stripe_len,
        }
    }
}

/// Reservation for an object. Dropping it releases the space.
#[derive(Debug)]
#[must_use = "dropping a plan releases its reservation"]
pub struct WritePlan {
    store: Store,
    key: Box<[u8]>,
    attributes: Vec<u8>,
    reservation: Option<Reservation>,
    expires_at: Instant,
    /// Outcomes and roots, once the bytes are written.
    written: Option<WriteOutcome>,
}

#[derive(Debug)]
struct WriteOutcome {
    outcomes: Vec<Option<Result<(), ErrorCode>>>,
    roots: Vec<Option<u64>>,
}

impl Store {
    /// Reserves space for an object of this length. Fails with `NoSpace` at once instead of waiting for space,
    /// and with `TooLarge` if the object never fits.
    pub fn open_for_write(
        &self,
        key: &[u8],
        len: u64,
        options: &PutOptions,
    ) -> Result<WritePlan, StoreError> {
        self.open(key, len, options, None)
    }

    /// As [`Store::open_for_write`], in memory of this kind, without digests.
    pub(crate) fn open_in(
        &self,
        medium: Medium,
        key: &[u8],
        len: u64,
        options: &PutOptions,
    ) -> Result<WritePlan, StoreError> {
        self.open(key, len, options, Some(medium))
    }

    fn open(
        &self,
        key: &[u8],
        len: u64,
        options: &PutOptions,
        in_place: Option<Medium>,
    ) -> Result<WritePlan, StoreError> {
        options.validate()?;
        let inner = &*self.inner;
        let mut attributes = Vec::new();
        options.attributes().encode(&mut attributes);
        let params = PutParams { caller: CallerId(random_u64()), options, attributes: &attributes, in_place };
        let keys = [(Key::new(key)?, len)];
        let started = inner.put_start(&keys, params, Rounds::UntilDeadline, inner.deadline())?;
        match started.into_iter().next().expect("one result per key") {
            PutStartOutcome::Granted(reservation) => {
                let valid_for = std::time::Duration::from_millis(reservation.object.valid_ms.into());
                let (store, expires_at) = (self.clone(), Instant::now() + valid_for);
                Ok(WritePlan {
                    store,
                    key: key.into(),
                    attributes,
                    reservation: Some(reservation),
                    expires_at,
                    written: None,
                })
            }
            PutStartOutcome::Existed => Err(StoreError::refused(ErrorCode::AlreadyExists)),
            PutStartOutcome::RetryLater { code, .. } => Err(StoreError::refused(code)),
            PutStartOutcome::NoResponse(error) | PutStartOutcome::Refused(error) => Err(error),
        }
    }

    /// Removes the cached location of an object.
    pub(crate) fn forget_location(&self, key: &[u8]) {
        if let Ok(key) = Key::new(key) {
            let inner = &*self.inner;
            inner.forget_object(&inner.local_nodes.id(key));
        }
    }

    /// Returns the location of an object, without reading it. Asks the master only if the location is not cached. Never
    /// waits for an object that is being written.
    pub fn get_location(&self, key: &[u8]) -> Result<Option<ObjectLocation>, StoreError> {
        let inner = &*self.inner;
        let key = Key::new(key)?;
        let id = inner.local_nodes.id(key);
        if let Some(location) = inner.cached_location(&id) {
            return Ok(Some(ObjectLocation::of(&location)));
        }
        let found = inner
            .fetch_locations(&[key], Rounds::UntilDeadline, inner.deadline())
            .pop()
            .expect("one result per key")?;
        Ok(found.map(|location| ObjectLocation::of(&location)))
    }
}

impl WritePlan {
    fn reservation(&self) -> &Reservation {
        self.reservation.as_ref().expect("taken only by commit and drop")
    }

    /// Returns the version that the object will have; the argument of [`WritePlan::commit`].
    pub fn epoch(&self) -> Epoch {
        self.reservation().object.epoch
    }

    /// Returns the id of the object.
    pub fn id(&self) -> ObjectId {
        self.reservation().object.id
    }

    /// Returns the length of the object, in bytes.
    pub fn object_len(&self) -> u64 {
        self.reservation().object.object_len
    }

    /// Returns the time at which the reservation expires.
    pub fn expires_at(&self) -> Instant {
        self.expires_at
    }

    /// Returns the locations of the stripes.
    pub fn stripes(&self) -> Vec<StripeLocation> {
        self.reservation().handles.iter().map(StripeLocation::of).collect()
    }

    /// Opens the slots of an object that is written by other means. The plan counts as written from now on.
    pub(crate) fn begin(&mut self) -> Result<(), StoreError> {
        let key = Key::new(&self.key).expect("checked when the plan was made");
        let deadline = self.store.inner.deadline().min(self.expires_at);
        let mut write = [ObjectWrite::new(key, self.reservation().clone(), &[], &self.attributes)];
        self.store.inner.begin_slots(&mut write, deadline);
        let [write] = write;
        if write.outcomes.iter().any(|outcome| matches!(outcome, Some(Err(_)))) {
            return Err(write.last.unwrap_or(StoreError::refused(ErrorCode::Gone)));
        }
        self.written = Some(WriteOutcome { outcomes: write.outcomes, roots: write.roots });
        Ok(())
    }

    /// Writes the bytes to their nodes. They become readable with [`WritePlan::commit`].
    pub fn write(&mut self, parts: &[&[u8]]) -> Result<(), StoreError> {
        let len: u64 = parts.iter().map(|part| part.len() as u64).sum();
        if len != self.object_len() {
            return Err(StoreError::InvalidArgument {
                what: "the length of the parts",
                rule: "the reserved length",
            });
        }
        let key = Key::new(&self.key).expect("checked when the plan was made");
        let deadline = self.store.inner.deadline().min(self.expires_at);
        let mut write = [ObjectWrite::new(key, self.reservation().clone(), parts, &self.attributes)];
        self.store.inner.write_unpublished(&mut write, deadline);
        let [write] = write;
        if write.outcomes.iter().all(|outcome| matches!(outcome, Some(Err(_)))) {
            return Err(write.last.unwrap_or(StoreError::refused(ErrorCode::Gone)));
        }
        self.written = Some(WriteOutcome { outcomes: write.outcomes, roots: write.roots });
        Ok(())
    }

    /// Publishes the object. Fails with `StaleEpoch` if `epoch` is not [`WritePlan::epoch`].
    pub fn commit(mut self, epoch: Epoch) -> Result<PutOutcome, StoreError> {
        if epoch != self.epoch() {
            return Err(StoreError::refused(ErrorCode::StaleEpoch));
        }
        let Some(written) = self.written.take() else {
            return Err(StoreError::InvalidArgument { what: "a plan to commit", rule: "written first" });
        };
        if Instant::now() >= self.expires_at {
            // The master has released the reservation, or is about to.
            return Err(StoreError::refused(ErrorCode::Gone));
        }
        let reservation = self.reservation.take().expect("taken only by commit and drop");
        let key = Key::new(&self.key).expect("checked when the plan was made");
        let deadline = self.store.inner.deadline().min(self.expires_at);
        let mut write = [ObjectWrite {
            outcomes: written.outcomes,
            roots: written.roots,
            ..ObjectWrite::new(key, reservation, &[], &self.attributes)
        }];
        self.store.inner.publish(&mut write, deadline);
        let ended = self.store.inner.put_end(&mut write, deadline).pop().expect("one result per put");
        let [write] = write;
        match ended {
            Ok(()) => {
                self.store.inner.cache_written(&write);
                Ok(PutOutcome::Stored)
            }
            Err(error) if error.code() == ErrorCode::Pending => {
                self.store.inner.cache_written(&write);
                Err(error)
            }
            Err(error) => Err(write.last.unwrap_or(error)),
        }
    }

    /// Releases the reservation.
    pub fn abort(self) {}
}

impl Drop for WritePlan {
    fn drop(&mut self) {
        let Some(reservation) = self.reservation.take() else { return };
        let inner = &self.store.inner;
        let mut versions = Vec::with_capacity(VersionedId::BYTES);
        VersionedId { id: reservation.object.id, epoch: reservation.object.epoch }.encode(&mut versions);
        let context = Some(inner.cluster.context(inner.deadline()).to_wire());
        // Not awaited: the master also releases the space when the reservation expires.
        for mut master in inner.cluster.clients() {
            let request =
                v1::PutRevokeRequest { context: context.clone(), versions: versions.clone().into() };
            inner.cluster.spawn(async move {
                let _ = master.put_revoke(request).await;
            });
        }
    }
}
