//! Writing in steps: [`WritePlan`], for callers that want to know where the bytes go before they have them.
//!
//! ```text
//!   open_for_write ──▶ WritePlan ── write ──▶ … ── commit(epoch) ──▶ stored
//!                          └──────── dropped, or abort ──▶ given back
//! ```

use std::time::Instant;

use moontide_proto::convert::{CallerId, Wire};
use moontide_proto::{FixedRecord, Handle, Medium, VersionedId, v1};
use moontide_types::{Epoch, ErrorCode, Generation, Key, NodeId, ObjectId, SegmentId, SlotId};

use crate::cluster::draw;
use crate::config::PutOptions;
use crate::error::StoreError;
use crate::place::Placed;
use crate::put::{Granted, How, Put, Start};
use crate::store::Store;
use crate::write::Writing;

/// Where one stripe of one replica lies, or will.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripePlace {
    /// Which replica.
    pub replica: u8,
    /// The node.
    pub node: NodeId,
    /// Where it has it. On a disk there is no segment, slot or offset: these are 0.
    pub medium: Medium,
    /// Its segment.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// The slot of its header.
    pub slot: SlotId,
    /// Where its payload starts in the segment.
    pub payload_offset: u64,
    /// Where the stripe starts in the object.
    pub offset: u64,
    /// Its length.
    pub len: u64,
}

/// Where an object is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Location {
    /// Its id.
    pub id: ObjectId,
    /// Its version.
    pub epoch: Epoch,
    /// Its length.
    pub len: u64,
    /// Its root digest.
    pub root: u64,
    /// Its stripes, by replica.
    pub stripes: Vec<StripePlace>,
}

impl Location {
    pub(crate) fn of(placed: &Placed) -> Location {
        Location {
            id: placed.id(),
            epoch: placed.epoch(),
            len: placed.len(),
            root: placed.entry().root,
            stripes: placed.handles().iter().map(StripePlace::of).collect(),
        }
    }
}

