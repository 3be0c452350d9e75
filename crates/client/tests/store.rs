//! Every call of the store against a master and nodes in this process, over shared memory and over TCP.

use std::time::Duration;

use moontide_client::{
    GetInto, Hedge, Place, PutItem, PutOptions, PutOutcome, Spread, Store, StoreConfig, StoreError,
};
use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};
use moontide_rt::SplitMix64;
use moontide_types::{ErrorCode, NodeId};

/// Cluster in this process.
struct Cluster {
    master: Server,
    nodes: Vec<Node>,
}

impl Cluster {
    fn start(nodes: usize, memory_bytes: u64) -> Cluster {
        let free = "127.0.0.1:0".parse().unwrap();
        let config = MasterConfig {
            grpc_listen: free,
            frame_listen: free,
            admin_listen: free,
            groups: Some(4),
            reallocation_delay_ms: 0,
            ..MasterConfig::default()
        };
        let master = Server::start(config).unwrap();
        let address = master.addresses().grpc.to_string();
        let node = |_| {
            let node =
                Node::start(NodeConfig { master: address.clone(), memory_bytes, ..NodeConfig::default() });
            let node = node.unwrap();
            assert!(node.wait_until_mounted(Duration::from_secs(10)));
            node
        };
        let nodes = (0..nodes).map(node).collect();
        Cluster { master, nodes }
    }

    fn config(&self) -> StoreConfig {
        StoreConfig::new(self.master.addresses().grpc.to_string())
    }

    /// Connects a store that reads over shared memory.
    fn shm_store(&self) -> Store {
        Store::connect(self.config()).unwrap()
    }

    /// Connects a store that reads over TCP.
    fn tcp_store(&self) -> Store {
        Store::connect(StoreConfig { shm: false, ..self.config() }).unwrap()
    }
}

fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SplitMix64::new(seed).fill(&mut bytes);
    bytes
}

/// Lengths around every boundary: empty, one unit, the payload's alignment, one page, several.
const LENGTHS: [usize; 12] =
    [0, 1, 511, 4095, 4096, 4097, 65_536, 262_143, 262_144, 262_145, 1_000_003, 5 << 20];

#[test]
fn every_read_call_returns_put_bytes_over_shm_and_tcp() {
    let cluster = Cluster::start(2, 256 << 20);
    let stores = [("shm", cluster.shm_store()), ("tcp", cluster.tcp_store())];
    for (by, writer) in &stores {
        for len in LENGTHS {
            let key = format!("{by}-{len}");
            let value = content(len as u64, len);
            assert_eq!(writer.put(key.as_bytes(), &value).unwrap(), PutOutcome::Stored, "{key}");
            assert_eq!(writer.put(key.as_bytes(), b"other").unwrap(), PutOutcome::AlreadyExists, "{key}");
            for (reads, store) in &stores {
                let what = format!("{key} read {reads}");
                assert_eq!(store.get(key.as_bytes()).unwrap().unwrap(), value, "{what}");
                let held = store.get_ref(key.as_bytes()).unwrap().unwrap();
                assert_eq!(&held[..], &value[..], "{what}");
                assert!(held.verify(), "{what}");
                assert_eq!(held.is_zero_copy(), *reads == "shm", "{what}");
                let mut into = vec![0; len + 10];
                assert_eq!(store.get_into(key.as_bytes(), &mut into).unwrap(), Some(len), "{what}");
                assert_eq!(&into[..len], &value[..], "{what}");
                if len > 0 {
                    let error = store.get_into(key.as_bytes(), &mut into[..len - 1]).unwrap_err();
                    assert_eq!(error.code(), ErrorCode::InvalidArgument, "{what}");
                }
                for (offset, wanted) in [(0, len), (len / 2, len), (len / 3, 100), (len, 5)] {
                    let mut part = vec![0; wanted];
                    let got = store.get_range(key.as_bytes(), offset as u64, &mut part).unwrap().unwrap();
                    let end = len.min(offset + wanted);
                    assert_eq!(&part[..got], &value[offset..end], "{what}, {wanted} from {offset}");
                }
                assert!(store.exists(key.as_bytes()).unwrap(), "{what}");
                let location = store.get_location(key.as_bytes()).unwrap().unwrap();
                assert_eq!(location.len, len as u64, "{what}");
                let info = store.stat(key.as_bytes()).unwrap().unwrap();
                assert_eq!((info.len, info.epoch), (len as u64, location.epoch), "{what}");
            }
        }
    }
    let (shm, tcp) = (&stores[0].1, &stores[1].1);
    assert_eq!(
        tcp.touch(&[b"shm-1", b"missing"]).into_iter().collect::<Result<Vec<_>, _>>().unwrap(),
        [true, false]
    );
    assert_eq!(
        tcp.exists_batch(&[b"shm-1", b"missing"]).into_iter().collect::<Result<Vec<_>, _>>().unwrap(),
        [true, false]
    );
    let listed = shm.list(b"shm-", b"", 100).unwrap();
    assert_eq!(listed.keys.len(), LENGTHS.len());
    // A removal is visible to all clients at once, also to those that have cached the location.
    assert!(shm.remove(b"tcp-262145", false).unwrap());
    assert!(!shm.remove(b"tcp-262145", false).unwrap());
    for (_, store) in &stores {
        assert!(store.get(b"tcp-262145").unwrap().is_none());
        assert!(store.get_ref(b"tcp-262145").unwrap().is_none());
        assert!(!store.exists(b"tcp-262145").unwrap());
        assert!(store.get(b"missing").unwrap().is_none());
        let stats = store.metrics().stats();
        assert_eq!(
            stats.gets,
            stats.hits_local + stats.hits_remote + stats.hits_disk + stats.misses + stats.gets_failed,
            "{stats:?}"
        );
        assert_eq!(stats.corrupt, 0);
    }
    assert_eq!(tcp.metrics().stats().hits_local, 0);
}

