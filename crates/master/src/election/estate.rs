//! What a master hands to another one with a group: sent before the group is given, kept until it is hosted.

use std::collections::BTreeMap;
use std::time::Duration;

use moontide_meta::{ExpectedSegment, Heirloom, Inheritance, Medium as MetaMedium, PlaceView, StripeView};
use moontide_proto::convert::{Bequest, CallerId, ListKind, ObjectListBuilder, RequestContext, Wire};
use moontide_proto::limits::{BEQUEST_SEGMENTS_MAX, BEQUEST_TOMBSTONES_MAX};
use moontide_proto::v1::master_peers_client::MasterPeersClient;
use moontide_proto::{
    Handle, HandleFlags, Medium, ObjectEntry, ObjectFlags, PackedBuilder, PackedKeysBuilder, Token,
    VersionedId, v1,
};
use moontide_types::bounds::{BATCH_KEYS_MAX, REQUEST_BYTES_MAX};
use moontide_types::record::Attributes;
use moontide_types::{
    Clock, ErrorCode, GroupId, Key, MapVersion, MonoTime, SegmentId, SystemClock, Tenant, TenantGeneration,
    Term,
};
use parking_lot::Mutex;
use tonic::transport::Endpoint;

use super::candidate::Gift;
use crate::service::handle;

/// How long one part may take to be taken over.
const PART_MAX: Duration = Duration::from_secs(2);

/// An estate that nobody has hosted after this time is of no use: its nodes have reported to somebody else.
const KEPT_MAX: Duration = Duration::from_secs(30);

/// Handles of one part at most; one object may have some thousands.
const PART_HANDLES: usize = 16_384;

/// What was handed to this master, and is not hosted yet.
#[derive(Debug, Default)]
pub(crate) struct Estates(Mutex<BTreeMap<GroupId, Estate>>);

#[derive(Debug)]
struct Estate {
    inheritance: Inheritance,
    /// The part that comes next.
    next: u32,
    complete: bool,
    begun: MonoTime,
}

impl Estates {
    /// Takes one part.
    pub(crate) fn add(&self, bequest: &Bequest<'_>) -> Result<(), ErrorCode> {
        let mut estates = self.0.lock();
        let now = SystemClock.now();
        estates.retain(|_, estate| now.since(estate.begun) < KEPT_MAX);
        if bequest.part == 0 {
            let inheritance = Inheritance { term: bequest.context.term, ..Inheritance::default() };
            estates.insert(bequest.group, Estate { inheritance, next: 0, complete: false, begun: now });
        }
        let estate = estates.get_mut(&bequest.group).ok_or(ErrorCode::NotFound)?;
        if estate.next != bequest.part || estate.complete {
            return Err(ErrorCode::InvalidArgument);
        }
        let mut sections = bequest.replicas.attributes.as_ref().map(|sections| sections.iter());
        for (key, (object, handles)) in bequest.keys.iter().zip(bequest.replicas.list.iter()) {
            let attributes = sections.as_mut().and_then(|s| s.next()).map(|s| s.decode()).unwrap_or_default();
            estate.inheritance.objects.push(Heirloom {
                id: object.id,
                key: key.as_bytes().into(),
                epoch: object.epoch,
                object_len: object.object_len,
                root: object.root,
                digestless: object.flags.contains(ObjectFlags::DIGESTLESS),
                pin: attributes.pin,
                expires: attributes.expires,
                replicas: object.replica_count,
                places: handles.iter().map(place).collect(),
            });
        }
        estate.inheritance.tombstones.extend(bequest.tombstones.iter().map(|v| (v.id, v.epoch)));
        estate.inheritance.segments.extend(bequest.segments.iter().map(|known| ExpectedSegment {
            node: known.node,
            segment: known.segment,
            generation: known.generation,
            late: known.late,
        }));
        if bequest.part == 0 {
            estate.inheritance.all_segments = bequest.all_segments;
            estate.inheritance.all_disks = bequest.all_disks;
        }
        estate.next += 1;
        estate.complete = bequest.last;
        Ok(())
    }

    /// What there is of a group is out of date.
    pub(crate) fn forget(&self, group: GroupId) {
        self.0.lock().remove(&group);
    }

    /// What there is of a group that is hosted from now on, of the term before.
    pub(crate) fn take(&self, group: GroupId, previous: Term) -> Option<Inheritance> {
        let estate = self.0.lock().remove(&group)?;
        let fresh = SystemClock.now().since(estate.begun) < KEPT_MAX;
        (estate.complete && fresh && estate.inheritance.term == previous).then_some(estate.inheritance)
    }
}

