//! [`Identity`]: whose disk it is. A node that comes back is the same one, because its records are; and a disk of one
//! cluster is of no use in another.

use std::io;
use std::path::Path;

use moontide_disk::BackendKind;
use moontide_types::NodeId;

/// The file in the disk's directory.
const FILE: &str = "node.id";

/// The file that a running node has locked. The system lets go of it when the process ends, however it ends.
const LOCK: &str = "node.lock";

/// Written in front, so that a file of somebody else is told from one of ours.
const FIRST_LINE: &str = "moontide disk, version 1";

/// A node, its cluster, and how records stand on its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Identity {
    pub(crate) node: NodeId,
    pub(crate) cluster: u64,
    pub(crate) backend: BackendKind,
}

/// A disk that is this process's alone until this is dropped.
#[derive(Debug)]
pub(crate) struct Held {
    pub(crate) identity: Identity,
    _lock: std::fs::File,
}

/// Why a directory cannot be this node's disk.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// It cannot be read or written.
    #[error("{path}: {source}; set `disk.dir` to a directory that this user may write")]
    Io {
        /// The file.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Somebody else's file.
    #[error("{path} is not what a node has written; set `disk.dir` to an empty directory")]
    Foreign {
        /// The file.
        path: String,
    },
    /// Of another cluster.
    #[error(
        "{path} belongs to cluster {found:016x}, and the master's is {expected:016x}; set `disk.dir` to another \
         directory, or empty this one if that cluster is gone for good"
    )]
    OtherCluster {
        /// The file.
        path: String,
        /// The cluster that it names.
        found: u64,
        /// The master's.
        expected: u64,
    },
    /// Another node process uses it.
    #[error("{path} is in use by another node; stop that one first, or set `disk.dir` to another directory")]
    InUse {
        /// The file.
        path: String,
    },
    /// Written by another backend, whose records, and whose removals, this one would not know.
    #[error(
        "{path} says that the directory is of the backend {found}, and the configuration says {wanted}; set \
         `disk.backend` to {found}, or empty the directory to change it"
    )]
    OtherBackend {
        /// The file.
        path: String,
        /// The backend that it names.
        found: BackendKind,
        /// The one that is wanted.
        wanted: BackendKind,
    },
    /// Of another node than the configuration names.
    #[error(
        "{path} belongs to node {found}, and the configuration says {wanted}; leave `node` out, or use another directory"
    )]
    OtherNode {
        /// The file.
        path: String,
        /// The node that it names.
        found: NodeId,
        /// The one that is wanted.
        wanted: NodeId,
    },
}

