//! Rails that fail: an owner and a client in separate network namespaces, joined by two pairs of interfaces.
//!
//! ```text
//!   namespace a: owner ── 10.77.0.1 ═══ rail 0 ═══ 10.77.0.2 ── client :namespace b
//!                      ── 10.77.1.1 ═══ rail 1 ═══ 10.77.1.2 ──
//! ```
//!
//! A rail is partitioned silently: packets vanish in both directions, and no reset is sent. Either `nft` drops incoming
//! packets at both ends, or, without it, `ip` gives each end a wrong link-layer address for the other.
//!
//! Needs root and `ip`; without them the tests are not run, which is a failure under `CI=true`. Owner and client are this binary,
//! started again with a role. `MOONTIDE_TESTS=full` moves 10 GiB instead of 1.

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "faults/harness.rs"]
mod harness;
#[path = "../../types/tests/support/not_run.rs"]
mod not_run;
#[path = "faults/process.rs"]
mod process;

use std::io::{BufRead, BufReader, Read, Write};
use std::net::SocketAddr;
use std::process::{Child, ChildStdin, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use harness::{MIB, TestSelection, WakeupJitter, check_typed, codes, count, get_into, in_ms, open, soon};
use moontide_proto::{FrameKind, OpFlags};
use moontide_transfer::sample::SampleNodeConfig;
use moontide_transfer::{Link, Op, Target, call, run};
use moontide_types::limits::PAGE_BYTES;
use not_run::not_run;
use process::OwnerProcess;

const TESTS: &[(&str, fn())] = &[
    ("gets_continue_on_one_rail_and_return_to_healed_rail", gets),
    ("gets_continue_with_several_connections_per_rail", gets_over_eight),
    ("puts_continue_on_one_rail", puts),
    ("rail_lost_while_idle_fails_no_transfer", idle_rail),
    ("get_without_rails_fails_typed_and_recovers_after_healing", all_rails),
];

/// Deadline of a transfer.
const DEADLINE_MS: u64 = 5000;

fn config() -> SampleNodeConfig {
    SampleNodeConfig { record_bytes: 16 * MIB, readable: 2, writable: 16, ..Default::default() }
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["--role", "client", "gets", addresses] => client_gets(&addresses_of(addresses), 2),
        ["--role", "client", "gets over 8", addresses] => client_gets(&addresses_of(addresses), 8),
        ["--role", "client", "puts", addresses] => client_puts(&addresses_of(addresses)),
        ["--role", "client", "small gets", addresses] => client_small_gets(&addresses_of(addresses)),
        ["--role", "client", "all", addresses] => client_all_rails(&addresses_of(addresses)),
        ["--role", ..] => process::owner(&arguments),
        _ => {}
    }
    let selection = TestSelection::from_arguments(&arguments, TESTS, &[]);
    for (name, test) in selection.tests {
        if selection.list {
            println!("{name}: test");
            continue;
        }
        if let Some(missing) = missing_requirement() {
            not_run(format_args!("{name}: {missing}"));
            continue;
        }
        test(); // a failure is a panic, which ends the process with an error
        println!("test {name} ... ok");
    }
    ExitCode::SUCCESS
}

fn missing_requirement() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("needs root to create network namespaces");
    }
    let runs = |word: &str| Command::new(word).arg("-V").output().is_ok();
    if !runs("ip") {
        return Some("needs ip (iproute2)");
    }
    let created = Command::new("unshare").args(["--net", "true"]).output();
    match created {
        Ok(created) if created.status.success() => None,
        _ => Some("network namespaces cannot be created here"),
    }
}

// ------------------------------------------------------------------------------------------------------ namespaces

/// Two namespaces and two rails. Dropping it removes them.
struct Network {
    name: String,
    has_nft: bool,
}

#[track_caller]
fn ip(words: &str) {
    let output = Command::new("ip").args(words.split_whitespace()).output().expect("ip runs");
    assert!(output.status.success(), "ip {words}: {}", String::from_utf8_lossy(&output.stderr));
}

