//! Limits of calls to nodes: loads, attachments of engines and descriptions of records.

use super::*;

#[test]
fn load_message_limits_are_enforced() {
    edge!(LoadRequest, TooLarge, |m| m.lease_ms = LEASE_MS_MAX, m.lease_ms += 1);
    edge!(LoadRequest, InvalidArgument, |m| m.lease_ms = 1, m.lease_ms = 0);
    let g = &mut Gen::new(1);
    let ops = g.packed(OPS_PER_FRAME_MAX + 1, |g| g.op_of(OpKind::Load));
    let max = ops.slice(TransferOp::BYTES..);
    edge!(LoadRequest, TooLarge, |m| m.ops = max.clone(), m.ops = ops.clone());
    edge!(LoadRequest, InvalidArgument, |m| m.ops = ops.slice(..TransferOp::BYTES), m.ops = Bytes::new());
    let reads = g.packed(1, |g| g.op_of(OpKind::Read));
    edge!(LoadRequest, InvalidArgument, |m| m.lease_ms = 1, m.ops = reads.clone());
    let request = v1::LoadRequest { ops: max, lease_ms: LEASE_MS_MAX };
    let encoded = convert::encode(&convert::LoadRequest::from_wire(&request).unwrap()).unwrap();
    assert!(encoded.len() <= FrameKind::Load.body_len_max());

    let handle = g.handle(Stripe { index: 0, count: 1, offset: 0, len: 5 }, 1);
    let entry = ObjectEntry { object_len: 5, replica_count: 2, ..g.whole_object().0 };
    let full = |count| {
        let mut list = ObjectListBuilder::with_capacity(convert::ObjectListKind::Load, count);
        (0..count).for_each(|_| list.push(entry, &[handle], &[]).unwrap());
        list.finish()
    };
    edge!(
        LoadReply,
        TooLarge,
        |m| ObjectFields { objects: m.objects, handles: m.handles, .. } = full(OPS_PER_FRAME_MAX),
        ObjectFields { objects: m.objects, handles: m.handles, .. } = full(OPS_PER_FRAME_MAX + 1)
    );
    let fields = full(OPS_PER_FRAME_MAX);
    let reply = v1::LoadReply { objects: fields.objects, handles: fields.handles };
    let encoded = convert::encode(&convert::LoadReply::from_wire(&reply).unwrap()).unwrap();
    assert!(encoded.len() <= FrameKind::LoadReply.body_len_max());
    let mut list = ObjectListBuilder::with_capacity(convert::ObjectListKind::Load, 1);
    let both = [Handle { replica: 0, ..handle }, handle];
    assert!(list.push(entry, &both, &[]).is_err(), "a load has one staging slot");
    list.push(ObjectEntry::failed(ErrorCode::NotFound, 0), &[], &[]).unwrap();
}

#[test]
fn attach_message_limits_are_enforced() {
    edge!(AttachRequest, TooLarge, |m| m.engine = "e".repeat(ENGINE_BYTES_MAX), m.engine.push('e'));
    edge!(AttachRequest, InvalidArgument, |m| m.engine = "e".into(), m.engine.clear());
    let request = convert::AttachRequest { engine: &"e".repeat(ENGINE_BYTES_MAX) };
    assert!(convert::encode(&request).unwrap().len() <= FrameKind::Attach.body_len_max());

    let bytes = |len| Bytes::from(vec![1; len]);
    let (segment, generation) = (SEGMENTS_PER_NODE_MAX - 1, u64::MAX);
    let region = |len| v1::AttachedRegion { segment, generation, key: bytes(len) };
    let beyond = v1::AttachedRegion { segment: segment + 1, ..region(1) };
    edge!(AttachReply, TooLarge, |m| m.address = bytes(ATTACH_BYTES_MAX), {
        m.address = bytes(ATTACH_BYTES_MAX + 1)
    });
    edge!(AttachReply, TooLarge, |m| m.regions = vec![region(ATTACH_KEY_BYTES_MAX)], {
        m.regions = vec![region(ATTACH_KEY_BYTES_MAX + 1)]
    });
    edge!(AttachReply, InvalidArgument, |m| m.regions = vec![region(1)], m.regions = vec![region(0)]);
    edge!(AttachReply, TooLarge, |m| m.regions = vec![region(1)], m.regions = vec![beyond.clone()]);
    let regions = vec![region(ATTACH_KEY_BYTES_MAX); ATTACH_REGIONS_MAX];
    edge!(AttachReply, TooLarge, |m| m.regions = regions.clone(), m.regions.push(region(1)));
    // The largest reply has the size that limits.rs states, and fits into a frame.
    let reply = v1::AttachReply { address: bytes(ATTACH_BYTES_MAX), regions };
    let encoded = convert::encode(&convert::AttachReply::from_wire(&reply).unwrap()).unwrap();
    assert_eq!(encoded.len(), 8_478_723);
    assert!(encoded.len() <= FrameKind::AttachReply.body_len_max());
}

#[test]
fn describe_reply_limits_are_enforced() {
    let reply = |codes: &[Option<ErrorCode>], records: &[&[u8]]| {
        let (mut packed_codes, mut packed) = (CodesBuilder::default(), PackedBytesBuilder::new());
        codes.iter().for_each(|code| packed_codes.push(*code));
        records.iter().for_each(|record| packed.push(record).unwrap());
        v1::DescribeReply { codes: packed_codes.finish().into(), records: packed.finish().into() }
    };
    let gone = Some(ErrorCode::Gone);
    edge!(DescribeReply, InvalidArgument, |m| *m = reply(&[None], &[b"r"]), *m = reply(&[None], &[b""]));
    edge!(DescribeReply, InvalidArgument, |m| *m = reply(&[gone], &[b""]), *m = reply(&[gone], &[b"r"]));
    edge!(DescribeReply, InvalidArgument, |m| *m = reply(&[None], &[b"r"]), *m = reply(&[None], &[]));
    let of = |count| reply(&vec![None; count], &vec![&b"r"[..]; count]);
    edge!(DescribeReply, TooLarge, |m| *m = of(OPS_PER_FRAME_MAX), *m = of(OPS_PER_FRAME_MAX + 1));
}
