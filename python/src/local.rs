//! A master and a node in this process, for development clusters and for programs that contribute memory to a pool.

use std::net::SocketAddr;
use std::time::Duration;

use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig, StartError};
use moontide_types::ErrorCode;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arguments::set_named;
use crate::errors;
use crate::process::ProcessLocal;

/// Timeout for the master to mount a new node.
const MOUNT_MAX: Duration = Duration::from_secs(5);

/// Bytes of memory per header slot of a node in this process.
const BYTES_PER_SLOT: u64 = 2048;

fn address(listen: &str) -> PyResult<SocketAddr> {
    listen
        .parse()
        .map_err(|_| errors::argument(format!("{listen:?} is not an address; use the form \"127.0.0.1:0\"")))
}

/// A master in this process. It ends with the process, and its state is lost.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct LocalMaster {
    held: ProcessLocal<Server>,
    grpc: SocketAddr,
    admin: SocketAddr,
}

#[pymethods]
impl LocalMaster {
    #[new]
    #[pyo3(signature = (listen="127.0.0.1:0", *, groups=1))]
    fn new(py: Python<'_>, listen: &str, groups: u16) -> PyResult<LocalMaster> {
        let grpc_listen = address(listen)?;
        let any_port = SocketAddr::new(grpc_listen.ip(), 0);
        let config = MasterConfig {
            grpc_listen,
            frame_listen: any_port,
            admin_listen: any_port,
            groups: Some(groups),
            // The cluster is new: no earlier master has granted memory.
            reallocation_delay_ms: 0,
            ..MasterConfig::default()
        };
        let server = py
            .detach(|| Server::start(config))
            .map_err(|error| errors::other(py, ErrorCode::InvalidArgument, error))?;
        let addresses = server.addresses();
        Ok(LocalMaster { grpc: addresses.grpc, admin: addresses.admin, held: ProcessLocal::new(server) })
    }

    /// Address for stores and nodes.
    #[getter]
    fn address(&self) -> String {
        self.grpc.to_string()
    }

    /// Address of the admin HTTP endpoints.
    #[getter]
    fn admin_address(&self) -> String {
        self.admin.to_string()
    }

    /// Shuts the master down. Further calls of close() do nothing.
    fn close(&self, py: Python<'_>) {
        if let Some(server) = self.held.take() {
            py.detach(|| server.shutdown());
        }
    }
}

/// A node in this process. It contributes memory of this process to the pool.
#[pyclass(module = "moontide._native", frozen)]
#[derive(Debug)]
pub(crate) struct LocalNode {
    held: ProcessLocal<Node>,
    id: String,
    tcp: Vec<String>,
}

#[pymethods]
impl LocalNode {
    #[new]
    #[pyo3(signature = (master, memory_bytes, **settings))]
    fn new(
        py: Python<'_>,
        master: &str,
        memory_bytes: &Bound<'_, PyAny>,
        settings: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<LocalNode> {
        let defaults = NodeConfig {
            master: master.to_owned(),
            bytes_per_slot: BYTES_PER_SLOT,
            admin_listen: None,
            ..NodeConfig::default()
        };
        // The environment belongs to the command: a program states what its node contributes.
        let mut loaded = moontide_settings::load(defaults, None, [], []).map_err(errors::argument)?;
        let memory = PyDict::new(py);
        memory.set_item("memory_bytes", memory_bytes)?;
        set_named(&mut loaded, Some(&memory))?;
        set_named(&mut loaded, settings)?;
        let config = loaded.config;
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
                        "the master at {master} has not mounted the node after {} s; check its log",
                        MOUNT_MAX.as_secs()
                    ),
                )),
            }
        });
        let node = node.map_err(|(code, message)| errors::other(py, code, message))?;
        let id = node.id().to_string();
        let tcp = node.addresses().tcp.iter().map(ToString::to_string).collect();
        Ok(LocalNode { held: ProcessLocal::new(node), id, tcp })
    }

    /// Node id in the format of the command line.
    #[getter]
    fn id(&self) -> &str {
        &self.id
    }

    /// Addresses of the transfer servers.
    #[getter]
    fn addresses(&self) -> Vec<String> {
        self.tcp.clone()
    }

    /// Shuts the node down; objects that are not on its disk are lost. Further calls of close() do nothing.
    fn close(&self, py: Python<'_>) {
        if let Some(node) = self.held.take() {
            py.detach(|| node.shutdown());
        }
    }
}
