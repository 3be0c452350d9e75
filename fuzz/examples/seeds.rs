//! Writes the first inputs of every target into `corpus/`: valid ones from a fixed seed, and corrupt ones.
//!
//! Run it again after a format change: `cargo run -p moontide-fuzz --example seeds`.

#![forbid(unsafe_code)]

#[path = "../../crates/proto/tests/generate/mod.rs"]
mod generate;

use std::num::NonZeroU16;
use std::path::Path;
use std::{fs, io};

use generate::Gen;
use moontide_auth::testing::{Authority, Directory};
use moontide_auth::{Credentials, ExpectedServer, Identity, Role, Session};
use moontide_blocks::{
    Attention, BlockHash, BlockSource, BlockStore, BlockTarget, Cache, CacheConfig, CacheShape, DimOrder,
    Dtype as Dtype8, PrunePolicy,
};
use moontide_fuzz::{MESSAGES, SESSION_BODIES, TARGETS, accepted_message};
use moontide_master::election::{ClusterIdentity, ClusterState, MasterAddresses, TenantState};
use moontide_proto::{FixedRecord, FrameKind, OpKind};
use moontide_types::record::{Header, KeySection, RecordDescription, RecordFlags, State, Word, trailer_crc};
use moontide_types::tensor::{Dtype, TensorHeader};
use moontide_types::{GroupId, Key, NodeId, Tenant, TenantGeneration};

/// Most inputs of one target, and most bytes of one input: a corpus should stay human-readable.
const INPUTS_MAX: usize = 70;
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

/// Returns valid inputs of a target; `None` for targets whose inputs are not generated here.
fn valid_inputs(target: &str) -> Option<Vec<Vec<u8>>> {
    let many = |count: u64, make: &dyn Fn(&mut Gen) -> Vec<u8>| -> Option<Vec<Vec<u8>>> {
        Some((0..count).map(|seed| make(&mut Gen::new(seed))).collect())
    };
    match target {
        "shm_messages" => Some(shm_messages()),
        "world_messages" => Some(world_messages()),
        "allocator" => many(20, &allocator_steps),
        "record_header" => many(6, &|g| record_header(g).to_vec()),
        "record_description" => many(6, &|g| {
            let (tenant, key) = (g.text(1, 64), g.byte_string(1, 100));
            let section = KeySection { tenant: Tenant::new(&tenant).unwrap(), key: Key::new(&key).unwrap() };
            let (mut key, attributes) = (vec![], g.attributes());
            section.encode(&mut key);
            let header = Header::decode(&record_header(g)).unwrap();
            let header = Header {
                key_len: key.len() as u32,
                attributes_len: attributes.len() as u32,
                trailer_crc: trailer_crc(&key, &attributes),
                ..header
            };
            RecordDescription::encode(&header, &key, &attributes)
        }),
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
                    let g = &mut Gen::new(kind.number().into());
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
            match (g.seed + 1) % 4 {
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
            let which = g.seed as u8 % 11;
            let records = match which {
                0 => g.packed(3, Gen::report_record),
                1 => g.packed(3, Gen::offload_record),
                2 => g.packed(5, Gen::command),
                3 => g.packed(4, Gen::command_result),
                4 => g.packed(2, Gen::versioned_id),
                5 => g.packed(2, |g| g.object().1.first().copied().unwrap_or_else(|| some_handle(g))),
                6 => g.packed(2, |g| g.object().0),
                7 => g.packed(3, Gen::put_entry),
                8 => g.packed(3, Gen::put_end_entry),
                9 => g.packed(3, Gen::copy_source),
                _ => g.packed(3, Gen::commit_entry),
            };
            [&[which], &records[..]].concat()
        }),
        "control_messages" => Some(control_messages()),
        "disk_preamble" => Some(moontide_disk::fuzzing::front_seeds()),
        "disk_footer" => Some(moontide_disk::fuzzing::bucket_footer_seeds()),
        "tensor_header" => many(12, &|g| {
            let dtype = Dtype::ALL[g.below(Dtype::ALL.len() as u64) as usize];
            let shape: Vec<u64> = (0..g.below(9)).map(|_| g.below(100)).collect();
            TensorHeader::new(dtype, &shape).expect("a small shape").encode().to_vec()
        }),
        "suspended_sequence" => Some(suspended_sequences()),
        "registry_documents" => Some(registry_documents()),
        "identities" => Some(identities()),
        "tls_handshake" => Some(vec![client_hello()]),
        "disk_tombstones" => Some(moontide_disk::fuzzing::removals_seeds()),
        _ => None,
    }
}

