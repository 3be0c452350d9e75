//! The two flat arrays of lookup and put responses, and the attributes.

use moontide_types::limits::BATCH_KEYS_MAX;
use moontide_types::record::{Attributes, AttributesRef, TrailerError};
use prost::bytes::Bytes;

use super::ConvertError;
use super::check::{self, at_most, copied, count, rule};
use crate::layout::FixedRecord;
use crate::limits::{HANDLES_PER_RESPONSE_MAX, PACKED_BYTES_MAX};
use crate::packed::{Packed, PackedBuilder, PackedBytes, PackedBytesBuilder, PackedError};
use crate::records::{Handle, ObjectEntry};

/// Rules for the handles of a list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ObjectListKind {
    /// All handles: replicas from 0 on, and for each all stripes without gap, which together cover the object.
    #[default]
    Response,
    /// Handles of one node, at least one per object, as in a Begin. No entry has a code.
    Begin,
    /// Staging slots of a LoadReply: one handle per successful Load, of any stripe of any replica.
    Load,
}

/// Array of entries, one per key, and array of the handles they refer to.
///
/// Invariants: the handles of the entries are consecutive without gap and cover all handles; a handle's stripe fits
/// its object, and its replica exists; (replica, stripe) is strictly ascending; the rules of its [`ObjectListKind`]
/// hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectList<'a> {
    objects: Packed<'a, ObjectEntry>,
    handles: Packed<'a, Handle>,
}

/// Checks the rules between an entry and its handles.
fn check_object(
    kind: ObjectListKind,
    object: &ObjectEntry,
    handles: impl Iterator<Item = Handle>,
) -> Result<(), ConvertError> {
    match kind {
        ObjectListKind::Response => {}
        ObjectListKind::Begin => rule("objects", object.code.is_none(), "an object of a Begin has no code")?,
        ObjectListKind::Load => rule("objects", object.handle_count <= 1, "a load has one staging slot")?,
    }
    let mut last: Option<Handle> = None;
    for handle in handles {
        let fits = handle.stripe().fits(object.object_len) && handle.replica < object.replica_count;
        rule("handles", fits, "stripe and replica belong to the object")?;
        let ascends =
            last.is_none_or(|last| (last.replica, last.stripe_index) < (handle.replica, handle.stripe_index));
        rule("handles", ascends, "replica and stripe ascend")?;
        let complete = kind != ObjectListKind::Response || follows(last, &handle, object.object_len);
        rule("handles", complete, "the stripes of every replica cover the object")?;
        last = Some(handle);
    }
    if let (ObjectListKind::Response, Some(last)) = (kind, last) {
        let complete = ends(&last, object.object_len) && last.replica + 1 == object.replica_count;
        rule("handles", complete, "the stripes of every replica cover the object")?;
    }
    Ok(())
}

/// Returns whether a handle is the next stripe of the same replica, or the first stripe of the next replica.
fn follows(last: Option<Handle>, next: &Handle, object_len: u64) -> bool {
    match last {
        Some(last) if last.replica == next.replica => {
            next.stripe_count == last.stripe_count
                && next.stripe_index == last.stripe_index + 1
                && next.stripe_offset == last.stripe_offset + last.stripe_len // both ≤ OBJECT_BYTES_MAX
        }
        last => {
            let replica = last.map_or(0, |last| last.replica + 1);
            last.is_none_or(|last| ends(&last, object_len))
                && (next.replica, next.stripe_index, next.stripe_offset) == (replica, 0, 0)
        }
    }
}

/// Returns whether a handle is the last stripe of its replica.
fn ends(handle: &Handle, object_len: u64) -> bool {
    handle.stripe_index + 1 == handle.stripe_count && handle.stripe_offset + handle.stripe_len == object_len
}

impl<'a> ObjectList<'a> {
    pub(super) fn from_wire(
        objects: &'a Bytes,
        handles: &'a Bytes,
        kind: ObjectListKind,
    ) -> Result<Self, ConvertError> {
        let objects: Packed<'a, ObjectEntry> = check::records("objects", objects, BATCH_KEYS_MAX)?;
        let handles: Packed<'a, Handle> = check::records("handles", handles, HANDLES_PER_RESPONSE_MAX)?;
        let mut next = 0;
        let mut rest = handles.iter();
        for object in objects.iter() {
            rule("objects", object.first_handle as usize == next, "handles are consecutive")?;
            next += usize::from(object.handle_count);
            check_object(kind, &object, rest.by_ref().take(object.handle_count.into()))?;
        }
        count("handles", handles.len(), next)?;
        Ok(ObjectList { objects, handles })
    }

    /// Returns the number of entries.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Returns whether there are no entries.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// Iterates over the entries with their handles, in the order of the keys.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (ObjectEntry, Packed<'a, Handle>)> + use<'a> {
        let handles = self.handles;
        self.objects.iter().map(move |object| {
            let own = handles.range(object.first_handle as usize, object.handle_count.into());
            (object, own.expect("checked by from_wire"))
        })
    }

    pub(super) fn objects_to_wire(&self) -> Bytes {
        copied(self.objects.as_encoded())
    }

    pub(super) fn handles_to_wire(&self) -> Bytes {
        copied(self.handles.as_encoded())
    }
}

