//! Keys, tenants, and the 128-bit [`ObjectId`] derived from them.
//!
//! An id is keyed BLAKE3 over (tenant generation, key). The key of the hash belongs to the tenant ([`TenantIdKey`]), and is derived
//! from a secret of the cluster ([`IdKey`]). So a client, which has the key of its own tenant only, can compute no id of another one,
//! and construct no key with such an id. Removing all objects of a tenant is one increment of its generation.

use std::fmt;
use std::num::NonZeroU16;

use crate::ids::GroupId;
use crate::limits::{KEY_BYTES_MAX, TENANT_BYTES_MAX};

/// Error of the validation of a key or of a tenant name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum KeyError {
    /// The key is empty; a key has at least one byte.
    #[error("key is empty")]
    EmptyKey,
    /// The key is longer than [`KEY_BYTES_MAX`] bytes.
    #[error("key has {len} bytes, at most {KEY_BYTES_MAX} are allowed")]
    KeyTooLong {
        /// Length in bytes.
        len: usize,
    },
    /// The tenant name is empty; it has at least one byte.
    #[error("tenant name is empty")]
    EmptyTenant,
    /// The tenant name is longer than [`TENANT_BYTES_MAX`] bytes.
    #[error("tenant name has {len} bytes, at most {TENANT_BYTES_MAX} are allowed")]
    TenantTooLong {
        /// Length in bytes.
        len: usize,
    },
    /// The tenant name has a byte other than ASCII letters, digits, `.`, `_` and `-`: it appears in metrics and
    /// paths.
    #[error("tenant name has invalid byte {byte:#04x}; use ASCII letters, digits, '.', '_' and '-'")]
    TenantCharacter {
        /// First byte that is not allowed.
        byte: u8,
    },
}

/// A key: 1 to [`KEY_BYTES_MAX`] arbitrary bytes. Borrowed, because callers hash keys and do not keep them.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key<'a>(&'a [u8]);

impl<'a> Key<'a> {
    /// Initial value of array elements that hold no key yet.
    pub(crate) const PLACEHOLDER: Key<'static> = Key(&[0]);

    /// Creates a key after a check of its length.
    pub fn new(bytes: &'a [u8]) -> Result<Key<'a>, KeyError> {
        match bytes.len() {
            0 => Err(KeyError::EmptyKey),
            len if len > KEY_BYTES_MAX => Err(KeyError::KeyTooLong { len }),
            _ => Ok(Key(bytes)),
        }
    }

    /// Returns the bytes of the key.
    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }
}

impl fmt::Debug for Key<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Key(\"{}\")", self.0.escape_ascii())
    }
}

/// A tenant name: 1 to [`TENANT_BYTES_MAX`] ASCII letters, digits, `.`, `_`, `-`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tenant<'a>(&'a str);

impl<'a> Tenant<'a> {
    /// Tenant used when none is given.
    pub const DEFAULT: Tenant<'static> = Tenant("default");

    /// Creates a tenant name after a check of length and characters.
    pub fn new(name: &'a str) -> Result<Tenant<'a>, KeyError> {
        Self::from_bytes(name.as_bytes())
    }

    /// As [`Tenant::new`], for untrusted bytes.
    pub fn from_bytes(name: &'a [u8]) -> Result<Tenant<'a>, KeyError> {
        let allowed = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-');
        match name.len() {
            0 => return Err(KeyError::EmptyTenant),
            len if len > TENANT_BYTES_MAX => return Err(KeyError::TenantTooLong { len }),
            _ => {}
        }
        if let Some(&byte) = name.iter().find(|&&b| !allowed(b)) {
            return Err(KeyError::TenantCharacter { byte });
        }
        // All bytes are ASCII here, so this cannot fail.
        Ok(Tenant(std::str::from_utf8(name).expect("ASCII is UTF-8")))
    }

    /// Returns the name.
    pub fn as_str(self) -> &'a str {
        self.0
    }
}

impl fmt::Display for Tenant<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

/// Number of times that all objects of a tenant were removed. Part of every id, so old ids never match again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TenantGeneration(pub u32);

/// Identity of an object: 128 bits that only members of the cluster and clients of the tenant can compute.
///
/// The bits are uniform, so any of them may be used as a hash.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(transparent)]
pub struct ObjectId(pub [u8; 16]);

impl ObjectId {
    /// Returns the id as a number (little-endian), for hashing and sharding.
    pub fn as_u128(&self) -> u128 {
        u128::from_le_bytes(self.0)
    }

