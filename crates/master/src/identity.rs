//! Identity of a single-master cluster: its id, the key of its object ids, and the term of the master.
//!
//! With a data directory it is stored in `cluster.toml`, readable by its owner only, because the key is a secret: a
//! process that has it can compute the id of any key. The file is written by temp file, fsync, rename, fsync of the
//! directory: after a crash either the old or the new file exists. Invariants:
//!
//! * the term in the file is at least that of every master that ever served from it: it increases durably before the
//!   master serves;
//! * one process at a time uses the directory: it holds a lock on `lock` until it exits;
//! * cluster id, key and number of groups never change;
//! * generations of tenants and numbers of exclusions are durable before an answer depends on them.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::num::NonZeroU16;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use moontide_types::Term;
use moontide_types::limits::GROUPS_MAX;
use rustix::fs::{FlockOperation, flock};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};

use crate::election::TenantState;

const FILE: &str = "cluster.toml";
const TEMPORARY: &str = "cluster.toml.new";
const LOCK: &str = "lock";

/// Version of the file format. A release that changes it must read the older version.
const FILE_VERSION: u32 = 1;

/// Term of the first master of a cluster.
const FIRST_TERM: Term = match next_term(Term::ZERO) {
    Some(term) => term,
    None => panic!("term 1 is in range"),
};

/// Number of groups of a new cluster with a single master: groups evict independently, and more of them cost hits.
const SINGLE_MASTER_GROUPS: NonZeroU16 = NonZeroU16::MIN;

/// Identity of the cluster, and term of this master.
pub(crate) struct LocalIdentity {
    /// Id of the cluster.
    pub(crate) cluster: u64,
    /// Number of groups of the cluster.
    pub(crate) groups: NonZeroU16,
    /// Number of the id key.
    pub(crate) id_key: u32,
    /// Secret of the id key.
    pub(crate) secret: [u8; 32],
    /// Term of this master.
    pub(crate) term: Term,
    /// Number of exclusions of each group; empty if there were none.
    pub(crate) exclusions: Vec<u32>,
    /// Tenants with a quota or a generation above 0.
    pub(crate) tenants: BTreeMap<String, TenantState>,
    /// Directory of the file, if there is one.
    directory: Option<PathBuf>,
    /// Locks the directory until it is closed.
    _lock: Option<File>,
}

impl fmt::Debug for LocalIdentity {
    /// Omits the secret: it must not reach a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LocalIdentity")
            .field("cluster", &self.cluster)
            .field("id_key", &self.id_key)
            .field("term", &self.term)
            .finish_non_exhaustive()
    }
}

/// Error of the loading or creation of a cluster's identity.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// A file operation failed.
    #[error("cannot {what} {}: {source}; set data_dir to a directory that this user may write", path.display())]
    Io {
        /// Operation.
        what: &'static str,
        /// Path of the file or directory.
        path: PathBuf,
        /// I/O error.
        source: io::Error,
    },
    /// Another process uses the directory.
    #[error("data_dir {} is in use by another master; stop it, or set another data_dir", path.display())]
    InUse {
        /// Path of the directory.
        path: PathBuf,
    },
    /// The file is no valid identity.
    #[error(
        "invalid identity file {}: {reason}; restore it from a backup, or remove it for a new cluster",
        path.display()
    )]
    Malformed {
        /// Path of the file.
        path: PathBuf,
        /// Reason.
        reason: String,
    },
    /// The number of groups differs from the file; it is fixed for a cluster.
    #[error(
        "cluster of {} has {found} groups, but {configured} are configured; set groups to {found}",
        path.display()
    )]
    Groups {
        /// Path of the file.
        path: PathBuf,
        /// Number of groups in the file.
        found: u16,
        /// Configured number of groups.
        configured: u16,
    },
    /// All terms are used; they have 22 bits.
    #[error("{} has the last term; create a new cluster", path.display())]
    TermsUsedUp {
        /// Path of the file.
        path: PathBuf,
    },
    /// The kernel returned no random bytes.
    #[error("cannot get random bytes: {0}")]
    Random(io::Error),
}

/// Content of the file. TOML integers have 63 bits, so the cluster id is a hexadecimal string.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    cluster: String,
    groups: u16,
    id_key: u32,
    id_key_secret: String,
    term: u32,
    #[serde(default)]
    exclusions: Vec<u32>,
    #[serde(default)]
    tenants: BTreeMap<String, TenantState>,
}

