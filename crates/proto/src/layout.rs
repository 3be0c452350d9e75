//! Fixed little-endian records: one description each, from which encoder, decoder and field table are made.
//!
//! `fixed_record!` takes the fields with their offsets. At compile time it checks that they tile the record
//! without gap or overlap, so the table that `docs/formats.md` shows cannot differ from what is written.
//! Spare bytes stand at the end, are zero and checked. A record also has a `check` of its own for relations
//! between fields: the encoder insists on it (a record that cannot be read back must never be sent), the
//! decoder refuses what breaks it.

use moontide_types::bounds::{GROUPS_MAX, SEGMENT_UNITS_MAX, SEGMENTS_PER_NODE_MAX, SLOTS_PER_SEGMENT_MAX};
use moontide_types::record::{Field, Word};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, GroupId, NodeId, ObjectId, SegmentId, SlotId, TenantGeneration,
    Term,
};

/// Why some bytes are not the record they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// Not the size of this record.
    #[error("{record} of {found} bytes, it has {expected}")]
    Length {
        /// Which record.
        record: &'static str,
        /// How many bytes there were.
        found: usize,
        /// How many it has.
        expected: usize,
    },
    /// A field has a value that it cannot have: beyond its bits, an unknown number, an unknown flag.
    #[error("{record}.{field} cannot be {found}")]
    Value {
        /// Which record.
        record: &'static str,
        /// Which field.
        field: &'static str,
        /// What stood there.
        found: u64,
    },
    /// A spare byte is not zero.
    #[error("spare bytes of {record} are not zero")]
    Spare {
        /// Which record.
        record: &'static str,
    },
    /// Two fields contradict each other or a bound.
    #[error("{record}: {rule} does not hold")]
    Relation {
        /// Which record.
        record: &'static str,
        /// The rule that was broken.
        rule: &'static str,
    },
}

/// A record of fixed size.
pub trait FixedRecord: Copy + Sized {
    /// Its size.
    const BYTES: usize;
    /// What it is called in errors and tables.
    const NAME: &'static str;
    /// Every byte of it, in order.
    const FIELDS: &'static [Field];

    /// Whether the decoder would accept it: every field within its bounds, no two in contradiction.
    fn validate(&self) -> Result<(), RecordError>;

    /// Appends the encoded form.
    ///
    /// # Panics
    /// If the record is not valid.
    fn encode(&self, out: &mut Vec<u8>);

    /// Reads the record from exactly [`Self::BYTES`] bytes.
    fn decode(bytes: &[u8]) -> Result<Self, RecordError>;
}

/// Asserts that `fields` tile `bytes` bytes without gap or overlap.
pub(crate) const fn assert_tiles(fields: &[Field], bytes: usize) {
    let (mut i, mut at) = (0, 0);
    while i < fields.len() {
        assert!(fields[i].offset == at);
        at += fields[i].bytes;
        i += 1;
    }
    assert!(at == bytes);
}

/// A value that can stand in a field.
pub(crate) trait FieldValue: Sized {
    const BYTES: usize;
    fn put(&self, out: &mut [u8]);
    /// Reads `Self::BYTES` bytes; an error is the number that cannot stand there.
    fn take(bytes: &[u8]) -> Result<Self, u64>;
    /// Whether `take` would accept what `put` writes; an error is the number that it would refuse.
    fn fits(&self) -> Result<(), u64> {
        Ok(())
    }
}

/// `N` bytes as an array. Callers pass exactly as many.
pub(crate) fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("the field table gives each field its own length")
}

macro_rules! integer_fields {
    ($($int:ty),*) => {$(
        impl FieldValue for $int {
            const BYTES: usize = size_of::<$int>();
            fn put(&self, out: &mut [u8]) {
                out.copy_from_slice(&self.to_le_bytes());
            }
            fn take(bytes: &[u8]) -> Result<Self, u64> {
                Ok(<$int>::from_le_bytes(array(bytes)))
            }
        }
    )*};
}
integer_fields!(u8, u16, u32, u64);

