//! Self-describing keys and values: a value contains its writer, key and version, from which every byte is derived, so
//! that every client can check it.

use crate::content::{Rng, content, is_content};

/// A key. The upper 24 bits are its writer: 0 for all writers, n + 1 for writer n.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(pub u64);

const NUMBER_BITS: u32 = 40;

impl KeyId {
    /// A key that all clients write, replace and remove.
    pub fn hot(number: u64) -> KeyId {
        KeyId(number)
    }

    /// A key that only this writer writes.
    pub fn own(writer: u64, number: u64) -> KeyId {
        KeyId((writer + 1) << NUMBER_BITS | number)
    }

    pub fn name(self) -> String {
        let number = self.0 & ((1 << NUMBER_BITS) - 1);
        match self.0 >> NUMBER_BITS {
            0 => format!("hot-{number}"),
            writer => format!("w{}-{number}", writer - 1),
        }
    }

    /// Inverse of [`KeyId::name`].
    pub fn of_name(name: &str) -> Option<KeyId> {
        let (writer, number) = name.split_once('-')?;
        let number = number.parse().ok()?;
        match writer.strip_prefix('w') {
            Some(writer) => Some(KeyId::own(writer.parse().ok()?, number)),
            None => Some(KeyId::hot(number)),
        }
    }
}

/// A version: life of the client that wrote it, and its sequence number in that life.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version(pub u64);

impl Version {
    pub fn new(life: u32, sequence: u32) -> Version {
        Version(u64::from(life) << 32 | u64::from(sequence))
    }
}

/// First word of every value.
const MAGIC: u64 = 0x6d6f_6f6e_2063_6861;
/// Magic, key, version, length: 8 bytes each.
pub const HEADER: usize = 32;

fn seed(key: KeyId, version: Version) -> u64 {
    Rng::new(key.0 ^ version.0.rotate_left(29)).draw()
}

/// Returns the value of a version, `len` bytes long including its header.
pub fn value(key: KeyId, version: Version, len: usize) -> Vec<u8> {
    assert!(len >= HEADER, "a value has a header");
    let words = [MAGIC, key.0, version.0, len as u64];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(content(seed(key, version), len - HEADER));
    bytes
}

/// Checks every byte of a value of a key; returns its version.
pub fn check(key: KeyId, bytes: &[u8]) -> Result<Version, String> {
    let Some((header, body)) = bytes.split_at_checked(HEADER) else {
        return Err(format!("{} has only {} bytes", key.name(), bytes.len()));
    };
    let word = |at: usize| u64::from_le_bytes(header[8 * at..8 * at + 8].try_into().expect("8 bytes"));
    let (found, version) = (KeyId(word(1)), Version(word(2)));
    if word(0) != MAGIC {
        return Err(format!("{} has a wrong magic number", key.name()));
    }
    if found != key {
        return Err(format!("{} has the value of {}", key.name(), found.name()));
    }
    if word(3) != bytes.len() as u64 {
        return Err(format!(
            "{} has length {} in its header, and {} bytes",
            key.name(),
            word(3),
            bytes.len()
        ));
    }
    if !is_content(seed(key, version), body) {
        return Err(format!("{} has wrong content", key.name()));
    }
    Ok(version)
}

#[test]
fn key_is_found_by_its_name() {
    for key in [KeyId::hot(0), KeyId::hot(399), KeyId::own(0, 0), KeyId::own(3, 77)] {
        assert_eq!(KeyId::of_name(&key.name()), Some(key));
    }
}

#[test]
fn value_check_detects_wrong_key_flipped_bits_and_truncation() {
    let (key, version) = (KeyId::own(3, 77), Version::new(5, 9));
    for len in [HEADER, HEADER + 1, 5000] {
        let right = value(key, version, len);
        assert_eq!(check(key, &right), Ok(version));
        assert!(check(KeyId::own(3, 78), &right).is_err(), "another key's");
        for at in [0, 8, 16, 24, len - 1] {
            let mut wrong = right.clone();
            wrong[at] ^= 1;
            // A changed version implies other bytes; without a body, it is another version.
            assert_ne!(check(key, &wrong), Ok(version), "byte {at} of {len}");
        }
        assert!(check(key, &right[..len - 1]).is_err(), "cut off");
    }
}
