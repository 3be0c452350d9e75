//! [`DiskIdentity`]: node, cluster and backend that a disk belongs to. A restarted node keeps its id, because its
//! records name it; the disk of one cluster is of no use in another.

use std::io;
use std::path::Path;

use moontide_disk::BackendKind;
use moontide_types::NodeId;

use crate::durable_file;

/// Name of the identity file in the disk's directory.
const FILE: &str = "node.id";

/// Name of the file that a running node has locked. The system releases the lock when the process ends.
const LOCK: &str = "node.lock";

/// First line of the identity file, to recognise other files.
const MAGIC_LINE: &str = "moontide disk, version 1";

/// Node, cluster and backend of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct DiskIdentity {
    pub(crate) node: NodeId,
    pub(crate) cluster: u64,
    pub(crate) backend: BackendKind,
}

/// Exclusive use of a disk by this process, until it is dropped.
#[derive(Debug)]
pub(crate) struct DiskLock {
    pub(crate) identity: DiskIdentity,
    _lock: std::fs::File,
}

/// Reason why a directory cannot be this node's disk.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file cannot be read or written.
    #[error("{path}: {source}; set `disk.dir` to a directory that this user may write")]
    Io {
        /// Path of the file.
        path: String,
        /// I/O error.
        source: io::Error,
    },
    /// The identity file is not one of a node.
    #[error("{path} is not an identity file of a node; set `disk.dir` to an empty directory")]
    Foreign {
        /// Path of the file.
        path: String,
    },
    /// The disk belongs to another cluster.
    #[error(
        "{path} belongs to cluster {found:016x}, but the master's cluster is {expected:016x}; set `disk.dir` to \
         another directory, or empty this one if that cluster no longer exists"
    )]
    OtherCluster {
        /// Path of the file.
        path: String,
        /// Cluster id in the file.
        found: u64,
        /// Cluster id of the master.
        expected: u64,
    },
    /// Another process uses the disk.
    #[error("{path} is in use by another node; stop that one first, or set `disk.dir` to another directory")]
    InUse {
        /// Path of the lock file.
        path: String,
    },
    /// Another backend has written the disk; this one would not know its records and removals.
    #[error(
        "{path} names the backend {found}, but the configured one is {configured}; set `disk.backend` to {found}, \
         or empty the directory to change it"
    )]
    OtherBackend {
        /// Path of the file.
        path: String,
        /// Backend in the file.
        found: BackendKind,
        /// Configured backend.
        configured: BackendKind,
    },
    /// The disk belongs to another node.
    #[error(
        "{path} belongs to node {found}, but the configured node is {configured}; omit `node_id`, or use another \
         directory"
    )]
    OtherNode {
        /// Path of the file.
        path: String,
        /// Node id in the file.
        found: NodeId,
        /// Configured node id.
        configured: NodeId,
    },
}

