//! Group handoff: sent before ownership changes, kept by the receiver until it hosts the group.

use std::collections::BTreeMap;
use std::time::Duration;

use moontide_meta::{ExpectedSegment, GroupHandoff, HandoffObject, NodeKey, StripeLocation, StripeRange};
use moontide_proto::convert::{
    CallerId, HandoffGroupRequest, ObjectListBuilder, ObjectListKind, RequestContext, Wire,
};
use moontide_proto::limits::{HANDOFF_SEGMENTS_MAX, HANDOFF_TOMBSTONES_MAX};
use moontide_proto::v1::master_peers_client::MasterPeersClient;
use moontide_proto::{
    CapabilityKey, Handle, HandleFlags, ObjectEntry, ObjectFlags, PackedBuilder, PackedKeysBuilder, Token,
    VersionedId, v1,
};
use moontide_tasks::channel;
use moontide_types::limits::{BATCH_KEYS_MAX, REQUEST_BYTES_MAX};
use moontide_types::record::Attributes;
use moontide_types::{
    Clock, ErrorCode, GroupId, Key, MapVersion, Medium, MonoTime, NodeId, SegmentId, SystemClock, Tenant,
    TenantGeneration, Term,
};
use parking_lot::Mutex;

use super::state::GroupTransfer;
use crate::service::{Service, handle};

/// Timeout of one chunk.
const CHUNK_TIMEOUT: Duration = Duration::from_secs(2);

/// Bytes of chunks in flight to the new owner.
const HANDOFF_WINDOW_BYTES: u32 = 1 << 20;

/// Lifetime of a received handoff. After this time it is useless: the nodes have reported to another master.
const HANDOFF_TTL: Duration = Duration::from_secs(30);

/// Maximum number of handles of a chunk; one object may have some thousands.
const CHUNK_HANDLES_MAX: usize = 16_384;

/// Received handoffs of groups that this master does not host yet.
#[derive(Debug, Default)]
pub(crate) struct HandoffInbox(Mutex<BTreeMap<GroupId, PendingHandoff>>);

#[derive(Debug)]
struct PendingHandoff {
    handoff: GroupHandoff,
    next_chunk: u32,
    complete: bool,
    started: MonoTime,
}

impl HandoffInbox {
    /// Adds one chunk. Chunks must arrive in order; chunk 0 starts the handoff of the group again.
    pub(crate) fn add(&self, request: &HandoffGroupRequest<'_>) -> Result<(), ErrorCode> {
        let mut all = self.0.lock();
        let now = SystemClock.now();
        all.retain(|_, pending| now.since(pending.started) < HANDOFF_TTL);
        if request.chunk == 0 {
            let handoff = GroupHandoff { term: request.context.term, ..GroupHandoff::default() };
            let pending = PendingHandoff { handoff, next_chunk: 0, complete: false, started: now };
            all.insert(request.group, pending);
        }
        let pending = all.get_mut(&request.group).ok_or(ErrorCode::NotFound)?;
        if pending.next_chunk != request.chunk || pending.complete {
            return Err(ErrorCode::InvalidArgument);
        }
        let mut sections = request.replicas.attributes.as_ref().map(|sections| sections.iter());
        for (key, (object, handles)) in request.keys.iter().zip(request.replicas.list.iter()) {
            let attributes = sections.as_mut().and_then(|s| s.next()).map(|s| s.decode()).unwrap_or_default();
            pending.handoff.objects.push(HandoffObject {
                id: object.id,
                key: key.as_bytes().into(),
                epoch: object.epoch,
                object_len: object.object_len,
                root: object.root,
                digestless: object.flags.contains(ObjectFlags::DIGESTLESS),
                pin: attributes.pin,
                expires: attributes.expires,
                replicas: object.replica_count,
                locations: handles.iter().map(location).collect(),
            });
        }
        pending.handoff.tombstones.extend(request.tombstones.iter().map(|v| (v.id, v.epoch)));
        pending.handoff.segments.extend(request.segments.iter().map(|known| ExpectedSegment {
            node: known.node,
            segment: known.segment,
            generation: known.generation,
            stale: known.stale,
        }));
        if request.chunk == 0 {
            pending.handoff.segments_complete = request.segments_complete;
            pending.handoff.disks_complete = request.disks_complete;
            pending.handoff.exclusion_needed = request.exclusion_needed;
            let key = |(node, key): &(NodeId, CapabilityKey)| NodeKey { node: *node, key: *key.as_bytes() };
            pending.handoff.node_keys = request.node_keys.iter().map(key).collect();
        }
        pending.next_chunk += 1;
        pending.complete = request.is_last;
        Ok(())
    }

