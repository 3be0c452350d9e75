//! Digests: XXH3-64 per 256 KiB page, and a tree over them whose root the writer sends to the reader.
//!
//! ```text
//!  level 2                       root             (only above 512 pages = 128 MiB)
//!                        ┌────────┴────────┐
//!  level 1            node 0            node 1 …  (a single one: it is the root)
//!                  ┌─────┼─────┐           │
//!  level 0       page 0 … page 511     page 512 …
//! ```
//!
//! The seed of each digest is XXH3 of (object, version, stripe, level, index, length), so an intact page at
//! another index, of another version or of another object does not match. XXH3 is not a MAC: it detects
//! accidental corruption; other mechanisms isolate tenants.
//!
//! Pages are hashed one by one while they are in the CPU cache. The root of an object is the root of its single
//! stripe, or a digest over the roots of its stripes.

use std::hash::Hasher as _;

use twox_hash::XxHash3_64;

use crate::ids::Epoch;
use crate::key::ObjectId;
use crate::limits::{DIGEST_FAN_OUT, PAGE_BYTES};

/// Level in the seed of an object's root over several stripes: greater than the height of any tree.
const OBJECT_LEVEL: u32 = 0xff;

/// Levels above the pages: 512³ pages of 256 KiB are more than the largest object.
const LEVELS: usize = 3;

/// Identity of a stripe, which is part of the seed of its digests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DigestContext {
    /// Object of the stripe.
    pub id: ObjectId,
    /// Version of the object.
    pub version: Epoch,
    /// Index of the stripe.
    pub stripe: u16,
    /// Payload length of the stripe in bytes.
    pub len: u64,
}

impl DigestContext {
    /// Returns the digest of page `index` with the bytes `page`.
    pub fn page(&self, index: u64, page: &[u8]) -> u64 {
        debug_assert!(page.len() as u64 <= PAGE_BYTES);
        XxHash3_64::oneshot_with_seed(self.seed(0, index), page)
    }

    /// As [`DigestContext::page`], for a page in several parts.
    pub fn page_from_parts<'a>(&self, index: u64, parts: impl IntoIterator<Item = &'a [u8]>) -> u64 {
        let mut hasher = XxHash3_64::with_seed(self.seed(0, index));
        parts.into_iter().for_each(|part| hasher.write(part));
        hasher.finish()
    }

    /// Returns the root of a payload and passes its page digests to `digests`.
    ///
    /// # Panics
    /// If the length of the payload differs from the context's.
    pub fn payload(&self, payload: &[u8], mut digests: impl FnMut(u64)) -> u64 {
        assert_eq!(payload.len() as u64, self.len, "payload length differs from the context");
        if payload.len() as u64 <= PAGE_BYTES {
            // Small objects are frequent: avoid the builder's 12 KiB.
            let page = (!payload.is_empty()).then(|| self.page(0, payload));
            page.into_iter().for_each(&mut digests);
            return self.node(1, 0, page.as_slice());
        }
        let mut root = RootBuilder::new(*self);
        for (index, page) in payload.chunks(PAGE_BYTES as usize).enumerate() {
            let digest = self.page(index as u64, page);
            digests(digest);
            root.push(digest);
        }
        root.finish()
    }

    /// Returns the root over known page digests.
    pub fn root_of(&self, digests: impl IntoIterator<Item = u64>) -> u64 {
        let mut digests = digests.into_iter();
        if self.pages() <= 1 {
            // Small objects are frequent: avoid the builder's 12 KiB.
            let page = digests.next();
            assert_eq!(page.iter().count() as u64, self.pages(), "number of page digests");
            return self.node(1, 0, page.as_slice());
        }
        let mut root = RootBuilder::new(*self);
        digests.for_each(|digest| root.push(digest));
        root.finish()
    }

    /// Returns the number of pages of the payload.
    fn pages(&self) -> u64 {
        self.len.div_ceil(PAGE_BYTES)
    }

    fn seed(&self, level: u32, index: u64) -> u64 {
        let mut input = [0; 48];
        input[0..16].copy_from_slice(&self.id.0);
        input[16..24].copy_from_slice(&self.version.bits().to_le_bytes());
        input[24..28].copy_from_slice(&u32::from(self.stripe).to_le_bytes());
        input[28..32].copy_from_slice(&level.to_le_bytes());
        input[32..40].copy_from_slice(&index.to_le_bytes());
        input[40..48].copy_from_slice(&self.len.to_le_bytes());
        XxHash3_64::oneshot(&input)
    }

    fn node(&self, level: u32, index: u64, children: &[u64]) -> u64 {
        let seed = self.seed(level, index);
        if let &[only] = children {
            return XxHash3_64::oneshot_with_seed(seed, &only.to_le_bytes());
        }
        let mut bytes = [0; DIGEST_FAN_OUT * 8];
        let bytes = &mut bytes[..children.len() * 8];
        for (target, child) in bytes.chunks_exact_mut(8).zip(children) {
            target.copy_from_slice(&child.to_le_bytes());
        }
        XxHash3_64::oneshot_with_seed(seed, bytes)
    }
}

