//! Records, packed arrays and messages round-trip; truncated or extended bytes are rejected.

mod generate;

use generate::{Gen, MESSAGES};
use moontide_proto::convert::{self, Wire};
use moontide_proto::*;
use moontide_types::Key;
use proptest::prelude::*;
use prost::Message;
use prost::bytes::Bytes;

/// Checks plain struct → message → plain struct, and that the result is the generated message.
macro_rules! check_message {
    ($name:ident, $encoded:expr) => {{
        let message: <convert::$name as Wire>::Message =
            convert::decode(Bytes::from($encoded.clone())).unwrap();
        let plain = convert::$name::from_wire(&message).unwrap_or_else(|e| panic!("{e}: {message:?}"));
        let again = plain.to_wire();
        assert_eq!(again, message, "round trip changed the message");
        assert_eq!(convert::$name::from_wire(&again).unwrap(), plain);
        assert_eq!(again.encode_to_vec(), $encoded);
    }};
}

macro_rules! message_checks {
    ($($name:ident)*) => {
        fn check_message_named(name: &str, encoded: Vec<u8>) {
            match name {
                $(stringify!($name) => check_message!($name, encoded),)*
                other => panic!("{other} has no check"),
            }
        }
    };
}
message_checks! {
    ExistRequest ExistResponse GetReplicaListRequest GetReplicaListResponse PutStartRequest PutStartResponse
    PutEndRequest PutRevokeRequest RemoveRequest TouchRequest SetPinRequest PrefetchRequest OutcomesResponse
    BeginRequest CommitRequest SlotOutcomes OpenSessionRequest OpenSessionResponse MountSegmentsRequest
    MountSegmentsResponse UnmountSegmentsRequest NodeMessage MasterMessage RemoveByPrefixRequest
    RemoveByRegexRequest RemoveAllRequest GetJobRequest GetJobResponse ListKeysRequest QueryKeysRequest EvictRequest
    SetTenantQuotaRequest GetTenantsRequest ListSegmentsRequest DrainSegmentRequest DrainNodeRequest
    GetClusterInfoResponse
    LoadRequest LoadReply AttachRequest AttachReply DescribeReply GetNodesResponse HandoffGroupRequest
    PollInvalidationsRequest PollInvalidationsResponse
}

/// Checks that a record round-trips, that its truncations are rejected, and that it has its declared length.
fn check_record<T: FixedRecord + PartialEq + std::fmt::Debug>(record: T) {
    let mut bytes = vec![];
    record.encode(&mut bytes);
    assert_eq!(bytes.len(), T::BYTES);
    assert_eq!(T::decode(&bytes), Ok(record));
    for len in 0..bytes.len() {
        assert!(T::decode(&bytes[..len]).is_err(), "{} cut to {len}", T::NAME);
    }
    bytes.push(0);
    assert!(T::decode(&bytes).is_err(), "{} with a byte more", T::NAME);
}

proptest! {
    #[test]
    fn messages_round_trip(seed: u64, index in 0..MESSAGES.len()) {
        check_message_named(MESSAGES[index], Gen::new(seed).message(index));
    }

    #[test]
    fn records_round_trip(seed: u64) {
        let g = &mut Gen::new(seed);
        check_record(g.transfer_op());
        let (object, handles) = g.object();
        check_record(object);
        handles.into_iter().for_each(check_record);
        check_record(g.put_entry());
        check_record(g.put_end_entry());
        check_record(g.commit_entry());
        check_record(g.versioned_id());
        check_record(g.report_record());
        check_record(ReportRecord::free(moontide_types::SlotId(7), g.epoch()));
        check_record(g.offload_record());
        check_record(g.command());
        check_record(g.copy_source());
        check_record(g.command_result());
        check_record(g.hello());
    }

    #[test]
    fn frame_headers_round_trip(seed: u64) {
        let header = Gen::new(seed).frame_header();
        prop_assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn packed_keys_round_trip(keys in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..200), 0..50)) {
        let mut builder = PackedKeysBuilder::new();
        keys.iter().for_each(|key| builder.push(Key::new(key).unwrap()).unwrap());
        let encoded = builder.finish();
        let packed = PackedKeys::decode(&encoded).unwrap();
        prop_assert_eq!(packed.len(), keys.len());
        prop_assert!(packed.iter().map(Key::as_bytes).eq(keys.iter().map(|key| &key[..])));
    }

    #[test]
    fn bitmaps_round_trip(bits in prop::collection::vec(any::<bool>(), 0..100)) {
        let encoded = bits.iter().copied().collect::<BitmapBuilder>().finish();
        let bitmap = Bitmap::decode(&encoded, bits.len()).unwrap();
        prop_assert!(bitmap.iter().eq(bits.iter().copied()));
        prop_assert_eq!(bitmap.get(bits.len()), None);
        prop_assert_eq!(bitmap.count_ones(), bits.iter().filter(|&&bit| bit).count());
    }
}

#[test]
fn every_message_type_round_trips() {
    for (index, name) in MESSAGES.iter().enumerate() {
        for seed in 0..20 {
            check_message_named(name, Gen::new(seed).message(index));
        }
    }
}

#[test]
fn truncated_message_never_panics() {
    // Protobuf accepts some truncated messages as shorter ones; their conversion must not panic.
    for index in 0..MESSAGES.len() {
        let encoded = Gen::new(index as u64).message(index);
        for len in 0..encoded.len() {
            let cut = Bytes::copy_from_slice(&encoded[..len]);
            if let Ok(message) = v1::NodeMessage::decode(cut.clone()) {
                let _ = convert::NodeMessage::from_wire(&message);
            }
            if let Ok(message) = v1::PutStartRequest::decode(cut.clone()) {
                let _ = convert::PutStartRequest::from_wire(&message);
            }
            if let Ok(message) = v1::GetReplicaListResponse::decode(cut) {
                let _ = convert::GetReplicaListResponse::from_wire(&message);
            }
        }
    }
}

#[test]
fn truncated_or_extended_packed_keys_are_rejected() {
    let encoded = Gen::new(3).keys(5);
    assert!(PackedKeys::decode(&encoded).is_ok());
    for len in 0..encoded.len() {
        assert!(PackedKeys::decode(&encoded[..len]).is_err(), "cut to {len}");
    }
    let longer = [&encoded[..], &[0]].concat();
    assert_eq!(PackedKeys::decode(&longer), Err(PackedError::TrailingBytes { left: 1 }));
}

#[test]
fn packed_records_with_partial_record_are_rejected() {
    let encoded = Gen::new(4).packed(3, Gen::transfer_op);
    for len in 0..=encoded.len() {
        let whole = len % TransferOp::BYTES == 0;
        assert_eq!(Packed::<TransferOp>::decode(&encoded[..len], 3).is_ok(), whole, "cut to {len}");
    }
}

#[test]
fn frame_header_bit_flip_is_rejected() {
    let good = Gen::new(5).frame_header().encode();
    for bit in 0..good.len() * 8 {
        let mut bad = good;
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(FrameHeader::decode(&bad).is_err(), "bit {bit}");
    }
}
