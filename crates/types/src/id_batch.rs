//! Ids of a batch of keys: keyed BLAKE3 of short inputs, one input per vector lane.
//!
//! Within one input every step of BLAKE3 depends on the step before, so a short key costs the latency of its
//! blocks on every machine. Inputs are independent of each other: [`append`] hashes sixteen of them in
//! parallel. Its results equal those of [`TenantIdKey::object_id`]; the `blake3` crate is
//! the reference of the tests.
//!
//! ```text
//!               lane 0   lane 1   lane 2  …      a column of `Message` is a block of one input
//!  word 0      │ 07 00 │ 07 00 │ 07 00 │
//!  …           │  …    │  …    │  …    │         `compress` runs down all columns at once
//!  word 15     │       │       │       │
//! ```
//!
//! Invariants: every input is a single chunk ([`CHUNK_BYTES`]), so there is no tree; a lane whose input has
//! ended keeps its chaining value while the other lanes continue.
//!
//! This file uses no intrinsics. `compress` is a loop over lanes whose body has neither branches nor inner
//! loops: LLVM vectorises this form as a whole. `multiversion` compiles it once per width and selects a version
//! at run time. (It uses AVX-512 from Ice Lake and Zen 4 on: on older processors AVX-512 lowers the clock.)
//! State as arrays of lanes with a loop per operation looks more natural, but LLVM vectorises it in pieces or
//! not at all: 35 ns instead of 22 for a block of one lane with AVX2, 144 instead of 48 with SSE2.

use multiversion::multiversion;

use crate::key::{Key, ObjectId, TenantGeneration, TenantIdKey};

/// Longest input in bytes that BLAKE3 hashes block after block; a longer input becomes a tree.
const CHUNK_BYTES: usize = 1024;
pub(crate) const BLOCK_BYTES: usize = 64;

/// Lanes of a full group: one AVX-512 register of `u32`; two AVX2 registers cost no more than one each.
pub(crate) const LANES: usize = 16;
/// Lanes of a group for the remaining keys: one AVX2 register.
pub(crate) const LANES_SMALL: usize = 8;
/// Up to this number, remaining keys are hashed one by one: a partly filled group costs as much as a full one.
pub(crate) const SINGLE_MAX: usize = 2;
/// Number of keys that are sorted together to group keys of similar length: two groups.
const GROUPING_WINDOW: usize = 2 * LANES;

// BLAKE3's constants, from section 2 of its specification.
const IV: [u32; 4] = [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a];
const PERMUTATION: [usize; 16] = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];
pub(crate) const CHUNK_START: u32 = 1 << 0;
pub(crate) const CHUNK_END: u32 = 1 << 1;
pub(crate) const ROOT: u32 = 1 << 3;
pub(crate) const KEYED_HASH: u32 = 1 << 4;

/// Message word per round and position: the permutation, applied once more for every round.
const SCHEDULE: [[usize; 16]; 7] = {
    let mut schedule = [[0; 16]; 7];
    let mut position = 0;
    while position < 16 {
        schedule[0][position] = position;
        position += 1;
    }
    let mut round = 1;
    while round < 7 {
        let mut position = 0;
        while position < 16 {
            schedule[round][position] = schedule[round - 1][PERMUTATION[position]];
            position += 1;
        }
        round += 1;
    }
    schedule
};

impl TenantIdKey {
    /// Appends the ids of `keys` to `out`, in the order of the keys.
    ///
    /// The ids equal those of [`TenantIdKey::object_id`]. The call takes about a third of the time for eight or more
    /// keys of similar length (AVX-512; half of it with AVX2). One or two keys cost the same as single calls.
    pub fn object_ids<'k>(
        &self,
        generation: TenantGeneration,
        keys: impl IntoIterator<Item = Key<'k>>,
        out: &mut Vec<ObjectId>,
    ) {
        let keys = keys.into_iter();
        if keys.size_hint().1.is_some_and(|max| max <= SINGLE_MAX) {
            out.extend(keys.map(|key| self.object_id(generation, key)));
        } else {
            append(self, generation, keys, out);
        }
    }
}

/// Appends the ids of `keys` to `out`, in their order.
fn append<'k>(
    id_key: &TenantIdKey,
    generation: TenantGeneration,
    keys: impl Iterator<Item = Key<'k>>,
    out: &mut Vec<ObjectId>,
) {
    out.reserve(keys.size_hint().0);
    let secret = words(id_key.secret());
    let flush = |pending: &mut [Input<'k>], out: &mut Vec<ObjectId>| {
        // A group takes as long as its longest input, so inputs of similar length share a group. The sort costs
        // almost nothing when all lengths are equal.
        pending.sort_unstable_by_key(|input| input.key.as_bytes().len());
        for inputs in pending.chunks(LANES) {
            if inputs.len() > LANES_SMALL {
                group::<LANES>(&secret, generation, inputs, out);
            } else if inputs.len() > SINGLE_MAX {
                group::<LANES_SMALL>(&secret, generation, inputs, out);
            } else {
                for input in inputs {
                    out[input.index] = id_key.object_id(generation, input.key);
                }
            }
        }
    };
    let mut pending = [Input { index: 0, key: Key::PLACEHOLDER }; GROUPING_WINDOW];
    let mut count = 0;
    for key in keys {
        let input = Input { index: out.len(), key };
        if input.len() > CHUNK_BYTES {
            out.push(id_key.object_id(generation, key));
            continue;
        }
        out.push(ObjectId([0; 16])); // overwritten by `flush`
        pending[count] = input;
        count += 1;
        if count == GROUPING_WINDOW {
            flush(&mut pending, out);
            count = 0;
        }
    }
    flush(&mut pending[..count], out);
}