    /// Discards the handoff of a group: it is outdated.
    pub(crate) fn discard(&self, group: GroupId) {
        self.0.lock().remove(&group);
    }

    /// Removes and returns the handoff of a group that is hosted from now on, if it is complete and of the previous
    /// term.
    pub(crate) fn take(&self, group: GroupId, previous: Term) -> Option<GroupHandoff> {
        let pending = self.0.lock().remove(&group)?;
        let fresh = SystemClock.now().since(pending.started) < HANDOFF_TTL;
        (pending.complete && fresh && pending.handoff.term == previous).then_some(pending.handoff)
    }
}

/// Sends a handoff to the new owner. The error is the reason.
pub(crate) async fn send(
    service: &Service,
    transfer: &GroupTransfer,
    handoff: GroupHandoff,
) -> Result<(), String> {
    let cluster = service.cluster();
    let address = &transfer.addresses.grpc;
    let channel = channel::connect(address, CHUNK_TIMEOUT, HANDOFF_WINDOW_BYTES, service.credentials())
        .await
        .map_err(|e| e.to_string())?;
    let mut new_owner = MasterPeersClient::new(channel).max_encoding_message_size(REQUEST_BYTES_MAX);
    for chunk in handoff_chunks(cluster, transfer.group, &handoff) {
        let response = tokio::time::timeout(CHUNK_TIMEOUT, new_owner.handoff_group(chunk)).await;
        let response = response.map_err(|_| "timeout")?.map_err(|status| status.to_string())?;
        let code = response.into_inner().context.map_or(ErrorCode::Internal as u32, |context| context.code);
        if code != 0 {
            return Err(format!("refused with {:?}", ErrorCode::try_from(code)));
        }
    }
    Ok(())
}

