//! The two flat arrays that lookups and puts answer with, and attributes beside them.

use moontide_types::bounds::BATCH_KEYS_MAX;
use moontide_types::record::{Attributes, AttributesRef, TrailerError};
use prost::bytes::Bytes;

use super::ConvertError;
use super::check::{self, at_most, copied, count, rule};
use crate::layout::FixedRecord;
use crate::limits::{HANDLES_PER_ANSWER_MAX, PACKED_BYTES_MAX};
use crate::packed::{Packed, PackedBuilder, PackedBytes, PackedBytesBuilder, PackedError};
use crate::records::{Handle, ObjectEntry};

/// Which handles a list must have.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ListKind {
    /// All of them: replicas from 0 on, and of each all stripes without gap, which together are the object.
    #[default]
    Answer,
    /// Those of one node, at least one per object: what a Begin carries. No entry has a code.
    Begin,
    /// The staging slot of each Load that succeeded: one handle, and it is any stripe of any replica.
    Load,
}

/// One entry per key, and the handles they refer to.
///
/// Invariants: the handles of the entries follow each other without gap and use all handles up; a handle's
/// stripe fits its object, its replica exists; (replica, stripe) rises; and what its [`ListKind`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectList<'a> {
    objects: Packed<'a, ObjectEntry>,
    handles: Packed<'a, Handle>,
}

/// The rules between an entry and its handles.
fn check_object(
    kind: ListKind,
    object: &ObjectEntry,
    handles: impl Iterator<Item = Handle>,
) -> Result<(), ConvertError> {
    match kind {
        ListKind::Answer => {}
        ListKind::Begin => rule("objects", object.code.is_none(), "an object that is begun has no code")?,
        ListKind::Load => rule("objects", object.handle_count <= 1, "a load has one staging slot")?,
    }
    let mut last: Option<Handle> = None;
    for handle in handles {
        let fits = handle.stripe().fits(object.object_len) && handle.replica < object.replica_count;
        rule("handles", fits, "stripe and replica are the object's")?;
        let rises =
            last.is_none_or(|last| (last.replica, last.stripe_index) < (handle.replica, handle.stripe_index));
        rule("handles", rises, "replica and stripe rise")?;
        let complete = kind != ListKind::Answer || follows(last, &handle, object.object_len);
        rule("handles", complete, "the stripes of every replica are the object")?;
        last = Some(handle);
    }
    if let (ListKind::Answer, Some(last)) = (kind, last) {
        let complete = ends(&last, object.object_len) && last.replica + 1 == object.replica_count;
        rule("handles", complete, "the stripes of every replica are the object")?;
    }
    Ok(())
}

/// Whether a handle is the next stripe of the same replica, or the first one of the next replica.
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

/// Whether a handle is the last stripe of its replica.
fn ends(handle: &Handle, object_len: u64) -> bool {
    handle.stripe_index + 1 == handle.stripe_count && handle.stripe_offset + handle.stripe_len == object_len
}

impl<'a> ObjectList<'a> {
    pub(super) fn from_wire(
        objects: &'a Bytes,
        handles: &'a Bytes,
        kind: ListKind,
    ) -> Result<Self, ConvertError> {
        let objects: Packed<'a, ObjectEntry> = check::records("objects", objects, BATCH_KEYS_MAX)?;
        let handles: Packed<'a, Handle> = check::records("handles", handles, HANDLES_PER_ANSWER_MAX)?;
        let mut next = 0;
        let mut rest = handles.iter();
        for object in objects.iter() {
            rule("objects", object.first_handle as usize == next, "handles follow each other")?;
            next += usize::from(object.handle_count);
            check_object(kind, &object, rest.by_ref().take(object.handle_count.into()))?;
        }
        count("handles", handles.len(), next)?;
        Ok(ObjectList { objects, handles })
    }

    /// How many entries.
    pub fn len(&self) -> usize {
        self.objects.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.objects.is_empty()
    }

