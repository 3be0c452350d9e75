//! Cases of shared memory: gets and puts, compared with plain copies between memory of the same size in the same random
//! order.
//!
//! The baseline copies within the memory of this process: no other process, no lookup, no ledger cells. With digests it
//! copies page by page and hashes each page after the copy.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_proto::{Codes, FrameKind, v1};
use moontide_transfer::sample::SampleNodeConfig;
use moontide_transfer::shm::{ShmConfig, ShmEngine};
use moontide_transfer::{Direction, Engine, EngineKind, Link, Metrics, Peer, call};
use moontide_types::limits::PAGE_BYTES;
use prost::Message;

use super::Args;
use super::baseline::BaselineConnection;
use super::case::{
    BenchSide, PairedRuns, SampleRecord, TRANSFER_TIMEOUT, Tally, TransferCase, TransferFixture, different,
    digests_match, transfer,
};
use crate::measure::{Run, timed};
use crate::results::{BenchError, Progress, io, wrong};

/// Target of the throughput relative to plain copies.
const RATIO_TARGET: f64 = 0.95;

/// Smallest size that is measured; below it the fixed cost of a pin dominates.
const BYTES_MIN: u64 = 64 << 10;

/// Numbers of callers; each copies on its own thread.
const CALLERS: [usize; 2] = [1, 2];

/// Measures all cases.
pub(super) fn run(args: &Args, tally: &mut Tally) -> Result<(), BenchError> {
    let sizes: Vec<u64> = args.sizes().into_iter().filter(|&bytes| bytes >= BYTES_MIN).collect();
    let mut progress = Progress::new(format!("shm, {} sizes", sizes.len()), sizes.len() as u64 * 4);
    let mut done = 0;
    for record_bytes in sizes {
        let records = args.records(record_bytes);
        for digests in [false, true] {
            let config = SampleNodeConfig {
                record_bytes,
                readable: records,
                writable: records,
                // The client begins them.
                begun: false,
                digests,
                ..SampleNodeConfig::default()
            };
            let mut fixture = TransferFixture::new(config, args.seed)?;
            let mut ends = Ends::open(&fixture)?;
            for direction in [Direction::Get, Direction::Put] {
                let cases = CALLERS.map(|callers| TransferCase {
                    engine: EngineKind::Shm.name(),
                    direction,
                    bytes: record_bytes,
                    connections: 0,
                    callers,
                    digests,
                });
                measure(args, &mut fixture, &mut ends, cases, tally)?;
                done += 1;
                progress.at(done);
            }
        }
    }
    Ok(())
}

/// Measures cases that differ only in the number of callers, alternately.
fn measure(
    args: &Args,
    fixture: &mut TransferFixture,
    ends: &mut Ends,
    cases: [TransferCase; CALLERS.len()],
    tally: &mut Tally,
) -> Result<(), BenchError> {
    touch_all(&*ends.link, fixture, &cases[0])?;
    for case in &cases {
        verify(fixture, ends, case)?;
        // Warm-up.
        measure_engine(&*ends.link, fixture, case, 0, args.span() / 2)?;
        baseline(&mut ends.memory, fixture, case, 0, args.span() / 2)?;
    }
    let mut all_runs = cases.map(PairedRuns::new);
    for repeat in 0..args.repeats().into() {
        for runs in &mut all_runs {
            let case = runs.case;
            runs.turn(fixture, repeat, |fixture, side| match side {
                BenchSide::Engine => measure_engine(&*ends.link, fixture, &case, repeat, args.span()),
                BenchSide::Baseline => baseline(&mut ends.memory, fixture, &case, repeat, args.span()),
            })?;
        }
    }
    all_runs.iter().for_each(|runs| runs.print(Some(RATIO_TARGET), tally));
    Ok(())
}

/// Link to the node, and local memory of the size of the readable or writable records.
struct Ends {
    link: Arc<dyn Link>,
    memory: Vec<u8>,
    /// Reads records in state WRITING, which the engine refuses.
    checker: BaselineConnection,
}

