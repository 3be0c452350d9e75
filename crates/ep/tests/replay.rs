//! A replay of a recording allocates nothing and makes no system calls. A counting global allocator checks the former,
//! a seccomp filter that kills the process at its first system call the latter. For each, a mutation must be detected.
//! (Not strict mode of seccomp, which also forbids the time-stamp counter, and so every reading of the clock.)
//!
//! There are two ranks, which are this binary again. They poll until their deadline instead of sleeping: whether a rank
//! sleeps depends on how late the other is, and on a test machine that is not bounded.

#![allow(unreachable_pub, missing_docs, reason = "a program, not a library")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use moontide_ep::*;
use moontide_heap::HugePages;
use moontide_symmetric::{Rank, SPINS_UNTIL_DEADLINE, World, WorldConfig, WorldShape};

#[path = "../../heap/tests/common/libtest.rs"]
mod libtest;
#[path = "rank_processes/processes.rs"]
#[allow(dead_code, reason = "this test needs a part")]
mod processes;

use processes::{RankOutput, RankProcesses, Role, seed};

struct Counting;

thread_local! {
    /// Allocations of this thread: rank 0 has another thread, which runs the listener.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

// SAFETY: forwards to the system allocator, and counts.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.set(ALLOCATIONS.get() + 1);
        // SAFETY: the caller upholds the same contract.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller upholds the same contract.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

const TESTS: [(&str, fn()); 3] = [
    ("replay_neither_allocates_nor_makes_system_calls", silent),
    ("mutation_allocating_replay_is_detected", allocating),
    ("mutation_sleeping_replay_is_detected", sleeping),
];

/// Mutation of a rank.
const NO_MUTATION: u64 = 0;
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
    libtest::run(&TESTS, &[], &arguments)
}

fn silent() {
    let lines = RankProcesses::start("replay", RANKS, seed(), |_| NO_MUTATION).finish(WITHIN);
    assert_eq!(lines, [["0 allocations"]; RANKS as usize]);
}

fn allocating() {
    let lines = RankProcesses::start("replay", RANKS, seed(), |_| ALLOCATES).finish(WITHIN);
    assert!(lines.iter().all(|lines| lines[0] != "0 allocations"), "{lines:?}");
}

fn sleeping() {
    let mut processes = RankProcesses::start("replay", RANKS, seed(), |_| SLEEPS);
    // The first rank that waits for the other sleeps, and is killed. The other waits for it, and is killed with the
    // test.
    let RankOutput { rank, line } = processes.next_output(WITHIN);
    assert_eq!((line, processes.ended_by(rank)), (None, Some(libc::SIGSYS)));
}

fn rank(role: &Role) -> ! {
    let (mut recording, _world) = record(role);
    for _ in 0..3 {
        recording.replay(WITHIN).expect("a replay");
    }
    let before = ALLOCATIONS.get();
    forbid_system_calls();
    let mut is_right = true;
    for _ in 0..REPLAYS {
        is_right &= recording.replay(WITHIN).is_ok();
        let (results, report) = recording.results(2).expect("replayed");
        is_right &= report.ranks.len() == RANKS as usize;
        is_right &= results.chunks_exact(2).all(|bytes| bytes == [0x80, 0x3f]);
    }
    let line = match ALLOCATIONS.get() - before {
        0 => "0 allocations\n",
        _ => "some allocations\n",
    };
    // SAFETY: writes a static line to standard output, and exits without running destructors.
    unsafe {
        libc::write(1, line.as_ptr().cast(), line.len());
        libc::_exit(if is_right { 0 } else { 1 })
    }
}

/// Makes the kernel kill the process with SIGSYS at any system call of this thread, except write and exit.
fn forbid_system_calls() {
    let step = |code: u32, k: u32, jt: u8, jf: u8| libc::sock_filter { code: code as u16, jt, jf, k };
    let equal = libc::BPF_JMP | libc::BPF_JEQ | libc::BPF_K;
    let mut filter = [
        step(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, 0), // number of the system call
        step(equal, libc::SYS_write as u32, 2, 0),
        step(equal, libc::SYS_exit_group as u32, 1, 0),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_KILL_PROCESS, 0, 0),
        step(libc::BPF_RET | libc::BPF_K, libc::SECCOMP_RET_ALLOW, 0, 0),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the filter is on this stack while the kernel copies it.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &raw const program), 0);
    }
}

fn record(role: &Role) -> (Recording, Arc<World>) {
    let shape = ChannelConfig {
        ranks: RANKS as usize,
        tokens_max: 8,
        hidden: 256,
        top_k: 4,
        experts_per_rank: 4,
        dispatch_dtype: Dtype::Bf16,
        combine_dtype: Dtype::Bf16,
        buffering: Buffering::Single,
        combine_mode: CombineMode::Pull,
    };
    let bytes = shape.bytes().unwrap();
    let config = WorldConfig {
        path: role.path.clone(),
        rank: Rank(role.rank),
        shape: WorldShape { ranks: RANKS, bytes: (2 * bytes).next_multiple_of(4096) },
        huge: HugePages::Auto,
        timeout: WITHIN,
    };
    // SAFETY: all ranks are this program.
    let world = Arc::new(unsafe { World::join(&config) }.expect("join"));
    let mut channels = Vec::new();
    for offset in [0, bytes] {
        // SAFETY: the channels are at consecutive offsets, and nothing else is in the regions.
        let mut channel = unsafe { Channel::open(&world, offset, shape, WITHIN) }.expect("open");
        channel.spin(if role.extra == SLEEPS { 0 } else { SPINS_UNTIL_DEADLINE });
        channels.push(channel);
    }
    let mut recording = Recording::new(channels);
    let (me, extra) = (role.rank as usize, role.extra);
    let mut replays = 0usize;
    for layer in 0..3 {
        let prepare = move |input: &mut LayerInput, before: &[u8]| {
            // A different number of tokens each time, the same for all layers of a replay.
            replays += usize::from(layer == 0);
            input.tokens = if layer == 0 { (replays + me) % 9 } else { before.len() / 512 };
            for token in 0..input.tokens {
                let first = token * 4;
                // Four different experts of eight.
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
        // Every expert returns its input; four of them, with a weight of a quarter each, give the same number again.
        let compute = |dispatched: &mut Dispatched<'_>| {
            dispatched.for_each(|input| {
                let weight: f32 = input.hits.iter().map(|hit| hit.weight).sum();
                let mut numbers = [0f32; 256];
                Dtype::Bf16.read(input.row, &mut numbers);
                Dtype::Bf16.write(&numbers.map(|number| number * weight), input.output);
            });
        };
        recording.layer(layer % 2, prepare, compute);
    }
    (recording, world)
}
