//! Deterministic content: the bytes of an object are derived from a number, so that a reader can check every byte.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::sync::OnceLock;

use moontide_rt::SplitMix64;

/// Random numbers of a test.
#[derive(Clone, Debug)]
pub struct Rng(SplitMix64);

impl Rng {
    /// Seeds from `MOONTIDE_SEED`, or the operating system; prints the seed.
    pub fn seeded() -> Rng {
        let given = std::env::var("MOONTIDE_SEED").ok().map(|seed| seed.parse().expect("a seed is a number"));
        let drawn = || {
            let mut bytes = [0; 8];
            let len = rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty());
            assert_eq!(len, Ok(bytes.len()), "the system has random numbers");
            u64::from_le_bytes(bytes)
        };
        let seed = given.unwrap_or_else(drawn);
        println!("MOONTIDE_SEED={seed} repeats these random choices");
        Rng(SplitMix64::new(seed))
    }

    pub fn new(seed: u64) -> Rng {
        Rng(SplitMix64::new(seed))
    }

    pub fn draw(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number from `from` to below `to`.
    pub fn within(&mut self, from: usize, to: usize) -> usize {
        from + self.0.below((to - from) as u64) as usize
    }

    pub fn fork(&mut self) -> Rng {
        Rng(SplitMix64::new(self.draw()))
    }
}

/// Size of the pool from which content is copied in pieces: faster than drawing each byte.
const POOL: usize = 1 << 20;
const PIECE: usize = 4096;

fn pool() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let mut bytes = vec![0; POOL];
        SplitMix64::new(1).fill(&mut bytes);
        bytes
    })
}

/// Returns one piece of the content: a slice of the pool, and the number that replaces its first bytes.
fn piece(seed: u64, index: usize) -> (&'static [u8], [u8; 8]) {
    let number = Rng::new(seed ^ (index as u64).wrapping_mul(0xa076_1d64_78bd_642f)).draw();
    let from = number as usize % (POOL - PIECE);
    (&pool()[from..from + PIECE], number.to_le_bytes())
}

/// Returns the content of a seed and length.
pub fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    for (index, part) in bytes.chunks_mut(PIECE).enumerate() {
        let (rest, number) = piece(seed, index);
        part.copy_from_slice(&rest[..part.len()]);
        let front = part.len().min(8);
        part[..front].copy_from_slice(&number[..front]);
    }
    bytes
}

/// Returns true if `bytes` is the content of the seed.
pub fn is_content(seed: u64, bytes: &[u8]) -> bool {
    bytes.chunks(PIECE).enumerate().all(|(index, part)| {
        let (rest, number) = piece(seed, index);
        let front = part.len().min(8);
        part[..front] == number[..front] && part[front..] == rest[front..part.len()]
    })
}

/// Asserts that `bytes` is the content of the seed and length.
#[track_caller]
pub fn check(seed: u64, len: usize, bytes: &[u8], what: &str) {
    assert_eq!(bytes.len(), len, "the length of {what}");
    assert!(is_content(seed, bytes), "wrong bytes: {what}");
}
