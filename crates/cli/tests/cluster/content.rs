//! Known bytes: what an object holds follows from a number, so that every byte can be checked by whoever knows its key.

#![allow(dead_code, reason = "each test file uses its own part")]

use std::sync::OnceLock;

/// SplitMix64.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// From `MOONTIDE_SEED`, or the clock; says which.
    pub fn seeded() -> Rng {
        let given = std::env::var("MOONTIDE_SEED").ok().map(|seed| seed.parse().expect("a seed is a number"));
        let clock = || std::time::UNIX_EPOCH.elapsed().map_or(1, |now| now.as_nanos() as u64);
        let seed = given.unwrap_or_else(clock);
        println!("MOONTIDE_SEED={seed}");
        Rng(seed)
    }

    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// At least `from`, below `to`.
    pub fn within(&mut self, from: usize, to: usize) -> usize {
        from + (self.draw() % (to - from) as u64) as usize
    }

    pub fn fork(&mut self) -> Rng {
        Rng(self.draw())
    }
}

/// Bytes are taken from here in pieces: faster than drawing each.
const POOL: usize = 1 << 20;
const PIECE: usize = 4096;

fn pool() -> &'static [u8] {
    static BYTES: OnceLock<Vec<u8>> = OnceLock::new();
    BYTES.get_or_init(|| {
        let mut rng = Rng::new(1);
        (0..POOL / 8).flat_map(|_| rng.draw().to_le_bytes()).collect()
    })
}

/// One piece of the content: somewhere from the pool, with its own number in front.
fn piece(seed: u64, index: usize) -> (&'static [u8], [u8; 8]) {
    let number = Rng::new(seed ^ (index as u64).wrapping_mul(0xa076_1d64_78bd_642f)).draw();
    let from = number as usize % (POOL - PIECE);
    (&pool()[from..from + PIECE], number.to_le_bytes())
}

/// The content of this number and length.
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

/// Whether bytes are the content of this number, each of them.
pub fn is_content(seed: u64, bytes: &[u8]) -> bool {
    bytes.chunks(PIECE).enumerate().all(|(index, part)| {
        let (rest, number) = piece(seed, index);
        let front = part.len().min(8);
        part[..front] == number[..front] && part[front..] == rest[front..part.len()]
    })
}

/// Asserts that bytes are the content of this number and length.
#[track_caller]
pub fn check(seed: u64, len: usize, bytes: &[u8], what: &str) {
    assert_eq!(bytes.len(), len, "the length of {what}");
    assert!(is_content(seed, bytes), "wrong bytes: {what}");
}