/// Returns cluster states of some histories, addresses of a master, and an identity.
/// Identities as text, and in certificates, whose keys are new in each run.
fn identities() -> Vec<Vec<u8>> {
    let (directory, authority) = (Directory::new(), Authority::new());
    let roles = [
        Role::Master,
        Role::Node(NodeId(0xa7)),
        Role::Operator,
        Role::Scraper,
        Role::Tenant("team-a".into()),
    ];
    let texts = roles.iter().map(|role| Identity::new("example.org", "prod", role.clone()).expect("valid"));
    let texts = texts.map(|identity| identity.to_string().into_bytes());
    let named = b"spiffe://example.org/moontide/prod/node/rack1-host7".to_vec();
    let certificates = roles.iter().map(|role| authority.certificate_of(&directory, role.clone()));
    texts.chain([named]).chain(certificates).collect()
}

/// The first bytes of a client.
fn client_hello() -> Vec<u8> {
    let (directory, authority) = (Directory::new(), Authority::new());
    let credentials = Credentials::load(authority.issue(&directory, "client", Role::Operator)).expect("new");
    let config = credentials.client(ExpectedServer::Master, &[b"h2"]);
    let mut session = Session::client(config).expect("a valid configuration");
    session.handshake().expect("nothing has arrived");
    session.unsent().to_vec()
}

fn registry_documents() -> Vec<Vec<u8>> {
    let groups = NonZeroU16::new(4).unwrap();
    let addresses = MasterAddresses { grpc: "m:1".into(), frame: "m:2".into() };
    let identity = ClusterIdentity { cluster: 1, id_key: 2, secret: [7; 32], groups };
    let new = ClusterState::new(groups);
    let (joined, first) = new.with_next_term().unwrap();
    let (owned, _) = joined.with_owner(&[GroupId(0), GroupId(2)], first, &addresses).unwrap();
    let limited = TenantState { generation: 3, bytes_max: 1 << 40, objects_max: 7 };
    let full = owned.with_tenant("team", limited).with_exclusions(&[(GroupId(0), 2)], first);
    let values = [serde_json::to_vec(&addresses), serde_json::to_vec(&identity)];
    let mut inputs: Vec<Vec<u8>> = values.map(Result::unwrap).into();
    inputs.extend([&new, &joined, &owned, &full.with_retiring(first)].map(|state| state.encode().unwrap()));
    inputs
}

/// Returns suspended sequences: plain, pruned and empty ones.
fn suspended_sequences() -> Vec<Vec<u8>> {
    let attention = Attention::Heads { kv_heads: 1, dim: 1 };
    let shape =
        CacheShape { layers: 1, block_tokens: 4, attention, dtype: Dtype8::F8, order: DimOrder::TokenMajor };
    let mut inputs = vec![];
    for (tokens, budget) in [(0, 9), (3, 9), (8, 9), (11, 9), (11, 6)] {
        let mut cache = Cache::new(&CacheConfig::new(shape, 16)).expect("a small arena");
        let id = cache.allocate(&vec![7; tokens], BlockHash::root("salt", "")).expect("blocks are free").id;
        let mut writer = cache.writer(id).expect("no other writer");
        writer.mark_written(tokens);
        cache.commit(writer).expect("the sequence exists");
        cache
            .prune(id, &PrunePolicy { sink_tokens: 2, recent_tokens: 2, tokens_max: budget })
            .expect("blocks are free");
        let suspended = cache.suspend(id, &AcceptAllStore).expect("the store accepts everything");
        inputs.push(suspended.to_bytes());
    }
    inputs
}

/// Store that accepts all blocks and keeps none.
struct AcceptAllStore;

impl BlockStore for AcceptAllStore {
    type Error = std::convert::Infallible;

