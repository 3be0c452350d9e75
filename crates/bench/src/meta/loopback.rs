//! gRPC and frame server of a master in a child process, on loopback, with clients on the same host.
//!
//! Client and server share the cores, so rates include both. A plain echo of the same sizes over one connection is
//! measured in the same run as a baseline.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::num::NonZeroU16;
use std::process::{Child, ChildStdout, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{AsyncLink, BlockingLink, LinkConfig};
use moontide_proto::convert::CallerId;
use moontide_proto::v1::master_client::MasterClient;
use moontide_proto::v1::master_nodes_client::MasterNodesClient;
use moontide_proto::{PackedKeysBuilder, v1};
use moontide_rt::SplitMix64;
use moontide_types::limits::REQUEST_BYTES_MAX;
use moontide_types::{IdKey, Key};
use tonic::transport::{Channel, Endpoint};

use super::Args;
use super::fixture::{KEY_BYTES, TENANT, key};
use super::reports::{self, Reports};
use crate::measure::{median, relative_range};
use crate::process::{cpu_time, this_program};
use crate::results::{BenchError, Progress, ResultRow, io, wrong};

/// Keys per batch.
const BATCH: usize = 100;

/// Callers of the cases with many callers.
const CALLERS: usize = 64;

/// Duration of one measurement.
const SPAN: Duration = Duration::from_millis(1000);

/// Starts a master, fills it with reports, and measures both protocols.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let master = Master::start(args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .map_err(io("starting a runtime"))?;
    let node = runtime.block_on(fill(args, &master))?;
    baseline(args)?;
    framed_batches(args, &master)?;
    runtime.block_on(grpc_batches(args, &master))?;
    one_caller(args, &master)?;
    threads(args, &master)?;
    runtime.block_on(tasks(args, &master))?;
    drop(node);
    Ok(())
}

// ------------------------------------------------------------------------------------------------ the master

/// A master in a child process, which is killed on drop.
struct Master {
    child: Child,
    /// Kept open: the master exits when its standard output is closed.
    out: BufReader<ChildStdout>,
    grpc: String,
    frames: String,
}

impl Master {
    fn start(args: &Args) -> Result<Master, BenchError> {
        let mut child = this_program()?
            .args([
                "master",
                "--grpc-listen=127.0.0.1:0",
                "--frame-listen=127.0.0.1:0",
                "--admin-listen=127.0.0.1:0",
            ])
            .arg(format!("--groups={}", args.groups))
            .stdout(Stdio::piped())
            .spawn()
            .map_err(io("starting a master"))?;
        let out = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut master = Master { child, out, grpc: String::new(), frames: String::new() };
        while master.grpc.is_empty() || master.frames.is_empty() {
            let mut line = String::new();
            if master.out.read_line(&mut line).map_err(io("reading the master's output"))? == 0 {
                return Err(wrong("master exited before it printed its addresses"));
            }
            match line.split_whitespace().collect::<Vec<_>>()[..] {
                ["grpc", address] => master.grpc = address.into(),
                ["frame", address] => master.frames = address.into(),
                _ => {}
            }
        }
        Ok(master)
    }

    fn link(&self, caller: u64) -> LinkConfig {
        LinkConfig::new(self.frames.clone(), CallerId(caller))
    }

    async fn channel(&self) -> Result<Channel, BenchError> {
        let endpoint = Endpoint::from_shared(format!("http://{}", self.grpc))
            .map_err(|error| BenchError::Wrong(error.to_string()))?
            .tcp_nodelay(true)
            .initial_stream_window_size(4 << 20)
            .initial_connection_window_size(16 << 20);
        endpoint.connect().await.map_err(|error| BenchError::Wrong(format!("{}: {error}", self.grpc)))
    }

    fn cpu(&self) -> Result<Duration, BenchError> {
        cpu_time(self.child.id())
    }
}

