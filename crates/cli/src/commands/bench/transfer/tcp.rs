//! The cases of the TCP engine: sizes × connections × callers × directions, without and with digests.
//!
//! The bare side of a case has the same connections and as many threads:
//!
//! | callers | bare threads |
//! |---|---|
//! | no more than connections | one per caller, each with a connection of its own |
//! | more than connections | one per connection: blocking sockets cannot share one |
//! | one on two connections, from 2 MiB on | two, each with half of every transfer: ours is cut in two as well |

use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_transfer::sample::SampleConfig;
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{Direction, Engine, EngineKind, Link, Metrics, Peer};
use moontide_types::bounds::PAGE_BYTES;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

use super::super::figures::{BenchError, Progress, io};
use super::Args;
use super::bare::Bare;
use super::measure::{
    Known, PATIENCE, Pairs, Run, Shape, Side, Tally, World, different, digests_match, move_ours, timed,
    timed_in_parts,
};
use super::owner::wrong;

/// What we aim for beside the bare limit: everything that makes a store of it costs at most a twentieth.
const RATIO_TARGET: f64 = 0.95;

/// From here on that is the aim; what a request costs by itself counts for more below.
const TARGET_BYTES_MIN: u64 = 256 << 10;

/// Four callers on the same connections move at least as much as one.
const CALLERS_TARGET: f64 = 1.0;

/// From here on the link cuts what one caller moves over two connections.
const CUT_BYTES_MIN: u64 = 2 << 20;

/// Callers that are measured on so many connections.
const CALLERS: [(usize, &[usize]); 2] = [(1, &[1, 4]), (2, &[1, 2, 4])];

/// Measures all cases.
pub(super) fn run(args: &Args, tally: &mut Tally) -> Result<(), BenchError> {
    let sizes = args.sizes();
    let rounds = sizes.len() as u64 * 2 * 2 * CALLERS.len() as u64;
    let mut progress = Progress::new(format!("tcp, {} sizes", sizes.len()), rounds);
    let mut done = 0;
    for record_bytes in sizes {
        let records = args.records(record_bytes);
        for digests in [false, true] {
            let config = SampleConfig {
                record_bytes,
                readable: records,
                writable: records,
                digests,
                ..SampleConfig::default()
            };
            let mut world = World::new(config, args.seed)?;
            for (connections, callers) in CALLERS {
                let ends = Ends::open(&world, connections)?;
                for direction in [Direction::Get, Direction::Put] {
                    let shapes = callers.iter().map(|&callers| Shape {
                        engine: EngineKind::Tcp.name(),
                        direction,
                        bytes: record_bytes,
                        connections,
                        callers,
                        digests,
                    });
                    measure(args, &mut world, &ends, shapes.collect(), tally)?;
                    done += 1;
                    progress.at(done);
                }
            }
        }
    }
    Ok(())
}

/// Measures shapes that differ only in their callers, in turns.
fn measure(
    args: &Args,
    world: &mut World,
    ends: &Ends,
    shapes: Vec<Shape>,
    tally: &mut Tally,
) -> Result<(), BenchError> {
    for shape in &shapes {
        verify(world, ends, shape)?;
        // Unmeasured, so that neither side pays for threads, windows and caches that are cold.
        ours(ends, world, shape, 0, args.span() / 2)?;
        bare(&ends.bare, world, shape, 0, args.span() / 2)?;
    }
    let mut cases: Vec<Pairs> = shapes.into_iter().map(Pairs::new).collect();
    for repeat in 0..args.repeats().into() {
        for case in &mut cases {
            let shape = case.shape;
            case.turn(world, repeat, |world, side| match side {
                Side::Ours => ours(ends, world, &shape, repeat, args.span()),
                Side::Bare => bare(&ends.bare, world, &shape, repeat, args.span()),
            })?;
        }
    }
    for case in &cases {
        let Shape { bytes, connections, callers, .. } = case.shape;
        let aimed_at = bytes >= TARGET_BYTES_MIN && callers <= connections;
        case.print(aimed_at.then_some(RATIO_TARGET), tally);
    }
    if let [one, .., four] = &cases[..] {
        four.print_over(one, "callers_4_over_1", CALLERS_TARGET, tally);
    }
    Ok(())
}