#[test]
fn batch_calls_match_single_calls() {
    let cluster = Cluster::start(2, 256 << 20);
    for (by, store) in [("shm", cluster.shm_store()), ("tcp", cluster.tcp_store())] {
        let objects: Vec<(String, Vec<u8>)> =
            (0..300).map(|n| (format!("{by}-{n}"), content(n, (n as usize * 977) % 40_000))).collect();
        let parts: Vec<[&[u8]; 2]> = objects
            .iter()
            .map(|(_, value)| {
                let (a, b) = value.split_at(value.len() / 3);
                [a, b]
            })
            .collect();
        let items: Vec<PutItem<'_>> = objects
            .iter()
            .zip(&parts)
            .map(|((key, _), parts)| PutItem { key: key.as_bytes(), parts })
            .collect();
        for outcome in store.put_batch(&items, &PutOptions::default()) {
            assert_eq!(outcome.unwrap(), PutOutcome::Stored);
        }
        assert!(
            store
                .put_batch(&items, &PutOptions::default())
                .iter()
                .all(|o| *o.as_ref().unwrap() == PutOutcome::AlreadyExists)
        );
        let mut keys: Vec<&[u8]> = objects.iter().map(|(key, _)| key.as_bytes()).collect();
        keys.push(b"missing");
        let got = store.get_batch(&keys);
        for ((_, value), got) in objects.iter().zip(&got) {
            assert_eq!(got.as_ref().unwrap().as_ref().unwrap(), value);
        }
        assert!(got.last().unwrap().as_ref().unwrap().is_none());
        let mut buffers = vec![vec![0; 40_000]; keys.len()];
        let mut gets: Vec<GetInto<'_>> =
            keys.iter().zip(&mut buffers).map(|(key, into)| GetInto { key, into }).collect();
        let lens = store.get_batch_into(&mut gets);
        for (((_, value), len), buffer) in objects.iter().zip(&lens).zip(&buffers) {
            assert_eq!(*len.as_ref().unwrap(), Some(value.len()));
            assert_eq!(&buffer[..value.len()], &value[..]);
        }
        assert!(lens.last().unwrap().as_ref().unwrap().is_none());
        let removed = store.remove_batch(&keys, false);
        assert_eq!(removed.iter().filter(|r| *r.as_ref().unwrap()).count(), objects.len());
        assert!(store.get_batch(&keys).iter().all(|got| got.as_ref().unwrap().is_none()));
    }
}

