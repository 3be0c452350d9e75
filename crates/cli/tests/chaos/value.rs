//! Keys and values that say what they are: who wrote a value, under which key, as which of its writer's versions. Every byte
//! follows from that, so that anybody can check it.

use crate::content::{Rng, content, is_content};

/// A key. The upper 24 bits say whose: 0 is everybody's, n + 1 that of writer n.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId(pub u64);

const NUMBER_BITS: u32 = 40;

impl KeyId {
    /// One that all clients write, replace and remove.
    pub fn hot(number: u64) -> KeyId {
        KeyId(number)
    }

    /// One that this writer alone writes.
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
}

/// A version: which life of which client wrote it, and how many it had written before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Version(pub u64);

impl Version {
    pub fn new(life: u32, sequence: u32) -> Version {
        Version(u64::from(life) << 32 | u64::from(sequence))
    }
}

/// In front of every value.
const MAGIC: u64 = 0x6d6f_6f6e_2063_6861;
/// Magic, key, version, length: 8 bytes each.
pub const HEADER: usize = 32;

fn seed(key: KeyId, version: Version) -> u64 {
    Rng::new(key.0 ^ version.0.rotate_left(29)).draw()
}

/// The value of this version, `len` bytes long with its header.
pub fn value(key: KeyId, version: Version, len: usize) -> Vec<u8> {
    assert!(len >= HEADER, "a value has a header");
    let words = [MAGIC, key.0, version.0, len as u64];
    let mut bytes: Vec<u8> = words.iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(content(seed(key, version), len - HEADER));
    bytes
}

/// Which version these bytes are of a key, if every one of them is right.
pub fn check(key: KeyId, bytes: &[u8]) -> Result<Version, String> {
    let Some((header, body)) = bytes.split_at_checked(HEADER) else {
        return Err(format!("{} has only {} bytes", key.name(), bytes.len()));
    };
    let word = |at: usize| u64::from_le_bytes(header[8 * at..8 * at + 8].try_into().expect("8 bytes"));
    let (found, version) = (KeyId(word(1)), Version(word(2)));
    if word(0) != MAGIC {
        return Err(format!("{} does not begin as a value", key.name()));
    }
    if found != key {
        return Err(format!("{} came with the value of {}", key.name(), found.name()));
    }
    if word(3) != bytes.len() as u64 {
        return Err(format!("{} says it has {} bytes and has {}", key.name(), word(3), bytes.len()));
    }
    if !is_content(seed(key, version), body) {
        return Err(format!("{} has wrong bytes", key.name()));
    }
    Ok(version)
}

#[test]
fn a_value_is_known_by_every_byte() {
    let (key, version) = (KeyId::own(3, 77), Version::new(5, 9));
    for len in [HEADER, HEADER + 1, 5000] {
        let right = value(key, version, len);
        assert_eq!(check(key, &right), Ok(version));
        assert!(check(KeyId::own(3, 78), &right).is_err(), "another key's");
        for at in [0, 8, 16, 24, len - 1] {
            let mut wrong = right.clone();
            wrong[at] ^= 1;
            // A version that was changed names other bytes; where there are none, it is another version.
            assert_ne!(check(key, &wrong), Ok(version), "byte {at} of {len}");
        }
        assert!(check(key, &right[..len - 1]).is_err(), "cut off");
    }
}
