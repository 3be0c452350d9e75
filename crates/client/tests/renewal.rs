//! Certificates, and keys of capabilities, that are replaced all the time while clients of two tenants put and get: no read is
//! wrong, and no call fails. A certificate is valid for a few rounds only, so a process that keeps an old one is found.
//!
//! `MOONTIDE_TESTS=full` replaces them every five seconds for a minute, instead of every second for some seconds.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

use moontide_auth::testing::{Authority, Directory, Validity};
use moontide_auth::{CredentialFiles, Role};
use moontide_client::{Store, StoreConfig, StoreError};
use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};
use moontide_rt::SplitMix64;
use moontide_types::NodeId;

/// A certificate is valid for this many rounds. A process looks at its files once in a second, and a handshake takes its time.
const ROUNDS_VALID: u32 = 5;

/// Names under which files of certificates are issued and used.
const NAMES: [&str; 5] = ["master", "node-1", "node-2", "tenant-acme", "tenant-beta"];

fn role_of(name: &str) -> Role {
    match name.split_once('-') {
        Some(("node", id)) => Role::Node(NodeId(id.parse().unwrap())),
        Some((_, tenant)) => Role::Tenant(tenant.into()),
        None => Role::Master,
    }
}

/// Issues the certificates of all processes.
struct Renewal {
    authority: Authority,
    issued: Directory,
    used: Directory,
    round: Duration,
}

impl Renewal {
    fn new(round: Duration) -> Renewal {
        let (authority, issued, used) = (Authority::new(), Directory::new(), Directory::new());
        let renewal = Renewal { authority, issued, used, round };
        renewal.renew();
        renewal
    }

    /// Replaces the files of all processes, one after the other: for a moment, certificate and key do not fit.
    fn renew(&self) {
        let valid = Validity::Until(SystemTime::now() + ROUNDS_VALID * self.round);
        for name in NAMES {
            let identity = format!("spiffe://test/moontide/cluster/{}", role_of(name));
            let files = self.authority.issue_identity(&self.issued, name, &identity, valid);
            for file in [files.ca, files.cert, files.key] {
                let used = self.used.path().join(file.file_name().unwrap());
                std::fs::rename(file, used).unwrap();
            }
        }
    }

    fn files(&self, name: &str) -> CredentialFiles {
        let path = |kind: &str| Path::new(self.used.path()).join(format!("{name}-{kind}.pem"));
        CredentialFiles { ca: path("ca"), cert: path("cert"), key: path("key") }
    }
}

fn master(renewal: &Renewal) -> Server {
    let free = "127.0.0.1:0".parse().unwrap();
    let files = renewal.files("master");
    let config = MasterConfig {
        grpc_listen: free,
        frame_listen: free,
        admin_listen: free,
        capability_rotation_ms: renewal.round.as_millis() as u32,
        ca: Some(files.ca),
        cert: Some(files.cert),
        key: Some(files.key),
        ..MasterConfig::default()
    };
    Server::start(config).unwrap()
}

fn node(master: &Server, renewal: &Renewal, name: &str) -> Node {
    let files = renewal.files(name);
    let config = NodeConfig {
        master: master.addresses().grpc.to_string(),
        memory_bytes: 64 << 20,
        shm: false,
        ca: Some(files.ca),
        cert: Some(files.cert),
        key: Some(files.key),
        ..NodeConfig::default()
    };
    let node = Node::start(config).unwrap();
    assert!(node.wait_until_mounted(Duration::from_secs(20)));
    node
}

/// What the clients did.
#[derive(Debug, Default)]
struct Tally {
    stores: AtomicU64,
    puts: AtomicU64,
    gets: AtomicU64,
    /// Calls that failed, and succeeded when they were repeated.
    healed: AtomicU64,
}

impl Tally {
    fn count(counter: &AtomicU64) {
        counter.fetch_add(1, Ordering::Relaxed);
    }

