//! Owners that are killed and stopped during transfers.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_transfer::sample::SampleNodeConfig;
use moontide_transfer::{OwnedOp, Transfer};
use rustix::process::Signal;

use crate::aborts::block_on;
use crate::harness::{
    MIB, Rng, WakeupJitter, check_typed, count, get_into, get_ok, in_ms, link, put_from, soon,
    wait_for_recovery,
};
use crate::process::OwnerProcess;

/// 64 MiB in either direction, without an owner that must fill 64 MiB each time it starts.
const TRANSFER: usize = 64 << 20;

fn config() -> SampleNodeConfig {
    SampleNodeConfig {
        record_bytes: 4 * MIB,
        readable: 1,
        writable: 16,
        digests: false,
        ..Default::default()
    }
}

struct Harness {
    config: SampleNodeConfig,
    content: Vec<u8>,
    memory: Vec<u8>,
    owner: OwnerProcess,
    jitter: WakeupJitter,
    rng: Rng,
}

impl Harness {
    fn new() -> Harness {
        let rng = Rng::seeded();
        let config = config();
        let (content, owner) = (config.content(0), OwnerProcess::start(&config));
        Harness { config, content, memory: vec![0; TRANSFER], owner, jitter: WakeupJitter::new(), rng }
    }

    fn transfer(
        &mut self,
        link: &dyn moontide_transfer::Link,
        put: bool,
        deadline: Instant,
    ) -> Result<(), moontide_transfer::TransferError> {
        if put {
            put_from(link, &self.config, &self.memory, deadline)
        } else {
            get_into(link, &self.config, 0, &self.content, &mut self.memory, deadline)
        }
    }

    /// Runs a transfer while another thread sends the owner a signal after a random delay of at most `within`.
    fn transfer_with_signal(
        &mut self,
        link: &dyn moontide_transfer::Link,
        put: bool,
        deadline: Instant,
        signal: Signal,
        within: Duration,
    ) -> Result<(), moontide_transfer::TransferError> {
        let delay = Duration::from_nanos(self.rng.within(0, within.as_nanos() as u64 + 1));
        let pid = self.owner.pid();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(delay);
                let pid = rustix::process::Pid::from_raw(pid as i32).expect("a child has a process id");
                rustix::process::kill_process(pid, signal).expect("signal a child process");
            });
            self.transfer(link, put, deadline)
        })
    }
}

pub fn killed() {
    let mut harness = Harness::new();
    let (mut failed, mut rounds) = (0, 0);
    let (mut slowest, mut longest) = (Duration::ZERO, Duration::ZERO);
    let failures_needed = count(10, 60);
    let mut shared = None;
    // A kill after the last byte shows nothing.
    while failed < failures_needed {
        assert!(rounds < 10 * failures_needed, "at least one of ten kills is during the transfer");
        // Every failure lengthens the backoff before the next attempt, so a link is used for only two of them.
        let connections = 1 + (rounds as usize / 2) % 2;
        let link = shared.take().unwrap_or_else(|| link(harness.owner.address(), connections));
        let put = rounds % 2 == 1;
        let began = Instant::now();
        harness.transfer(&*link, put, soon()).expect("no fault");
        let undisturbed = began.elapsed();
        harness.jitter.reset();
        let (began, deadline) = (Instant::now(), in_ms(5000));
        let result = harness.transfer_with_signal(&*link, put, deadline, Signal::KILL, undisturbed / 2);
        harness.jitter.check(deadline, "a transfer whose owner was killed");
        if let Err(error) = result {
            check_typed(&error);
            failed += 1;
            longest = longest.max(began.elapsed());
        }
        harness.owner.restart();
        slowest = slowest.max(wait_for_recovery(
            &*link,
            &harness.config,
            &harness.content,
            Duration::from_secs(15),
        ));
        rounds += 1;
        if rounds % 2 == 1 {
            shared = Some(link);
        }
    }
    println!(
        "{rounds} kills: {failed} transfers failed, the longest of them after {longest:?}; \
         the link recovered after {slowest:?} at most"
    );
}

pub fn stopped() {
    let mut harness = Harness::new();
    let mut slowest = Duration::ZERO;
    let all = [(700, false, 1), (3000, true, 1), (700, true, 2), (3000, false, 2)];
    let more = [(700, true, 1), (3000, false, 1), (700, false, 2), (3000, true, 2)];
    let cases = all.into_iter().chain(more.into_iter().cycle().take(count(0, 16) as usize));
    for (deadline_ms, put, connections) in cases {
        let link = link(harness.owner.address(), connections);
        let began = Instant::now();
        harness.transfer(&*link, put, soon()).expect("no fault");
        let undisturbed = began.elapsed();
        // A transfer that ended before the owner was stopped shows nothing.
        let error = (0..50).find_map(|_| {
            harness.jitter.reset();
            let deadline = in_ms(deadline_ms);
            let result = harness.transfer_with_signal(&*link, put, deadline, Signal::STOP, undisturbed / 2);
            harness.jitter.check(deadline, "a transfer whose owner was stopped");
            if result.is_ok() {
                harness.owner.signal(Signal::CONT);
            }
            result.err()
        });
        let error = error.expect("at least one of fifty transfers is stopped");
        check_typed(&error);
        println!("deadline {deadline_ms} ms, put {put}, {connections} connections: {error}");
        harness.owner.signal(Signal::CONT);
        slowest = slowest.max(wait_for_recovery(
            &*link,
            &harness.config,
            &harness.content,
            Duration::from_secs(15),
        ));
        get_ok(&*link, &harness.config, 0, &harness.content);
    }
    println!("recovered after {slowest:?} at most");
}

