//! Every limit: the largest valid value is accepted, the next one is rejected.

mod generate;

use generate::{Gen, MESSAGES};
use moontide_proto::convert::{self, ConvertError, ObjectFields, ObjectListBuilder, Wire};
use moontide_proto::limits::*;
use moontide_proto::*;
use moontide_types::limits::*;
use moontide_types::{ErrorCode, Medium, Term};
use prost::bytes::Bytes;

/// Returns a valid message of this type.
fn valid<M: convert::Bounded>(name: &str) -> M {
    let index = MESSAGES.iter().position(|m| *m == name).unwrap();
    convert::decode(Bytes::from(Gen::new(1).whole(index))).unwrap()
}

/// Checks that `$fits` leaves the message valid, and that `$breaks` makes the conversion fail with `$code`.
macro_rules! edge {
    ($name:ident, $code:ident, |$m:ident| $fits:expr, $breaks:expr) => {{
        let mut message: <convert::$name as Wire>::Message = valid(stringify!($name));
        let change = |$m: &mut <convert::$name as Wire>::Message| $fits;
        change(&mut message);
        convert::$name::from_wire(&message)
            .unwrap_or_else(|e| panic!("{}: {e}, at {}", stringify!($name), stringify!($fits)));
        let change = |$m: &mut <convert::$name as Wire>::Message| $breaks;
        change(&mut message);
        let error = convert::$name::from_wire(&message).expect_err(stringify!($breaks));
        assert_eq!(error.code(), ErrorCode::$code, "{}: {error}", stringify!($breaks));
    }};
}

fn keys_of(count: usize, len: usize) -> Vec<u8> {
    let mut bytes = (count as u32).to_le_bytes().to_vec();
    bytes.extend((0..count).flat_map(|_| (len as u16).to_le_bytes()));
    bytes.resize(bytes.len() + count * len, b'k');
    bytes
}

macro_rules! context {
    ($m:ident) => {
        $m.context.as_mut().unwrap()
    };
}

#[path = "bounds/cold.rs"]
mod cold;
#[path = "bounds/node_calls.rs"]
mod node_calls;

#[test]
fn context_limits_are_enforced() {
    let too_long = "t".repeat(TENANT_BYTES_MAX + 1);
    edge!(ExistRequest, TooLarge, |m| context!(m).tenant = "t".repeat(TENANT_BYTES_MAX), {
        context!(m).tenant = too_long.clone()
    });
    edge!(ExistRequest, InvalidArgument, |m| context!(m).tenant = "a.b".into(), {
        context!(m).tenant = "a/b".into()
    });
    edge!(ExistRequest, TooLarge, |m| context!(m).token = vec![1; TOKEN_BYTES_MAX].into(), {
        context!(m).token = vec![1; TOKEN_BYTES_MAX + 1].into()
    });
    edge!(ExistRequest, TooLarge, |m| context!(m).group = Some(u32::from(GROUPS_MAX) - 1), {
        context!(m).group = Some(GROUPS_MAX.into())
    });
    edge!(ExistRequest, TooLarge, |m| context!(m).group = None, context!(m).group = Some(u32::MAX));
    edge!(ExistRequest, InvalidArgument, |m| context!(m).term = Term::MAX.get(), {
        context!(m).term = Term::MAX.get() + 1
    });
    edge!(ExistRequest, InvalidArgument, |m| context!(m).timeout_ms = 1, context!(m).timeout_ms = 0);
    edge!(ExistRequest, TooLarge, |m| context!(m).timeout_ms = TIMEOUT_MS_MAX, {
        context!(m).timeout_ms = TIMEOUT_MS_MAX + 1
    });
    edge!(ExistRequest, InvalidArgument, |m| context!(m).session = 0, m.context = None);
    edge!(OutcomesResponse, TooLarge, |m| context!(m).retry_after_ms = RETRY_AFTER_MS_MAX, {
        context!(m).retry_after_ms += 1
    });
    edge!(OutcomesResponse, Unsupported, |m| context!(m).code = 502, context!(m).code = 9999);
    let map = |f: fn(&mut v1::GroupMap)| {
        let mut map = Gen::new(1).group_map();
        f(&mut map);
        Some(map)
    };
    let same = map(|_| {});
    edge!(OutcomesResponse, TooLarge, |m| context!(m).newer_map = same.clone(), {
        context!(m).newer_map = map(|map| map.groups = u32::from(GROUPS_MAX) + 1)
    });
    edge!(OutcomesResponse, InvalidArgument, |m| context!(m).newer_map = same.clone(), {
        context!(m).newer_map = map(|map| map.masters[2].groups = vec![1])
    });
    edge!(OutcomesResponse, InvalidArgument, |m| context!(m).newer_map = same.clone(), {
        context!(m).newer_map = map(|map| map.masters[2].groups = vec![4])
    });
    edge!(OutcomesResponse, TooLarge, |m| context!(m).newer_map = same.clone(), {
        context!(m).newer_map = map(|map| map.masters[0].grpc_address = "a".repeat(ADDRESS_BYTES_MAX + 1))
    });
}

#[test]
fn packed_key_limits_are_enforced() {
    edge!(ExistRequest, TooLarge, |m| m.keys = keys_of(BATCH_KEYS_MAX, 1).into(), {
        m.keys = keys_of(BATCH_KEYS_MAX + 1, 1).into()
    });
    edge!(RemoveRequest, TooLarge, |m| m.keys = keys_of(2, KEY_BYTES_MAX).into(), {
        m.keys = keys_of(2, KEY_BYTES_MAX + 1).into()
    });
    edge!(TouchRequest, InvalidArgument, |m| m.keys = keys_of(2, 1).into(), m.keys = keys_of(2, 0).into());
    edge!(TouchRequest, InvalidArgument, |m| m.keys = keys_of(0, 1).into(), m.keys = Bytes::new());
    // The largest number of longest keys that fits into a request, and one more.
    let max = (PACKED_BYTES_MAX - 4) / (KEY_BYTES_MAX + 2);
    edge!(ExistRequest, TooLarge, |m| m.keys = keys_of(max, KEY_BYTES_MAX).into(), {
        m.keys = keys_of(max + 1, KEY_BYTES_MAX).into()
    });
    let mut builder = PackedKeysBuilder::new();
    let longest = vec![b'k'; KEY_BYTES_MAX];
    for _ in 0..max {
        builder.push(moontide_types::Key::new(&longest).unwrap()).unwrap();
    }
    assert!(builder.push(moontide_types::Key::new(&longest).unwrap()).is_err());
    assert_eq!(builder.len(), max, "a rejected key changes nothing");
}