/// Builder of the two arrays and the attributes, entry by entry, without an allocation per key.
#[derive(Clone, Debug, Default)]
pub struct ObjectListBuilder {
    kind: ObjectListKind,
    objects: PackedBuilder<ObjectEntry>,
    handles: PackedBuilder<Handle>,
    attributes: PackedBytesBuilder,
    has_attributes: bool,
}

/// Encoded fields built by [`ObjectListBuilder`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectFields {
    /// Packed entries.
    pub objects: Bytes,
    /// Packed handles.
    pub handles: Bytes,
    /// One section per key; empty if no object has attributes.
    pub attributes: Bytes,
}

impl ObjectListBuilder {
    /// Creates a builder with capacity for `keys` keys of one handle each.
    pub fn with_capacity(kind: ObjectListKind, keys: usize) -> ObjectListBuilder {
        ObjectListBuilder {
            kind,
            objects: PackedBuilder::with_capacity(keys),
            handles: PackedBuilder::with_capacity(keys),
            ..ObjectListBuilder::default()
        }
    }

    /// Returns the length of all three fields together in bytes.
    pub fn encoded_len(&self) -> usize {
        self.objects.len() * ObjectEntry::BYTES
            + self.handles.len() * Handle::BYTES
            + self.attributes.encoded_len()
    }

    /// Appends an entry, its handles and its attributes section, which may be empty. Sets `first_handle` and
    /// `handle_count` of the entry. Fails, and changes nothing, if they contradict each other, or with `TooLarge` if
    /// the message is full: then the caller returns `Retry` for the key.
    pub fn push(
        &mut self,
        object: ObjectEntry,
        handles: &[Handle],
        attributes: &[u8],
    ) -> Result<(), ConvertError> {
        at_most("objects", self.objects.len() + 1, BATCH_KEYS_MAX)?;
        at_most("handles", self.handles.len().saturating_add(handles.len()), HANDLES_PER_RESPONSE_MAX)?;
        // Assumes a section for every key, so that the first non-empty one fits even if it comes late.
        let more = ObjectEntry::BYTES + handles.len() * Handle::BYTES + 2 + attributes.len();
        at_most("message", self.encoded_len() + more, PACKED_BYTES_MAX)?;
        let first_handle = self.handles.len() as u32; // ≤ HANDLES_PER_RESPONSE_MAX
        let handle_count = u16::try_from(handles.len()).map_err(|_| ConvertError::TooLarge {
            field: "handles",
            found: handles.len() as u64,
            max: u16::MAX.into(),
        })?;
        let object = ObjectEntry { first_handle, handle_count, ..object };
        let index = self.objects.len();
        let invalid = |field| {
            move |source| ConvertError::Packed { field, source: PackedError::Record { index, source } }
        };
        object.validate().map_err(invalid("objects"))?;
        handles.iter().try_for_each(|handle| handle.validate().map_err(invalid("handles")))?;
        check_object(self.kind, &object, handles.iter().copied())?;
        AttributeSection::new(attributes)
            .map_err(|source| ConvertError::Attributes { field: "attributes", source })?;
        self.attributes
            .push(attributes)
            .map_err(|source| ConvertError::Packed { field: "attributes", source })?;
        self.has_attributes |= !attributes.is_empty();
        self.objects.push(&object);
        self.handles.extend(handles.iter().copied());
        Ok(())
    }

    /// Returns the encoded fields.
    pub fn finish(self) -> ObjectFields {
        ObjectFields {
            objects: self.objects.finish().into(),
            handles: self.handles.finish().into(),
            attributes: if self.has_attributes { self.attributes.finish().into() } else { Bytes::new() },
        }
    }
}

/// Encoded attributes section of one object, as in its record. Checked by [`AttributeSection::new`].
///
/// Remains encoded: a node copies it into the record unchanged, including kinds of later releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributeSection<'a>(&'a [u8]);

impl<'a> AttributeSection<'a> {
    /// Creates a view. Fails if the section is invalid.
    pub fn new(bytes: &'a [u8]) -> Result<AttributeSection<'a>, TrailerError> {
        AttributesRef::decode(bytes)?;
        Ok(AttributeSection(bytes))
    }

    /// Returns the encoded bytes.
    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }

    /// Decodes the attributes without a copy.
    pub fn decode_ref(self) -> AttributesRef<'a> {
        AttributesRef::decode(self.0).expect("checked by new")
    }

    /// Decodes the attributes.
    pub fn decode(self) -> Attributes {
        self.decode_ref().to_owned()
    }
}

/// One attributes section per key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributeSections<'a>(PackedBytes<'a>);

impl<'a> AttributeSections<'a> {
    /// Returns `None` for an empty field, otherwise one section for each of `expected` keys.
    pub(super) fn from_wire(encoded: &'a Bytes, expected: usize) -> Result<Option<Self>, ConvertError> {
        let field = "attributes";
        if encoded.is_empty() {
            return Ok(None);
        }
        let packed = check::byte_strings(field, encoded)?;
        count(field, packed.len(), expected)?;
        for section in packed.iter() {
            AttributeSection::new(section).map_err(|source| ConvertError::Attributes { field, source })?;
        }
        Ok(Some(AttributeSections(packed)))
    }

    /// Iterates over the sections in the order of the keys.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = AttributeSection<'a>> + use<'a> {
        self.0.iter().map(AttributeSection)
    }

    pub(super) fn to_wire(sections: Option<Self>) -> Bytes {
        sections.map_or_else(Bytes::new, |s| copied(s.0.as_encoded()))
    }
}
