//! [`macs`]: keyed BLAKE3 of many short inputs, each with its own key, one input per vector lane. The lanes are those of
//! `id_batch`, which explains them.
//!
//! Invariant: the results equal those of the `blake3` crate, which hashes the inputs that do not fill a group of lanes.

use crate::id_batch::{
    BLOCK_BYTES, CHUNK_END, CHUNK_START, KEYED_HASH, LANES, LANES_SMALL, Lanes, Message, ROOT, SINGLE_MAX,
    compress, words,
};

/// Length of a MAC in bytes: the first bytes of a hash of 32.
pub const MAC_BYTES: usize = 16;

/// Most bytes of an input: two blocks, as much as any MAC of the protocol covers.
pub const MAC_INPUT_BYTES_MAX: usize = 2 * BLOCK_BYTES;

/// Input of a MAC.
#[derive(Clone, Copy)]
pub struct MacInput<'a> {
    /// Key of this input.
    pub key: &'a [u8; 32],
    /// Bytes that the MAC covers: 1 to [`MAC_INPUT_BYTES_MAX`].
    pub bytes: &'a [u8],
}

impl std::fmt::Debug for MacInput<'_> {
    /// Prints no key: its bytes must not reach a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MacInput").field("len", &self.bytes.len()).finish_non_exhaustive()
    }
}

/// Returns the MAC of one input.
pub fn mac(input: &MacInput<'_>) -> [u8; MAC_BYTES] {
    let hash = blake3::keyed_hash(input.key, input.bytes);
    *hash.as_bytes().first_chunk().expect("BLAKE3 hash has 32 bytes")
}

/// Appends the MACs of all inputs to `out`, in their order. A group of inputs takes as long as its longest one.
///
/// # Panics
/// If an input is empty or longer than [`MAC_INPUT_BYTES_MAX`].
pub fn macs(inputs: &[MacInput<'_>], out: &mut Vec<[u8; MAC_BYTES]>) {
    let in_range = |input: &MacInput<'_>| (1..=MAC_INPUT_BYTES_MAX).contains(&input.bytes.len());
    assert!(inputs.iter().all(in_range), "an input has 1 to {MAC_INPUT_BYTES_MAX} bytes");
    for inputs in inputs.chunks(LANES) {
        if inputs.len() > LANES_SMALL {
            group::<LANES>(inputs, out);
        } else if inputs.len() > SINGLE_MAX {
            group::<LANES_SMALL>(inputs, out);
        } else {
            out.extend(inputs.iter().map(mac));
        }
    }
}

fn group<const L: usize>(inputs: &[MacInput<'_>], out: &mut Vec<[u8; MAC_BYTES]>) {
    let mut chaining = [[0; L]; 8];
    for (lane, input) in inputs.iter().enumerate() {
        for (row, word) in chaining.iter_mut().zip(words::<8>(input.key)) {
            row[lane] = word;
        }
    }
    let mut message: Message<L> = [[0; L]; 16];
    let mut lanes = Lanes { block_len: [0; L], flags: [0; L], live: [0; L] };
    let len_max = inputs.iter().map(|input| input.bytes.len()).max().unwrap_or(0);
    for index in 0..len_max.div_ceil(BLOCK_BYTES) {
        for (lane, input) in inputs.iter().enumerate() {
            let Some(rest) = input.bytes.get(index * BLOCK_BYTES..).filter(|rest| !rest.is_empty()) else {
                lanes.live[lane] = 0;
                continue;
            };
            let (first, last) = (index == 0, rest.len() <= BLOCK_BYTES);
            lanes.live[lane] = u32::MAX;
            lanes.block_len[lane] = rest.len().min(BLOCK_BYTES) as u32;
            lanes.flags[lane] =
                KEYED_HASH | if first { CHUNK_START } else { 0 } | if last { CHUNK_END | ROOT } else { 0 };
            let words = match rest.first_chunk::<BLOCK_BYTES>() {
                Some(block) => words::<16>(block),
                None => {
                    let mut block = [0; BLOCK_BYTES];
                    block[..rest.len()].copy_from_slice(rest);
                    words::<16>(&block)
                }
            };
            for (row, word) in message.iter_mut().zip(words) {
                row[lane] = word;
            }
        }
        compress(&mut chaining, &message, &lanes);
    }
    for lane in 0..inputs.len() {
        let mut mac = [0; MAC_BYTES];
        for (bytes, row) in mac.chunks_exact_mut(4).zip(&chaining) {
            bytes.copy_from_slice(&row[lane].to_le_bytes());
        }
        out.push(mac);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_macs_match_single_macs_for_every_length_and_batch_size() {
        let keys: Vec<[u8; 32]> = (0..40u8).map(|n| std::array::from_fn(|i| n ^ (i * 37) as u8)).collect();
        let bytes: Vec<u8> = (0..MAC_INPUT_BYTES_MAX + 40).map(|i| (i * 31) as u8).collect();
        for count in 0..=keys.len() {
            // Lengths differ within a group, so that lanes end at different blocks; then all are equal.
            for step in [0, 1, 7] {
                let input = |(n, key): (usize, _)| {
                    let len = 1 + (count * 3 + n * step) % MAC_INPUT_BYTES_MAX;
                    MacInput { key, bytes: &bytes[n..n + len] }
                };
                let inputs: Vec<MacInput<'_>> = keys[..count].iter().enumerate().map(input).collect();
                let before = [0xee; MAC_BYTES];
                let mut batch = vec![before];
                macs(&inputs, &mut batch);
                let singles = inputs
                    .iter()
                    .map(|input| blake3::keyed_hash(input.key, input.bytes).as_bytes()[..MAC_BYTES].to_vec());
                assert_eq!(batch[0], before);
                assert_eq!(
                    batch[1..].iter().map(|mac| mac.to_vec()).collect::<Vec<_>>(),
                    singles.collect::<Vec<_>>()
                );
            }
        }
        for len in 1..=MAC_INPUT_BYTES_MAX {
            let inputs = [MacInput { key: &keys[3], bytes: &bytes[..len] }; 5];
            let mut batch = Vec::new();
            macs(&inputs, &mut batch);
            assert_eq!(batch, [mac(&inputs[0]); 5], "{len} bytes");
        }
    }
}