#[test]
fn replicas_and_stripes_are_spread_and_read_back() {
    let cluster = Cluster::start(3, 256 << 20);
    for (by, store) in [("shm", cluster.shm_store()), ("tcp", cluster.tcp_store())] {
        let value = content(5, 9 << 20);
        let options = PutOptions { replicas: 3, ..PutOptions::default() };
        let key = format!("{by}-replicas");
        assert_eq!(store.put_with(key.as_bytes(), &[&value], &options).unwrap(), PutOutcome::Stored);
        let location = store.get_location(key.as_bytes()).unwrap().unwrap();
        let nodes: std::collections::HashSet<_> = location.stripes.iter().map(|stripe| stripe.node).collect();
        assert_eq!(nodes.len(), 3);
        assert_eq!(store.get(key.as_bytes()).unwrap().unwrap(), value);

        let options = PutOptions { stripes: Some(3), replicas: 1, ..PutOptions::default() };
        let key = format!("{by}-stripes");
        assert_eq!(store.put_with(key.as_bytes(), &[&value], &options).unwrap(), PutOutcome::Stored);
        let location = store.get_location(key.as_bytes()).unwrap().unwrap();
        assert_eq!(location.stripes.len(), 3);
        assert_eq!(store.get(key.as_bytes()).unwrap().unwrap(), value);
        let mut part = vec![0; 4 << 20];
        assert_eq!(store.get_range(key.as_bytes(), 2 << 20, &mut part).unwrap(), Some(4 << 20));
        assert_eq!(part, value[2 << 20..6 << 20]);

        let options = PutOptions { upsert: true, ..PutOptions::default() };
        assert_eq!(store.put_with(key.as_bytes(), &[b"new"], &options).unwrap(), PutOutcome::Stored);
        assert_eq!(store.get(key.as_bytes()).unwrap().unwrap(), &b"new"[..]);
    }
}

#[test]
fn put_options_say_where_the_replicas_are() {
    let cluster = Cluster::start(3, 64 << 20);
    for (by, store) in [("shm", cluster.shm_store()), ("tcp", cluster.tcp_store())] {
        let put = |name: &str, options: &PutOptions| {
            let key = format!("{by}-{name}");
            store.put_with(key.as_bytes(), &[b"there"], options)?;
            let location = store.get_location(key.as_bytes())?.expect("just stored");
            Ok::<_, StoreError>(location.stripes.iter().map(|stripe| stripe.node).collect::<Vec<_>>())
        };
        let nodes: Vec<_> = store.nodes().unwrap().iter().map(|node| node.node).collect();
        let absent: Place = NodeId(1).into();
        for (at, &node) in nodes.iter().enumerate() {
            let second = nodes[(at + 1) % 3];
            let prefer = vec![absent, node.into(), node.into(), second.into()];
            let one = PutOptions { prefer: prefer.clone(), ..PutOptions::default() };
            assert_eq!(put(&format!("one-{at}"), &one).unwrap(), [node]);
            let two = PutOptions { replicas: 2, prefer, ..PutOptions::default() };
            assert_eq!(put(&format!("two-{at}"), &two).unwrap(), [node, second]);
        }
        // All nodes are on this host: of two replicas on different hosts, one is made.
        let apart = PutOptions { replicas: 2, spread: Some(Spread::Host), ..PutOptions::default() };
        assert_eq!(put("apart", &apart).unwrap().len(), 1);
        let refused = put("all", &PutOptions { replicas_min: 2, ..apart });
        assert!(
            matches!(refused, Err(StoreError::TooFewDomains { spread: Spread::Host, wanted: 2, domains: 1 })),
            "{refused:?}"
        );
        assert_eq!(store.get(format!("{by}-all").as_bytes()).unwrap(), None);
        // No node has a disk: the put succeeds all the same.
        let on_disk = PutOptions { disk_replicas: 1, ..PutOptions::default() };
        assert_eq!(put("on-disk", &on_disk).unwrap().len(), 1);
        for (what, options) in [
            ("prefer", PutOptions { prefer: vec![absent; 9], ..PutOptions::default() }),
            ("disk_replicas", PutOptions { disk_replicas: 2, ..PutOptions::default() }),
        ] {
            let refused = put("refused", &options).unwrap_err();
            assert!(
                matches!(refused, StoreError::InvalidArgument { what: of, .. } if of == what),
                "{refused}"
            );
        }
    }
}

