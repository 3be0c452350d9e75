//! What a cache promises, one test for each promise.

mod support;

use moontide_blocks::{
    ArenaError, Attention, BlockHash, BlocksError, Cache, CacheConfig, Dtype, Full, Keep, Order, ParkError,
    Placement, Plane, SequenceId, Shape, Store, Token,
};
use support::Memory;

const SHAPE: Shape = Shape {
    layers: 2,
    block_tokens: 4,
    attention: Attention::Heads { kv_heads: 2, dim: 4 },
    dtype: Dtype::F32,
    order: Order::TokenMajor,
};

fn root() -> BlockHash {
    BlockHash::root("", "")
}

fn cache(blocks: u32) -> Cache {
    Cache::new(&CacheConfig::new(SHAPE, blocks)).expect("a small arena")
}

/// Writes rows that begin with a token's number and `mark`, and makes them visible.
fn fill(cache: &mut Cache, id: SequenceId, mark: u8) {
    let tokens = cache.tokens(id).unwrap().to_vec();
    let mut fill = cache.fill(id).unwrap();
    let range = fill.tokens();
    for plane in [Plane::Keys, Plane::Values] {
        for layer in 0..SHAPE.layers {
            for token in range.clone() {
                let mut rows = fill.rows(plane, layer, token);
                for head in 0..SHAPE.heads() {
                    rows.head(0, head).fill(tokens[token] as u8 ^ mark);
                }
            }
        }
    }
    fill.complete(range.len());
    cache.commit(fill).unwrap();
}

/// A sequence whose rows are there.
fn begin(cache: &mut Cache, prompt: &[Token]) -> SequenceId {
    let id = cache.allocate(prompt, root()).unwrap().id;
    fill(cache, id, 0);
    id
}

/// What stands in the first byte of each row.
fn rows(cache: &Cache, id: SequenceId) -> Vec<u8> {
    let view = cache.view(id).unwrap();
    (0..view.block_count())
        .flat_map(|at| {
            let block = view.rows(Plane::Values, 1, at);
            (0..block.tokens()).map(move |token| block.head(token, 1)[0])
        })
        .collect()
}

#[test]
fn a_prompt_that_fills_its_blocks_can_go_on() {
    let mut cache = cache(8);
    let id = begin(&mut cache, &[1, 2, 3, 4]);
    assert_eq!(cache.blocks_of(id).unwrap().len(), 1);
    cache.append(id, 5).unwrap();
    fill(&mut cache, id, 0);
    assert_eq!(cache.blocks_of(id).unwrap().len(), 2);
    assert_eq!(rows(&cache, id), [1, 2, 3, 4, 5]);
}

#[test]
fn what_fails_changes_nothing() {
    let mut cache = cache(3);
    let id = begin(&mut cache, &[1; 8]);
    let other = begin(&mut cache, &[2; 4]);
    let before = cache.stats();
    let full = Full { wanted: 1, free: 0, longest: 0, cached: 0, waiting: 0 };
    assert_eq!(cache.append(id, 9), Err(full.into()));
    assert!(matches!(cache.allocate(&[7; 12], root()), Err(BlocksError::Full(_))));
    assert_eq!((cache.tokens(id).unwrap().len(), cache.tokens(other).unwrap().len()), (8, 4));
    assert_eq!(cache.stats(), before);
    cache.audit(&[]).unwrap();
}

/// Blocks that nobody uses are given up only for a request that then has enough of them.
#[test]
fn nothing_is_given_up_for_a_request_that_fails() {
    let mut cache = cache(4);
    let first = begin(&mut cache, &[1; 8]);
    cache.free(first).unwrap();
    let _other = begin(&mut cache, &[2; 4]);
    assert_eq!(cache.stats().cached, 2);
    assert!(cache.allocate(&[3; 16], root()).is_err());
    assert_eq!(cache.stats().cached, 2);
    assert_eq!(cache.allocate(&[1; 9], root()).unwrap().shared_tokens, 8);
}

