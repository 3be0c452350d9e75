//! [`DiskIdentity`]: node, cluster and backend that a disk belongs to. A restarted node keeps its id, because its
//! records name it; the disk of one cluster is of no use in another.

use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

use moontide_disk::BackendKind;
use moontide_types::NodeId;
use tracing::{info, warn};

use super::{directories::MEMBERS_FILE, memory_list};
use crate::sync_marks;
use moontide_rt::fs;

/// Name of the identity file in a directory of the disk.
pub(super) const FILE: &str = "node.id";

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
        "{path} belongs to node {found}, but this node is {configured} by `node_id` or another directory; omit \
         `node_id`, or use another directory"
    )]
    OtherNode {
        /// Path of the file.
        path: String,
        /// Node id in the file.
        found: NodeId,
        /// Node id of the configuration, or of another directory.
        configured: NodeId,
    },
    /// The list of the directories of a disk is malformed.
    #[error("{path} is malformed; empty its directory, or omit it from `disk.dir`")]
    Members {
        /// Path of the file.
        path: String,
    },
    /// A directory was the only one of the node, and another one was used without it: it is not known which is newer.
    #[error(
        "{first} was the whole disk of this node, and {second} was used without it; empty the older one, or omit it"
    )]
    TwoDisks {
        /// The directory that was the only one.
        first: String,
        /// Another one.
        second: String,
    },
    /// Too many directories of the node are missing to know which of the others have all removals.
    #[error(
        "{paths}: of the {members} directories of this node's disk, {present} can be used, too few to know what was \
         removed meanwhile; add the missing ones to `disk.dir`, or empty these to start without their objects"
    )]
    NoQuorum {
        /// Configured directories.
        paths: String,
        /// Number of those that belong to the disk.
        present: usize,
        /// Number of all directories of the disk.
        members: usize,
    },
}

impl DiskIdentity {
    /// Locks a directory for this process until the file is dropped. Fails if another process uses it.
    pub(super) fn lock(dir: &Path) -> Result<std::fs::File, IdentityError> {
        let path = dir.join(LOCK).display().to_string();
        let failed = |source: io::Error| IdentityError::Io { path: path.clone(), source };
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(dir).map_err(failed)?;
        make_private(dir).map_err(failed)?;
        let lock = std::fs::File::options().create(true).append(true).mode(0o600).open(dir.join(LOCK));
        let lock = lock.map_err(failed)?;
        match rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(lock),
            Err(rustix::io::Errno::WOULDBLOCK) => Err(IdentityError::InUse { path }),
            Err(error) => Err(failed(error.into())),
        }
    }

    /// Returns the identity of a directory; `None` for a new one.
    pub(super) fn read(dir: &Path) -> Result<Option<DiskIdentity>, IdentityError> {
        let path = dir.join(FILE);
        let name = || path.display().to_string();
        match std::fs::read_to_string(&path) {
            Ok(text) => match DiskIdentity::parse(&text) {
                Some(identity) => Ok(Some(identity)),
                None => Err(IdentityError::Foreign { path: name() }),
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(source) => Err(IdentityError::Io { path: name(), source }),
        }
    }

    /// Checks that a directory with this identity can be one of a disk with another one.
    pub(super) fn check(&self, dir: &Path, expected: &DiskIdentity) -> Result<(), IdentityError> {
        let path = || dir.join(FILE).display().to_string();
        if self.cluster != expected.cluster {
            let (found, expected) = (self.cluster, expected.cluster);
            return Err(IdentityError::OtherCluster { path: path(), found, expected });
        }
        if self.backend != expected.backend {
            let (found, configured) = (self.backend, expected.backend);
            return Err(IdentityError::OtherBackend { path: path(), found, configured });
        }
        if self.node != expected.node {
            let (found, configured) = (self.node, expected.node);
            return Err(IdentityError::OtherNode { path: path(), found, configured });
        }
        Ok(())
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
    pub(super) fn write(&self, dir: &Path) -> io::Result<()> {
        let DiskIdentity { node, cluster, backend } = self;
        let text = format!("{MAGIC_LINE}\nnode {node}\ncluster {cluster:016x}\nbackend {backend}\n");
        fs::replace(dir, FILE, text.as_bytes())
    }
}

/// Lets only this user enter a directory that existed before: earlier versions made files in it that all users
/// may read, and so the objects. A directory with files of other programs stays as it is, since
/// they may need it; so does one of another user. Refusing either would stop nodes that work.
fn make_private(dir: &Path) -> io::Result<()> {
    let mode = std::fs::metadata(dir)?.permissions().mode();
    if mode & 0o077 == 0 {
        return Ok(());
    }
    let (mut is_empty, mut is_shared) = (true, false);
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        is_empty = false;
        is_shared |= !BackendKind::owns(Path::new(&name), entry.file_type()?.is_dir())
            && !name.to_str().is_some_and(|name| {
                let name = name.strip_suffix(".new").unwrap_or(name);
                [FILE, LOCK, MEMBERS_FILE, sync_marks::FILE, memory_list::FILE, "lost+found"].contains(&name)
            });
    }
    let (path, mode) = (dir.display(), format!("{:03o}", mode & 0o777));
    if is_shared {
        warn!(dir = %path, mode, "disk directory is open to other users and has files of other programs; use one of its own");
        return Ok(());
    }
    match std::fs::set_permissions(dir, PermissionsExt::from_mode(0o700)) {
        Ok(()) if is_empty => info!(dir = %path, "disk directory is now private to this user"),
        Ok(()) => {
            warn!(dir = %path, mode, "other users could read the objects in this disk directory; it is now private")
        }
        Err(error) => {
            warn!(dir = %path, mode, %error, "disk directory is open to other users, and cannot be made private")
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directory_is_made_private_unless_other_programs_use_it() {
        let root = std::env::temp_dir().join(format!("moontide-private-{}", std::process::id()));
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
        let with = |name: &str, files: &[&str]| {
            let dir = root.join(name);
            std::fs::create_dir_all(&dir).unwrap();
            files.iter().for_each(|file| std::fs::write(dir.join(file), "content").unwrap());
            std::fs::set_permissions(&dir, PermissionsExt::from_mode(0o755)).unwrap();
            dir
        };
        let records = ["0000000000000001.bucket", "removed.log", "node.id", "disk.members", "sync.marks.new"];
        let others = ["node.id", "photo.jpg"];
        for (name, files, expected) in
            [("empty", &[][..], 0o700), ("records", &records[..], 0o700), ("shared", &others[..], 0o755)]
        {
            let dir = with(name, files);
            drop(DiskIdentity::lock(&dir).unwrap());
            assert_eq!((mode(&dir), mode(&dir.join(LOCK))), (expected, 0o600), "{name}");
        }
        let new = root.join("new/disk");
        drop(DiskIdentity::lock(&new).unwrap());
        assert_eq!((mode(&new), mode(new.parent().unwrap())), (0o700, 0o700));
        let identity = DiskIdentity { node: NodeId(1), cluster: 2, backend: BackendKind::default() };
        identity.write(&new).unwrap();
        assert_eq!(mode(&new.join(FILE)), 0o600);
        std::fs::remove_dir_all(&root).unwrap();
    }
}
