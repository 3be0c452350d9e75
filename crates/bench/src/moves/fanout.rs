//! `moontide bench fanout`: clients on four hosts read the same few objects, which are on one of them.
//!
//! ```text
//!   host 0: master, node with the objects, 2 clients      host 1, 2, 3: node, 2 clients
//! ```
//!
//! The hosts are network namespaces with a host name and a directory of sockets of their own, joined by a bridge, so that a client
//! maps the memory of the node on its own host only. The same cluster runs twice: without copies of hot objects, and with them.
//! Each client reads as fast as it can; the rate is that of the second half of the time.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::{Store, StoreConfig};

use super::start_master;
use crate::process::{ServerProcess, stop, this_program};
use crate::results::{BenchError, ResultRow, check_gates, io, wrong};
use crate::scratch::Scratch;

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench fanout                     as root, with ip, unshare and nsenter: four namespaces, 3 GiB, a minute
  moontide bench fanout --objects 64 --object-kib 256

The result is one JSON object on standard output:
  without_copies_bytes_per_s, with_copies_bytes_per_s     all clients together, second half of the time
  with_over_without                                       their ratio
  seconds_to_double                                       from the first read until a second with twice the rate
  hot_copies                                              copies at the end";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Objects that all clients read
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u64).range(1..=4096))]
    objects: u64,
    /// KiB of each object
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(4..=65_536))]
    object_kib: u64,
    /// Mbit/s that a host can send
    #[arg(long, default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    link_mbit: u64,
    /// Seconds that the clients read
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(4..=3600))]
    seconds: u64,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

/// Arguments of a client process.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct ClientArgs {
    #[arg(long)]
    master: String,
    #[arg(long)]
    objects: u64,
    #[arg(long)]
    object_kib: u64,
    /// Seconds to read; 0: puts the objects instead
    #[arg(long)]
    seconds: u64,
}

const HOSTS: usize = 4;
const CLIENTS_PER_HOST: usize = 2;

/// Memory of a node.
const NODE_BYTES: u64 = 512 << 20;

/// Target: a read in place costs one copy, and one from another host at least two, with their system calls.
const RATIO: f64 = 2.0;

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let without = measure(args, &["--hot-copy-bytes", "0"])?;
    let with = measure(args, &[])?;
    let rate = |run: &Measured| {
        let half = run.bytes.len() / 2;
        run.bytes[half..].iter().sum::<u64>() as f64 / (run.bytes.len() - half) as f64
    };
    let double = with.bytes.iter().position(|&bytes| bytes as f64 >= 2.0 * rate(&without));
    let row = ResultRow::new("fanout", "four_hosts")
        .with("clients", HOSTS * CLIENTS_PER_HOST)
        .with("objects", args.objects)
        .with("object_bytes", args.object_kib << 10)
        .with("link_mbit", args.link_mbit)
        .number("without_copies_bytes_per_s", rate(&without))
        .number("with_copies_bytes_per_s", rate(&with))
        .with_target("with_over_without", rate(&with) / rate(&without), RATIO, true)
        .with("hot_copies", with.copies);
    match double {
        Some(second) => row.with("seconds_to_double", second + 1).print(),
        None => row.print(),
    }
    if args.gate { check_gates() } else { Ok(()) }
}

/// What all clients read together.
struct Measured {
    /// Bytes of each second.
    bytes: Vec<u64>,
    /// Copies of hot objects at the end.
    copies: u64,
}

fn measure(args: &Args, master_words: &[&str]) -> Result<Measured, BenchError> {
    let scratch =
        Scratch::new(&std::env::temp_dir(), "moontide-fanout").map_err(io("creating a directory"))?;
    let hosts = Hosts::create(args.link_mbit)?;
    let master = start_master(&hosts.inside(0), &scratch, &Hosts::address(0), master_words)?;
    let grpc = &*master.grpc;
    let sockets = scratch.path().join("sockets");
    std::fs::create_dir(&sockets).map_err(io("creating a directory"))?;
    let sockets = sockets.display().to_string();
    let nodes: Vec<ServerProcess> = (0..HOSTS)
        .map(|host| {
            let mut prefix = hosts.inside(host);
            // A name and a directory of its own: the memory of other nodes cannot be mapped.
            let script = "hostname \"$0\" && mount -t tmpfs tmpfs \"$1\" && shift && exec \"$@\"";
            let own = ["unshare", "--mount", "--uts", "sh", "-c", script, &format!("host-{host}"), &sockets];
            prefix.extend(own.map(str::to_owned));
            let (bytes, socket) = (NODE_BYTES.to_string(), format!("{sockets}/{host}.sock"));
            let listen = format!("{}:0", Hosts::address(host));
            let words = [
                "node",
                "--insecure-no-tls",
                "true",
                "--master",
                grpc,
                "--memory-bytes",
                &bytes,
                "--listen",
                &listen,
                "--shm-socket",
                &socket,
            ];
            Ok(ServerProcess::start_in(&prefix, &words, "ready")?.0)
        })
        .collect::<Result<_, BenchError>>()?;
    let client = |host: usize, seconds: u64| -> Result<Child, BenchError> {
        let mut command = Command::new("nsenter");
        command.args(["--target", &nodes[host].id().to_string(), "--net", "--mount", "--uts", "--"]);
        command.arg(this_program()?.get_program()).args(["bench", "fanout-client", "--master", grpc]);
        command.args(["--objects", &args.objects.to_string(), "--object-kib", &args.object_kib.to_string()]);
        command.args(["--seconds", &seconds.to_string()]).stdin(Stdio::null()).stdout(Stdio::piped());
        command.spawn().map_err(io("starting a client"))
    };
    let status = client(0, 0)?.wait().map_err(io("waiting for a client"))?;
    if !status.success() {
        return Err(wrong("the objects could not be put"));
    }
    let clients = (0..HOSTS * CLIENTS_PER_HOST).map(|number| client(number % HOSTS, args.seconds));
    let mut clients = Clients(clients.collect::<Result<_, _>>()?);
    let mut bytes = vec![0; args.seconds as usize];
    for client in &mut clients.0 {
        let lines = BufReader::new(client.stdout.take().expect("stdout is piped")).lines();
        for (second, line) in lines.enumerate().take(bytes.len()) {
            bytes[second] += line.map_err(io("reading from a client"))?.parse::<u64>().map_err(wrong)?;
        }
        if !client.wait().map_err(io("waiting for a client"))?.success() {
            return Err(wrong("a client failed; see its error above"));
        }
    }
    Ok(Measured { bytes, copies: hot_copies(&hosts, &master.admin)? })
}