    /// Returns the group of this object in a cluster of `groups` groups.
    pub fn group(&self, groups: NonZeroU16) -> GroupId {
        let groups = groups.get();
        if groups.is_power_of_two() {
            // The usual case avoids the 128-bit division, which costs as much as the lookup of the object.
            return GroupId(self.as_u128() as u16 & (groups - 1));
        }
        GroupId((self.as_u128() % u128::from(groups)) as u16)
    }
}

impl fmt::Display for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
    }
}

impl fmt::Debug for ObjectId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ObjectId({self})")
    }
}

/// The cluster's secret for object ids, which masters and nodes have. Created once, stored durably; records carry its number.
#[derive(Clone, PartialEq, Eq)]
pub struct IdKey {
    number: u32,
    secret: [u8; 32],
}

impl IdKey {
    /// First bytes of the input from which the key of a tenant is derived.
    const TENANT_PREFIX: &'static [u8] = b"moontide tenant id key\0";

    /// Combines the secret with the number by which records refer to it.
    pub fn new(number: u32, secret: [u8; 32]) -> IdKey {
        IdKey { number, secret }
    }

    /// Returns the number that records carry.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Derives the key of a tenant.
    ///
    /// Input: the prefix `moontide tenant id key\0`, which separates this use of the secret from any other, then the name.
    pub fn of_tenant(&self, tenant: Tenant<'_>) -> TenantIdKey {
        let mut input = [0; Self::TENANT_PREFIX.len() + TENANT_BYTES_MAX];
        let (prefix, rest) = input.split_at_mut(Self::TENANT_PREFIX.len());
        prefix.copy_from_slice(Self::TENANT_PREFIX);
        let name = tenant.as_str().as_bytes();
        rest[..name.len()].copy_from_slice(name);
        let len = Self::TENANT_PREFIX.len() + name.len();
        TenantIdKey::new(self.number, *blake3::keyed_hash(&self.secret, &input[..len]).as_bytes())
    }

    /// Returns the id of `key` of `tenant`. For several keys of a tenant, [`IdKey::of_tenant`] saves a hash per key.
    pub fn object_id(&self, tenant: Tenant<'_>, generation: TenantGeneration, key: Key<'_>) -> ObjectId {
        self.of_tenant(tenant).object_id(generation, key)
    }
}

impl fmt::Debug for IdKey {
    /// Prints the number only: the secret must not reach a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("IdKey").field("number", &self.number).finish_non_exhaustive()
    }
}

/// The secret for the object ids of one tenant, which its clients have. Tells nothing of the cluster's [`IdKey`], nor of the keys of
/// other tenants.
#[derive(Clone, PartialEq, Eq)]
pub struct TenantIdKey {
    number: u32,
    secret: [u8; 32],
}

impl TenantIdKey {
    /// Longest input in bytes that is hashed from one buffer on the stack, which saves a third of the time;
    /// longer inputs go through the incremental hasher.
    const SHORT_INPUT_MAX: usize = 384;

    /// Combines the secret with the number of the [`IdKey`] from which it was derived.
    pub fn new(number: u32, secret: [u8; 32]) -> TenantIdKey {
        TenantIdKey { number, secret }
    }

    /// Returns the number that records carry.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Returns the secret, to be sent to clients of the tenant.
    pub fn secret(&self) -> &[u8; 32] {
        &self.secret
    }

    /// Returns the id of `key`.
    ///
    /// Input: `generation u32 | key`, little-endian.
    pub fn object_id(&self, generation: TenantGeneration, key: Key<'_>) -> ObjectId {
        let (generation, key) = (generation.0.to_le_bytes(), key.as_bytes());
        let len = generation.len() + key.len();
        let hash = if len <= Self::SHORT_INPUT_MAX {
            let mut input = [0; Self::SHORT_INPUT_MAX];
            input[..generation.len()].copy_from_slice(&generation);
            input[generation.len()..len].copy_from_slice(key);
            blake3::keyed_hash(&self.secret, &input[..len])
        } else {
            blake3::Hasher::new_keyed(&self.secret).update(&generation).update(key).finalize()
        };
        let (id, _) = hash.as_bytes().split_first_chunk().expect("a BLAKE3 hash has 32 bytes");
        ObjectId(*id)
    }
}