#[test]
fn a_prefix_is_found_again_but_not_across_salts_and_not_whole() {
    let mut cache = cache(16);
    let first = begin(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8]);
    cache.free(first).unwrap();
    // The last token is left, so that somebody computes what follows it.
    let same = cache.allocate(&[1, 2, 3, 4, 5, 6, 7, 8], root()).unwrap();
    assert_eq!(same.shared_tokens, 4);
    let longer = cache.allocate(&[1, 2, 3, 4, 5, 6, 7, 8, 9], root()).unwrap();
    assert_eq!(longer.shared_tokens, 8);
    assert_eq!(rows(&cache, longer.id), [1, 2, 3, 4, 5, 6, 7, 8]);
    assert_eq!(cache.allocate(&[1, 2, 3, 4, 5], BlockHash::root("tenant", "")).unwrap().shared_tokens, 0);
    assert_eq!(cache.allocate(&[9, 2, 3, 4, 5], root()).unwrap().shared_tokens, 0);
}

/// A block is shared when it is complete, not when it is asked for.
#[test]
fn rows_that_are_not_there_yet_are_not_shared() {
    let mut cache = cache(16);
    let first = cache.allocate(&[1; 9], root()).unwrap();
    assert_eq!(cache.allocate(&[1; 9], root()).unwrap().shared_tokens, 0);
    fill(&mut cache, first.id, 0);
    assert_eq!(cache.allocate(&[1; 9], root()).unwrap().shared_tokens, 8);
}

#[test]
fn the_longest_unused_goes_first_and_a_prefix_begins_to_go_at_its_end() {
    let mut cache = cache(6);
    for token in [1, 2] {
        let id = begin(&mut cache, &[token; 12]);
        cache.free(id).unwrap();
    }
    // Two blocks are needed: the last two of the first sequence go, and its first stays.
    let _new = begin(&mut cache, &[3; 8]);
    assert_eq!(cache.allocate(&[1; 5], root()).unwrap().shared_tokens, 4);
    // Which took the last one of the second sequence.
    assert_eq!(cache.stats().cached, 2);
    assert_eq!(cache.allocate(&[2; 8], root()).unwrap().shared_tokens, 4);
    assert_eq!(cache.stats().cached, 0);
}

#[test]
fn forks_share_until_one_of_them_writes() {
    let mut cache = cache(8);
    let parent = begin(&mut cache, &[1, 2, 3, 4, 5]);
    let child = cache.fork(parent).unwrap();
    assert_eq!(cache.blocks_of(parent).unwrap(), cache.blocks_of(child).unwrap());
    cache.append(child, 6).unwrap();
    fill(&mut cache, child, 0);
    cache.append(parent, 7).unwrap();
    fill(&mut cache, parent, 0);
    assert_eq!((rows(&cache, parent), rows(&cache, child)), (vec![1, 2, 3, 4, 5, 7], vec![1, 2, 3, 4, 5, 6]));
    assert_eq!(cache.blocks_of(parent).unwrap()[0], cache.blocks_of(child).unwrap()[0]);
    assert_eq!(cache.stats().counts.copied_blocks, 1, "the last one to write has it alone");
    cache.audit(&[]).unwrap();
}

#[test]
fn an_id_is_never_somebody_elses() {
    let mut cache = cache(8);
    let old = begin(&mut cache, &[1; 4]);
    cache.free(old).unwrap();
    let new = begin(&mut cache, &[2; 4]);
    assert_eq!(old.to_bits() as u32, new.to_bits() as u32, "the same place");
    assert_eq!(cache.free(old), Err(BlocksError::Unknown(old)));
    assert!(cache.view(old).is_err());
    assert_eq!(SequenceId::from_bits(new.to_bits()), new);
    assert!(cache.view(SequenceId::from_bits(u64::MAX)).is_err());
}

#[test]
fn what_a_reader_sees_stays_and_its_blocks_are_not_given_out() {
    let mut cache = cache(2);
    let id = begin(&mut cache, &[1, 2, 3, 4, 5]);
    let mut reader = cache.reader().unwrap();
    let guard = reader.enter();
    let view = guard.view(id).unwrap();
    cache.free(id).unwrap();
    assert!(guard.view(id).is_none());
    assert!(matches!(cache.allocate(&[9; 8], root()), Err(BlocksError::Full(Full { waiting: 1, .. }))));
    assert_eq!(view.rows(Plane::Keys, 0, 1).numbers::<u8>(0, 0)[0], 5);
    drop(guard);
    assert!(cache.allocate(&[9; 8], root()).is_ok());
}