/// A key that waits until its group is full; `index` is the position of its id in the output.
#[derive(Clone, Copy)]
struct Input<'k> {
    index: usize,
    key: Key<'k>,
}

/// Bytes of the generation, with which all inputs of a call start.
const GENERATION_BYTES: usize = size_of::<TenantGeneration>();

impl Input<'_> {
    /// Returns the length of the whole input. Never 0: every input has a block 0.
    fn len(&self) -> usize {
        GENERATION_BYTES + self.key.as_bytes().len()
    }

    /// Writes block `index` of the input, padded with zeros.
    fn write_block(&self, generation: [u8; GENERATION_BYTES], index: usize, block: &mut [u8; BLOCK_BYTES]) {
        let key = self.key.as_bytes();
        if index == 0 {
            let len = key.len().min(BLOCK_BYTES - GENERATION_BYTES);
            *block = [0; BLOCK_BYTES];
            block[..GENERATION_BYTES].copy_from_slice(&generation);
            block[GENERATION_BYTES..GENERATION_BYTES + len].copy_from_slice(&key[..len]);
            return;
        }
        // Further blocks contain key bytes only.
        let rest = key.get(index * BLOCK_BYTES - GENERATION_BYTES..).unwrap_or(&[]);
        match rest.first_chunk() {
            Some(full) => *block = *full,
            None => {
                *block = [0; BLOCK_BYTES];
                block[..rest.len()].copy_from_slice(rest);
            }
        }
    }
}

/// Sixteen message words of each of `L` lanes.
pub(crate) type Message<const L: usize> = [[u32; L]; 16];

/// Per-lane inputs of a compression besides the block.
pub(crate) struct Lanes<const L: usize> {
    pub(crate) block_len: [u32; L],
    pub(crate) flags: [u32; L],
    /// All ones while the lane has input left, then zero.
    pub(crate) live: [u32; L],
}