#[test]
fn lookup_message_limits_are_enforced() {
    edge!(GetReplicaListRequest, TooLarge, |m| m.lease_ms = LEASE_MS_MAX, m.lease_ms += 1);
    edge!(TouchRequest, TooLarge, |m| m.lease_ms = LEASE_MS_MAX, m.lease_ms += 1);
    edge!(SetPinRequest, Unsupported, |m| m.pin = 2, m.pin = 3);
    edge!(SetPinRequest, Unsupported, |m| m.pin = 0, m.pin = -1);
    let full = |count: usize| (count as u32, Bytes::from(vec![0xff; count.div_ceil(8)]));
    edge!(
        ExistResponse,
        TooLarge,
        |m| {
            m.codes = Bytes::new();
            (m.count, m.present) = full(BATCH_KEYS_MAX)
        },
        (m.count, m.present) = full(BATCH_KEYS_MAX + 8)
    );
    edge!(
        ExistResponse,
        InvalidArgument,
        |m| (m.count, m.present, m.codes) = (1, vec![1].into(), vec![0, 0].into()),
        m.codes = vec![1, 0].into()
    );
    edge!(
        ExistResponse,
        InvalidArgument,
        |m| (m.count, m.present, m.codes) = (1, vec![1].into(), Bytes::new()),
        m.present = vec![3].into()
    );
    edge!(OutcomesResponse, TooLarge, |m| m.codes = vec![0; 2 * BATCH_KEYS_MAX].into(), {
        m.codes = vec![0; 2 * BATCH_KEYS_MAX + 2].into()
    });
    edge!(OutcomesResponse, Unsupported, |m| m.codes = vec![1, 0].into(), m.codes = vec![99, 0].into());
    edge!(OutcomesResponse, InvalidArgument, |m| m.codes = vec![1, 0].into(), m.codes = vec![1].into());
}

#[test]
fn object_list_with_inconsistent_handles_is_rejected() {
    // One handle more than the entries refer to, one fewer, and handles that are not consecutive.
    let g = &mut Gen::new(9);
    let stripe = |index, count, len| Stripe { index, count, offset: u64::from(index) * PAGE_BYTES, len };
    let handle = g.handle(stripe(0, 1, 5), 0);
    let entry = ObjectEntry { object_len: 5, replica_count: 1, handle_count: 1, ..g.whole_object().0 };
    let list = |entries: &[ObjectEntry], handles: &[Handle]| {
        let objects: Bytes = entries.iter().copied().collect::<PackedBuilder<_>>().finish().into();
        let handles: PackedBuilder<_> = handles.iter().copied().collect();
        (objects, handles.finish().into(), Bytes::new())
    };
    let second = ObjectEntry { first_handle: 1, ..entry };
    let striped = ObjectEntry { object_len: 2 * PAGE_BYTES, handle_count: 2, ..entry };
    let copied = ObjectEntry { replica_count: 2, handle_count: 2, ..entry };
    let halves = [g.handle(stripe(0, 2, PAGE_BYTES), 0), g.handle(stripe(1, 2, PAGE_BYTES), 0)];
    let copies = [handle, Handle { replica: 1, ..handle }];
    let good = list(&[entry, second], &[handle; 2]);
    for good in [&list(&[striped], &halves), &list(&[copied], &copies)] {
        edge!(
            GetReplicaListResponse,
            InvalidArgument,
            |m| (m.objects, m.handles, m.attributes) = good.clone(),
            { m.handles = m.handles.slice(..Handle::BYTES) }
        );
    }
    let short = Handle { stripe_len: 512, ..halves[0] };
    for (breaks, _reason) in [
        (list(&[entry, second], &[handle; 3]), "a handle too many"),
        (list(&[entry, second], &[handle; 1]), "a handle too few"),
        (list(&[entry, entry], &[handle; 2]), "shared handles"),
        (list(&[second, entry], &[handle; 2]), "wrong order"),
        (list(&[ObjectEntry { object_len: 6, ..entry }, second], &[handle; 2]), "not the whole object"),
        (list(&[copied], &[handle; 2]), "the same replica twice"),
        (list(&[copied], &[copies[1], copies[0]]), "replicas in the wrong order"),
        (list(&[entry], &[copies[1]]), "no such replica"),
        (list(&[ObjectEntry { handle_count: 1, ..copied }], &[handle]), "a replica without handles"),
        (list(&[ObjectEntry { handle_count: 1, ..copied }], &copies[1..]), "only the second replica"),
        (list(&[striped], &[halves[1], halves[0]]), "stripes in the wrong order"),
        (list(&[striped], &[short, halves[1]]), "a gap between stripes"),
        (list(&[ObjectEntry { handle_count: 1, ..striped }], &halves[..1]), "the last stripe is missing"),
        (list(&[ObjectEntry { handle_count: 1, ..striped }], &halves[1..]), "the first stripe is missing"),
        (list(&[ObjectEntry { object_len: 3 * PAGE_BYTES, ..striped }], &halves), "bytes are missing"),
        (
            list(&[striped], &[halves[0], Handle { stripe_count: 3, ..halves[1] }]),
            "stripes do not agree on their number",
        ),
    ] {
        edge!(
            GetReplicaListResponse,
            InvalidArgument,
            |m| (m.objects, m.handles, m.attributes) = good.clone(),
            (m.objects, m.handles, m.attributes) = breaks.clone()
        );
        edge!(PutStartResponse, InvalidArgument, |m| m.expires_unix_ms.clear(), {
            (m.objects, m.handles, _) = breaks.clone()
        });
    }
    // A full response: the maximum number of handles, and one more.
    let own: Vec<Handle> = (0..32).map(|i| g.handle(stripe(i % 4, 4, PAGE_BYTES), (i / 4) as u8)).collect();
    let huge = |handles: usize| {
        // 4,096 × 32 = HANDLES_PER_RESPONSE_MAX
        let entries: Vec<_> = (0..BATCH_KEYS_MAX as u32)
            .map(|i| ObjectEntry {
                first_handle: i * 32,
                handle_count: 32,
                replica_count: 8,
                object_len: 4 * PAGE_BYTES,
                ..entry
            })
            .collect();
        list(&entries, &own.iter().copied().cycle().take(handles).collect::<Vec<_>>())
    };
    edge!(
        GetReplicaListResponse,
        TooLarge,
        |m| (m.objects, m.handles, m.attributes) = huge(HANDLES_PER_RESPONSE_MAX),
        (m.objects, m.handles, m.attributes) = huge(HANDLES_PER_RESPONSE_MAX + 1)
    );
    // A Begin carries the handles of one node: any replica, any stripe, but at least one.
    let (none, failed) = (list(&[], &[]), list(&[ObjectEntry::failed(ErrorCode::NotFound, 0)], &[]));
    for part in [
        list(&[ObjectEntry { handle_count: 1, ..copied }], &copies[1..]),
        list(&[ObjectEntry { handle_count: 1, ..striped }], &halves[1..]),
    ] {
        edge!(
            BeginRequest,
            InvalidArgument,
            |m| {
                m.keys = keys_of(1, 3).into();
                (m.objects, m.handles, m.attributes) = part.clone()
            },
            (m.objects, m.handles, m.attributes) = failed.clone()
        );
        let twice = list(&[copied], &[handle; 2]);
        edge!(
            BeginRequest,
            InvalidArgument,
            |m| {
                m.keys = keys_of(0, 3).into();
                (m.objects, m.handles, m.attributes) = none.clone()
            },
            {
                m.keys = keys_of(1, 3).into();
                (m.objects, m.handles, m.attributes) = twice.clone()
            }
        );
    }
    edge!(PutStartResponse, InvalidArgument, |m| m.expires_unix_ms = vec![], {
        m.expires_unix_ms = vec![0; 99]
    });
}

