//! [`Capability`]: proof that a master granted exactly this access to one record at one node. The master signs it with a
//! key that it shares with the node, the node verifies it, and clients only pass it on.
//!
//! ```text
//!   secret of the master ── node, rotation number ──▶ key of the node
//!   capability = first 16 bytes of BLAKE3, keyed with the key of the node, over the scope: see docs/formats.md
//! ```
//!
//! The node is not in the scope, because its key is its own. The tenant is in the object id, which is a keyed hash over
//! tenant and key. Two rights are enough. A process that may write a record begins, fills, commits and aborts it, and knows its
//! bytes, so this right includes reading. It covers the whole shape: a grant must not open a slot for another record than
//! the one for which the master reserved it. The node has the shape in the header of the slot when it fills and commits
//! the record, so these requests need not repeat it.

use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::Header;
use moontide_types::{
    Epoch, Extent, Generation, MacInput, NodeId, ObjectId, SegmentId, SlotId, TenantGeneration, Term, mac,
    macs,
};

use crate::layout::FieldValue;
use crate::records::{Handle, ObjectEntry, ObjectFlags};

/// Proof of an access right to one record. The master signs it, the node verifies it.
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Capability(pub [u8; 16]);

impl std::fmt::Debug for Capability {
    /// Prints only whether the capability is set: its bytes must not reach a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(if *self == Capability::default() { "Capability(none)" } else { "Capability(..)" })
    }
}

impl FieldValue for Capability {
    const BYTES: usize = 16;
    fn write_to(&self, out: &mut [u8]) {
        self.0.write_to(out);
    }
    fn read_from(bytes: &[u8]) -> Result<Self, u64> {
        Ok(Capability(<[u8; 16]>::read_from(bytes)?))
    }
}

/// Access that a capability allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessRight {
    /// Read the record, load it from disk, and release it in staging memory.
    Read,
    /// Begin a record of this shape, fill it, commit or abort it, and read it.
    Write(RecordShape),
}

/// What a put reserved: all properties of a record that its Begin contains, except key and attributes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordShape {
    /// Extent of the slot. The payload starts at its first byte.
    pub extent: Extent,
    /// Length of the object in bytes.
    pub object_len: u64,
    /// Offset of the stripe in the object.
    pub stripe_offset: u64,
    /// Length of the stripe in bytes.
    pub stripe_len: u64,
    /// Number of stripes of the object.
    pub stripe_count: u16,
    /// Whether the record has no page digests.
    pub digestless: bool,
    /// Number of the id key from which the id was computed.
    pub id_key: u32,
    /// Tenant generation from which the id was computed.
    pub tenant_generation: TenantGeneration,
}

impl RecordShape {
    /// Returns the shape that a master granted.
    pub fn granted(object: &ObjectEntry, handle: &Handle) -> RecordShape {
        RecordShape {
            extent: handle.extent,
            object_len: object.object_len,
            stripe_offset: handle.stripe_offset,
            stripe_len: handle.stripe_len,
            stripe_count: handle.stripe_count,
            digestless: object.flags.contains(ObjectFlags::DIGESTLESS),
            id_key: object.id_key,
            tenant_generation: object.tenant_generation,
        }
    }

    /// Returns the shape of a record in memory.
    pub fn of(header: &Header) -> RecordShape {
        let units = header.layout().expect("checked when decoded").units();
        let start = (header.payload_offset / UNIT_BYTES) as u32; // < SEGMENT_UNITS_MAX
        RecordShape {
            extent: Extent { start, units },
            object_len: header.object_len,
            stripe_offset: header.stripe_offset,
            stripe_len: header.stripe_len,
            stripe_count: header.stripe_count,
            digestless: header.flags.digestless(),
            id_key: header.id_key,
            tenant_generation: header.tenant_generation,
        }
    }
}

/// What a capability covers: the right, and the record at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CapabilityScope {
    /// Access right.
    pub right: AccessRight,
    /// Index of the stripe.
    pub stripe: u16,
    /// Segment of the slot.
    pub segment: SegmentId,
    /// Generation of the segment.
    pub generation: Generation,
    /// Slot in the segment.
    pub slot: SlotId,
    /// Term of the master that grants the access.
    pub term: Term,
    /// Version of the object.
    pub epoch: Epoch,
    /// Object id.
    pub id: ObjectId,
}

/// Bytes of the scope of a read, and of a write.
const READ_BYTES: usize = 48;
const WRITE_BYTES: usize = 90;

impl CapabilityScope {
    /// Returns what the master grants with a handle. A record on disk has no slot: it is identified by its version.
    pub fn of_handle(handle: &Handle, id: ObjectId, epoch: Epoch, right: AccessRight) -> CapabilityScope {
        let Handle { segment, generation, slot, term, stripe_index: stripe, .. } = *handle;
        CapabilityScope { right, stripe, segment, generation, slot, term, epoch, id }
    }

