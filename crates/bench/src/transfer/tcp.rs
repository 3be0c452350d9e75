//! Cases of the TCP engine: sizes × connections × callers × directions, without and with digests.
//!
//! The baseline of a case has the same connections, and these threads:
//!
//! | callers | baseline threads |
//! |---|---|
//! | at most as many as connections | one per caller, each with its own connection |
//! | more than connections | one per connection: callers cannot share a blocking socket |
//! | one on two connections, from 2 MiB on | two, each with half of every transfer: the engine splits it, too |

use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_transfer::sample::SampleNodeConfig;
use moontide_transfer::tcp::{TcpConfig, TcpEngine};
use moontide_transfer::{Direction, Engine, EngineKind, Link, Metrics, Peer};
use moontide_types::limits::PAGE_BYTES;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;

use super::Args;
use super::baseline::BaselineConnection;
use super::case::{
    BenchSide, PairedRuns, SampleRecord, TRANSFER_TIMEOUT, Tally, TransferCase, TransferFixture, different,
    digests_match, transfer,
};
use crate::measure::{Run, timed, timed_in_parts};
use crate::results::{BenchError, Progress, io, wrong};

/// Target of the throughput relative to the baseline: the engine costs at most 5 %.
const RATIO_TARGET: f64 = 0.95;

/// Smallest size with a target; below it the fixed cost of a request dominates.
const TARGET_BYTES_MIN: u64 = 256 << 10;

/// Target of the throughput of four callers relative to one on the same connections.
const CALLERS_TARGET: f64 = 1.0;

/// Smallest transfer of one caller that the link splits over two connections.
const SPLIT_BYTES_MIN: u64 = 2 << 20;

/// Numbers of connections, and the numbers of callers measured with each.
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
            let config = SampleNodeConfig {
                record_bytes,
                readable: records,
                writable: records,
                digests,
                ..SampleNodeConfig::default()
            };
            let mut fixture = TransferFixture::new(config, args.seed)?;
            for (connections, callers) in CALLERS {
                let ends = Ends::open(&fixture, connections)?;
                for direction in [Direction::Get, Direction::Put] {
                    let cases = callers.iter().map(|&callers| TransferCase {
                        engine: EngineKind::Tcp.name(),
                        direction,
                        bytes: record_bytes,
                        connections,
                        callers,
                        digests,
                    });
                    measure(args, &mut fixture, &ends, cases.collect(), tally)?;
                    done += 1;
                    progress.at(done);
                }
            }
        }
    }
    Ok(())
}

/// Measures cases that differ only in the number of callers, alternately.
fn measure(
    args: &Args,
    fixture: &mut TransferFixture,
    ends: &Ends,
    cases: Vec<TransferCase>,
    tally: &mut Tally,
) -> Result<(), BenchError> {
    for case in &cases {
        verify(fixture, ends, case)?;
        // Warm-up of threads, TCP windows and caches.
        measure_engine(ends, fixture, case, 0, args.span() / 2)?;
        baseline(&ends.baseline, fixture, case, 0, args.span() / 2)?;
    }
    let mut all_runs: Vec<PairedRuns> = cases.into_iter().map(PairedRuns::new).collect();
    for repeat in 0..args.repeats().into() {
        for runs in &mut all_runs {
            let case = runs.case;
            runs.turn(fixture, repeat, |fixture, side| match side {
                BenchSide::Engine => measure_engine(ends, fixture, &case, repeat, args.span()),
                BenchSide::Baseline => baseline(&ends.baseline, fixture, &case, repeat, args.span()),
            })?;
        }
    }
    for runs in &all_runs {
        let TransferCase { bytes, connections, callers, .. } = runs.case;
        let has_target = bytes >= TARGET_BYTES_MIN && callers <= connections;
        runs.print(has_target.then_some(RATIO_TARGET), tally);
    }
    if let [one, .., four] = &all_runs[..] {
        four.print_over(one, "callers_4_over_1", CALLERS_TARGET, tally);
    }
    Ok(())
}

