//! [`BlockHash`]: hash of a block. It covers all tokens up to the block's end, not only its own.
//!
//! The same chain as `moontide.kv.block_hashes` of the Python package, so that engines in both languages find each
//! other's blocks: SHA-256 over the preceding hash, and the tokens as 64-bit little-endian numbers. The first one
//! follows a root, made from a tenant's salt and an adapter's name.
//!
//! A tail that does not fill a block is hashed by the same rule: fewer tokens give another hash. In a sequence from
//! which tokens [were dropped](crate::Cache::prune), the upper half of each number is the token's position, counted
//! from one, and its highest bit is set if the row was computed since. The remaining rows were computed in the presence
//! of the dropped tokens, and the hash covers both.

use std::fmt;

use sha2::{Digest, Sha256};

/// Tokens that are hashed at a time: the size of most blocks.
const WORDS: usize = 16;

/// Id of a token.
pub type Token = u32;

/// Hash of a block's content.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockHash(pub [u8; 32]);

impl BlockHash {
    /// Returns the hash that precedes the first block. Different salts (tenants) and adapters never share blocks.
    pub fn root(salt: &str, adapter: &str) -> BlockHash {
        let mut json = String::from("[\"moontide\", ");
        push_json(&mut json, adapter);
        json.push_str(", ");
        push_json(&mut json, if moontide_rt::mutation_enabled("salt-forgotten") { "" } else { salt });
        json.push(']');
        BlockHash(Sha256::digest(json.as_bytes()).into())
    }

    /// Returns the hash of the tokens that follow.
    pub fn extend(&self, tokens: &[Token]) -> BlockHash {
        self.extend_words(tokens.iter().map(|token| u64::from(*token)))
    }

    pub(crate) fn extend_words(&self, words: impl Iterator<Item = u64>) -> BlockHash {
        let mut sha = Sha256::new_with_prefix(self.0);
        // Many at a time: every call has a cost.
        let mut bytes = [0; 8 * WORDS];
        let mut words = words.peekable();
        while words.peek().is_some() {
            let mut len = 0;
            for (target, word) in bytes.chunks_exact_mut(8).zip(words.by_ref()) {
                target.copy_from_slice(&word.to_le_bytes());
                len += 8;
            }
            sha.update(&bytes[..len]);
        }
        BlockHash(sha.finalize().into())
    }

    /// Returns the hash that precedes the rest of a sequence after tokens were dropped from it: it was computed in
    /// their presence.
    pub(crate) fn after_dropping(&self, history: &BlockHash) -> BlockHash {
        let mut sha = Sha256::new_with_prefix(b"moontide: dropped");
        sha.update(self.0);
        sha.update(history.0);
        BlockHash(sha.finalize().into())
    }
}

/// Returns the hash of each full block of tokens, the first one following `parent`.
pub fn block_hashes(
    parent: BlockHash,
    tokens: &[Token],
    block_tokens: usize,
) -> impl Iterator<Item = BlockHash> {
    tokens.chunks_exact(block_tokens).scan(parent, |parent, tokens| {
        *parent = parent.extend(tokens);
        Some(*parent)
    })
}

/// Writes a JSON string like Python's `json.dumps`: ASCII, other characters as UTF-16 escapes.
fn push_json(out: &mut String, text: &str) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            ' '..='~' => out.push(character),
            _ => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    out.push_str(&format!("\\u{unit:04x}"));
                }
            }
        }
    }
    out.push('"');
}

impl fmt::Display for BlockHash {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(out, "{byte:02x}"))
    }
}

impl fmt::Debug for BlockHash {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, ..] = self.0;
        write!(out, "{a:02x}{b:02x}{c:02x}{d:02x}…")
    }
}

/// Hasher of a map whose keys are hashes already.
#[derive(Clone, Default)]
pub(crate) struct PrehashedHasher(u64);

impl std::hash::Hasher for PrehashedHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        if let Some(first) = bytes.first_chunk() {
            self.0 = u64::from_le_bytes(*first);
        }
    }

    /// The length, which is always the same.
    fn write_usize(&mut self, _: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of `moontide.kv.block_hashes(range(32), 16, salt=…, adapter=…)`.
    #[test]
    fn block_hashes_match_python() {
        let tokens: Vec<Token> = (0..37).collect();
        let hashes = |salt, adapter| {
            block_hashes(BlockHash::root(salt, adapter), &tokens, 16)
                .map(|hash| hash.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(hashes("", ""), PLAIN);
        assert_eq!(hashes("ten\"änt\u{1f319}\\\n", "lora"), SALTED);
    }

    const PLAIN: [&str; 2] = [
        "1a7cc2172788183e209d0d51899176f6701240d3d0056065ff6cd745d21af098",
        "47852da2a6682d396e33379c56592df90e05a1ef6bc752c3f9ed55b4f4dbbc05",
    ];
    const SALTED: [&str; 2] = [
        "299ce33ed280c4feb8899b23ad4ea6c1d9888973177f296a38d555966fe122ba",
        "af04129e585a7f60f34cf2399fd768c77ef2d821a8cec315dd44b8cbb3aac999",
    ];

    #[test]
    fn block_hash_depends_on_salt_adapter_and_tokens() {
        let root = BlockHash::root("", "");
        assert_ne!(root, BlockHash::root("a", ""));
        assert_ne!(BlockHash::root("a", ""), BlockHash::root("", "a"));
        assert_ne!(root.extend(&[1, 2]), root.extend(&[1]));
        assert_ne!(root.extend(&[1]).extend(&[2]), root.extend(&[2]).extend(&[1]));
        let other = root.extend(&[1]);
        assert_ne!(root.after_dropping(&other), other.after_dropping(&root));
    }
}
