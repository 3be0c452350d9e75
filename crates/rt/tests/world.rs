//! The simulated world itself: its locks exclude, its time is virtual, equal seeds give equal runs, and bugs of concurrent
//! code are found and reported by name. Every failure prints the seed.
#![cfg(sim)]

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use moontide_rt::collections::{HashMap, HashSet};
use moontide_rt::sim::{self, Failure, FailureKind, Report, WorldConfig};
use moontide_rt::sync::mpsc::{self, RecvTimeoutError, TryRecvError};
use moontide_rt::sync::{Condvar, Mutex, RwLock};
use moontide_rt::thread;
use moontide_rt::time::Instant;

const MS: Duration = Duration::from_millis(1);
const HOUR: Duration = Duration::from_secs(3600);

/// Runs a world that must not fail.
fn run<T: Send + 'static>(config: &WorldConfig, main: impl FnOnce() -> T + Send + 'static) -> Report<T> {
    sim::run(config, main).unwrap_or_else(|failure| panic!("{failure}"))
}

/// Switches at every tenth point.
fn busy(seed: u64) -> WorldConfig {
    WorldConfig { switch_per_million: 100_000, ..WorldConfig::new(seed) }
}

/// Returns the first failure of these seeds, and the number of seeds up to it.
fn first_failure(seeds: u64, main: fn()) -> Option<(u64, Failure)> {
    (0..seeds).find_map(|seed| Some((seed + 1, sim::run(&busy(seed), main).err()?)))
}

/// Four threads add to a counter by a read and a write, as far as possible at the same time.
fn count(with_lock: bool) -> u64 {
    let shared = Arc::new((Mutex::new(()), AtomicU64::new(0), AtomicBool::new(false)));
    let add = |_| {
        let shared = shared.clone();
        thread::spawn(move || {
            for _ in 0..10 {
                let guard = with_lock.then(|| shared.0.lock());
                let was_inside = shared.2.swap(true, Ordering::Relaxed);
                assert!(!with_lock || !was_inside, "two threads have the lock");
                let before = shared.1.load(Ordering::Relaxed);
                thread::sleep(MS);
                shared.1.store(before + 1, Ordering::Relaxed);
                shared.2.store(false, Ordering::Relaxed);
                drop(guard);
            }
        })
    };
    let threads: Vec<_> = (0..4).map(add).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    shared.1.load(Ordering::Relaxed)
}

#[test]
fn mutex_excludes_other_threads_also_while_its_holder_sleeps() {
    for seed in 0..100 {
        assert_eq!(run(&WorldConfig::drawn(seed), || count(true)).value, 40, "seed {seed}");
    }
}

#[test]
fn missing_lock_loses_updates() {
    assert!((0..10).any(|seed| run(&WorldConfig::new(seed), || count(false)).value < 40));
}

/// Two writers and four readers of one value. Returns the largest number of readers at the same time.
fn read_and_write() -> u64 {
    let shared = Arc::new((RwLock::new(0u64), AtomicU64::new(0), AtomicU64::new(0)));
    let write = |shared: &(RwLock<u64>, AtomicU64, AtomicU64)| {
        let mut value = shared.0.write();
        *value += 1;
        assert_eq!(shared.1.load(Ordering::Relaxed), 0, "a reader beside a writer");
        thread::sleep(MS);
        assert_eq!(shared.1.load(Ordering::Relaxed), 0, "a reader beside a writer");
    };
    let read = |shared: &(RwLock<u64>, AtomicU64, AtomicU64)| {
        let value = shared.0.read();
        let before = *value;
        let readers = shared.1.fetch_add(1, Ordering::Relaxed) + 1;
        shared.2.fetch_max(readers, Ordering::Relaxed);
        thread::sleep(MS);
        assert_eq!(*value, before, "the value changed under a reader");
        shared.1.fetch_sub(1, Ordering::Relaxed);
    };
    let start = |number| {
        let shared = shared.clone();
        thread::spawn(move || (0..5).for_each(|_| if number < 2 { write(&shared) } else { read(&shared) }))
    };
    let threads: Vec<_> = (0..6).map(start).collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    assert_eq!(*shared.0.read(), 10);
    shared.2.load(Ordering::Relaxed)
}