/// Failure: a reader saw rows of a token that had been taken back. Cause: the table was changed in place. A table is
/// replaced when tokens are taken back, and a row that was seen is not written again.
#[test]
fn tokens_that_are_taken_back_stay_with_whoever_saw_them() {
    let mut cache = cache(8);
    let id = begin(&mut cache, &[1, 2, 3, 4, 5, 6]);
    let mut reader = cache.reader().unwrap();
    let guard = reader.enter();
    let view = guard.view(id).unwrap();
    cache.truncate(id, 5).unwrap();
    cache.append(id, 60).unwrap();
    fill(&mut cache, id, 0);
    let block = view.rows(Plane::Keys, 0, 1);
    assert_eq!((block.head(0, 0)[0], block.head(1, 0)[0]), (5, 6));
    drop(guard);
    assert_eq!(rows(&cache, id), [1, 2, 3, 4, 5, 60]);
}

/// Failure: two different rows under one name in the store. Cause: after tokens were dropped, the same token at the same
/// place was computed again, in the presence of what was left, and named as the row from before. Rows say whether they
/// were computed since.
#[test]
fn rows_from_before_and_after_a_thinning_have_different_names() {
    let mut cache = cache(16);
    let first = begin(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8]);
    let kept = cache.thin(first, &Keep { first: 1, last: 3, budget: 4 }).unwrap();
    assert_eq!(kept, [0, 5, 6, 7]);
    let before = cache.hashes_of(first).unwrap().to_vec();
    let again = cache.fork(first).unwrap();
    cache.truncate(again, 3).unwrap();
    cache.append(again, 8).unwrap();
    fill(&mut cache, again, 0);
    assert_eq!(cache.positions(again).unwrap(), kept);
    assert_ne!(cache.hashes_of(again).unwrap(), before);
    assert_eq!(cache.tokens(first).unwrap(), cache.tokens(again).unwrap());
}

/// Failure: as above, when a sequence that was put aside came back in part. What is computed again has other names.
#[test]
fn rows_that_did_not_come_back_are_named_anew() {
    let mut cache = cache(16);
    let store = Memory::default();
    let id = begin(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10]);
    cache.thin(id, &Keep { first: 1, last: 8, budget: 9 }).unwrap();
    let before = cache.hashes_of(id).unwrap().to_vec();
    let parked = cache.park(id, &store).unwrap();
    cache.clear();
    store.forget(&before[1]);
    let back = cache.resume(&parked, &store).unwrap();
    assert_eq!(cache.filled_of(back).unwrap(), 4);
    assert_eq!(cache.hashes_of(back).unwrap()[0], before[0]);
    assert_ne!(cache.hashes_of(back).unwrap()[1], before[1]);
}

#[test]
fn a_sequence_that_was_put_aside_comes_back_whole() {
    let store = Memory::default();
    let mut first = cache(8);
    let id = begin(&mut first, &[1, 2, 3, 4, 5, 6]);
    let parked = first.park(id, &store).unwrap();
    assert_eq!((parked.tokens().len(), parked.filled()), (6, 6));
    // In another process, for all that matters.
    let mut second = cache(8);
    let back = second.resume(&parked, &store).unwrap();
    assert_eq!(rows(&second, back), [1, 2, 3, 4, 5, 6]);
    second.append(back, 7).unwrap();
    fill(&mut second, back, 0);
    assert_eq!(rows(&second, back), [1, 2, 3, 4, 5, 6, 7]);
    // And a request with the same beginning finds what was saved.
    let mut third = cache(8);
    let new = third.allocate(&[1, 2, 3, 4, 9], root()).unwrap();
    assert_eq!(third.restore(new.id, &store).unwrap(), 4);
    assert_eq!(rows(&third, new.id), [1, 2, 3, 4]);
    let missing = third.resume::<Memory>(&parked, &Memory::default()).unwrap();
    assert_eq!(third.filled_of(missing).unwrap(), 4, "from the other sequence");
    assert!(!matches!(first.park(id, &store), Err(ParkError::Store(_)) | Ok(_)));
}

