//! Golden vectors of the record format, computed by other implementations (`golden/make.py`). The format is final.

use std::collections::HashMap;

use moontide_types::limits::PAGE_BYTES;
use moontide_types::record::{
    Attributes, DigestContext, Header, KeySection, ParentHash, PinClass, RecordFlags, State, Word,
    object_root, trailer_crc,
};
use moontide_types::{Epoch, IdKey, Key, ObjectId, Tenant, TenantGeneration, Term, UnixMillis};

/// Vectors by name; the test uses each exactly once.
struct Golden(HashMap<&'static str, Vec<u8>>);

impl Golden {
    fn load() -> Golden {
        let lines = include_str!("../golden/records.txt").lines();
        Golden(
            lines.map(|line| line.split_once(" = ").unwrap()).map(|(name, hex)| (name, unhex(hex))).collect(),
        )
    }

    fn take(&mut self, name: &str) -> Vec<u8> {
        self.0.remove(name).unwrap_or_else(|| panic!("no vector {name:?}"))
    }

    fn check(&mut self, name: &str, computed: &[u8]) {
        assert_eq!(hex(computed), hex(&self.take(name)), "{name}");
    }
}

fn unhex(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn pattern(len: u64) -> Vec<u8> {
    (0..len).map(|i| (i * 7 + i / 251) as u8).collect()
}

#[test]
fn all_golden_vectors_match() {
    let mut golden = Golden::load();
    let id_key = IdKey::new(1, std::array::from_fn(|i| i as u8));
    let id_of = |tenant, generation, key: &[u8]| {
        let (tenant, key) = (Tenant::new(tenant).unwrap(), Key::new(key).unwrap());
        id_key.object_id(tenant, TenantGeneration(generation), key)
    };
    golden.check("tenant id key default", id_key.of_tenant(Tenant::DEFAULT).secret());
    let id: ObjectId = id_of("default", 0, b"hello");
    golden.check("id default/0/hello", &id.0);
    golden.check(r"id team-a/7/\x00\xff", &id_of("team-a", 7, b"\x00\xff").0);
    golden.check("id default/0/4096 x", &id_of("default", 0, &[b'x'; 4096]).0);

    let version = Epoch::new(Term::new(3).unwrap(), 12345).unwrap();
    let context = |stripe, len| DigestContext { id, version, stripe, len };
    let page = PAGE_BYTES;
    for len in [0, 1, 16, 17, 128, 129, 240, 241, 4096, page - 1, page, page + 1, 3 * page + 77] {
        let mut pages = vec![];
        let root = context(0, len).payload(&pattern(len), |digest| pages.extend(digest.to_le_bytes()));
        golden.check(&format!("pages {len}"), &pages);
        golden.check(&format!("root {len}"), &root.to_le_bytes());
    }
    for count in [512, 513, 1025, 512 * 512, 512 * 512 + 1] {
        let digests = (0..count).map(|i: u64| i.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let root = context(2, count * page).root_of(digests);
        golden.check(&format!("tree {count}"), &root.to_le_bytes());
    }
    golden.check("object root 3", &object_root(id, version, 5 * page, &[1, 2, 3]).to_le_bytes());

    let section = KeySection { tenant: Tenant::DEFAULT, key: Key::new(b"hello").unwrap() };
    let attributes = Attributes {
        pin: PinClass::Soft,
        expires: Some(UnixMillis(1_800_000_000_000)),
        cohort: Some((*b"cohort").into()),
        parent: ParentHash::new(&std::array::from_fn::<u8, 32, _>(|i| i as u8)),
        user_data: Some((*b"note").into()),
        extra_replicas: 0,
        spread: None,
        disk_replicas: 0,
    };
    let (mut key_bytes, mut attribute_bytes) = (vec![], vec![]);
    section.encode(&mut key_bytes);
    attributes.encode(&mut attribute_bytes);
    golden.check("key section", &key_bytes);
    golden.check("attributes", &attribute_bytes);
    assert_eq!(Attributes::decode(&attribute_bytes), Ok(attributes));
    let crc = trailer_crc(&key_bytes, &attribute_bytes);
    golden.check("trailer crc", &crc.to_le_bytes());

    let payload = pattern(page + 1);
    let whole = Header {
        flags: RecordFlags::NONE,
        id,
        word: Word::new(version, State::Ready),
        object_len: page + 1,
        stripe_offset: 0,
        stripe_len: page + 1,
        payload_offset: 8192,
        root: context(0, page + 1).payload(&payload, |_| ()),
        stripe_index: 0,
        stripe_count: 1,
        key_len: key_bytes.len() as u32,
        attributes_len: attribute_bytes.len() as u32,
        trailer_crc: crc,
        id_key: 1,
        tenant_generation: TenantGeneration(0),
    };
    let stripe = Header {
        flags: RecordFlags::DIGESTLESS,
        word: Word::new(version, State::Writing),
        object_len: 5 * page,
        stripe_offset: 4 * page,
        stripe_len: page,
        payload_offset: 4096,
        root: 0,
        stripe_index: 2,
        stripe_count: 3,
        attributes_len: 0,
        trailer_crc: trailer_crc(&key_bytes, &[]),
        id_key: 4,
        tenant_generation: TenantGeneration(7),
        ..whole
    };
    for (name, header) in [("header whole", whole), ("header stripe", stripe)] {
        let encoded = header.encode();
        golden.check(name, &encoded);
        assert_eq!(Header::decode(&encoded), Ok(header));
    }
    assert!(golden.0.is_empty(), "unused vectors: {:?}", golden.0.keys());
}
