//! Bytes on their way to nodes: [`Writing`], and the three steps Begin, bytes, Commit.
//!
//! Slots are sorted by node (a [`Lot`]); all nodes work at the same time. Small objects for a single node take one round
//! trip for all three steps.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Instant;

use moontide_proto::convert::{self, ListKind, ObjectListBuilder, SlotOutcomes, Wire};
use moontide_proto::{
    CommitEntry, CommitFlags, FixedRecord, FrameKind, Handle, PackedKeysBuilder, PutEndEntry, v1,
};
use moontide_transfer::{
    Batch, Link, OneGo, Op, Target, TransferError, Waiting, put_in_one_go, run_together,
};
use moontide_types::bounds::{PAGE_BYTES, REPLICAS_MAX};
use moontide_types::record::{DigestContext, object_root};
use moontide_types::{ErrorCode, Key, NodeId};
use prost::Message;

use crate::error::StoreError;
use crate::nodes::{Node, is_of_connection};
use crate::place::digest_context;
use crate::put::Granted;
use crate::store::Inner;

/// An object on its way: its reservation, its bytes, and what became of each handle.
pub(crate) struct Writing<'a> {
    pub(crate) key: Key<'a>,
    pub(crate) granted: Granted,
    pub(crate) parts: &'a [&'a [u8]],
    pub(crate) attributes: &'a [u8],
    /// For each handle: nothing yet, or how it went.
    pub(crate) outcomes: Vec<Option<Result<(), ErrorCode>>>,
    /// Root of each stripe, once its bytes were digested.
    pub(crate) roots: Vec<Option<u64>>,
    /// The last failure, with its facts.
    pub(crate) last: Option<StoreError>,
}

/// Handles on one node: (object, handle).
struct Lot {
    node: Arc<Node>,
    link: Arc<dyn Link>,
    slots: Vec<(usize, usize)>,
}

impl<'a> Writing<'a> {
    pub(crate) fn new(
        key: Key<'a>,
        granted: Granted,
        parts: &'a [&'a [u8]],
        attributes: &'a [u8],
    ) -> Writing<'a> {
        let stripes = granted.handles.first().map_or(0, |handle| handle.stripe_count.into());
        let outcomes = vec![None; granted.handles.len()];
        Writing { key, granted, parts, attributes, outcomes, roots: vec![None; stripes], last: None }
    }

    /// The roots of all stripes, if they are known.
    pub(crate) fn all_roots(&self) -> Option<Vec<u64>> {
        self.roots.iter().copied().collect()
    }

    fn fail(&mut self, handle: usize, error: StoreError) {
        self.outcomes[handle] = Some(Err(error.code()));
        self.last = Some(error);
    }

    /// With fewer replicas than are acceptable there is none: the put is to start again.
    pub(crate) fn insist_on(&mut self, replicas_min: u8) {
        let mut well = [true; REPLICAS_MAX];
        for (handle, outcome) in self.granted.handles.iter().zip(&self.outcomes) {
            well[usize::from(handle.replica)] &= *outcome == Some(Ok(()));
        }
        let count = usize::from(self.granted.object.replica_count);
        if well[..count].iter().filter(|well| **well).count() < usize::from(replicas_min) {
            self.outcomes.fill(Some(Err(ErrorCode::Cancelled)));
        }
    }

    /// What the master is told at the end.
    pub(crate) fn end(&self) -> (PutEndEntry, Vec<u64>) {
        let Granted { object, handles } = &self.granted;
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
            form: 0,
            stripe_count: roots.len() as u16, // ≤ STRIPES_MAX
        };
        (entry, if roots.len() > 1 { roots } else { Vec::new() })
    }
}

