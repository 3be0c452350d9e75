//! Segments whose records' bytes are in a device's memory, with the fake driver: what the node and its clients may do with them,
//! and that nobody takes the outline in the host's memory for the bytes.

mod common;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use common::{TestNode, id_of, now, record_of};
use moontide_heap::{
    BeginError, DeviceConfig, DevicePart, DeviceWorld, DeviceWorldConfig, Driver, Grant, HugePages, Lookup,
    Medium, NodeHeap, Rank, SegmentError, SharedReader, Vendor, World, WorldConfig, WorldShape, Writer,
};
use moontide_types::record::{Flags, RecordLayout, State};
use moontide_types::{Epoch, ErrorCode, Extent, SegmentId, SlotId, Span, Term};

const BYTES: u64 = 64 << 10;

/// The fake driver, which cargo built beside the tests.
fn fake() -> PathBuf {
    std::env::current_exe().unwrap().parent().unwrap().join("libmoontide_fakedriver.so")
}

/// A world of one rank, and its memory on a device.
fn worlds(vendor: Vendor) -> (Arc<World>, Arc<DeviceWorld>) {
    let name = format!("moontide-{}-segments-{vendor}", std::process::id());
    let path = std::env::temp_dir().join(name);
    let config = WorldConfig {
        path: path.clone(),
        rank: Rank(0),
        shape: WorldShape { ranks: 1, bytes: 1 << 20 },
        huge: HugePages::IfAllowed,
        timeout: Duration::from_secs(10),
    };
    // SAFETY: this process is the world's only rank, and uses its region as this test says.
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
        // SAFETY: the second 64 KiB of both regions are for this segment alone.
        let outline = unsafe { world.lend(BYTES, BYTES) }.unwrap();
        let part = DevicePart::new(Arc::clone(device), BYTES, BYTES);
        // SAFETY: as above.
        unsafe { heap.add_segment_of_device(slots, outline, part) }.unwrap()
    };
    TestNode::with_segments(1, 1, 4, BYTES, make)
}

fn begin(node: &TestNode, slot: u32, flags: Flags, writer: Writer) -> Result<Epoch, BeginError> {
    let record = moontide_heap::NewRecord { flags, ..record_of(b"k", 5000) };
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
fn device_records_are_written_by_copies_and_read_by_nobody_in_place() {
    on_each_vendor(|world, device| {
        let node = node_on(&world, &device);
        let client = Arc::new(node.join("device-client"));
        assert_eq!(client.medium(SegmentId(0)), Some(Medium::Device));
        let writer = Writer::Client(client.client());
        let epoch = begin(&node, 1, Flags::DIGESTLESS, writer).unwrap();
        let (segment, slot) = (SegmentId(0), SlotId(1));
        let mut reader = client.reader().unwrap();
        let claim = reader.claim(segment, slot, epoch).unwrap();
        assert_eq!(claim.payload(), None, "there is nothing to write here");
        let offset = claim.header().payload_offset;
        device.region(Rank(0)).write(BYTES + offset, &[0x5a; 5000]).unwrap();
        drop(claim);
        node.heap.commit(segment, slot, epoch, 0, writer).unwrap();

        // Readers in place are told to ask elsewhere, by either way; who waits for it learns that it is there.
        assert!(matches!(reader.get(&id_of(b"k"), now()), Lookup::Miss));
        assert!(matches!(reader.get_at(segment, slot, epoch, now()), Lookup::Miss));
        let stay = SharedReader::new(Arc::clone(&client)).unwrap().stay(segment, slot, epoch).unwrap();
        assert_eq!((stay.state(), stay.complete_span()), (Some(State::Ready), Span::new(offset, 5000)));
        assert_eq!(stay.payload(Span::new(offset, 5000).unwrap()), None);

        // The node has header, key and attributes, and copies the bytes out.
        let pin = node.heap.pin(segment, slot, epoch).unwrap();
        assert!(pin.is_in_device());
        assert_eq!(pin.copy_out(Span::new(4990, 10).unwrap()).unwrap(), [0x5a; 10]);
        let mut keys = Vec::new();
        node.heap.segments()[0].for_each_record(|_, _, trailer| {
            keys.push(trailer.unwrap().key.as_bytes().to_vec());
        });
        assert_eq!(keys, [b"k".to_vec()]);
        // SAFETY: nobody writes the region meanwhile.
        let outline = unsafe {
            let at = world.at(Rank(0), BYTES + offset, 5000);
            std::slice::from_raw_parts(at.as_ptr(), 5000)
        };
        assert!(outline.iter().all(|byte| *byte == 0), "the host's memory has none of the bytes");
    });
}

#[test]
fn device_records_are_not_begun_by_who_would_fill_them_here() {
    on_each_vendor(|world, device| {
        let node = node_on(&world, &device);
        let client = node.join("device-refused");
        let refused = |flags, writer| match begin(&node, 0, flags, writer) {
            Err(error @ BeginError::Device(_)) => error.code() == ErrorCode::Unsupported,
            _ => false,
        };
        assert!(refused(Flags::NONE, Writer::Client(client.client())), "its digests are a processor's");
        assert!(refused(Flags::NONE, Writer::Node) && refused(Flags::DIGESTLESS, Writer::Node));
        node.assert_empty();
    });
}

#[test]
fn device_segments_have_as_many_bytes_there_as_here() {
    on_each_vendor(|world, device| {
        let make = |heap: &NodeHeap, slots| {
            // SAFETY: refused, or used by this segment alone.
            let outline = unsafe { world.lend(BYTES, BYTES) }.unwrap();
            let part = DevicePart::new(Arc::clone(&device), BYTES, BYTES - 4096);
            // SAFETY: as above.
            let short = unsafe { heap.add_segment_of_device(slots, outline, part) };
            assert!(matches!(short, Err(SegmentError::Region(_))), "{short:?}");
            heap.add_segment(slots, (BYTES / 512) as u32, HugePages::IfAllowed).unwrap()
        };
        TestNode::with_segments(1, 1, 4, BYTES, make).assert_empty();
        let beyond = std::panic::catch_unwind(|| DevicePart::new(Arc::clone(&device), 1 << 20, 4096));
        assert!(beyond.is_err(), "behind the region's end");
    });
}
