//! Writes the first inputs of every target into `corpus/`: valid ones from a fixed seed, and damaged ones.
//!
//! Run again after a format changed: `cargo run -p moontide-fuzz --example seeds`.

#[path = "../../crates/proto/tests/generate/mod.rs"]
mod generate;

use std::path::Path;
use std::{fs, io};

use generate::Gen;
use moontide_blocks::{
    Attention, BlockHash, Cache, CacheConfig, Destination, Dtype as Dtype8, Keep, Order, Shape, Source, Store,
};
use moontide_fuzz::{BODIES, MESSAGES, TARGETS, accepted_message};
use moontide_proto::{FixedRecord, FrameKind, OpKind};
use moontide_types::record::{Flags, Header, KeySection, State, Word};
use moontide_types::tensor::{Dtype, TensorHeader};
use moontide_types::{Key, Tenant, TenantGeneration};

/// Most inputs of one target, and most bytes of one input: a corpus is read by people, too.
const INPUTS_MAX: usize = 60;
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
        "frame_header" => Some(
            FrameKind::ALL
                .iter()
                .map(|&kind| {
                    let g = &mut Gen(kind.number().into());
                    let mut bytes = g.header_of(kind).encode().to_vec();
                    if matches!(kind, FrameKind::Hello | FrameKind::HelloAck) {
                        g.hello().encode(&mut bytes);
                    }
                    bytes
                })
                .collect(),
        ),
        "transfer_ops" => many(12, &|g| {
            let count = 1 + g.below(5) as usize;
            match g.0 % 4 {
                0 => g.packed(count, Gen::transfer_op).to_vec(),
                1 => g.packed(count, |g| g.op_of(OpKind::Read)).to_vec(),
                2 => g.packed(count, |g| g.op_of(OpKind::Write)).to_vec(),
                _ => g.packed(count, |g| g.op_of(OpKind::Release)).to_vec(),
            }
        }),
        "packed_keys" => many(8, &|g| {
            let count = g.below(9) as usize;
            g.keys(count).to_vec()
        }),
        "report_records" => many(30, &|g| {
            let which = g.0 as u8 % 10;
            let records = match which {
                0 => g.packed(3, Gen::report_record),
                1 => g.packed(3, Gen::offload_record),
                2 => g.packed(5, Gen::order),
                3 => g.packed(4, Gen::order_result),
                4 => g.packed(2, Gen::versioned_id),
                5 => g.packed(2, |g| g.object().1.first().copied().unwrap_or_else(|| some_handle(g))),
                6 => g.packed(2, |g| g.object().0),
                7 => g.packed(3, Gen::put_entry),
                8 => g.packed(3, Gen::put_end_entry),
                _ => g.packed(3, Gen::commit_entry),
            };
            [&[which], &records[..]].concat()
        }),
        "control_messages" => Some(control_messages()),
        "disk_front" => Some(moontide_disk::fuzzing::front_seeds()),
        "disk_footer" => Some(moontide_disk::fuzzing::bucket_footer_seeds()),
        "tensor_header" => many(12, &|g| {
            let dtype = Dtype::ALL[g.below(Dtype::ALL.len() as u64) as usize];
            let shape: Vec<u64> = (0..g.below(9)).map(|_| g.below(100)).collect();
            TensorHeader::new(dtype, &shape).expect("a small shape").encode().to_vec()
        }),
        "parked_sequence" => Some(parked_sequences()),
        "disk_removals" => Some(moontide_disk::fuzzing::removals_seeds()),
        _ => None,
    }
}

/// Plain ones, some of which tokens were dropped from, and an empty one.
fn parked_sequences() -> Vec<Vec<u8>> {
    let attention = Attention::Heads { kv_heads: 1, dim: 1 };
    let shape = Shape { layers: 1, block_tokens: 4, attention, dtype: Dtype8::F8, order: Order::TokenMajor };
    let mut inputs = vec![];
    for (tokens, budget) in [(0, 9), (3, 9), (8, 9), (11, 9), (11, 6)] {
        let mut cache = Cache::new(&CacheConfig::new(shape, 16)).expect("a small arena");
        let id = cache.allocate(&vec![7; tokens], BlockHash::root("salt", "")).expect("room").id;
        let mut fill = cache.fill(id).expect("nobody else fills it");
        fill.complete(tokens);
        cache.commit(fill).expect("it is there");
        cache.thin(id, &Keep { first: 2, last: 2, budget }).expect("room");
        let parked = cache.park(id, &Nowhere).expect("a store that takes everything");
        inputs.push(parked.to_bytes());
    }
    inputs
}

/// A store that says it has everything.
struct Nowhere;

impl Store for Nowhere {
    type Error = std::convert::Infallible;

    fn prefix(&self, _: &[BlockHash]) -> Result<usize, Self::Error> {
        Ok(0)
    }

    fn load(&self, _: &mut [Destination<'_>]) -> Result<usize, Self::Error> {
        Ok(0)
    }

    fn save(&self, blocks: &[Source<'_>]) -> Result<usize, Self::Error> {
        Ok(blocks.len())
    }
}

/// One of each kind, one for each thing that a session's messages say, and an answer of a call that failed.
fn control_messages() -> Vec<Vec<u8>> {
    let mut inputs = vec![];
    let index_of = |name| MESSAGES.iter().position(|message| *message == name).expect("a known name");
    let mut add = |index: usize, body: Option<&str>| {
        let inputs_of = (0..).map(|seed| [&[index as u8], &Gen(seed).whole(index)[..]].concat());
        let wanted = |input: &Vec<u8>| {
            input.len() < INPUT_BYTES_MAX
                && accepted_message(input).is_some_and(|(_, found)| body.is_none() || body == found)
        };
        inputs.extend(inputs_of.take(1000).find(wanted));
    };
    for (index, name) in MESSAGES.iter().enumerate() {
        if !["NodeMessage", "MasterMessage"].contains(name) {
            add(index, None);
        }
    }
    for body in BODIES {
        let name = if ["Orders", "HeartbeatAck"].contains(body) { "MasterMessage" } else { "NodeMessage" };
        add(index_of(name), Some(body));
    }
    let failed = index_of("GetReplicaListResponse") as u8;
    inputs.push([&[failed], &Gen(1).failure()[..]].concat());
    inputs
}

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
    use moontide_heap::{Medium, Message, SegmentShape, Welcome};
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
        medium: Medium::Host,
    };
    let messages = [
        Message::Hello { pid: 4711 },
        Message::Welcome(welcome),
        Message::SegmentOffer(shape, 1 << 21),
        Message::SegmentOffer(SegmentShape { medium: Medium::Device, ..shape }, 0),
        Message::Refusal(ErrorCode::PermissionDenied),
        Message::Stream,
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
