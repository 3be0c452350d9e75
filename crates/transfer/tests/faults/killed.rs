//! Owners that are killed and stopped in the middle of transfers.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_transfer::sample::SampleConfig;
use moontide_transfer::{OwnedOp, Transfer};
use rustix::process::Signal;

use crate::aborts::poll_to_the_end;
use crate::kit::{
    MIB, Punctual, Rng, check_typed, count, get_into, get_right, in_ms, link, put_from, recovers, soon,
};
use crate::process::OwnerProcess;

/// 64 MiB either way, without an owner that fills 64 MiB each time it starts.
const TRANSFER: usize = 64 << 20;

fn config() -> SampleConfig {
    SampleConfig { record_bytes: 4 * MIB, readable: 1, writable: 16, digests: false, ..Default::default() }
}

struct Scene {
    config: SampleConfig,
    content: Vec<u8>,
    memory: Vec<u8>,
    owner: OwnerProcess,
    punctual: Punctual,
    rng: Rng,
}

impl Scene {
    fn new() -> Scene {
        let rng = Rng::seeded();
        let config = config();
        let (content, owner) = (config.content(0), OwnerProcess::start(&config));
        Scene { config, content, memory: vec![0; TRANSFER], owner, punctual: Punctual::new(), rng }
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

    /// Runs a transfer while somebody sends the owner a signal, at a moment within what a transfer takes.
    fn disturbed(
        &mut self,
        link: &dyn moontide_transfer::Link,
        put: bool,
        deadline: Instant,
        signal: Signal,
        within: Duration,
    ) -> Result<(), moontide_transfer::TransferError> {
        let moment = Duration::from_nanos(self.rng.within(0, within.as_nanos() as u64 + 1));
        let pid = self.owner.pid();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                std::thread::sleep(moment);
                let pid = rustix::process::Pid::from_raw(pid as i32).expect("a child has a number");
                rustix::process::kill_process(pid, signal).expect("our child takes our signals");
            });
            self.transfer(link, put, deadline)
        })
    }
}

pub fn killed() {
    let mut scene = Scene::new();
    let (mut failed, mut rounds) = (0, 0);
    let (mut slowest, mut longest) = (Duration::ZERO, Duration::ZERO);
    let wanted = count(10, 60);
    let mut shared = None;
    // A kill that comes after the last byte shows nothing.
    while failed < wanted {
        assert!(rounds < 10 * wanted, "one of ten kills comes in the middle");
        // Every failure lengthens the pause before the next attempt, so that a link is used for two of them.
        let connections = 1 + (rounds as usize / 2) % 2;
        let link = shared.take().unwrap_or_else(|| link(scene.owner.address(), connections));
        let put = rounds % 2 == 1;
        let began = Instant::now();
        scene.transfer(&*link, put, soon()).expect("nobody disturbs");
        let undisturbed = began.elapsed();
        scene.punctual.reset();
        let (began, deadline) = (Instant::now(), in_ms(5000));
        let result = scene.disturbed(&*link, put, deadline, Signal::KILL, undisturbed / 2);
        scene.punctual.check(deadline, "a transfer whose owner was killed");
        if let Err(error) = result {
            check_typed(&error);
            failed += 1;
            longest = longest.max(began.elapsed());
        }
        scene.owner.restart();
        slowest = slowest.max(recovers(&*link, &scene.config, &scene.content, Duration::from_secs(15)));
        rounds += 1;
        if rounds % 2 == 1 {
            shared = Some(link);
        }
    }
    println!(
        "{rounds} kills: {failed} transfers failed, the longest of them after {longest:?}; \
         the link was back after {slowest:?} at most"
    );
}

pub fn stopped() {
    let mut scene = Scene::new();
    let mut slowest = Duration::ZERO;
    let all = [(700, false, 1), (3000, true, 1), (700, true, 2), (3000, false, 2)];
    let more = [(700, true, 1), (3000, false, 1), (700, false, 2), (3000, true, 2)];
    let cases = all.into_iter().chain(more.into_iter().cycle().take(count(0, 16) as usize));
    for (deadline_ms, put, connections) in cases {
        let link = link(scene.owner.address(), connections);
        let began = Instant::now();
        scene.transfer(&*link, put, soon()).expect("nobody disturbs");
        let undisturbed = began.elapsed();
        // One that was done before the owner was stopped shows nothing.
        let error = (0..50).find_map(|_| {
            scene.punctual.reset();
            let deadline = in_ms(deadline_ms);
            let result = scene.disturbed(&*link, put, deadline, Signal::STOP, undisturbed / 2);
            scene.punctual.check(deadline, "a transfer whose owner was stopped");
            if result.is_ok() {
                scene.owner.signal(Signal::CONT);
            }
            result.err()
        });
        let error = error.expect("one of fifty is stopped in the middle");
        check_typed(&error);
        println!("deadline {deadline_ms} ms, put {put}, {connections} connections: {error}");
        scene.owner.signal(Signal::CONT);
        slowest = slowest.max(recovers(&*link, &scene.config, &scene.content, Duration::from_secs(15)));
        get_right(&*link, &scene.config, 0, &scene.content);
    }
    println!("back after {slowest:?} at most");
}