/// Splits a handoff into chunks that fit into a message. At least one; `is_last` is set in the last one.
fn handoff_chunks(cluster: u64, group: GroupId, handoff: &GroupHandoff) -> Vec<v1::HandoffGroupRequest> {
    let mut chunks: Vec<v1::HandoffGroupRequest> = vec![];
    // Segments that do not fit are left to the reports; then the list is not complete.
    let all_known = handoff.segments.len() <= HANDOFF_SEGMENTS_MAX;
    let known = |expected: &ExpectedSegment| v1::KnownSegment {
        node: expected.node.0,
        segment: expected.segment.0,
        generation: expected.generation.0,
        stale: expected.stale,
    };
    let segments: Vec<_> = handoff.segments.iter().take(HANDOFF_SEGMENTS_MAX).map(known).collect();
    // A node without a key here is unreachable for readers until it has mounted its segments at the new owner.
    let node_key = |of: &NodeKey| v1::HandoffKey { node: of.node.0, key: of.key.to_vec().into() };
    let node_keys: Vec<_> = handoff.node_keys.iter().take(HANDOFF_SEGMENTS_MAX).map(node_key).collect();
    let (mut objects, mut tombstones) = (&handoff.objects[..], &handoff.tombstones[..]);
    while chunks.is_empty() || !objects.is_empty() || !tombstones.is_empty() {
        let mut keys = PackedKeysBuilder::new();
        let mut list = ObjectListBuilder::with_capacity(ObjectListKind::Response, 0);
        let mut handles = 0;
        while let Some((object, rest)) = objects.split_first() {
            if keys.len() == BATCH_KEYS_MAX
                || handles + object.locations.len() > CHUNK_HANDLES_MAX && handles > 0
            {
                break;
            }
            handles += object.locations.len();
            objects = rest;
            // Objects that cannot be encoded are left to the reports.
            if let Ok(key) = Key::new(&object.key)
                && push(&mut list, object).is_some()
            {
                keys.push(key).expect("a chunk is far below the limit of a packed array");
            }
        }
        let (now, later) = tombstones.split_at(tombstones.len().min(HANDOFF_TOMBSTONES_MAX));
        tombstones = later;
        let versions = now.iter().map(|&(id, epoch)| VersionedId { id, epoch });
        let fields = list.finish();
        let is_first = chunks.is_empty();
        chunks.push(v1::HandoffGroupRequest {
            context: Some(context(handoff.term).to_wire()),
            cluster,
            group: group.0.into(),
            chunk: chunks.len() as u32, // limited by the memory of a master
            is_last: false,
            keys: keys.finish().into(),
            replicas: Some(v1::GetReplicaListResponse {
                context: None,
                objects: fields.objects,
                handles: fields.handles,
                attributes: fields.attributes,
            }),
            tombstones: versions.collect::<PackedBuilder<_>>().finish().into(),
            segments: if is_first { segments.clone() } else { vec![] },
            segments_complete: is_first && all_known && handoff.segments_complete,
            disks_complete: is_first && all_known && handoff.disks_complete,
            exclusion_needed: is_first && (!all_known || handoff.exclusion_needed),
            node_keys: if is_first { node_keys.clone() } else { vec![] },
        });
    }
    chunks.last_mut().expect("there is at least one chunk").is_last = true;
    chunks
}

/// Creates the context of a chunk. Its term is that of the sender: only the direct successor of this term uses the
/// handoff.
fn context(term: Term) -> RequestContext<'static> {
    RequestContext {
        tenant: Tenant::DEFAULT,
        group: None,
        map_version: MapVersion(0),
        term,
        caller: CallerId(0),
        session: None,
        timeout_ms: CHUNK_TIMEOUT.as_millis() as u32,
        token: Token::NONE,
    }
}

fn push(list: &mut ObjectListBuilder, object: &HandoffObject) -> Option<()> {
    let flags = if object.digestless { ObjectFlags::DIGESTLESS } else { ObjectFlags::NONE };
    let entry = ObjectEntry {
        code: None,
        flags,
        valid_ms: 0,
        id: object.id,
        epoch: object.epoch,
        object_len: object.object_len,
        root: object.root,
        first_handle: 0, // set by `push`
        handle_count: u16::try_from(object.locations.len()).ok()?,
        replica_count: object.replicas,
        format: 0,
        tenant_generation: TenantGeneration(0),
        id_key: 0,
    };
    let handles: Vec<Handle> =
        object.locations.iter().map(|location| handle(location, Term::ZERO, object.digestless)).collect();
    let mut section = vec![];
    Attributes { pin: object.pin, expires: object.expires, ..Attributes::default() }.encode(&mut section);
    list.push(entry, &handles, &section).ok()
}

