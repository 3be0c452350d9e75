//! What a capability covers, and that no other one is accepted.

use std::collections::BTreeSet;

use super::*;

const KEY: [u8; 32] = [7; 32];

fn shape() -> RecordShape {
    RecordShape {
        extent: Extent { start: 16, units: 8 },
        object_len: 3000,
        stripe_offset: 0,
        stripe_len: 3000,
        stripe_count: 1,
        digestless: false,
        id_key: 1,
        tenant_generation: TenantGeneration(2),
    }
}

fn scope(right: AccessRight) -> CapabilityScope {
    CapabilityScope {
        right,
        stripe: 0,
        segment: SegmentId(1),
        generation: Generation(2),
        slot: SlotId(3),
        term: Term::new(6).unwrap(),
        epoch: Epoch::from_bits(4).unwrap(),
        id: ObjectId([5; 16]),
    }
}

/// Copies of a scope, each with another value of one field. A field that is added does not compile until it is named
/// here, and fails [`each_field_is_covered`] until it has a row.
fn changed_shapes(base: RecordShape) -> Vec<(&'static str, RecordShape)> {
    let RecordShape {
        extent,
        object_len: _,
        stripe_offset: _,
        stripe_len: _,
        stripe_count: _,
        digestless: _,
        id_key: _,
        tenant_generation: _,
    } = base;
    vec![
        ("extent.start", RecordShape { extent: Extent { start: 17, ..extent }, ..base }),
        ("extent.units", RecordShape { extent: Extent { units: 9, ..extent }, ..base }),
        ("object_len", RecordShape { object_len: 3001, ..base }),
        ("stripe_offset", RecordShape { stripe_offset: 1 << 18, ..base }),
        ("stripe_len", RecordShape { stripe_len: 2999, ..base }),
        ("stripe_count", RecordShape { stripe_count: 2, ..base }),
        ("digestless", RecordShape { digestless: true, ..base }),
        ("id_key", RecordShape { id_key: 2, ..base }),
        ("tenant_generation", RecordShape { tenant_generation: TenantGeneration(3), ..base }),
    ]
}

/// As [`changed_shapes`], for all fields.
fn changed_scopes(base: CapabilityScope) -> Vec<(&'static str, CapabilityScope)> {
    let CapabilityScope { right, stripe: _, segment: _, generation: _, slot: _, term: _, epoch: _, id: _ } =
        base;
    let mut changed = vec![
        ("stripe", CapabilityScope { stripe: 1, ..base }),
        ("segment", CapabilityScope { segment: SegmentId(9), ..base }),
        ("generation", CapabilityScope { generation: Generation(9), ..base }),
        ("slot", CapabilityScope { slot: SlotId(9), ..base }),
        ("term", CapabilityScope { term: Term::new(9).unwrap(), ..base }),
        ("epoch", CapabilityScope { epoch: Epoch::from_bits(9).unwrap(), ..base }),
        ("id", CapabilityScope { id: ObjectId([9; 16]), ..base }),
    ];
    // Without a wildcard: a right that is added needs its rows.
    match right {
        AccessRight::Read => {
            changed.push(("right", CapabilityScope { right: AccessRight::Write(shape()), ..base }));
        }
        AccessRight::Write(shape) => {
            changed.push(("right", CapabilityScope { right: AccessRight::Read, ..base }));
            let shapes = changed_shapes(shape).into_iter();
            changed.extend(
                shapes.map(|(name, shape)| {
                    (name, CapabilityScope { right: AccessRight::Write(shape), ..base })
                }),
            );
        }
    }
    changed
}

#[test]
fn capability_is_valid_only_for_its_scope_and_key() {
    let (key, secret) = (CapabilityKey::new(KEY), CapabilitySecret::new([1; 32]));
    for right in [AccessRight::Read, AccessRight::Write(shape())] {
        let scope = scope(right);
        let made = key.sign(&scope);
        assert!(key.verify(&scope, made));
        for (name, other) in changed_scopes(scope) {
            assert!(!key.verify(&other, made), "{right:?} with another {name}");
        }
        assert!(!key.verify(&scope, Capability::default()));
        for bit in 0..128 {
            let mut flipped = made;
            flipped.0[bit / 8] ^= 1 << (bit % 8);
            assert!(!key.verify(&scope, flipped), "bit {bit}");
        }
        assert!(!CapabilityKey::new([8; 32]).verify(&scope, made), "another key");
        let of_node = secret.key_of(NodeId(1), 5);
        let made = of_node.sign(&scope);
        assert!(secret.key_of(NodeId(1), 5).verify(&scope, made));
        assert!(!secret.key_of(NodeId(2), 5).verify(&scope, made), "another node");
        assert!(!secret.key_of(NodeId(1), 6).verify(&scope, made), "another rotation");
        assert!(!CapabilitySecret::new([2; 32]).key_of(NodeId(1), 5).verify(&scope, made), "another master");
    }
}

#[test]
fn each_field_is_covered() {
    for right in [AccessRight::Read, AccessRight::Write(shape())] {
        let base = scope(right);
        // Every field of the scope in its debug form, which lists all of them, has a row.
        let text = format!("{base:?}");
        let fields: BTreeSet<&str> = text
            .split(|c: char| !(c.is_alphanumeric() || c == '_' || c == ':'))
            .filter_map(|word| word.strip_suffix(':'))
            .collect();
        let rows = changed_scopes(base);
        let covers = |field: &str| rows.iter().any(|(name, _)| name.rsplit('.').next() == Some(field));
        let structured = |field: &&&str| **field != "extent"; // its two fields have rows
        let uncovered: Vec<_> = fields.iter().filter(structured).filter(|field| !covers(field)).collect();
        assert!(uncovered.is_empty(), "{right:?}: no row for {uncovered:?}");
        let (input, len) = base.input();
        for (name, other) in rows.iter().filter(|(name, _)| *name != "right") {
            let (changed, other_len) = other.input();
            assert_eq!(len, other_len);
            assert_ne!(input, changed, "{name} does not change what the MAC covers");
        }
    }
}

#[test]
fn batch_equals_single_signatures() {
    let secret = CapabilitySecret::new([3; 32]);
    let keys: Vec<CapabilityKey> = (0..3).map(|node| secret.key_of(NodeId(node), 1)).collect();
    for count in 0..40 {
        let scope_of = |n: usize| {
            let right = if n.is_multiple_of(3) { AccessRight::Write(shape()) } else { AccessRight::Read };
            CapabilityScope { slot: SlotId(n as u32), ..scope(right) }
        };
        let scopes = || (0..count).map(|n| (&keys[n % keys.len()], scope_of(n)));
        let mut batch = Vec::new();
        sign_all(scopes(), &mut batch);
        assert_eq!(batch, scopes().map(|(key, scope)| key.sign(&scope)).collect::<Vec<_>>(), "{count}");
    }
}

#[test]
fn secrets_are_not_printed() {
    let texts = [
        format!("{:?}", CapabilityKey::new([0xab; 32])),
        format!("{:?}", CapabilitySecret::new([0xab; 32])),
        format!("{:?}", Capability([0xab; 16])),
    ];
    assert!(texts.iter().all(|text| text.ends_with("(..)")), "{texts:?}");
}
