//! Fixed little-endian records. A macro generates encoder, decoder and field table from one description.
//!
//! `fixed_record!` takes the fields with their offsets. At compile time it checks that they cover the record
//! without gap or overlap, so the table in `docs/formats.md` cannot differ from the encoded bytes. Reserved
//! bytes are at the end; they are zero, and the decoder checks them. A record also has its own `check` of
//! relations between fields: the encoder panics if it fails (a record that cannot be decoded must never be
//! sent), and the decoder returns an error.

use moontide_types::limits::{GROUPS_MAX, SEGMENT_UNITS_MAX, SEGMENTS_PER_NODE_MAX, SLOTS_PER_SEGMENT_MAX};
use moontide_types::record::{Field, Word};
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, GroupId, Medium, NodeId, ObjectId, SegmentId, SlotId,
    TenantGeneration, Term,
};

/// Error of the decoding of a fixed record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    /// The number of bytes is not the size of the record.
    #[error("{record} of {found} bytes, expected {expected}")]
    Length {
        /// Name of the record.
        record: &'static str,
        /// Number of bytes.
        found: usize,
        /// Size of the record in bytes.
        expected: usize,
    },
    /// A field has an invalid value: out of range, an unknown number, or an unknown flag.
    #[error("{record}.{field} has invalid value {found}")]
    Value {
        /// Name of the record.
        record: &'static str,
        /// Name of the field.
        field: &'static str,
        /// Value of the field.
        found: u64,
    },
    /// A reserved byte is not zero.
    #[error("reserved bytes of {record} are not zero")]
    Reserved {
        /// Name of the record.
        record: &'static str,
    },
    /// Two fields contradict each other, or a field exceeds a limit.
    #[error("{record}: {rule} does not hold")]
    Relation {
        /// Name of the record.
        record: &'static str,
        /// Rule that does not hold.
        rule: &'static str,
    },
}

/// A record of fixed size.
pub trait FixedRecord: Copy + Sized {
    /// Size in bytes.
    const BYTES: usize;
    /// Name in errors and tables.
    const NAME: &'static str;
    /// Fields in order; they cover every byte.
    const FIELDS: &'static [Field];

    /// Fails if the decoder would reject the record: a field is out of range, or two fields contradict each other.
    fn validate(&self) -> Result<(), RecordError>;

    /// Appends the encoded form to `out`.
    ///
    /// # Panics
    /// If the record is not valid.
    fn encode(&self, out: &mut Vec<u8>);

    /// Decodes the record from exactly [`Self::BYTES`] bytes.
    fn decode(bytes: &[u8]) -> Result<Self, RecordError>;
}

/// Asserts that `fields` cover `bytes` bytes without gap or overlap.
pub(crate) const fn assert_tiles(fields: &[Field], bytes: usize) {
    let (mut i, mut at) = (0, 0);
    while i < fields.len() {
        assert!(fields[i].offset == at);
        at += fields[i].bytes;
        i += 1;
    }
    assert!(at == bytes);
}

/// Type of a field's value.
pub(crate) trait FieldValue: Sized {
    const BYTES: usize;
    fn write_to(&self, out: &mut [u8]);
    /// Decodes `Self::BYTES` bytes. The error is the invalid number.
    fn read_from(bytes: &[u8]) -> Result<Self, u64>;
    /// Fails if `read_from` would reject the output of `write_to`. The error is the invalid number.
    fn check_range(&self) -> Result<(), u64> {
        Ok(())
    }
}

/// Converts a slice of exactly `N` bytes to an array.
pub(crate) fn array<const N: usize>(bytes: &[u8]) -> [u8; N] {
    bytes.try_into().expect("slice has the length of the field")
}

macro_rules! integer_fields {
    ($($int:ty),*) => {$(
        impl FieldValue for $int {
            const BYTES: usize = size_of::<$int>();
            fn write_to(&self, out: &mut [u8]) {
                out.copy_from_slice(&self.to_le_bytes());
            }
            fn read_from(bytes: &[u8]) -> Result<Self, u64> {
                Ok(<$int>::from_le_bytes(array(bytes)))
            }
        }
    )*};
}
integer_fields!(u8, u16, u32, u64);