/// Returns the root of an object: the root of its only stripe, or a digest over the roots of its stripes in order.
pub fn object_root(id: ObjectId, version: Epoch, object_len: u64, stripe_roots: &[u64]) -> u64 {
    if let &[root] = stripe_roots {
        return root;
    }
    let stripe = stripe_roots.len() as u16; // ≤ STRIPES_MAX: checked by Header::check
    let context = DigestContext { id, version, stripe, len: object_len };
    let bytes: Vec<u8> = stripe_roots.iter().flat_map(|root| root.to_le_bytes()).collect();
    XxHash3_64::oneshot_with_seed(context.seed(OBJECT_LEVEL, 0), &bytes)
}

/// Computes the root from page digests in order; keeps at most one node per level.
pub struct RootBuilder {
    context: DigestContext,
    /// For each level above the pages: the children of its unfinished node, and the number of finished nodes.
    levels: [Level; LEVELS],
    pages: u64,
}

struct Level {
    children: [u64; DIGEST_FAN_OUT],
    len: usize,
    finished: u64,
}

impl RootBuilder {
    /// Creates a builder for one stripe.
    pub fn new(context: DigestContext) -> RootBuilder {
        let level = || Level { children: [0; DIGEST_FAN_OUT], len: 0, finished: 0 };
        RootBuilder { context, levels: [level(), level(), level()], pages: 0 }
    }

    /// Adds the digest of the next page.
    pub fn push(&mut self, page_digest: u64) {
        self.pages += 1;
        self.push_at(0, page_digest);
    }

    /// Returns the root.
    ///
    /// # Panics
    /// If the number of pages does not match the payload length.
    pub fn finish(mut self) -> u64 {
        assert_eq!(self.pages, self.context.pages(), "number of pages pushed");
        for level in 0..LEVELS {
            let node = self.close(level);
            if self.levels[level].finished == 1 {
                return node;
            }
            self.push_at(level + 1, node);
        }
        unreachable!("top level has one node")
    }

    /// Adds a child at `first_level` (0 = the level directly above the pages). A full node is closed only when one
    /// more child arrives, so `finish` closes the last node of a level, which may be the root.
    fn push_at(&mut self, first_level: usize, digest: u64) {
        let mut child = digest;
        for level in first_level..LEVELS {
            let full = self.levels[level].len == DIGEST_FAN_OUT;
            let carry = full.then(|| self.close(level));
            let this = &mut self.levels[level];
            this.children[this.len] = child;
            this.len += 1;
            match carry {
                Some(node) => child = node,
                None => return,
            }
        }
        unreachable!("more pages than the largest object has");
    }

    /// Computes the digest of the unfinished node of `level` and starts a new node.
    fn close(&mut self, level: usize) -> u64 {
        let this = &mut self.levels[level];
        let digest = self.context.node(level as u32 + 1, this.finished, &this.children[..this.len]);
        this.finished += 1;
        this.len = 0;
        digest
    }
}

/// Page digests in their stored form: little-endian, possibly in shared memory.
#[derive(Clone, Copy, Debug)]
pub struct PageDigests<'a>(&'a [u8]);

