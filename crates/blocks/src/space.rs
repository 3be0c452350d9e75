//! [`Space`]: where blocks come from, and how room is made for more: what waits for readers, then what is cached.
//!
//! Invariant: a request gets all its blocks or none, and none is given up for a request that fails.

use std::ops::Range;
use std::sync::Arc;

use crate::cache::Cache;
use crate::pool::{Block, Pool};
use crate::runs::Runs;

/// There are not enough blocks; nothing has changed.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
#[error(
    "{wanted} blocks are wanted; {free} are free{}, {cached} more are cached and {waiting} wait for readers{}",
    if *longest < *free { format!(" ({longest} of them together)") } else { String::new() },
    if *waiting > 0 { " to leave" } else { "" }
)]
pub struct Full {
    /// How many were wanted.
    pub wanted: u32,
    /// How many are free.
    pub free: u32,
    /// How many of those follow each other; all, where that makes no difference.
    pub longest: u32,
    /// How many hold prefixes that nobody is using.
    pub cached: u32,
    /// How many would be free if no reader were in.
    pub waiting: u32,
}

#[derive(Debug)]
pub(crate) enum Space {
    Paged(Arc<Pool>),
    Runs { runs: Runs, reserve: u32 },
}

impl Space {
    #[inline]
    pub(crate) fn is_paged(&self) -> bool {
        matches!(self, Space::Paged(_))
    }

    pub(crate) fn free(&self) -> u32 {
        match self {
            Space::Paged(pool) => pool.free(),
            Space::Runs { runs, .. } => runs.free(),
        }
    }

    pub(crate) fn blocks(&self) -> u32 {
        match self {
            Space::Paged(pool) => pool.blocks(),
            Space::Runs { runs, .. } => runs.blocks(),
        }
    }

    pub(crate) fn is_used(&self, block: Block) -> bool {
        match self {
            Space::Paged(pool) => pool.is_taken(block),
            Space::Runs { runs, .. } => runs.is_used(block),
        }
    }

    pub(crate) fn longest(&self) -> u32 {
        match self {
            Space::Paged(pool) => pool.free(),
            Space::Runs { runs, .. } => runs.longest(),
        }
    }

    pub(crate) fn fragmentation(&self) -> f64 {
        match self {
            Space::Paged(_) => 0.0,
            Space::Runs { runs, .. } => runs.fragmentation(),
        }
    }

    pub(crate) fn give(&mut self, blocks: impl IntoIterator<Item = Block>) {
        match self {
            Space::Paged(pool) => pool.give(blocks),
            Space::Runs { runs, .. } => blocks.into_iter().for_each(|block| runs.give(block)),
        }
    }

    pub(crate) fn set_limit(&mut self, limit: u32) {
        match self {
            Space::Paged(pool) => pool.set_limit(limit),
            Space::Runs { runs, .. } => runs.set_limit(limit),
        }
    }

    /// How many blocks behind the limit somebody still has.
    pub(crate) fn behind(&self) -> u32 {
        match self {
            Space::Paged(pool) => pool.behind(),
            Space::Runs { runs, .. } => runs.behind(),
        }
    }

    /// The block `next` and as many as possible of a reserve behind it, of which it says how many.
    pub(crate) fn extend(&mut self, next: Block) -> Option<u32> {
        let Space::Runs { runs, reserve } = self else { return None };
        if runs.take_at(next..next + 1 + *reserve) {
            return Some(*reserve);
        }
        runs.take_at(next..next + 1).then_some(0)
    }

    /// Exactly so many, and how many more are in reserve behind them.
    fn take(&mut self, count: u32, to: &mut Vec<Block>) -> Option<u32> {
        if count == 0 {
            // There is nothing that a reserve could follow.
            return Some(0);
        }
        match self {
            Space::Paged(pool) => pool.take(count, |block| to.push(block)).then_some(0),
            Space::Runs { runs, reserve } => {
                let (Range { start, end }, reserve) = match runs.take(count + *reserve) {
                    Some(run) => (run, *reserve),
                    None => (runs.take(count)?, 0),
                };
                to.extend(start..end - reserve);
                Some(reserve)
            }
        }
    }
}

impl Cache {
    /// Takes so many blocks and says how many more are in reserve behind them.
    pub(crate) fn take(&mut self, count: u32, to: &mut Vec<Block>) -> Result<u32, Full> {
        let before = to.len();
        let reserve = loop {
            match self.space.take(count, to) {
                Some(reserve) => break reserve,
                None => self.make_room(count)?,
            }
        };
        for block in &to[before..] {
            self.books.take(*block);
        }
        Ok(reserve)
    }

    #[inline]
    pub(crate) fn take_one(&mut self) -> Result<Block, Full> {
        if let Space::Paged(pool) = &self.space {
            let mut taken = None;
            if pool.take(1, |block| taken = Some(block))
                && let Some(block) = taken
            {
                self.books.take(block);
                return Ok(block);
            }
        }
        let mut blocks = Vec::new();
        self.take(1, &mut blocks)?;
        Ok(blocks[0])
    }

    /// Makes the space larger than it was when so many could not be taken, or says why not.
    fn make_room(&mut self, wanted: u32) -> Result<(), Full> {
        let before = self.space.free();
        self.settle();
        let free = self.space.free();
        if free > before {
            return Ok(());
        }
        let oldest = self.shared.readers.oldest();
        // More than there are may be free by now, with others at the same pool: then the caller tries again.
        let missing = wanted.saturating_sub(free);
        match self.books.victims(missing, oldest) {
            Some(victims) if self.space.is_paged() => {
                for block in &victims {
                    self.books.evict(*block);
                }
                self.counts.evicted_blocks += u64::from(missing);
                self.space.give(victims);
                Ok(())
            }
            _ => Err(Full {
                wanted,
                free,
                longest: self.space.longest(),
                cached: self.books.cached(),
                waiting: self.books.waiting(),
            }),
        }
    }
}