impl DiskIdentity {
    /// Locks the disk for this process. Fails if another process uses it.
    pub(crate) fn lock(
        dir: &Path,
        cluster: u64,
        backend: BackendKind,
        configured: Option<NodeId>,
        random_id: impl FnOnce() -> io::Result<NodeId>,
    ) -> Result<DiskLock, IdentityError> {
        let path = dir.join(LOCK).display().to_string();
        let failed = |source: io::Error| IdentityError::Io { path: path.clone(), source };
        std::fs::create_dir_all(dir).map_err(failed)?;
        let lock = std::fs::File::options().create(true).append(true).open(dir.join(LOCK)).map_err(failed)?;
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => return Err(IdentityError::InUse { path }),
            Err(error) => return Err(failed(error.into())),
        }
        let identity = DiskIdentity::of(dir, cluster, backend, configured, random_id)?;
        Ok(DiskLock { identity, _lock: lock })
    }

    /// Returns the identity of the disk. Creates it for a new disk, with the configured node id or the one from
    /// `random_id`.
    fn of(
        dir: &Path,
        cluster: u64,
        backend: BackendKind,
        configured: Option<NodeId>,
        random_id: impl FnOnce() -> io::Result<NodeId>,
    ) -> Result<DiskIdentity, IdentityError> {
        let path = dir.join(FILE);
        let name = || path.display().to_string();
        let failed = |source| IdentityError::Io { path: name(), source };
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                std::fs::create_dir_all(dir).map_err(failed)?;
                let node = configured.map_or_else(random_id, Ok).map_err(failed)?;
                let identity = DiskIdentity { node, cluster, backend };
                identity.write(dir).map_err(failed)?;
                return Ok(identity);
            }
            Err(error) => return Err(failed(error)),
        };
        let found = DiskIdentity::parse(&text).ok_or_else(|| IdentityError::Foreign { path: name() })?;
        if found.cluster != cluster {
            return Err(IdentityError::OtherCluster {
                path: name(),
                found: found.cluster,
                expected: cluster,
            });
        }
        if found.backend != backend {
            return Err(IdentityError::OtherBackend {
                path: name(),
                found: found.backend,
                configured: backend,
            });
        }
        match configured {
            Some(configured) if configured != found.node => {
                Err(IdentityError::OtherNode { path: name(), found: found.node, configured })
            }
            _ => Ok(found),
        }
    }

    fn parse(text: &str) -> Option<DiskIdentity> {
        let mut lines = text.lines();
        if lines.next()? != MAGIC_LINE {
            return None;
        }
        let node: NodeId = lines.next()?.strip_prefix("node ")?.parse().ok()?;
        let cluster = u64::from_str_radix(lines.next()?.strip_prefix("cluster ")?, 16).ok()?;
        let backend = lines.next()?.strip_prefix("backend ")?.parse().ok()?;
        (node.0 != 0).then_some(DiskIdentity { node, cluster, backend })
    }

    /// Writes the identity file durably.
    fn write(&self, dir: &Path) -> io::Result<()> {
        let DiskIdentity { node, cluster, backend } = self;
        let text = format!("{MAGIC_LINE}\nnode {node}\ncluster {cluster:016x}\nbackend {backend}\n");
        durable_file::replace(dir, FILE, text.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disk_identity_persists_and_rejects_other_cluster_or_node() {
        let dir = std::env::temp_dir().join(format!("moontide-identity-{}", std::process::id()));
        let random_id = || Ok(NodeId(0xabc));
        let bucket = BackendKind::Bucket;
        let lock = DiskIdentity::lock(&dir, 7, bucket, None, random_id).unwrap();
        let first = lock.identity;
        assert_eq!(first, DiskIdentity { node: NodeId(0xabc), cluster: 7, backend: bucket });
        let second = DiskIdentity::lock(&dir, 7, bucket, None, random_id).unwrap_err();
        assert!(matches!(second, IdentityError::InUse { .. }), "{second}");
        drop(lock);
        assert_eq!(DiskIdentity::lock(&dir, 7, bucket, None, || unreachable!()).unwrap().identity, first);
        assert_eq!(DiskIdentity::of(&dir, 7, bucket, Some(NodeId(0xabc)), random_id).unwrap(), first);
        let other = DiskIdentity::of(&dir, 7, BackendKind::File, None, random_id).unwrap_err();
        assert!(matches!(other, IdentityError::OtherBackend { .. }), "{other}");
        let other = DiskIdentity::of(&dir, 8, bucket, None, random_id).unwrap_err();
        assert!(matches!(other, IdentityError::OtherCluster { found: 7, expected: 8, .. }), "{other}");
        let other = DiskIdentity::of(&dir, 7, bucket, Some(NodeId(5)), random_id).unwrap_err();
        assert!(matches!(other, IdentityError::OtherNode { .. }), "{other}");
        for text in
            ["", "moontide disk, version 1\nnode 0\ncluster 0\n", "moontide disk, version 1\nnode x\n"]
        {
            std::fs::write(dir.join(FILE), text).unwrap();
            let foreign = DiskIdentity::of(&dir, 7, bucket, None, random_id).unwrap_err();
            assert!(matches!(foreign, IdentityError::Foreign { .. }), "{foreign}");
        }
        std::fs::remove_dir_all(&dir).unwrap();
    }
}
