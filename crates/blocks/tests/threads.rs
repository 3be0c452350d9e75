//! One owner and many readers, and two owners of one pool, on real threads.

mod support;

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use moontide_blocks::{
    Attention, BlockHash, Cache, CacheConfig, CacheError, CacheShape, DimOrder, Dtype, Plane, SequenceId,
    Token,
};
use support::mix;

const SHAPE: CacheShape = CacheShape {
    layers: 1,
    block_tokens: 4,
    attention: Attention::Heads { kv_heads: 1, dim: 16 },
    dtype: Dtype::F32,
    order: DimOrder::TokenMajor,
};

/// Returns the value of every number of a row: a hash of the token and everything before it.
fn row(before: u32, token: Token) -> u32 {
    mix(u64::from(before) << 32 | u64::from(token)) as u32
}

/// Completes all rows of a sequence.
fn write_rows(cache: &mut Cache, id: SequenceId) -> Result<(), CacheError> {
    let tokens = cache.tokens(id)?.to_vec();
    let mut writer = cache.writer(id)?;
    let range = writer.tokens();
    let mut before = tokens[..range.start].iter().fold(0, |before, token| row(before, *token));
    for token in range.clone() {
        before = row(before, tokens[token]);
        let bytes: Vec<u8> = (0..16).flat_map(|_| before.to_le_bytes()).collect();
        for plane in [Plane::Keys, Plane::Values] {
            writer.rows(plane, 0, token).head(0, 0).copy_from_slice(&bytes);
        }
    }
    writer.mark_written(range.len());
    cache.commit(writer)
}

/// Checks a view. A row of another sequence, a partly written row, or arbitrary data has numbers that differ, or does
/// not follow from the rows before it. The check tries all tokens: there are four.
fn check(view: &moontide_blocks::View<'_>) -> usize {
    let mut before = 0;
    for at in 0..view.block_count() {
        let (keys, values) = (view.rows(Plane::Keys, 0, at), view.rows(Plane::Values, 0, at));
        for token in 0..keys.tokens() {
            let seen = keys.numbers::<u8>(token, 0);
            let numbers: Vec<u32> =
                seen.chunks_exact(4).map(|bytes| u32::from_le_bytes(bytes.try_into().unwrap())).collect();
            assert!(numbers.iter().all(|number| *number == numbers[0]), "partly written row: {numbers:x?}");
            assert_eq!(seen, values.head(token, 0), "keys and values differ");
            assert!((0..4).any(|token| row(before, token) == numbers[0]), "row of another sequence");
            before = numbers[0];
        }
    }
    view.tokens()
}

#[test]
fn readers_see_consistent_sequences_during_owner_writes() {
    const STEPS: u64 = 30_000;
    let config = CacheConfig { sequences_max: 8, ..CacheConfig::new(SHAPE, 40) };
    let mut cache = Cache::new(&config).unwrap();
    let current: Mutex<Vec<SequenceId>> = Mutex::default();
    let (done, seen, missing) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for thread in 0..3 {
            let mut reader = cache.reader().unwrap();
            let (current, done, seen, missing) = (&current, &done, &seen, &missing);
            scope.spawn(move || {
                let mut random = support::random(thread);
                while !done.load(Ordering::Relaxed) {
                    // The list is a snapshot: a sequence may be gone, or its slot reused, by now.
                    let ids = current.lock().unwrap().clone();
                    for _ in 0..20 {
                        let guard = reader.enter();
                        let Some(id) = ids.get(random.below(8) as usize) else { continue };
                        match guard.view(*id) {
                            Some(view) => {
                                // Twice, as it must not change.
                                let tokens = check(&view);
                                assert_eq!(check(&view), tokens);
                                seen.fetch_add(tokens as u64, Ordering::Relaxed);
                            }
                            None => _ = missing.fetch_add(1, Ordering::Relaxed),
                        }
                    }
                }
            });
        }
        let owner = std::panic::AssertUnwindSafe(|| work(&mut cache, &current, STEPS));
        let result = std::panic::catch_unwind(owner);
        done.store(true, Ordering::Relaxed);
        if let Err(panic) = result {
            std::panic::resume_unwind(panic);
        }
    });
    cache.audit(&[]).unwrap();
    println!(
        "{} tokens seen, {} sequences gone, {:?}",
        seen.into_inner(),
        missing.into_inner(),
        cache.stats()
    );
}

fn work(cache: &mut Cache, current: &Mutex<Vec<SequenceId>>, steps: u64) {
    let mut random = support::random(77);
    let mut ids: Vec<SequenceId> = Vec::new();
    for _ in 0..steps {
        let at = random.below(ids.len().max(1) as u64) as usize;
        let outcome = match random.below(10) {
            0 | 1 => {
                let prompt: Vec<Token> =
                    (0..random.below(12) + 1).map(|_| random.below(2) as Token).collect();
                cache.allocate(&prompt, BlockHash::root("", "")).and_then(|new| {
                    ids.push(new.id);
                    write_rows(cache, new.id)
                })
            }
            _ if ids.is_empty() => Ok(()),
            2 => cache.fork(ids[at]).map(|child| ids.push(child)),
            3 => cache.truncate(ids[at], random.below(20) as usize),
            4 | 5 => cache.free(ids.swap_remove(at)),
            _ => {
                let tokens = (0..random.below(3)).map(|_| random.below(4) as Token).collect::<Vec<_>>();
                let appended = tokens.iter().try_for_each(|token| cache.append(ids[at], *token));
                write_rows(cache, ids[at]).and(appended)
            }
        };
        match outcome {
            Ok(()) | Err(CacheError::Full(_) | CacheError::Sequences { .. }) => {}
            Err(error) => panic!("{error}"),
        }
        *current.lock().unwrap() = ids.clone();
    }
}

/// Two engines on one pool: no block ever has two owners, and in the end all are free.
#[test]
fn caches_sharing_pool_never_corrupt_each_other_or_leak_blocks() {
    let mut first = Cache::new(&CacheConfig { sequences_max: 8, ..CacheConfig::new(SHAPE, 48) }).unwrap();
    let mut second = first.sharing_pool();
    std::thread::scope(|scope| {
        for (seed, cache) in [(1, &mut first), (2, &mut second)] {
            scope.spawn(move || {
                let mut random = support::random(seed);
                let mut ids: Vec<SequenceId> = Vec::new();
                for step in 0..20_000 {
                    let root = BlockHash::root(&seed.to_string(), "");
                    let prompt: Vec<Token> =
                        (0..random.below(20) + 1).map(|_| random.below(4) as Token).collect();
                    match cache.allocate(&prompt, root) {
                        Ok(new) => {
                            write_rows(cache, new.id).unwrap();
                            ids.push(new.id);
                        }
                        Err(CacheError::Full(_) | CacheError::Sequences { .. }) => {
                            if !ids.is_empty() {
                                cache.free(ids.swap_remove(random.below(ids.len() as u64) as usize)).unwrap();
                            }
                        }
                        Err(error) => panic!("{error}"),
                    }
                    for id in &ids {
                        check(&cache.view(*id).unwrap());
                    }
                    if step % 64 == 0 {
                        // Cached blocks of one cache reduce the space of the other.
                        cache.clear();
                    }
                }
            });
        }
    });
    drop(second);
    let ids: Vec<_> = first.sequences().collect();
    ids.into_iter().for_each(|id| first.free(id).unwrap());
    first.clear();
    assert_eq!(first.stats().free, 48);
}
