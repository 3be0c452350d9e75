//! Records made up for tests, benchmarks and seeds of fuzzers: everything about one follows from a few numbers.

use moontide_types::record::{DigestContext, Flags, Header, KeySection, State, Word, trailer_crc};
use moontide_types::{Epoch, Key, ObjectId, Tenant, TenantGeneration};

use crate::backend::{RecordName, Source};
use crate::buffer::{Aligned, BLOCK_BYTES};

/// A record in memory.
#[derive(Debug)]
pub struct Sample {
    /// Its header.
    pub header: Header,
    payload: Aligned,
    payload_start: usize,
    digests: Vec<u8>,
    key: Vec<u8>,
    attributes: Vec<u8>,
}

impl Sample {
    /// A record of an object with this number and version, with `len` bytes that follow from both.
    pub fn new(number: u64, version: u64, len: usize) -> Sample {
        Sample::with_key(number, version, len, format!("key-{number}").as_bytes(), &[], 0)
    }

    /// The same with a key and attributes, its payload `shift` bytes away from the start of a block.
    ///
    /// # Panics
    /// If the key or the version exceed their bounds.
    pub fn with_key(
        number: u64,
        version: u64,
        len: usize,
        key: &[u8],
        attributes: &[u8],
        shift: usize,
    ) -> Sample {
        let mut payload = Aligned::zeroed(len + shift);
        fill(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ version, &mut payload[shift..shift + len]);
        let id = id(number);
        let version = Epoch::from_bits(version).expect("a version of 62 bits");
        let context = DigestContext { id, version, stripe: 0, len: len as u64 };
        let mut digests = vec![];
        let root =
            context.payload(&payload[shift..shift + len], |digest| digests.extend(digest.to_le_bytes()));
        let section = KeySection { tenant: Tenant::DEFAULT, key: Key::new(key).expect("a valid key") };
        let mut key = vec![];
        section.encode(&mut key);
        let header = Header {
            flags: Flags::NONE,
            id,
            word: Word::new(version, State::Ready),
            object_len: len as u64,
            stripe_offset: 0,
            stripe_len: len as u64,
            payload_offset: BLOCK_BYTES as u64,
            root,
            stripe_index: 0,
            stripe_count: 1,
            key_len: key.len() as u32,
            attributes_len: attributes.len() as u32,
            trailer_crc: trailer_crc(&key, attributes),
            id_key: 0,
            tenant_generation: TenantGeneration(0),
        };
        Sample { header, payload, payload_start: shift, digests, key, attributes: attributes.into() }
    }

    /// The record as a backend takes it.
    pub fn source(&self) -> Source<'_> {
        Source {
            header: &self.header,
            payload: self.payload(),
            digests: &self.digests,
            key: &self.key,
            attributes: &self.attributes,
        }
    }

    /// Its payload.
    pub fn payload(&self) -> &[u8] {
        &self.payload[self.payload_start..][..self.header.stripe_len as usize]
    }

    /// Tenant and key, as they are stored.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// What a backend calls it.
    pub fn name(&self) -> RecordName {
        RecordName::of(&self.header)
    }

    /// Its bytes on disk.
    pub fn encode(&self) -> Vec<u8> {
        let layout = crate::record::DiskLayout::of(&self.header);
        let mut bytes = vec![0; layout.len as usize];
        crate::record::encode_front(&self.source(), &mut bytes[..layout.head_len as usize]);
        if layout.head_len < layout.len {
            bytes[layout.front_len as usize..][..self.payload().len()].copy_from_slice(self.payload());
        }
        bytes
    }
}

/// The id of the object with this number.
pub fn id(number: u64) -> ObjectId {
    let mut id = [0; 16];
    fill(number, &mut id);
    ObjectId(id)
}

/// Bytes that follow from a seed.
pub fn fill(seed: u64, bytes: &mut [u8]) {
    let mut random = Random(seed);
    for chunk in bytes.chunks_mut(8) {
        chunk.copy_from_slice(&random.next().to_le_bytes()[..chunk.len()]);
    }
}

/// Numbers that follow from a seed: SplitMix64.
#[derive(Clone, Debug)]
pub struct Random(pub u64);

impl Random {
    /// The next one.
    #[expect(clippy::should_implement_trait, reason = "an iterator would end")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// The next one below `end`, which is not 0.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }
}
