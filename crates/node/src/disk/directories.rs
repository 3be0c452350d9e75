//! [`DiskDirectories`]: the directories of a node's disk, locked for this process, with the agreement which of them hold
//! valid records ([`members`](super::members)).

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use moontide_disk::BackendKind;
use moontide_types::NodeId;
use tracing::{info, warn};

use super::identity::{DiskIdentity, IdentityError};
use super::members::{DeviceId, Found, MemberError, MemberFiles, MemberState, Members};
use super::memory_list;
use crate::sync_marks;
use moontide_rt::fs;

/// Name of the file with the [`MemberState`]. A node that always had one directory has none.
pub(super) const MEMBERS_FILE: &str = "disk.members";

/// Directories that this process has locked, until they are dropped.
#[derive(Debug)]
pub(crate) struct DiskDirectories {
    /// Node that the disk belongs to.
    pub(crate) node: NodeId,
    /// Directories that can be used, in the order of the configuration.
    pub(super) usable: Vec<PathBuf>,
    pub(super) members: DiskMembers,
    /// One for each usable directory.
    pub(super) locks: Vec<Arc<std::fs::File>>,
}

/// The agreement of the usable directories.
#[derive(Debug)]
pub(super) struct DiskMembers {
    /// `None`: there is one directory, and there never was another one.
    members: Option<Members>,
    files: Files,
}

/// State files of directories.
#[derive(Debug)]
struct Files(Vec<PathBuf>);

impl MemberFiles for Files {
    fn write(&mut self, directory: usize, state: &MemberState) -> io::Result<()> {
        fs::replace(&self.0[directory], MEMBERS_FILE, state.to_text().as_bytes())
    }

