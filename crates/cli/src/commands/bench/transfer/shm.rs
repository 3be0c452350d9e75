//! The cases of shared memory: gets into the caller's memory and puts out of it, beside plain copies between memory of
//! the same size in the same random order.
//!
//! The bare side copies between this process's own memory: no other process, no names, no cells. With digests it copies
//! page by page and hashes each page after the copy.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_proto::{Codes, FrameKind, v1};
use moontide_transfer::sample::SampleConfig;
use moontide_transfer::shm::{ShmConfig, ShmEngine};
use moontide_transfer::{Direction, Engine, EngineKind, Link, Metrics, Peer, call};
use moontide_types::bounds::PAGE_BYTES;
use prost::Message;

use super::super::figures::{BenchError, Progress, io};
use super::Args;
use super::bare::Bare;
use super::measure::{
    Known, PATIENCE, Pairs, Run, Shape, Side, Tally, World, different, digests_match, move_ours, timed,
};
use super::owner::wrong;

/// What we aim for beside plain copies.
const RATIO_TARGET: f64 = 0.95;

/// The smallest size that is measured, and aimed at: what a pin costs by itself counts for more below.
const BYTES_MIN: u64 = 64 << 10;

/// Callers that are measured: each copies by itself.
const CALLERS: [usize; 2] = [1, 2];

/// Measures all cases.
pub(super) fn run(args: &Args, tally: &mut Tally) -> Result<(), BenchError> {
    let sizes: Vec<u64> = args.sizes().into_iter().filter(|&bytes| bytes >= BYTES_MIN).collect();
    let mut progress = Progress::new(format!("shm, {} sizes", sizes.len()), sizes.len() as u64 * 4);
    let mut done = 0;
    for record_bytes in sizes {
        let records = args.records(record_bytes);
        for digests in [false, true] {
            let config = SampleConfig {
                record_bytes,
                readable: records,
                writable: records,
                // Begun by the process that fills them.
                begun: false,
                digests,
                ..SampleConfig::default()
            };
            let mut world = World::new(config, args.seed)?;
            let mut ends = Ends::open(&world)?;
            for direction in [Direction::Get, Direction::Put] {
                let shapes = CALLERS.map(|callers| Shape {
                    engine: EngineKind::Shm.name(),
                    direction,
                    bytes: record_bytes,
                    connections: 0,
                    callers,
                    digests,
                });
                measure(args, &mut world, &mut ends, shapes, tally)?;
                done += 1;
                progress.at(done);
            }
        }
    }
    Ok(())
}

/// Measures shapes that differ only in their callers, in turns.
fn measure(
    args: &Args,
    world: &mut World,
    ends: &mut Ends,
    shapes: [Shape; CALLERS.len()],
    tally: &mut Tally,
) -> Result<(), BenchError> {
    visit_all(&*ends.link, world, &shapes[0])?;
    for shape in &shapes {
        verify(world, ends, shape)?;
        // Unmeasured, so that neither side pays for what is cold.
        ours(&*ends.link, world, shape, 0, args.span() / 2)?;
        bare(&mut ends.memory, world, shape, 0, args.span() / 2)?;
    }
    let mut cases = shapes.map(Pairs::new);
    for repeat in 0..args.repeats().into() {
        for case in &mut cases {
            let shape = case.shape;
            case.turn(world, repeat, |world, side| match side {
                Side::Ours => ours(&*ends.link, world, &shape, repeat, args.span()),
                Side::Bare => bare(&mut ends.memory, world, &shape, repeat, args.span()),
            })?;
        }
    }
    cases.iter().for_each(|case| case.print(Some(RATIO_TARGET), tally));
    Ok(())
}

/// The node's memory, and memory of this process that is as large as what is read or written there.
struct Ends {
    link: Arc<dyn Link>,
    memory: Vec<u8>,
    /// Reads what is being written, which nobody else may.
    checker: Bare,
}