impl Drop for Master {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

// ----------------------------------------------------------------------------------------------- the reports

/// Fills the master over a node's session stream and prints the rate. The returned task sends heartbeats and keeps the
/// session open.
async fn fill(args: &Args, master: &Master) -> Result<tokio::task::JoinHandle<()>, BenchError> {
    let channel = master.channel().await?;
    let mut client = MasterNodesClient::new(channel)
        .max_decoding_message_size(REQUEST_BYTES_MAX)
        .max_encoding_message_size(REQUEST_BYTES_MAX);
    let opened = client.open_session(reports::open_session()).await.map_err(wrong)?.into_inner();
    reports::accepted(&opened.context)?;
    let term = opened.context.as_ref().map_or(0, |context| context.term);
    let secret: [u8; 32] = opened.id_key_secret.as_ref().try_into().map_err(|_| wrong("no id key"))?;
    let id_key = IdKey::new(opened.id_key, secret);
    let groups = NonZeroU16::new(opened.groups as u16).ok_or_else(|| wrong("no groups"))?;
    let mount = reports::mount(&opened, groups.get(), args.objects);
    let mounted = client.mount_segments(mount).await.map_err(wrong)?.into_inner();
    reports::accepted(&mounted.context)?;

    let mut reports = Reports::new(opened.session, term, groups, id_key, args.objects);
    let (send, receive) = tokio::sync::mpsc::channel::<v1::NodeMessage>(8);
    let outgoing = tokio_stream::wrappers::ReceiverStream::new(receive);
    // The first message names the session.
    let heartbeat = |sequence: u64, session: u64, heartbeat_id: u64| v1::NodeMessage {
        session,
        sequence,
        highest_term: 0,
        body: Some(v1::node_message::Body::Heartbeat(v1::Heartbeat {
            heartbeat_id,
            reads: Some(v1::ReadCounters::default()),
            pressure: Some(v1::Pressure::default()),
            ..Default::default()
        })),
    };
    let session = opened.session;
    reports.skip_sequence();
    send.send(heartbeat(1, session, 1)).await.map_err(wrong)?;
    let mut incoming = client.session(outgoing).await.map_err(wrong)?.into_inner();

    let mut progress = Progress::new(format!("reporting {} objects", args.objects), args.objects);
    let acked = Arc::new(AtomicU64::new(0));
    let acked_by_reader = Arc::clone(&acked);
    let reader = tokio::spawn(async move {
        while let Ok(Some(message)) = incoming.message().await {
            acked_by_reader.store(message.acked_sequence, Ordering::Relaxed);
        }
    });
    let before = master.cpu()?;
    // Messages are generated in advance, a few hundred megabytes at a time: generating them is not measured.
    let (mut spent, mut sequence, mut rates) = (Duration::ZERO, 1, vec![]);
    loop {
        let messages: Vec<v1::NodeMessage> = reports.by_ref().take(256).collect();
        if messages.is_empty() {
            break;
        }
        let records: u64 = messages.iter().map(reports::records).sum();
        sequence = messages.last().map_or(sequence, |message| message.sequence);
        let started = Instant::now();
        for message in messages {
            send.send(message).await.map_err(|_| wrong("master closed the session"))?;
        }
        while acked.load(Ordering::Relaxed) < sequence {
            if reader.is_finished() || started.elapsed() > Duration::from_secs(60) {
                return Err(wrong("master did not acknowledge reports within 60 s"));
            }
            tokio::time::sleep(Duration::from_micros(200)).await;
        }
        spent += started.elapsed();
        if records > 100_000 {
            rates.push(records as f64 / started.elapsed().as_secs_f64());
        }
        progress.at(reports.generated());
    }
    let cpu = master.cpu()?.saturating_sub(before);
    let rate = args.objects as f64 / spent.as_secs_f64();
    ResultRow::new("meta", "report_ingest_wire")
        .with("objects", args.objects)
        .with_target("records_per_s", rate, 1_000_000.0, true)
        .number("range", relative_range(&rates))
        .number("master_cpu_ns_per_record", cpu.as_nanos() as f64 / args.objects as f64)
        .print();
    // Heartbeats continue until the end of the benchmark.
    Ok(tokio::spawn(async move {
        let mut heartbeat_id = 1;
        loop {
            tokio::time::sleep(Duration::from_secs(1)).await;
            (sequence, heartbeat_id) = (sequence + 1, heartbeat_id + 1);
            if send.send(heartbeat(sequence, session, heartbeat_id)).await.is_err() {
                return;
            }
        }
    }))
}

// ---------------------------------------------------------------------------------------------- measurements

/// Runs one thread per caller for [`SPAN`]; each repeats `call`, which returns a number of keys. Returns the rates of
/// all repeats, and the master's CPU time per key in nanoseconds.
fn rates<C: Send>(
    args: &Args,
    master: &Master,
    callers: impl Fn() -> Result<Vec<C>, BenchError>,
    call: impl Fn(&mut C) -> Result<u64, BenchError> + Sync,
) -> Result<(Vec<f64>, f64), BenchError> {
    let mut rates = vec![];
    let (mut keys, before) = (0, master.cpu()?);
    for _ in 0..args.repeats {
        let callers = callers()?;
        let started = Instant::now();
        let done: Result<Vec<u64>, BenchError> = std::thread::scope(|scope| {
            let call = &call;
            let handles: Vec<_> = callers
                .into_iter()
                .map(|mut caller| {
                    scope.spawn(move || {
                        let mut done = 0;
                        while started.elapsed() < SPAN {
                            done += call(&mut caller)?;
                        }
                        Ok(done)
                    })
                })
                .collect();
            handles.into_iter().map(|handle| handle.join().expect("callers do not panic")).collect()
        });
        let sum: u64 = done?.iter().sum();
        rates.push(sum as f64 / started.elapsed().as_secs_f64());
        keys += sum;
    }
    let cpu = master.cpu()?.saturating_sub(before);
    Ok((rates, cpu.as_nanos() as f64 / keys.max(1) as f64))
}

fn line(case: &str, args: &Args, callers: usize, batch: usize, cpu_ns: f64, rates: &[f64]) -> ResultRow {
    ResultRow::new("meta", case)
        .with("objects", args.objects)
        .with("callers", callers)
        .with("batch", batch)
        .number("range", relative_range(rates))
        .number("master_cpu_ns_per_key", cpu_ns)
}

/// Prints a rate of keys, with its target if it has one.
fn print_keys(line: ResultRow, rate: f64, target: Option<f64>) {
    match target {
        Some(target) => line.with_target("keys_per_s", rate, target, true),
        None => line.number("keys_per_s", rate),
    }
    .print();
}

/// Generates `count` batches of random keys.
fn batches(args: &Args, seed: u64, count: usize) -> Vec<Vec<[u8; KEY_BYTES]>> {
    let mut rng = SplitMix64::new(args.seed.wrapping_add(seed));
    (0..count).map(|_| (0..BATCH).map(|_| key(rng.below(args.objects))).collect()).collect()
}

fn as_keys(batch: &[[u8; KEY_BYTES]]) -> Vec<Key<'_>> {
    batch.iter().map(|key| Key::new(key).expect("64 bytes are a key")).collect()
}