// ------------------------------------------------------------------------------------------------------ connections

/// Connections to the owner: ours and bare ones.
struct Ends {
    link: Arc<dyn Link>,
    metrics: Registry,
    bare: Vec<Bare>,
}

impl Ends {
    fn open(world: &World, connections: usize) -> Result<Ends, BenchError> {
        let metrics = Metrics::new();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let engine = TcpEngine::new(TcpConfig { connections, ..TcpConfig::default() }, metrics);
        let addresses = vec![(EngineKind::Tcp, world.owner.tcp.to_string())];
        let end = Instant::now() + PATIENCE;
        let link = engine.connect(&Peer { node: world.config.node, addresses }, end).map_err(wrong)?;
        // The link is there with its first connection; the others come by themselves.
        while count(&registry, "connections") < connections as u64 {
            if Instant::now() >= end {
                return Err(wrong(format!("{connections} connections did not come about")));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let bare = (0..connections).map(|_| Bare::connect(world.owner.bare)).collect::<Result<_, _>>();
        Ok(Ends { link, metrics: registry, bare: bare.map_err(io("connecting to the bare server"))? })
    }
}

/// What a metric of the link says, whatever its other labels are.
fn count(metrics: &Registry, name: &str) -> u64 {
    let mut text = String::new();
    encode(&mut text, metrics).expect("a string takes everything");
    let start = format!("moontide_transfer_{name}{{engine=\"tcp\"");
    let values =
        text.lines().filter(|line| line.starts_with(&start)).filter_map(|line| line.rsplit(' ').next());
    values.filter_map(|value| value.parse::<u64>().ok()).sum()
}

// -------------------------------------------------------------------------------------------------------- both sides

fn ours(
    ends: &Ends,
    world: &mut World,
    shape: &Shape,
    repeat: u64,
    span: Duration,
) -> Result<Run, BenchError> {
    let link = &*ends.link;
    let broken =
        || (count(&ends.metrics, "resubmitted_total"), count(&ends.metrics, "connections_ended_total"));
    let before = broken();
    let movers =
        world.split(shape.direction, shape.callers, repeat).into_iter().map(|(mut order, memory)| {
            let mut digests = vec![0; shape.pages()];
            move || {
                let (known, memory) = order.next(memory, shape.bytes as usize);
                move_ours(link, shape, known, memory, &mut digests)
            }
        });
    let mut run = timed(movers.collect(), span, shape.bytes)?;
    // A connection that broke is counted when the link is used next: once more, so that it counts here.
    let (known, memory) = world.all(shape.direction);
    let memory = &mut memory[..shape.bytes as usize];
    move_ours(link, shape, &known[0], memory, &mut vec![0; shape.pages()])?;
    let after = broken();
    (run.resubmitted, run.connections_lost) = (after.0 - before.0, after.1 - before.1);
    Ok(run)
}

fn bare(
    connections: &[Bare],
    world: &mut World,
    shape: &Shape,
    repeat: u64,
    span: Duration,
) -> Result<Run, BenchError> {
    if is_cut(shape) {
        let part = part_bytes(shape);
        let parts = world.split_parts(shape.direction, connections.len(), repeat).into_iter().enumerate();
        let movers = parts.zip(connections).map(|((index, (mut order, memory)), connection)| {
            let from = (index as u64 * part).min(shape.bytes);
            let len = part.min(shape.bytes - from) as usize;
            move || {
                let (known, memory) = order.next(memory, part as usize);
                move_bare(connection, shape, known, from, &mut memory[..len])
            }
        });
        return timed_in_parts(movers.collect(), span, shape.bytes);
    }
    let threads = shape.callers.min(connections.len());
    let parts = world.split(shape.direction, threads, repeat).into_iter();
    let movers = parts.zip(connections).map(|((mut order, memory), connection)| {
        move || {
            let (known, memory) = order.next(memory, shape.bytes as usize);
            move_bare(connection, shape, known, 0, memory)
        }
    });
    timed(movers.collect(), span, shape.bytes)
}

/// Whether the link cuts what one caller moves.
fn is_cut(shape: &Shape) -> bool {
    shape.callers == 1 && shape.connections > 1 && shape.bytes >= CUT_BYTES_MIN
}

fn part_bytes(shape: &Shape) -> u64 {
    shape.bytes.div_ceil(shape.connections as u64).next_multiple_of(PAGE_BYTES)
}

/// One bare transfer, or a part of one that begins at `from`.
fn move_bare(
    connection: &Bare,
    shape: &Shape,
    known: &Known,
    from: u64,
    memory: &mut [u8],
) -> Result<(), BenchError> {
    let offset = known.target.payload_offset + from;
    let digests = shape.digests.then_some(&known.context);
    match shape.direction {
        Direction::Get => connection.get(offset, memory, digests),
        Direction::Put => connection.put(offset, memory, digests),
    }
    .map_err(io("a bare transfer"))
}

// ------------------------------------------------------------------------------------------------------------ bytes

/// Lets every caller move a few records that are compared byte by byte: a figure is never of wrong bytes.
fn verify(world: &mut World, ends: &Ends, shape: &Shape) -> Result<(), BenchError> {
    const RECORDS: usize = 3;
    let config = world.config.clone();
    let checker = &ends.bare[0];
    for side in [Side::Ours, Side::Bare] {
        let threads = match side {
            Side::Ours => shape.callers,
            Side::Bare => shape.callers.min(ends.bare.len()),
        };
        let parts = world.split(shape.direction, threads, 0).into_iter().enumerate();
        let moved = std::thread::scope(|scope| {
            let threads: Vec<_> = parts
                .map(|(thread, (mut order, memory))| {
                    let (config, link) = (&config, &*ends.link);
                    scope.spawn(move || {
                        let mut records = Vec::new();
                        for _ in 0..RECORDS {
                            let (known, memory) = order.next(memory, shape.bytes as usize);
                            let content = config.content(known.record);
                            match shape.direction {
                                Direction::Get => memory.fill(0xee),
                                Direction::Put => memory.copy_from_slice(&content),
                            }
                            let mut digests = vec![0; shape.pages()];
                            match side {
                                Side::Ours => move_ours(link, shape, known, memory, &mut digests)?,
                                Side::Bare => move_bare(&ends.bare[thread], shape, known, 0, memory)?,
                            }
                            if memory != content {
                                return Err(different(shape, side, known));
                            }
                            if side == Side::Ours
                                && shape.digests
                                && !digests_match(known, &content, &digests)
                            {
                                return Err(different(shape, side, known));
                            }
                            // Looked at once, even if it was moved twice: what was looked at is wiped.
                            if !records.iter().any(|moved: &Known| moved.record == known.record) {
                                records.push(*known);
                            }
                        }
                        Ok(records)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("it does not panic")).collect::<Vec<_>>()
        });
        for records in moved {
            // Records that are being written can only be read past us.
            for known in records?.iter().filter(|_| shape.direction == Direction::Put) {
                let mut stored = vec![0; shape.bytes as usize];
                let offset = known.target.payload_offset;
                checker.get(offset, &mut stored, None).map_err(io("reading what was put"))?;
                if stored != config.content(known.record) {
                    return Err(different(shape, side, known));
                }
                // So that the other side does not find them there.
                stored.fill(0);
                checker.put(offset, &stored, None).map_err(io("clearing what was put"))?;
            }
        }
    }
    Ok(())
}