#[test]
fn rw_lock_admits_readers_together_and_writers_alone() {
    let together = (0..100).filter(|&seed| run(&WorldConfig::drawn(seed), read_and_write).value > 1).count();
    assert!(together > 50, "readers were together in {together} of 100 worlds");
}

#[test]
fn condvar_wait_times_out_in_virtual_time() {
    let started = std::time::Instant::now();
    let report = run(&WorldConfig::new(1), || {
        let (mutex, condvar) = (Mutex::new(()), Condvar::new());
        let (start, mut guard) = (Instant::now(), mutex.lock());
        assert!(condvar.wait_for(&mut guard, 10 * HOUR).timed_out());
        assert!(condvar.wait_until(&mut guard, start + 20 * HOUR).timed_out());
        start.elapsed()
    });
    assert!((20 * HOUR..20 * HOUR + MS).contains(&report.value), "{:?}", report.value);
    assert!(report.elapsed >= 20 * HOUR);
    assert!(started.elapsed() < Duration::from_secs(60), "virtual time took real time");
}

#[test]
fn notified_wait_ends_before_its_time() {
    run(&WorldConfig::new(1), || {
        let shared = Arc::new((Mutex::new(false), Condvar::new()));
        let notifier = thread::spawn({
            let shared = shared.clone();
            move || {
                thread::sleep(HOUR);
                *shared.0.lock() = true;
                shared.1.notify_one();
            }
        });
        let start = Instant::now();
        let mut guard = shared.0.lock();
        assert!(!shared.1.wait_for(&mut guard, 10 * HOUR).timed_out());
        assert!(*guard && (HOUR..HOUR + MS).contains(&start.elapsed()), "{:?}", start.elapsed());
        drop(guard);
        notifier.join().unwrap();
    });
}

#[test]
fn mutex_wait_with_a_limit_ends_in_virtual_time() {
    run(&WorldConfig::new(1), || {
        let mutex = Arc::new(Mutex::new(()));
        let guard = mutex.lock();
        let waiter = thread::spawn({
            let mutex = mutex.clone();
            move || {
                let start = Instant::now();
                assert!(mutex.try_lock().is_none() && mutex.try_lock_for(HOUR).is_none());
                assert!((HOUR..HOUR + MS).contains(&start.elapsed()));
                assert!(mutex.try_lock_for(2 * HOUR).is_some());
                start.elapsed()
            }
        });
        thread::sleep(2 * HOUR);
        drop(guard);
        let waited = waiter.join().unwrap();
        assert!((2 * HOUR - MS..2 * HOUR + MS).contains(&waited), "{waited:?}");
    });
}

#[test]
fn sleeping_threads_wake_in_the_order_of_their_times() {
    for seed in 0..20 {
        let order = run(&busy(seed), || {
            let order = Arc::new(Mutex::new(vec![]));
            let sleeper = |minutes: u32| {
                let order = order.clone();
                thread::spawn(move || {
                    thread::sleep(minutes * 60_000 * MS);
                    order.lock().push(minutes);
                })
            };
            [30, 10, 20].map(sleeper).into_iter().for_each(|thread| thread.join().unwrap());
            std::mem::take(&mut *order.lock())
        });
        assert_eq!(order.value, [10, 20, 30], "seed {seed}");
    }
}

/// Threads that compete for locks and channels, and iterate over a hash table.
fn mixture() -> Vec<u64> {
    let (sender, receiver) = mpsc::channel();
    let table = Arc::new(Mutex::new(HashMap::new()));
    let start = |number: u64| {
        let (sender, table) = (sender.clone(), table.clone());
        thread::spawn(move || {
            for round in 0..10 {
                table.lock().insert(number * 10 + round, round);
                sender.send(number).unwrap();
                thread::sleep(MS);
            }
        })
    };
    let threads: Vec<_> = (0..5).map(start).collect();
    drop(sender);
    let mut seen: Vec<u64> = receiver.iter().collect();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    seen.extend(table.lock().keys().copied());
    seen
}