// ------------------------------------------------------------------------------------------------------ connections

/// Connections to the owner: engine and baseline.
struct Ends {
    link: Arc<dyn Link>,
    metrics: Registry,
    baseline: Vec<BaselineConnection>,
}

impl Ends {
    fn open(fixture: &TransferFixture, connections: usize) -> Result<Ends, BenchError> {
        let metrics = Metrics::new();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let engine = TcpEngine::new(TcpConfig { connections, ..TcpConfig::default() }, metrics);
        let addresses = vec![(EngineKind::Tcp, fixture.owner.tcp.to_string())];
        let end = Instant::now() + TRANSFER_TIMEOUT;
        let link = engine.connect(&Peer { node: fixture.config.node, addresses }, end).map_err(wrong)?;
        // The link is ready with its first connection; the others follow in the background.
        while count(&registry, "connections") < connections as u64 {
            if Instant::now() >= end {
                return Err(wrong(format!("timed out waiting for {connections} connections")));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let baseline = (0..connections)
            .map(|_| BaselineConnection::connect(fixture.owner.baseline))
            .collect::<Result<_, _>>();
        Ok(Ends {
            link,
            metrics: registry,
            baseline: baseline.map_err(io("connecting to the baseline server"))?,
        })
    }
}

/// Sum of a metric of the link over all labels.
fn count(metrics: &Registry, name: &str) -> u64 {
    let mut text = String::new();
    encode(&mut text, metrics).expect("writing to a string does not fail");
    let start = format!("moontide_transfer_{name}{{engine=\"tcp\"");
    let values =
        text.lines().filter(|line| line.starts_with(&start)).filter_map(|line| line.rsplit(' ').next());
    values.filter_map(|value| value.parse::<u64>().ok()).sum()
}

// -------------------------------------------------------------------------------------------------------- both sides

fn measure_engine(
    ends: &Ends,
    fixture: &mut TransferFixture,
    case: &TransferCase,
    repeat: u64,
    span: Duration,
) -> Result<Run, BenchError> {
    let link = &*ends.link;
    let failures =
        || (count(&ends.metrics, "resubmitted_total"), count(&ends.metrics, "connections_ended_total"));
    let before = failures();
    let movers =
        fixture.split(case.direction, case.callers, repeat).into_iter().map(|(mut order, memory)| {
            let mut digests = vec![0; case.pages()];
            move || {
                let (record, memory) = order.next(memory, case.bytes as usize);
                transfer(link, case, record, memory, &mut digests)
            }
        });
    let mut run = timed(movers.collect(), span, case.bytes)?;
    // A failed connection is counted at the next use of the link, so use it once more.
    let (records, memory) = fixture.all(case.direction);
    let memory = &mut memory[..case.bytes as usize];
    transfer(link, case, &records[0], memory, &mut vec![0; case.pages()])?;
    let after = failures();
    (run.resubmitted, run.connections_lost) = (after.0 - before.0, after.1 - before.1);
    Ok(run)
}

fn baseline(
    connections: &[BaselineConnection],
    fixture: &mut TransferFixture,
    case: &TransferCase,
    repeat: u64,
    span: Duration,
) -> Result<Run, BenchError> {
    if is_split(case) {
        let part = part_bytes(case);
        let parts = fixture.split_parts(case.direction, connections.len(), repeat).into_iter().enumerate();
        let movers = parts.zip(connections).map(|((index, (mut order, memory)), connection)| {
            let from = (index as u64 * part).min(case.bytes);
            let len = part.min(case.bytes - from) as usize;
            move || {
                let (record, memory) = order.next(memory, part as usize);
                transfer_baseline(connection, case, record, from, &mut memory[..len])
            }
        });
        return timed_in_parts(movers.collect(), span, case.bytes);
    }
    let threads = case.callers.min(connections.len());
    let parts = fixture.split(case.direction, threads, repeat).into_iter();
    let movers = parts.zip(connections).map(|((mut order, memory), connection)| {
        move || {
            let (record, memory) = order.next(memory, case.bytes as usize);
            transfer_baseline(connection, case, record, 0, memory)
        }
    });
    timed(movers.collect(), span, case.bytes)
}

/// Returns true if the link splits the transfers of the case.
fn is_split(case: &TransferCase) -> bool {
    case.callers == 1 && case.connections > 1 && case.bytes >= SPLIT_BYTES_MIN
}

fn part_bytes(case: &TransferCase) -> u64 {
    case.bytes.div_ceil(case.connections as u64).next_multiple_of(PAGE_BYTES)
}

/// Runs one baseline transfer, or a part of one that starts at `from`.
fn transfer_baseline(
    connection: &BaselineConnection,
    case: &TransferCase,
    record: &SampleRecord,
    from: u64,
    memory: &mut [u8],
) -> Result<(), BenchError> {
    let offset = record.target.payload_offset + from;
    let digests = case.digests.then_some(&record.context);
    match case.direction {
        Direction::Get => connection.get(offset, memory, digests),
        Direction::Put => connection.put(offset, memory, digests),
    }
    .map_err(io("a baseline transfer"))
}

// ----------------------------------------------------------------------------------------------------- verification

/// Lets every caller transfer a few records and compares them byte by byte.
fn verify(fixture: &mut TransferFixture, ends: &Ends, case: &TransferCase) -> Result<(), BenchError> {
    const RECORDS: usize = 3;
    let config = fixture.config.clone();
    let checker = &ends.baseline[0];
    for side in [BenchSide::Engine, BenchSide::Baseline] {
        let threads = match side {
            BenchSide::Engine => case.callers,
            BenchSide::Baseline => case.callers.min(ends.baseline.len()),
        };
        let parts = fixture.split(case.direction, threads, 0).into_iter().enumerate();
        let moved = std::thread::scope(|scope| {
            let threads: Vec<_> = parts
                .map(|(thread, (mut order, memory))| {
                    let (config, link) = (&config, &*ends.link);
                    scope.spawn(move || {
                        let mut records = Vec::new();
                        for _ in 0..RECORDS {
                            let (record, memory) = order.next(memory, case.bytes as usize);
                            let content = config.content(record.record);
                            match case.direction {
                                Direction::Get => memory.fill(0xee),
                                Direction::Put => memory.copy_from_slice(&content),
                            }
                            let mut digests = vec![0; case.pages()];
                            match side {
                                BenchSide::Engine => transfer(link, case, record, memory, &mut digests)?,
                                BenchSide::Baseline => {
                                    transfer_baseline(&ends.baseline[thread], case, record, 0, memory)?
                                }
                            }
                            if memory != content {
                                return Err(different(case, side, record));
                            }
                            if side == BenchSide::Engine
                                && case.digests
                                && !digests_match(record, &content, &digests)
                            {
                                return Err(different(case, side, record));
                            }
                            // Listed once, even if transferred twice: the check below clears each record.
                            if !records.iter().any(|moved: &SampleRecord| moved.record == record.record) {
                                records.push(*record);
                            }
                        }
                        Ok(records)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("callers do not panic")).collect::<Vec<_>>()
        });
        for records in moved {
            // Only the baseline can read records in state WRITING.
            for record in records?.iter().filter(|_| case.direction == Direction::Put) {
                let mut stored = vec![0; case.bytes as usize];
                let offset = record.target.payload_offset;
                checker.get(offset, &mut stored, None).map_err(io("reading what was put"))?;
                if stored != config.content(record.record) {
                    return Err(different(case, side, record));
                }
                // Clears the record, so that the other side cannot pass with its content.
                stored.fill(0);
                checker.put(offset, &stored, None).map_err(io("clearing what was put"))?;
            }
        }
    }
    Ok(())
}
