//! [`EngineKind`]: kinds of transport engines and their names.

use std::fmt;

/// Kind of a transport engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// Shared memory of a node on the same host.
    Shm,
    /// UCX: one-sided over RDMA.
    Ucx,
    /// Frames over TCP.
    Tcp,
}

impl EngineKind {
    /// Returns the name used in addresses, logs and metrics.
    pub fn name(self) -> &'static str {
        match self {
            EngineKind::Shm => "shm",
            EngineKind::Ucx => "ucx",
            EngineKind::Tcp => "tcp",
        }
    }

    /// Returns the engine with this name.
    pub fn from_name(name: &str) -> Option<EngineKind> {
        [EngineKind::Shm, EngineKind::Ucx, EngineKind::Tcp].into_iter().find(|kind| kind.name() == name)
    }
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
