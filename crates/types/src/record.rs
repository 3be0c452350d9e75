//! The record format: self-describing form of one stripe, identical in memory, on disk and on the wire.
//!
//! ```text
//!   header 128 B      payload             page digests   tenant + key      attributes
//!  ┌───────────┐ … ┌───────────────────┬──────────────┬─────────────────┬────────────┐
//!  │ word, id, │   │ stripe_len bytes  │ 8 B per page │ length-prefixed │ typed list │
//!  │ lengths,  │   │ (+ 0…7 B padding) │              │                 │            │
//!  │ root, CRC │   │                   │              │                 │            │
//!  └───────────┘   └───────────────────┴──────────────┴─────────────────┴────────────┘
//!   header table    └────────────────── one extent of the segment ──────────────────┘
//! ```
//!
//! In a segment the headers form a table; on disk the header's 4 KiB block precedes its payload. The header's
//! CRC-32C covers every immutable field and the epoch. The root in the header covers the page digests, and
//! these cover the payload. `trailer_crc` in the header covers tenant, key and attributes.
//!
//! `docs/formats.md` specifies every byte; a test compares it with the constants here.

mod description;
mod digest;
mod flags;
mod header;
mod layout;
mod trailer;
mod word;

pub use description::{DescriptionError, RecordDescription};
pub use digest::{DigestContext, PageDigests, RootBuilder, object_root};
pub use flags::RecordFlags;
pub use header::{
    FIELDS, Field, HEADER_BYTES, HEADER_MAGIC, HEADER_VERSION, Header, HeaderError, WORD_OFFSET,
};
pub use layout::{LayoutError, RecordLayout};
pub use trailer::{Attributes, AttributesRef, KeySection, ParentHash, PinClass, TrailerError, trailer_crc};
pub use word::{State, Word};