#[test]
fn equal_seeds_give_equal_runs_and_other_seeds_others() {
    let mut traces = HashSet::new();
    for seed in 0..50 {
        let config = WorldConfig::drawn(seed);
        let (first, again) = (run(&config, mixture), run(&config, mixture));
        assert_eq!(first.value, again.value, "seed {seed}");
        assert_eq!(
            (first.trace, first.steps, first.elapsed, first.stalls),
            (again.trace, again.steps, again.elapsed, again.stalls),
            "seed {seed}"
        );
        traces.insert(first.trace);
    }
    assert_eq!(traces.len(), 50);
}

#[test]
fn recorded_facts_change_the_trace() {
    let trace = |fact| run(&WorldConfig::new(3), move || sim::record(fact)).trace;
    assert_eq!(trace(1), trace(1));
    assert_ne!(trace(1), trace(2));
}

/// Looks at the flag without the lock, and then waits: the notification may come in between.
fn lose_a_wake_up() {
    let shared = Arc::new((AtomicBool::new(false), Mutex::new(()), Condvar::new()));
    let waiter = thread::Builder::new().name("waiter".into()).spawn({
        let shared = shared.clone();
        move || {
            while !shared.0.load(Ordering::Relaxed) {
                let mut guard = shared.1.lock();
                shared.2.wait(&mut guard);
            }
        }
    });
    shared.0.store(true, Ordering::Relaxed);
    shared.2.notify_all();
    waiter.unwrap().join().unwrap();
}

/// As [`lose_a_wake_up`], with the flag under the lock.
fn keep_the_wake_up() {
    let shared = Arc::new((Mutex::new(false), Condvar::new()));
    let waiter = thread::spawn({
        let shared = shared.clone();
        move || {
            let mut guard = shared.0.lock();
            while !*guard {
                shared.1.wait(&mut guard);
            }
        }
    });
    *shared.0.lock() = true;
    shared.1.notify_all();
    waiter.join().unwrap();
}

#[test]
fn lost_wake_up_is_reported_with_the_thread_that_waits() {
    let (seeds, failure) = first_failure(300, lose_a_wake_up).expect("the wake-up is lost in no world");
    println!("found after {seeds} seeds: {failure}");
    assert_eq!(failure.kind, FailureKind::Deadlock);
    let text = failure.to_string();
    assert!(text.starts_with(&format!("seed {}, ", seeds - 1)), "{text}");
    let waiter = failure.threads.iter().find(|thread| thread.starts_with("\"waiter\"")).expect("is listed");
    assert!(waiter.contains("waits for a condition variable, at crates/rt/tests/world.rs:"), "{waiter}");
    assert!(first_failure(300, keep_the_wake_up).is_none());
}

/// Two threads take two locks, each in its order.
fn take_locks(orders: [[usize; 2]; 2]) {
    let locks = Arc::new([Mutex::new(()), Mutex::new(())]);
    let threads = ["first", "second"].into_iter().zip(orders).map(|(name, order)| {
        let locks = locks.clone();
        let spawned = thread::Builder::new().name(name.into()).spawn(move || {
            let _outer = locks[order[0]].lock();
            let _inner = locks[order[1]].lock();
        });
        spawned.unwrap()
    });
    threads.collect::<Vec<_>>().into_iter().for_each(|thread| thread.join().unwrap());
}

#[test]
fn deadlock_is_reported_with_all_threads_and_the_holders_of_their_locks() {
    let (seeds, failure) =
        first_failure(300, || take_locks([[0, 1], [1, 0]])).expect("no world has the deadlock");
    println!("found after {seeds} seeds: {failure}");
    assert_eq!(failure.kind, FailureKind::Deadlock);
    for (thread, other) in [("first", "second"), ("second", "first")] {
        let line = failure.threads.iter().find(|line| line.starts_with(&format!("{thread:?}")));
        let line = line.expect("is listed");
        assert!(line.contains(&format!("waits for a mutex of thread {other:?}")), "{line}");
    }
    assert!(failure.threads.iter().any(|line| line.contains("waits for the end of thread")), "{failure}");
    assert!(first_failure(300, || take_locks([[0, 1], [0, 1]])).is_none());
}

