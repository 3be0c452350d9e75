//! [`RecordDescription`]: everything but the payload and its digests, as one node sends it to another that copies the
//! record.
//!
//! ```text
//!  header 128 B │ tenant + key │ attributes
//! ```
//!
//! The header has a CRC, and its `trailer_crc` covers the rest. The receiver computes the digests from the payload, and
//! compares them with a root that it has from the master.

use crate::record::{HEADER_BYTES, Header, HeaderError, KeySection, State, TrailerError, trailer_crc};

/// Description of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordDescription<'a> {
    /// Header of the record. Its state is READY.
    pub header: Header,
    /// Tenant and key.
    pub key: KeySection<'a>,
    /// Attributes as stored.
    pub attributes: &'a [u8],
}

/// Error of the decoding of a description.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DescriptionError {
    /// The bytes have another length than their header requires.
    #[error("description has {found} bytes, expected {expected}")]
    Length {
        /// Length of the description, or of a header if even that is incomplete.
        expected: usize,
        /// Number of bytes.
        found: usize,
    },
    /// The header is corrupt.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The record is not READY.
    #[error("state {found:?} instead of READY")]
    State {
        /// State in the header word.
        found: State,
    },
    /// Tenant, key or attributes do not match their CRC.
    #[error("trailer CRC {found:#010x}, computed {computed:#010x}")]
    TrailerCrc {
        /// CRC in the header.
        found: u32,
        /// CRC of the bytes.
        computed: u32,
    },
    /// Tenant or key is invalid.
    #[error(transparent)]
    Key(#[from] TrailerError),
}

impl<'a> RecordDescription<'a> {
    /// Encodes a description from the parts of a READY record.
    pub fn encode(header: &Header, key: &[u8], attributes: &[u8]) -> Vec<u8> {
        let header = Header { word: header.word.with_state(State::Ready), ..*header };
        [&header.encode()[..], key, attributes].concat()
    }

    /// Decodes a description. Accepts any bytes.
    pub fn decode(bytes: &'a [u8]) -> Result<RecordDescription<'a>, DescriptionError> {
        let length = |expected| DescriptionError::Length { expected, found: bytes.len() };
        let (header, rest) = bytes.split_first_chunk().ok_or(length(HEADER_BYTES))?;
        let header = Header::decode(header)?;
        if header.word.state() != State::Ready {
            return Err(DescriptionError::State { found: header.word.state() });
        }
        let (key_len, attributes_len) = (header.key_len as usize, header.attributes_len as usize);
        if rest.len() != key_len + attributes_len {
            return Err(length(HEADER_BYTES + key_len + attributes_len)); // both are at most some KiB
        }
        let (key, attributes) = rest.split_at(key_len);
        let (found, computed) = (header.trailer_crc, trailer_crc(key, attributes));
        if found != computed {
            return Err(DescriptionError::TrailerCrc { found, computed });
        }
        Ok(RecordDescription { header, key: KeySection::decode(key)?, attributes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::{RecordFlags, Word};
    use crate::{Epoch, Key, ObjectId, Tenant, TenantGeneration, Term};

    fn header(state: State, key: &[u8], attributes: &[u8]) -> Header {
        Header {
            flags: RecordFlags::NONE,
            id: ObjectId([5; 16]),
            word: Word::new(Epoch::new(Term::new(2).unwrap(), 9).unwrap(), state),
            object_len: 5000,
            stripe_offset: 0,
            stripe_len: 5000,
            payload_offset: 4096,
            root: 77,
            stripe_index: 0,
            stripe_count: 1,
            key_len: key.len() as u32,
            attributes_len: attributes.len() as u32,
            trailer_crc: trailer_crc(key, attributes),
            id_key: 3,
            tenant_generation: TenantGeneration(4),
        }
    }

    fn key() -> Vec<u8> {
        let mut bytes = vec![];
        KeySection { tenant: Tenant::DEFAULT, key: Key::new(b"key").unwrap() }.encode(&mut bytes);
        bytes
    }

    #[test]
    fn description_round_trips() {
        let (key, attributes) = (key(), b"attributes are opaque here");
        let header = header(State::Ready, &key, attributes);
        let bytes = RecordDescription::encode(&header, &key, attributes);
        let found = RecordDescription::decode(&bytes).unwrap();
        assert_eq!((found.header, found.attributes), (header, &attributes[..]));
        assert_eq!(found.key, KeySection::decode(&key).unwrap());
    }

    #[test]
    fn state_of_a_pinned_record_that_was_killed_is_not_sent() {
        let key = key();
        let bytes = RecordDescription::encode(&header(State::Dead, &key, b""), &key, b"");
        assert_eq!(RecordDescription::decode(&bytes).unwrap().header.word.state(), State::Ready);
    }

    #[test]
    fn every_changed_bit_and_length_is_rejected() {
        let (key, attributes) = (key(), b"attributes");
        let bytes = RecordDescription::encode(&header(State::Ready, &key, attributes), &key, attributes);
        for bit in 0..bytes.len() * 8 {
            let mut changed = bytes.clone();
            changed[bit / 8] ^= 1 << (bit % 8);
            assert!(RecordDescription::decode(&changed).is_err(), "bit {bit}");
        }
        for len in 0..bytes.len() {
            assert!(RecordDescription::decode(&bytes[..len]).is_err(), "{len} bytes");
        }
        assert!(RecordDescription::decode(&[&bytes[..], b"x"].concat()).is_err());
    }

    #[test]
    fn record_that_is_not_ready_is_rejected() {
        let key = key();
        let header = header(State::Writing, &key, b"");
        let bytes = [&header.encode()[..], &key].concat();
        assert_eq!(RecordDescription::decode(&bytes), Err(DescriptionError::State { found: State::Writing }));
    }
}