/// Client processes, which are stopped on drop.
struct Clients(Vec<Child>);

impl Drop for Clients {
    fn drop(&mut self) {
        self.0.iter_mut().for_each(stop);
    }
}

/// Reads the metric of the master, from inside its namespace.
fn hot_copies(hosts: &Hosts, admin: &str) -> Result<u64, BenchError> {
    let inside = hosts.inside(0);
    let mut command = Command::new(&inside[0]);
    command.args(&inside[1..]).arg(this_program()?.get_program());
    command.args(["bench", "fanout-metric", "--admin", admin]);
    let output = command.output().map_err(io("reading a metric"))?;
    String::from_utf8_lossy(&output.stdout).trim().parse().map_err(wrong)
}

/// Arguments of the process that reads a metric.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct MetricArgs {
    #[arg(long)]
    admin: String,
}

/// Prints the number of copies of hot objects.
pub(crate) fn run_metric(args: &MetricArgs) -> Result<(), BenchError> {
    let body = crate::http::get(&args.admin, "/metrics", Duration::from_secs(10)).map_err(wrong)?;
    let text = String::from_utf8_lossy(&body);
    let line = text.lines().find_map(|line| line.strip_prefix("moontide_master_hot_copies "));
    println!("{}", line.ok_or_else(|| wrong("the master has no such metric"))?);
    Ok(())
}

/// A client: puts the objects, or reads them and prints the bytes of each second.
pub(crate) fn run_client(args: &ClientArgs) -> Result<(), BenchError> {
    let config = StoreConfig { timeout: Duration::from_secs(20), ..StoreConfig::new(&args.master) };
    let store = Store::connect(config).map_err(wrong)?;
    let key = |number: u64| format!("hot-{number}");
    let value = |number: u64| vec![number as u8; (args.object_kib as usize) << 10];
    if args.seconds == 0 {
        for number in 0..args.objects {
            store.put(key(number).as_bytes(), &value(number)).map_err(wrong)?;
        }
        return Ok(());
    }
    let start = Instant::now();
    let mut number = 0;
    for second in 1..=args.seconds {
        let mut bytes = 0;
        while start.elapsed() < Duration::from_secs(second) {
            number = (number + 1) % args.objects;
            let got = store.get(key(number).as_bytes()).map_err(wrong)?;
            match got {
                Some(got) if got.len() as u64 == args.object_kib << 10 && got[0] == number as u8 => {
                    bytes += got.len();
                }
                _ => return Err(wrong(format!("object {number} is lost or has other bytes"))),
            }
        }
        println!("{bytes}");
    }
    Ok(())
}

/// Network namespaces, one for each host and one for the bridge. Removed on drop.
struct Hosts {
    name: String,
}

impl Hosts {
    fn create(link_mbit: u64) -> Result<Hosts, BenchError> {
        let hosts = Hosts { name: format!("mtf{}", std::process::id()) };
        let name = &hosts.name;
        ip(&format!("netns add {name}b"))?;
        ip(&format!("-n {name}b link add bridge type bridge"))?;
        ip(&format!("-n {name}b link set bridge up"))?;
        for host in 0..HOSTS {
            let address = Hosts::address(host);
            ip(&format!("netns add {name}{host}"))?;
            ip(&format!("link add eth netns {name}{host} type veth peer name port{host} netns {name}b"))?;
            ip(&format!("-n {name}{host} address add {address}/24 dev eth"))?;
            ip(&format!("-n {name}{host} link set eth up"))?;
            ip(&format!("-n {name}{host} link set lo up"))?;
            ip(&format!("-n {name}b link set port{host} master bridge"))?;
            ip(&format!("-n {name}b link set port{host} up"))?;
            // 10 ms of the rate as burst, as timers are coarse.
            let burst = link_mbit * 1250;
            let shaped = format!("root tbf rate {link_mbit}mbit burst {burst} latency 20ms");
            ip(&format!("netns exec {name}{host} tc qdisc add dev eth {shaped}"))?;
        }
        Ok(hosts)
    }

    fn address(host: usize) -> String {
        format!("10.79.0.{}", host + 1)
    }

    /// Words before a command that runs on a host.
    fn inside(&self, host: usize) -> Vec<String> {
        ["ip".into(), "netns".into(), "exec".into(), format!("{}{host}", self.name)].into()
    }
}

impl Drop for Hosts {
    fn drop(&mut self) {
        let all = (0..HOSTS).map(|host| host.to_string()).chain(["b".to_owned()]);
        for host in all {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}{host}", self.name)]).output();
        }
    }
}

fn ip(words: &str) -> Result<(), BenchError> {
    let output = Command::new("ip").args(words.split_whitespace()).output().map_err(io("running ip"))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(wrong(format!(
            "ip {words}: {}; namespaces need root",
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}