#[test]
fn lock_taken_twice_by_one_thread_is_a_deadlock() {
    let failure = sim::run(&WorldConfig::new(1), || {
        let mutex = Mutex::new(());
        let _guard = mutex.lock();
        let _again = mutex.lock();
    });
    assert_eq!(failure.unwrap_err().kind, FailureKind::Deadlock);
}

#[test]
fn panic_of_a_thread_ends_the_run_with_its_name_and_message() {
    let failure = sim::run(&WorldConfig::new(77), || {
        let thread = thread::Builder::new().name("broken".into());
        thread.spawn(|| panic!("number {}", 5)).unwrap().join().unwrap();
    })
    .unwrap_err();
    let FailureKind::Panic { thread, message } = &failure.kind else { panic!("{failure}") };
    assert_eq!(thread, "broken");
    assert!(message.contains("number 5") && message.contains("world.rs"), "{message}");
    assert!(failure.to_string().starts_with("seed 77, "), "{failure}");
    // The next run does not see it.
    run(&WorldConfig::new(77), || assert!(!std::thread::panicking()));
}

#[test]
fn panic_that_waits_while_it_unwinds_ends_the_run() {
    struct LockOnDrop(Arc<Mutex<()>>);
    impl Drop for LockOnDrop {
        fn drop(&mut self) {
            drop(self.0.lock());
        }
    }
    let failure = sim::run(&WorldConfig::new(1), || {
        let mutex = Arc::new(Mutex::new(()));
        let _guard = mutex.lock();
        let thread = thread::spawn({
            let mutex = mutex.clone();
            move || {
                let _waits = LockOnDrop(mutex);
                panic!("on purpose");
            }
        });
        thread.join().unwrap();
    })
    .unwrap_err();
    assert!(matches!(&failure.kind, FailureKind::Panic { message, .. } if message.contains("on purpose")));
}

#[test]
fn thread_that_never_switches_is_reported_in_real_time() {
    static STOP: AtomicBool = AtomicBool::new(false);
    let config = WorldConfig { stuck_after: 3000 * MS, ..WorldConfig::new(9) };
    let failure = sim::run(&config, || {
        let spins = || {
            while !STOP.load(Ordering::Relaxed) {
                std::hint::spin_loop();
            }
        };
        thread::Builder::new().name("spinner".into()).spawn(spins).unwrap().join().unwrap();
    })
    .unwrap_err();
    STOP.store(true, Ordering::Relaxed);
    assert_eq!(failure.kind, FailureKind::Stuck { thread: "spinner".into() });
    assert!(failure.threads.iter().any(|thread| thread.starts_with("\"main\"")), "{failure}");
}

#[test]
fn runs_are_bounded_by_switches_and_by_virtual_time() {
    fn poll() {
        loop {
            thread::sleep(MS);
        }
    }
    let config = WorldConfig { steps_max: 1000, ..WorldConfig::new(1) };
    assert_eq!(sim::run(&config, poll).unwrap_err().kind, FailureKind::StepsExceeded);
    let config = WorldConfig { time_max: 100 * MS, ..WorldConfig::new(1) };
    let failure = sim::run(&config, poll).unwrap_err();
    assert_eq!(failure.kind, FailureKind::TimeExceeded);
    assert!((100 * MS..102 * MS).contains(&failure.elapsed), "{:?}", failure.elapsed);
}

#[test]
fn loops_that_poll_the_clock_or_yield_come_to_their_end() {
    run(&WorldConfig::new(1), || {
        let flag = Arc::new(AtomicBool::new(false));
        thread::spawn({
            let flag = flag.clone();
            move || {
                thread::sleep(MS);
                flag.store(true, Ordering::Relaxed);
            }
        });
        while !flag.load(Ordering::Relaxed) {
            thread::yield_now();
        }
        let until = Instant::now() + MS;
        while Instant::now() < until {}
    });
}

