//! Calls of operators on a real cluster: pins, quotas, evictions, segments, metadata of many objects.

use std::time::{Duration, Instant};

use moontide_client::{
    BulkProgress, BulkRemoval, BulkSelection, PinClass, SegmentState, Store, StoreConfig, StoreError,
    TenantInfo,
};
use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};
use moontide_types::{ErrorCode, NodeId, SegmentId};

const MIB: u64 = 1 << 20;

fn master(groups: u16) -> Server {
    let free = "127.0.0.1:0".parse().unwrap();
    let config = MasterConfig {
        grpc_listen: free,
        frame_listen: free,
        admin_listen: free,
        groups: Some(groups),
        ..MasterConfig::default()
    };
    Server::start(config).unwrap()
}

fn node(master: &Server, memory_bytes: u64) -> Node {
    let master = master.addresses().grpc.to_string();
    let config = NodeConfig { master, memory_bytes, copy_bytes_per_s: 0, ..NodeConfig::default() };
    let node = Node::start(config).unwrap();
    assert!(node.wait_until_mounted(Duration::from_secs(10)));
    node
}

/// A store of a tenant, which asks the master at each call.
fn store(master: &Server, tenant: &str) -> Store {
    let config = StoreConfig::new(master.addresses().grpc.to_string());
    let config = StoreConfig { shm: false, location_cache_entries: 0, tenant: tenant.to_owned(), ..config };
    Store::connect(config).unwrap()
}