/// The response of a failed call is empty. If the rest were checked, the caller could not read the error code.
#[test]
fn error_response_decodes_without_body() {
    macro_rules! readable {
        ($($name:ident)*) => {$(
            let mut message: <convert::$name as Wire>::Message = Default::default();
            let context = v1::ResponseContext { code: ErrorCode::Busy as u32, ..Default::default() };
            message.context = Some(context.clone());
            let response = convert::$name::from_wire(&message).unwrap();
            assert_eq!(response.context().code, Some(ErrorCode::Busy));
            assert!(response.body().is_none());
            assert_eq!(response.to_wire(), message);
            assert_eq!(response.into_result().unwrap_err().code, Some(ErrorCode::Busy));
            // The other fields are not checked; the context is.
            let mut message: <convert::$name as Wire>::Message = valid(stringify!($name));
            assert!(convert::$name::from_wire(&message).unwrap().into_result().is_ok());
            message.context = Some(context);
            assert!(convert::$name::from_wire(&message).unwrap().body().is_none());
            context!(message).term = u32::MAX;
            assert!(convert::$name::from_wire(&message).is_err());
        )*
            assert_eq!([$(stringify!($name)),*], generate::RESPONSES);
        };
    }
    readable! {
        ExistResponse GetReplicaListResponse PutStartResponse OutcomesResponse OpenSessionResponse
        MountSegmentsResponse GetJobResponse GetClusterInfoResponse GetNodesResponse
    }
}

/// The builder rejects entries that do not fit into a message, and changes nothing then.
#[test]
fn builders_reject_invalid_input_and_keep_contents() {
    let g = &mut Gen::new(3);
    let handle = g.handle(Stripe { index: 0, count: 1, offset: 0, len: 5 }, 0);
    let entry = ObjectEntry { object_len: 5, replica_count: 1, ..g.whole_object().0 };
    let mut builder = ObjectListBuilder::default();
    let code = |result: Result<(), ConvertError>| result.unwrap_err().code();
    assert_eq!(code(builder.push(entry, &vec![handle; 65_537], &[])), ErrorCode::TooLarge);
    assert_eq!(code(builder.push(entry, &vec![handle; 131_073], &[])), ErrorCode::TooLarge);
    assert_eq!(code(builder.push(entry, &[], &[])), ErrorCode::InvalidArgument);
    assert_eq!(
        code(builder.push(entry, &[Handle { replica: 7, ..handle }], &[])),
        ErrorCode::InvalidArgument
    );
    let slot = moontide_types::SlotId(u32::MAX);
    let broken = Handle { slot, medium: Medium::Memory, ..handle };
    assert_eq!(code(builder.push(entry, &[broken], &[])), ErrorCode::InvalidArgument);
    assert_eq!(code(builder.push(entry, &[handle], &[9])), ErrorCode::InvalidArgument);
    assert_eq!(builder.finish(), ObjectFields::default());

    // Filled with longest attributes: the message has its maximum size, and can be sent.
    let note = vec![7; USER_DATA_BYTES_MAX];
    let attributes =
        moontide_types::record::Attributes { user_data: Some(note.into()), ..Default::default() };
    let mut section = vec![];
    attributes.encode(&mut section);
    let handles: Vec<_> = (0..8).map(|replica| Handle { replica, ..handle }).collect();
    let entry = ObjectEntry { replica_count: 8, ..entry };
    let mut builder = ObjectListBuilder::default();
    let refused = loop {
        if let Err(error) = builder.push(entry, &handles, &section) {
            break error;
        }
    };
    assert!(matches!(refused, ConvertError::TooLarge { field: "objects" | "message", .. }), "{refused}");
    let ObjectFields { objects, handles, attributes } = builder.finish();
    let context = valid::<v1::GetReplicaListResponse>("GetReplicaListResponse").context;
    let message = v1::GetReplicaListResponse { context, objects, handles, attributes };
    let encoded = convert::encode(&convert::GetReplicaListResponse::from_wire(&message).unwrap()).unwrap();
    let body_len = encoded.len() as u32;
    FrameHeader { body_len, ..FrameHeader::new(FrameKind::GetReplicaListReply, 1) }.encode();

    // Keys and attributes that each fit alone, but not together in one message.
    let mut message: v1::PutStartRequest = valid("PutStartRequest");
    let count = 4078;
    message.keys = keys_of(count, KEY_BYTES_MAX).into();
    message.objects = vec![0; count * PutEntry::BYTES].into();
    message.attributes = Bytes::new();
    convert::encode(&convert::PutStartRequest::from_wire(&message).unwrap()).unwrap();
    let mut sections = PackedBytesBuilder::new();
    (0..count).for_each(|_| sections.push(&section).unwrap());
    message.attributes = sections.finish().into();
    let error = convert::encode(&convert::PutStartRequest::from_wire(&message).unwrap()).unwrap_err();
    assert_eq!(error.code(), ErrorCode::TooLarge);
}

