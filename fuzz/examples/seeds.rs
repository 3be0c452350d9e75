//! Writes the first inputs of every target into `corpus/`: valid ones from a fixed seed, and damaged ones.
//!
//! Run again after a format changed: `cargo run -p moontide-fuzz --example seeds`.

#[path = "../../crates/proto/tests/generate/mod.rs"]
mod generate;

use std::path::Path;
use std::{fs, io};

use generate::Gen;
use moontide_fuzz::{MESSAGES, TARGETS};
use moontide_proto::{FixedRecord, FrameHeader, FrameKind};
use moontide_types::record::{Flags, Header, KeySection, State, Word};
use moontide_types::{Key, Tenant, TenantGeneration};

/// Most inputs of one target, and most bytes of one input: a corpus is read by people, too.
const INPUTS_MAX: usize = 30;
const INPUT_BYTES_MAX: usize = 2048;

fn main() -> io::Result<()> {
    assert_eq!(MESSAGES, generate::MESSAGES, "both lists number the messages");
    let corpus = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus");
    for (name, _) in TARGETS {
        let Some(mut inputs) = valid_inputs(name) else { continue };
        inputs.retain(|input| input.len() < INPUT_BYTES_MAX);
        inputs.truncate(INPUTS_MAX - 3);
        let whole = inputs.last().expect("every target has valid inputs").clone();
        let middle = whole.len() / 2;
        let mut flipped = whole.clone();
        if let Some(byte) = flipped.get_mut(middle) {
            *byte ^= 0x10;
        }
        inputs.extend([flipped, whole[..middle].to_vec(), vec![]]);
        let folder = corpus.join(name);
        fs::create_dir_all(&folder)?;
        for (index, input) in inputs.iter().enumerate() {
            fs::write(folder.join(format!("seed-{index:02}")), input)?;
        }
        println!("{name}: {} inputs", inputs.len());
    }
    Ok(())
}

/// Valid inputs of a target of this crate; `None` for targets whose inputs come from elsewhere.
fn valid_inputs(target: &str) -> Option<Vec<Vec<u8>>> {
    let many = |count: u64, make: &dyn Fn(&mut Gen) -> Vec<u8>| -> Option<Vec<Vec<u8>>> {
        Some((0..count).map(|seed| make(&mut Gen(seed))).collect())
    };
    match target {
        "door_messages" => Some(door_messages()),
        "allocator" => many(20, &allocator_steps),
        "record_header" => many(6, &|g| record_header(g).to_vec()),
        "trailer" => many(6, &|g| {
            let (tenant, key) = (g.text(1, 64), g.byte_string(1, 100));
            let section = KeySection { tenant: Tenant::new(&tenant).unwrap(), key: Key::new(&key).unwrap() };
            let mut bytes = vec![];
            section.encode(&mut bytes);
            bytes
        }),
        "attributes" => many(10, &|g| g.attributes()),
        "frame_header" => many(16, &|g| {
            let header = g.frame_header();
            let mut bytes = header.encode().to_vec();
            if matches!(header.kind, FrameKind::Hello | FrameKind::HelloAck) {
                g.hello().encode(&mut bytes);
            }
            bytes
        })
        .map(|mut inputs| {
            let mut hello =
                FrameHeader { body_len: 96, ..FrameHeader::new(FrameKind::Hello, 1) }.encode().to_vec();
            Gen(1).hello().encode(&mut hello);
            inputs.push(hello);
            inputs
        }),
        "transfer_ops" => many(8, &|g| {
            let count = 1 + g.below(5) as usize;
            g.packed(count, Gen::transfer_op).to_vec()
        }),
        "packed_keys" => many(8, &|g| {
            let count = g.below(9) as usize;
            g.keys(count).to_vec()
        }),
        "report_records" => many(27, &|g| {
            let which = g.0 as u8 % 7;
            let records = match which {
                0 => g.packed(3, Gen::report_record),
                1 => g.packed(3, Gen::offload_record),
                2 => g.packed(5, Gen::order),
                3 => g.packed(4, Gen::order_result),
                4 => g.packed(2, Gen::versioned_id),
                5 => g.packed(2, |g| g.object().1.first().copied().unwrap_or_else(|| some_handle(g))),
                _ => g.packed(2, |g| g.object().0),
            };
            [&[which], &records[..]].concat()
        }),
        // More messages than inputs allowed: a third of them stands for several that have the same shape.
        "control_messages" => Some(
            (0..MESSAGES.len())
                .filter(|index| !SAME_SHAPE.contains(&MESSAGES[*index]))
                .map(|index| {
                    let short = |seed| [&[index as u8], &Gen(seed).message(index)[..]].concat();
                    (0..).map(short).find(|input| input.len() < INPUT_BYTES_MAX).expect("some are short")
                })
                .collect(),
        ),
        _ => None,
    }
}