/// Sends everything to the heir. The error says why it has not all of it.
pub(crate) async fn send(cluster: u64, gift: &Gift, estate: Inheritance) -> Result<(), String> {
    let endpoint =
        Endpoint::from_shared(format!("http://{}", gift.addresses.grpc)).map_err(|e| e.to_string())?;
    let channel =
        endpoint.tcp_nodelay(true).connect_timeout(PART_MAX).connect().await.map_err(|e| e.to_string())?;
    let mut heir = MasterPeersClient::new(channel).max_encoding_message_size(REQUEST_BYTES_MAX);
    for bequest in parts(cluster, gift.group, &estate) {
        let answer = tokio::time::timeout(PART_MAX, heir.bequeath(bequest)).await;
        let answer =
            answer.map_err(|_| "it does not answer in time")?.map_err(|status| status.to_string())?;
        let code = answer.into_inner().context.map_or(ErrorCode::Internal as u32, |context| context.code);
        if code != 0 {
            return Err(format!("it refuses: {:?}", ErrorCode::try_from(code)));
        }
    }
    Ok(())
}

/// An estate in parts, each of a size that can be sent. At least one, and the last one says so.
fn parts(cluster: u64, group: GroupId, estate: &Inheritance) -> Vec<v1::Bequest> {
    let mut parts: Vec<v1::Bequest> = vec![];
    // More than fit are left to the reports, and so is the certainty that there are no others.
    let all_known = estate.segments.len() <= BEQUEST_SEGMENTS_MAX;
    let known = |expected: &ExpectedSegment| v1::KnownSegment {
        node: expected.node.0,
        segment: expected.segment.0,
        generation: expected.generation.0,
        late: expected.late,
    };
    let segments: Vec<_> = estate.segments.iter().take(BEQUEST_SEGMENTS_MAX).map(known).collect();
    let (mut objects, mut tombstones) = (&estate.objects[..], &estate.tombstones[..]);
    while parts.is_empty() || !objects.is_empty() || !tombstones.is_empty() {
        let mut keys = PackedKeysBuilder::new();
        let mut list = ObjectListBuilder::with_capacity(ListKind::Answer, 0);
        let mut handles = 0;
        while let Some((object, rest)) = objects.split_first() {
            if keys.len() == BATCH_KEYS_MAX || handles + object.places.len() > PART_HANDLES && handles > 0 {
                break;
            }
            handles += object.places.len();
            objects = rest;
            // What cannot be said is left to the reports.
            if let Ok(key) = Key::new(&object.key)
                && push(&mut list, object).is_some()
            {
                keys.push(key).expect("a part is far below what a packed array may be");
            }
        }
        let (now, later) = tombstones.split_at(tombstones.len().min(BEQUEST_TOMBSTONES_MAX));
        tombstones = later;
        let versions = now.iter().map(|&(id, epoch)| VersionedId { id, epoch });
        let fields = list.finish();
        let is_first = parts.is_empty();
        parts.push(v1::Bequest {
            context: Some(context(estate.term).to_wire()),
            cluster,
            group: group.0.into(),
            part: parts.len() as u32, // bounded by the memory of a master
            last: false,
            keys: keys.finish().into(),
            replicas: Some(v1::GetReplicaListResponse {
                context: None,
                objects: fields.objects,
                handles: fields.handles,
                attributes: fields.attributes,
            }),
            tombstones: versions.collect::<PackedBuilder<_>>().finish().into(),
            segments: if is_first { segments.clone() } else { vec![] },
            all_segments: is_first && all_known && estate.all_segments,
            all_disks: is_first && all_known && estate.all_disks,
        });
    }
    parts.last_mut().expect("there is one").last = true;
    parts
}

/// It says whose books these are: they are of use to whoever follows that term, and to nobody else.
fn context(term: Term) -> RequestContext<'static> {
    RequestContext {
        tenant: Tenant::DEFAULT,
        group: None,
        map_version: MapVersion(0),
        term,
        caller: CallerId(0),
        session: None,
        deadline_ms: PART_MAX.as_millis() as u32,
        token: Token::NONE,
    }
}

fn push(list: &mut ObjectListBuilder, object: &Heirloom) -> Option<()> {
    let flags = if object.digestless { ObjectFlags::DIGESTLESS } else { ObjectFlags::NONE };
    let entry = ObjectEntry {
        code: None,
        flags,
        window_ms: 0,
        id: object.id,
        epoch: object.epoch,
        object_len: object.object_len,
        root: object.root,
        first_handle: 0, // the list's to say
        handle_count: u16::try_from(object.places.len()).ok()?,
        replica_count: object.replicas,
        form: 0,
        tenant_generation: TenantGeneration(0),
        id_key: 0,
    };
    let handles: Vec<Handle> =
        object.places.iter().map(|place| handle(place, Term::ZERO, object.digestless)).collect();
    let mut section = vec![];
    Attributes { pin: object.pin, expires: object.expires, ..Attributes::default() }.encode(&mut section);
    list.push(entry, &handles, &section).ok()
}