#[test]
fn thinning_keeps_rows_and_positions_and_disturbs_nobody() {
    let mut cache = cache(16);
    let id = begin(&mut cache, &(1..=11).collect::<Vec<_>>());
    let other = cache.fork(id).unwrap();
    let mut worth = [0.0; 11];
    (worth[5], worth[7]) = (2.0, 1.0);
    cache.add_worth(id, &worth).unwrap();
    let positions = cache.thin(id, &Keep { first: 4, last: 2, budget: 8 }).unwrap();
    assert_eq!(positions, [0, 1, 2, 3, 5, 7, 9, 10]);
    assert_eq!(rows(&cache, id), [1, 2, 3, 4, 6, 8, 10, 11]);
    assert_eq!(
        cache.blocks_of(id).unwrap()[0],
        cache.blocks_of(other).unwrap()[0],
        "what is whole stays shared"
    );
    cache.append(id, 12).unwrap();
    fill(&mut cache, id, 0);
    assert_eq!(cache.positions(id).unwrap().last(), Some(&11), "behind the last that there ever was");
    assert_eq!(rows(&cache, other), (1..=11).collect::<Vec<_>>());
    let incomplete = cache.allocate(&[5; 3], root()).unwrap().id;
    let keep = Keep { first: 0, last: 0, budget: 1 };
    assert_eq!(cache.thin(incomplete, &keep), Err(BlocksError::Incomplete(incomplete)));
}

#[test]
fn a_cache_that_shrinks_moves_what_is_used_and_gives_memory_back() {
    let large = Shape { layers: 4, attention: Attention::Heads { kv_heads: 16, dim: 64 }, ..SHAPE };
    let config = CacheConfig { blocks_max: 64, ..CacheConfig::new(large, 64) };
    let mut cache = Cache::new(&config).unwrap();
    let block = vec![7; 16 * 64 * 4 * 4];
    let mut ids = Vec::new();
    for n in 0..16 {
        let id = cache.allocate(&[n; 16], root()).unwrap().id;
        let mut fill = cache.fill(id).unwrap();
        for plane in [Plane::Keys, Plane::Values] {
            (0..4).for_each(|layer| fill.write(plane, layer, &block.repeat(4)));
        }
        fill.complete(16);
        cache.commit(fill).unwrap();
        ids.push(id);
    }
    let before = resident();
    for id in ids.drain(..12) {
        cache.free(id).unwrap();
    }
    assert!(matches!(cache.resize(15), Err(BlocksError::Full(_))), "sixteen are in use");
    assert_eq!(cache.stats().blocks, 64);
    cache.resize(16).unwrap();
    assert!(!cache.is_shrinking());
    assert!(ids.iter().all(|id| cache.blocks_of(*id).unwrap().iter().all(|block| *block < 16)));
    let view = cache.view(ids[3]).unwrap();
    assert_eq!(view.rows(Plane::Values, 3, 3).bytes(), Some(&block[..]));
    let given = before - resident();
    assert!(given > 40 * large.block_bytes(), "{given} bytes of {}", 48 * large.block_bytes());
    cache.resize(64).unwrap();
    assert!(cache.allocate(&[99; 48 * 4], root()).is_ok());
}

/// Bytes of arenas that are in memory.
fn resident() -> usize {
    let maps = std::fs::read_to_string("/proc/self/smaps").unwrap();
    let mut ours = false;
    let mut sum = 0;
    for line in maps.lines() {
        if line.contains("memfd:") || line.split_whitespace().next().is_some_and(|first| first.contains('-'))
        {
            ours = line.contains("memfd:moontide-blocks");
        } else if let (true, Some(rss)) = (ours, line.strip_prefix("Rss:")) {
            sum += rss.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10;
        }
    }
    sum
}

#[test]
fn a_contiguous_sequence_is_one_view_and_moves_when_it_must() {
    let placement = Placement::Contiguous { reserve: 1 };
    let mut cache = Cache::new(&CacheConfig { placement, ..CacheConfig::new(SHAPE, 12) }).unwrap();
    let first = begin(&mut cache, &[1, 2, 3, 4]);
    let second = begin(&mut cache, &[5, 6, 7, 8]);
    assert_eq!((cache.blocks_of(first).unwrap(), cache.blocks_of(second).unwrap()), (vec![0], vec![2]));
    // Into the reserve, and then away, since the next block is another's.
    for token in 5..=9 {
        cache.append(first, token).unwrap();
    }
    fill(&mut cache, first, 0);
    assert_eq!(cache.blocks_of(first).unwrap(), [4, 5, 6]);
    let whole = cache.view(first).unwrap().contiguous(Plane::Keys, 0).unwrap();
    let seen: Vec<u8> = (0..9).map(|token| whole.head(token, 1)[0]).collect();
    assert_eq!(seen, (1..=9).collect::<Vec<_>>());
    assert_eq!(whole.bytes().unwrap().len(), 9 * 2 * 4 * 4);
    cache.audit(&[]).unwrap();
}