/// Callers that wait or poll share a link while its owner is killed and restarted: each returns in time.
pub fn concurrent_callers() {
    let mut harness = Harness::new();
    let kills = count(6, 60);
    let finished = std::sync::atomic::AtomicBool::new(false);
    let counts = [const { AtomicU64::new(0) }; 2];
    let link = link(harness.owner.address(), 2);
    let (config, content, shared) = (harness.config.clone(), harness.content.clone(), &*link);
    let calls: Vec<Mutex<Instant>> = (0..6).map(|_| Mutex::new(Instant::now())).collect();
    std::thread::scope(|scope| {
        for (caller, called_at) in calls.iter().enumerate() {
            let (config, content, finished, counts) = (&config, &content, &finished, &counts);
            scope.spawn(move || {
                let mut memory = vec![0; 4 * content.len()];
                while !finished.load(Ordering::Relaxed) {
                    *called_at.lock().expect("no panic") = Instant::now();
                    let deadline = in_ms(2000);
                    let result = match caller % 3 {
                        0 => get_into(shared, config, 0, content, &mut memory, deadline),
                        1 => put_from(shared, config, &memory, deadline),
                        _ => {
                            let op = OwnedOp::get(config.target(0), 0, vec![0; content.len()]);
                            block_on(Transfer::start(shared, vec![op], deadline)).map(|done| {
                                assert!(done[0].outcome.is_ok() && done[0].buffer == *content);
                            })
                        }
                    };
                    counts[usize::from(result.is_err())].fetch_add(1, Ordering::Relaxed);
                    if let Err(error) = result {
                        check_typed(&error);
                        std::thread::sleep(Duration::from_millis(2));
                    }
                }
            });
        }
        for _ in 0..kills {
            std::thread::sleep(Duration::from_millis(harness.rng.within(50, 500)));
            harness.owner.signal(Signal::KILL);
            harness.owner.restart();
            for (caller, called_at) in calls.iter().enumerate() {
                let elapsed = called_at.lock().expect("no panic").elapsed();
                if elapsed > Duration::from_secs(6) {
                    // A blocked thread cannot be joined.
                    eprintln!("caller {caller} has not returned for {elapsed:?}, with a deadline of 2 s");
                    std::process::abort();
                }
            }
        }
        let until = in_ms(2500);
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(50));
        }
        let longest = calls.iter().map(|called_at| called_at.lock().expect("no panic").elapsed()).max();
        if longest > Some(Duration::from_millis(2400)) {
            eprintln!("a caller has not returned for {longest:?}, with a deadline of 2 s; running threads:");
            eprintln!("{}", crate::harness::running_threads().join("\n"));
            std::process::abort();
        }
        finished.store(true, Ordering::Relaxed);
    });
    let [succeeded, failed] = counts.map(AtomicU64::into_inner);
    println!("{kills} kills: {succeeded} transfers succeeded, {failed} failed");
}

/// A rail that failed often, but has worked for long since, is tried again at once.
pub fn failures_reset() {
    let mut harness = Harness::new();
    let link = link(harness.owner.address(), 1);
    let mut memory = vec![0; harness.content.len()];
    // Down for so long that many attempts fail.
    harness.owner.signal(Signal::KILL);
    let until = in_ms(7000);
    while Instant::now() < until {
        let _ = get_into(&*link, &harness.config, 0, &harness.content, &mut memory, in_ms(100));
        std::thread::sleep(Duration::from_millis(20));
    }
    harness.owner.restart();
    wait_for_recovery(&*link, &harness.config, &harness.content, Duration::from_secs(20));
    // `FAILURES_RESET_AFTER` is 10 s.
    let until = in_ms(11_000);
    while Instant::now() < until {
        get_ok(&*link, &harness.config, 0, &harness.content);
        std::thread::sleep(Duration::from_millis(100));
    }
    harness.owner.signal(Signal::KILL);
    harness.owner.restart();
    let took = wait_for_recovery(&*link, &harness.config, &harness.content, Duration::from_secs(20));
    println!("recovered {took:?} after the owner");
    // The first backoffs are 100 and 200 ms; the owner was down for less than a second.
    assert!(took < Duration::from_secs(2), "old failures still count: {took:?}");
}
