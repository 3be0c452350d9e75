//! A sample node in this process, and links to it.

#![allow(dead_code, unreachable_pub, missing_docs, reason = "each test file uses its own part")]

use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use moontide_auth::testing::{Authority, Directory};
use moontide_auth::{Credentials, Role};
use moontide_transfer::sample::{SampleNode, SampleNodeConfig};
use moontide_transfer::tcp::{TcpConfig, TcpEngine, TcpServer, TcpServerConfig};
use moontide_transfer::{Engine, EngineKind, Link, Metrics, Op, Peer, TransferError, run};
use moontide_types::ErrorCode;

pub struct TestNode {
    pub sample: Arc<SampleNode>,
    pub server: TcpServer,
    pub metrics: Arc<Metrics>,
}

impl TestNode {
    pub fn new(config: SampleNodeConfig) -> TestNode {
        TestNode::with(config, TcpServerConfig::default())
    }

    pub fn with(config: SampleNodeConfig, server: TcpServerConfig) -> TestNode {
        let metrics = Metrics::new();
        let server = TcpServerConfig { credentials: credentials(Role::Node(config.node)), ..server };
        let sample = Arc::new(SampleNode::new(config).unwrap());
        let server = TcpServer::start(server, Arc::clone(&sample) as _, Arc::clone(&metrics)).unwrap();
        TestNode { sample, server, metrics }
    }

    pub fn config(&self) -> &SampleNodeConfig {
        self.sample.config()
    }

    pub fn peer(&self) -> Peer {
        let addresses = self.server.addresses().iter().map(|a| (EngineKind::Tcp, a.to_string()));
        Peer { node: self.config().node, addresses: addresses.collect() }
    }

    pub fn link(&self, connections: usize) -> Arc<dyn Link> {
        self.link_with(TcpConfig { connections, ..TcpConfig::default() })
    }

    pub fn link_with(&self, config: TcpConfig) -> Arc<dyn Link> {
        let config = TcpConfig { credentials: credentials(Role::Operator), ..config };
        TcpEngine::new(config, Arc::clone(&self.metrics)).connect(&self.peer(), soon()).unwrap()
    }
}

/// The authority of all certificates, and where they are.
pub static AUTHORITY: LazyLock<(Authority, Directory)> =
    LazyLock::new(|| (Authority::new(), Directory::new()));

/// Returns a certificate in the tests of `tls.rs`, which include those of `tcp.rs`, and none in others.
pub fn credentials(role: Role) -> Option<Arc<Credentials>> {
    let (authority, directory) = &*AUTHORITY;
    let name = role.to_string().replace('/', "-");
    (env!("CARGO_CRATE_NAME") == "tls")
        .then(|| Credentials::load(authority.issue(directory, &name, role)).unwrap())
}

/// Returns a deadline far enough in the future for every successful operation.
pub fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

pub fn get(
    link: &dyn Link,
    config: &SampleNodeConfig,
    record: u32,
) -> Result<Result<Vec<u8>, ErrorCode>, TransferError> {
    let mut bytes = vec![0xee; config.record_bytes as usize];
    let mut ops = [Op::get(config.target(record), 0, &mut bytes)];
    run(link, &mut ops, soon())?;
    let outcome = ops[0].outcome().expect("the run succeeded");
    Ok(outcome.map(|()| bytes))
}
