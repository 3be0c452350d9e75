//! Device segments, with the fake driver: operations of the node and its clients, and that the payload region in host
//! memory is not used for the bytes.

#[path = "../../heap/tests/common/mod.rs"]
mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use common::{TestNode, id_of, now, record_of};
use moontide_heap::{
    BeginError, DeviceSlice, Grant, HugePages, Lookup, NodeHeap, PayloadMemory, PayloadWriter, SegmentError,
    SharedReader,
};
use moontide_symmetric::{
    DeviceConfig, DeviceWorld, DeviceWorldConfig, Driver, Rank, Vendor, World, WorldConfig, WorldShape,
};
use moontide_types::record::{RecordFlags, RecordLayout, State};
use moontide_types::{Epoch, ErrorCode, Extent, SegmentId, SlotId, Span, Term};

const BYTES: u64 = 64 << 10;

/// The fake driver, which cargo built beside the tests.
fn fake() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().join("libmoontide_fakedriver.so")
}

/// Joins a world of one rank, and its device world.
fn worlds(vendor: Vendor) -> (Arc<World>, Arc<DeviceWorld>) {
    // Tests of one process run concurrently: each world has its own socket.
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("moontide-{}-segments-{vendor}-{number}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let config = WorldConfig {
        path: path.clone(),
        rank: Rank(0),
        shape: WorldShape { ranks: 1, bytes: 1 << 20 },
        huge: HugePages::Auto,
        timeout: Duration::from_secs(10),
    };
    // SAFETY: this process is the world's only rank, and uses its region only as below.
    let world = unsafe { World::join(&config) }.unwrap();
    let driver = Driver::load(vendor, Some(&fake())).unwrap();
    let region = DeviceConfig { device: 0, bytes: 1 << 20, peers: &[], sharing: None };
    let config = DeviceWorldConfig { path: &path, region, timeout: Duration::from_secs(10) };
    // SAFETY: as above.
    let device = unsafe { DeviceWorld::join(&world, driver, &config) }.unwrap();
    (Arc::new(world), Arc::new(device))
}

fn node_on(world: &World, device: &Arc<DeviceWorld>) -> TestNode {
    let make = |heap: &NodeHeap, slots| {
        // SAFETY: only this segment uses the second 64 KiB of both regions.
        let address_range = unsafe { world.reserve(BYTES, BYTES) }.unwrap();
        let slice = DeviceSlice::new(Arc::clone(device), BYTES, BYTES);
        // SAFETY: as above.
        unsafe { heap.add_device_segment(slots, address_range, slice) }.unwrap()
    };
    TestNode::with_segments(1, 1, 4, BYTES, make)
}

fn begin(node: &TestNode, slot: u32, flags: RecordFlags, writer: PayloadWriter) -> Result<Epoch, BeginError> {
    let record = moontide_heap::RecordSpec { flags, ..record_of(b"k", 5000) };
    let layout = RecordLayout::new(5000, record.key.encoded_len() as u32, 0, flags).unwrap();
    let term = Term::new(common::TERM).unwrap();
    let epoch = Epoch::new(term, 7).unwrap();
    let extent = Extent { start: slot * 16, units: layout.units() };
    node.heap.begin(SegmentId(0), &Grant { slot: SlotId(slot), epoch, term, extent, record, writer })?;
    Ok(epoch)
}

fn on_each_vendor(test: impl Fn(Arc<World>, Arc<DeviceWorld>)) {
    for vendor in Vendor::ALL {
        let (world, device) = worlds(vendor);
        test(world, device);
    }
}