impl Network {
    fn new() -> Network {
        Network::remove_leftovers();
        let has_nft = Command::new("nft").arg("-v").output().is_ok_and(|output| output.status.success());
        let network = Network { name: format!("mt{}", std::process::id()), has_nft };
        let name = &network.name;
        ip(&format!("netns add {name}a"));
        ip(&format!("netns add {name}b"));
        for rail in 0..2 {
            ip(&format!(
                "link add {name}a{rail} netns {name}a type veth peer name {name}b{rail} netns {name}b"
            ));
            for (side, host) in [("a", 1), ("b", 2)] {
                ip(&format!("-n {name}{side} address add 10.77.{rail}.{host}/24 dev {name}{side}{rail}"));
                ip(&format!("-n {name}{side} link set {name}{side}{rail} up"));
                ip(&format!("-n {name}{side} link set lo up"));
            }
        }
        println!("rails are partitioned by {}", if has_nft { "nft" } else { "ip neigh" });
        network
    }

    /// Removes namespaces of test runs that were killed.
    fn remove_leftovers() {
        let Ok(entries) = std::fs::read_dir("/run/netns") else { return };
        for entry in entries.flatten() {
            let name = entry.file_name().to_string_lossy().into_owned();
            let pid = name.strip_prefix("mt").and_then(|rest| rest.strip_suffix(['a', 'b']));
            if let Some(pid) = pid.and_then(|pid| pid.parse::<u32>().ok())
                && !std::path::Path::new(&format!("/proc/{pid}")).exists()
            {
                let _ = Command::new("ip").args(["netns", "del", &name]).status();
            }
        }
    }

    fn inside(&self, side: &str) -> Vec<String> {
        ["ip".into(), "netns".into(), "exec".into(), format!("{}{side}", self.name)].into()
    }

    fn owner(&self) -> OwnerProcess {
        let listen = [0, 1].map(|rail| SocketAddr::from(([10, 77, rail, 1], 0)));
        OwnerProcess::start_at(&config(), &listen, &self.inside("a"))
    }

    fn client(&self, what: &str, owner: &OwnerProcess) -> Client {
        let words = self.inside("b");
        let addresses: Vec<String> = owner.addresses.iter().map(SocketAddr::to_string).collect();
        let exe = std::env::current_exe().expect("path of this test");
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]).arg(exe).args(["--role", "client", what, &addresses.join(",")]);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("start this test again");
        let (input, output) = (child.stdin.take(), child.stdout.take().expect("stdout is piped"));
        Client { child, input, lines: BufReader::new(output).lines() }
    }

    fn nft(&self, side: &str, rules: &str) {
        let words = self.inside(side);
        let output =
            Command::new(&words[0]).args(&words[1..]).args(["nft", rules]).output().expect("nft runs");
        assert!(output.status.success(), "nft {rules}: {}", String::from_utf8_lossy(&output.stderr));
    }

    /// Partitions a rail: no packet passes any more.
    fn partition(&self, rail: usize) {
        let name = &self.name;
        for (side, other) in [("a", 2), ("b", 1)] {
            if self.has_nft {
                let chain = "type filter hook input priority 0; policy accept;";
                self.nft(
                    side,
                    &format!(
                        "add table inet cut{rail}; add chain inet cut{rail} in {{ {chain} }}; \
                         add rule inet cut{rail} in iifname {name}{side}{rail} drop"
                    ),
                );
            } else {
                let wrong = "lladdr 02:00:00:00:00:99 nud permanent";
                ip(&format!(
                    "-n {name}{side} neigh replace 10.77.{rail}.{other} {wrong} dev {name}{side}{rail}"
                ));
            }
        }
    }

    fn heal(&self, rail: usize) {
        let name = &self.name;
        for (side, other) in [("a", 2), ("b", 1)] {
            if self.has_nft {
                self.nft(side, &format!("delete table inet cut{rail}"));
            } else {
                ip(&format!("-n {name}{side} neigh del 10.77.{rail}.{other} dev {name}{side}{rail}"));
            }
        }
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        for side in ["a", "b"] {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}{side}", self.name)]).status();
        }
    }
}

