//! Worlds whose ranks are threads of this process: joining, translating, waiting, excluding, rejoining. Ranks that
//! are processes, and are killed, are in `moontide-ep`'s tests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_heap::{HugePages, Liveness, ShmError};
use moontide_symmetric::{Rank, RankSet, WaitError, World, WorldConfig, WorldError, WorldShape};
use moontide_types::{ErrorCode, Generation};

const TIMEOUT: Duration = Duration::from_secs(30);
const SHAPE: WorldShape = WorldShape { ranks: 3, bytes: 8192 };

fn path() -> PathBuf {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("moontide-world-{}-{number}", std::process::id()))
}

fn config(path: &Path, rank: u32) -> WorldConfig {
    let (path, rank) = (path.to_owned(), Rank(rank));
    WorldConfig { path, rank, shape: SHAPE, huge: HugePages::Auto, timeout: TIMEOUT }
}

fn join(config: &WorldConfig) -> Result<World, WorldError> {
    // SAFETY: all ranks are this test, whose threads are synchronized by barriers.
    unsafe { World::join(config) }
}

/// Joins all ranks of a world.
fn worlds(path: &Path) -> Vec<World> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            (0..SHAPE.ranks).map(|rank| scope.spawn(move || join(&config(path, rank)).unwrap())).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn ranks_map_and_translate_all_regions() {
    let path = path();
    let worlds = worlds(&path);
    for world in &worlds {
        assert_eq!(world.generation(), Generation(1));
        // Every rank writes its number after the first page of every region, at an offset of its own.
        for rank in 0..SHAPE.ranks {
            let byte = world.at(Rank(rank), 4096 + u64::from(world.rank().0), 1);
            // SAFETY: a byte that only this rank writes; all ranks are one thread here.
            unsafe { byte.write(100 + world.rank().0 as u8) };
        }
    }
    for world in &worlds {
        let own = world.at(world.rank(), 4096, 1);
        for peer in 0..SHAPE.ranks {
            let translated = world.translate(own, Rank(peer));
            let expected = own.addr().get() - world.bases()[world.rank().index()].addr().get()
                + world.bases()[peer as usize].addr().get();
            assert_eq!(translated.addr().get(), expected);
            // SAFETY: three bytes that this thread wrote above.
            let found = unsafe { std::slice::from_raw_parts(translated.as_ptr(), 3) };
            assert_eq!(found, [100, 101, 102]);
        }
    }
    drop(worlds);
    assert!(!path.exists(), "rank 0 removes its socket");
}

#[test]
fn barrier_names_missing_ranks_and_continues_without_excluded() {
    let path = path();
    let mut worlds = worlds(&path);
    let short = Duration::from_millis(50);
    let started = Instant::now();
    let missing: RankSet = [1, 2].into_iter().map(Rank).collect();
    assert_eq!(worlds[0].barrier(short), Err(WaitError::Missing(missing)));
    assert!(started.elapsed() >= short && started.elapsed() < TIMEOUT);
    // A second call waits in the same phase, not in the next one.
    assert_eq!(worlds[1].barrier(short), Err(WaitError::Missing(RankSet::only(Rank(2)))));
    assert_eq!(worlds[0].barrier(short), Err(WaitError::Missing(RankSet::only(Rank(2)))));
    worlds[0].exclude(RankSet::only(Rank(2)));
    assert_eq!(worlds[1].barrier(TIMEOUT), Ok(RankSet::first(2)));
    assert_eq!(worlds[0].barrier(TIMEOUT), Ok(RankSet::first(2)));

    // The excluded rank rejoins with its next call; the others admit it at their next barrier.
    let late = worlds.pop().unwrap();
    std::thread::scope(|scope| {
        let late = scope.spawn(move || late.barrier(TIMEOUT));
        // Until it is admitted.
        let other = scope.spawn(|| barrier_until_complete(&worlds[1]));
        barrier_until_complete(&worlds[0]);
        other.join().unwrap();
        assert_eq!(late.join().unwrap(), Ok(RankSet::first(3)));
    });
}

/// Repeats barriers until one includes all ranks.
fn barrier_until_complete(world: &World) {
    while world.barrier(TIMEOUT).unwrap() != RankSet::first(3) {}
}

#[test]
fn rank_in_use_is_refused_until_its_holder_leaves() {
    let path = path();
    let mut worlds = worlds(&path);
    let refused = join(&config(&path, 2));
    assert!(matches!(refused, Err(WorldError::Shm(ShmError::Refused(ErrorCode::Busy)))), "{refused:?}");
    assert!(matches!(worlds[0].liveness(Rank(2), TIMEOUT), Liveness::Alive(_)));
    drop(worlds.pop());
    assert_eq!(worlds[0].liveness(Rank(2), TIMEOUT), Liveness::Absent);
    let second = join(&config(&path, 2)).unwrap();
    assert_eq!(second.generation(), Generation(2));
    worlds.push(second);
    std::thread::scope(|scope| {
        for world in &worlds {
            scope.spawn(move || barrier_until_complete(world));
        }
    });
}

#[test]
fn mismatched_world_config_is_rejected() {
    let path = path();
    let _worlds = worlds(&path);
    let other = WorldConfig { shape: WorldShape { bytes: 4096, ..SHAPE }, ..config(&path, 1) };
    assert!(
        matches!(join(&other), Err(WorldError::OtherShape { found, ours }) if (found, ours) == (SHAPE, other.shape))
    );
    let none = WorldConfig { shape: WorldShape { ranks: 0, ..SHAPE }, ..config(&path, 0) };
    assert!(matches!(join(&none), Err(WorldError::Shape(_))));
    assert!(matches!(join(&config(&path, 3)), Err(WorldError::Rank { .. })));
    let no_rank_0 =
        WorldConfig { timeout: Duration::from_millis(30), ..config(&path.with_extension("x"), 1) };
    assert!(matches!(join(&no_rank_0), Err(WorldError::Shm(ShmError::System { .. }))));
}

#[test]
fn join_timeout_names_missing_ranks() {
    let path = path();
    let only_rank_0 = WorldConfig { timeout: Duration::from_millis(50), ..config(&path, 0) };
    let error = join(&only_rank_0).unwrap_err();
    assert!(matches!(error, WorldError::Wait(WaitError::Missing(_))));
    assert_eq!(error.to_string(), "timed out waiting for rank 1 and 2");
}