#[test]
fn device_record_is_written_by_copy_and_not_readable_zero_copy() {
    on_each_vendor(|world, device| {
        let node = node_on(&world, &device);
        let client = Arc::new(node.connect("device-client"));
        assert_eq!(client.medium(SegmentId(0)), Some(PayloadMemory::Device));
        let writer = PayloadWriter::Client(client.client());
        let epoch = begin(&node, 1, RecordFlags::DIGESTLESS, writer).unwrap();
        let (segment, slot) = (SegmentId(0), SlotId(1));
        let mut reader = client.reader().unwrap();
        let claim = reader.claim(segment, slot, epoch).unwrap();
        assert_eq!(claim.payload(), None, "the payload has an address of the host");
        let offset = claim.header().payload_offset;
        device.region(Rank(0)).write(BYTES + offset, &[0x5a; 5000]).unwrap();
        drop(claim);
        node.heap.commit(segment, slot, epoch, 0, writer).unwrap();

        // Zero-copy readers miss, by id and by location; a slot hold shows that the record is complete.
        assert!(matches!(reader.get(&id_of(b"k"), now()), Lookup::Miss));
        assert!(matches!(reader.get_at(segment, slot, epoch, now()), Lookup::Miss));
        let hold = SharedReader::new(Arc::clone(&client)).unwrap().stay(segment, slot, epoch).unwrap();
        assert_eq!((hold.state(), hold.complete_span()), (Some(State::Ready), Span::new(offset, 5000)));
        assert_eq!(hold.payload(Span::new(offset, 5000).unwrap()), None);

        // The node has header, key and attributes, and copies the bytes out.
        let pin = node.heap.pin(segment, slot, epoch).unwrap();
        assert!(pin.is_in_device());
        assert_eq!(pin.copy_out(Span::new(4990, 10).unwrap()).unwrap(), [0x5a; 10]);
        let mut keys = Vec::new();
        node.heap.segments()[0].for_each_record(|_, _, trailer| {
            keys.push(trailer.unwrap().key.as_bytes().to_vec());
        });
        assert_eq!(keys, [b"k".to_vec()]);
        // SAFETY: no thread writes the region during the life of the slice.
        let host_bytes = unsafe {
            let at = world.at(Rank(0), BYTES + offset, 5000);
            std::slice::from_raw_parts(at.as_ptr(), 5000)
        };
        assert!(host_bytes.iter().all(|byte| *byte == 0), "host memory contains record bytes");
    });
}

#[test]
fn device_segment_refuses_digests_and_node_writer() {
    on_each_vendor(|world, device| {
        let node = node_on(&world, &device);
        let client = node.connect("device-refused");
        let refused = |flags, writer| match begin(&node, 0, flags, writer) {
            Err(error @ BeginError::Device(_)) => error.code() == ErrorCode::Unsupported,
            _ => false,
        };
        assert!(
            refused(RecordFlags::NONE, PayloadWriter::Client(client.client())),
            "a host thread would have to compute its digests"
        );
        assert!(
            refused(RecordFlags::NONE, PayloadWriter::Node)
                && refused(RecordFlags::DIGESTLESS, PayloadWriter::Node)
        );
        node.assert_empty();
    });
}

#[test]
fn device_segment_with_mismatched_length_is_rejected() {
    on_each_vendor(|world, device| {
        let make = |heap: &NodeHeap, slots| {
            // SAFETY: rejected, or used by this segment only.
            let address_range = unsafe { world.reserve(BYTES, BYTES) }.unwrap();
            let slice = DeviceSlice::new(Arc::clone(&device), BYTES, BYTES - 4096);
            // SAFETY: as above.
            let short = unsafe { heap.add_device_segment(slots, address_range, slice) };
            assert!(matches!(short, Err(SegmentError::Region(_))), "{short:?}");
            heap.add_segment(slots, (BYTES / 512) as u32, HugePages::Auto).unwrap()
        };
        TestNode::with_segments(1, 1, 4, BYTES, make).assert_empty();
        let beyond = std::panic::catch_unwind(|| DeviceSlice::new(Arc::clone(&device), 1 << 20, 4096));
        assert!(beyond.is_err(), "a slice beyond the region's end was created");
    });
}