/// Failure: a reader's rows changed. Cause: a tail that readers had seen further was taken for a fresh one when the sequence
/// was then cut at the end of a later block. What counts is where complete rows end.
#[test]
fn a_tail_that_was_seen_is_not_written_whatever_came_after() {
    let mut cache = cache(16);
    let id = begin(&mut cache, &[1, 2, 3, 4, 5, 6, 7]);
    let mut reader = cache.reader().unwrap();
    let guard = reader.enter();
    let view = guard.view(id).unwrap();
    cache.truncate(id, 5).unwrap();
    let empty = cache.fill(id).unwrap();
    (50..54).for_each(|token| cache.append(id, token).unwrap());
    drop(empty);
    cache.truncate(id, 8).unwrap();
    fill(&mut cache, id, 0);
    let block = view.rows(Plane::Keys, 0, 1);
    assert_eq!([0, 1, 2].map(|token| block.head(token, 0)[0]), [5, 6, 7]);
}

/// Failure: `park` said yes, and half of the last block did not come back. Cause: the block was known to be in the store,
/// but under the name that it had when it was full.
#[test]
fn a_block_is_saved_under_the_name_that_it_has_now() {
    let (mut cache, store) = (cache(32), Memory::default());
    let id = begin(&mut cache, &[1, 2, 3, 4, 5, 6, 7, 8]);
    assert!(cache.spill(id, &store).unwrap());
    cache.truncate(id, 6).unwrap();
    let parked = cache.park(id, &store).unwrap();
    cache.clear();
    let id = cache.resume(&parked, &store).unwrap();
    assert_eq!(rows(&cache, id), [1, 2, 3, 4, 5, 6]);

    let id = begin(&mut cache, &(20..36).collect::<Vec<_>>());
    let drop_one = |cache: &mut Cache, at: usize, budget| {
        let mut worth = [0.0; 16];
        worth[at] = -5.0;
        cache.add_worth(id, &worth).unwrap();
        cache.thin(id, &Keep { first: 0, last: 0, budget }).unwrap();
        assert!(cache.spill(id, &store).unwrap());
        let hashes = cache.hashes_of(id).unwrap();
        assert_eq!(Store::prefix(&store, hashes).unwrap(), hashes.len());
    };
    drop_one(&mut cache, 0, 15);
    drop_one(&mut cache, 13, 14);
}

#[test]
fn a_fill_that_was_dropped_is_in_nobodys_way() {
    let (mut cache, store) = (cache(16), Memory::default());
    let id = begin(&mut cache, &(0..16).collect::<Vec<_>>());
    drop(cache.fill(id).unwrap());
    assert_eq!(cache.thin(id, &Keep { first: 0, last: 0, budget: 15 }).unwrap().len(), 15);
    drop(cache.fill(id).unwrap());
    assert!(cache.park(id, &store).is_ok());
}

/// More rows than there are to be written: a panic, as is said, and neither a loop nor a count that wraps.
#[test]
fn a_fill_has_an_end() {
    let mut cache = cache(16);
    let id = cache.allocate(&[1, 2, 3, 4, 5, 6], root()).unwrap().id;
    let refused = |act: &dyn Fn(&mut moontide_blocks::Fill)| {
        let mut cache = self::cache(16);
        let id = cache.allocate(&[1, 2, 3, 4, 5, 6], root()).unwrap().id;
        let mut fill = cache.fill(id).unwrap();
        std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| act(&mut fill))).is_err()
    };
    assert!(refused(&|fill| fill.write(Plane::Keys, 0, &[1; 7 * 32])));
    assert!(refused(&|fill| fill.complete(7)));
    assert!(refused(&|fill| fill.complete(usize::MAX)));
    assert!(cache.fill(id).is_ok());
}

