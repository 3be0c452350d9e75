//! [`Lists`]: blocks in several doubly linked lists, each block in one of them or in none.

const NONE: u32 = u32::MAX;

/// Lists by number; the first block is the oldest.
pub(crate) struct Lists {
    prev: Vec<u32>,
    next: Vec<u32>,
    /// Number of the list of each block.
    list: Vec<u8>,
    ends: Vec<Ends>,
}

#[derive(Clone)]
struct Ends {
    first: u32,
    last: u32,
    len: usize,
}

/// A block that is in no list.
const OUTSIDE: u8 = u8::MAX;

impl Lists {
    pub(crate) fn new(blocks: usize, lists: usize) -> Lists {
        Lists {
            prev: vec![NONE; blocks],
            next: vec![NONE; blocks],
            list: vec![OUTSIDE; blocks],
            ends: vec![Ends { first: NONE, last: NONE, len: 0 }; lists],
        }
    }

    pub(crate) fn len(&self, list: usize) -> usize {
        self.ends[list].len
    }

    /// Returns the list of a block.
    pub(crate) fn list(&self, block: u32) -> Option<usize> {
        let list = self.list[block as usize];
        (list != OUTSIDE).then_some(list.into())
    }

    pub(crate) fn first(&self, list: usize) -> Option<u32> {
        let first = self.ends[list].first;
        (first != NONE).then_some(first)
    }

    /// Moves a block to the end of a list, from wherever it is.
    pub(crate) fn push(&mut self, list: usize, block: u32) {
        self.remove(block);
        let ends = &mut self.ends[list];
        (self.prev[block as usize], self.next[block as usize]) = (ends.last, NONE);
        match ends.last {
            NONE => ends.first = block,
            last => self.next[last as usize] = block,
        }
        ends.last = block;
        ends.len += 1;
        self.list[block as usize] = list as u8;
    }

    /// Removes a block from its list.
    pub(crate) fn remove(&mut self, block: u32) {
        let Some(list) = self.list(block) else { return };
        let (prev, next) = (self.prev[block as usize], self.next[block as usize]);
        match prev {
            NONE => self.ends[list].first = next,
            prev => self.next[prev as usize] = next,
        }
        match next {
            NONE => self.ends[list].last = prev,
            next => self.prev[next as usize] = prev,
        }
        self.ends[list].len -= 1;
        self.list[block as usize] = OUTSIDE;
    }
}