/// Measures a plain echo over one connection, with the sizes of a batch and of a single call.
fn baseline(args: &Args) -> Result<(), BenchError> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(io("listening for the baseline echo"))?;
    let address = listener.local_addr().map_err(io("listening for the baseline echo"))?;
    for (case, request, reply) in [
        ("baseline_echo_batch", 64 + 60 + 6 + 2 * BATCH + BATCH * KEY_BYTES, 64 + 40),
        ("baseline_echo_single", 64 + 60 + 6 + KEY_BYTES, 64 + 30),
    ] {
        let server = {
            let listener = listener.try_clone().map_err(io("listening for the baseline echo"))?;
            std::thread::spawn(move || {
                let Ok((mut stream, _)) = listener.accept() else { return };
                let _ = stream.set_nodelay(true);
                let (mut received, sent) = (vec![0; request], vec![0; reply]);
                while stream.read_exact(&mut received).is_ok() && stream.write_all(&sent).is_ok() {}
            })
        };
        let mut stream = TcpStream::connect(address).map_err(io("connecting to the baseline echo"))?;
        stream.set_nodelay(true).map_err(io("connecting to the baseline echo"))?;
        let (sent, mut received) = (vec![0; request], vec![0; reply]);
        let mut rates = vec![];
        for _ in 0..args.repeats {
            let started = Instant::now();
            let mut calls = 0;
            while started.elapsed() < SPAN / 2 {
                stream.write_all(&sent).map_err(io("the baseline echo"))?;
                stream.read_exact(&mut received).map_err(io("the baseline echo"))?;
                calls += 1;
            }
            rates.push(f64::from(calls) / started.elapsed().as_secs_f64());
        }
        drop(stream);
        let _ = server.join();
        ResultRow::new("meta", case)
            .with("request_bytes", request)
            .with("reply_bytes", reply)
            .number("calls_per_s", median(rates.clone()))
            .number("range", relative_range(&rates))
            .print();
    }
    Ok(())
}

