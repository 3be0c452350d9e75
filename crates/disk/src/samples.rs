//! Sample records for tests, benchmarks and fuzzing seeds: their content follows from a few numbers.

use moontide_rt::SplitMix64;
use moontide_types::record::{DigestContext, Header, KeySection, RecordFlags, State, Word, trailer_crc};
use moontide_types::{Epoch, Key, ObjectId, Tenant, TenantGeneration};

use crate::backend::{RecordId, RecordSource};
use crate::buffer::{AlignedBuf, BLOCK_BYTES};

/// A record in memory.
#[derive(Debug)]
pub struct SampleRecord {
    /// Header as in memory.
    pub header: Header,
    payload: AlignedBuf,
    payload_start: usize,
    digests: Vec<u8>,
    key: Vec<u8>,
    attributes: Vec<u8>,
}

impl SampleRecord {
    /// Creates a record of an object with this number and version, with `len` pseudo-random bytes.
    pub fn new(number: u64, version: u64, len: usize) -> SampleRecord {
        SampleRecord::with_key(number, version, len, format!("key-{number}").as_bytes(), &[], 0)
    }

    /// Like [`SampleRecord::new`], with a key and attributes, and the payload at `shift` bytes from the start of a
    /// block.
    ///
    /// # Panics
    /// If the key or the version exceed their limits.
    pub fn with_key(
        number: u64,
        version: u64,
        len: usize,
        key: &[u8],
        attributes: &[u8],
        shift: usize,
    ) -> SampleRecord {
        let mut payload = AlignedBuf::zeroed(len + shift);
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
            flags: RecordFlags::NONE,
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
        SampleRecord { header, payload, payload_start: shift, digests, key, attributes: attributes.into() }
    }

    /// Returns the record as input for a backend.
    pub fn source(&self) -> RecordSource<'_> {
        RecordSource {
            header: &self.header,
            payload: self.payload(),
            digests: &self.digests,
            key: &self.key,
            attributes: &self.attributes,
        }
    }

    /// Returns the payload.
    pub fn payload(&self) -> &[u8] {
        &self.payload[self.payload_start..][..self.header.stripe_len as usize]
    }

    /// Returns tenant and key as stored.
    pub fn key(&self) -> &[u8] {
        &self.key
    }

    /// Returns the id of the record.
    pub fn name(&self) -> RecordId {
        RecordId::of(&self.header)
    }

    /// Returns the bytes on disk.
    pub fn encode(&self) -> Vec<u8> {
        let layout = crate::record::DiskLayout::of(&self.header);
        let mut bytes = vec![0; layout.len as usize];
        crate::record::encode_preamble(&self.source(), &mut bytes[..layout.preamble_read_len as usize]);
        if layout.preamble_read_len < layout.len {
            bytes[layout.preamble_len as usize..][..self.payload().len()].copy_from_slice(self.payload());
        }
        bytes
    }
}

/// Returns the id of the object with this number.
pub fn id(number: u64) -> ObjectId {
    let mut id = [0; 16];
    fill(number, &mut id);
    ObjectId(id)
}

/// Fills `bytes` with pseudo-random bytes.
pub fn fill(seed: u64, bytes: &mut [u8]) {
    SplitMix64::new(seed).fill(bytes);
}