impl StripePlace {
    pub(crate) fn of(handle: &Handle) -> StripePlace {
        StripePlace {
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

/// Space that is reserved for an object. Dropping it gives the space back.
#[derive(Debug)]
#[must_use = "a plan that is dropped is given back"]
pub struct WritePlan {
    store: Store,
    key: Box<[u8]>,
    attributes: Vec<u8>,
    granted: Option<Granted>,
    until: Instant,
    /// Bytes are written; the outcome of each handle and the roots.
    written: Option<Written>,
}

#[derive(Debug)]
struct Written {
    outcomes: Vec<Option<Result<(), ErrorCode>>>,
    roots: Vec<Option<u64>>,
}

impl Store {
    /// Reserves space for an object of this length. Does not wait for room: `NoSpace` is told at once.
    pub fn open_for_write(
        &self,
        key: &[u8],
        len: u64,
        options: &PutOptions,
    ) -> Result<WritePlan, StoreError> {
        self.open(key, len, options, None)
    }

    /// As [`Store::open_for_write`], in memory of this kind, for bytes that nobody digests.
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
        let how = How { caller: CallerId(draw()), options, attributes: &attributes, in_place };
        let started = inner
            .put_start(&[(Key::new(key)?, len)], how, inner.deadline())?
            .into_iter()
            .next();
        match started.expect("one answer per key") {
            Start::Granted(granted) => {
                let window = std::time::Duration::from_millis(granted.object.window_ms.into());
                let (store, until) = (self.clone(), Instant::now() + window);
                Ok(WritePlan {
                    store,
                    key: key.into(),
                    attributes,
                    granted: Some(granted),
                    until,
                    written: None,
                })
            }
            Start::Existed => Err(StoreError::refused(ErrorCode::AlreadyExists)),
            Start::Later { code, .. } => Err(StoreError::refused(code)),
            Start::Refused(error) => Err(error),
        }
    }

    /// What is remembered of an object's place is not right any more.
    pub(crate) fn forget_location(&self, key: &[u8]) {
        if let Ok(key) = Key::new(key) {
            let inner = &*self.inner;
            inner.forget_object(&inner.near.id(inner.cluster.tenant(), key));
        }
    }

    /// Where an object is, without reading it. Asks the master only if that is not remembered, and never waits for an
    /// object that is being written.
    pub fn get_location(&self, key: &[u8]) -> Result<Option<Location>, StoreError> {
        let inner = &*self.inner;
        let key = Key::new(key)?;
        let id = inner.near.id(inner.cluster.tenant(), key);
        if let Some(placed) = inner.remembered(&id) {
            return Ok(Some(Location::of(&placed)));
        }
        let found = inner.look_up(&[key], inner.deadline()).pop().expect("one answer per key")?;
        Ok(found.map(|placed| Location::of(&placed)))
    }
}

impl WritePlan {
    fn granted(&self) -> &Granted {
        self.granted.as_ref().expect("there until the plan ends")
    }

    /// The version that the object will have. Commit names it.
    pub fn epoch(&self) -> Epoch {
        self.granted().object.epoch
    }

    /// The object's id.
    pub fn id(&self) -> ObjectId {
        self.granted().object.id
    }

    /// The object's length.
    pub fn object_len(&self) -> u64 {
        self.granted().object.object_len
    }

    /// When the reservation ends.
    pub fn until(&self) -> Instant {
        self.until
    }

    /// Where the bytes will lie.
    pub fn stripes(&self) -> Vec<StripePlace> {
        self.granted().handles.iter().map(StripePlace::of).collect()
    }

    /// Opens the place of an object that is written by other means. It counts as written from now on.
    pub(crate) fn begin(&mut self) -> Result<(), StoreError> {
        let key = Key::new(&self.key).expect("checked when the plan was made");
        let deadline = self.store.inner.deadline().min(self.until);
        let mut writing = [Writing::new(key, self.granted().clone(), &[], &self.attributes)];
        self.store.inner.begin_only(&mut writing, deadline);
        let [writing] = writing;
        if writing.outcomes.iter().any(|outcome| matches!(outcome, Some(Err(_)))) {
            return Err(writing.last.unwrap_or(StoreError::refused(ErrorCode::Gone)));
        }
        self.written = Some(Written { outcomes: writing.outcomes, roots: writing.roots });
        Ok(())
    }

    /// Brings the bytes to their nodes. They can be read after [`WritePlan::commit`].
    pub fn write(&mut self, parts: &[&[u8]]) -> Result<(), StoreError> {
        let len: u64 = parts.iter().map(|part| part.len() as u64).sum();
        if len != self.object_len() {
            return Err(StoreError::Argument { what: "the length of the bytes", rule: "what was reserved" });
        }
        let key = Key::new(&self.key).expect("checked when the plan was made");
        let deadline = self.store.inner.deadline().min(self.until);
        let mut writing = [Writing::new(key, self.granted().clone(), parts, &self.attributes)];
        self.store.inner.write_unpublished(&mut writing, deadline);
        let [writing] = writing;
        if writing.outcomes.iter().all(|outcome| matches!(outcome, Some(Err(_)))) {
            return Err(writing.last.unwrap_or(StoreError::refused(ErrorCode::Gone)));
        }
        self.written = Some(Written { outcomes: writing.outcomes, roots: writing.roots });
        Ok(())
    }

    /// Publishes the object. The epoch is the plan's; another one is refused.
    pub fn commit(mut self, epoch: Epoch) -> Result<Put, StoreError> {
        if epoch != self.epoch() {
            return Err(StoreError::refused(ErrorCode::StaleEpoch));
        }
        let Some(written) = self.written.take() else {
            return Err(StoreError::Argument { what: "a plan that is committed", rule: "written before" });
        };
        if Instant::now() >= self.until {
            // The master has taken the place back, or is about to.
            return Err(StoreError::refused(ErrorCode::Gone));
        }
        let granted = self.granted.take().expect("there until the plan ends");
        let key = Key::new(&self.key).expect("checked when the plan was made");
        let deadline = self.store.inner.deadline().min(self.until);
        let mut writing = [Writing {
            outcomes: written.outcomes,
            roots: written.roots,
            ..Writing::new(key, granted, &[], &self.attributes)
        }];
        self.store.inner.publish(&mut writing, deadline);
        let ended = self.store.inner.put_end(&mut writing, deadline).pop().expect("one answer each");
        let [writing] = writing;
        match ended {
            Ok(()) => {
                self.store.inner.remember_written(&writing);
                Ok(Put::Stored)
            }
            Err(error) => Err(writing.last.unwrap_or(error)),
        }
    }

    /// Gives the space back.
    pub fn abort(self) {}
}

impl Drop for WritePlan {
    fn drop(&mut self) {
        let Some(granted) = self.granted.take() else { return };
        let inner = &self.store.inner;
        let mut versions = Vec::with_capacity(VersionedId::BYTES);
        VersionedId { id: granted.object.id, epoch: granted.object.epoch }.encode(&mut versions);
        let context = Some(inner.cluster.context(inner.deadline()).to_wire());
        // Nobody waits: the master takes the space back by itself when the reservation ends.
        for mut master in inner.cluster.clients() {
            let request = v1::PutRevokeRequest { context: context.clone(), versions: versions.clone().into() };
            inner.cluster.spawn(async move {
                let _ = master.put_revoke(request).await;
            });
        }
    }
}
