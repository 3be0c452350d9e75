//! Loom models of the ready flag: every interleaving of small models, and every reordering that the memory model allows,
//! on the shipped code. Each model runs without a mutation, when it must pass, and with each mutation that it must
//! detect: those of the flag, and those of the word in it, which is part of `moontide-heap`.
#![cfg(loom)]

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;

use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread::{self, JoinHandle};
use moontide_heap::model::Mutation as WordMutation;
use moontide_rt::with_mutation;
use moontide_symmetric::model::Mutation;
use moontide_symmetric::{PageOutcome, ReadyFlag, RecordProgress};
use moontide_types::{Epoch, Span};

/// A model: body of its threads, and outcomes that must occur in some interleaving.
struct Model {
    run: fn(),
    /// The model fails if one of these outcomes never occurs, because it has explored too little.
    outcomes: &'static [&'static str],
}

thread_local! {
    /// Number of occurrences of each outcome. loom runs all threads of a model on the test's own.
    static SEEN: RefCell<BTreeMap<&'static str, u64>> = const { RefCell::new(BTreeMap::new()) };
}

fn seen(outcome: &'static str) {
    SEEN.with_borrow_mut(|seen| *seen.entry(outcome).or_default() += 1);
}

/// Explores a model completely, or to its first failure.
fn check<M: moontide_rt::Mutation>(name: &str, model: &Model, mutation: Option<M>) {
    let (run, is_mutated) = (model.run, mutation.is_some());
    SEEN.take();
    with_mutation(mutation, || {
        loom::model::Builder::new().check(move || {
            seen("interleavings");
            run();
        });
    });
    let seen = SEEN.take();
    println!("{name}: {seen:?}");
    if !is_mutated {
        let never: Vec<_> = model.outcomes.iter().filter(|outcome| !seen.contains_key(*outcome)).collect();
        assert!(never.is_empty(), "outcomes that never occurred: {never:?}");
    }
}

/// Declares for each model its test, then a test per mutation that must fail in it, with the message.
macro_rules! models {
    ($($test:ident: $model:expr, { $($mutated:ident: $mutation:expr => $message:expr,)* })*) => { $(
        #[test]
        fn $test() {
            check(stringify!($test), &$model, None::<Mutation>);
        }
        $(
            #[test]
            #[should_panic(expected = $message)]
            fn $mutated() {
                check(stringify!($mutated), &$model, Some($mutation));
            }
        )*
    )* };
}

models! {
    reader_of_complete_flag_sees_all_pages:
        Model { run: flagged_pages, outcomes: &["complete", "pending"] }, {
        mutation_relaxed_page_count_is_detected: Mutation::RelaxedCount => "a page is missing",
        mutation_flag_set_without_release_is_detected: WordMutation::RelaxedPublish => "a page is missing",
        mutation_flag_read_without_acquire_is_detected: WordMutation::RelaxedLoad => "a page is missing",
    }
    late_page_is_not_counted_for_next_version:
        Model { run: late_page, outcomes: &["stale"] }, {
        mutation_page_counted_for_other_version_is_detected:
            Mutation::CountOfOtherVersion => "counted for another version",
    }
}

/// A page. Relaxed values: the reader may see wrong ones.
struct Page([AtomicU64; 2]);

const WRITTEN: u64 = 111;

impl Page {
    fn new() -> Page {
        Page([AtomicU64::new(0), AtomicU64::new(0)])
    }

    fn write(&self) {
        self.0.iter().for_each(|value| value.store(WRITTEN, Ordering::Relaxed));
    }

    fn check(&self) {
        self.0
            .iter()
            .for_each(|value| assert_eq!(value.load(Ordering::Relaxed), WRITTEN, "a page is missing"));
    }
}

fn epoch(version: u64) -> Epoch {
    Epoch::from_bits(version).unwrap()
}

/// State shared by the threads of a model, and a gate that all of them pass first: a common read-modify-write,
/// because a thread that begins with a load can hide interleavings from loom.
struct Shared<T> {
    gate: AtomicU64,
    of: T,
}

fn share<T>(of: T) -> Arc<Shared<T>> {
    Arc::new(Shared { gate: AtomicU64::new(0), of })
}

impl<T> Shared<T> {
    /// Relaxed: orders nothing.
    fn enter(&self) -> &T {
        self.gate.fetch_add(1, Ordering::Relaxed);
        &self.of
    }
}

fn spawn<T: Send + Sync + 'static>(shared: &Arc<Shared<T>>, body: fn(&T)) -> JoinHandle<()> {
    let shared = Arc::clone(shared);
    thread::spawn(move || body(shared.enter()))
}

fn flagged_pages() {
    let flag = ReadyFlag::new();
    flag.prepare(epoch(1), 2, Span::new(0, 2).unwrap());
    let shared = share((flag, [Page::new(), Page::new()]));
    let write = |(flag, pages): &(ReadyFlag, [Page; 2]), page: usize| {
        pages[page].write();
        assert_ne!(flag.page_done(epoch(1)), PageOutcome::Stale);
    };
    let other = spawn(&shared, |shared| {
        shared.1[0].write();
        assert_ne!(shared.0.page_done(epoch(1)), PageOutcome::Stale);
    });
    let consumer = spawn(&shared, |(flag, pages)| match flag.progress(epoch(1)) {
        RecordProgress::Complete => {
            seen("complete");
            pages.iter().for_each(|page| page.check());
        }
        _ => seen("pending"),
    });
    write(shared.enter(), 1);
    other.join().unwrap();
    consumer.join().unwrap();
    assert_eq!(shared.of.0.progress(epoch(1)), RecordProgress::Complete);
}

fn late_page() {
    let flag = ReadyFlag::new();
    flag.prepare(epoch(2), 2, Span::new(0, 2).unwrap());
    let shared = share(flag);
    let late = spawn(&shared, |flag| {
        assert_eq!(flag.page_done(epoch(1)), PageOutcome::Stale, "counted for another version");
        seen("stale");
    });
    let flag = shared.enter();
    assert_eq!(flag.page_done(epoch(2)), PageOutcome::Pending, "counted for another version");
    assert_eq!(flag.page_done(epoch(2)), PageOutcome::Complete, "counted for another version");
    late.join().unwrap();
}