    /// Makes a call, and repeats it a few times if it fails.
    fn healed<T>(&self, what: &str, mut call: impl FnMut() -> Result<T, StoreError>) -> T {
        const TRIES: u32 = 3;
        for attempt in 1..=TRIES {
            match call() {
                Ok(done) => return done,
                Err(error) if attempt < TRIES => {
                    println!("{what}, attempt {attempt}: {error}");
                    Tally::count(&self.healed);
                    std::thread::sleep(Duration::from_millis(100));
                }
                Err(error) => panic!("{what} failed {TRIES} times: {error}"),
            }
        }
        unreachable!("the last attempt returns or panics")
    }
}

/// Returns the content of an object: both tenants use the same keys.
fn content(tenant: &str, number: u64) -> Vec<u8> {
    let mut random = SplitMix64::new(number ^ u64::from(tenant.as_bytes()[0]) << 56);
    let mut bytes = vec![0; 1 + (random.next_u64() % 60_000) as usize];
    random.fill(&mut bytes);
    bytes
}

/// Puts objects of a tenant, and reads them with the store that put them and with new ones, until `stop`.
fn work(config: &StoreConfig, stop: &AtomicBool, tally: &Tally, first: u64) {
    const KEPT: u64 = 20;
    let tenant = &*config.tenant;
    let connect = || {
        Tally::count(&tally.stores);
        tally.healed("connect", || Store::connect(config.clone()))
    };
    let lasting = connect();
    let mut number = first;
    while !stop.load(Ordering::Relaxed) {
        let key = |number: u64| format!("object-{number}");
        let bytes = content(tenant, number);
        tally.healed("put", || lasting.put(key(number).as_bytes(), &bytes));
        Tally::count(&tally.puts);
        let new = connect();
        for (store, at) in
            [(&lasting, number), (&new, number), (&lasting, first.max(number.saturating_sub(KEPT / 2)))]
        {
            let got = tally.healed("get", || store.get(key(at).as_bytes()));
            Tally::count(&tally.gets);
            let got = got.unwrap_or_else(|| panic!("{tenant}: {} is lost", key(at)));
            assert!(got[..] == content(tenant, at)[..], "{tenant}: wrong bytes of {}", key(at));
        }
        if number >= first + KEPT {
            let old = key(number - KEPT);
            assert!(tally.healed("remove", || lasting.remove(old.as_bytes(), true)), "{old} was there");
        }
        number += 1;
    }
}

#[test]
fn replaced_certificates_and_capability_keys_fail_no_call() {
    let is_full = std::env::var("MOONTIDE_TESTS").is_ok_and(|tests| tests == "full");
    let (round, rounds) = if is_full { (Duration::from_secs(5), 12) } else { (Duration::from_secs(1), 8) };
    let renewal = Renewal::new(round);
    let master = master(&renewal);
    let nodes = ["node-1", "node-2"].map(|name| node(&master, &renewal, name));
    let (stop, tally) = (AtomicBool::new(false), Tally::default());
    std::thread::scope(|scope| {
        let (stop, tally) = (&stop, &tally);
        let workers: Vec<_> = ["acme", "beta"]
            .into_iter()
            .flat_map(|tenant| [(tenant, 0), (tenant, 1 << 32)])
            .map(|(tenant, first)| {
                let files = renewal.files(&format!("tenant-{tenant}"));
                let config = StoreConfig {
                    tenant: tenant.to_owned(),
                    shm: false,
                    ca: Some(files.ca),
                    cert: Some(files.cert),
                    key: Some(files.key),
                    ..StoreConfig::new(master.addresses().grpc.to_string())
                };
                scope.spawn(move || work(&config, stop, tally, first))
            })
            .collect();
        let began = Instant::now();
        for n in 1..=rounds {
            std::thread::sleep((n * round).saturating_sub(began.elapsed()));
            renewal.renew();
        }
        stop.store(true, Ordering::Relaxed);
        workers.into_iter().for_each(|worker| worker.join().expect("the worker found nothing wrong"));
    });
    println!("{rounds} rounds of {round:?}: {tally:?}");
    let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
    assert!(count(&tally.puts) > 50 && count(&tally.stores) > 50, "the load met the rounds: {tally:?}");
    assert!(
        count(&tally.healed) * 100 < count(&tally.puts) + count(&tally.gets),
        "few calls were repeated: {tally:?}"
    );
    drop(nodes);
}
