//! Who this cluster is: its number, the key of its ids, and this master's term.
//!
//! With a data directory all of it is in `cluster.toml`, readable by its owner only, because the key is a secret:
//! whoever has it can compute the id of any key. The file is written by temp file, fsync, rename, fsync of the
//! directory: after a crash there is the old one or the new one. Invariants:
//!
//! * the term in the file is at least that of every master that ever served from it: it rises, durably, before anything
//!   is served;
//! * one process at a time uses the directory: it holds a lock on `lock` until it ends;
//! * number, key and groups never change.

use std::fmt;
use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::{self, Write};
use std::num::NonZeroU16;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use moontide_types::Term;
use rustix::fs::{FlockOperation, flock};
use rustix::rand::{GetRandomFlags, getrandom};
use serde::{Deserialize, Serialize};

const FILE: &str = "cluster.toml";
const TEMPORARY: &str = "cluster.toml.new";
const LOCK: &str = "lock";

/// Layout of the file. A release that changes it reads the older one.
const FILE_VERSION: u32 = 1;

/// The term of a cluster's first master.
const FIRST_TERM: Term = match next_term(Term::ZERO) {
    Some(term) => term,
    None => panic!("there are terms"),
};

/// Who this cluster is.
pub(crate) struct Identity {
    /// Number of the cluster.
    pub(crate) cluster: u64,
    /// Number of the id key.
    pub(crate) id_key: u32,
    /// Its secret.
    pub(crate) secret: [u8; 32],
    /// This master's term.
    pub(crate) term: Term,
    /// Keeps others out of the directory for as long as it is open.
    _lock: Option<File>,
}

impl fmt::Debug for Identity {
    /// Without the secret: it must not reach a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity")
            .field("cluster", &self.cluster)
            .field("id_key", &self.id_key)
            .field("term", &self.term)
            .finish_non_exhaustive()
    }
}

/// Why a cluster's identity cannot be had.
#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    /// The file system refused.
    #[error("cannot {what} {}: {source}; data_dir must be a directory that this user may write", path.display())]
    Io {
        /// What was tried.
        what: &'static str,
        /// With what.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Another process uses the directory.
    #[error("another master is using {}; stop it, or give this one a data_dir of its own", path.display())]
    InUse {
        /// The directory.
        path: PathBuf,
    },
    /// The file is not one of ours.
    #[error("{} cannot be read: {reason}; restore it from a copy, or move it away to begin a new cluster", path.display())]
    Malformed {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        reason: String,
    },
    /// A cluster's number of groups is fixed.
    #[error("{} was created with {found} groups, and {configured} are configured; set groups to {found}", path.display())]
    Groups {
        /// The file.
        path: PathBuf,
        /// What it says.
        found: u16,
        /// What was asked for.
        configured: u16,
    },
    /// Terms have 22 bits.
    #[error("{} has reached the last term; begin a new cluster", path.display())]
    TermsUsedUp {
        /// The file.
        path: PathBuf,
    },
    /// The kernel gave no random bytes.
    #[error("cannot draw random numbers: {0}")]
    Random(io::Error),
}

/// The file. Numbers beyond 63 bits are not TOML, so the cluster's is hexadecimal.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    version: u32,
    cluster: String,
    groups: u16,
    id_key: u32,
    id_key_secret: String,
    term: u32,
}

