//! [`ObjectWrite`]: writes objects to nodes in three steps: Begin, bytes, Commit.
//!
//! Slots are grouped by node ([`NodeWrites`]); all nodes work concurrently. Small objects for a single node take one
//! round trip for all three steps.

use std::collections::HashSet;
use std::sync::Arc;

use moontide_proto::convert::{self, ObjectListBuilder, ObjectListKind, SlotOutcomes, Wire};
use moontide_proto::{
    CommitEntry, CommitFlags, FixedRecord, FrameKind, Handle, ObjectEntry, PackedKeysBuilder, PutEndEntry,
    PutEndFlags, v1,
};
use moontide_rt::time::Instant;
use moontide_transfer::{
    Batch, Link, Op, PipelinedPut, Target, TransferError, WaitMode, put_in_one_round_trip, run_batches,
};
use moontide_types::limits::{PAGE_BYTES, REPLICAS_MAX};
use moontide_types::record::{DigestContext, object_root};
use moontide_types::{ErrorCode, Key, NodeId};
use prost::Message;

use crate::error::StoreError;
use crate::nodes::{Node, is_connection_error};
use crate::replica_list::digest_context;
use crate::store::Inner;

/// Reservation: locations to which an object may be written.
#[derive(Clone, Debug)]
pub(crate) struct Reservation {
    pub(crate) object: ObjectEntry,
    pub(crate) handles: Vec<Handle>,
    /// The put may replace an existing version.
    pub(crate) replaces: bool,
}

/// Object that is being written: reservation, bytes, and the outcome of each handle.
pub(crate) struct ObjectWrite<'a> {
    pub(crate) key: Key<'a>,
    pub(crate) reservation: Reservation,
    pub(crate) parts: &'a [&'a [u8]],
    pub(crate) attributes: &'a [u8],
    /// Outcome of each handle; `None` while it is unfinished.
    pub(crate) outcomes: Vec<Option<Result<(), ErrorCode>>>,
    /// Root of each stripe, once its bytes are digested.
    pub(crate) roots: Vec<Option<u64>>,
    /// Last failure.
    pub(crate) last: Option<StoreError>,
}

/// Handles on one node: indices of object and handle.
struct NodeWrites {
    node: Arc<Node>,
    link: Arc<dyn Link>,
    slots: Vec<(usize, usize)>,
}

impl<'a> ObjectWrite<'a> {
    pub(crate) fn new(
        key: Key<'a>,
        reservation: Reservation,
        parts: &'a [&'a [u8]],
        attributes: &'a [u8],
    ) -> ObjectWrite<'a> {
        let stripes = reservation.handles.first().map_or(0, |handle| handle.stripe_count.into());
        let outcomes = vec![None; reservation.handles.len()];
        ObjectWrite { key, reservation, parts, attributes, outcomes, roots: vec![None; stripes], last: None }
    }

    /// Returns the roots of all stripes, once all are digested.
    pub(crate) fn all_roots(&self) -> Option<Vec<u64>> {
        self.roots.iter().copied().collect()
    }

    fn fail(&mut self, handle: usize, error: StoreError) {
        self.outcomes[handle] = Some(Err(error.code()));
        self.last = Some(error);
    }

    /// Cancels all handles if fewer than `replicas_min` replicas are complete: the put starts again.
    pub(crate) fn require_replicas(&mut self, replicas_min: u8) {
        let mut ok = [true; REPLICAS_MAX];
        for (handle, outcome) in self.reservation.handles.iter().zip(&self.outcomes) {
            ok[usize::from(handle.replica)] &= *outcome == Some(Ok(()));
        }
        let count = usize::from(self.reservation.object.replica_count);
        if ok[..count].iter().filter(|ok| **ok).count() < usize::from(replicas_min) {
            self.outcomes.fill(Some(Err(ErrorCode::Cancelled)));
        }
    }

    /// Returns the PutEnd entry and the stripe roots.
    pub(crate) fn end(&self) -> (PutEndEntry, Vec<u64>) {
        let Reservation { object, handles, replaces } = &self.reservation;
        let mut outcomes = [None; REPLICAS_MAX];
        for (handle, outcome) in handles.iter().zip(&self.outcomes) {
            match outcome {
                Some(Ok(())) => {}
                Some(Err(code)) => outcomes[usize::from(handle.replica)] = Some(*code),
                None => outcomes[usize::from(handle.replica)] = Some(ErrorCode::Internal),
            }
        }
        let roots: Vec<u64> = self.roots.iter().map(|root| root.unwrap_or(0)).collect();
        let entry = PutEndEntry {
            id: object.id,
            epoch: object.epoch,
            root: object_root(object.id, object.epoch, object.object_len, &roots),
            outcomes,
            replica_count: object.replica_count,
            flags: if *replaces { PutEndFlags::REPLACES } else { PutEndFlags::NONE },
            stripe_count: roots.len() as u16, // ≤ STRIPES_MAX
        };
        (entry, if roots.len() > 1 { roots } else { Vec::new() })
    }
}

