//! Rotation of keys, and when a new one is used.

use std::num::NonZeroU16;
use std::sync::Arc;

use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{CopyPurpose, PackedKeysBuilder, PutEntry};
use moontide_types::limits::BATCH_KEYS_MAX;
use moontide_types::{Clock, Epoch, Generation, Key, ObjectId, SegmentId, SlotId, Term, UnixMillis};

use super::*;
use crate::service::ServiceConfig;
use crate::service::node_session::SessionStream;

const INTERVAL: Duration = Duration::from_secs(10);
const NODE: NodeId = NodeId(3);

/// A clock that stands still until the test sets it.
#[derive(Debug, Default)]
struct SetClock(std::sync::atomic::AtomicU64);

impl SetClock {
    fn advance(&self, by: Duration) {
        self.0.fetch_add(by.as_nanos() as u64, std::sync::atomic::Ordering::Relaxed);
    }
}

impl Clock for SetClock {
    fn now(&self) -> MonoTime {
        MonoTime(self.0.load(std::sync::atomic::Ordering::Relaxed))
    }

    fn unix(&self) -> UnixMillis {
        UnixMillis(0)
    }
}

fn context(session: u64) -> Option<v1::RequestContext> {
    Some(v1::RequestContext { timeout_ms: 1000, session, tenant: "default".into(), ..Default::default() })
}

/// A master with a node that has one segment in its only group.
struct Harness {
    clock: Arc<SetClock>,
    service: Arc<Service>,
}

struct Session {
    id: u64,
    stream: SessionStream,
    key: NumberedKey,
    sequence: u64,
}

impl Harness {
    fn new() -> Harness {
        let clock = Arc::new(SetClock::default());
        clock.advance(Duration::from_secs(1000));
        let config = ServiceConfig {
            groups: NonZeroU16::MIN,
            session_ttl: Duration::from_secs(3600),
            capability_rotation: INTERVAL,
            ..ServiceConfig::for_tests()
        };
        let service = Service::new(config, Arc::clone(&clock) as Arc<dyn Clock>);
        Harness { clock, service }
    }

    fn open(&self) -> Session {
        use moontide_proto::convert::Wire;
        let opened = self.service.open_session(&v1::OpenSessionRequest {
            context: context(0),
            node: NODE.0,
            boot_id: 1,
            topology: Some(v1::Topology::default()),
            protocol_min: 2,
            protocol_max: 2,
            ..Default::default()
        });
        let key = NumberedKey::from_wire(opened.capability_key.as_ref().unwrap()).unwrap();
        let stream = self.service.attach(SessionId(opened.session)).unwrap();
        Session { id: opened.session, stream, key, sequence: 0 }
    }

    /// Mounts the segment. Returns the code of the response.
    fn mount(&self, session: &Session, rotation: u64) -> u32 {
        let spec = v1::SegmentSpec {
            segment: 0,
            generation: 1,
            medium: v1::Medium::Memory.into(),
            units: 1 << 16,
            slots: 100,
            group: Some(0),
            ..Default::default()
        };
        let mounted = self.service.mount_segments(&v1::MountSegmentsRequest {
            context: context(session.id),
            segments: vec![spec],
            synced: vec![],
            capability_rotation: rotation,
        });
        mounted.context.unwrap().code
    }

    /// Reserves an object, and returns the key with which the handle is signed: the one among `keys`.
    fn signed_with(&self, key: &str, keys: &[&NumberedKey]) -> Vec<u64> {
        let mut packed = PackedKeysBuilder::new();
        packed.push(Key::new(key.as_bytes()).unwrap()).unwrap();
        let objects: PackedBuilder<PutEntry> = [PutEntry { len: 5000, config: 0 }].into_iter().collect();
        let config = v1::PutConfig { replicas: 1, replicas_min: 1, ..Default::default() };
        let reply = self.service.put_start(&v1::PutStartRequest {
            context: context(0),
            keys: packed.finish().into(),
            configs: vec![config],
            objects: objects.finish().into(),
            ..Default::default()
        });
        let entry =
            Packed::<ObjectEntry>::decode(&reply.objects, BATCH_KEYS_MAX).unwrap().iter().next().unwrap();
        assert_eq!(entry.code, None, "{key}");
        let handle = Packed::<Handle>::decode(&reply.handles, BATCH_KEYS_MAX).unwrap().iter().next().unwrap();
        let scope = |right| CapabilityScope::of_handle(&handle, entry.id, entry.epoch, right);
        let write = scope(AccessRight::Write(RecordShape::granted(&entry, &handle)));
        assert!(keys.iter().all(|key| !key.key.verify(&scope(AccessRight::Read), handle.capability)));
        let matching = keys.iter().filter(|key| key.key.verify(&write, handle.capability));
        matching.map(|key| key.rotation).collect()
    }