/// Callers of all kinds share a link while its owner is killed and started again: each of them comes back in time.
pub fn crowd() {
    let mut scene = Scene::new();
    let kills = count(6, 60);
    let over = std::sync::atomic::AtomicBool::new(false);
    let tallies = [const { AtomicU64::new(0) }; 2];
    let link = link(scene.owner.address(), 2);
    let (config, content, shared) = (scene.config.clone(), scene.content.clone(), &*link);
    let calls: Vec<Mutex<Instant>> = (0..6).map(|_| Mutex::new(Instant::now())).collect();
    std::thread::scope(|scope| {
        for (caller, called) in calls.iter().enumerate() {
            let (config, content, over, tallies) = (&config, &content, &over, &tallies);
            scope.spawn(move || {
                let mut memory = vec![0; 4 * content.len()];
                while !over.load(Ordering::Relaxed) {
                    *called.lock().expect("no panic") = Instant::now();
                    let deadline = in_ms(2000);
                    let result = match caller % 3 {
                        0 => get_into(shared, config, 0, content, &mut memory, deadline),
                        1 => put_from(shared, config, &memory, deadline),
                        _ => {
                            let op = OwnedOp::get(config.target(0), 0, vec![0; content.len()]);
                            poll_to_the_end(Transfer::start(shared, vec![op], deadline)).map(|done| {
                                assert!(done[0].outcome.is_ok() && done[0].buffer == *content);
                            })
                        }
                    };
                    tallies[usize::from(result.is_err())].fetch_add(1, Ordering::Relaxed);
                    if let Err(error) = result {
                        check_typed(&error);
                        std::thread::sleep(Duration::from_millis(2));
                    }
                }
            });
        }
        for _ in 0..kills {
            std::thread::sleep(Duration::from_millis(scene.rng.within(50, 500)));
            scene.owner.signal(Signal::KILL);
            scene.owner.restart();
            for (caller, called) in calls.iter().enumerate() {
                let ago = called.lock().expect("no panic").elapsed();
                if ago > Duration::from_secs(6) {
                    // A thread that hangs cannot be joined.
                    eprintln!("caller {caller} has not come back for {ago:?}, with a deadline of 2 s");
                    std::process::abort();
                }
            }
        }
        let until = in_ms(2500);
        while Instant::now() < until {
            std::thread::sleep(Duration::from_millis(50));
        }
        let stuck = calls.iter().map(|called| called.lock().expect("no panic").elapsed()).max();
        if stuck > Some(Duration::from_millis(2400)) {
            eprintln!("a caller has not come back for {stuck:?}, with a deadline of 2 s; threads that run:");
            eprintln!("{}", crate::kit::running_threads().join("\n"));
            std::process::abort();
        }
        over.store(true, Ordering::Relaxed);
    });
    let [well, failed] = tallies.map(AtomicU64::into_inner);
    println!("{kills} kills: {well} transfers went well, {failed} failed");
}

/// A rail that broke often, but worked for long since, is tried again at once.
pub fn forgiven() {
    if count(0, 1) == 0 {
        println!("half a minute, most of it waiting: only with MOONTIDE_FAULTS=full");
        return;
    }
    let mut scene = Scene::new();
    let link = link(scene.owner.address(), 1);
    let mut memory = vec![0; scene.content.len()];
    // Away for so long that many attempts fail.
    scene.owner.signal(Signal::KILL);
    let until = in_ms(7000);
    while Instant::now() < until {
        let _ = get_into(&*link, &scene.config, 0, &scene.content, &mut memory, in_ms(100));
        std::thread::sleep(Duration::from_millis(20));
    }
    scene.owner.restart();
    recovers(&*link, &scene.config, &scene.content, Duration::from_secs(20));
    // `FORGIVEN_AFTER` is 10 s.
    let until = in_ms(11_000);
    while Instant::now() < until {
        get_right(&*link, &scene.config, 0, &scene.content);
        std::thread::sleep(Duration::from_millis(100));
    }
    scene.owner.signal(Signal::KILL);
    scene.owner.restart();
    let took = recovers(&*link, &scene.config, &scene.content, Duration::from_secs(20));
    println!("back {took:?} after the owner was");
    // The first pauses are 100 and 200 ms; the owner was away for less than a second.
    assert!(took < Duration::from_secs(2), "old failures still count: {took:?}");
}