/// Measures batches of 100 keys over the frame protocol, one thread per batch in flight.
fn framed_batches(args: &Args, master: &Master) -> Result<(), BenchError> {
    eprintln!("batches over the frame protocol …");
    for (case, lookup, target) in [("exist_framed", false, Some(3_000_000.0)), ("lookup_framed", true, None)]
    {
        for callers in [1, 2, 4] {
            let connect = || {
                let connect = |caller: usize| -> Result<_, BenchError> {
                    let link = BlockingLink::connect(master.link(caller as u64 + 1)).map_err(wrong)?;
                    Ok((link, batches(args, caller as u64, 200), 0usize))
                };
                (0..callers).map(connect).collect()
            };
            let (rates, cpu_ns) = rates(args, master, connect, |(link, batches, at)| {
                let keys = as_keys(&batches[*at % batches.len()]);
                *at += 1;
                let found = if lookup {
                    let reply = link.lookup(TENANT, &keys, 5_000, false).map_err(wrong)?;
                    let replicas = reply.replicas().map_err(wrong)?;
                    replicas.list.iter().filter(|(object, _)| object.code.is_none()).count()
                } else {
                    link.exist(TENANT, &keys)
                        .map_err(wrong)?
                        .iter()
                        .filter(|found| **found == Ok(true))
                        .count()
                };
                all_found(found, keys.len())
            })?;
            let rate = median(rates.clone());
            print_keys(line(case, args, callers, BATCH, cpu_ns, &rates), rate, target);
        }
    }
    Ok(())
}

fn all_found(found: usize, requested: usize) -> Result<u64, BenchError> {
    if found == requested {
        Ok(requested as u64)
    } else {
        Err(wrong(format!("found only {found} of {requested} keys")))
    }
}

/// Measures batches of 100 keys over gRPC.
async fn grpc_batches(args: &Args, master: &Master) -> Result<(), BenchError> {
    eprintln!("batches over gRPC …");
    let cases = [
        ("baseline_grpc_batch", GrpcProbe::Rejected, None),
        ("exist_grpc", GrpcProbe::Exist, Some(1_500_000.0)),
        ("lookup_grpc", GrpcProbe::Lookup, None),
    ];
    for (case, probe, target) in cases {
        for callers in [1usize, 4, 8] {
            let mut rates = vec![];
            let (before, mut keys) = (master.cpu()?, 0);
            for _ in 0..args.repeats {
                let mut clients = vec![];
                for caller in 0..callers {
                    let client = MasterClient::new(master.channel().await?)
                        .max_decoding_message_size(REQUEST_BYTES_MAX)
                        .max_encoding_message_size(REQUEST_BYTES_MAX);
                    let packed: Vec<prost::bytes::Bytes> =
                        batches(args, caller as u64, 200).iter().map(|batch| pack(batch)).collect();
                    clients.push((client, packed));
                }
                let started = Instant::now();
                let callers = clients.into_iter();
                let tasks: Vec<_> = callers
                    .map(|(client, packed)| tokio::spawn(grpc_caller(client, packed, probe, started)))
                    .collect();
                let mut sum = 0;
                for task in tasks {
                    sum += task.await.map_err(wrong)??;
                }
                rates.push(sum as f64 / started.elapsed().as_secs_f64());
                keys += sum;
            }
            let cpu_ns = master.cpu()?.saturating_sub(before).as_nanos() as f64 / keys.max(1) as f64;
            let rate = median(rates.clone());
            print_keys(line(case, args, callers, BATCH, cpu_ns, &rates), rate, target);
        }
    }
    Ok(())
}

fn pack(batch: &[[u8; KEY_BYTES]]) -> prost::bytes::Bytes {
    let mut keys = PackedKeysBuilder::new();
    for key in as_keys(batch) {
        keys.push(key).expect("a hundred keys fit");
    }
    keys.finish().into()
}

/// Kind of a gRPC call.
#[derive(Clone, Copy)]
enum GrpcProbe {
    /// A request of the same size without a context, which the master rejects before it reads the keys: the cost of
    /// gRPC alone.
    Rejected,
    Exist,
    Lookup,
}