/// Types that are a number with or without a rule: how to get the number out, and how to read it.
macro_rules! number_fields {
    ($($name:ty as $int:ty: $get:expr, $new:expr;)*) => {$(
        impl FieldValue for $name {
            const BYTES: usize = size_of::<$int>();
            fn put(&self, out: &mut [u8]) {
                let get: fn(&$name) -> $int = $get;
                get(self).put(out);
            }
            fn take(bytes: &[u8]) -> Result<Self, u64> {
                let number = <$int>::take(bytes)?;
                let new: fn($int) -> Option<$name> = $new;
                new(number).ok_or(number.into())
            }
            fn fits(&self) -> Result<(), u64> {
                let get: fn(&$name) -> $int = $get;
                let new: fn($int) -> Option<$name> = $new;
                new(get(self)).map(|_| ()).ok_or(get(self).into())
            }
        }
    )*};
}
number_fields! {
    NodeId as u64: |v| v.0, |n| Some(NodeId(n));
    SegmentId as u32: |v| v.0, |n| (n < SEGMENTS_PER_NODE_MAX).then_some(SegmentId(n));
    SlotId as u32: |v| v.0, |n| (n < SLOTS_PER_SEGMENT_MAX).then_some(SlotId(n));
    GroupId as u16: |v| v.0, |n| (n < GROUPS_MAX).then_some(GroupId(n));
    Generation as u64: |v| v.0, |n| Some(Generation(n));
    TenantGeneration as u32: |v| v.0, |n| Some(TenantGeneration(n));
    Word as u64: |v| v.bits(), |n| Some(Word::from_bits(n));
    Epoch as u64: |v| v.bits(), |n| Epoch::from_bits(n).ok();
    Term as u32: |v| v.get(), |n| Term::new(n).ok();
    Option<ErrorCode> as u16: code_number, code_from_number;
}

/// 0 is success.
pub(crate) fn code_number(code: &Option<ErrorCode>) -> u16 {
    code.map_or(0, |code| code as u16)
}

/// The inner option is the outcome, the outer one whether the number is known.
pub(crate) fn code_from_number(number: u16) -> Option<Option<ErrorCode>> {
    match number {
        0 => Some(None),
        number => ErrorCode::try_from(u32::from(number)).ok().map(Some),
    }
}

impl<const N: usize> FieldValue for [u8; N] {
    const BYTES: usize = N;
    fn put(&self, out: &mut [u8]) {
        out.copy_from_slice(self);
    }
    fn take(bytes: &[u8]) -> Result<Self, u64> {
        Ok(array(bytes))
    }
}

impl FieldValue for ObjectId {
    const BYTES: usize = 16;
    fn put(&self, out: &mut [u8]) {
        self.0.put(out);
    }
    fn take(bytes: &[u8]) -> Result<Self, u64> {
        Ok(ObjectId(array(bytes)))
    }
}

/// `start u32 | units u32`; no segment has units beyond [`SEGMENT_UNITS_MAX`].
impl FieldValue for Extent {
    const BYTES: usize = 8;
    fn put(&self, out: &mut [u8]) {
        let (start, units) = out.split_at_mut(4);
        self.start.put(start);
        self.units.put(units);
    }
    fn take(bytes: &[u8]) -> Result<Self, u64> {
        let (start, units) = bytes.split_at(4);
        let extent = Extent { start: u32::take(start)?, units: u32::take(units)? };
        extent.fits().map(|()| extent)
    }
    fn fits(&self) -> Result<(), u64> {
        if self.end() <= SEGMENT_UNITS_MAX.into() { Ok(()) } else { Err(self.end()) }
    }
}

