//! The two flat arrays that lookups and puts answer with, and attributes beside them.

use moontide_types::bounds::BATCH_KEYS_MAX;
use moontide_types::record::{Attributes, TrailerError};
use prost::bytes::Bytes;

use super::ConvertError;
use super::check::{self, copied, count, rule};
use crate::limits::HANDLES_PER_ANSWER_MAX;
use crate::packed::{Packed, PackedBuilder, PackedBytes};
use crate::records::{Handle, ObjectEntry};

/// One entry per key, and the handles they refer to.
///
/// Invariants: the handles of the entries follow each other without gap and use all handles up; a handle's
/// stripe fits its object, its replica exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ObjectList<'a> {
    objects: Packed<'a, ObjectEntry>,
    handles: Packed<'a, Handle>,
}

impl<'a> ObjectList<'a> {
    pub(super) fn from_wire(objects: &'a Bytes, handles: &'a Bytes) -> Result<Self, ConvertError> {
        let objects: Packed<'a, ObjectEntry> = check::records("objects", objects, BATCH_KEYS_MAX)?;
        let handles: Packed<'a, Handle> = check::records("handles", handles, HANDLES_PER_ANSWER_MAX)?;
        let mut next = 0;
        let mut rest = handles.iter();
        for object in objects.iter() {
            rule("objects", object.first_handle as usize == next, "handles follow each other")?;
            next += usize::from(object.handle_count);
            for handle in rest.by_ref().take(object.handle_count.into()) {
                let fits = handle.stripe().fits(object.object_len) && handle.replica < object.replica_count;
                rule("handles", fits, "stripe and replica are the object's")?;
            }
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

/// Fills the two arrays, entry by entry, with no allocation per key.
#[derive(Clone, Debug, Default)]
pub struct ObjectListBuilder {
    objects: PackedBuilder<ObjectEntry>,
    handles: PackedBuilder<Handle>,
}

impl ObjectListBuilder {
    /// With room for so many keys of one handle each.
    pub fn with_capacity(keys: usize) -> ObjectListBuilder {
        ObjectListBuilder {
            objects: PackedBuilder::with_capacity(keys),
            handles: PackedBuilder::with_capacity(keys),
        }
    }

    /// Whether an object with so many handles still fits. If not, its key is answered with `Retry`.
    pub fn has_room(&self, handles: usize) -> bool {
        self.handles.len() + handles <= HANDLES_PER_ANSWER_MAX
    }

    /// Adds an entry and its handles; position and number of the handles are filled in here.
    ///
    /// # Panics
    /// If there is no room, or if entry and handles contradict each other.
    pub fn push(&mut self, object: ObjectEntry, handles: &[Handle]) {
        assert!(self.has_room(handles.len()) && self.objects.len() < BATCH_KEYS_MAX, "the answer is full");
        // Both fit: HANDLES_PER_ANSWER_MAX was just compared, and an entry checks its own count.
        let (first_handle, handle_count) = (self.handles.len() as u32, handles.len() as u16);
        self.objects.push(&ObjectEntry { first_handle, handle_count, ..object });
        self.handles.extend(handles.iter().copied());
    }

    /// The two fields `objects` and `handles` of an answer.
    pub fn finish(self) -> (Bytes, Bytes) {
        (self.objects.finish().into(), self.handles.finish().into())
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
        Attributes::decode(bytes)?;
        Ok(AttributeSection(bytes))
    }

    /// The bytes.
    pub fn as_bytes(self) -> &'a [u8] {
        self.0
    }

    /// What they say.
    pub fn decode(self) -> Attributes {
        Attributes::decode(self.0).expect("checked by new")
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