/// Ids out of range are rejected in every field outside of records.
#[test]
fn out_of_range_ids_are_rejected() {
    use v1::node_message::Body;
    let beyond = SEGMENTS_PER_NODE_MAX;
    edge!(UnmountSegmentsRequest, TooLarge, |m| m.segments = vec![beyond - 1], m.segments = vec![beyond]);
    let grant = |segment| v1::MountResult { segment, ..Default::default() };
    edge!(MountSegmentsResponse, TooLarge, |m| m.results = vec![grant(beyond - 1)], {
        m.results = vec![grant(beyond)]
    });
    let touched = |segment| {
        let touched = vec![v1::TouchBitmap { segment, ..Default::default() }];
        Body::Heartbeat(v1::Heartbeat { heartbeat_id: 1, touched, ..Default::default() })
    };
    let status = |segment, free_slots| {
        let segments = vec![v1::SegmentStatus { segment, free_slots, state: 1, ..Default::default() }];
        Body::Heartbeat(v1::Heartbeat { heartbeat_id: 1, segments, ..Default::default() })
    };
    let chunk = |segment| {
        let keys = keys_of(0, 0).into();
        Body::Report(v1::ReportChunk { segment, kind: 1, keys, ..Default::default() })
    };
    let end = |segment, records| Body::ReportEnd(v1::ReportEnd { segment, records, ..Default::default() });
    let slots = SLOTS_PER_SEGMENT_MAX;
    for (fits, breaks) in [
        (touched(beyond - 1), touched(beyond)),
        (status(beyond - 1, 0), status(beyond, 0)),
        (status(0, slots), status(0, slots + 1)),
        (chunk(beyond - 1), chunk(beyond)),
        (end(beyond - 1, 0), end(beyond, 0)),
        (end(0, slots.into()), end(0, u64::from(slots) + 1)),
    ] {
        let message = v1::NodeMessage { session: 1, sequence: 1, highest_term: 0, body: Some(fits) };
        convert::NodeMessage::from_wire(&message).unwrap();
        assert_eq!(refused(breaks), ErrorCode::TooLarge);
    }
}

#[test]
fn put_message_limits_are_enforced() {
    macro_rules! config {
        ($m:ident) => {
            $m.configs[0]
        };
    }
    edge!(PutStartRequest, TooLarge, |m| config!(m).replicas = 8, config!(m).replicas = 9);
    edge!(
        PutStartRequest,
        InvalidArgument,
        |m| (config!(m).replicas, config!(m).replicas_min) = (1, 1),
        config!(m).replicas_min = 0
    );
    edge!(
        PutStartRequest,
        TooLarge,
        |m| (config!(m).replicas, config!(m).replicas_min) = (2, 2),
        config!(m).replicas = 1
    );
    edge!(PutStartRequest, TooLarge, |m| config!(m).stripes = STRIPES_MAX as u32, config!(m).stripes += 1);
    edge!(PutStartRequest, TooLarge, |m| config!(m).ttl_ms = TTL_MS_MAX, config!(m).ttl_ms += 1);
    let place = |segment| v1::Place { node: 1, segment };
    edge!(
        PutStartRequest,
        TooLarge,
        |m| config!(m).preferred = vec![place(None); PREFERRED_PLACES_MAX],
        config!(m).preferred = vec![place(None); PREFERRED_PLACES_MAX + 1]
    );
    edge!(
        PutStartRequest,
        TooLarge,
        |m| config!(m).preferred = vec![place(Some(SEGMENTS_PER_NODE_MAX - 1))],
        config!(m).preferred = vec![place(Some(SEGMENTS_PER_NODE_MAX))]
    );
    edge!(PutStartRequest, Unsupported, |m| config!(m).medium = 3, config!(m).medium = 4);
    let config = Gen::new(2).put_config();
    edge!(PutStartRequest, TooLarge, |m| m.configs = vec![config.clone(); CONFIGS_MAX], {
        m.configs = vec![config.clone(); CONFIGS_MAX + 1]
    });
    let one = |len: u64, config: u16| {
        Bytes::from([&len.to_le_bytes()[..], &config.to_le_bytes(), &[0; 6]].concat())
    };
    let sections = |section: &[u8]| {
        let mut sections = PackedBytesBuilder::new();
        sections.push(section).unwrap();
        Bytes::from(sections.finish())
    };
    let check = |code, objects: Bytes, attributes: Bytes| {
        let mut message: v1::PutStartRequest = valid("PutStartRequest");
        message.keys = keys_of(1, 5).into();
        (message.objects, message.attributes) = (one(OBJECT_BYTES_MAX, 1), sections(&[]));
        convert::PutStartRequest::from_wire(&message).unwrap();
        (message.objects, message.attributes) = (objects, attributes);
        assert_eq!(convert::PutStartRequest::from_wire(&message).unwrap_err().code(), code);
    };
    let (invalid, large) = (ErrorCode::InvalidArgument, ErrorCode::TooLarge);
    check(invalid, one(OBJECT_BYTES_MAX + 1, 1), Bytes::new());
    check(invalid, one(1, 2), Bytes::new());
    check(invalid, one(1, CONFIGS_MAX as u16), Bytes::new());
    check(invalid, one(1, 1), sections(&[1]));
    check(large, one(1, 1), sections(&[0; 5000]));
    check(invalid, one(1, 1), keys_of(2, 0).into());
    check(invalid, Bytes::new(), Bytes::new());
    edge!(PutEndRequest, InvalidArgument, |m| m.stripe_roots.len(), m.stripe_roots.push(1));
    let versions = |count: usize| Bytes::from(vec![0; count * VersionedId::BYTES]);
    edge!(PutRevokeRequest, TooLarge, |m| m.versions = versions(BATCH_KEYS_MAX), {
        m.versions = versions(BATCH_KEYS_MAX + 1)
    });
}