/// Declares a struct together with its bytes. See the module's header.
macro_rules! fixed_record {
    (
        $(#[$doc:meta])*
        pub struct $name:ident[$bytes:literal] {
            $($(#[$field_doc:meta])* $offset:literal $field:ident: $type:ty,)*
            $(spare $spare_offset:literal,)?
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name {
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl $crate::layout::FixedRecord for $name {
            const BYTES: usize = $bytes;
            const NAME: &'static str = stringify!($name);
            const FIELDS: &'static [moontide_types::record::Field] = &[
                $(moontide_types::record::Field {
                    offset: $offset,
                    bytes: <$type as $crate::layout::FieldValue>::BYTES,
                    name: stringify!($field),
                },)*
                $(moontide_types::record::Field {
                    offset: $spare_offset,
                    bytes: $bytes - $spare_offset,
                    name: "spare",
                },)?
            ];

            fn validate(&self) -> Result<(), $crate::RecordError> {
                let record = stringify!($name);
                $(
                    $crate::layout::FieldValue::fits(&self.$field).map_err(|found| {
                        $crate::RecordError::Value { record, field: stringify!($field), found }
                    })?;
                )*
                self.check()
            }

            fn encode(&self, out: &mut Vec<u8>) {
                if let Err(error) = self.validate() {
                    panic!("a record must be valid before it is sent: {error}");
                }
                let start = out.len();
                out.resize(start + $bytes, 0);
                let bytes = &mut out[start..];
                $(
                    let field = $offset..$offset + <$type as $crate::layout::FieldValue>::BYTES;
                    $crate::layout::FieldValue::put(&self.$field, &mut bytes[field]);
                )*
            }

            fn decode(bytes: &[u8]) -> Result<Self, $crate::RecordError> {
                let record = stringify!($name);
                let Ok(bytes) = <&[u8; $bytes]>::try_from(bytes) else {
                    return Err($crate::RecordError::Length { record, found: bytes.len(), expected: $bytes });
                };
                $(
                    if bytes[$spare_offset..] != [0; $bytes - $spare_offset] {
                        return Err($crate::RecordError::Spare { record });
                    }
                )?
                let decoded = $name {
                    $($field: {
                        let field = $offset..$offset + <$type as $crate::layout::FieldValue>::BYTES;
                        <$type as $crate::layout::FieldValue>::take(&bytes[field]).map_err(|found| {
                            $crate::RecordError::Value { record, field: stringify!($field), found }
                        })?
                    },)*
                };
                decoded.check()?;
                Ok(decoded)
            }
        }

        const _: () = $crate::layout::assert_tiles(
            <$name as $crate::layout::FixedRecord>::FIELDS,
            <$name as $crate::layout::FixedRecord>::BYTES,
        );

        impl $name {
            /// Fails with the rule's text unless it holds.
            #[allow(dead_code)] // a record without relations needs none
            fn rule(holds: bool, rule: &'static str) -> Result<(), $crate::RecordError> {
                if holds { Ok(()) } else { Err($crate::RecordError::Relation { record: stringify!($name), rule }) }
            }
        }
    };
}

/// Declares a set of flags of which unknown ones are refused.
macro_rules! flags {
    ($(#[$doc:meta])* pub struct $name:ident($int:ty) { $($(#[$flag_doc:meta])* $flag:ident = $bit:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name($int);

        impl $name {
            /// No flag.
            pub const NONE: $name = $name(0);
            $($(#[$flag_doc])* pub const $flag: $name = $name(1 << $bit);)*
            /// The flags by name, in ascending order.
            pub const ALL: &[(&'static str, $name)] = &[$((stringify!($flag), $name::$flag),)*];
            /// Every flag that this release knows.
            pub const KNOWN: $name = $name(0 $(| 1 << $bit)*);

            /// The flags with these bits; `None` if one of them is unknown.
            pub const fn from_bits(bits: $int) -> Option<$name> {
                if bits & !Self::KNOWN.0 == 0 { Some($name(bits)) } else { None }
            }

            /// The bits.
            pub const fn bits(self) -> $int {
                self.0
            }

            /// Whether all of `other` are set.
            pub const fn contains(self, other: $name) -> bool {
                self.0 & other.0 == other.0
            }

            /// Both together.
            pub const fn with(self, other: $name) -> $name {
                $name(self.0 | other.0)
            }
        }

        impl $crate::layout::FieldValue for $name {
            const BYTES: usize = size_of::<$int>();
            fn put(&self, out: &mut [u8]) {
                self.0.put(out);
            }
            fn take(bytes: &[u8]) -> Result<Self, u64> {
                let bits = <$int>::take(bytes)?;
                $name::from_bits(bits).ok_or(bits.into())
            }
        }
    };
}

/// Declares a numbered enum of which unknown numbers are refused. 0 is never one: zeroed bytes say nothing.
macro_rules! numbered {
    ($(#[$doc:meta])* pub enum $name:ident($int:ty) { $($(#[$variant_doc:meta])* $variant:ident = $number:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr($int)]
        pub enum $name {
            $($(#[$variant_doc])* $variant = $number,)*
        }

        impl $name {
            /// All of them, in ascending order.
            pub const ALL: &[$name] = &[$($name::$variant,)*];

            /// The one with this number.
            pub const fn from_number(number: $int) -> Option<$name> {
                match number {
                    $($number => Some($name::$variant),)*
                    _ => None,
                }
            }

            /// Its number on the wire.
            pub const fn number(self) -> $int {
                self as $int
            }
        }

        impl $crate::layout::FieldValue for $name {
            const BYTES: usize = size_of::<$int>();
            fn put(&self, out: &mut [u8]) {
                self.number().put(out);
            }
            fn take(bytes: &[u8]) -> Result<Self, u64> {
                let number = <$int>::take(bytes)?;
                $name::from_number(number).ok_or(number.into())
            }
        }
    };
}
