//! Basic types of Moontide: ids, keys, limits, error codes, clocks and the record format.
//!
//! Every other crate uses these types, in memory, on disk and on the wire. This crate starts no thread, opens
//! no file and never blocks.
//!
//! | type | meaning |
//! |---|---|
//! | [`Tenant`], [`Key`], [`ObjectId`] | key of an object in its tenant, and the 128-bit id computed from both |
//! | [`NodeId`], [`SegmentId`], [`SlotId`], [`Extent`] | location: node, part of its memory, header, bytes |
//! | [`Term`], [`Epoch`] | number of a group's master; version of a slot's content, which starts with the term |
//! | [`record::Header`], [`record::Word`] | header of a record; its first eight bytes, epoch and state |
//! | [`record::RecordLayout`], [`record::DigestContext`] | lengths of a record's sections; digests of its pages |
//! | [`ErrorCode`] | stable number of an error, on the wire and in other languages |
//! | [`Clock`], [`MonoTime`] | monotonic time as a value, so that tests can set it |
//!
//! Reading order: [`limits`] (limits, with their reasons), [`ids`](SegmentId), [`Key`] and [`ObjectId`],
//! [`Span`] and [`Extent`], [`ErrorCode`], [`Clock`], then [`record`]: the 128-byte header, the word in it,
//! the digests and the trailer; [`tensor`] is the header of an object that is a tensor.
//!
//! # Example: the record of an object
//!
//! A put turns a key and its bytes into a record. The same steps run in the client, the master and the node:
//!
//! ```
//! use std::num::NonZeroU16;
//!
//! use moontide_types::record::*;
//! use moontide_types::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The name. A cluster has a secret from which ids are computed, so that tenants cannot choose ids that collide. A client gets
//! // what is derived for its tenant: `IdKey::of_tenant`.
//! let (tenant, key) = (Tenant::DEFAULT, Key::new(b"prefix-0001")?);
//! let id = IdKey::new(1, [9; 32]).object_id(tenant, TenantGeneration(0), key);
//! // The id selects the group, and the group's master decides about the object.
//! assert!(id.group(NonZeroU16::new(16).ok_or("not zero")?).0 < 16);
//!
//! // The version: the first one that the master with term 3 assigns. Later terms have greater epochs.
//! let epoch = Epoch::new(Term::new(3)?, 1)?;
//! assert!(epoch < Epoch::new(Term::new(4)?, 1)?);
//!
//! // The length in a segment: 600,000 bytes of payload are three pages with a digest each, then tenant and key.
//! let payload = vec![42; 600_000];
//! let section = KeySection { tenant, key };
//! let key_len = section.encoded_len() as u32;
//! let layout = RecordLayout::new(payload.len() as u64, key_len, 0, RecordFlags::NONE)?;
//! assert_eq!(layout.pages(), 3);
//! assert_eq!(layout.total_len(), 600_000 + 3 * 8 + u64::from(key_len));
//!
//! // The root covers all digests. It travels with the metadata: bytes of another version or object do not match it.
//! let context = DigestContext { id, version: epoch, stripe: 0, len: payload.len() as u64 };
//! let root = context.payload(&payload, |_digest| {});
//! assert_ne!(context.payload(&[7; 600_000], |_digest| {}), root);
//!
//! // The header. The state in its word is WRITING until the bytes are complete, then READY.
//! let word = Word::new(epoch, State::Writing);
//! let mut trailer = vec![];
//! section.encode(&mut trailer);
//! let header = Header {
//!     flags: RecordFlags::NONE,
//!     id,
//!     word: word.with_state(State::Ready),
//!     object_len: payload.len() as u64,
//!     stripe_offset: 0,
//!     stripe_len: payload.len() as u64,
//!     payload_offset: 0,
//!     root,
//!     stripe_index: 0,
//!     stripe_count: 1,
//!     key_len,
//!     attributes_len: 0,
//!     trailer_crc: trailer_crc(&trailer, &[]),
//!     id_key: 1,
//!     tenant_generation: TenantGeneration(0),
//! };
//!
//! // 128 bytes in memory, on disk and on the wire. Every decoder checks the CRC and all limits.
//! let mut bytes = header.encode();
//! assert_eq!(Header::decode(&bytes)?, header);
//! bytes[40] ^= 1;
//! assert!(Header::decode(&bytes).is_err());
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod clock;
mod error;
mod id_batch;
mod ids;
mod key;
pub mod limits;
mod mac_batch;
mod medium;
mod placement;
pub mod record;
mod span;
pub mod tensor;

pub use clock::{Clock, MonoTime, SystemClock, UnixMillis};
pub use error::{ErrorCode, UnknownErrorCode};
pub use ids::{
    BoundExceeded, ClientId, Epoch, Generation, GroupId, InvalidNodeId, MapVersion, NodeId, SegmentId,
    SessionId, SlotId, Term,
};
pub use key::{IdKey, Key, KeyError, ObjectId, Tenant, TenantGeneration, TenantIdKey};
pub use mac_batch::{MAC_BYTES, MAC_INPUT_BYTES_MAX, MacInput, mac, macs};
pub use medium::Medium;
pub use placement::{Domain, InvalidPlace, Labels, Place, Spread};
pub use span::{Extent, Span};