#[test]
fn session_message_limits_are_enforced() {
    edge!(OpenSessionRequest, InvalidArgument, |m| m.node = 1, m.node = 0);
    let address = v1::Address { engine: "tcp".into(), address: "a:1".into() };
    edge!(OpenSessionRequest, TooLarge, |m| m.addresses = vec![address.clone(); ADDRESSES_MAX], {
        m.addresses.push(address.clone())
    });
    for (code, engine, text) in [
        (ErrorCode::TooLarge, "e".repeat(ENGINE_BYTES_MAX + 1), "a".into()),
        (ErrorCode::InvalidArgument, String::new(), "a".into()),
        (ErrorCode::TooLarge, "e".repeat(ENGINE_BYTES_MAX), "a".repeat(ADDRESS_BYTES_MAX + 1)),
        (ErrorCode::InvalidArgument, "e".into(), String::new()),
    ] {
        let mut message: v1::OpenSessionRequest = valid("OpenSessionRequest");
        message.addresses = vec![v1::Address { engine, address: text }];
        assert_eq!(convert::OpenSessionRequest::from_wire(&message).unwrap_err().code(), code);
    }
    edge!(
        OpenSessionRequest,
        TooLarge,
        |m| m.topology.as_mut().unwrap().zone = "z".repeat(LABEL_BYTES_MAX),
        m.topology.as_mut().unwrap().zone.push('z')
    );
    edge!(OpenSessionRequest, InvalidArgument, |m| m.protocol_min = 1, m.protocol_min = 0);
    edge!(OpenSessionRequest, TooLarge, |m| m.protocol_max = 65_535, m.protocol_max = 65_536);
    edge!(OpenSessionResponse, TooLarge, |m| m.groups = GROUPS_MAX.into(), m.groups += 1);
    edge!(OpenSessionResponse, InvalidArgument, |m| m.id_key_secret = vec![1; 32].into(), {
        m.id_key_secret = vec![1; 31].into()
    });
    edge!(OpenSessionResponse, InvalidArgument, |m| m.ttl_ms = 1, m.ttl_ms = 0);

    let spec = Gen::new(3).segment_spec();
    let broken = |f: fn(&mut v1::SegmentSpec)| {
        let mut spec = spec.clone();
        f(&mut spec);
        vec![spec]
    };
    for (code, segments) in [
        (ErrorCode::TooLarge, vec![spec.clone(); BATCH_KEYS_MAX + 1]),
        (ErrorCode::TooLarge, broken(|s| s.segment = SEGMENTS_PER_NODE_MAX)),
        (ErrorCode::InvalidArgument, broken(|s| s.units = 0)),
        (ErrorCode::InvalidArgument, broken(|s| s.slots = 0)),
        (ErrorCode::TooLarge, broken(|s| s.slots = u32::MAX)),
        (ErrorCode::Unsupported, broken(|s| s.medium = 0)),
        (ErrorCode::InvalidArgument, broken(|s| (s.segment, s.medium) = (0, 3))),
        (ErrorCode::InvalidArgument, broken(|s| (s.segment, s.medium) = (SEGMENTS_PER_NODE_MAX - 1, 1))),
        (ErrorCode::TooLarge, broken(|s| s.group = Some(4096))),
    ] {
        let same = vec![spec.clone(); BATCH_KEYS_MAX];
        let mut message: v1::MountSegmentsRequest = valid("MountSegmentsRequest");
        message.segments = same;
        convert::MountSegmentsRequest::from_wire(&message).unwrap();
        message.segments = segments;
        assert_eq!(convert::MountSegmentsRequest::from_wire(&message).unwrap_err().code(), code);
    }
    edge!(UnmountSegmentsRequest, TooLarge, |m| m.segments = vec![1; BATCH_KEYS_MAX], m.segments.push(1));
}

/// Returns the error code for a node's message with this body.
fn refused(body: v1::node_message::Body) -> ErrorCode {
    let message = v1::NodeMessage { session: 1, sequence: 1, highest_term: 0, body: Some(body) };
    convert::NodeMessage::from_wire(&message).unwrap_err().code()
}

