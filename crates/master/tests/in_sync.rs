//! Which nodes are told that they are in sync: a later master trusts what they report.

mod support;

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use moontide_master::election::GroupAssignment;
use moontide_master::{Service, ServiceConfig, SessionStream};
use moontide_proto::v1;
use moontide_types::{Clock, GroupId, SegmentId, SessionId, SystemClock, Term};
use support::context;

const NONE: [u32; 0] = [];

/// One of several masters, with two groups.
fn master() -> Arc<Service> {
    let groups = NonZeroU16::new(2).unwrap();
    let config = ServiceConfig { multi_master: true, groups, ..ServiceConfig::for_tests() };
    let service = Service::new(config, Arc::new(SystemClock));
    for group in 0..2 {
        host(&service, group);
    }
    service.confirm_until(SystemClock.now().after(Duration::from_secs(600)));
    service
}

fn host(service: &Service, group: u16) {
    let term = Term::new(5).unwrap();
    let assignment = GroupAssignment { group: GroupId(group), term, previous: Term::ZERO, exclusion: 0 };
    service.host(assignment, None);
}

/// A node with an open stream.
struct TestNode {
    service: Arc<Service>,
    session: u64,
    stream: SessionStream,
    sequence: u64,
}

impl TestNode {
    fn open(service: &Arc<Service>) -> TestNode {
        let request = v1::OpenSessionRequest {
            context: context(),
            node: 1,
            boot_id: 1,
            topology: Some(v1::Topology::default()),
            protocol_min: 2,
            protocol_max: 2,
            ..Default::default()
        };
        let session = service.open_session(&request).session; // with the first key: the clock stands still
        let stream = service.attach(SessionId(session)).unwrap();
        TestNode { service: Arc::clone(service), session, stream, sequence: 0 }
    }

    fn mount(&self, spec: v1::SegmentSpec) {
        let mut context = context();
        context.as_mut().unwrap().session = self.session;
        let spec = v1::SegmentSpec { generation: 1, slots: 100, ..spec };
        let request = v1::MountSegmentsRequest {
            context,
            segments: vec![spec],
            synced: vec![],
            capability_rotation: 1,
        };
        let mounted = self.service.mount_segments(&request);
        assert!(mounted.results.iter().all(|result| result.code == 0), "{mounted:?}");
    }

    /// Mounts the segment of a group, without records.
    fn mount_segment(&self, group: u32) {
        let medium = v1::Medium::Memory.into();
        self.mount(v1::SegmentSpec {
            segment: group,
            group: Some(group),
            medium,
            units: 1000,
            ..Default::default()
        });
    }

    /// Mounts the disk, with records.
    fn mount_disk(&self) {
        let (segment, medium) = (SegmentId::DISK.0, v1::Medium::Disk.into());
        self.mount(v1::SegmentSpec { segment, medium, units: 1, has_records: true, ..Default::default() });
    }

    fn send(&mut self, body: v1::node_message::Body) {
        self.sequence += 1;
        let (session, sequence) = (self.session, self.sequence);
        self.stream
            .receive(&v1::NodeMessage { session, sequence, highest_term: 0, body: Some(body) })
            .unwrap();
    }

    fn end_inventory(&mut self, inventories: u32) {
        self.send(v1::node_message::Body::Offloaded(v1::OffloadNotice {
            recovered: true,
            recovery_end: true,
            inventories,
            keys: vec![0; 4].into(),
            ..Default::default()
        }));
    }

    /// Sends a heartbeat. Returns the groups with which the node is in sync.
    fn in_sync(&mut self) -> Vec<u32> {
        self.send(v1::node_message::Body::Heartbeat(v1::Heartbeat {
            heartbeat_id: self.sequence + 1,
            reads: Some(v1::ReadCounters::default()),
            pressure: Some(v1::Pressure::default()),
            ..Default::default()
        }));
        loop {
            let message = self.stream.next_now().unwrap().expect("a response to the heartbeat");
            if let Some(v1::master_message::Body::HeartbeatAck(ack)) = message.body {
                return ack.in_sync.into_iter().map(|of| of.group).collect();
            }
        }
    }
}

#[test]
fn node_is_in_sync_with_groups_of_confirmed_master_that_are_not_being_handed_off() {
    let service = master();
    let mut node = TestNode::open(&service);
    node.mount_segment(0);
    assert_eq!(node.in_sync(), [0]);
    node.mount_segment(1);
    assert_eq!(node.in_sync(), [0, 1]);
    service.begin_handoff(GroupId(0)).unwrap();
    assert_eq!(node.in_sync(), [1], "the new owner may have the group already");
    service.cancel_handoff(GroupId(0));
    assert_eq!(node.in_sync(), [0, 1]);
    // Another master may own the groups, and exclude this node.
    service.confirm_until(SystemClock.now());
    assert_eq!(node.in_sync(), NONE);
}

/// Failure, found by review: the end of the inventory of some groups ended the inventory of groups that were mounted after
/// it. The master took the disk for empty of their objects.
#[test]
fn end_of_earlier_inventory_does_not_end_that_of_later_mount() {
    let service = master();
    let mut node = TestNode::open(&service);
    node.mount_segment(0);
    node.mount_disk();
    assert_eq!(node.in_sync(), NONE, "the disk has not been reported");
    node.mount_segment(1);
    node.mount_disk();
    node.end_inventory(1);
    assert_eq!(node.in_sync(), NONE, "the second inventory has not ended");
    node.end_inventory(2);
    assert_eq!(node.in_sync(), [0, 1]);
}