// ---------------------------------------------------------------------------------------------------------- client

/// A client process, as the test sees it.
struct Client {
    child: Child,
    input: Option<ChildStdin>,
    lines: std::io::Lines<BufReader<std::process::ChildStdout>>,
}

/// A line of a client: bytes transferred so far, and bytes over each rail.
#[derive(Clone, Copy, Debug)]
struct Progress {
    bytes: u64,
    rails: [u64; 2],
}

impl Client {
    /// Returns the next line, or `None` when the client has exited successfully.
    fn next(&mut self) -> Option<String> {
        match self.lines.next() {
            Some(line) => Some(line.expect("read a line of the client")),
            None => {
                let status = self.child.wait().expect("wait for the client");
                assert!(status.success(), "the client failed: {status}");
                None
            }
        }
    }

    fn progress(&mut self) -> Option<Progress> {
        loop {
            let line = self.next()?;
            let Some(numbers) = line.strip_prefix("progress ") else {
                println!("{line}");
                continue;
            };
            let numbers: Vec<u64> = numbers.split(' ').map(|word| word.parse().expect("a number")).collect();
            return Some(Progress { bytes: numbers[0], rails: [numbers[1], numbers[2]] });
        }
    }

    /// Makes the client continue with its next step.
    fn proceed(&mut self) {
        self.input.as_mut().expect("stdin is piped").write_all(b"\n").expect("the client reads its input");
    }
}

impl Drop for Client {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn addresses_of(words: &str) -> Vec<SocketAddr> {
    process::die_with_parent();
    words.split(',').map(|word| word.parse().expect("an address")).collect()
}

/// Returns the bytes received and sent over each rail, as counted by the kernel.
fn rails() -> [u64; 2] {
    let mut sums = [0; 2];
    for entry in std::fs::read_dir("/sys/class/net").expect("interfaces").flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        let Some(rail) = name.strip_prefix("mt").and_then(|rest| rest.split_once('b')) else { continue };
        for counter in ["rx_bytes", "tx_bytes"] {
            let text = std::fs::read_to_string(entry.path().join("statistics").join(counter));
            let bytes: u64 = text.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
            sums[rail.1.parse::<usize>().expect("a rail's number")] += bytes;
        }
    }
    sums
}

fn print_line(line: &str) {
    println!("{line}");
    let _ = std::io::stdout().flush();
}

fn print_progress(bytes: u64) {
    let [first, second] = rails();
    print_line(&format!("progress {bytes} {first} {second}"));
}

/// Statistics of the transfers of a client.
struct Stats {
    began: Instant,
    bytes: u64,
    longest: Duration,
}

impl Stats {
    fn new() -> Stats {
        Stats { began: Instant::now(), bytes: 0, longest: Duration::ZERO }
    }

    /// Runs one transfer, which must succeed before its deadline.
    #[track_caller]
    fn run(&mut self, link: &dyn Link, op: Op<'_>) {
        let (began, mut ops) = (Instant::now(), [op]);
        let result = run(link, &mut ops, in_ms(DEADLINE_MS));
        let took = began.elapsed();
        if let Err(error) = result {
            panic!("after {took:?}, although a rail works: {error}");
        }
        assert_eq!(ops[0].outcome(), Some(Ok(())));
        assert!(took <= Duration::from_millis(DEADLINE_MS + 50), "{took:?}");
        self.longest = self.longest.max(took);
        self.bytes += ops[0].core().len();
    }

    fn summary(&self, what: &str) {
        let seconds = self.began.elapsed().as_secs_f64();
        print_line(&format!(
            "{what}: {} MiB in {seconds:.1} s, {:.2} GB/s; the longest transfer took {:?}",
            self.bytes >> 20,
            self.bytes as f64 / seconds / 1e9,
            self.longest
        ));
    }
}