fn place(handle: Handle) -> PlaceView {
    let medium = match handle.medium {
        Medium::Memory => MetaMedium::Memory,
        Medium::Device => MetaMedium::Device,
        Medium::Disk => MetaMedium::Disk,
    };
    PlaceView {
        node: handle.node,
        segment: if medium == MetaMedium::Disk { SegmentId::DISK } else { handle.segment },
        generation: handle.generation,
        slot: handle.slot,
        extent: handle.extent,
        medium,
        stripe: StripeView {
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
    use moontide_types::bounds::PAGE_BYTES;
    use moontide_types::record::PinClass;
    use moontide_types::{Epoch, Extent, Generation, NodeId, ObjectId, SlotId, UnixMillis};

    fn heirloom(number: u32, stripes: u16) -> Heirloom {
        let mut id = [0; 16];
        id[..4].copy_from_slice(&number.to_le_bytes());
        let len = PAGE_BYTES * u64::from(stripes);
        let place = |replica: u8, index: u16| PlaceView {
            node: NodeId(3 + u64::from(replica)),
            segment: SegmentId(7),
            generation: Generation(9),
            slot: SlotId(number),
            extent: Extent { start: number * 8, units: 520 },
            medium: MetaMedium::Memory,
            stripe: StripeView {
                index,
                count: stripes,
                offset: PAGE_BYTES * u64::from(index),
                len: PAGE_BYTES,
            },
            root: 5,
            replica,
            verify: number.is_multiple_of(2),
        };
        Heirloom {
            id: ObjectId(id),
            key: format!("key {number}").into_bytes().into(),
            epoch: Epoch::new(Term::new(4).unwrap(), u64::from(number) + 1).unwrap(),
            object_len: len,
            root: 77,
            digestless: false,
            pin: [PinClass::None, PinClass::Soft, PinClass::Hard][number as usize % 3],
            expires: number.is_multiple_of(5).then_some(UnixMillis(1_900_000_000_000)),
            replicas: 2,
            places: (0..2).flat_map(|replica| (0..stripes).map(move |at| place(replica, at))).collect(),
        }
    }

    #[test]
    fn what_is_handed_over_arrives_as_it_was() {
        let tombstones = (0..70_000u32).map(|n| (heirloom(n, 1).id, heirloom(n, 1).epoch)).collect();
        let objects = (0..9_000).map(|n| heirloom(n, 1 + (n % 2) as u16)).collect();
        let segments = (1..900).map(|n| ExpectedSegment {
            node: NodeId(n),
            segment: SegmentId(n as u32),
            generation: Generation(n),
            late: n % 7 == 0,
        });
        let (term, segments) = (Term::new(4).unwrap(), segments.collect());
        let full = Inheritance { term, objects, tombstones, segments, all_segments: true, all_disks: true };
        for estate in [Inheritance::default(), full] {
            let (group, estates) = (GroupId(11), Estates::default());
            let parts = parts(1, group, &estate);
            assert!(parts.len() >= estate.objects.len() / BATCH_KEYS_MAX);
            for part in &parts {
                estates.add(&Bequest::from_wire(part).unwrap()).unwrap();
            }
            let term = estate.term;
            assert_eq!(estates.take(group, term), Some(estate));
            assert_eq!(estates.take(group, term), None, "it is inherited once");
        }
    }

    #[test]
    fn what_is_not_complete_is_not_inherited() {
        let objects = (0..5_000).map(|n| heirloom(n, 1)).collect();
        let estate = Inheritance { objects, ..Inheritance::default() };
        let (group, estates) = (GroupId(0), Estates::default());
        let parts = parts(1, group, &estate);
        estates.add(&Bequest::from_wire(&parts[0]).unwrap()).unwrap();
        assert_eq!(estates.take(group, estate.term), None);
        assert_eq!(estates.add(&Bequest::from_wire(&parts[1]).unwrap()), Err(ErrorCode::NotFound));
    }

    #[test]
    fn only_who_follows_the_giver_inherits() {
        let estate = Inheritance { term: Term::new(4).unwrap(), ..Inheritance::default() };
        let (group, estates) = (GroupId(0), Estates::default());
        for part in &parts(1, group, &estate) {
            estates.add(&Bequest::from_wire(part).unwrap()).unwrap();
        }
        assert_eq!(estates.take(group, Term::new(5).unwrap()), None, "somebody had it since");
    }
}