#[test]
fn stream_message_limits_are_enforced() {
    use v1::node_message::Body;
    let (large, invalid, unknown) = (ErrorCode::TooLarge, ErrorCode::InvalidArgument, ErrorCode::Unsupported);
    edge!(NodeMessage, InvalidArgument, |m| m.sequence = 1, m.sequence = 0);
    edge!(NodeMessage, InvalidArgument, |m| m.session = 1, m.session = 0);
    edge!(NodeMessage, InvalidArgument, |m| m.sequence = 1, m.body = None);
    edge!(MasterMessage, InvalidArgument, |m| m.session = 1, m.body = None);
    let in_sync = |count: u16, group| {
        let in_sync = vec![v1::GroupExclusion { group, exclusion: u32::MAX }; count.into()];
        Some(v1::master_message::Body::HeartbeatAck(v1::HeartbeatAck {
            ttl_ms: 1,
            in_sync,
            ..Default::default()
        }))
    };
    let last = u32::from(GROUPS_MAX) - 1;
    edge!(
        MasterMessage,
        TooLarge,
        |m| m.body = in_sync(GROUPS_MAX, last),
        m.body = in_sync(GROUPS_MAX + 1, last)
    );
    edge!(MasterMessage, TooLarge, |m| m.body = in_sync(1, last), m.body = in_sync(1, last + 1));
    let synced =
        |count: u16, group| vec![v1::SyncMark { group, exclusion: 1, ago_ms: u64::MAX }; count.into()];
    edge!(MountSegmentsRequest, TooLarge, |m| m.synced = synced(GROUPS_MAX, last), {
        m.synced = synced(GROUPS_MAX + 1, last)
    });
    edge!(MountSegmentsRequest, TooLarge, |m| m.synced = synced(1, last), m.synced = synced(1, last + 1));

    let key = |rotation, len| {
        let key = v1::CapabilityKey { rotation, key: vec![0; len].into() };
        Some(v1::master_message::Body::CapabilityKey(key))
    };
    edge!(MasterMessage, InvalidArgument, |m| m.body = key(1, 32), m.body = key(0, 32));
    edge!(MasterMessage, InvalidArgument, |m| m.body = key(1, 32), m.body = key(1, 31));
    edge!(MasterMessage, InvalidArgument, |m| m.body = key(1, 32), m.body = key(1, 33));
    let node_keys = |count, node| vec![v1::HandoffKey { node, key: vec![0; 32].into() }; count];
    edge!(HandoffGroupRequest, TooLarge, |m| m.node_keys = node_keys(HANDOFF_SEGMENTS_MAX, 1), {
        m.node_keys = node_keys(HANDOFF_SEGMENTS_MAX + 1, 1)
    });
    edge!(
        HandoffGroupRequest,
        InvalidArgument,
        |m| m.node_keys = node_keys(1, 1),
        m.node_keys = node_keys(1, 0)
    );

    let heartbeat = v1::Heartbeat { heartbeat_id: 1, ..Default::default() };
    let refused_heartbeat = |heartbeat| refused(Body::Heartbeat(heartbeat));
    assert_eq!(refused_heartbeat(v1::Heartbeat { heartbeat_id: 0, ..heartbeat.clone() }), invalid);
    let bits =
        |first_slot, len| v1::TouchBitmap { first_slot, bits: vec![1; len].into(), ..Default::default() };
    let touched = |touched| v1::Heartbeat { touched, ..heartbeat.clone() };
    assert_eq!(refused_heartbeat(touched(vec![bits(0, TOUCH_BYTES_MAX + 1)])), large);
    assert_eq!(refused_heartbeat(touched(vec![bits(0, 0); TOUCH_BITMAPS_MAX + 1])), large);
    assert_eq!(refused_heartbeat(touched(vec![bits(u32::MAX - 8, 1)])), invalid);
    let reads = v1::RemoteReads { epoch: 1 << 40 | 1, reader: 7, ..Default::default() };
    let remote = |remote_reads| v1::Heartbeat { remote_reads, ..heartbeat.clone() };
    assert_eq!(refused_heartbeat(remote(vec![reads; REMOTE_READS_MAX + 1])), large);
    assert_eq!(refused_heartbeat(remote(vec![v1::RemoteReads { reader: 0, ..reads }])), invalid);
    assert_eq!(refused_heartbeat(remote(vec![v1::RemoteReads { slot: u32::MAX, ..reads }])), invalid);
    let status = |state, live_units, free_units| v1::Heartbeat {
        segments: vec![v1::SegmentStatus { state, live_units, free_units, ..Default::default() }],
        ..heartbeat.clone()
    };
    assert_eq!(refused_heartbeat(status(0, 0, 0)), unknown);
    assert_eq!(refused_heartbeat(status(5, 0, 0)), unknown);
    assert_eq!(refused_heartbeat(status(1, u32::MAX, 1)), large);
    let disk = Some(v1::DiskStatus { state: 9, ..Default::default() });
    assert_eq!(refused_heartbeat(v1::Heartbeat { disk, ..heartbeat.clone() }), unknown);
    let pressure = Some(v1::Pressure { staging_permille: 1001, ..Default::default() });
    assert_eq!(refused_heartbeat(v1::Heartbeat { pressure, ..heartbeat.clone() }), large);

    let too_many = |bytes: usize| Bytes::from(vec![0; (SESSION_RECORDS_MAX + 1) * bytes]);
    assert_eq!(refused(Body::CommandResults(v1::CommandResults { results: too_many(24) })), large);
    assert_eq!(refused(Body::DiskEvicted(v1::DiskEvicted { versions: too_many(24) })), large);

    let g = &mut Gen::new(5);
    let record = g.report_record();
    let records: Bytes = [record].into_iter().collect::<PackedBuilder<_>>().finish().into();
    let chunk = v1::ReportChunk {
        kind: 1,
        records: records.clone(),
        keys: keys_of(1, 3).into(),
        tenants: vec!["t".into()],
        ..Default::default()
    };
    let refused_chunk = |f: &dyn Fn(&mut v1::ReportChunk)| {
        convert::ReportChunk::from_wire(&chunk).unwrap();
        let mut chunk = chunk.clone();
        f(&mut chunk);
        refused(Body::Report(chunk))
    };
    assert_eq!(refused_chunk(&|c| c.kind = 0), unknown);
    assert_eq!(refused_chunk(&|c| c.records = too_many(96)), large);
    assert_eq!(refused_chunk(&|c| c.records = records.slice(1..)), invalid);
    assert_eq!(refused_chunk(&|c| c.keys = keys_of(2, 3).into()), invalid);
    assert_eq!(refused_chunk(&|c| c.keys = keys_of(1, 0).into()), invalid);
    assert_eq!(refused_chunk(&|c| c.keys = keys_of(1, KEY_BYTES_MAX + 1).into()), large);
    assert_eq!(refused_chunk(&|c| c.tenants.clear()), invalid);
    assert_eq!(refused_chunk(&|c| c.tenants = vec!["t".into(); SESSION_RECORDS_MAX + 1]), large);
    assert_eq!(refused_chunk(&|c| c.term = Term::MAX.get() + 1), invalid);
    assert_eq!(refused_chunk(&|c| c.first_record = u64::MAX), invalid);
    let free = ReportRecord::free(record.slot, record.word.epoch());
    let free: Bytes = [free].into_iter().collect::<PackedBuilder<_>>().finish().into();
    assert_eq!(refused_chunk(&|c| (c.records, c.keys) = (free.clone(), keys_of(1, 0).into())), invalid);

    let commands = |bytes| {
        let body = Some(v1::master_message::Body::Commands(bytes));
        let message = v1::MasterMessage { session: 1, body, ..Default::default() };
        convert::MasterMessage::from_wire(&message).map(|_| ()).map_err(|e: ConvertError| e.code())
    };
    assert_eq!(commands(g.commands(SESSION_RECORDS_MAX)), Ok(()));
    assert_eq!(commands(g.commands(SESSION_RECORDS_MAX + 1)), Err(large));
    let of_copy =
        (0..).map(|seed| Gen::new(seed).commands(4)).find(|found| !found.sources.is_empty()).unwrap();
    assert_eq!(commands(of_copy.clone()), Ok(()));
    let [mut fewer, mut more] = [of_copy.clone(), of_copy];
    fewer.sources = fewer.sources.slice(CopySource::BYTES..);
    more.sources = [&more.sources[..], &g.packed(1, Gen::copy_source)].concat().into();
    assert_eq!([commands(fewer), commands(more)], [Err(invalid); 2]);
}

