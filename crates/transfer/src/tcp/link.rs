//! [`TcpEngine`] and [`TcpLink`]: the TCP engine, and one peer reached by it.
//!
//! ```text
//!   start ── plan: split into frames ──▶ choose a connection for each ──▶ the caller's thread, or the connection's own
//!              ▲                                                              │
//!              └────────── a frame whose connection failed is sent again ─────┘
//! ```
//!
//! Every frame can be sent again: reads change nothing, writes write the same bytes to a record that is not readable
//! yet, calls are idempotent by protocol.

use std::net::SocketAddr;

use moontide_proto::FrameKind;
use moontide_rt::time::Instant;
use moontide_types::NodeId;
use tracing::warn;

use crate::engine::{Engine, EngineUnavailable, Link, Peer, Pending, PipelinedPut, Score, WaitMode};
use crate::engine_kind::EngineKind;
use crate::error::TransferError;
use crate::framing::plan;
use crate::metrics::Metrics;
use crate::op::OpCore;
use crate::tcp::connection_set::{ConnectionSet, TcpConfig};
use crate::tcp::pending::TcpPending;
use crate::tcp::pipeline;
use crate::topology::{RailAddress, local_addresses, pair};
use moontide_rt::sync::Arc;

/// Engine that reaches every peer with a TCP address.
#[derive(Debug)]
pub struct TcpEngine {
    config: TcpConfig,
    metrics: Arc<Metrics>,
}

impl TcpEngine {
    /// Creates an engine.
    pub fn new(config: TcpConfig, metrics: Arc<Metrics>) -> TcpEngine {
        TcpEngine { config, metrics }
    }

    fn rails(&self, peer: &Peer) -> Vec<RailAddress> {
        let addresses: Vec<SocketAddr> =
            peer.addresses_of(EngineKind::Tcp).filter_map(|address| address.parse().ok()).collect();
        let local = local_addresses().unwrap_or_else(|error| {
            warn!(%error, "cannot list the addresses of this host; the kernel chooses the local address");
            Vec::new()
        });
        pair(&local, &addresses, &self.config.bind)
    }
}

impl Engine for TcpEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Tcp
    }

    fn score(&self, peer: &Peer) -> Result<Score, EngineUnavailable> {
        let mut addresses = peer.addresses_of(EngineKind::Tcp).peekable();
        addresses.peek().ok_or(EngineUnavailable::NoAddress)?;
        let readable = addresses.any(|address| address.parse::<SocketAddr>().is_ok());
        if readable { Ok(Score::STREAM) } else { Err(EngineUnavailable::BadAddress) }
    }

    fn connect(&self, peer: &Peer, deadline: Instant) -> Result<Arc<dyn Link>, TransferError> {
        let (config, metrics) = (self.config.clone(), Arc::clone(&self.metrics));
        metrics.link_opened(EngineKind::Tcp);
        let link = TcpLink { shared: ConnectionSet::open(peer.node, self.rails(peer), config, metrics) };
        link.shared.assign(&[0], deadline)?;
        Ok(Arc::new(link))
    }
}

/// Connections to one peer over TCP. Dropping it ends its connections and threads.
#[derive(Debug)]
pub struct TcpLink {
    shared: Arc<ConnectionSet>,
}

impl Drop for TcpLink {
    fn drop(&mut self) {
        self.shared.close();
        self.shared.metrics.link_closed(EngineKind::Tcp);
    }
}

impl Link for TcpLink {
    fn engine(&self) -> EngineKind {
        EngineKind::Tcp
    }

    fn node(&self) -> NodeId {
        self.shared.node
    }

    unsafe fn start(&self, ops: Vec<OpCore>, deadline: Instant, wait_mode: WaitMode) -> Box<dyn Pending> {
        let frames = plan(&ops, self.shared.width());
        Box::new(TcpPending::transfer(Arc::clone(&self.shared), ops.into(), frames, deadline, wait_mode))
    }

    unsafe fn put_pipelined(
        &self,
        begin: Vec<u8>,
        ops: Vec<OpCore>,
        commit: &mut dyn FnMut(&[Option<u64>]) -> Vec<u8>,
        deadline: Instant,
    ) -> PipelinedPut {
        // SAFETY: the caller upholds the contract, which is the same.
        unsafe { pipeline::put_pipelined(&self.shared, begin, ops, commit, deadline) }
    }

    fn start_call(
        &self,
        kind: FrameKind,
        body: Vec<u8>,
        deadline: Instant,
        wait_mode: WaitMode,
    ) -> Box<dyn Pending> {
        Box::new(TcpPending::call(Arc::clone(&self.shared), kind, body, deadline, wait_mode))
    }
}