#[test]
fn channel_keeps_the_order_of_each_sender_and_reports_its_end() {
    for seed in 0..50 {
        run(&WorldConfig::drawn(seed), || {
            let (sender, receiver) = mpsc::channel::<(u64, u64)>();
            assert_eq!(receiver.try_recv(), Err(TryRecvError::Empty));
            let start = Instant::now();
            assert_eq!(receiver.recv_timeout(HOUR), Err(RecvTimeoutError::Timeout));
            assert!(start.elapsed() >= HOUR);
            for number in 0..3 {
                let sender = sender.clone();
                thread::spawn(move || (0..20).for_each(|message| sender.send((number, message)).unwrap()));
            }
            drop(sender);
            let mut next = [0; 3];
            for (number, message) in &receiver {
                assert_eq!(message, next[number as usize]);
                next[number as usize] += 1;
            }
            assert_eq!(next, [20; 3]);
            assert_eq!(receiver.try_recv(), Err(TryRecvError::Disconnected));
            assert_eq!(receiver.recv_timeout(HOUR), Err(RecvTimeoutError::Disconnected));
            let (sender, receiver) = mpsc::channel();
            drop(receiver);
            assert_eq!(sender.send(7).unwrap_err().0, 7);
        });
    }
}

#[test]
fn park_ends_by_unpark_also_by_an_earlier_one() {
    for seed in 0..50 {
        run(&WorldConfig::drawn(seed), || {
            let parked = thread::spawn(|| {
                let start = Instant::now();
                thread::park();
                thread::park_timeout(HOUR);
                start.elapsed()
            });
            parked.thread().unpark();
            assert!(parked.join().unwrap() >= HOUR);
        });
    }
}

#[test]
fn drawn_stalls_delay_single_threads() {
    let config = WorldConfig { stall_per_million: 10_000, ..WorldConfig::new(5) };
    let report = run(&config, || count(true));
    assert_eq!(report.value, 40);
    assert!(report.stalls > 0 && report.elapsed > 50 * MS, "{report:?}");
    assert_eq!(run(&WorldConfig::new(5), || count(true)).stalls, 0);
}

#[test]
fn late_wake_ups_are_never_early() {
    let config = WorldConfig { wakes_late: true, ..WorldConfig::new(5) };
    let lags = run(&config, || {
        let lag = |_| {
            let start = Instant::now();
            thread::sleep(MS);
            start.elapsed().checked_sub(MS).expect("a sleep is not too short")
        };
        (0..2000).map(lag).collect::<Vec<_>>()
    });
    let late = |limit: Duration| lags.value.iter().filter(|lag| **lag > limit).count();
    assert!((100..400).contains(&late(Duration::from_micros(60))), "{}", late(Duration::from_micros(60)));
    assert_eq!(late(600 * MS), 0);
}

#[test]
fn thread_names_and_numbers_are_those_of_the_fiber() {
    run(&WorldConfig::new(1), || {
        assert_eq!(thread::current().name(), Some("main"));
        let named = thread::Builder::new().name("named".into()).spawn(thread::current).unwrap();
        let id = named.thread().id();
        let inside = named.join().unwrap();
        assert_eq!((inside.name(), inside.id()), (Some("named"), id));
        assert_ne!(id, thread::current().id());
    });
}

#[test]
fn names_outside_a_world_are_those_of_the_operating_system() {
    assert!(!sim::is_inside());
    let shared = Arc::new((Mutex::new(false), Condvar::new()));
    let (sender, receiver) = mpsc::channel();
    let thread = thread::spawn({
        let shared = shared.clone();
        move || {
            *shared.0.lock() = true;
            shared.1.notify_all();
            sender.send(std::thread::current().id()).unwrap();
        }
    });
    let mut guard = shared.0.lock();
    while !*guard {
        assert!(!shared.1.wait_for(&mut guard, Duration::from_secs(60)).timed_out());
    }
    drop(guard);
    assert_ne!(receiver.recv().unwrap(), std::thread::current().id());
    thread.join().unwrap();
    let start = Instant::now();
    thread::sleep(20 * MS);
    assert!(start.elapsed() >= 20 * MS);
}