impl Inner {
    /// Brings the bytes of all objects to their nodes, and publishes them there. Every handle has an outcome afterwards.
    pub(crate) fn write(&self, writing: &mut [Writing<'_>], deadline: Instant) {
        let mut lots = self.lots(writing, deadline);
        if let [lot] = &lots[..]
            && self.write_in_one_go(writing, lot, deadline)
        {
            return;
        }
        self.begin(writing, &mut lots, deadline);
        self.send(writing, &lots, deadline);
        self.commit(writing, &mut lots, deadline);
    }

    /// All three steps in one round trip, where the link can. `false`: nothing was done.
    fn write_in_one_go(&self, writing: &mut [Writing<'_>], lot: &Lot, deadline: Instant) -> bool {
        let handle_of = |&(object, at): &(usize, usize)| writing[object].granted.handles[at];
        if lot.slots.is_empty() || lot.slots.iter().any(|slot| handle_of(slot).stripe_len == 0) {
            return false;
        }
        let pages = |slot: &(usize, usize)| vec![0; handle_of(slot).stripe_len.div_ceil(PAGE_BYTES) as usize];
        let mut digests: Vec<Vec<u64>> = lot.slots.iter().map(pages).collect();
        let op = |(slot, digests): (&(usize, usize), _)| put_op(&writing[slot.0], slot.1, Some(digests));
        let mut ops: Vec<Op<'_>> = lot.slots.iter().zip(&mut digests).map(op).collect();
        let begin = begin_body(self.cluster.tenant().as_str(), writing, &lot.slots);
        let mut roots: Vec<u64> = Vec::new();
        let done = put_in_one_go(
            &*lot.link,
            begin,
            &mut ops,
            |found| {
                roots = found.iter().map(|root| root.unwrap_or(0)).collect();
                commit_body(writing, &lot.slots, |index| roots[index])
            },
            deadline,
        );
        drop(ops);
        let node = lot.node.info.node;
        let fail_all = |writing: &mut [Writing<'_>], source: TransferError| {
            if is_of_connection(&source) {
                lot.node.suspect();
            }
            for &(object, at) in &lot.slots {
                writing[object].fail(at, StoreError::Node { node, source: source.clone() });
            }
        };
        let (begun, outcomes, committed) = match done {
            OneGo::NotTried => return false,
            OneGo::Failed(source) => {
                fail_all(writing, source);
                return true;
            }
            OneGo::Done { begun, outcomes, committed } => (begun, outcomes, committed),
        };
        let slots = lot.slots.len();
        let codes = slot_codes(begun, slots).and_then(|begun| Ok((begun, slot_codes(committed, slots)?)));
        let (begun, committed) = match codes {
            Ok(codes) => codes,
            Err(source) => {
                fail_all(writing, source);
                return true;
            }
        };
        for (index, &(object, at)) in lot.slots.iter().enumerate() {
            let stripe = usize::from(writing[object].granted.handles[at].stripe_index);
            writing[object].roots[stripe] = Some(roots[index]);
            // The first that failed says why; those behind it only followed.
            match begun[index].or(outcomes[index].err()).or(committed[index]) {
                Some(code) => writing[object].fail(at, StoreError::refused(code)),
                None => writing[object].outcomes[at] = Some(Ok(())),
            }
        }
        true
    }

    /// The first of the three steps alone: bytes go another way.
    pub(crate) fn begin_only(&self, writing: &mut [Writing<'_>], deadline: Instant) {
        let mut lots = self.lots(writing, deadline);
        self.begin(writing, &mut lots, deadline);
    }

    /// As [`Inner::write`], without the end: handles that are well have no outcome yet.
    pub(crate) fn write_unpublished(&self, writing: &mut [Writing<'_>], deadline: Instant) {
        let mut lots = self.lots(writing, deadline);
        self.begin(writing, &mut lots, deadline);
        self.send(writing, &lots, deadline);
    }

    /// The end of [`Inner::write_unpublished`].
    pub(crate) fn publish(&self, writing: &mut [Writing<'_>], deadline: Instant) {
        let mut lots = self.lots(writing, deadline);
        self.commit(writing, &mut lots, deadline);
    }

    /// Handles by node. Those of a node that cannot be reached have failed.
    fn lots(&self, writing: &mut [Writing<'_>], deadline: Instant) -> Vec<Lot> {
        let mut lots: Vec<Lot> = Vec::new();
        let mut failed: Vec<(NodeId, StoreError)> = Vec::new();
        for (object, writing) in writing.iter_mut().enumerate() {
            for at in 0..writing.granted.handles.len() {
                if writing.outcomes[at].is_some() {
                    continue;
                }
                let node = writing.granted.handles[at].node;
                if let Some(lot) = lots.iter_mut().find(|lot| lot.node.info.node == node) {
                    lot.slots.push((object, at));
                    continue;
                }
                if let Some((_, error)) = failed.iter().find(|(other, _)| *other == node) {
                    writing.fail(at, error.clone());
                    continue;
                }
                match self.reach(node, deadline) {
                    Ok((node, link)) => lots.push(Lot { node, link, slots: vec![(object, at)] }),
                    Err(error) => {
                        writing.fail(at, error.clone());
                        failed.push((node, error));
                    }
                }
            }
        }
        lots
    }

    /// Opens the slots. Those that were refused leave their lot.
    fn begin(&self, writing: &mut [Writing<'_>], lots: &mut [Lot], deadline: Instant) {
        let tenant = self.cluster.tenant();
        let bodies = lots.iter().map(|lot| begin_body(tenant.as_str(), writing, &lot.slots)).collect();
        self.call_all(writing, lots, FrameKind::Begin, bodies, deadline);
    }

    /// Moves the bytes.
    fn send(&self, writing: &mut [Writing<'_>], lots: &[Lot], deadline: Instant) {
        // One replica of each stripe is digested on the way; its root is that of all replicas.
        let mut digests: Vec<Vec<Vec<u64>>> = Vec::with_capacity(lots.len());
        let mut digested: HashSet<(usize, usize)> = HashSet::new();
        for lot in lots {
            let mut of_lot = Vec::with_capacity(lot.slots.len());
            for &(object, at) in &lot.slots {
                let handle = &writing[object].granted.handles[at];
                let stripe = (object, usize::from(handle.stripe_index));
                let is_open = writing[object].outcomes[at].is_none();
                let first = is_open && writing[object].roots[stripe.1].is_none() && digested.insert(stripe);
                let pages = if first { handle.stripe_len.div_ceil(PAGE_BYTES) as usize } else { 0 };
                of_lot.push(vec![0u64; pages]);
            }
            digests.push(of_lot);
        }
        let mut sent: Vec<Vec<(usize, usize)>> = Vec::with_capacity(lots.len());
        let mut batches: Vec<Batch<'_, '_>> = Vec::with_capacity(lots.len());
        for (lot, digests) in lots.iter().zip(&mut digests) {
            let (mut ops, mut slots) = (Vec::new(), Vec::new());
            for (&(object, at), digests) in lot.slots.iter().zip(digests) {
                let writing = &writing[object];
                // Nothing has to be sent for an empty object.
                if writing.outcomes[at].is_none() && writing.granted.handles[at].stripe_len > 0 {
                    let wanted = !digests.is_empty();
                    ops.push(put_op(writing, at, wanted.then_some(digests)));
                    slots.push((object, at));
                }
            }
            batches.push(Batch::new(&*lot.link, ops));
            sent.push(slots);
        }
        run_together(&mut batches, deadline);
        let mut fates: Vec<(usize, usize, Result<(), StoreError>)> = Vec::new();
        for ((lot, batch), slots) in lots.iter().zip(&batches).zip(&sent) {
            let node = lot.node.info.node;
            for (&(object, at), op) in slots.iter().zip(&batch.ops) {
                let result = match (op.outcome(), &batch.result) {
                    (Some(Ok(())), _) => Ok(()),
                    (Some(Err(code)), _) => Err(StoreError::refused(code)),
                    (None, Some(Err(source))) => Err(StoreError::Node { node, source: source.clone() }),
                    (None, _) => Err(StoreError::refused(ErrorCode::Internal)),
                };
                fates.push((object, at, result));
            }
            if let Some(Err(source)) = &batch.result
                && is_of_connection(source)
            {
                lot.node.suspect();
            }
        }
        drop(batches);
        let well: HashSet<(usize, usize)> =
            fates.iter().filter(|(.., result)| result.is_ok()).map(|&(object, at, _)| (object, at)).collect();
        for (lot, digests) in lots.iter().zip(&digests) {
            for (&(object, at), digests) in lot.slots.iter().zip(digests) {
                let writing = &mut writing[object];
                let handle = writing.granted.handles[at];
                let entry = writing.granted.object;
                let empty = handle.stripe_len == 0 && writing.outcomes[at].is_none();
                if empty || well.contains(&(object, at)) && !digests.is_empty() {
                    let context = digest_context(entry.id, entry.epoch, &handle);
                    let root = context.root_of(digests.iter().copied());
                    writing.roots[usize::from(handle.stripe_index)] = Some(root);
                }
            }
        }
        for (object, at, result) in fates {
            if let Err(error) = result {
                writing[object].fail(at, error);
            }
        }
        // Where the replica that was to be digested failed, another one may have made it.
        for writing in writing.iter_mut() {
            for at in 0..writing.granted.handles.len() {
                let handle = writing.granted.handles[at];
                let stripe = usize::from(handle.stripe_index);
                if writing.outcomes[at].is_none() && writing.roots[stripe].is_none() {
                    let entry = writing.granted.object;
                    let context = digest_context(entry.id, entry.epoch, &handle);
                    let parts = cut(writing.parts, handle.stripe_offset, handle.stripe_len);
                    writing.roots[stripe] = Some(root_of_parts(&context, &parts));
                }
            }
        }
    }

    /// Publishes what was written.
    fn commit(&self, writing: &mut [Writing<'_>], lots: &mut [Lot], deadline: Instant) {
        for lot in lots.iter_mut() {
            lot.slots.retain(|&(object, at)| writing[object].outcomes[at].is_none());
        }
        let body = |lot: &Lot| {
            commit_body(writing, &lot.slots, |index| {
                let (object, at) = lot.slots[index];
                let stripe = writing[object].granted.handles[at].stripe_index;
                writing[object].roots[usize::from(stripe)].unwrap_or(0)
            })
        };
        let bodies = lots.iter().map(body).collect();
        self.call_all(writing, lots, FrameKind::Commit, bodies, deadline);
        for lot in lots.iter() {
            for &(object, at) in &lot.slots {
                writing[object].outcomes[at].get_or_insert(Ok(()));
            }
        }
    }

    /// One call to each node at the same time. Slots that were refused get their outcome and leave their lot.
    fn call_all(
        &self,
        writing: &mut [Writing<'_>],
        lots: &mut [Lot],
        kind: FrameKind,
        bodies: Vec<Vec<u8>>,
        deadline: Instant,
    ) {
        let last = lots.iter().rposition(|lot| !lot.slots.is_empty());
        let mut calls: Vec<_> = lots
            .iter()
            .zip(bodies)
            .enumerate()
            .map(|(at, (lot, body))| {
                let waiting = if Some(at) == last { Waiting::Here } else { Waiting::Elsewhere };
                (!lot.slots.is_empty()).then(|| lot.link.start_call(kind, body, deadline, waiting))
            })
            .collect();
        for (lot, call) in lots.iter_mut().zip(&mut calls).rev() {
            let Some(call) = call else { continue };
            let result = call.wait().and_then(|()| slot_codes(call.take_reply(), lot.slots.len()));
            let node = lot.node.info.node;
            match result {
                Ok(codes) => {
                    for (&(object, at), code) in lot.slots.iter().zip(&codes) {
                        if let Some(code) = code {
                            writing[object].fail(at, StoreError::refused(*code));
                        }
                    }
                }
                Err(source) => {
                    if is_of_connection(&source) {
                        lot.node.suspect();
                    }
                    for &(object, at) in &lot.slots {
                        writing[object].fail(at, StoreError::Node { node, source: source.clone() });
                    }
                }
            }
            lot.slots.retain(|&(object, at)| writing[object].outcomes[at].is_none());
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

/// The slots of a lot, object by object: they are in this order.
fn by_object(slots: &[(usize, usize)]) -> impl Iterator<Item = &[(usize, usize)]> {
    slots.chunk_by(|a, b| a.0 == b.0)
}

fn begin_body(tenant: &str, writing: &[Writing<'_>], slots: &[(usize, usize)]) -> Vec<u8> {
    let mut keys = PackedKeysBuilder::new();
    let mut list = ObjectListBuilder::with_capacity(ListKind::Begin, slots.len());
    for of_object in by_object(slots) {
        let writing = &writing[of_object[0].0];
        let handles: Vec<Handle> = of_object.iter().map(|&(_, at)| writing.granted.handles[at]).collect();
        keys.push(writing.key).expect("as many as a PutStart had");
        list.push(writing.granted.object, &handles, writing.attributes).expect("part of the master's answer");
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

/// The operation that fills one slot.
fn put_op<'m>(writing: &Writing<'m>, at: usize, digests: Option<&'m mut Vec<u64>>) -> Op<'m> {
    let Granted { object, handles } = &writing.granted;
    let handle = &handles[at];
    let parts = cut(writing.parts, handle.stripe_offset, handle.stripe_len);
    let op = Op::put_parts(Target::of(handle, object.id, object.epoch), 0, parts);
    let Some(digests) = digests else { return op };
    let context = digest_context(object.id, object.epoch, handle);
    op.digested(context, digests).expect("a whole stripe is whole pages")
}

/// `root_of` gives the root for each place in `slots`.
fn commit_body(writing: &[Writing<'_>], slots: &[(usize, usize)], root_of: impl Fn(usize) -> u64) -> Vec<u8> {
    let mut entries = Vec::with_capacity(slots.len() * CommitEntry::BYTES);
    for (index, &(object, at)) in slots.iter().enumerate() {
        let Granted { object: entry, handles } = &writing[object].granted;
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

/// The parts that make up a range.
fn cut<'a>(parts: &[&'a [u8]], offset: u64, len: u64) -> Vec<&'a [u8]> {
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

/// The root of bytes that lie in several places.
fn root_of_parts(context: &DigestContext, parts: &[&[u8]]) -> u64 {
    let pages = context.len.div_ceil(PAGE_BYTES);
    context.root_of((0..pages).map(|page| {
        let start = page * PAGE_BYTES;
        context.page_in_parts(page, cut(parts, start, (context.len - start).min(PAGE_BYTES)))
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_types::{Epoch, ObjectId};

    #[test]
    fn a_range_is_cut_out_of_its_parts() {
        let parts: [&[u8]; 4] = [b"abc", b"", b"defg", b"h"];
        let joined = |offset, len| cut(&parts, offset, len).concat();
        assert_eq!(joined(0, 8), b"abcdefgh");
        assert_eq!(joined(2, 3), b"cde");
        assert_eq!(joined(7, 1), b"h");
        assert_eq!(joined(3, 0), b"");
    }

    #[test]
    fn the_root_of_parts_is_the_root_of_the_whole() {
        let whole: Vec<u8> = (0..3 * PAGE_BYTES as usize + 77).map(|at| (at * 31) as u8).collect();
        let version = Epoch::from_bits(9).unwrap();
        let context = DigestContext { id: ObjectId([3; 16]), version, stripe: 0, len: whole.len() as u64 };
        let (a, rest) = whole.split_at(100_000);
        let (b, c) = rest.split_at(300_000);
        assert_eq!(root_of_parts(&context, &[a, b, c]), context.payload(&whole, |_| ()));
    }
}