/// Waits until a condition holds; fails after 30 s.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(30);
    while !holds() {
        assert!(Instant::now() < end, "not within 30 s: {what}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn values<T: std::fmt::Debug>(results: Vec<Result<T, StoreError>>) -> Vec<T> {
    results.into_iter().map(Result::unwrap).collect()
}

/// Failure: a node that was mounted was missing in the list. Cause: the list was not fetched if it had been fetched less
/// than 50 ms before. Fix: a call of the application waits those 50 ms.
#[test]
fn list_of_nodes_has_each_node_that_was_mounted_before_the_call() {
    let master = master(4);
    let store = store(&master, "default");
    let mut nodes = vec![];
    for _ in 0..5 {
        store.nodes().unwrap();
        nodes.push(node(&master, 64 * MIB));
        let mut listed: Vec<NodeId> = store.nodes().unwrap().iter().map(|info| info.node).collect();
        let mut mounted: Vec<NodeId> = nodes.iter().map(Node::id).collect();
        listed.sort();
        mounted.sort();
        assert_eq!(listed, mounted);
    }
}

#[test]
fn hard_pinned_objects_survive_eviction_until_they_are_unpinned() {
    let (master, keys) = (master(4), [&b"a"[..], b"b", b"c"]);
    let _node = node(&master, 64 * MIB);
    let store = store(&master, "default");
    for key in keys {
        store.put(key, &[7; 10_000]).unwrap();
    }
    assert_eq!(values(store.set_pin(&[b"a", b"missing", b"c"], PinClass::Hard)), [true, false, true]);
    let pins = |keys: &[&[u8]]| -> Vec<Option<PinClass>> {
        values(store.stat_batch(keys)).into_iter().map(|info| info.map(|info| info.pin)).collect()
    };
    assert_eq!(pins(&keys), [Some(PinClass::Hard), Some(PinClass::None), Some(PinClass::Hard)]);
    assert_eq!(store.evict(0).unwrap().objects, 1);
    assert_eq!(values(store.exists_batch(&keys)), [true, false, true]);
    assert_eq!(store.remove(b"a", false).unwrap_err().code(), ErrorCode::Leased, "hard-pinned");

    assert_eq!(values(store.set_pin(&[b"a"], PinClass::Soft)), [true]);
    assert_eq!(values(store.set_pin(&[b"c"], PinClass::None)), [true]);
    let evicted = store.evict(0).unwrap();
    assert!(evicted.objects == 2 && evicted.bytes >= 20_000, "{evicted:?}");
    assert_eq!(values(store.exists_batch(&keys)), [false; 3]);
    assert_eq!(store.evict(1001).unwrap_err().code(), ErrorCode::InvalidArgument);
}

#[test]
fn metadata_of_many_objects_keeps_the_order_of_keys() {
    let master = master(4);
    let _node = node(&master, 64 * MIB);
    let store = store(&master, "default");
    let names: Vec<Vec<u8>> = (0..5000).map(|n| format!("key-{n}").into_bytes()).collect();
    for name in names.iter().step_by(100) {
        store.put(name, name).unwrap();
    }
    let mut keys: Vec<&[u8]> = names.iter().map(Vec::as_slice).collect();
    keys.insert(17, b"");
    let infos = store.stat_batch(&keys);
    assert_eq!(infos.len(), keys.len());
    for (at, (key, info)) in keys.iter().zip(&infos).enumerate() {
        match (at, info) {
            (17, info) => assert!(matches!(info, Err(StoreError::Key(_))), "{info:?}"),
            (_, Ok(Some(info))) => assert_eq!(info.len, key.len() as u64),
            (at, Ok(None)) => assert_ne!((at - usize::from(at > 17)) % 100, 0, "{at} exists"),
            (at, Err(error)) => panic!("{at}: {error}"),
        }
    }
    assert_eq!(infos.iter().filter(|info| matches!(info, Ok(Some(_)))).count(), 50);
}

#[test]
fn quota_limits_the_tenant_and_is_listed_with_its_usage() {
    let master = master(4);
    let _node = node(&master, 64 * MIB);
    let (operator, limited, other) =
        (store(&master, "default"), store(&master, "limited"), store(&master, "other"));
    // Before the tenant has an object.
    operator.set_tenant_quota("limited", MIB, 0).unwrap();
    let of = |name: &str| operator.tenants().unwrap().into_iter().find(|tenant| tenant.name == name);
    let listed = of("limited").unwrap();
    assert_eq!((listed.bytes_max, listed.objects_max, listed.objects), (MIB, 0, 0));

    let put = |store: &Store, from: u32, to: u32| {
        for n in from..to {
            store.put(format!("{n}").as_bytes(), &[1; 50_000]).unwrap();
        }
    };
    put(&limited, 0, 100);
    put(&other, 0, 100);
    eventually("the tenant is within its quota", || of("limited").unwrap().bytes <= MIB);
    let TenantInfo { objects, bytes, .. } = of("other").unwrap();
    assert!(objects == 100 && bytes >= 5_000_000, "{objects} objects, {bytes} bytes");
    assert!(limited.exists(b"99").unwrap(), "the newest object stays");

    operator.set_tenant_quota("limited", 0, 8).unwrap();
    put(&limited, 100, 120);
    eventually("the tenant has at most eight objects", || of("limited").unwrap().objects <= 8);
    operator.set_tenant_quota("limited", 0, 0).unwrap();
    put(&limited, 200, 260);
    assert!(of("limited").unwrap().objects >= 60, "there is no limit any more");
    let invalid = operator.set_tenant_quota("no spaces", 1, 1).unwrap_err();
    assert_eq!(invalid.code(), ErrorCode::InvalidArgument);
}

#[test]
fn segments_are_listed_with_their_usage_and_drained_one_by_one() {
    let master = master(2);
    let nodes = [node(&master, 64 * MIB), node(&master, 64 * MIB)];
    let store = store(&master, "default");
    for n in 0..200u32 {
        store.put(&n.to_le_bytes(), &[9; 20_000]).unwrap();
    }
    let all = store.segments(None).unwrap();
    assert!(all.is_sorted_by_key(|segment| (segment.node, segment.segment)));
    for segment in &all {
        let parts = segment.live_bytes + segment.writing_bytes + segment.draining_bytes + segment.free_bytes;
        assert_eq!((segment.bytes, segment.state), (parts, SegmentState::Serving), "{segment:?}");
    }
    assert!(all.iter().map(|segment| segment.live_bytes).sum::<u64>() >= 200 * 20_000);
    let own = store.segments(Some(nodes[0].id())).unwrap();
    assert!(!own.is_empty() && own.len() < all.len());
    assert!(own.iter().all(|segment| segment.node == nodes[0].id()));

    let drained = all.iter().max_by_key(|segment| segment.live_bytes).unwrap();
    store.drain_segment(drained.node, drained.segment, false).unwrap();
    eventually("the segment is empty", || {
        let now = store.segments(Some(drained.node)).unwrap();
        let now = now.iter().find(|segment| segment.segment == drained.segment).unwrap();
        assert_eq!(now.state, SegmentState::Draining);
        now.live_bytes == 0
    });
    for n in 0..200u32 {
        assert_eq!(store.get(&n.to_le_bytes()).unwrap().as_deref(), Some(&[9; 20_000][..]), "object {n}");
    }
    let unknown = store.drain_segment(NodeId(1), SegmentId(0), false).unwrap_err();
    assert_eq!(unknown.code(), ErrorCode::NotFound);
    assert!(store.segments(Some(NodeId(1))).unwrap().is_empty());
}

#[test]
fn removal_of_many_objects_reports_its_progress() {
    let master = master(4);
    let _node = node(&master, 64 * MIB);
    let store = store(&master, "default");
    for n in 0..500u32 {
        store.put(format!("{}/{n}", n % 2).as_bytes(), &[3; 1000]).unwrap();
    }
    values(store.set_pin(&[b"0/0"], PinClass::Hard));
    let mut last = BulkProgress::default();
    let wait = Duration::from_secs(10);
    let removal = store.remove_selected(&BulkSelection::Prefix(b"0/".to_vec()), false, wait, |progress| {
        assert!(progress.groups == 4 && progress.groups_done <= 4 && progress.removed >= last.removed);
        last = progress;
    });
    assert_eq!(removal.unwrap(), BulkRemoval { removed: 249, kept: 1 });
    assert_eq!((last.groups_done, last.examined, last.removed), (4, 500, 249));
    let removal = store.remove_selected(&BulkSelection::Regex("^[01]/".into()), true, wait, |_| {}).unwrap();
    assert_eq!(removal, BulkRemoval { removed: 251, kept: 0 });
    assert_eq!(store.remove_selected(&BulkSelection::All, true, wait, |_| {}).unwrap().removed, 0);
    let invalid = store.remove_selected(&BulkSelection::Regex("(".into()), true, wait, |_| {}).unwrap_err();
    assert_eq!(invalid.code(), ErrorCode::InvalidArgument);
}