    /// How many handles in all.
    pub fn handles_len(&self) -> usize {
        self.handles.len()
    }

    /// Each entry with its handles, in the order of the keys.
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

/// Fills the two arrays and the attributes beside them, entry by entry, with no allocation per key.
#[derive(Clone, Debug, Default)]
pub struct ObjectListBuilder {
    kind: ListKind,
    objects: PackedBuilder<ObjectEntry>,
    handles: PackedBuilder<Handle>,
    attributes: PackedBytesBuilder,
    has_attributes: bool,
}

/// The fields that [`ObjectListBuilder`] fills.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ObjectFields {
    /// Packed entries.
    pub objects: Bytes,
    /// Packed handles.
    pub handles: Bytes,
    /// One section per key; empty if none has any.
    pub attributes: Bytes,
}

impl ObjectListBuilder {
    /// With room for so many keys of one handle each.
    pub fn with_capacity(kind: ListKind, keys: usize) -> ObjectListBuilder {
        ObjectListBuilder {
            kind,
            objects: PackedBuilder::with_capacity(keys),
            handles: PackedBuilder::with_capacity(keys),
            ..ObjectListBuilder::default()
        }
    }

    /// Length of all three fields together.
    pub fn encoded_len(&self) -> usize {
        self.objects.len() * ObjectEntry::BYTES
            + self.handles.len() * Handle::BYTES
            + self.attributes.encoded_len()
    }

    /// Adds an entry, its handles and its attributes section, which may be empty; position and number of the
    /// handles are filled in here. Fails, changing nothing, if they contradict each other, or with `TooLarge`
    /// if the message is full: then the key is answered with `Retry`.
    pub fn push(
        &mut self,
        object: ObjectEntry,
        handles: &[Handle],
        attributes: &[u8],
    ) -> Result<(), ConvertError> {
        at_most("objects", self.objects.len() + 1, BATCH_KEYS_MAX)?;
        at_most("handles", self.handles.len().saturating_add(handles.len()), HANDLES_PER_ANSWER_MAX)?;
        // Counted as if every key had a section, so that a first one that comes late still fits.
        let more = ObjectEntry::BYTES + handles.len() * Handle::BYTES + 2 + attributes.len();
        at_most("message", self.encoded_len() + more, PACKED_BYTES_MAX)?;
        let first_handle = self.handles.len() as u32; // ≤ HANDLES_PER_ANSWER_MAX
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

    /// The fields.
    pub fn finish(self) -> ObjectFields {
        ObjectFields {
            objects: self.objects.finish().into(),
            handles: self.handles.finish().into(),
            attributes: if self.has_attributes { self.attributes.finish().into() } else { Bytes::new() },
        }
    }
}

/// The attributes section of one object, as it stands in its record. Checked when made.
///
/// Kept encoded: a node copies it into the record as it is, kinds of later releases included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributeSection<'a>(&'a [u8]);

impl<'a> AttributeSection<'a> {
    /// Checks the section.
    pub fn new(bytes: &'a [u8]) -> Result<AttributeSection<'a>, TrailerError> {
        AttributesRef::decode(bytes)?;
        Ok(AttributeSection(bytes))
    }

    /// The bytes.
    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }

    /// What they say, without copying any of it.
    pub fn decode_ref(self) -> AttributesRef<'a> {
        AttributesRef::decode(self.0).expect("checked by new")
    }

    /// What they say.
    pub fn decode(self) -> Attributes {
        self.decode_ref().to_owned()
    }
}

/// One attributes section per key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttributeSections<'a>(PackedBytes<'a>);

impl<'a> AttributeSections<'a> {
    /// Nothing if the field is empty, otherwise one section for each of `expected` keys.
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

    /// The sections in the order of the keys.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = AttributeSection<'a>> + use<'a> {
        self.0.iter().map(AttributeSection)
    }

    pub(super) fn to_wire(sections: Option<Self>) -> Bytes {
        sections.map_or_else(Bytes::new, |s| copied(s.0.as_encoded()))
    }
}
