//! A master and a node in this process: for trying things out, and for engines that lend memory to the pool themselves.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use moontide_master::{MasterConfig, Server};
use moontide_node::{DiskConfig, Node, NodeConfig, StartError};
use moontide_types::ErrorCode;
use pyo3::prelude::*;

use crate::arguments::seconds;
use crate::errors;
use crate::process::OfProcess;

/// How long a node may take until the master has given it its groups.
const MOUNT_MAX: Duration = Duration::from_secs(5);

fn address(listen: &str) -> PyResult<SocketAddr> {
    listen
        .parse()
        .map_err(|_| errors::argument(format!("{listen:?} is no address; write it as \"127.0.0.1:0\"")))
}

/// A master in this process. It ends with the process, and everything it knows with it.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct LocalMaster {
    held: OfProcess<Server>,
    grpc: SocketAddr,
    admin: SocketAddr,
}

#[pymethods]
impl LocalMaster {
    #[new]
    #[pyo3(signature = (listen="127.0.0.1:0", *, groups=4))]
    fn new(py: Python<'_>, listen: &str, groups: u16) -> PyResult<LocalMaster> {
        let grpc_listen = address(listen)?;
        let beside = SocketAddr::new(grpc_listen.ip(), 0);
        let config = MasterConfig {
            grpc_listen,
            frame_listen: beside,
            admin_listen: beside,
            groups,
            // Nobody remembers anything of an earlier master.
            reallocate_wait_ms: 0,
            ..MasterConfig::default()
        };
        let server = py
            .detach(|| Server::start(config))
            .map_err(|error| errors::other(py, ErrorCode::InvalidArgument, error))?;
        let addresses = server.addresses();
        Ok(LocalMaster { grpc: addresses.grpc, admin: addresses.admin, held: OfProcess::new(server) })
    }

    /// What stores and nodes connect to.
    #[getter]
    fn address(&self) -> String {
        self.grpc.to_string()
    }

    /// Where its page for operators is.
    #[getter]
    fn admin_address(&self) -> String {
        self.admin.to_string()
    }

    /// Ends it. A second time it does nothing.
    fn close(&self, py: Python<'_>) {
        if let Some(server) = self.held.take() {
            py.detach(|| server.shutdown());
        }
    }
}

/// A node in this process: memory of this process as part of the pool.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct LocalNode {
    held: OfProcess<Node>,
    id: String,
    tcp: Vec<String>,
}

#[pymethods]
impl LocalNode {
    #[new]
    #[pyo3(signature = (master, memory_bytes, *, disk_dir=None, disk_limit_bytes=None, rack="", zone="",
        listen="127.0.0.1:0", slot_bytes=2048, drain=5.0))]
    #[allow(clippy::too_many_arguments)] // keywords of a constructor
    fn new(
        py: Python<'_>,
        master: &str,
        memory_bytes: u64,
        disk_dir: Option<PathBuf>,
        disk_limit_bytes: Option<u64>,
        rack: &str,
        zone: &str,
        listen: &str,
        slot_bytes: u64,
        drain: f64,
    ) -> PyResult<LocalNode> {
        let disk = disk_dir.map(|dir| DiskConfig { limit_bytes: disk_limit_bytes, ..DiskConfig::new(dir) });
        let config = NodeConfig {
            master: master.to_owned(),
            memory_bytes,
            slot_bytes,
            listen: vec![address(listen)?],
            rack: rack.to_owned(),
            zone: zone.to_owned(),
            admin_listen: None,
            disk,
            drain: seconds("drain", drain)?,
            ..NodeConfig::default()
        };
        let node = py.detach(|| {
            let node = Node::start(config).map_err(|error| match error {
                StartError::Config(_) | StartError::Disk(_) => {
                    (ErrorCode::InvalidArgument, error.to_string())
                }
                _ => (ErrorCode::Unreachable, error.to_string()),
            })?;
            match node.wait_until_mounted(MOUNT_MAX) {
                true => Ok(node),
                false => Err((
                    ErrorCode::Unreachable,
                    format!(
                        "the master at {master} has not taken the node in after {} s; check its log",
                        MOUNT_MAX.as_secs()
                    ),
                )),
            }
        });
        let node = node.map_err(|(code, message)| errors::other(py, code, message))?;
        let id = format!("{:016x}", node.id().0);
        let tcp = node.addresses().tcp.iter().map(ToString::to_string).collect();
        Ok(LocalNode { held: OfProcess::new(node), id, tcp })
    }

    /// Its number, as the command line writes it.
    #[getter]
    fn id(&self) -> &str {
        &self.id
    }

    /// Where it serves transfers.
    #[getter]
    fn addresses(&self) -> Vec<String> {
        self.tcp.clone()
    }

    /// Ends it; what it has is lost to the pool. A second time it does nothing.
    fn close(&self, py: Python<'_>) {
        if let Some(node) = self.held.take() {
            py.detach(|| node.shutdown());
        }
    }
}