/// Runs gets until a line arrives on its input.
fn client_gets(addresses: &[SocketAddr], connections: usize) -> ! {
    let config = config();
    let contents: Vec<Vec<u8>> = (0..config.readable).map(|record| config.content(record)).collect();
    let roots: Vec<u64> =
        (0..).zip(&contents).map(|(n, bytes)| config.digest_context(n).payload(bytes, |_| ())).collect();
    let link = open(addresses, connections, soon()).expect("the owner is running");
    let stop = Arc::<AtomicBool>::default();
    let stopped = Arc::clone(&stop);
    std::thread::spawn(move || {
        let _ = std::io::stdin().read(&mut [0]);
        stopped.store(true, Ordering::SeqCst);
    });
    let (mut stats, mut printed_at) = (Stats::new(), Instant::now());
    let mut memory = vec![0; config.record_bytes as usize];
    let mut digests = vec![0; config.record_bytes.div_ceil(PAGE_BYTES) as usize];
    while !stop.load(Ordering::SeqCst) {
        let record = (stats.bytes / config.record_bytes) as u32 % config.readable;
        let context = config.digest_context(record);
        digests.fill(0);
        memory[..4096].fill(0);
        let op = Op::get(config.target(record), 0, &mut memory).digested(context, &mut digests);
        stats.run(&*link, op.expect("whole pages"));
        assert_eq!(context.root_of(digests.iter().copied()), roots[record as usize], "record {record}");
        assert!(memory == contents[record as usize], "record {record}");
        if printed_at.elapsed() > Duration::from_millis(50) {
            print_progress(stats.bytes);
            printed_at = Instant::now();
        }
    }
    stats.summary("gets");
    std::process::exit(0)
}

/// Puts 256 MiB, commits them and reads them back.
fn client_puts(addresses: &[SocketAddr]) -> ! {
    let config = config();
    let content = config.content(99);
    let link = open(addresses, 2, soon()).expect("the owner is running");
    let mut stats = Stats::new();
    for record in config.readable..config.records() {
        let context = config.digest_context(record);
        let mut digests = vec![0; config.record_bytes.div_ceil(PAGE_BYTES) as usize];
        let op = Op::put(config.target(record), 0, &content).digested(context, &mut digests);
        stats.run(&*link, op.expect("whole pages"));
        let root = context.root_of(digests.iter().copied());
        let body = config.commit_body(record, root);
        let reply = call(&*link, FrameKind::Commit, body, in_ms(DEADLINE_MS)).expect("a rail works");
        assert_eq!(codes(&reply), [None]);
        print_progress(stats.bytes);
    }
    stats.summary("puts");
    let mut memory = vec![0; content.len()];
    let mut stats = Stats::new();
    for record in config.readable..config.records() {
        memory.fill(0);
        let target = Target { flags: OpFlags::NONE, ..config.target(record) };
        stats.run(&*link, Op::get(target, 0, &mut memory));
        assert!(memory == content, "record {record}");
    }
    stats.summary("read back");
    std::process::exit(0)
}

/// Repeats small gets over many connections, half of which are dead without having failed yet.
fn client_small_gets(addresses: &[SocketAddr]) -> ! {
    let config = config();
    let content = config.content(0);
    let link = open(addresses, 16, soon()).expect("the owner is running");
    // All connections open, and most of them are not used.
    std::thread::sleep(Duration::from_millis(500));
    print_progress(0);
    let _ = std::io::stdin().read(&mut [0]);
    let mut stats = Stats::new();
    let mut memory = vec![0; 64 << 10];
    for _ in 0..100 {
        memory.fill(0);
        stats.run(&*link, Op::get(config.target(0), 0, &mut memory));
        assert!(memory == content[..memory.len()]);
        std::thread::sleep(Duration::from_millis(10));
    }
    stats.summary("small gets");
    std::process::exit(0)
}