    fn tick(&self, after: Duration) {
        self.clock.advance(after);
        self.service.tick();
    }
}

impl Session {
    /// Returns the key that the stream offers, if it does.
    fn offered(&self) -> Option<NumberedKey> {
        use moontide_proto::convert::Wire;
        let mut offered = None;
        while let Some(message) = self.stream.next_now().unwrap() {
            if let Some(v1::master_message::Body::CapabilityKey(key)) = message.body {
                assert!(offered.replace(NumberedKey::from_wire(&key).unwrap()).is_none(), "one at a time");
            }
        }
        offered
    }

    fn acknowledge(&mut self, rotation: u64) {
        self.sequence += 1;
        let body = v1::node_message::Body::CapabilityKeyHeld(v1::CapabilityKeyHeld { rotation });
        let message =
            v1::NodeMessage { session: self.id, sequence: self.sequence, highest_term: 0, body: Some(body) };
        self.stream.receive(&message).unwrap();
    }
}

#[test]
fn master_signs_with_a_new_key_only_after_its_acknowledgement() {
    let harness = Harness::new();
    let mut session = harness.open();
    let first = session.key.clone();
    assert_eq!(harness.mount(&session, first.rotation), 0);
    assert_eq!(harness.signed_with("a", &[&first]), [first.rotation]);
    harness.tick(INTERVAL);
    let second = session.offered().expect("the interval is over");
    assert_eq!(second.rotation, first.rotation + 1);
    assert_eq!(harness.signed_with("b", &[&first, &second]), [first.rotation], "not acknowledged");
    // Without the acknowledgement there is no third key, however long it takes.
    harness.tick(5 * INTERVAL);
    assert_eq!(session.offered(), None);
    session.acknowledge(second.rotation);
    assert_eq!(harness.signed_with("c", &[&first, &second]), [second.rotation]);
    // A capability that was signed a moment ago with the first key is accepted for one more interval.
    harness.tick(INTERVAL / 2);
    assert_eq!(session.offered(), None);
    harness.tick(INTERVAL / 2);
    let third = session.offered().unwrap();
    assert!(third.rotation > second.rotation);
    session.acknowledge(second.rotation);
    assert_eq!(
        harness.signed_with("d", &[&first, &second, &third]),
        [second.rotation],
        "an old acknowledgement"
    );
}

#[test]
fn unacknowledged_key_is_offered_again_on_the_next_stream() {
    let harness = Harness::new();
    let mut session = harness.open();
    assert_eq!(harness.mount(&session, session.key.rotation), 0);
    harness.tick(INTERVAL);
    let offered = session.offered().unwrap();
    assert_eq!(session.offered(), None);
    session.stream = harness.service.attach(SessionId(session.id)).unwrap();
    assert_eq!(session.offered(), Some(offered.clone()));
    session.acknowledge(offered.rotation);
    session.stream = harness.service.attach(SessionId(session.id)).unwrap();
    assert_eq!(session.offered(), None);
}

#[test]
fn reconnected_node_gets_the_same_key_for_the_same_rotation() {
    let harness = Harness::new();
    let (first, again) = (harness.open(), harness.open());
    assert_eq!(first.key, again.key);
    harness.tick(3 * INTERVAL);
    let later = harness.open();
    assert_eq!(later.key.rotation, first.key.rotation + 3);
    assert_ne!(later.key.key, first.key.key);
    let restarted = Service::new(
        ServiceConfig { capability_secret: CapabilitySecret::new([77; 32]), ..ServiceConfig::for_tests() },
        Arc::clone(&harness.clock) as Arc<dyn Clock>,
    );
    assert_ne!(restarted.signer.current_key(NODE, harness.clock.now()).key, first.key.key);
}