/// Hashes up to `L` inputs and writes their ids to `out`.
fn group<const L: usize>(
    secret: &[u32; 8],
    generation: TenantGeneration,
    inputs: &[Input<'_>],
    out: &mut [ObjectId],
) {
    let generation = generation.0.to_le_bytes();
    let mut chaining = secret.map(|word| [word; L]);
    let mut blocks = [[0; BLOCK_BYTES]; L];
    let mut message: Message<L> = [[0; L]; 16];
    let mut lanes = Lanes { block_len: [0; L], flags: [0; L], live: [0; L] };
    let len_max = inputs.iter().map(Input::len).max().unwrap_or(0);
    for index in 0..len_max.div_ceil(BLOCK_BYTES) {
        for (lane, input) in inputs.iter().enumerate() {
            let left = input.len().saturating_sub(index * BLOCK_BYTES);
            if left == 0 {
                lanes.live[lane] = 0;
                continue;
            }
            let (first, last) = (index == 0, left <= BLOCK_BYTES);
            lanes.live[lane] = u32::MAX;
            lanes.block_len[lane] = left.min(BLOCK_BYTES) as u32;
            lanes.flags[lane] =
                KEYED_HASH | if first { CHUNK_START } else { 0 } | if last { CHUNK_END | ROOT } else { 0 };
            input.write_block(generation, index, &mut blocks[lane]);
        }
        // A separate pass: a read of a block right after its bytes were written in pieces stalls.
        for (lane, block) in blocks.iter().enumerate() {
            for (row, word) in message.iter_mut().zip(words::<16>(block)) {
                row[lane] = word;
            }
        }
        compress(&mut chaining, &message, &lanes);
    }
    for (lane, input) in inputs.iter().enumerate() {
        let ObjectId(id) = &mut out[input.index];
        for (bytes, row) in id.chunks_exact_mut(4).zip(&chaining) {
            bytes.copy_from_slice(&row[lane].to_le_bytes());
        }
    }
}

/// Compresses one block of every lane: `chaining` becomes the next chaining value, or the hash after the last
/// block.
#[multiversion(targets("x86_64+avx2+avx512f+avx512vl", "x86_64+avx2"))]
pub(crate) fn compress<const L: usize>(chaining: &mut [[u32; L]; 8], message: &Message<L>, lanes: &Lanes<L>) {
    for lane in 0..L {
        let m: [u32; 16] = std::array::from_fn(|word| message[word][lane]);
        let c: [u32; 8] = std::array::from_fn(|word| chaining[word][lane]);
        let (len, flags, live) = (lanes.block_len[lane], lanes.flags[lane], lanes.live[lane]);
        // The two zeros are the number of the chunk: there is only one chunk.
        let mut v =
            [c[0], c[1], c[2], c[3], c[4], c[5], c[6], c[7], IV[0], IV[1], IV[2], IV[3], 0, 0, len, flags];
        // Unrolled by hand: LLVM keeps a loop here, and then does not vectorise the loop over lanes.
        round::<0>(&mut v, &m);
        round::<1>(&mut v, &m);
        round::<2>(&mut v, &m);
        round::<3>(&mut v, &m);
        round::<4>(&mut v, &m);
        round::<5>(&mut v, &m);
        round::<6>(&mut v, &m);
        let next: [u32; 8] = std::array::from_fn(|i| ((v[i] ^ v[i + 8]) & live) | (c[i] & !live));
        for word in 0..8 {
            chaining[word][lane] = next[word];
        }
    }
}

#[inline(always)]
fn round<const ROUND: usize>(v: &mut [u32; 16], m: &[u32; 16]) {
    let s = const { &SCHEDULE[ROUND] };
    mix(v, [0, 4, 8, 12], m[s[0]], m[s[1]]);
    mix(v, [1, 5, 9, 13], m[s[2]], m[s[3]]);
    mix(v, [2, 6, 10, 14], m[s[4]], m[s[5]]);
    mix(v, [3, 7, 11, 15], m[s[6]], m[s[7]]);
    mix(v, [0, 5, 10, 15], m[s[8]], m[s[9]]);
    mix(v, [1, 6, 11, 12], m[s[10]], m[s[11]]);
    mix(v, [2, 7, 8, 13], m[s[12]], m[s[13]]);
    mix(v, [3, 4, 9, 14], m[s[14]], m[s[15]]);
}

#[inline(always)]
fn mix(v: &mut [u32; 16], [a, b, c, d]: [usize; 4], x: u32, y: u32) {
    v[a] = v[a].wrapping_add(v[b]).wrapping_add(x);
    v[d] = (v[d] ^ v[a]).rotate_right(16);
    v[c] = v[c].wrapping_add(v[d]);
    v[b] = (v[b] ^ v[c]).rotate_right(12);
    v[a] = v[a].wrapping_add(v[b]).wrapping_add(y);
    v[d] = (v[d] ^ v[a]).rotate_right(8);
    v[c] = v[c].wrapping_add(v[d]);
    v[b] = (v[b] ^ v[c]).rotate_right(7);
}

/// Converts `4 × N` bytes to little-endian words.
pub(crate) fn words<const N: usize>(bytes: &[u8]) -> [u32; N] {
    let mut words = [0; N];
    for (word, bytes) in words.iter_mut().zip(bytes.chunks_exact(4)) {
        *word = u32::from_le_bytes(bytes.try_into().expect("chunks of 4"));
    }
    words
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::limits::KEY_BYTES_MAX;

    /// Compares a batch with single calls. `out` is not empty at the start, and its first element must not change.
    fn check(generation: u32, keys: &[Vec<u8>]) {
        let id_key = TenantIdKey::new(1, std::array::from_fn(|i| (i * 37) as u8));
        let generation = TenantGeneration(generation);
        let keys = || keys.iter().map(|key| Key::new(key).unwrap());
        let before = ObjectId([0xee; 16]);
        let mut batch = vec![before];
        id_key.object_ids(generation, keys(), &mut batch);
        let single = keys().map(|key| id_key.object_id(generation, key));
        assert_eq!(batch, [before].into_iter().chain(single).collect::<Vec<_>>());
    }

    fn pattern(len: usize) -> Vec<u8> {
        (0..len).map(|i| (i * 31 + len) as u8).collect()
    }

    #[test]
    fn batch_ids_match_single_ids_for_every_key_length() {
        // Adjacent lengths share a group, so that lanes end at different blocks; then each length separately.
        check(7, &(1..=1100).map(pattern).collect::<Vec<_>>());
        for len in 1..=1100 {
            check(u32::MAX, &vec![pattern(len); SINGLE_MAX + 1]);
        }
    }

    #[test]
    fn batch_ids_match_single_ids_for_every_batch_size() {
        for size in 0..=40 {
            check(0, &(0..size).map(|n| pattern(60 + n)).collect::<Vec<_>>());
            check(0, &vec![vec![b'k'; KEY_BYTES_MAX]; size.min(3)]);
        }
    }

    proptest! {
        #[test]
        fn batch_ids_match_single_ids_for_random_batches(
            generation: u32,
            keys in proptest::collection::vec(
                prop_oneof![
                    4 => proptest::collection::vec(any::<u8>(), 1..=200),
                    2 => proptest::collection::vec(any::<u8>(), 1..=1100),
                    1 => proptest::collection::vec(any::<u8>(), 1..=KEY_BYTES_MAX),
                ],
                0..=40,
            ),
        ) {
            check(generation, &keys);
        }
    }
}