/// Runs gets: with all rails, with none, and with all rails healed.
fn client_all_rails(addresses: &[SocketAddr]) -> ! {
    let wait_for_input = || drop(std::io::stdin().read(&mut [0]));
    let config = config();
    let content = config.content(0);
    let link = open(addresses, 2, soon()).expect("the owner is running");
    let mut memory = vec![0; content.len()];
    get_into(&*link, &config, 0, &content, &mut memory, soon()).expect("all rails work");
    print_progress(0);
    wait_for_input();
    let jitter = WakeupJitter::new();
    for deadline_ms in [600, 2500, 1000] {
        jitter.reset();
        let (began, deadline) = (Instant::now(), in_ms(deadline_ms));
        let error = get_into(&*link, &config, 0, &content, &mut memory, deadline).expect_err("no rail works");
        jitter.check(deadline, "a get without a rail");
        check_typed(&error);
        print_line(&format!("deadline {deadline_ms} ms: {error} after {:?}", began.elapsed()));
    }
    print_progress(0);
    wait_for_input();
    let took = harness::wait_for_recovery(&*link, &config, &content, Duration::from_secs(15));
    print_line(&format!("recovered after {took:?}"));
    std::process::exit(0)
}

// ----------------------------------------------------------------------------------------------------------- tests

fn gets() {
    partition_and_heal("gets");
}

fn gets_over_eight() {
    partition_and_heal("gets over 8");
}

fn partition_and_heal(what: &str) {
    let total = u64::from(count(1, 10)) << 30;
    let network = Network::new();
    let owner = network.owner();
    let mut client = network.client(what, &owner);
    let (began, limit) = (Instant::now(), Duration::from_secs(60 + 10 * (total >> 30)));
    let mut next = || {
        let progress = client.progress().expect("the client runs until it gets a line");
        assert!(began.elapsed() < limit, "not done after {limit:?}: {progress:?}");
        progress
    };
    let all = loop {
        let progress = next();
        if progress.bytes >= total / 3 {
            break progress;
        }
    };
    assert!(all.rails.iter().all(|&bytes| bytes > all.bytes / 5), "both rails are used: {all:?}");
    network.partition(1);
    let partitioned_at = Instant::now();
    let during = loop {
        let progress = next();
        if progress.bytes >= total * 2 / 3 && partitioned_at.elapsed() > Duration::from_secs(3) {
            break progress;
        }
    };
    network.heal(1);
    let healed_at = Instant::now();
    let after = loop {
        let progress = next();
        if progress.bytes >= total && progress.rails[1] > during.rails[1] + (64 << 20) {
            break progress;
        }
    };
    println!(
        "bytes over each rail: {:?} before the partition, {:?} until healing, {:?} at the end; \
         the healed rail was in use again after at most {:?}",
        all.rails,
        during.rails,
        after.rails,
        healed_at.elapsed()
    );
    client.proceed();
    while let Some(line) = client.next() {
        println!("{line}");
    }
}

fn puts() {
    let network = Network::new();
    let owner = network.owner();
    let mut client = network.client("puts", &owner);
    let mut progress = || client.progress();
    while progress().is_some_and(|progress| progress.bytes < 5 * 16 * MIB) {}
    network.partition(0);
    while progress().is_some_and(|progress| progress.bytes < 12 * 16 * MIB) {}
    network.heal(0);
    while progress().is_some() {}
}

/// A rail fails while it is idle. After the first connection has detected that, the others need not wait for it again.
fn idle_rail() {
    let network = Network::new();
    let owner = network.owner();
    let mut client = network.client("small gets", &owner);
    client.progress().expect("the client starts");
    network.partition(1);
    client.proceed();
    while let Some(line) = client.next() {
        println!("{line}");
    }
}

fn all_rails() {
    let network = Network::new();
    let owner = network.owner();
    let mut client = network.client("all", &owner);
    client.progress().expect("the client starts");
    network.partition(0);
    network.partition(1);
    client.proceed();
    client.progress().expect("the client waits for input");
    network.heal(0);
    network.heal(1);
    client.proceed();
    while let Some(line) = client.next() {
        println!("{line}");
    }
}