    fn empty(&mut self, directory: usize) -> io::Result<()> {
        let path = &self.0[directory];
        info!(dir = %path.display(), "emptying a disk directory that may have missed removals");
        remove_records(path, Path::new(""))?;
        for file in [sync_marks::FILE, memory_list::FILE] {
            match std::fs::remove_file(path.join(file)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        std::fs::File::open(path)?.sync_all()
    }
}

/// Removes what a backend has made. Files of other programs stay.
fn remove_records(root: &Path, below: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(root.join(below))? {
        let entry = entry?;
        let (path, is_dir) = (below.join(entry.file_name()), entry.file_type()?.is_dir());
        match is_dir {
            _ if !BackendKind::owns(&path, is_dir) => {}
            false => std::fs::remove_file(entry.path())?,
            true => {
                remove_records(root, &path)?;
                // With a file of another program in it, it stays.
                if std::fs::remove_dir(entry.path()).is_err() {
                    std::fs::File::open(entry.path())?.sync_all()?;
                }
            }
        }
    }
    Ok(())
}

impl DiskMembers {
    /// Durably excludes directories: after the next start they are emptied before they are used.
    pub(super) fn exclude(&mut self, directories: &[usize]) -> io::Result<()> {
        let Some(members) = &mut self.members else {
            return Err(io::Error::other("it is the only directory"));
        };
        members.exclude(&mut self.files, directories).map_err(|error| match error {
            MemberError::Write { directory, source } => {
                let path = self.files.0[directory].display();
                io::Error::new(source.kind(), format!("{path}: {source}"))
            }
            MemberError::NoQuorum { present, members } => io::Error::other(format!(
                "the other {present} of {members} directories are too few to decide it: more than half are needed, or \
                 half with the first one"
            )),
            MemberError::TooMany => io::Error::other("too many changes were not completed; restart the node"),
        })
    }

    /// The only directory of a disk in a test.
    #[cfg(any(test, feature = "testing"))]
    pub(super) fn single(path: &Path) -> DiskMembers {
        DiskMembers { members: None, files: Files(vec![path.to_owned()]) }
    }
}

impl DiskDirectories {
    /// Directories that can be used.
    pub(crate) fn usable(&self) -> &[PathBuf] {
        &self.usable
    }

    /// Locks the directories, and makes those that are new or have missed removals empty members of the disk.
    pub(crate) fn open(
        paths: &[PathBuf],
        cluster: u64,
        backend: BackendKind,
        configured: Option<NodeId>,
        random_u64: impl Fn() -> io::Result<u64>,
    ) -> Result<DiskDirectories, IdentityError> {
        let mut opened = Vec::new();
        let mut unusable = None;
        for path in paths {
            let locked = DiskIdentity::lock(path).and_then(|lock| {
                let (identity, state) = (DiskIdentity::read(path)?, read_state(path)?);
                Ok(Opened { path: path.clone(), lock, identity, state })
            });
            match locked {
                Ok(directory) => opened.push(directory),
                Err(error @ IdentityError::Io { .. }) => {
                    warn!(dir = %path.display(), %error, "disk directory not usable");
                    unusable = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        let found = opened.iter().find_map(|directory| Some(directory.identity?.node));
        // New directories alone are another node; the objects of this one may be in the one that is not usable.
        if let (None, Some(error)) = (found, unusable) {
            return Err(error);
        }
        let random = || {
            let failed = |source| IdentityError::Io { path: paths[0].display().to_string(), source };
            Ok(random_u64().map_err(failed)?.max(1))
        };
        let node = match configured.or(found) {
            Some(node) => node,
            None => NodeId(random()?),
        };
        let expected = DiskIdentity { node, cluster, backend };
        for directory in &opened {
            directory.identity.iter().try_for_each(|identity| identity.check(&directory.path, &expected))?;
        }
        let usable: Vec<PathBuf> = opened.iter().map(|directory| directory.path.clone()).collect();
        let mut files = Files(usable.clone());
        let members = match &opened[..] {
            // A node with one directory needs no agreement.
            [Opened { state: None, .. }] if paths.len() == 1 => None,
            _ => {
                let joined = |path: &PathBuf| path.display().to_string();
                let all = paths.iter().map(joined).collect::<Vec<_>>().join(", ");
                Some(agree(&opened, &mut files, all, random)?)
            }
        };
        // After the lists: a directory with an identity and without a list was always the only one.
        for directory in opened.iter().filter(|directory| directory.identity.is_none()) {
            let failed = |source| IdentityError::Io { path: directory.path.display().to_string(), source };
            expected.write(&directory.path).map_err(failed)?;
        }
        let locks = opened.into_iter().map(|directory| Arc::new(directory.lock)).collect();
        Ok(DiskDirectories { node, usable, members: DiskMembers { members, files }, locks })
    }
}

/// A directory, locked.
#[derive(Debug)]
struct Opened {
    path: PathBuf,
    lock: std::fs::File,
    identity: Option<DiskIdentity>,
    state: Option<MemberState>,
}

/// Makes the directories a list. `all` are the configured ones, for errors.
fn agree(
    opened: &[Opened],
    files: &mut Files,
    all: String,
    random: impl Fn() -> Result<u64, IdentityError>,
) -> Result<Members, IdentityError> {
    let own = opened.iter().filter(|directory| directory.identity.is_some());
    let own: Vec<&Opened> = own.collect();
    if let Some(alone) = own.iter().find(|directory| directory.state.is_none())
        && let Some(other) = own.iter().find(|directory| directory.path != alone.path)
    {
        let path = |directory: &Opened| directory.path.display().to_string();
        return Err(IdentityError::TwoDisks { first: path(alone), second: path(other) });
    }
    let ids: Vec<u64> = (0..2 * opened.len()).map(|_| random()).collect::<Result<_, _>>()?;
    let mut ids = ids.into_iter();
    let mut random_id = || DeviceId(ids.next().expect("two for each directory"));
    let states = opened.iter().map(|directory| (directory.identity.is_some(), directory.state.clone()));
    let found = Found::of(&states.collect::<Vec<_>>(), &mut random_id);
    let (members, is_kept) = Members::start(&found, files, random_id).map_err(|error| match error {
        MemberError::Write { directory, source } => {
            IdentityError::Io { path: opened[directory].path.display().to_string(), source }
        }
        MemberError::NoQuorum { present, members } => {
            IdentityError::NoQuorum { paths: all.clone(), present, members }
        }
        MemberError::TooMany => {
            IdentityError::Members { path: opened[0].path.join(MEMBERS_FILE).display().to_string() }
        }
    })?;
    for (directory, is_kept) in opened.iter().zip(is_kept) {
        if directory.identity.is_some() && !is_kept {
            let dir = directory.path.display();
            warn!(%dir, "disk directory was excluded or not used lately; its objects are dropped");
        }
    }
    Ok(members)
}

fn read_state(path: &Path) -> Result<Option<MemberState>, IdentityError> {
    let file = path.join(MEMBERS_FILE);
    let name = || file.display().to_string();
    match std::fs::read_to_string(&file) {
        Ok(text) => match MemberState::from_text(&text) {
            Some(state) => Ok(Some(state)),
            None => Err(IdentityError::Members { path: name() }),
        },
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(IdentityError::Io { path: name(), source }),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use super::*;
    use crate::disk::identity;

    /// Temporary directories, removed at the end.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            Scratch(std::env::temp_dir().join(format!("moontide-{name}-{}", std::process::id())))
        }

        fn dirs(&self, names: &[&str]) -> Vec<PathBuf> {
            names.iter().map(|name| self.0.join(name)).collect()
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = std::fs::remove_dir_all(&self.0);
        }
    }

    fn open(
        paths: &[PathBuf],
        cluster: u64,
        configured: Option<u64>,
    ) -> Result<DiskDirectories, IdentityError> {
        static LAST: AtomicU64 = AtomicU64::new(0);
        let random = || Ok(LAST.fetch_add(1, Ordering::SeqCst) + 1);
        DiskDirectories::open(paths, cluster, BackendKind::Bucket, configured.map(NodeId), random)
    }

    #[test]
    fn directory_keeps_its_node_and_rejects_others() {
        let scratch = Scratch::new("identity");
        let dirs = scratch.dirs(&["one"]);
        let first = open(&dirs, 7, None).unwrap();
        let node = first.node;
        let second = open(&dirs, 7, None).unwrap_err();
        assert!(matches!(second, IdentityError::InUse { .. }), "{second}");
        drop(first);
        assert!(!dirs[0].join(MEMBERS_FILE).exists(), "one directory needs no list");
        assert_eq!(open(&dirs, 7, None).unwrap().node, node);
        assert_eq!(open(&dirs, 7, Some(node.0)).unwrap().node, node);
        let other = open(&dirs, 8, None).unwrap_err();
        assert!(matches!(other, IdentityError::OtherCluster { found: 7, expected: 8, .. }), "{other}");
        let other = open(&dirs, 7, Some(node.0 + 1)).unwrap_err();
        assert!(matches!(other, IdentityError::OtherNode { .. }), "{other}");
        let file = DiskDirectories::open(&dirs, 7, BackendKind::File, None, || Ok(1)).unwrap_err();
        assert!(matches!(file, IdentityError::OtherBackend { .. }), "{file}");
        for text in
            ["", "moontide disk, version 1\nnode 0\ncluster 0\n", "moontide disk, version 1\nnode x\n"]
        {
            std::fs::write(dirs[0].join(identity::FILE), text).unwrap();
            let foreign = open(&dirs, 7, None).unwrap_err();
            assert!(matches!(foreign, IdentityError::Foreign { .. }), "{foreign}");
        }
    }

    #[test]
    fn directory_that_was_left_out_is_emptied() {
        let scratch = Scratch::new("left-out");
        let dirs = scratch.dirs(&["a", "b", "c"]);
        let (a, all) = (dirs[..1].to_vec(), dirs.clone());
        drop(open(&a, 7, None).unwrap());
        let record = |dir: &Path| dir.join("0000000000000001.bucket");
        let of_object = format!("a7/{}-{}-0.rec", "a7".repeat(16), "0".repeat(16));
        let files =
            ["0000000000000001.bucket", "removed.log", &of_object, "a7/photos/1.rec", "a7/1.rec", "42"];
        let put = |dir: &Path| {
            std::fs::create_dir_all(dir.join("a7/photos")).unwrap();
            for file in files {
                std::fs::write(dir.join(file), "content").unwrap();
            }
        };
        put(&dirs[0]);
        drop(open(&all, 7, None).unwrap());
        assert!(record(&dirs[0]).exists(), "the first directory keeps its records when others join it");
        put(&dirs[1]);
        put(&dirs[2]);
        drop(open(&all, 7, None).unwrap());
        assert!(dirs.iter().all(|dir| record(dir).exists()), "nothing has changed");
        // Without the second one.
        drop(open(&[dirs[0].clone(), dirs[2].clone()], 7, None).unwrap());
        assert!(record(&dirs[2]).exists());
        let alone = open(&dirs[1..2], 7, None).unwrap_err();
        assert!(matches!(alone, IdentityError::NoQuorum { present: 1, members: 3, .. }), "{alone}");
        assert!(alone.to_string().contains("add the missing ones to `disk.dir`"), "{alone}");
        assert!(record(&dirs[1]).exists());
        drop(open(&all, 7, None).unwrap());
        assert_eq!(dirs.iter().map(|dir| record(dir).exists()).collect::<Vec<_>>(), [true, false, true]);
        let exists = |file: &str| dirs[1].join(file).exists();
        assert!(files[..3].iter().all(|file| !exists(file)), "files of the backends are removed");
        assert!(files[3..].iter().all(|file| exists(file)), "files of other programs stay");
        // An excluded directory is emptied as well, and is no node by itself.
        let mut opened = open(&all, 7, None).unwrap();
        opened.members.exclude(&[2]).unwrap();
        opened.members.exclude(&[0]).unwrap_err();
        drop(opened);
        assert!(open(&dirs[2..], 7, None).is_err());
        drop(open(&all, 7, None).unwrap());
        assert_eq!(dirs.iter().map(|dir| record(dir).exists()).collect::<Vec<_>>(), [true, false, false]);
    }

    #[test]
    fn unusable_directory_is_left_out_if_others_decide() {
        let scratch = Scratch::new("unusable");
        let dirs = scratch.dirs(&["a", "b", "c"]);
        let node = open(&dirs, 7, None).unwrap().node;
        std::fs::remove_dir_all(&dirs[1]).unwrap();
        std::fs::write(&dirs[1], "not a directory").unwrap();
        let opened = open(&dirs, 7, None).unwrap();
        assert_eq!(opened.usable, [dirs[0].clone(), dirs[2].clone()]);
        assert_eq!(opened.node, node);
        drop(opened);
        let error = open(&dirs[1..2], 7, None).unwrap_err();
        assert!(matches!(error, IdentityError::Io { .. }), "{error}");
        std::fs::write(dirs[0].join(MEMBERS_FILE), "torn").unwrap();
        let error = open(&dirs, 7, None).unwrap_err();
        assert!(matches!(error, IdentityError::Members { .. }), "{error}");
        // New directories alone would be another node.
        let new = [dirs[1].clone(), scratch.0.join("d")];
        let error = open(&new, 7, Some(node.0)).unwrap_err();
        assert!(matches!(error, IdentityError::Io { .. }), "{error}");
    }

    #[test]
    fn two_disks_of_one_node_are_refused() {
        let scratch = Scratch::new("two-disks");
        let dirs = scratch.dirs(&["a", "b"]);
        drop(open(&dirs[..1], 7, Some(5)).unwrap());
        drop(open(&dirs[1..], 7, Some(5)).unwrap());
        let error = open(&dirs, 7, Some(5)).unwrap_err();
        assert!(matches!(error, IdentityError::TwoDisks { .. }), "{error}");
    }

    #[test]
    fn interrupted_first_start_and_interrupted_join_are_repeated() {
        let scratch = Scratch::new("interrupted");
        let dirs = scratch.dirs(&["a", "b", "c"]);
        drop(open(&dirs, 7, None).unwrap());
        // As if the process had ended before the identities were written.
        let forget = |dir: &PathBuf| std::fs::remove_file(dir.join(identity::FILE)).unwrap();
        dirs.iter().for_each(forget);
        drop(open(&dirs, 7, None).unwrap());
        dirs[1..].iter().for_each(forget);
        let opened = open(&dirs, 7, None).unwrap();
        assert_eq!(opened.usable, dirs);
    }
}