impl Identity {
    /// Reads the identity from the directory, or creates it there; without a directory everything is drawn anew.
    /// When this returns, the term is durable.
    pub(crate) fn establish(data_dir: Option<&Path>, groups: NonZeroU16) -> Result<Identity, IdentityError> {
        let Some(directory) = data_dir else { return Ok(Identity { term: FIRST_TERM, ..Self::draw()? }) };
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
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::draw()?,
            Err(source) => return Err(IdentityError::Io { what: "read", path, source }),
        };
        identity.term = next_term(identity.term).ok_or(IdentityError::TermsUsedUp { path })?;
        identity.store(directory, groups)?;
        identity._lock = Some(lock);
        Ok(identity)
    }

    /// A new cluster, before its first term.
    fn draw() -> Result<Identity, IdentityError> {
        Ok(Identity {
            cluster: u64::from_le_bytes(random()?),
            // Drawn, too: records of another cluster, or of one that nobody remembers, are known by it.
            id_key: u32::from_le_bytes(random()?).max(1),
            secret: random()?,
            term: Term::ZERO,
            _lock: None,
        })
    }

    fn store(&self, directory: &Path, groups: NonZeroU16) -> Result<(), IdentityError> {
        let stored = Stored {
            version: FILE_VERSION,
            cluster: format!("{:016x}", self.cluster),
            groups: groups.get(),
            id_key: self.id_key,
            id_key_secret: self.secret.iter().map(|byte| format!("{byte:02x}")).collect(),
            term: self.term.get(),
        };
        let mut text = String::from(
            "# The identity of a Moontide cluster. Keep a copy, keep it secret, change nothing by hand.\n",
        );
        text.push_str(&toml::to_string(&stored).expect("numbers and plain strings are TOML"));
        let temporary = directory.join(TEMPORARY);
        // A file left by a crash may have another mode: it goes, and the new one is born with the right one.
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

/// A new cluster, for a registry that has none.
pub(crate) fn draft(groups: NonZeroU16) -> Result<crate::election::Identity, IdentityError> {
    let Identity { cluster, id_key, secret, .. } = Identity::draw()?;
    Ok(crate::election::Identity { cluster, id_key, secret, groups })
}

/// 64 random bits, for what needs no identity: seeds, the number of this process.
pub(crate) fn random_u64() -> Result<u64, IdentityError> {
    random().map(u64::from_le_bytes)
}

fn random<const N: usize>() -> Result<[u8; N], IdentityError> {
    let mut bytes = [0; N];
    let drawn = getrandom(&mut bytes, GetRandomFlags::empty())
        .map_err(|error| IdentityError::Random(error.into()))?;
    // Up to 256 bytes come at once.
    assert_eq!(drawn, N, "the kernel gave fewer random bytes than it promises");
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

fn parse(text: &str, groups: NonZeroU16, path: &Path) -> Result<Identity, IdentityError> {
    let malformed = |reason: String| IdentityError::Malformed { path: path.to_owned(), reason };
    let stored: Stored = toml::from_str(text).map_err(|error| malformed(error.message().to_owned()))?;
    if stored.version != FILE_VERSION {
        return Err(malformed(format!("version {}, this release reads {FILE_VERSION}", stored.version)));
    }
    if stored.groups != groups.get() {
        let (found, configured) = (stored.groups, groups.get());
        return Err(IdentityError::Groups { path: path.to_owned(), found, configured });
    }
    let cluster = u64::from_str_radix(&stored.cluster, 16)
        .map_err(|_| malformed("cluster is not hexadecimal".into()))?;
    let secret = secret_from_hex(&stored.id_key_secret)
        .ok_or_else(|| malformed("id_key_secret is not 64 hexadecimal digits".into()))?;
    let term = Term::new(stored.term).map_err(|error| malformed(error.to_string()))?;
    Ok(Identity { cluster, id_key: stored.id_key, secret, term, _lock: None })
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

/// Volumes of containers often cannot keep a mode, so this is said and not refused.
fn warn_if_readable_by_others(path: &Path) {
    if let Ok(metadata) = fs::metadata(path)
        && metadata.permissions().mode() & 0o077 != 0
    {
        tracing::warn!(path = %path.display(), "others can read the cluster's secret: chmod 600 it");
    }
}

fn io_error(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> IdentityError {
    let path = path.to_owned();
    move |source| IdentityError::Io { what, path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A directory that goes away with the test.
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

    const GROUPS: NonZeroU16 = NonZeroU16::new(4).unwrap();

    #[test]
    fn the_term_rises_at_every_start_and_the_rest_stays() {
        let scratch = Scratch::new("rises");
        let directory = scratch.0.join("deep/er");
        let mut first: Option<Identity> = None;
        for term in 1..=3 {
            let identity = Identity::establish(Some(&directory), GROUPS).unwrap();
            assert_eq!(identity.term.get(), term);
            if let Some(first) = &first {
                assert_eq!((identity.cluster, identity.secret), (first.cluster, first.secret));
            }
            first = Some(Identity { _lock: None, ..identity });
        }
        let mode = fs::metadata(directory.join(FILE)).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600, "the file holds a secret");
        assert!(!directory.join(TEMPORARY).exists());
    }

    #[test]
    fn a_second_master_and_other_groups_are_refused() {
        let scratch = Scratch::new("refused");
        let held = Identity::establish(Some(&scratch.0), GROUPS).unwrap();
        let in_use = Identity::establish(Some(&scratch.0), GROUPS).unwrap_err();
        assert!(matches!(in_use, IdentityError::InUse { .. }), "{in_use}");
        drop(held);
        let other = Identity::establish(Some(&scratch.0), NonZeroU16::new(16).unwrap()).unwrap_err();
        assert!(other.to_string().contains("set groups to 4"), "{other}");
        assert_eq!(
            Identity::establish(Some(&scratch.0), GROUPS).unwrap().term.get(),
            2,
            "a refusal takes no term"
        );
    }

    #[test]
    fn a_damaged_file_is_refused_and_left_alone() {
        let scratch = Scratch::new("damaged");
        drop(Identity::establish(Some(&scratch.0), GROUPS).unwrap());
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
            let error = Identity::establish(Some(&scratch.0), GROUPS).unwrap_err();
            assert!(
                matches!(error, IdentityError::Malformed { .. } | IdentityError::TermsUsedUp { .. }),
                "{bad}: {error}"
            );
            assert_eq!(fs::read_to_string(&path).unwrap(), bad);
        }
    }

    #[test]
    fn without_a_directory_everything_is_new() {
        let (a, b) = (Identity::establish(None, GROUPS).unwrap(), Identity::establish(None, GROUPS).unwrap());
        assert_eq!((a.term.get(), b.term.get()), (1, 1));
        assert!(a.cluster != b.cluster && a.secret != b.secret);
        assert!(!format!("{a:?}").contains(&format!("{:?}", a.secret[0..2].to_vec())));
    }
}