#[test]
fn write_plan_commits_only_in_its_epoch_and_can_abort() {
    let cluster = Cluster::start(1, 64 << 20);
    for (by, store) in [("shm", cluster.shm_store()), ("tcp", cluster.tcp_store())] {
        let value = content(9, 700_000);
        let key = format!("{by}-plan");
        let mut plan =
            store.open_for_write(key.as_bytes(), value.len() as u64, &PutOptions::default()).unwrap();
        assert_eq!(plan.stripes().len(), 1);
        assert!(store.get(key.as_bytes()).unwrap().is_none(), "not readable yet");
        plan.write(&[&value[..100], &value[100..]]).unwrap();
        assert!(store.get(key.as_bytes()).unwrap().is_none(), "not readable yet");
        let epoch = plan.epoch();
        assert_eq!(plan.commit(epoch).unwrap(), PutOutcome::Stored);
        assert_eq!(store.get(key.as_bytes()).unwrap().unwrap(), value);

        let key = format!("{by}-aborted");
        let plan = store.open_for_write(key.as_bytes(), 100, &PutOptions::default()).unwrap();
        plan.abort();
        let end = std::time::Instant::now() + Duration::from_secs(10);
        while store.stat(key.as_bytes()).unwrap().is_some() {
            assert!(std::time::Instant::now() < end, "the reservation is not released");
            std::thread::sleep(Duration::from_millis(5));
        }
        let mut plan = store.open_for_write(key.as_bytes(), 100, &PutOptions::default()).unwrap();
        plan.write(&[&[1; 100]]).unwrap();
        let other = moontide_types::Epoch::from_bits(1).unwrap();
        assert_eq!(plan.commit(other).unwrap_err().code(), ErrorCode::StaleEpoch);
    }
}

#[test]
fn connect_without_master_fails_fast_with_advice() {
    let began = std::time::Instant::now();
    let error = Store::connect(StoreConfig::new("127.0.0.1:1")).unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(5));
    assert!(error.to_string().contains("moontide master"), "{error}");
    assert_eq!(error.code(), ErrorCode::Unreachable);
}

#[test]
fn get_uses_other_replica_after_node_shutdown() {
    let mut cluster = Cluster::start(2, 128 << 20);
    let store = Store::connect(StoreConfig { shm: false, hedge: Hedge::Off, ..cluster.config() }).unwrap();
    let options = PutOptions { replicas: 2, ..PutOptions::default() };
    let objects: Vec<(String, Vec<u8>)> =
        (0..50).map(|n| (format!("twice-{n}"), content(n, 100_000))).collect();
    for (key, value) in &objects {
        assert_eq!(store.put_with(key.as_bytes(), &[value], &options).unwrap(), PutOutcome::Stored);
    }
    cluster.nodes.pop().unwrap().shutdown();
    for (key, value) in &objects {
        assert_eq!(store.get(key.as_bytes()).unwrap().unwrap(), value, "{key}");
    }
}

/// Failure: after remove_all, clients still used ids of the old generation, and found removed objects. Cause: the
/// master did not send the generation where clients read it. Fix: every response carries it, and clients adopt it.
#[test]
fn put_after_remove_all_becomes_visible_to_all_clients() {
    let cluster = Cluster::start(1, 64 << 20);
    let stores = [cluster.shm_store(), cluster.tcp_store()];
    // Pinned, so that the bytes stay in memory after the removal.
    let pinned = PutOptions { pin: moontide_types::record::PinClass::Hard, ..PutOptions::default() };
    stores[0].put_with(b"k", &[b"before"], &pinned).unwrap();
    for store in &stores {
        assert_eq!(store.get(b"k").unwrap().unwrap(), &b"before"[..]);
    }
    let runtime = tokio::runtime::Runtime::new().unwrap();
    let address = format!("http://{}", cluster.master.addresses().grpc);
    runtime.block_on(async {
        let channel = tonic::transport::Endpoint::from_shared(address).unwrap().connect().await.unwrap();
        let mut master = moontide_proto::v1::master_client::MasterClient::new(channel);
        let context = Some(moontide_proto::v1::RequestContext {
            tenant: "default".into(),
            timeout_ms: 5000,
            ..Default::default()
        });
        let request =
            moontide_proto::v1::RemoveAllRequest { context, force: true, generation: 0, groups: vec![] };
        assert_eq!(master.remove_all(request).await.unwrap().into_inner().context.unwrap().code, 0);
    });
    // A put learns the generation at once.
    assert_eq!(stores[0].put(b"k", b"after").unwrap(), PutOutcome::Stored);
    assert_eq!(stores[0].get(b"k").unwrap().unwrap(), &b"after"[..]);
    // Other clients learn it within two seconds.
    let end = std::time::Instant::now() + Duration::from_secs(10);
    while stores[1].get(b"k").unwrap().is_none_or(|bytes| bytes != b"after"[..]) {
        assert!(std::time::Instant::now() < end, "the other store never learns the generation");
        std::thread::sleep(Duration::from_millis(20));
    }
}