async fn grpc_caller(
    mut client: MasterClient<Channel>,
    packed: Vec<prost::bytes::Bytes>,
    probe: GrpcProbe,
    started: Instant,
) -> Result<u64, BenchError> {
    let context = || Some(v1::RequestContext { timeout_ms: 10_000, caller: 1, ..Default::default() });
    let mut done = 0;
    for keys in packed.iter().cycle() {
        if started.elapsed() >= SPAN {
            break;
        }
        let found = match probe {
            GrpcProbe::Rejected => {
                let request = v1::ExistRequest { context: None, keys: keys.clone() };
                let context = client.exist(request).await.map_err(wrong)?.into_inner().context;
                if context.is_some_and(|context| context.code != 0) { BATCH } else { 0 }
            }
            GrpcProbe::Exist => {
                let request = v1::ExistRequest { context: context(), keys: keys.clone() };
                let present = client.exist(request).await.map_err(wrong)?.into_inner().present;
                present.iter().map(|bits| bits.count_ones() as usize).sum()
            }
            GrpcProbe::Lookup => {
                let request = v1::GetReplicaListRequest {
                    context: context(),
                    keys: keys.clone(),
                    lease_ms: 5_000,
                    attributes: false,
                };
                client.get_replica_list(request).await.map_err(wrong)?.into_inner().objects.len() / 64
            }
        };
        done += all_found(found, BATCH)?;
    }
    Ok(done)
}

/// Measures one thread with one key per call.
fn one_caller(args: &Args, master: &Master) -> Result<(), BenchError> {
    eprintln!("single keys …");
    for (case, lookup) in [("exist_one_caller", false), ("lookup_one_caller", true)] {
        let connect = || {
            let link = BlockingLink::connect(master.link(1)).map_err(wrong)?;
            Ok(vec![(link, batches(args, 9, 100), 0usize)])
        };
        let (rates, cpu_ns) = rates(args, master, connect, |(link, batches, at)| {
            *at += 1;
            one_key(link, &batches[*at / BATCH % batches.len()][*at % BATCH], lookup)
        })?;
        line(case, args, 1, 1, cpu_ns, &rates)
            .with_target("calls_per_s", median(rates.clone()), 40_000.0, true)
            .print();
    }
    Ok(())
}

fn one_key(link: &BlockingLink, key: &[u8; KEY_BYTES], lookup: bool) -> Result<u64, BenchError> {
    let key = Key::new(key).expect("64 bytes are a key");
    let found = if lookup {
        link.lookup_one(TENANT, key, 5_000).map_err(wrong)?.is_ok()
    } else {
        link.exist_one(TENANT, key).map_err(wrong)? == Ok(true)
    };
    all_found(found.into(), 1)
}

/// Measures many threads on one link, one key per call.
fn threads(args: &Args, master: &Master) -> Result<(), BenchError> {
    let link = BlockingLink::connect(master.link(1)).map_err(wrong)?;
    let callers = || Ok((0..CALLERS).map(|caller| (batches(args, caller as u64, 20), 0usize)).collect());
    let (rates, cpu_ns) = rates(args, master, callers, |(batches, at)| {
        *at += 1;
        one_key(&link, &batches[*at / BATCH % batches.len()][*at % BATCH], true)
    })?;
    line("lookup_64_threads", args, CALLERS, 1, cpu_ns, &rates)
        .with_target("calls_per_s", median(rates.clone()), 100_000.0, true)
        .print();
    Ok(())
}

/// Measures many tasks on one link, one key per call.
async fn tasks(args: &Args, master: &Master) -> Result<(), BenchError> {
    let link = Arc::new(AsyncLink::connect(master.link(1)).await.map_err(wrong)?);
    let mut rates = vec![];
    let (before, mut keys) = (master.cpu()?, 0);
    for _ in 0..args.repeats {
        let sets: Vec<_> = (0..CALLERS).map(|caller| batches(args, caller as u64, 20)).collect();
        let started = Instant::now();
        let mut tasks = vec![];
        for batches in sets {
            let link = Arc::clone(&link);
            tasks.push(tokio::spawn(async move {
                let mut done = 0;
                for key in batches.iter().flatten().cycle() {
                    if started.elapsed() >= SPAN {
                        break;
                    }
                    let key = Key::new(key).expect("64 bytes are a key");
                    let found = link.lookup_one(TENANT, key, 5_000).await.map_err(wrong)?.is_ok();
                    done += all_found(found.into(), 1)?;
                }
                Ok::<u64, BenchError>(done)
            }));
        }
        let mut sum = 0;
        for task in tasks {
            sum += task.await.map_err(wrong)??;
        }
        rates.push(sum as f64 / started.elapsed().as_secs_f64());
        keys += sum;
    }
    let cpu_ns = master.cpu()?.saturating_sub(before).as_nanos() as f64 / keys.max(1) as f64;
    line("lookup_64_tasks", args, CALLERS, 1, cpu_ns, &rates)
        .with_target("calls_per_s", median(rates.clone()), 250_000.0, true)
        .print();
    Ok(())
}
