//! Somebody who watches what leaves: the naive model is the difference of two sets, what could be read and what can be.

use std::time::Duration;

use moontide_meta::{Ask, TickBudget};
use moontide_types::{Key, UnixMillis};

use crate::world::{Check, KEYS, World, ensure, id_of, key_of};

/// What a watcher knows.
#[derive(Debug, Default)]
pub(crate) struct Watcher {
    /// The number that it asks for next; 0: it has not been told anything yet.
    next: u64,
    /// Keys that could be read since they were last told of: their departure is owed if they cannot be any more.
    readable: [bool; KEYS as usize],
    /// Keys that could not be read when it began to watch, nor since: what was on its way out then may be told of.
    leaving: [bool; KEYS as usize],
    /// How many records nodes had told of when it last asked.
    brought: u64,
}

impl Watcher {
    /// A put was acknowledged: whoever made it tells others, although its time may be over.
    pub(crate) fn completed(&mut self, key: u8) {
        self.readable[usize::from(key)] |= self.next != 0;
    }
}

impl World {
    /// Asks what has left. Nothing that can be read is told of, and everything once.
    pub(crate) fn watch(&mut self) -> Check {
        let asked = self.watcher.next;
        let Some(told) = self.group.departures(self.now, asked, usize::MAX) else {
            ensure!(asked == 0, "a group that told of departures has stopped");
            return Ok(());
        };
        ensure!(told.gap == (asked == 0), "a gap after {asked}: {told:?}");
        self.watcher.next = told.next;
        if told.gap {
            // It looks by itself, below.
            self.watcher.readable = Default::default();
            self.watcher.leaving = [true; KEYS as usize];
        }
        // One report can complete an object and take it away: nobody could have read it between them.
        let brought = self.group.stats().reported + self.group.stats().recovered_objects;
        let between = std::mem::replace(&mut self.watcher.brought, brought) != brought;
        for id in told.ids {
            let key = id.0[0] - 1;
            ensure!(!self.is_readable(key), "key {key} has left, and can be read");
            let owed = std::mem::take(&mut self.watcher.readable[usize::from(key)]);
            let leaving = std::mem::take(&mut self.watcher.leaving[usize::from(key)]);
            ensure!(owed || leaving || between, "key {key} has left twice, or was never there");
        }
        for key in 0..KEYS {
            let is_readable = self.is_readable(key);
            self.watcher.readable[usize::from(key)] |= is_readable;
            self.watcher.leaving[usize::from(key)] &= !is_readable;
        }
        Ok(())
    }

    /// When everything is over that waits for time, everything has been told.
    pub(crate) fn last_watch(&mut self) -> Check {
        for _ in 0..3 {
            self.now.mono = self.now.mono.after(Duration::from_secs(100));
            self.now.unix = UnixMillis(self.now.unix.0 + 100_000);
            while self.group.tick(self.now, &TickBudget::default(), &mut self.effects) {}
        }
        self.watch()?;
        for key in 0..KEYS {
            let owed = self.watcher.readable[usize::from(key)] && !self.is_readable(key);
            ensure!(!owed, "key {key} has left, and nobody was told");
        }
        Ok(())
    }

    fn is_readable(&self, key: u8) -> bool {
        let bytes = key_of(key);
        let ask = Ask { id: id_of(key), key: Key::new(&bytes).unwrap() };
        self.group.query(self.now, &ask).is_some_and(|detail| !detail.writing)
    }
}