impl Ends {
    fn open(world: &World) -> Result<Ends, BenchError> {
        let config = &world.config;
        // SAFETY: the node is the benchmark's own process, and this is its only client.
        let engine = unsafe { ShmEngine::new(ShmConfig::default(), Metrics::new()) };
        let addresses = vec![(EngineKind::Shm, world.owner.shm.clone())];
        let peer = Peer { node: config.node, addresses };
        let link = engine.connect(&peer, Instant::now() + PATIENCE).map_err(wrong)?;
        for record in config.readable..config.records() {
            let deadline = Instant::now() + PATIENCE;
            let reply = call(&*link, FrameKind::Begin, config.begin_body(record), deadline).map_err(wrong)?;
            let outcomes = v1::SlotOutcomes::decode(&reply[..]).map_err(wrong)?;
            let codes = Codes::decode(&outcomes.codes, 1).map_err(wrong)?;
            if let Some(code) = codes.iter().flatten().next() {
                return Err(wrong(format!("record {record} cannot be begun: {code:?}")));
            }
        }
        let memory = vec![1; config.readable as usize * config.record_bytes as usize];
        let checker = Bare::connect(world.owner.bare).map_err(io("connecting to the bare server"))?;
        Ok(Ends { link, memory, checker })
    }
}

/// Moves every record once: a mapping's pages are made when they are first touched, and that is paid once.
fn visit_all(link: &dyn Link, world: &mut World, shape: &Shape) -> Result<(), BenchError> {
    let mut digests = vec![0; shape.pages()];
    let (known, memory) = world.all(shape.direction);
    let memory = &mut memory[..shape.bytes as usize];
    known.iter().try_for_each(|known| move_ours(link, shape, known, memory, &mut digests))
}

fn ours(
    link: &dyn Link,
    world: &mut World,
    shape: &Shape,
    repeat: u64,
    span: Duration,
) -> Result<Run, BenchError> {
    let movers =
        world.split(shape.direction, shape.callers, repeat).into_iter().map(|(mut order, memory)| {
            let mut digests = vec![0; shape.pages()];
            move || {
                let (known, memory) = order.next(memory, shape.bytes as usize);
                move_ours(link, shape, known, memory, &mut digests)
            }
        });
    timed(movers.collect(), span, shape.bytes)
}

/// Copies between the callers' memory and as much memory as the node has.
fn bare(
    far: &mut [u8],
    world: &mut World,
    shape: &Shape,
    repeat: u64,
    span: Duration,
) -> Result<Run, BenchError> {
    let bytes = shape.bytes as usize;
    let first = if shape.direction == Direction::Get { 0 } else { world.config.readable };
    let share = far.len() / bytes / shape.callers;
    let callers = world.split(shape.direction, shape.callers, repeat).into_iter().enumerate();
    let movers = callers.zip(far.chunks_mut(share * bytes)).map(|((caller, (mut order, memory)), far)| {
        // A caller has the records behind its neighbour's.
        let first = first as usize + caller * share;
        move || {
            let (known, near) = order.next(memory, bytes);
            let far = &mut far[(known.record as usize - first) * bytes..][..bytes];
            match shape.direction {
                Direction::Get => copy(far, near, shape, known),
                Direction::Put => copy(near, far, shape, known),
            }
            Ok(())
        }
    });
    timed(movers.collect(), span, shape.bytes)
}

fn copy(from: &[u8], to: &mut [u8], shape: &Shape, known: &Known) {
    if !shape.digests {
        to.copy_from_slice(from);
        black_box(to);
        return;
    }
    let pages = from.chunks(PAGE_BYTES as usize).zip(to.chunks_mut(PAGE_BYTES as usize)).enumerate();
    for (index, (from, to)) in pages {
        to.copy_from_slice(from);
        black_box(known.context.page(index as u64, to));
    }
}

/// Lets every caller move a few records that are compared byte by byte: a figure is never of wrong bytes.
fn verify(world: &mut World, ends: &Ends, shape: &Shape) -> Result<(), BenchError> {
    let config = world.config.clone();
    for (mut order, memory) in world.split(shape.direction, shape.callers, 0) {
        let (known, memory) = order.next(memory, shape.bytes as usize);
        let content = config.content(known.record);
        match shape.direction {
            Direction::Get => memory.fill(0xee),
            Direction::Put => memory.copy_from_slice(&content),
        }
        let mut digests = vec![0; shape.pages()];
        move_ours(&*ends.link, shape, known, memory, &mut digests)?;
        if shape.direction == Direction::Put {
            let stored = ends.checker.get(known.target.payload_offset, memory, None);
            stored.map_err(io("reading what was put"))?;
        }
        if memory != content || (shape.digests && !digests_match(known, &content, &digests)) {
            return Err(different(shape, Side::Ours, known));
        }
    }
    Ok(())
}