#[test]
fn mount_names_a_key_that_the_node_was_told() {
    let harness = Harness::new();
    let session = harness.open();
    let first = session.key.clone();
    for unknown in [0, first.rotation + 1, u64::MAX] {
        assert_eq!(
            harness.mount(&session, unknown),
            moontide_types::ErrorCode::InvalidArgument as u32,
            "{unknown}"
        );
    }
    assert_eq!(harness.mount(&session, first.rotation), 0);
    harness.tick(INTERVAL);
    let second = session.offered().unwrap();
    // The mount of a group can overtake the acknowledgement on the stream.
    assert_eq!(harness.mount(&session, second.rotation), 0);
    assert_eq!(harness.signed_with("a", &[&first, &second]), [second.rotation]);
}

#[test]
fn next_owner_of_a_group_signs_with_the_keys_of_the_previous_one() {
    let harness = Harness::new();
    let session = harness.open();
    assert_eq!(harness.mount(&session, session.key.rotation), 0);
    let handoff = harness.service.begin_handoff(moontide_types::GroupId(0)).unwrap();
    assert_eq!(handoff.node_keys, [NodeKey { node: NODE, key: *session.key.key.as_bytes() }]);
    let next = CapabilitySigner::new(CapabilitySecret::new([5; 32]), INTERVAL, 1, MonoTime(0));
    next.took_over(0, handoff.node_keys);
    assert_eq!(next.keys(0).of(NODE), Some(&session.key.key));
    // Until the node has mounted its segments there.
    let own = next.current_key(NODE, MonoTime(0));
    next.mounted(0, NODE, SessionId(88), own.rotation);
    assert_eq!(next.keys(0).of(NODE), Some(&own.key));
    next.ended(0, NODE, SessionId(87));
    assert!(next.keys(0).of(NODE).is_some(), "the end of an earlier session");
    next.ended(0, NODE, SessionId(88));
    assert!(next.keys(0).of(NODE).is_none());
}

#[test]
fn sources_of_copies_are_signed_when_they_are_sent() {
    let harness = Harness::new();
    let mut session = harness.open();
    let first = session.key.clone();
    assert_eq!(harness.mount(&session, first.rotation), 0);
    let term = Term::new(1).unwrap();
    let command = NodeCommand {
        segment: SegmentId(4),
        generation: Generation(5),
        slot: SlotId(6),
        epoch: Epoch::new(term, 7).unwrap(),
        id: ObjectId([8; 16]),
        stripe: 0,
        extent: moontide_types::Extent { start: 0, units: 8 },
        ..NodeCommand::new(1, CommandKind::Copy, term)
    };
    let kill = NodeCommand {
        segment: SegmentId(4),
        generation: Generation(5),
        slot: SlotId(9),
        epoch: command.epoch,
        id: ObjectId([9; 16]),
        ..NodeCommand::new(2, CommandKind::Kill, term)
    };
    let source = CopySource {
        node: NODE,
        generation: Generation(1),
        root: 1,
        capability: Capability::default(),
        segment: SegmentId(0),
        slot: SlotId(2),
        term,
        purpose: CopyPurpose::Drain,
    };
    let check = |key: &NumberedKey| {
        let commands: PackedBuilder<NodeCommand> = [kill, command].into_iter().collect();
        let sources: PackedBuilder<CopySource> = [source].into_iter().collect();
        let mut message = v1::Commands {
            commands: commands.finish().into(),
            sources: sources.finish().into(),
            nodes: vec![],
        };
        harness.service.sign_sources(&mut message);
        let signed = Packed::<CopySource>::decode(&message.sources, SESSION_RECORDS_MAX).unwrap();
        let signed = signed.iter().next().unwrap();
        let scope = CapabilityScope {
            right: AccessRight::Read,
            stripe: 0,
            segment: source.segment,
            generation: source.generation,
            slot: source.slot,
            term,
            epoch: command.epoch,
            id: command.id,
        };
        assert_eq!(signed, CopySource { capability: key.key.sign(&scope), ..source });
    };
    check(&first);
    harness.tick(INTERVAL);
    let second = session.offered().unwrap();
    check(&first);
    session.acknowledge(second.rotation);
    check(&second);
}