/// Context and keys, or context and a few numbers: mutations of others reach them by their first byte.
const SAME_SHAPE: &[&str] = &[
    "TouchRequest",
    "SetPinRequest",
    "PrefetchRequest",
    "QueryKeysRequest",
    "GetJobRequest",
    "EvictRequest",
    "SetTenantQuotaRequest",
    "GetTenantsRequest",
    "RemoveAllRequest",
];

fn some_handle(g: &mut Gen) -> moontide_proto::Handle {
    let (stripe, _) = g.stripe();
    g.handle(stripe, 0)
}

fn record_header(g: &mut Gen) -> [u8; 128] {
    let (stripe, object_len) = g.stripe();
    let header = Header {
        flags: g.pick(&[Flags::NONE, Flags::DIGESTLESS]),
        id: g.id(),
        word: Word::new(g.epoch(), g.pick(&[State::Free, State::Writing, State::Ready, State::Dead])),
        object_len,
        stripe_offset: stripe.offset,
        stripe_len: stripe.len,
        payload_offset: g.below(1 << 20) * 4096,
        root: g.u64(),
        stripe_index: stripe.index,
        stripe_count: stripe.count,
        key_len: g.below(100) as u32,
        attributes_len: g.below(100) as u32,
        trailer_crc: g.u32(),
        id_key: g.u32(),
        tenant_generation: TenantGeneration(g.u32()),
    };
    header.encode()
}

fn door_messages() -> Vec<Vec<u8>> {
    use moontide_heap::{Message, SegmentShape, Welcome};
    use moontide_types::{ClientId, ErrorCode, Generation, SegmentId};
    let welcome = Welcome {
        client: ClientId(1),
        board_len: 1 << 20,
        ledger_len: 1 << 16,
        stale_after_ms: 5000,
        segments: 2,
    };
    let shape = SegmentShape {
        segment: SegmentId(1),
        generation: Generation(1),
        slots: 4096,
        units: 1 << 21,
        first_number: 4096,
    };
    let messages = [
        Message::Hello { pid: 4711 },
        Message::Welcome(welcome),
        Message::SegmentOffer(shape),
        Message::Refusal(ErrorCode::PermissionDenied),
    ];
    messages.iter().map(|message| message.encode().to_vec()).collect()
}

/// Steps as the allocator's target reads them: four capacities, each with five habits of a caller.
fn allocator_steps(g: &mut Gen) -> Vec<u8> {
    let habits: [[u8; 8]; 5] = [
        [0, 1, 0, 8, 3, 4, 5, 3],           // small objects
        [128, 136, 144, 152, 3, 4, 3, 5],   // pages
        [0, 144, 24, 168, 3, 4, 6, 134],    // everything
        [0, 128, 160, 3, 7, 15, 31, 63],    // with claims on the map
        [128, 152, 176, 32, 40, 0, 136, 3], // until it is full
    ];
    let kinds = habits[(g.0 % 5) as usize];
    let mut data = [77u16, 512, 4096, 40_000][(g.0 / 5 % 4) as usize].to_le_bytes().to_vec();
    for _ in 0..250 {
        let kind = kinds[(g.u64() % 8) as usize];
        let operands = match kind % 8 {
            0..=2 => 1,
            3..=5 => 2,
            6 if kind >= 128 => 0,
            6 => 5,
            _ => 3,
        };
        data.push(kind);
        data.extend((0..operands).map(|_| g.u64() as u8));
    }
    data
}