impl Ends {
    fn open(fixture: &TransferFixture) -> Result<Ends, BenchError> {
        let config = &fixture.config;
        // SAFETY: the node is a child process of the benchmark, and this is its only client.
        let engine = unsafe { ShmEngine::new(ShmConfig::default(), Metrics::new()) };
        let addresses = vec![(EngineKind::Shm, fixture.owner.shm.clone())];
        let peer = Peer { node: config.node, addresses };
        let link = engine.connect(&peer, Instant::now() + TRANSFER_TIMEOUT).map_err(wrong)?;
        for record in config.readable..config.records() {
            let deadline = Instant::now() + TRANSFER_TIMEOUT;
            let reply = call(&*link, FrameKind::Begin, config.begin_body(record), deadline).map_err(wrong)?;
            let outcomes = v1::SlotOutcomes::decode(&reply[..]).map_err(wrong)?;
            let codes = Codes::decode(&outcomes.codes, 1).map_err(wrong)?;
            if let Some(code) = codes.iter().flatten().next() {
                return Err(wrong(format!("cannot begin record {record}: {code:?}")));
            }
        }
        let memory = vec![1; config.readable as usize * config.record_bytes as usize];
        let checker = BaselineConnection::connect(fixture.owner.baseline)
            .map_err(io("connecting to the baseline server"))?;
        Ok(Ends { link, memory, checker })
    }
}

/// Transfers every record once, so that page faults of the mapping are not measured.
fn touch_all(link: &dyn Link, fixture: &mut TransferFixture, case: &TransferCase) -> Result<(), BenchError> {
    let mut digests = vec![0; case.pages()];
    let (records, memory) = fixture.all(case.direction);
    let memory = &mut memory[..case.bytes as usize];
    records.iter().try_for_each(|record| transfer(link, case, record, memory, &mut digests))
}

fn measure_engine(
    link: &dyn Link,
    fixture: &mut TransferFixture,
    case: &TransferCase,
    repeat: u64,
    span: Duration,
) -> Result<Run, BenchError> {
    let movers =
        fixture.split(case.direction, case.callers, repeat).into_iter().map(|(mut order, memory)| {
            let mut digests = vec![0; case.pages()];
            move || {
                let (record, memory) = order.next(memory, case.bytes as usize);
                transfer(link, case, record, memory, &mut digests)
            }
        });
    timed(movers.collect(), span, case.bytes)
}

/// Copies between the callers' memory and local memory of the node's size.
fn baseline(
    remote: &mut [u8],
    fixture: &mut TransferFixture,
    case: &TransferCase,
    repeat: u64,
    span: Duration,
) -> Result<Run, BenchError> {
    let bytes = case.bytes as usize;
    let first = if case.direction == Direction::Get { 0 } else { fixture.config.readable };
    let share = remote.len() / bytes / case.callers;
    let callers = fixture.split(case.direction, case.callers, repeat).into_iter().enumerate();
    let movers =
        callers.zip(remote.chunks_mut(share * bytes)).map(|((caller, (mut order, memory)), remote)| {
            // The records of a caller follow those of the previous caller.
            let first = first as usize + caller * share;
            move || {
                let (record, local) = order.next(memory, bytes);
                let remote = &mut remote[(record.record as usize - first) * bytes..][..bytes];
                match case.direction {
                    Direction::Get => copy(remote, local, case, record),
                    Direction::Put => copy(local, remote, case, record),
                }
                Ok(())
            }
        });
    timed(movers.collect(), span, case.bytes)
}

fn copy(from: &[u8], to: &mut [u8], case: &TransferCase, record: &SampleRecord) {
    if !case.digests {
        to.copy_from_slice(from);
        black_box(to);
        return;
    }
    let pages = from.chunks(PAGE_BYTES as usize).zip(to.chunks_mut(PAGE_BYTES as usize)).enumerate();
    for (index, (from, to)) in pages {
        to.copy_from_slice(from);
        black_box(record.context.page(index as u64, to));
    }
}

/// Lets every caller transfer a record and compares it byte by byte.
fn verify(fixture: &mut TransferFixture, ends: &Ends, case: &TransferCase) -> Result<(), BenchError> {
    let config = fixture.config.clone();
    for (mut order, memory) in fixture.split(case.direction, case.callers, 0) {
        let (record, memory) = order.next(memory, case.bytes as usize);
        let content = config.content(record.record);
        match case.direction {
            Direction::Get => memory.fill(0xee),
            Direction::Put => memory.copy_from_slice(&content),
        }
        let mut digests = vec![0; case.pages()];
        transfer(&*ends.link, case, record, memory, &mut digests)?;
        if case.direction == Direction::Put {
            let stored = ends.checker.get(record.target.payload_offset, memory, None);
            stored.map_err(io("reading what was put"))?;
        }
        if memory != content || (case.digests && !digests_match(record, &content, &digests)) {
            return Err(different(case, BenchSide::Engine, record));
        }
    }
    Ok(())
}