/// Implements `FieldValue` for wrappers of integers, from a getter and a checked constructor.
macro_rules! number_fields {
    ($($name:ty as $int:ty: $get:expr, $new:expr;)*) => {$(
        impl FieldValue for $name {
            const BYTES: usize = size_of::<$int>();
            fn write_to(&self, out: &mut [u8]) {
                let get: fn(&$name) -> $int = $get;
                get(self).write_to(out);
            }
            fn read_from(bytes: &[u8]) -> Result<Self, u64> {
                let number = <$int>::read_from(bytes)?;
                let new: fn($int) -> Option<$name> = $new;
                new(number).ok_or(number.into())
            }
            fn check_range(&self) -> Result<(), u64> {
                let get: fn(&$name) -> $int = $get;
                let new: fn($int) -> Option<$name> = $new;
                new(get(self)).map(|_| ()).ok_or(get(self).into())
            }
        }
    )*};
}
number_fields! {
    NodeId as u64: |v| v.0, |n| Some(NodeId(n));
    Medium as u8: |v| v.number(), Medium::from_number;
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

/// Returns the number of a code; 0 is success.
pub(crate) fn code_number(code: &Option<ErrorCode>) -> u16 {
    code.map_or(0, |code| code as u16)
}

/// Converts a number to an outcome: the inner option is the error code, the outer one is `None` for unknown numbers.
pub(crate) fn code_from_number(number: u16) -> Option<Option<ErrorCode>> {
    match number {
        0 => Some(None),
        number => ErrorCode::try_from(u32::from(number)).ok().map(Some),
    }
}

impl<const N: usize> FieldValue for [u8; N] {
    const BYTES: usize = N;
    fn write_to(&self, out: &mut [u8]) {
        out.copy_from_slice(self);
    }
    fn read_from(bytes: &[u8]) -> Result<Self, u64> {
        Ok(array(bytes))
    }
}

impl FieldValue for ObjectId {
    const BYTES: usize = 16;
    fn write_to(&self, out: &mut [u8]) {
        self.0.write_to(out);
    }
    fn read_from(bytes: &[u8]) -> Result<Self, u64> {
        Ok(ObjectId(array(bytes)))
    }
}

/// `start u32 | units u32`; the end is at most [`SEGMENT_UNITS_MAX`].
impl FieldValue for Extent {
    const BYTES: usize = 8;
    fn write_to(&self, out: &mut [u8]) {
        let (start, units) = out.split_at_mut(4);
        self.start.write_to(start);
        self.units.write_to(units);
    }
    fn read_from(bytes: &[u8]) -> Result<Self, u64> {
        let (start, units) = bytes.split_at(4);
        let extent = Extent { start: u32::read_from(start)?, units: u32::read_from(units)? };
        extent.check_range().map(|()| extent)
    }
    fn check_range(&self) -> Result<(), u64> {
        if self.end() <= SEGMENT_UNITS_MAX.into() { Ok(()) } else { Err(self.end()) }
    }
}

/// Declares a struct together with its byte layout. See the module documentation.
macro_rules! fixed_record {
    (
        $(#[$doc:meta])*
        pub struct $name:ident[$bytes:literal] {
            $($(#[$field_doc:meta])* $offset:literal $field:ident: $type:ty,)*
            $(reserved $reserved_offset:literal,)?
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
                    offset: $reserved_offset,
                    bytes: $bytes - $reserved_offset,
                    name: "reserved",
                },)?
            ];

            fn validate(&self) -> Result<(), $crate::RecordError> {
                let record = stringify!($name);
                $(
                    $crate::layout::FieldValue::check_range(&self.$field).map_err(|found| {
                        $crate::RecordError::Value { record, field: stringify!($field), found }
                    })?;
                )*
                self.check()
            }

            fn encode(&self, out: &mut Vec<u8>) {
                if let Err(error) = self.validate() {
                    panic!("record must be valid before it is sent: {error}");
                }
                let start = out.len();
                out.resize(start + $bytes, 0);
                let bytes = &mut out[start..];
                $(
                    let field = $offset..$offset + <$type as $crate::layout::FieldValue>::BYTES;
                    $crate::layout::FieldValue::write_to(&self.$field, &mut bytes[field]);
                )*
            }

            fn decode(bytes: &[u8]) -> Result<Self, $crate::RecordError> {
                let record = stringify!($name);
                let Ok(bytes) = <&[u8; $bytes]>::try_from(bytes) else {
                    return Err($crate::RecordError::Length { record, found: bytes.len(), expected: $bytes });
                };
                $(
                    if bytes[$reserved_offset..] != [0; $bytes - $reserved_offset] {
                        return Err($crate::RecordError::Reserved { record });
                    }
                )?
                let decoded = $name {
                    $($field: {
                        let field = $offset..$offset + <$type as $crate::layout::FieldValue>::BYTES;
                        <$type as $crate::layout::FieldValue>::read_from(&bytes[field]).map_err(|found| {
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
            /// Fails with the text of the rule unless it holds.
            #[allow(dead_code)] // not used by records without relations
            fn rule(holds: bool, rule: &'static str) -> Result<(), $crate::RecordError> {
                if holds { Ok(()) } else { Err($crate::RecordError::Relation { record: stringify!($name), rule }) }
            }
        }
    };
}

/// Declares a set of flags; decoding rejects unknown flags.
macro_rules! flags {
    ($(#[$doc:meta])* pub struct $name:ident($int:ty) { $($(#[$flag_doc:meta])* $flag:ident = $bit:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
        pub struct $name($int);

        impl $name {
            /// No flag set.
            pub const NONE: $name = $name(0);
            $($(#[$flag_doc])* pub const $flag: $name = $name(1 << $bit);)*
            /// Names and values of the flags, in ascending order.
            pub const ALL: &[(&'static str, $name)] = &[$((stringify!($flag), $name::$flag),)*];
            /// All flags that this release knows.
            pub const KNOWN: $name = $name(0 $(| 1 << $bit)*);

            /// Converts bits to flags; `None` if one of them is unknown.
            pub const fn from_bits(bits: $int) -> Option<$name> {
                if bits & !Self::KNOWN.0 == 0 { Some($name(bits)) } else { None }
            }

            /// Returns the bits.
            pub const fn bits(self) -> $int {
                self.0
            }

            /// Returns whether all flags of `other` are set.
            pub const fn contains(self, other: $name) -> bool {
                self.0 & other.0 == other.0
            }

            /// Returns the union of both sets.
            pub const fn with(self, other: $name) -> $name {
                $name(self.0 | other.0)
            }
        }

        impl $crate::layout::FieldValue for $name {
            const BYTES: usize = size_of::<$int>();
            fn write_to(&self, out: &mut [u8]) {
                self.0.write_to(out);
            }
            fn read_from(bytes: &[u8]) -> Result<Self, u64> {
                let bits = <$int>::read_from(bytes)?;
                $name::from_bits(bits).ok_or(bits.into())
            }
        }
    };
}

/// Declares a numbered enum; decoding rejects unknown numbers. 0 is never used, so zeroed bytes are invalid.
macro_rules! numbered {
    ($(#[$doc:meta])* pub enum $name:ident($int:ty) { $($(#[$variant_doc:meta])* $variant:ident = $number:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr($int)]
        pub enum $name {
            $($(#[$variant_doc])* $variant = $number,)*
        }

        impl $name {
            /// All variants, in ascending order.
            pub const ALL: &[$name] = &[$($name::$variant,)*];

            /// Returns the variant with this number.
            pub const fn from_number(number: $int) -> Option<$name> {
                match number {
                    $($number => Some($name::$variant),)*
                    _ => None,
                }
            }

            /// Returns the number on the wire.
            pub const fn number(self) -> $int {
                self as $int
            }
        }

        impl $crate::layout::FieldValue for $name {
            const BYTES: usize = size_of::<$int>();
            fn write_to(&self, out: &mut [u8]) {
                self.number().write_to(out);
            }
            fn read_from(bytes: &[u8]) -> Result<Self, u64> {
                let number = <$int>::read_from(bytes)?;
                $name::from_number(number).ok_or(number.into())
            }
        }
    };
}
