//! Everything that is written is read back as it was, and nothing else is read.

mod generate;

use generate::{Gen, MESSAGES};
use moontide_proto::convert::{self, Wire};
use moontide_proto::*;
use moontide_types::Key;
use proptest::prelude::*;
use prost::Message;
use prost::bytes::Bytes;

/// Plain struct → message → plain struct; and the generator's message is what comes out.
macro_rules! check_message {
    ($name:ident, $encoded:expr) => {{
        let message: <convert::$name as Wire>::Message =
            convert::decode(Bytes::from($encoded.clone())).unwrap();
        let plain = convert::$name::from_wire(&message).unwrap_or_else(|e| panic!("{e}: {message:?}"));
        let again = plain.to_wire();
        assert_eq!(again, message, "what was sent must be what was meant");
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
    RemoveByRegexRequest RemoveAllRequest GetJobRequest JobProgress ListKeysRequest QueryKeysRequest EvictRequest
    SetTenantQuotaRequest GetTenantsRequest ListSegmentsRequest DrainSegmentRequest ClusterInfo
    LoadRequest LoadReply AttachRequest AttachReply NodeList Bequest
    GetDeparturesRequest GetDeparturesResponse
}

/// A record comes back; none of its cuts does; and its length is the one announced.
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
    fn messages_come_back(seed: u64, index in 0..MESSAGES.len()) {
        check_message_named(MESSAGES[index], Gen(seed).message(index));
    }

    #[test]
    fn records_come_back(seed: u64) {
        let g = &mut Gen(seed);
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
        check_record(g.order());
        check_record(g.order_result());
        check_record(g.hello());
    }

    #[test]
    fn frame_headers_come_back(seed: u64) {
        let header = Gen(seed).frame_header();
        prop_assert_eq!(FrameHeader::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn keys_come_back(keys in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..200), 0..50)) {
        let mut builder = PackedKeysBuilder::new();
        keys.iter().for_each(|key| builder.push(Key::new(key).unwrap()).unwrap());
        let encoded = builder.finish();
        let packed = PackedKeys::decode(&encoded).unwrap();
        prop_assert_eq!(packed.len(), keys.len());
        prop_assert!(packed.iter().map(Key::as_bytes).eq(keys.iter().map(|key| &key[..])));
    }

    #[test]
    fn bits_come_back(bits in prop::collection::vec(any::<bool>(), 0..100)) {
        let encoded = bits.iter().copied().collect::<BitmapBuilder>().finish();
        let bitmap = Bitmap::decode(&encoded, bits.len()).unwrap();
        prop_assert!(bitmap.iter().eq(bits.iter().copied()));
        prop_assert_eq!(bitmap.get(bits.len()), None);
        prop_assert_eq!(bitmap.count_ones(), bits.iter().filter(|&&bit| bit).count());
    }
}

#[test]
fn every_message_has_a_check() {
    for (index, name) in MESSAGES.iter().enumerate() {
        for seed in 0..20 {
            check_message_named(name, Gen(seed).message(index));
        }
    }
}

#[test]
fn a_cut_message_never_panics() {
    // Protobuf cannot tell every cut from a shorter message; converting what is left must be total.
    for index in 0..MESSAGES.len() {
        let encoded = Gen(index as u64).message(index);
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
fn every_cut_of_packed_keys_is_noticed() {
    let encoded = Gen(3).keys(5);
    assert!(PackedKeys::decode(&encoded).is_ok());
    for len in 0..encoded.len() {
        assert!(PackedKeys::decode(&encoded[..len]).is_err(), "cut to {len}");
    }
    let longer = [&encoded[..], &[0]].concat();
    assert_eq!(PackedKeys::decode(&longer), Err(PackedError::Excess { left: 1 }));
}

#[test]
fn every_cut_of_packed_records_is_noticed_or_a_shorter_array() {
    let encoded = Gen(4).packed(3, Gen::transfer_op);
    for len in 0..=encoded.len() {
        let whole = len % TransferOp::BYTES == 0;
        assert_eq!(Packed::<TransferOp>::decode(&encoded[..len], 3).is_ok(), whole, "cut to {len}");
    }
}

#[test]
fn every_flipped_bit_of_a_frame_header_is_noticed() {
    let good = Gen(5).frame_header().encode();
    for bit in 0..good.len() * 8 {
        let mut bad = good;
        bad[bit / 8] ^= 1 << (bit % 8);
        assert!(FrameHeader::decode(&bad).is_err(), "bit {bit}");
    }
}