impl Identity {
    /// Takes the disk for this process, if nobody has it.
    pub(crate) fn hold(
        dir: &Path,
        cluster: u64,
        backend: BackendKind,
        wanted: Option<NodeId>,
        draw: impl FnOnce() -> io::Result<NodeId>,
    ) -> Result<Held, IdentityError> {
        let path = dir.join(LOCK).display().to_string();
        let failed = |source: io::Error| IdentityError::Io { path: path.clone(), source };
        std::fs::create_dir_all(dir).map_err(failed)?;
        let lock = std::fs::File::options().create(true).append(true).open(dir.join(LOCK)).map_err(failed)?;
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(IdentityError::InUse { path }),
            Err(error) => return Err(failed(error.into())),
        }
        let identity = Identity::of(dir, cluster, backend, wanted, draw)?;
        Ok(Held { identity, _lock: lock })
    }

    /// The disk's identity; a new disk gets this one's: the node that is wanted, or the one that `draw` gives.
    fn of(
        dir: &Path,
        cluster: u64,
        backend: BackendKind,
        wanted: Option<NodeId>,
        draw: impl FnOnce() -> io::Result<NodeId>,
    ) -> Result<Identity, IdentityError> {
        let path = dir.join(FILE);
        let name = || path.display().to_string();
        let failed = |source| IdentityError::Io { path: name(), source };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                std::fs::create_dir_all(dir).map_err(failed)?;
                let node = wanted.map_or_else(draw, Ok).map_err(failed)?;
                let identity = Identity { node, cluster, backend };
                identity.write(dir).map_err(failed)?;
                return Ok(identity);
            }
            Err(error) => return Err(failed(error)),
        };
        let found = Identity::parse(&text).ok_or_else(|| IdentityError::Foreign { path: name() })?;
        if found.cluster != cluster {
            return Err(IdentityError::OtherCluster {
                path: name(),
                found: found.cluster,
                expected: cluster,
            });
        }
        if found.backend != backend {
            return Err(IdentityError::OtherBackend { path: name(), found: found.backend, wanted: backend });
        }
        match wanted {
            Some(wanted) if wanted != found.node => {
                Err(IdentityError::OtherNode { path: name(), found: found.node, wanted })
            }
            _ => Ok(found),
        }
    }

    fn parse(text: &str) -> Option<Identity> {
        let mut lines = text.lines();
        if lines.next()? != FIRST_LINE {
            return None;
        }
        let mut number = |label: &str| {
            let digits = lines.next()?.strip_prefix(label)?;
            u64::from_str_radix(digits, 16).ok()
        };
        let (node, cluster) = (number("node ")?, number("cluster ")?);
        let backend = lines.next()?.strip_prefix("backend ")?.parse().ok()?;
        (node != 0).then_some(Identity { node: NodeId(node), cluster, backend })
    }

    /// Durable before anything is written under it.
    fn write(&self, dir: &Path) -> io::Result<()> {
        use std::io::Write as _;
        let new = dir.join("node.id.new");
        let mut file = std::fs::File::create(&new)?;
        let Identity { node: NodeId(node), cluster, backend } = self;
        write!(file, "{FIRST_LINE}\nnode {node:016x}\ncluster {cluster:016x}\nbackend {backend}\n")?;
        file.sync_all()?;
        std::fs::rename(&new, dir.join(FILE))?;
        std::fs::File::open(dir)?.sync_all()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_disk_keeps_its_node_and_refuses_other_clusters() {
        let dir = std::env::temp_dir().join(format!("moontide-identity-{}", std::process::id()));
        let draw = || Ok(NodeId(0xabc));
        let bucket = BackendKind::Bucket;
        let held = Identity::hold(&dir, 7, bucket, None, draw).unwrap();
        let first = held.identity;
        assert_eq!(first, Identity { node: NodeId(0xabc), cluster: 7, backend: bucket });
        let second = Identity::hold(&dir, 7, bucket, None, draw).unwrap_err();
        assert!(matches!(second, IdentityError::InUse { .. }), "{second}");
        drop(held);
        assert_eq!(Identity::hold(&dir, 7, bucket, None, || unreachable!()).unwrap().identity, first);
        assert_eq!(Identity::of(&dir, 7, bucket, Some(NodeId(0xabc)), draw).unwrap(), first);
        let other = Identity::of(&dir, 7, BackendKind::File, None, draw).unwrap_err();
        assert!(matches!(other, IdentityError::OtherBackend { .. }), "{other}");
        let other = Identity::of(&dir, 8, bucket, None, draw).unwrap_err();
        assert!(matches!(other, IdentityError::OtherCluster { found: 7, expected: 8, .. }), "{other}");
        let other = Identity::of(&dir, 7, bucket, Some(NodeId(5)), draw).unwrap_err();
        assert!(matches!(other, IdentityError::OtherNode { .. }), "{other}");
        for text in
            ["", "moontide disk, version 1\nnode 0\ncluster 0\n", "moontide disk, version 1\nnode x\n"]
        {
            std::fs::write(dir.join(FILE), text).unwrap();
            let foreign = Identity::of(&dir, 7, bucket, None, draw).unwrap_err();
            assert!(matches!(foreign, IdentityError::Foreign { .. }), "{foreign}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
