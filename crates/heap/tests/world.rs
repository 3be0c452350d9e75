//! Worlds whose ranks are threads of this process: meeting, translating, waiting, leaving out, coming back. Ranks that are
//! processes, and are killed, are in `moontide-ep`'s tests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_heap::{
    DoorError, HugePages, Liveness, Rank, RankSet, WaitError, World, WorldConfig, WorldError, WorldShape,
};
use moontide_types::{ErrorCode, Generation};

const PATIENCE: Duration = Duration::from_secs(30);
const SHAPE: WorldShape = WorldShape { ranks: 3, bytes: 8192 };

fn path() -> PathBuf {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("moontide-world-{}-{number}", std::process::id()))
}

fn config(path: &Path, rank: u32) -> WorldConfig {
    let (path, rank) = (path.to_owned(), Rank(rank));
    WorldConfig { path, rank, shape: SHAPE, huge: HugePages::IfAllowed, timeout: PATIENCE }
}

fn join(config: &WorldConfig) -> Result<World, WorldError> {
    // SAFETY: all ranks are this test, whose threads take turns by barriers.
    unsafe { World::join(config) }
}

/// All ranks of a world.
fn worlds(path: &Path) -> Vec<World> {
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            (0..SHAPE.ranks).map(|rank| scope.spawn(move || join(&config(path, rank)).unwrap())).collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[test]
fn all_ranks_map_all_regions_and_translate_between_them() {
    let path = path();
    let worlds = worlds(&path);
    for world in &worlds {
        assert_eq!(world.generation(), Generation(1));
        // Everyone writes its number behind everyone's first page, in a place of its own.
        for rank in 0..SHAPE.ranks {
            let place = world.at(Rank(rank), 4096 + u64::from(world.rank().0), 1);
            // SAFETY: a byte of this rank's own; the ranks are one thread here.
            unsafe { place.write(100 + world.rank().0 as u8) };
        }
    }
    for world in &worlds {
        let own = world.at(world.rank(), 4096, 1);
        for peer in 0..SHAPE.ranks {
            let translated = world.translate(own, Rank(peer));
            let rule = own.addr().get() - world.bases()[world.rank().index()].addr().get()
                + world.bases()[peer as usize].addr().get();
            assert_eq!(translated.addr().get(), rule);
            // SAFETY: three bytes that were written above by this thread.
            let found = unsafe { std::slice::from_raw_parts(translated.as_ptr(), 3) };
            assert_eq!(found, [100, 101, 102]);
        }
    }
    drop(worlds);
    assert!(!path.exists(), "rank 0 takes its socket along");
}

#[test]
fn a_barrier_names_those_who_do_not_come_and_goes_on_without_them() {
    let path = path();
    let mut worlds = worlds(&path);
    let short = Duration::from_millis(50);
    let began = Instant::now();
    let missing: RankSet = [1, 2].into_iter().map(Rank).collect();
    assert_eq!(worlds[0].barrier(short), Err(WaitError::Missing(missing)));
    assert!(began.elapsed() >= short && began.elapsed() < PATIENCE);
    // Asking again is the same phase, not the next one.
    assert_eq!(worlds[1].barrier(short), Err(WaitError::Missing(RankSet::only(Rank(2)))));
    assert_eq!(worlds[0].barrier(short), Err(WaitError::Missing(RankSet::only(Rank(2)))));
    worlds[0].exclude(RankSet::only(Rank(2)));
    assert_eq!(worlds[1].barrier(PATIENCE), Ok(RankSet::first(2)));
    assert_eq!(worlds[0].barrier(PATIENCE), Ok(RankSet::first(2)));

    // The rank that was left out comes back by coming; the others let it in at their next barrier.
    let late = worlds.pop().unwrap();
    std::thread::scope(|scope| {
        let late = scope.spawn(move || late.barrier(PATIENCE));
        // Until it is in.
        let others = scope.spawn(|| until_whole(&worlds[1]));
        until_whole(&worlds[0]);
        others.join().unwrap();
        assert_eq!(late.join().unwrap(), Ok(RankSet::first(3)));
    });
}

/// Barriers until one of them is of all ranks.
fn until_whole(world: &World) {
    while world.barrier(PATIENCE).unwrap() != RankSet::first(3) {}
}

#[test]
fn a_rank_is_given_again_only_when_its_holder_has_left() {
    let path = path();
    let mut worlds = worlds(&path);
    let taken = join(&config(&path, 2));
    assert!(matches!(taken, Err(WorldError::Door(DoorError::Refused(ErrorCode::Busy)))), "{taken:?}");
    assert!(matches!(worlds[0].liveness(Rank(2), PATIENCE), Liveness::Alive(_)));
    drop(worlds.pop());
    assert_eq!(worlds[0].liveness(Rank(2), PATIENCE), Liveness::Absent);
    let second = join(&config(&path, 2)).unwrap();
    assert_eq!(second.generation(), Generation(2));
    worlds.push(second);
    std::thread::scope(|scope| {
        for world in &worlds {
            scope.spawn(move || until_whole(world));
        }
    });
}

#[test]
fn worlds_that_do_not_fit_are_refused() {
    let path = path();
    let _worlds = worlds(&path);
    let other = WorldConfig { shape: WorldShape { bytes: 4096, ..SHAPE }, ..config(&path, 1) };
    assert!(
        matches!(join(&other), Err(WorldError::OtherShape { found, ours }) if (found, ours) == (SHAPE, other.shape))
    );
    let none = WorldConfig { shape: WorldShape { ranks: 0, ..SHAPE }, ..config(&path, 0) };
    assert!(matches!(join(&none), Err(WorldError::Shape(_))));
    assert!(matches!(join(&config(&path, 3)), Err(WorldError::Rank { .. })));
    let nobody = WorldConfig { timeout: Duration::from_millis(30), ..config(&path.with_extension("x"), 1) };
    assert!(matches!(join(&nobody), Err(WorldError::Door(DoorError::System { .. }))));
}

#[test]
fn who_does_not_join_is_named() {
    let path = path();
    let lonely = WorldConfig { timeout: Duration::from_millis(50), ..config(&path, 0) };
    let error = join(&lonely).unwrap_err();
    assert!(matches!(error, WorldError::Wait(WaitError::Missing(_))));
    assert_eq!(error.to_string(), "no sign of rank 1 and 2 in time");
}