impl LocalIdentity {
    /// Loads the identity from the directory, or creates it there; without a directory the identity is new at every
    /// start. `groups` must be the stored number of groups, if it is set. When this returns, the term is durable.
    pub(crate) fn load_or_create(
        data_dir: Option<&Path>,
        groups: Option<NonZeroU16>,
    ) -> Result<LocalIdentity, IdentityError> {
        let new = || Self::new_random(groups.unwrap_or(SINGLE_MASTER_GROUPS));
        let Some(directory) = data_dir else {
            return Ok(LocalIdentity { term: FIRST_TERM, ..new()? });
        };
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(directory)
            .map_err(io_error("create the directory", directory))?;
        let lock = lock(directory)?;
        let path = directory.join(FILE);
        let mut identity = match fs::read_to_string(&path) {
            Ok(text) => {
                warn_if_readable_by_others(&path);
                parse(&text, groups, &path)?
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => new()?,
            Err(source) => return Err(IdentityError::Io { what: "read", path, source }),
        };
        identity.term = next_term(identity.term).ok_or(IdentityError::TermsUsedUp { path })?;
        identity.store(directory)?;
        identity._lock = Some(lock);
        identity.directory = Some(directory.to_owned());
        Ok(identity)
    }

    /// Stores the number of exclusions of each group. When this returns, they are durable; without a directory they need
    /// not be, because a restart creates a new cluster.
    pub(crate) fn store_exclusions(&mut self, exclusions: &[u32]) -> Result<(), IdentityError> {
        let before = std::mem::replace(&mut self.exclusions, exclusions.to_vec());
        self.store_again().inspect_err(|_| self.exclusions = before)
    }

    /// Stores the state of a tenant; the default state is not stored. When this returns, it is durable, as far as it need be.
    pub(crate) fn store_tenant(&mut self, name: &str, state: TenantState) -> Result<(), IdentityError> {
        let before = self.tenants.clone();
        if state == TenantState::default() {
            self.tenants.remove(name);
        } else {
            self.tenants.insert(name.to_owned(), state);
        }
        self.store_again().inspect_err(|_| self.tenants = before)
    }

    fn store_again(&self) -> Result<(), IdentityError> {
        self.directory.as_ref().map_or(Ok(()), |directory| self.store(directory))
    }

    /// Creates the identity of a new cluster, before its first term.
    fn new_random(groups: NonZeroU16) -> Result<LocalIdentity, IdentityError> {
        Ok(LocalIdentity {
            cluster: u64::from_le_bytes(random()?),
            groups,
            // Random, too: it identifies records of other clusters, also of clusters whose identity is lost.
            id_key: u32::from_le_bytes(random()?).max(1),
            secret: random()?,
            term: Term::ZERO,
            exclusions: vec![],
            tenants: BTreeMap::new(),
            directory: None,
            _lock: None,
        })
    }

    fn store(&self, directory: &Path) -> Result<(), IdentityError> {
        let stored = Stored {
            version: FILE_VERSION,
            cluster: format!("{:016x}", self.cluster),
            groups: self.groups.get(),
            id_key: self.id_key,
            id_key_secret: self.secret.iter().map(|byte| format!("{byte:02x}")).collect(),
            term: self.term.get(),
            exclusions: self.exclusions.clone(),
            tenants: self.tenants.iter().map(|(name, state)| (name.clone(), storable(*state))).collect(),
        };
        let mut text =
            String::from("# Identity of a Moontide cluster. Back it up, keep it secret, do not edit it.\n");
        text.push_str(&toml::to_string(&stored).expect("numbers and plain strings are valid TOML"));
        let temporary = directory.join(TEMPORARY);
        // A file left by a crash may have another mode: remove it, so that the new file gets the right mode.
        match fs::remove_file(&temporary) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(io_error("remove", &temporary)(error));
            }
            _ => {}
        }
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(io_error("create", &temporary))?;
        file.write_all(text.as_bytes()).map_err(io_error("write", &temporary))?;
        file.sync_all().map_err(io_error("sync", &temporary))?;
        let path = directory.join(FILE);
        fs::rename(&temporary, &path).map_err(io_error("replace", &path))?;
        let handle = File::open(directory).map_err(io_error("open", directory))?;
        handle.sync_all().map_err(io_error("sync", directory))
    }
}

/// Creates the identity of a new cluster, for an empty registry.
pub(crate) fn new_cluster_identity(
    groups: NonZeroU16,
) -> Result<crate::election::ClusterIdentity, IdentityError> {
    let LocalIdentity { cluster, id_key, secret, .. } = LocalIdentity::new_random(groups)?;
    Ok(crate::election::ClusterIdentity { cluster, id_key, secret, groups })
}

/// Returns 64 random bits, for seeds and for the id of this process.
pub(crate) fn random_u64() -> Result<u64, IdentityError> {
    random().map(u64::from_le_bytes)
}