impl Inner {
    /// Writes and publishes the bytes of all objects. Afterwards every handle has an outcome.
    pub(crate) fn write(&self, writes: &mut [ObjectWrite<'_>], deadline: Instant) {
        let mut per_node = self.group_by_node(writes, deadline);
        if let [node_writes] = &per_node[..] {
            if !self.write_in_one_round_trip(writes, node_writes, deadline) {
                self.begin(writes, &mut per_node, deadline);
                self.send(writes, &per_node, deadline);
                self.commit(writes, &mut per_node, deadline);
            }
            return;
        }
        // A node that does not respond fails in the current step, with time left for the next steps of the others and
        // for the master.
        let left = || deadline.saturating_duration_since(Instant::now());
        let round_trip = || Instant::now() + self.cluster.attempt_timeout().min(left() / 2);
        let begin_until = if moontide_rt::mutation_enabled("silent-node") { deadline } else { round_trip() };
        self.begin(writes, &mut per_node, begin_until);
        self.send(writes, &per_node, Instant::now() + left() / 4 * 3);
        self.commit(writes, &mut per_node, round_trip());
    }

    /// Performs all three steps in one round trip if the link supports it. `false`: nothing was done.
    fn write_in_one_round_trip(
        &self,
        writes: &mut [ObjectWrite<'_>],
        node_writes: &NodeWrites,
        deadline: Instant,
    ) -> bool {
        let handle_of = |&(object, at): &(usize, usize)| writes[object].reservation.handles[at];
        if node_writes.slots.is_empty()
            || node_writes.slots.iter().any(|slot| handle_of(slot).stripe_len == 0)
        {
            return false;
        }
        let pages = |slot: &(usize, usize)| vec![0; handle_of(slot).stripe_len.div_ceil(PAGE_BYTES) as usize];
        let mut digests: Vec<Vec<u64>> = node_writes.slots.iter().map(pages).collect();
        let op = |(slot, digests): (&(usize, usize), _)| put_op(&writes[slot.0], slot.1, Some(digests));
        let mut ops: Vec<Op<'_>> = node_writes.slots.iter().zip(&mut digests).map(op).collect();
        let begin = begin_body(self.cluster.tenant().as_str(), writes, &node_writes.slots);
        let mut roots: Vec<u64> = Vec::new();
        let done = put_in_one_round_trip(
            &*node_writes.link,
            begin,
            &mut ops,
            |found| {
                roots = found.iter().map(|root| root.unwrap_or(0)).collect();
                commit_body(writes, &node_writes.slots, |index| roots[index])
            },
            deadline,
        );
        drop(ops);
        let node = node_writes.node.info.node;
        let fail_all = |writes: &mut [ObjectWrite<'_>], source: TransferError| {
            if is_connection_error(&source) {
                node_writes.node.suspect();
            }
            for &(object, at) in &node_writes.slots {
                writes[object].fail(at, StoreError::Node { node, source: source.clone() });
            }
        };
        let (begun, outcomes, committed) = match done {
            PipelinedPut::NotTried => return false,
            PipelinedPut::Failed(source) => {
                fail_all(writes, source);
                return true;
            }
            PipelinedPut::Done { begun, outcomes, committed } => (begun, outcomes, committed),
        };
        let slots = node_writes.slots.len();
        let codes = slot_codes(begun, slots).and_then(|begun| Ok((begun, slot_codes(committed, slots)?)));
        let (begun, committed) = match codes {
            Ok(codes) => codes,
            Err(source) => {
                fail_all(writes, source);
                return true;
            }
        };
        for (index, &(object, at)) in node_writes.slots.iter().enumerate() {
            let stripe = usize::from(writes[object].reservation.handles[at].stripe_index);
            writes[object].roots[stripe] = Some(roots[index]);
            // The first failed step has the cause; the later ones failed in consequence.
            match begun[index].or(outcomes[index].err()).or(committed[index]) {
                Some(code) => writes[object].fail(at, StoreError::refused(code)),
                None => writes[object].outcomes[at] = Some(Ok(())),
            }
        }
        true
    }

    /// Performs only the first step; the bytes are written by other means.
    pub(crate) fn begin_slots(&self, writes: &mut [ObjectWrite<'_>], deadline: Instant) {
        let mut per_node = self.group_by_node(writes, deadline);
        self.begin(writes, &mut per_node, deadline);
    }

    /// As [`Inner::write`], without the last step: handles without failure have no outcome yet.
    pub(crate) fn write_unpublished(&self, writes: &mut [ObjectWrite<'_>], deadline: Instant) {
        let mut per_node = self.group_by_node(writes, deadline);
        self.begin(writes, &mut per_node, deadline);
        self.send(writes, &per_node, deadline);
    }

    /// Performs the last step after [`Inner::write_unpublished`].
    pub(crate) fn publish(&self, writes: &mut [ObjectWrite<'_>], deadline: Instant) {
        let mut per_node = self.group_by_node(writes, deadline);
        self.commit(writes, &mut per_node, deadline);
    }

    /// Groups the unfinished handles by node. Handles of unreachable nodes fail.
    fn group_by_node(&self, writes: &mut [ObjectWrite<'_>], deadline: Instant) -> Vec<NodeWrites> {
        let is_open = |write: &ObjectWrite<'_>, at: usize| write.outcomes[at].is_none();
        let mut nodes: Vec<NodeId> = Vec::new();
        for write in &*writes {
            for (at, handle) in write.reservation.handles.iter().enumerate() {
                if is_open(write, at) && !nodes.contains(&handle.node) {
                    nodes.push(handle.node);
                }
            }
        }
        let reached = self.reach_all(&nodes, deadline);
        let node_writes = |reached| match reached {
            Ok((node, link)) => Ok(NodeWrites { node, link, slots: Vec::new() }),
            Err(error) => Err(error),
        };
        let mut per_node: Vec<Result<NodeWrites, StoreError>> =
            reached.into_iter().map(node_writes).collect();
        for (object, write) in writes.iter_mut().enumerate() {
            for at in 0..write.reservation.handles.len() {
                if !is_open(write, at) {
                    continue;
                }
                let node = write.reservation.handles[at].node;
                let index = nodes.iter().position(|other| *other == node).expect("collected above");
                match &mut per_node[index] {
                    Ok(node_writes) => node_writes.slots.push((object, at)),
                    Err(error) => write.fail(at, error.clone()),
                }
            }
        }
        per_node.into_iter().filter_map(Result::ok).collect()
    }

    /// Opens the slots. Refused ones are removed from their group.
    fn begin(&self, writes: &mut [ObjectWrite<'_>], per_node: &mut [NodeWrites], deadline: Instant) {
        let tenant = self.cluster.tenant();
        let bodies = per_node
            .iter()
            .map(|node_writes| begin_body(tenant.as_str(), writes, &node_writes.slots))
            .collect();
        self.call_all(writes, per_node, FrameKind::Begin, bodies, deadline);
    }

    /// Transfers the bytes.
    fn send(&self, writes: &mut [ObjectWrite<'_>], per_node: &[NodeWrites], deadline: Instant) {
        // One replica of each stripe is digested in transit; all replicas have the same root.
        let mut digests: Vec<Vec<Vec<u64>>> = Vec::with_capacity(per_node.len());
        let mut digested: HashSet<(usize, usize)> = HashSet::new();
        for node_writes in per_node {
            let mut node_digests = Vec::with_capacity(node_writes.slots.len());
            for &(object, at) in &node_writes.slots {
                let handle = &writes[object].reservation.handles[at];
                let stripe = (object, usize::from(handle.stripe_index));
                let is_open = writes[object].outcomes[at].is_none();
                let first = is_open && writes[object].roots[stripe.1].is_none() && digested.insert(stripe);
                let pages = if first { handle.stripe_len.div_ceil(PAGE_BYTES) as usize } else { 0 };
                node_digests.push(vec![0u64; pages]);
            }
            digests.push(node_digests);
        }
        let mut sent: Vec<Vec<(usize, usize)>> = Vec::with_capacity(per_node.len());
        let mut batches: Vec<Batch<'_, '_>> = Vec::with_capacity(per_node.len());
        for (node_writes, digests) in per_node.iter().zip(&mut digests) {
            let (mut ops, mut slots) = (Vec::new(), Vec::new());
            for (&(object, at), digests) in node_writes.slots.iter().zip(digests) {
                let write = &writes[object];
                // An empty object has no bytes to send.
                if write.outcomes[at].is_none() && write.reservation.handles[at].stripe_len > 0 {
                    let wanted = !digests.is_empty();
                    ops.push(put_op(write, at, wanted.then_some(digests)));
                    slots.push((object, at));
                }
            }
            batches.push(Batch::new(&*node_writes.link, ops));
            sent.push(slots);
        }
        run_batches(&mut batches, deadline);
        let mut results: Vec<(usize, usize, Result<(), StoreError>)> = Vec::new();
        for ((node_writes, batch), slots) in per_node.iter().zip(&batches).zip(&sent) {
            let node = node_writes.node.info.node;
            for (&(object, at), op) in slots.iter().zip(&batch.ops) {
                let result = match (op.outcome(), &batch.result) {
                    (Some(Ok(())), _) => Ok(()),
                    (Some(Err(code)), _) => Err(StoreError::refused(code)),
                    (None, Some(Err(source))) => Err(StoreError::Node { node, source: source.clone() }),
                    (None, _) => Err(StoreError::refused(ErrorCode::Internal)),
                };
                results.push((object, at, result));
            }
            if let Some(Err(source)) = &batch.result
                && is_connection_error(source)
            {
                node_writes.node.suspect();
            }
        }
        drop(batches);
        let ok: HashSet<(usize, usize)> = results
            .iter()
            .filter(|(.., result)| result.is_ok())
            .map(|&(object, at, _)| (object, at))
            .collect();
        for (node_writes, digests) in per_node.iter().zip(&digests) {
            for (&(object, at), digests) in node_writes.slots.iter().zip(digests) {
                let write = &mut writes[object];
                let handle = write.reservation.handles[at];
                let entry = write.reservation.object;
                let empty = handle.stripe_len == 0 && write.outcomes[at].is_none();
                if empty || ok.contains(&(object, at)) && !digests.is_empty() {
                    let context = digest_context(entry.id, entry.epoch, &handle);
                    let root = context.root_of(digests.iter().copied());
                    write.roots[usize::from(handle.stripe_index)] = Some(root);
                }
            }
        }
        for (object, at, result) in results {
            if let Err(error) = result {
                writes[object].fail(at, error);
            }
        }
        // If the digested replica failed, another one may have succeeded: digest the bytes here.
        for write in writes.iter_mut() {
            for at in 0..write.reservation.handles.len() {
                let handle = write.reservation.handles[at];
                let stripe = usize::from(handle.stripe_index);
                if write.outcomes[at].is_none() && write.roots[stripe].is_none() {
                    let entry = write.reservation.object;
                    let context = digest_context(entry.id, entry.epoch, &handle);
                    let parts = slice_parts(write.parts, handle.stripe_offset, handle.stripe_len);
                    write.roots[stripe] = Some(root_of_parts(&context, &parts));
                }
            }
        }
    }

    /// Publishes the written slots.
    fn commit(&self, writes: &mut [ObjectWrite<'_>], per_node: &mut [NodeWrites], deadline: Instant) {
        for node_writes in per_node.iter_mut() {
            node_writes.slots.retain(|&(object, at)| writes[object].outcomes[at].is_none());
        }
        let body = |node_writes: &NodeWrites| {
            commit_body(writes, &node_writes.slots, |index| {
                let (object, at) = node_writes.slots[index];
                let stripe = writes[object].reservation.handles[at].stripe_index;
                writes[object].roots[usize::from(stripe)].unwrap_or(0)
            })
        };
        let bodies = per_node.iter().map(body).collect();
        self.call_all(writes, per_node, FrameKind::Commit, bodies, deadline);
        for node_writes in per_node.iter() {
            for &(object, at) in &node_writes.slots {
                writes[object].outcomes[at].get_or_insert(Ok(()));
            }
        }
    }

    /// Makes one call to each node, concurrently. Refused slots get their outcome and are removed from their group.
    fn call_all(
        &self,
        writes: &mut [ObjectWrite<'_>],
        per_node: &mut [NodeWrites],
        kind: FrameKind,
        bodies: Vec<Vec<u8>>,
        deadline: Instant,
    ) {
        let last = per_node.iter().rposition(|node_writes| !node_writes.slots.is_empty());
        let mut calls: Vec<_> = per_node
            .iter()
            .zip(bodies)
            .enumerate()
            .map(|(at, (node_writes, body))| {
                let wait_mode = if Some(at) == last { WaitMode::Blocking } else { WaitMode::Polling };
                (!node_writes.slots.is_empty())
                    .then(|| node_writes.link.start_call(kind, body, deadline, wait_mode))
            })
            .collect();
        for (node_writes, call) in per_node.iter_mut().zip(&mut calls).rev() {
            let Some(call) = call else { continue };
            let result = call.wait().and_then(|()| slot_codes(call.take_reply(), node_writes.slots.len()));
            let node = node_writes.node.info.node;
            match result {
                Ok(codes) => {
                    for (&(object, at), code) in node_writes.slots.iter().zip(&codes) {
                        if let Some(code) = code {
                            writes[object].fail(at, StoreError::refused(*code));
                        }
                    }
                }
                Err(source) => {
                    if is_connection_error(&source) {
                        node_writes.node.suspect();
                    }
                    for &(object, at) in &node_writes.slots {
                        writes[object].fail(at, StoreError::Node { node, source: source.clone() });
                    }
                }
            }
            node_writes.slots.retain(|&(object, at)| writes[object].outcomes[at].is_none());
        }
    }
}

fn slot_codes(reply: Vec<u8>, expected: usize) -> Result<Vec<Option<ErrorCode>>, TransferError> {
    let refused = |code| TransferError::Refused { code };
    let message: v1::SlotOutcomes =
        convert::decode(reply.into()).map_err(|_| refused(ErrorCode::Unsupported))?;
    let outcomes = SlotOutcomes::from_wire(&message).map_err(|_| refused(ErrorCode::Unsupported))?;
    let codes: Vec<_> = outcomes.codes.iter().collect();
    if codes.len() == expected { Ok(codes) } else { Err(refused(ErrorCode::Unsupported)) }
}

/// Splits the slots of a node by object; they are in this order.
fn by_object(slots: &[(usize, usize)]) -> impl Iterator<Item = &[(usize, usize)]> {
    slots.chunk_by(|a, b| a.0 == b.0)
}

fn begin_body(tenant: &str, writes: &[ObjectWrite<'_>], slots: &[(usize, usize)]) -> Vec<u8> {
    let mut keys = PackedKeysBuilder::new();
    let mut list = ObjectListBuilder::with_capacity(ObjectListKind::Begin, slots.len());
    for of_object in by_object(slots) {
        let write = &writes[of_object[0].0];
        let handles: Vec<Handle> = of_object.iter().map(|&(_, at)| write.reservation.handles[at]).collect();
        keys.push(write.key).expect("no more keys than in PutStart");
        list.push(write.reservation.object, &handles, write.attributes).expect("part of a valid response");
    }
    let fields = list.finish();
    let request = v1::BeginRequest {
        tenant: tenant.to_owned(),
        keys: keys.finish().into(),
        objects: fields.objects,
        handles: fields.handles,
        attributes: fields.attributes,
    };
    request.encode_to_vec()
}

/// Returns the operation that fills one slot.
fn put_op<'m>(write: &ObjectWrite<'m>, at: usize, digests: Option<&'m mut Vec<u64>>) -> Op<'m> {
    let Reservation { object, handles, .. } = &write.reservation;
    let handle = &handles[at];
    let parts = slice_parts(write.parts, handle.stripe_offset, handle.stripe_len);
    let op = Op::put_parts(Target::of(handle, object.id, object.epoch), 0, parts);
    let Some(digests) = digests else { return op };
    let context = digest_context(object.id, object.epoch, handle);
    op.digested(context, digests).expect("a whole stripe is whole pages")
}

/// Encodes a commit. `root_of` returns the root for each index of `slots`.
fn commit_body(
    writes: &[ObjectWrite<'_>],
    slots: &[(usize, usize)],
    root_of: impl Fn(usize) -> u64,
) -> Vec<u8> {
    let mut entries = Vec::with_capacity(slots.len() * CommitEntry::BYTES);
    for (index, &(object, at)) in slots.iter().enumerate() {
        let Reservation { object: entry, handles, .. } = &writes[object].reservation;
        let handle = &handles[at];
        let entry = CommitEntry {
            id: entry.id,
            epoch: entry.epoch,
            generation: handle.generation,
            segment: handle.segment,
            slot: handle.slot,
            root: root_of(index),
            capability: handle.capability,
            term: handle.term,
            flags: CommitFlags::NONE,
        };
        entry.encode(&mut entries);
    }
    v1::CommitRequest { entries: entries.into() }.encode_to_vec()
}

/// Returns the parts of a range.
fn slice_parts<'a>(parts: &[&'a [u8]], offset: u64, len: u64) -> Vec<&'a [u8]> {
    let (mut skip, mut left) = (offset as usize, len as usize);
    let mut range = Vec::new();
    for part in parts {
        if left == 0 {
            break;
        }
        if skip >= part.len() {
            skip -= part.len();
            continue;
        }
        let piece = &part[skip..part.len().min(skip + left)];
        left -= piece.len();
        skip = 0;
        range.push(piece);
    }
    range
}

/// Returns the root of bytes that are in several buffers.
fn root_of_parts(context: &DigestContext, parts: &[&[u8]]) -> u64 {
    let pages = context.len.div_ceil(PAGE_BYTES);
    context.root_of((0..pages).map(|page| {
        let start = page * PAGE_BYTES;
        context.page_from_parts(page, slice_parts(parts, start, (context.len - start).min(PAGE_BYTES)))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_types::{Epoch, ObjectId};

    #[test]
    fn slice_parts_returns_requested_range() {
        let parts: [&[u8]; 4] = [b"abc", b"", b"defg", b"h"];
        let joined = |offset, len| slice_parts(&parts, offset, len).concat();
        assert_eq!(joined(0, 8), b"abcdefgh");
        assert_eq!(joined(2, 3), b"cde");
        assert_eq!(joined(7, 1), b"h");
        assert_eq!(joined(3, 0), b"");
    }

    #[test]
    fn root_of_parts_equals_root_of_whole() {
        let whole: Vec<u8> = (0..3 * PAGE_BYTES as usize + 77).map(|at| (at * 31) as u8).collect();
        let version = Epoch::from_bits(9).unwrap();
        let context = DigestContext { id: ObjectId([3; 16]), version, stripe: 0, len: whole.len() as u64 };
        let (a, rest) = whole.split_at(100_000);
        let (b, c) = rest.split_at(300_000);
        assert_eq!(root_of_parts(&context, &[a, b, c]), context.payload(&whole, |_| ()));
    }
}