    fn prefix(&self, _: &[BlockHash]) -> Result<usize, Self::Error> {
        Ok(0)
    }

    fn load(&self, _: &mut [BlockTarget<'_>]) -> Result<usize, Self::Error> {
        Ok(0)
    }

    fn save(&self, blocks: &[BlockSource<'_>]) -> Result<usize, Self::Error> {
        Ok(blocks.len())
    }
}

/// Returns one message of each type, one session message of each body, and a failed response.
fn control_messages() -> Vec<Vec<u8>> {
    let mut inputs = vec![];
    let index_of = |name| MESSAGES.iter().position(|message| *message == name).expect("a known name");
    let mut add = |index: usize, body: Option<&str>| {
        let inputs_of = (0..).map(|seed| [&[index as u8], &Gen::new(seed).whole(index)[..]].concat());
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
    for body in SESSION_BODIES {
        let name = if ["Commands", "HeartbeatAck", "CapabilityKey"].contains(body) {
            "MasterMessage"
        } else {
            "NodeMessage"
        };
        add(index_of(name), Some(body));
    }
    let failed = index_of("GetReplicaListResponse") as u8;
    inputs.push([&[failed], &Gen::new(1).failure()[..]].concat());
    inputs
}

fn some_handle(g: &mut Gen) -> moontide_proto::Handle {
    let (stripe, _) = g.stripe();
    g.handle(stripe, 0)
}

fn record_header(g: &mut Gen) -> [u8; 128] {
    let (stripe, object_len) = g.stripe();
    let header = Header {
        flags: g.pick(&[RecordFlags::NONE, RecordFlags::DIGESTLESS]),
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

fn shm_messages() -> Vec<Vec<u8>> {
    use moontide_heap::{Accepted, PayloadMemory, SegmentDescriptor, ShmMessage};
    use moontide_types::{ClientId, ErrorCode, Generation, SegmentId};
    let accepted = Accepted {
        client: ClientId(1),
        board_len: 1 << 20,
        ledger_len: 1 << 16,
        stale_after_ms: 5000,
        segments: 2,
    };
    let shape = SegmentDescriptor {
        segment: SegmentId(1),
        generation: Generation(1),
        slots: 4096,
        units: 1 << 21,
        first_global_slot: 4096,
        medium: PayloadMemory::Host,
    };
    let messages = [
        ShmMessage::Hello { pid: 4711 },
        ShmMessage::Accepted(accepted),
        ShmMessage::Segment(shape, 1 << 21),
        ShmMessage::Segment(SegmentDescriptor { medium: PayloadMemory::Device, ..shape }, 0),
        ShmMessage::Rejected(ErrorCode::PermissionDenied),
        ShmMessage::Stream,
    ];
    messages.iter().map(|message| message.encode().to_vec()).collect()
}

fn world_messages() -> Vec<Vec<u8>> {
    use moontide_symmetric::{Rank, WorldMessage, WorldShape};
    use moontide_types::ErrorCode;
    let shape = WorldShape { ranks: 8, bytes: 1 << 30 };
    let messages = [
        WorldMessage::Rejected(ErrorCode::Busy),
        WorldMessage::Join(shape, Rank(7)),
        WorldMessage::Accepted(shape),
        WorldMessage::Region(Rank(3)),
    ];
    messages.iter().map(|message| message.encode().to_vec()).collect()
}

/// Returns steps for the allocator target: four capacities, each with five mixes of operations.
fn allocator_steps(g: &mut Gen) -> Vec<u8> {
    let mixes: [[u8; 8]; 5] = [
        [0, 1, 0, 8, 3, 4, 5, 3],           // small objects
        [128, 136, 144, 152, 3, 4, 3, 5],   // pages
        [0, 144, 24, 168, 3, 4, 6, 134],    // all sizes
        [0, 128, 160, 3, 7, 15, 31, 63],    // with claims on the extent map
        [128, 152, 176, 32, 40, 0, 136, 3], // until it is full
    ];
    let kinds = mixes[(g.seed % 5) as usize];
    let mut data = [77u16, 512, 4096, 40_000][(g.seed / 5 % 4) as usize].to_le_bytes().to_vec();
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
