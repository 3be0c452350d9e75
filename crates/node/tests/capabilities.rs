//! Capabilities for records on a node's disk and in its staging memory, with a real master. Those for records in memory are
//! tested in `src/capabilities/matrix.rs`.

mod support;

use moontide_node::{DiskConfig, Node, NodeConfig};
use moontide_proto::convert::{LoadReply, LoadRequest, Wire, decode, encode};
use moontide_proto::limits::OPS_PER_FRAME_MAX;
use moontide_proto::{
    Capability, Codes, FrameKind, Handle, OpFlags, OpKind, Packed, PackedBuilder, TransferOp, v1,
};
use moontide_transfer::{Link, Op, PeerIdentity, Target, call, run, serve_read};
use moontide_types::{ErrorCode, Medium, Tenant};
use support::*;

const LEN: usize = 300_000;

/// Puts more than fits into memory, and returns an object that is only on the disk.
fn object_on_disk(client: &Client<'_>, link: &dyn Link) -> (u64, Reserved) {
    for n in 0..300 {
        client.put(link, &format!("object-{n}"), &content(n, LEN));
        if n % 20 < 19 {
            continue;
        }
        for n in 0..n {
            let Ok(found) = client.lookup(&format!("object-{n}")) else { continue };
            if found.handles[0].medium == Medium::Disk {
                return (n, found);
            }
        }
    }
    panic!("nothing was evicted to the disk");
}

fn disk_target(found: &Reserved, capability: Capability) -> Target {
    let handle = Handle { capability, ..found.handles[0] };
    Target { flags: OpFlags::DISK, ..target(&found.object, found.id, &handle) }
}

fn load_request(target: &Target) -> Vec<u8> {
    let ops: PackedBuilder<TransferOp> = [target.to_wire(OpKind::Load, 0, LEN as u64)].into_iter().collect();
    let ops = ops.finish();
    let request = LoadRequest { ops: Packed::decode(&ops, OPS_PER_FRAME_MAX).unwrap(), lease_ms: 5_000 };
    encode(&request).unwrap()
}

fn release_request(target: &Target) -> Vec<u8> {
    let ops: PackedBuilder<TransferOp> =
        [target.to_wire(OpKind::Release, 0, LEN as u64)].into_iter().collect();
    ops.finish()
}

/// Loads the first bytes of a record. Returns the handle in staging memory.
fn load(link: &dyn Link, target: &Target) -> Result<Handle, ErrorCode> {
    loaded(call(link, FrameKind::Load, load_request(target), deadline()).unwrap())
}

fn loaded(reply: Vec<u8>) -> Result<Handle, ErrorCode> {
    let reply: v1::LoadReply = decode(reply.into()).unwrap();
    let reply = LoadReply::from_wire(&reply).unwrap();
    let (entry, handles) = reply.list.iter().next().unwrap();
    entry.code.map_or_else(|| Ok(handles.iter().next().unwrap()), Err)
}

fn release(link: &dyn Link, target: &Target) -> Option<ErrorCode> {
    first_code(call(link, FrameKind::Release, release_request(target), deadline()).unwrap())
}

fn first_code(reply: Vec<u8>) -> Option<ErrorCode> {
    Codes::decode(&reply, OPS_PER_FRAME_MAX).unwrap().iter().next().unwrap()
}

fn read(link: &dyn Link, target: &Target) -> Result<Vec<u8>, ErrorCode> {
    let mut bytes = vec![0; LEN];
    let mut ops = [Op::get(*target, 0, &mut bytes)];
    run(link, &mut ops, deadline()).unwrap();
    let outcome = ops[0].outcome().unwrap();
    outcome.map(|()| bytes)
}

#[test]
fn records_on_disk_and_in_staging_need_capabilities() {
    init_logs();
    let (master, dir) = (master(), TempDir::new());
    let config = NodeConfig {
        memory_bytes: 24 << 20,
        disk: Some(DiskConfig { staging_bytes: 32 << 20, ..DiskConfig::new(dir.0.clone()) }),
        ..node_config(master.addresses().grpc)
    };
    let node = Node::start(config).unwrap();
    assert!(node.wait_until_mounted(TIMEOUT));
    let client = Client::new(&master);
    let (tcp, shm) = (tcp(&node), shm(&node));
    let (number, found) = object_on_disk(&client, &*tcp);
    let granted = found.handles[0].capability;
    // A capability for another record, which may be in memory or on the disk.
    let other = client.put(&*tcp, "other", b"bytes");
    let of_other = client.lookup("other").unwrap().handles[0].capability;
    let wrong = [Capability::default(), Capability([7; 16]), other.handles[0].capability, of_other];
    let refused = || metric(&node, "capabilities_refused_total");
    let before = refused();
    for capability in wrong {
        let target = disk_target(&found, capability);
        assert_eq!(read(&*tcp, &target), Err(ErrorCode::PermissionDenied));
        for link in [&tcp, &shm] {
            assert_eq!(load(&**link, &target).map(|_| ()), Err(ErrorCode::PermissionDenied));
        }
    }
    assert_eq!(refused() - before, 12);
    let target = disk_target(&found, granted);
    assert!(read(&*tcp, &target).unwrap() == content(number, LEN));
    let staged = load(&*shm, &target).unwrap();
    let in_staging = |capability| {
        let handle = Handle { capability, ..staged };
        support::target(&found.object, found.id, &handle)
    };
    for capability in wrong.into_iter().chain([granted]) {
        assert_eq!(release(&*shm, &in_staging(capability)), Some(ErrorCode::PermissionDenied));
    }
    // The node's own capability is for this record in staging alone.
    let moved = Target { slot: moontide_types::SlotId(staged.slot.0 + 1), ..in_staging(staged.capability) };
    assert_eq!(release(&*shm, &moved), Some(ErrorCode::PermissionDenied));
    assert_eq!(
        load(&*shm, &disk_target(&found, staged.capability)).map(|_| ()),
        Err(ErrorCode::PermissionDenied)
    );
    // A certificate of another tenant is refused with each of the capabilities; that of the tenant of the record is not.
    let owner = node.owner();
    let peer = PeerIdentity::Remote(1);
    for (tenant, expected) in
        [("other", Err(ErrorCode::PermissionDenied)), (Tenant::DEFAULT.as_str(), Ok(()))]
    {
        let op = target.to_wire(OpKind::Read, 0, LEN as u64);
        let bytes = serve_read(&*owner, Some(tenant), &op, deadline(), || ());
        assert_eq!(bytes.map(|bytes| assert!(bytes == content(number, LEN))), expected, "read by {tenant}");
        let call = |kind, body: Vec<u8>| owner.call(peer, Some(tenant), kind, &body, deadline()).unwrap();
        let loaded = loaded(call(FrameKind::Load, load_request(&target)));
        assert_eq!(loaded.map(|_| ()), expected, "load by {tenant}");
        let released = first_code(call(FrameKind::Release, release_request(&in_staging(staged.capability))));
        assert_eq!(released.map_or(Ok(()), Err), expected, "release by {tenant}");
    }
    assert_eq!(release(&*shm, &in_staging(staged.capability)), None);
}