/// Failure: two threads that put the same key revoked each other's reservation until both failed. Cause: the master
/// took them for one caller that had started again. Fix: every put has its own caller id.
#[test]
fn concurrent_puts_of_same_key_store_exactly_one() {
    let cluster = Cluster::start(1, 256 << 20);
    let store = cluster.tcp_store();
    for round in 0..20 {
        let key = format!("same-{round}");
        let value = content(round, 3 << 20);
        let stored = std::thread::scope(|scope| {
            let put = || match store.put(key.as_bytes(), &value) {
                Ok(put) => Some(put),
                Err(error) => {
                    assert_eq!(error.code(), ErrorCode::InProgress, "{error}");
                    None
                }
            };
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(put)).collect();
            threads
                .into_iter()
                .filter_map(|thread| thread.join().unwrap())
                .filter(|p| *p == PutOutcome::Stored)
                .count()
        });
        assert_eq!(stored, 1, "{key}");
        assert_eq!(store.get(key.as_bytes()).unwrap().unwrap(), value);
    }
}

/// Regression: a range read from a cached location on a node that had left failed, and failed again, although a look-up
/// would have found the object elsewhere.
#[test]
fn range_of_moved_object_is_looked_up_again() {
    let mut cluster = Cluster::start(2, 64 << 20);
    let (reader, other, writer) = (cluster.tcp_store(), cluster.tcp_store(), cluster.tcp_store());
    let old = content(1, 300_000);
    writer.put(b"k", &old).unwrap();
    let mut part = vec![0; 1000];
    for reader in [&reader, &other] {
        assert_eq!(reader.get_range(b"k", 5000, &mut part).unwrap(), Some(1000));
        assert_eq!(part, &old[5000..6000]);
    }
    // The node leaves with the object, which is put again on the other node.
    let holder = reader.get_location(b"k").unwrap().unwrap().stripes[0].node;
    let at = cluster.nodes.iter().position(|node| node.id() == holder).unwrap();
    cluster.nodes.remove(at).shutdown();
    let new = content(2, 400_000);
    assert_eq!(writer.put(b"k", &new).unwrap(), PutOutcome::Stored);
    // From the cached location, and beyond the end of the cached version.
    assert_eq!(reader.get_range(b"k", 5000, &mut part).unwrap(), Some(1000));
    assert_eq!(part, &new[5000..6000]);
    assert_eq!(other.get_range(b"k", 350_000, &mut part).unwrap(), Some(1000));
    assert_eq!(part, &new[350_000..351_000]);
}

#[test]
fn object_that_never_fits_is_refused_at_once_with_largest_size() {
    let cluster = Cluster::start(1, 64 << 20);
    let store = cluster.tcp_store();
    let value = vec![7; 17 << 20];
    // For five seconds another node could join, and the put waits.
    let is_refused = |_| store.put(b"large", &value).unwrap_err().code() == ErrorCode::TooLarge;
    assert!((0..4).any(is_refused));
    let asked = std::time::Instant::now();
    let error = store.put(b"large", &value).unwrap_err();
    let took = asked.elapsed();
    assert_eq!((error.code(), error.is_retryable()), (ErrorCode::TooLarge, false));
    assert!(took < Duration::from_millis(500), "{took:?}");
    let text = error.to_string();
    let largest: usize = text.split("group: ").nth(1).unwrap().split(' ').next().unwrap().parse().unwrap();
    assert!((14 << 20..16 << 20).contains(&largest), "{text}");
    assert_eq!(store.put(b"large", &value[..largest]).unwrap(), PutOutcome::Stored);
    assert_eq!(store.get(b"large").unwrap().unwrap(), value[..largest]);
}