/// Decodes the header with one field replaced and a recomputed CRC, as a hostile or faulty sender would send it.
fn patched(header: FrameHeader, at: usize, value: &[u8]) -> Result<FrameHeader, FrameError> {
    let mut bytes = header.encode();
    bytes[at..at + value.len()].copy_from_slice(value);
    let crc = crc32c::crc32c(&bytes[..60]);
    bytes[60..].copy_from_slice(&crc.to_le_bytes());
    FrameHeader::decode(&bytes)
}

#[test]
fn frame_header_limits_are_enforced() {
    for &kind in FrameKind::ALL {
        let mut header = FrameHeader::new(kind, 1);
        assert_eq!(FrameHeader::decode(&Gen::new(1).header_of(kind).encode()).map(|h| h.kind), Ok(kind));
        header.body_len = kind.body_len_max() as u32;
        header.status = (kind == FrameKind::Error).then_some(ErrorCode::Busy);
        assert_eq!(FrameHeader::decode(&header.encode()), Ok(header), "{kind:?}");
        let longer = (header.body_len + 1).to_le_bytes();
        assert!(matches!(patched(header, 16, &longer), Err(FrameError::BodyLen { .. })), "{kind:?}");
        let payload_max =
            if matches!(kind, FrameKind::Write | FrameKind::ReadReply) { FRAME_PAYLOAD_BYTES_MAX } else { 0 };
        assert!(patched(header, 24, &payload_max.to_le_bytes()).is_ok(), "{kind:?}");
        let longer = (payload_max + 1).to_le_bytes();
        assert!(matches!(patched(header, 24, &longer), Err(FrameError::PayloadLen { .. })), "{kind:?}");
        let paid = matches!(kind, FrameKind::Write | FrameKind::ReadReply);
        let more = patched(header, 44, &FrameFlags::MORE.bits().to_le_bytes());
        assert_eq!(more.err(), (!paid).then_some(FrameError::More { kind }), "{kind:?}");
        let cut = patched(header, 16, &header.body_len.saturating_sub(1).to_le_bytes());
        use FrameKind::*;
        let packed =
            matches!(kind, Read | ReadReply | Write | WriteReply | Release | ReleaseReply | Describe);
        assert_eq!(matches!(cut, Err(FrameError::BodyMultiple { .. })), packed, "{kind:?}");
        let deadline = |ms: u32| patched(header, 20, &ms.to_le_bytes()).is_ok();
        assert_eq!(deadline(0), !kind.is_request(), "{kind:?}");
        assert_eq!(deadline(TIMEOUT_MS_MAX), kind.is_request(), "{kind:?}");
        assert!(!deadline(TIMEOUT_MS_MAX + 1), "{kind:?}");
        if let Some(reply) = kind.reply() {
            assert!(!reply.is_request() && patched(header, 46, &[1, 0]).is_err(), "{kind:?}");
        }
    }
    let header = FrameHeader::new(FrameKind::Exist, 1);
    assert_eq!(patched(header, 0, b"MTF2"), Err(FrameError::Magic { found: u32::from_le_bytes(*b"MTF2") }));
    assert_eq!(patched(header, 4, &[2, 0]), Err(FrameError::Version { found: 2 }));
    assert_eq!(patched(header, 6, &[0, 0]), Err(FrameError::Kind { found: 0 }));
    assert_eq!(patched(header, 6, &[54, 0]), Err(FrameError::Kind { found: 54 }));
    assert_eq!(patched(header, 44, &[2, 0]), Err(FrameError::Flags { found: 2 }));
    assert_eq!(patched(header, 50, &[1]), Err(FrameError::Reserved));
    assert_eq!(patched(header, 59, &[1]), Err(FrameError::Reserved));
    assert_eq!(patched(header, 48, &GROUPS_MAX.to_le_bytes()), Err(FrameError::Group { found: GROUPS_MAX }));
    assert_eq!(patched(header, 40, &[0, 0, 0x40, 0]), Err(FrameError::Term { found: 1 << 22 }));
    let status = FrameError::Status { kind: FrameKind::Exist, found: 1 };
    assert_eq!(patched(header, 46, &[1, 0]), Err(status));
    let reply = FrameHeader::new(FrameKind::ExistReply, 1);
    assert!(matches!(patched(reply, 46, &[99, 0]), Err(FrameError::Status { .. })));
}

/// The operations of a frame are compared with its header.
#[test]
fn transfer_ops_that_contradict_frame_header_are_rejected() {
    for (kind, op) in [
        (FrameKind::Read, OpKind::Read),
        (FrameKind::Write, OpKind::Write),
        (FrameKind::Release, OpKind::Release),
        (FrameKind::Describe, OpKind::Read),
    ] {
        let g = &mut Gen::new(7);
        let ops: Vec<_> = (0..3).map(|_| TransferOp { len: 1000, ..g.op_of(op) }).collect();
        let body = ops.iter().copied().collect::<PackedBuilder<_>>().finish();
        let mut header = FrameHeader { body_len: 240, ..FrameHeader::new(kind, 1) };
        header.payload_len = if kind == FrameKind::Write { 3000 } else { 0 };
        assert!(TransferOps::decode(&header, &body).unwrap().ops().iter().eq(ops));
        let announced = 160;
        let shorter = FrameHeader { body_len: announced, ..header };
        assert_eq!(
            TransferOps::decode(&shorter, &body),
            Err(TransferOpsError::BodyLen { found: 240, announced })
        );
        if kind == FrameKind::Write {
            let less = FrameHeader { payload_len: 2999, ..header };
            let error = TransferOpsError::Payload { found: 3000, payload_len: 2999 };
            assert_eq!(TransferOps::decode(&less, &body), Err(error));
        }
        let found = if op == OpKind::Read { OpKind::Write } else { OpKind::Read };
        let other = [
            &body[..80],
            &g.packed(
                2,
                if op == OpKind::Read { |g| g.op_of(OpKind::Write) } else { |g| g.op_of(OpKind::Read) },
            ),
        ]
        .concat();
        let error = TransferOpsError::Kind { index: 1, found, kind };
        assert_eq!(TransferOps::decode(&header, &other), Err(error));
        let mut broken = body.clone();
        broken[80] = 0;
        let error = TransferOps::decode(&header, &broken).unwrap_err();
        assert!(matches!(error, TransferOpsError::Packed(PackedError::Record { index: 1, .. })), "{error}");
    }
    for &kind in FrameKind::ALL {
        use FrameKind::*;
        if !matches!(kind, Read | Write | Release | Describe) {
            let error = TransferOps::decode(&FrameHeader::new(kind, 1), &[]);
            assert_eq!(error, Err(TransferOpsError::Frame { kind }));
        }
    }
}