impl fmt::Debug for TenantIdKey {
    /// Prints the number only: the secret must not reach a log.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TenantIdKey").field("number", &self.number).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(tenant: &str, generation: u32, key: &[u8]) -> ObjectId {
        let id_key = IdKey::new(1, [7; 32]);
        id_key.object_id(Tenant::new(tenant).unwrap(), TenantGeneration(generation), Key::new(key).unwrap())
    }

    #[test]
    fn object_id_depends_on_tenant_generation_key_and_secret() {
        let base = id("a", 0, b"bc");
        assert_eq!(base, id("a", 0, b"bc"));
        assert_ne!(base, id("ab", 0, b"c"));
        assert_ne!(base, id("b", 0, b"bc"));
        assert_ne!(base, id("a", 1, b"bc"));
        assert_ne!(base, id("a", 0, b"bd"));
        let other = IdKey::new(2, [8; 32]);
        assert_ne!(base, other.object_id(Tenant("a"), TenantGeneration(0), Key(b"bc")));
    }

    #[test]
    fn key_of_tenant_is_derived_and_computes_the_ids_of_the_cluster() {
        let id_key = IdKey::new(5, [7; 32]);
        for name in ["t".to_owned(), "x".repeat(TENANT_BYTES_MAX)] {
            let tenant = Tenant::new(&name).unwrap();
            let own = id_key.of_tenant(tenant);
            let expected = blake3::keyed_hash(&[7; 32], format!("moontide tenant id key\0{name}").as_bytes());
            assert_eq!((own.secret(), own.number()), (expected.as_bytes(), 5));
            let (generation, key) = (TenantGeneration(3), Key(b"k"));
            // A client has the number and the secret of its tenant.
            let received = TenantIdKey::new(5, *own.secret());
            assert_eq!(received.object_id(generation, key), id_key.object_id(tenant, generation, key));
        }
    }

    #[test]
    fn object_id_of_long_keys_matches_blake3() {
        // Both paths must compute the same function: the test compares them around the limit with BLAKE3 itself.
        let id_key = TenantIdKey::new(1, [7; 32]);
        for len in [379, 380, 381, 382, 4096] {
            let key = vec![0x5a; len];
            let expected = blake3::keyed_hash(&[7; 32], &[&[9, 0, 0, 0], &key[..]].concat());
            let id = id_key.object_id(TenantGeneration(9), Key::new(&key).unwrap());
            assert_eq!(id.0, expected.as_bytes()[..16], "key of {len} bytes");
        }
    }

    #[test]
    fn key_and_tenant_length_and_characters_are_checked() {
        assert_eq!(Key::new(b""), Err(KeyError::EmptyKey));
        assert!(Key::new(&[0; KEY_BYTES_MAX]).is_ok());
        assert_eq!(Key::new(&[0; KEY_BYTES_MAX + 1]), Err(KeyError::KeyTooLong { len: KEY_BYTES_MAX + 1 }));
        assert_eq!(Tenant::new(""), Err(KeyError::EmptyTenant));
        assert_eq!(Tenant::new("a/b"), Err(KeyError::TenantCharacter { byte: b'/' }));
        assert!(Tenant::from_bytes(&[b'x'; TENANT_BYTES_MAX]).is_ok());
        assert!(Tenant::from_bytes(&[b'x'; TENANT_BYTES_MAX + 1]).is_err());
        assert!(Tenant::from_bytes(&[0xff]).is_err());
        assert!(Tenant::new(Tenant::DEFAULT.as_str()).is_ok());
    }

    #[test]
    fn id_key_debug_output_hides_secret() {
        let id_key = IdKey::new(3, [0x41; 32]);
        assert_eq!(format!("{id_key:?}"), "IdKey { number: 3, .. }");
        let id_key = id_key.of_tenant(Tenant::DEFAULT);
        assert_eq!(format!("{id_key:?}"), "TenantIdKey { number: 3, .. }");
    }

    #[test]
    fn group_is_id_modulo_group_count() {
        let id = ObjectId(0x0123_4567_89ab_cdef_fedc_ba98_7654_3217u128.to_le_bytes());
        for groups in (1..=4096).chain([u16::MAX]) {
            let expected = (id.as_u128() % u128::from(groups)) as u16;
            assert_eq!(id.group(NonZeroU16::new(groups).unwrap()), GroupId(expected), "{groups} groups");
        }
    }
}