fn location(handle: Handle) -> StripeLocation {
    StripeLocation {
        node: handle.node,
        segment: if handle.medium == Medium::Disk { SegmentId::DISK } else { handle.segment },
        generation: handle.generation,
        slot: handle.slot,
        extent: handle.extent,
        medium: handle.medium,
        stripe: StripeRange {
            index: handle.stripe_index,
            count: handle.stripe_count,
            offset: handle.stripe_offset,
            len: handle.stripe_len,
        },
        root: handle.stripe_root,
        replica: handle.replica,
        verify: handle.flags.contains(HandleFlags::VERIFY),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_types::limits::PAGE_BYTES;
    use moontide_types::record::PinClass;
    use moontide_types::{Epoch, Extent, Generation, ObjectId, SlotId, UnixMillis};

    fn sample_object(number: u32, stripes: u16) -> HandoffObject {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&number.to_le_bytes());
        let len = PAGE_BYTES * u64::from(stripes);
        let location = |replica: u8, index: u16| StripeLocation {
            node: NodeId(3 + u64::from(replica)),
            segment: SegmentId(7),
            generation: Generation(9),
            slot: SlotId(number),
            extent: Extent { start: number * 8, units: 520 },
            medium: Medium::Memory,
            stripe: StripeRange {
                index,
                count: stripes,
                offset: PAGE_BYTES * u64::from(index),
                len: PAGE_BYTES,
            },
            root: 5,
            replica,
            verify: number.is_multiple_of(2),
        };
        HandoffObject {
            id: ObjectId(id),
            key: format!("key {number}").into_bytes().into(),
            epoch: Epoch::new(Term::new(4).unwrap(), u64::from(number) + 1).unwrap(),
            object_len: len,
            root: 77,
            digestless: false,
            pin: [PinClass::None, PinClass::Soft, PinClass::Hard][number as usize % 3],
            expires: number.is_multiple_of(5).then_some(UnixMillis(1_900_000_000_000)),
            replicas: 2,
            locations: (0..2).flat_map(|replica| (0..stripes).map(move |at| location(replica, at))).collect(),
        }
    }

    #[test]
    fn handoff_chunks_round_trip() {
        let tombstones =
            (0..70_000u32).map(|n| (sample_object(n, 1).id, sample_object(n, 1).epoch)).collect();
        let objects = (0..9_000).map(|n| sample_object(n, 1 + (n % 2) as u16)).collect();
        let segments = (1..900).map(|n| ExpectedSegment {
            node: NodeId(n),
            segment: SegmentId(n as u32),
            generation: Generation(n),
            stale: n % 7 == 0,
        });
        let (term, segments) = (Term::new(4).unwrap(), segments.collect());
        let full = GroupHandoff {
            term,
            objects,
            tombstones,
            segments,
            segments_complete: true,
            disks_complete: true,
            exclusion_needed: true,
            node_keys: (1..900).map(|n| NodeKey { node: NodeId(n), key: [n as u8; 32] }).collect(),
        };
        for handoff in [GroupHandoff::default(), full] {
            let (group, inbox) = (GroupId(11), HandoffInbox::default());
            let chunks = handoff_chunks(1, group, &handoff);
            assert!(chunks.len() >= handoff.objects.len() / BATCH_KEYS_MAX);
            for chunk in &chunks {
                inbox.add(&HandoffGroupRequest::from_wire(chunk).unwrap()).unwrap();
            }
            let term = handoff.term;
            assert_eq!(inbox.take(group, term), Some(handoff));
            assert_eq!(inbox.take(group, term), None, "a handoff is used once");
        }
    }

    #[test]
    fn incomplete_handoff_is_not_used() {
        let objects = (0..5_000).map(|n| sample_object(n, 1)).collect();
        let handoff = GroupHandoff { objects, ..GroupHandoff::default() };
        let (group, inbox) = (GroupId(0), HandoffInbox::default());
        let chunks = handoff_chunks(1, group, &handoff);
        inbox.add(&HandoffGroupRequest::from_wire(&chunks[0]).unwrap()).unwrap();
        assert_eq!(inbox.take(group, handoff.term), None);
        assert_eq!(inbox.add(&HandoffGroupRequest::from_wire(&chunks[1]).unwrap()), Err(ErrorCode::NotFound));
    }

    #[test]
    fn handoff_is_used_only_by_direct_successor() {
        let handoff = GroupHandoff { term: Term::new(4).unwrap(), ..GroupHandoff::default() };
        let (group, inbox) = (GroupId(0), HandoffInbox::default());
        for chunk in &handoff_chunks(1, group, &handoff) {
            inbox.add(&HandoffGroupRequest::from_wire(chunk).unwrap()).unwrap();
        }
        assert_eq!(inbox.take(group, Term::new(5).unwrap()), None, "another master owned it since");
    }
}