#[test]
fn longer_hello_decodes_ignoring_trailing_bytes() {
    let hello = Gen::new(1).hello();
    let mut body = vec![];
    hello.encode(&mut body);
    assert_eq!(Hello::decode_body(&body), Ok(hello));
    assert!(Hello::decode_body(&body[..95]).is_err());
    body.resize(HELLO_BYTES_MAX, 7);
    assert_eq!(Hello::decode_body(&body), Ok(hello));
    let header = FrameHeader { body_len: body.len() as u32, ..FrameHeader::new(FrameKind::Hello, 1) };
    assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
}

#[test]
fn transfer_op_limits_are_enforced() {
    let op = |f: fn(&mut TransferOp)| {
        let mut ops = (0..).map(|seed| Gen::new(seed).transfer_op());
        let mut op = ops.find(|op| op.flags == OpFlags::NONE).unwrap();
        f(&mut op);
        // The encoder rejects the same values as the decoder; this test uses the encoder.
        std::panic::catch_unwind(|| op.encode(&mut vec![])).is_ok()
    };
    assert!(op(|op| op.len = FRAME_PAYLOAD_BYTES_MAX));
    assert!(!op(|op| op.len = FRAME_PAYLOAD_BYTES_MAX + 1));
    assert!(op(|op| (op.offset, op.len) = (OBJECT_BYTES_MAX - 1, 1)));
    assert!(!op(|op| (op.offset, op.len) = (OBJECT_BYTES_MAX, 1)));
    assert!(!op(|op| op.offset = u64::MAX));
    assert!(op(|op| op.stripe = STRIPES_MAX as u16 - 1));
    assert!(!op(|op| op.stripe = STRIPES_MAX as u16));
    assert!(!op(|op| (op.kind, op.flags) = (OpKind::Read, OpFlags::DISK)), "a disk read names no slot");
    assert!(!op(|op| op.kind = OpKind::Load), "a load is from disk");
    let many = Gen::new(1).packed(OPS_PER_FRAME_MAX + 1, Gen::transfer_op);
    assert!(Packed::<TransferOp>::decode(&many[TransferOp::BYTES..], OPS_PER_FRAME_MAX).is_ok());
    assert!(Packed::<TransferOp>::decode(&many, OPS_PER_FRAME_MAX).is_err());
}

/// A change of any byte of any record is rejected, or changes the decoded value.
#[test]
fn changed_record_byte_is_rejected_or_changes_value() {
    fn check<T: FixedRecord + PartialEq>(record: T) {
        let mut bytes = vec![];
        record.encode(&mut bytes);
        for at in 0..T::BYTES {
            for flip in [1, 0x80, 0xff] {
                let mut changed = bytes.clone();
                changed[at] ^= flip;
                let same = T::decode(&changed).is_ok_and(|decoded| decoded == record);
                assert!(!same, "byte {at} of {} is ignored", T::NAME);
            }
        }
        assert_eq!(T::FIELDS.iter().map(|f| f.bytes).sum::<usize>(), T::BYTES);
    }
    for seed in 0..50 {
        let g = &mut Gen::new(seed);
        check(g.transfer_op());
        let (entry, handles) = g.object();
        check(entry);
        handles.into_iter().for_each(check);
        check(g.put_entry());
        check(g.put_end_entry());
        check(g.commit_entry());
        check(g.versioned_id());
        check(g.report_record());
        check(g.offload_record());
        check(g.command());
        check(g.command_result());
        check(g.hello());
    }
}

/// Limits of group maps, mount results and stripe roots, each exceeded where no other check fails first.
#[test]
fn group_map_mount_and_stripe_root_limits_are_enforced() {
    let map = |f: fn(&mut v1::GroupMap)| {
        let mut map = Gen::new(1).group_map();
        f(&mut map);
        convert::GroupMap::from_wire(&map).map(|_| ()).map_err(|error| error.code())
    };
    assert_eq!(map(|_| {}), Ok(()));
    assert_eq!(map(|m| m.masters[0].grpc_address.clear()), Err(ErrorCode::InvalidArgument));
    assert_eq!(map(|m| m.masters[0].frame_address.clear()), Ok(()));
    let too_long: fn(&mut v1::GroupMap) = |m| m.masters[0].frame_address = "a".repeat(ADDRESS_BYTES_MAX + 1);
    assert_eq!(map(too_long), Err(ErrorCode::TooLarge));
    let too_many: fn(&mut v1::GroupMap) =
        |m| m.masters = vec![m.masters[2].clone(); usize::from(GROUPS_MAX) + 1];
    assert_eq!(map(too_many), Err(ErrorCode::TooLarge));
    let results = |count: usize| vec![v1::MountResult::default(); count];
    edge!(MountSegmentsResponse, TooLarge, |m| m.results = results(BATCH_KEYS_MAX), {
        m.results = results(BATCH_KEYS_MAX + 1)
    });
    edge!(OpenSessionResponse, InvalidArgument, |m| m.protocol = 1, m.protocol = 0);
    let entry = PutEndEntry { stripe_count: STRIPES_MAX as u16, ..Gen::new(1).put_end_entry() };
    let entries = |count| std::iter::repeat_n(entry, count).collect::<PackedBuilder<_>>().finish();
    edge!(
        PutEndRequest,
        TooLarge,
        |m| (m.entries, m.stripe_roots) = (entries(128).into(), vec![1; HANDLES_PER_RESPONSE_MAX]),
        (m.entries, m.stripe_roots) = (entries(129).into(), vec![1; HANDLES_PER_RESPONSE_MAX + 1024])
    );
}