#[test]
fn sizes_that_cannot_be_are_refused_and_large_reserves_are_cut() {
    for placement in [Placement::Paged, Placement::Contiguous { reserve: 0 }] {
        let config = CacheConfig { blocks: 10, blocks_max: 8, placement, ..CacheConfig::new(SHAPE, 8) };
        assert!(matches!(Cache::new(&config), Err(ArenaError::Blocks { blocks: 10, blocks_max: 8 })));
    }
    let placement = Placement::Contiguous { reserve: u32::MAX };
    let mut cache = Cache::new(&CacheConfig { placement, ..CacheConfig::new(SHAPE, 16) }).unwrap();
    let (first, second) = (begin(&mut cache, &[1; 8]), begin(&mut cache, &[2; 8]));
    assert_eq!((rows(&cache, first), rows(&cache, second)), (vec![1; 8], vec![2; 8]));
    cache.append(first, 3).unwrap();
    cache.audit(&[]).unwrap();
}

/// With one block of one token, heads that lie apart are as far from each other as if they did not.
#[test]
fn heads_that_lie_apart_are_all_written() {
    let shape = Shape { layers: 1, block_tokens: 1, order: Order::HeadMajor, ..SHAPE };
    let mut cache = Cache::new(&CacheConfig::new(shape, 1)).unwrap();
    let id = cache.allocate(&[1], root()).unwrap().id;
    let mut fill = cache.fill(id).unwrap();
    fill.write(Plane::Keys, 0, &[7; 32]);
    fill.complete(1);
    cache.commit(fill).unwrap();
    assert_eq!(cache.view(id).unwrap().rows(Plane::Keys, 0, 0).head(0, 1), [7; 16]);
}

#[test]
fn only_the_first_of_several_caches_says_how_many_blocks_there_are() {
    let mut cache = cache(16);
    let mut beside = cache.beside();
    assert_eq!(beside.resize(8), Err(BlocksError::NotOwner));
    let theirs = begin(&mut beside, &[1; 40]);
    cache.resize(8).unwrap();
    assert!(cache.is_shrinking(), "until the other gives them back");
    assert_eq!(rows(&beside, theirs), [1; 40]);
    beside.free(theirs).unwrap();
    beside.clear();
    assert!(!cache.is_shrinking());
    assert!(cache.allocate(&[2; 32], root()).is_ok());
}

/// The page that the design shows, with the numbers of four such sequences.
#[test]
fn the_pages_for_people() {
    let attention = Attention::Heads { kv_heads: 32, dim: 64 };
    let shape =
        Shape { layers: 32, block_tokens: 16, attention, dtype: Dtype::F32, order: Order::TokenMajor };
    let mut cache = Cache::new(&CacheConfig::new(shape, 2048)).unwrap();
    for (n, tokens) in [512, 256, 128, 64].into_iter().enumerate() {
        cache.allocate(&vec![n as Token; tokens], root()).unwrap();
    }
    let page = "\
=== KVCache Statistics ===
Configuration:
  Layers: 32, Heads: 32, HeadDim: 64, F32, TokenMajor
  BlockSize: 16, TotalBlocks: 2048

Allocation State:
  Allocated sequences: 4
  Total allocated: 480.00 MB
  Total free: 15904.00 MB
  Fragmentation: 0.00
  Shared by several: 0.00 MB
  Cached for later: 0.00 MB
  Waiting for readers: 0.00 MB

Sequences:
  0.1: 512/512 tokens, blocks [0, +32]
  1.1: 256/256 tokens, blocks [32, +16]
  2.1: 128/128 tokens, blocks [48, +8]
  3.1: 64/64 tokens, blocks [56, +4]
";
    assert_eq!(cache.dump(), page);
    let map = cache.block_map();
    let head = "\
KVBlockAllocator State:
  Total blocks: 2048
  Used: 60 Free: 1988
  Fragmentation: 0.00
  Block map (. = free, X = used, S = shared, c = cached, w = waiting for readers, r = reserved):
";
    let first = format!("    {}{}\n", "X".repeat(60), ".".repeat(4));
    assert_eq!(map, format!("{head}{first}{}", format!("    {}\n", ".".repeat(64)).repeat(31)));
}
