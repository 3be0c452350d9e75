//! A recorded schedule allocates nothing and calls the system for nothing, which is shown and not believed: a global
//! allocator counts, and a seccomp filter ends the process at its first system call. Each has a twin that must be
//! caught. (Not strict mode, which forbids the time-stamp counter as well, and so every look at the clock.)
//!
//! Two ranks, which are this binary again. They poll until their deadline instead of sleeping: whether a rank sleeps
//! is a matter of how late the other is, and a test machine may make it as late as it likes.

#![allow(unreachable_pub, missing_docs, reason = "a program, not a library")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use moontide_ep::*;
use moontide_heap::{HugePages, Rank, SPINS_UNTIL_DEADLINE, World, WorldConfig, WorldShape};

#[path = "../../heap/tests/common/libtest.rs"]
mod libtest;
#[path = "worlds/troupe.rs"]
#[allow(dead_code, reason = "this test needs a part")]
mod troupe;

use troupe::{Role, Said, Troupe, seed};

struct Counting;

thread_local! {
    /// Of this thread: rank 0 has another one, which keeps the door.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: the system's allocator, with a count beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: as the caller's.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller's.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const TESTS: [(&str, fn()); 3] = [
    ("a_replay_neither_allocates_nor_calls_the_system", silent),
    ("a_replay_that_allocates_is_found_out", allocating),
    ("a_replay_that_sleeps_is_found_out", sleeping),
];

/// What is wrong with a rank.
const NOTHING: u64 = 0;
const ALLOCATES: u64 = 1;
const SLEEPS: u64 = 2;

const RANKS: u32 = 2;
const REPLAYS: usize = 100;
const WITHIN: Duration = Duration::from_secs(120);

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(role) = Role::of_this_process(&arguments) {
        rank(&role);
    }
    libtest::run(&TESTS, &arguments)
}

fn silent() {
    let lines = Troupe::start("replay", RANKS, seed(), |_| NOTHING).finish(WITHIN);
    assert_eq!(lines, [["0 allocations"]; RANKS as usize]);
}

fn allocating() {
    let lines = Troupe::start("replay", RANKS, seed(), |_| ALLOCATES).finish(WITHIN);
    assert!(lines.iter().all(|lines| lines[0] != "0 allocations"), "{lines:?}");
}

fn sleeping() {
    let mut troupe = Troupe::start("replay", RANKS, seed(), |_| SLEEPS);
    // The first one that has to wait for the other goes to sleep. The other waits for it in vain, and is ended with the test.
    let Said { rank, line } = troupe.listen(WITHIN);
    assert_eq!((line, troupe.ended_by(rank)), (None, Some(libc::SIGSYS)));
}

fn rank(role: &Role) -> ! {
    let (mut recording, _world) = record(role);
    for _ in 0..3 {
        recording.replay(WITHIN).expect("a replay");
    }
    let before = ALLOCATIONS.get();
    forbid_all_calls_but_exit_and_write();
    let mut is_right = true;
    for _ in 0..REPLAYS {
        is_right &= recording.replay(WITHIN).is_ok();
        let (results, summed) = recording.results(2).expect("replayed");
        is_right &= summed.ranks.len() == RANKS as usize;
        is_right &= results.chunks_exact(2).all(|bytes| bytes == [0x80, 0x3f]);
    }
    let line = match ALLOCATIONS.get() - before {
        0 => "0 allocations\n",
        _ => "some allocations\n",
    };
    // SAFETY: a line of ours to standard output, and the end of the process without looking back.
    unsafe {
        libc::write(1, line.as_ptr().cast(), line.len());
        libc::_exit(if is_right { 0 } else { 1 })
    }
}

/// Any other system call of this thread ends the process with SIGSYS.
fn forbid_all_calls_but_exit_and_write() {
    let step = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let mut filter = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // the call's number
        step(equal, libc::SYS_write as u32, 2, 0),
        step(equal, libc::SYS_exit_group as u32, 1, 0),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_KILL_PROCESS, 0, 0),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the filter stands on this stack while the kernel copies it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

fn record(role: &Role) -> (Recording, Arc<World>) {
    let shape = Shape {
        ranks: RANKS as usize,
        tokens_max: 8,
        hidden: 256,
        top_k: 4,
        experts_per_rank: 4,
        send: Dtype::Bf16,
        back: Dtype::Bf16,
        buffers: Buffers::One,
        returns: Returns::Pull,
    };
    let bytes = shape.bytes().unwrap();
    let config = WorldConfig {
        path: role.path.clone(),
        rank: Rank(role.rank),
        shape: WorldShape { ranks: RANKS, bytes: (2 * bytes).next_multiple_of(4096) },
        huge: HugePages::IfAllowed,
        timeout: WITHIN,
    };
    // SAFETY: all ranks are this program.
    let world = Arc::new(unsafe { World::join(&config) }.expect("join"));
    let mut channels = Vec::new();
    for offset in [0, bytes] {
        // SAFETY: one behind the other, and nothing else.
        let mut channel = unsafe { Channel::open(&world, offset, shape, WITHIN) }.expect("open");
        channel.spin(if role.extra == SLEEPS { 0 } else { SPINS_UNTIL_DEADLINE });
        channels.push(channel);
    }
    let mut recording = Recording::new(channels);
    let (me, extra) = (role.rank as usize, role.extra);
    let mut replays = 0usize;
    for layer in 0..3 {
        let prepare = move |input: &mut Input, before: &[u8]| {
            // A different number of tokens each time, the same for all layers of a replay.
            replays += usize::from(layer == 0);
            input.tokens = if layer == 0 { (replays + me) % 9 } else { before.len() / 512 };
            for token in 0..input.tokens {
                let first = token * 4;
                // Four different ones of eight.
                (0..4).for_each(|k| input.experts[first + k] = ((token + layer + 2 * k) % 8) as i32);
            }
            input.weights.fill(0.25);
            match before {
                [] => input.rows.chunks_exact_mut(2).for_each(|bytes| bytes.copy_from_slice(&[0x80, 0x3f])),
                before => input.rows[..before.len()].copy_from_slice(before),
            }
            if extra == ALLOCATES {
                drop(black_box(vec![0u8; black_box(100)]));
            }
        };
        // Every expert returns what it got; four of them, a quarter each, make the same again.
        let compute = |received: &mut Received<'_>| {
            received.for_each(|work| {
                let weight: f32 = work.hits.iter().map(|hit| hit.weight).sum();
                let mut numbers = [0f32; 256];
                Dtype::Bf16.read(work.row, &mut numbers);
                Dtype::Bf16.write(&numbers.map(|number| number * weight), work.back);
            });
        };
        recording.layer(layer % 2, prepare, compute);
    }
    (recording, world)
}