/// Returns random bytes of the kernel.
pub(crate) fn random<const N: usize>() -> Result<[u8; N], IdentityError> {
    let mut bytes = [0; N];
    let filled = getrandom(&mut bytes, GetRandomFlags::empty())
        .map_err(|error| IdentityError::Random(error.into()))?;
    // The kernel returns up to 256 bytes in one call.
    assert_eq!(filled, N, "getrandom returned fewer bytes than requested");
    Ok(bytes)
}

const fn next_term(term: Term) -> Option<Term> {
    match Term::new(term.get() + 1) {
        Ok(term) => Some(term),
        Err(_) => None,
    }
}

fn lock(directory: &Path) -> Result<File, IdentityError> {
    let path = directory.join(LOCK);
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(&path)
        .map_err(io_error("open", &path))?;
    match flock(&file, FlockOperation::NonBlockingLockExclusive) {
        Ok(()) => Ok(file),
        Err(rustix::io::Errno::WOULDBLOCK) => Err(IdentityError::InUse { path: directory.to_owned() }),
        Err(error) => Err(io_error("lock", &path)(error.into())),
    }
}

fn parse(text: &str, configured: Option<NonZeroU16>, path: &Path) -> Result<LocalIdentity, IdentityError> {
    let malformed = |reason: String| IdentityError::Malformed { path: path.to_owned(), reason };
    let stored: Stored = toml::from_str(text).map_err(|error| malformed(error.message().to_owned()))?;
    if stored.version != FILE_VERSION {
        return Err(malformed(format!("version {}, this release reads {FILE_VERSION}", stored.version)));
    }
    let found = stored.groups;
    let groups = NonZeroU16::new(found).filter(|groups| groups.get() <= GROUPS_MAX);
    let groups = groups.ok_or_else(|| malformed(format!("groups is not within 1 and {GROUPS_MAX}")))?;
    if let Some(configured) = configured.filter(|configured| *configured != groups) {
        return Err(IdentityError::Groups { path: path.to_owned(), found, configured: configured.get() });
    }
    let cluster = u64::from_str_radix(&stored.cluster, 16)
        .map_err(|_| malformed("cluster is not hexadecimal".into()))?;
    let secret = secret_from_hex(&stored.id_key_secret)
        .ok_or_else(|| malformed("id_key_secret is not 64 hexadecimal digits".into()))?;
    let term = Term::new(stored.term).map_err(|error| malformed(error.to_string()))?;
    let Stored { id_key, exclusions, tenants, .. } = stored;
    if !exclusions.is_empty() && exclusions.len() != usize::from(found) {
        return Err(malformed("exclusions has not one number per group".into()));
    }
    Ok(LocalIdentity {
        cluster,
        groups,
        id_key,
        secret,
        term,
        exclusions,
        tenants,
        directory: None,
        _lock: None,
    })
}

/// Quotas beyond the integers of TOML are no limits in practice.
fn storable(state: TenantState) -> TenantState {
    let most = i64::MAX as u64;
    TenantState { bytes_max: state.bytes_max.min(most), objects_max: state.objects_max.min(most), ..state }
}

fn secret_from_hex(text: &str) -> Option<[u8; 32]> {
    let mut secret = [0; 32];
    let digits = text.as_bytes();
    if digits.len() != 2 * secret.len() {
        return None;
    }
    for (byte, pair) in secret.iter_mut().zip(digits.chunks_exact(2)) {
        let digit = |byte: u8| char::from(byte).to_digit(16);
        *byte = (digit(pair[0])? << 4 | digit(pair[1])?) as u8; // ≤ 255
    }
    Some(secret)
}