    /// Returns the bytes that the MAC covers, and their number. A read is one block of the hash.
    fn input(&self) -> ([u8; WRITE_BYTES], usize) {
        // Without `..`: what is added to a scope must be added here, too.
        let &CapabilityScope { right, stripe, segment, generation, slot, term, epoch, id } = self;
        let mut input = [0; WRITE_BYTES];
        input[2..4].copy_from_slice(&stripe.to_le_bytes());
        input[4..8].copy_from_slice(&segment.0.to_le_bytes());
        input[8..16].copy_from_slice(&generation.0.to_le_bytes());
        input[16..20].copy_from_slice(&slot.0.to_le_bytes());
        input[20..24].copy_from_slice(&term.get().to_le_bytes());
        input[24..32].copy_from_slice(&epoch.bits().to_le_bytes());
        input[32..48].copy_from_slice(&id.0);
        let shape = match right {
            AccessRight::Read => {
                input[0] = 1;
                return (input, READ_BYTES);
            }
            AccessRight::Write(shape) => shape,
        };
        let RecordShape { extent, object_len, stripe_offset, stripe_len, .. } = shape;
        let RecordShape { stripe_count, digestless, id_key, tenant_generation, .. } = shape;
        input[0] = 2;
        input[1] = digestless.into();
        input[48..52].copy_from_slice(&extent.start.to_le_bytes());
        input[52..56].copy_from_slice(&extent.units.to_le_bytes());
        input[56..64].copy_from_slice(&object_len.to_le_bytes());
        input[64..72].copy_from_slice(&stripe_offset.to_le_bytes());
        input[72..80].copy_from_slice(&stripe_len.to_le_bytes());
        input[80..84].copy_from_slice(&id_key.to_le_bytes());
        input[84..88].copy_from_slice(&tenant_generation.0.to_le_bytes());
        input[88..90].copy_from_slice(&stripe_count.to_le_bytes());
        (input, WRITE_BYTES)
    }
}

/// Key with which a master signs the capabilities for one node, and with which the node verifies them.
#[derive(Clone, PartialEq, Eq)]
pub struct CapabilityKey([u8; 32]);

impl std::fmt::Debug for CapabilityKey {
    /// Prints no byte of the key.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CapabilityKey(..)")
    }
}

impl CapabilityKey {
    /// Creates a key from 32 random bytes.
    pub fn new(key: [u8; 32]) -> CapabilityKey {
        CapabilityKey(key)
    }

    /// Returns the bytes, for the wire.
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Computes the capability for `scope`.
    pub fn sign(&self, scope: &CapabilityScope) -> Capability {
        let (input, len) = scope.input();
        Capability(mac(&MacInput { key: &self.0, bytes: &input[..len] }))
    }

    /// Returns whether `capability` was signed with this key for exactly this scope.
    pub fn verify(&self, scope: &CapabilityScope, capability: Capability) -> bool {
        let expected = self.sign(scope);
        // Constant time: independent of the position of a difference.
        expected.0.iter().zip(capability.0).fold(0, |differs, (a, b)| differs | (a ^ b)) == 0
    }
}

/// Scopes that are signed together: a full group of lanes of [`macs`].
const SIGNED_TOGETHER: usize = 16;

/// Appends the capabilities for all scopes to `out`, in their order. They equal those of [`CapabilityKey::sign`]; from three
/// scopes on they are computed in vector lanes.
pub fn sign_all<'a>(
    scopes: impl IntoIterator<Item = (&'a CapabilityKey, CapabilityScope)>,
    out: &mut Vec<Capability>,
) {
    let mut scopes = scopes.into_iter().peekable();
    let mut signed = Vec::with_capacity(SIGNED_TOGETHER);
    while let Some((key, _)) = scopes.peek() {
        let mut keys = [*key; SIGNED_TOGETHER];
        let mut inputs = [([0; WRITE_BYTES], 1); SIGNED_TOGETHER];
        let mut count = 0;
        for (key, scope) in scopes.by_ref().take(SIGNED_TOGETHER) {
            (keys[count], inputs[count]) = (key, scope.input());
            count += 1;
        }
        let input = |at: usize| MacInput { key: &keys[at].0, bytes: &inputs[at].0[..inputs[at].1] };
        let inputs: [MacInput<'_>; SIGNED_TOGETHER] = std::array::from_fn(input);
        signed.clear();
        macs(&inputs[..count], &mut signed);
        out.extend(signed.iter().copied().map(Capability));
    }
}

/// Secret of a master, drawn at its start. The keys of all nodes follow from it.
#[derive(Clone)]
pub struct CapabilitySecret([u8; 32]);

impl std::fmt::Debug for CapabilitySecret {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("CapabilitySecret(..)")
    }
}

impl CapabilitySecret {
    /// Creates a secret from 32 random bytes.
    pub fn new(secret: [u8; 32]) -> CapabilitySecret {
        CapabilitySecret(secret)
    }

    /// Returns the key of a node with this rotation number.
    pub fn key_of(&self, node: NodeId, rotation: u64) -> CapabilityKey {
        let mut input = [0; 16];
        input[..8].copy_from_slice(&node.0.to_le_bytes());
        input[8..].copy_from_slice(&rotation.to_le_bytes());
        CapabilityKey(*blake3::keyed_hash(&self.0, &input).as_bytes())
    }
}

#[cfg(test)]
mod tests;