impl<'a> PageDigests<'a> {
    /// Creates a view of the digests section of a record.
    ///
    /// # Panics
    /// If the length is not a multiple of 8: it comes from a checked header.
    pub fn new(section: &'a [u8]) -> PageDigests<'a> {
        assert!(section.len().is_multiple_of(8));
        PageDigests(section)
    }

    /// Returns the bytes of the section.
    pub fn as_bytes(&self) -> &'a [u8] {
        self.0
    }

    /// Iterates over the digests in page order.
    pub fn iter(&self) -> impl Iterator<Item = u64> + use<'a> {
        self.0.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().expect("8 bytes")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn context(len: u64) -> DigestContext {
        DigestContext { id: ObjectId([3; 16]), version: Epoch::from_bits(9).unwrap(), stripe: 0, len }
    }

    /// The definition, level by level, as in `docs/formats.md`.
    fn naive_root(context: &DigestContext, pages: &[u64]) -> u64 {
        let mut below = pages.to_vec();
        for level in 1.. {
            let nodes = if below.is_empty() { vec![&[][..]] } else { below.chunks(DIGEST_FAN_OUT).collect() };
            let digests: Vec<u64> = nodes
                .iter()
                .enumerate()
                .map(|(index, children)| context.node(level, index as u64, children))
                .collect();
            if let [root] = digests[..] {
                return root;
            }
            below = digests;
        }
        unreachable!()
    }

    #[test]
    fn digest_tree_builder_matches_naive_root() {
        let two = (DIGEST_FAN_OUT * DIGEST_FAN_OUT) as u64;
        for pages in [0, 1, 2, 511, 512, 513, 1024, 1025, two - 1, two, two + 1, two + 513, 2 * two + 1] {
            let context = context(pages * PAGE_BYTES);
            let digests: Vec<u64> = (0..pages).map(|i| i.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
            assert_eq!(
                context.root_of(digests.iter().copied()),
                naive_root(&context, &digests),
                "{pages} pages"
            );
        }
    }

    #[test]
    fn page_digest_from_parts_equals_whole_page() {
        let context = context(PAGE_BYTES);
        let page: Vec<u8> = (0..PAGE_BYTES).map(|i| (i * 31) as u8).collect();
        for cut in [0, 1, 63, 1024, 100_000, page.len()] {
            let (a, b) = page.split_at(cut);
            assert_eq!(context.page_from_parts(0, [a, b]), context.page(0, &page), "cut at {cut}");
        }
    }

    #[test]
    fn page_digest_depends_on_index_stripe_version_id_and_length() {
        let base = context(2 * PAGE_BYTES);
        let page = vec![1; PAGE_BYTES as usize];
        let digest = base.page(0, &page);
        assert_ne!(digest, base.page(1, &page));
        assert_ne!(digest, DigestContext { stripe: 1, ..base }.page(0, &page));
        assert_ne!(digest, DigestContext { version: Epoch::from_bits(10).unwrap(), ..base }.page(0, &page));
        assert_ne!(digest, DigestContext { id: ObjectId([4; 16]), ..base }.page(0, &page));
        assert_ne!(digest, DigestContext { len: PAGE_BYTES, ..base }.page(0, &page));
    }

    #[test]
    fn any_flipped_byte_changes_root() {
        let mut payload: Vec<u8> = (0..PAGE_BYTES + 100).map(|i| i as u8).collect();
        let context = context(payload.len() as u64);
        let mut pages = vec![];
        let root = context.payload(&payload, |digest| pages.push(digest));
        assert_eq!(context.root_of(pages), root);
        for at in [0, 4095, PAGE_BYTES as usize, payload.len() - 1] {
            payload[at] ^= 1;
            assert_ne!(context.payload(&payload, |_| ()), root, "byte {at}");
            payload[at] ^= 1;
        }
    }

    #[test]
    fn object_root_depends_on_stripe_order_and_object_length() {
        let (id, version) = (ObjectId([1; 16]), Epoch::from_bits(1).unwrap());
        assert_eq!(object_root(id, version, 10, &[42]), 42);
        let root = object_root(id, version, 10, &[1, 2]);
        assert_ne!(root, object_root(id, version, 10, &[2, 1]));
        assert_ne!(root, object_root(id, version, 11, &[1, 2]));
    }
}