/// Only warns: volumes of containers often do not support file modes.
fn warn_if_readable_by_others(path: &Path) {
    if let Ok(metadata) = fs::metadata(path)
        && metadata.permissions().mode() & 0o077 != 0
    {
        tracing::warn!(path = %path.display(), "identity file is readable by other users; run chmod 600");
    }
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> IdentityError {
    let path = path.to_owned();
    move |source| IdentityError::Io { what, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Directory that is removed at the end of the test.
    struct Scratch(PathBuf);

    impl Scratch {
        fn new(name: &str) -> Scratch {
            let path = std::env::temp_dir().join(format!("moontide-identity-{name}-{}", std::process::id()));
            let _ = fs::remove_dir_all(&path);
            Scratch(path)
        }
    }

    impl Drop for Scratch {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    const GROUPS: Option<NonZeroU16> = NonZeroU16::new(4);

    #[test]
    fn tenants_and_exclusions_are_kept() {
        let scratch = Scratch::new("tenants");
        let mut identity = LocalIdentity::load_or_create(Some(&scratch.0), GROUPS).unwrap();
        assert!(identity.tenants.is_empty() && identity.exclusions.is_empty());
        let state = TenantState { generation: 3, bytes_max: u64::MAX, objects_max: 7 };
        identity.store_tenant("team \"a\" = 1", state).unwrap();
        identity.store_exclusions(&[0, 0, 2, 1]).unwrap();
        drop(identity);
        let identity = LocalIdentity::load_or_create(Some(&scratch.0), GROUPS).unwrap();
        assert_eq!(identity.exclusions, [0, 0, 2, 1]);
        let stored = TenantState { bytes_max: i64::MAX as u64, ..state };
        assert_eq!(identity.tenants.into_iter().collect::<Vec<_>>(), [("team \"a\" = 1".to_owned(), stored)]);
    }

    #[test]
    fn term_rises_at_every_start_and_identity_is_kept() {
        let scratch = Scratch::new("rises");
        let directory = scratch.0.join("deep/er");
        let mut first: Option<LocalIdentity> = None;
        for term in 1..=3 {
            let identity = LocalIdentity::load_or_create(Some(&directory), GROUPS).unwrap();
            assert_eq!(identity.term.get(), term);
            if let Some(first) = &first {
                assert_eq!((identity.cluster, identity.secret), (first.cluster, first.secret));
            }
            first = Some(LocalIdentity { _lock: None, ..identity });
        }
        let mode = fs::metadata(directory.join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "the file contains a secret");
        assert!(!directory.join(TEMPORARY).exists());
    }

    #[test]
    fn stored_number_of_groups_is_kept_and_new_cluster_has_one() {
        let scratch = Scratch::new("groups");
        let groups = |configured: Option<u16>, name: &str| {
            let configured = configured.and_then(NonZeroU16::new);
            let identity = LocalIdentity::load_or_create(Some(&scratch.0.join(name)), configured);
            identity.unwrap().groups.get()
        };
        assert_eq!([groups(Some(4), "four"), groups(None, "four")], [4, 4]);
        assert_eq!([groups(None, "new"), groups(None, "new"), groups(Some(1), "new")], [1, 1, 1]);
        assert_eq!(LocalIdentity::load_or_create(None, None).unwrap().groups.get(), 1);
    }

    #[test]
    fn second_master_and_different_group_count_are_rejected() {
        let scratch = Scratch::new("refused");
        let held = LocalIdentity::load_or_create(Some(&scratch.0), GROUPS).unwrap();
        let in_use = LocalIdentity::load_or_create(Some(&scratch.0), GROUPS).unwrap_err();
        assert!(matches!(in_use, IdentityError::InUse { .. }), "{in_use}");
        drop(held);
        let other = LocalIdentity::load_or_create(Some(&scratch.0), NonZeroU16::new(16)).unwrap_err();
        assert!(other.to_string().contains("set groups to 4"), "{other}");
        assert_eq!(
            LocalIdentity::load_or_create(Some(&scratch.0), GROUPS).unwrap().term.get(),
            2,
            "a rejected start uses no term"
        );
    }

    #[test]
    fn malformed_identity_file_is_rejected_and_unchanged() {
        let scratch = Scratch::new("malformed");
        drop(LocalIdentity::load_or_create(Some(&scratch.0), GROUPS).unwrap());
        let path = scratch.0.join(FILE);
        let good = fs::read_to_string(&path).unwrap();
        let last = good.replace("term = 1", &format!("term = {}", Term::MAX.get()));
        for bad in [
            "",
            "version = 1",
            &good.replace("version = 1", "version = 2"),
            &good.replace("id_key_secret = \"", "id_key_secret = \"0"),
            &good.replace("cluster = \"", "cluster = \"x"),
            &good.replace("term = 1", "term = 99999999"),
            &last,
        ] {
            fs::write(&path, bad).unwrap();
            let error = LocalIdentity::load_or_create(Some(&scratch.0), GROUPS).unwrap_err();
            assert!(
                matches!(error, IdentityError::Malformed { .. } | IdentityError::TermsUsedUp { .. }),
                "{bad}: {error}"
            );
            assert_eq!(fs::read_to_string(&path).unwrap(), bad);
        }
    }

    #[test]
    fn identity_without_data_dir_is_new_at_every_start() {
        let (a, b) = (
            LocalIdentity::load_or_create(None, GROUPS).unwrap(),
            LocalIdentity::load_or_create(None, GROUPS).unwrap(),
        );
        assert_eq!((a.term.get(), b.term.get()), (1, 1));
        assert!(a.cluster != b.cluster && a.secret != b.secret);
        assert!(!format!("{a:?}").contains(&format!("{:?}", a.secret[0..2].to_vec())));
    }
}
