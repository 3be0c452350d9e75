//! [`Watcher`]: checks invalidations against a naive model: the keys that were readable minus those that still are.

use std::time::Duration;

use moontide_meta::{LookupKey, TickBudget};
use moontide_types::{Key, ObjectId, Tenant, UnixMillis};

use crate::harness::{Check, KEYS, ModelHarness, TENANTS, ensure, id_of, key_of, tenant_of};

/// State of the watchers of all tenants, which poll together.
#[derive(Debug, Default)]
pub(crate) struct Watcher {
    /// Number to request next, of each tenant; 0 before the first response.
    next: [u64; TENANTS.len()],
    /// Keys that were readable since their last invalidation: one is due if they no longer are.
    readable: [bool; KEYS as usize],
    /// Keys that were not readable at the start, nor since: an invalidation that was pending then is allowed.
    initially_absent: [bool; KEYS as usize],
    /// Number of reported records at the last poll.
    reported: u64,
}

impl Watcher {
    /// Records an acknowledged put: its invalidation becomes due even if the object has already expired.
    pub(crate) fn completed(&mut self, key: u8) {
        self.readable[usize::from(key)] |= self.next[0] != 0;
    }
}

impl ModelHarness {
    /// Polls invalidations. No readable key may be invalidated, and every loss of a key is reported once.
    pub(crate) fn watch(&mut self) -> Check {
        let mut ids = vec![];
        for (tenant, name) in (0u8..).zip(TENANTS) {
            let since = self.watcher.next[usize::from(tenant)];
            let name = Tenant::new(name).unwrap();
            let Some(response) = self.group.invalidations(self.now, name, since, usize::MAX) else {
                ensure!(since == 0, "feed closed after it was open");
                return Ok(());
            };
            ensure!(response.gap == (since == 0), "unexpected gap flag after {since}: {response:?}");
            let of_tenant = |id: &ObjectId| tenant_of(id.0[0] - 1) == tenant;
            ensure!(response.ids.iter().all(of_tenant), "ids of another tenant: {response:?}");
            self.watcher.next[usize::from(tenant)] = response.next;
            if response.gap {
                // After a gap the watcher checks all keys, below.
                self.watcher.readable = Default::default();
                self.watcher.initially_absent = [true; KEYS as usize];
            }
            ids.extend(response.ids);
        }
        // One report can complete an object and drop it: no reader can have seen it in between.
        let reported = self.group.stats().reported + self.group.stats().recovered_objects;
        let newly_reported = std::mem::replace(&mut self.watcher.reported, reported) != reported;
        for id in ids {
            let key = id.0[0] - 1;
            ensure!(!self.is_readable(key), "key {key} invalidated, but readable");
            let due = std::mem::take(&mut self.watcher.readable[usize::from(key)]);
            let initially_absent = std::mem::take(&mut self.watcher.initially_absent[usize::from(key)]);
            ensure!(
                due || initially_absent || newly_reported,
                "key {key} invalidated twice, or never readable"
            );
        }
        for key in 0..KEYS {
            let is_readable = self.is_readable(key);
            self.watcher.readable[usize::from(key)] |= is_readable;
            self.watcher.initially_absent[usize::from(key)] &= !is_readable;
        }
        Ok(())
    }

    /// After all timeouts, every due invalidation has been received.
    pub(crate) fn check_final_invalidations(&mut self) -> Check {
        for _ in 0..3 {
            self.now.mono = self.now.mono.after(Duration::from_secs(100));
            self.now.unix = UnixMillis(self.now.unix.0 + 100_000);
            while self.group.tick(self.now, &TickBudget::default(), &mut self.effects) {}
        }
        self.watch()?;
        for key in 0..KEYS {
            let due = self.watcher.readable[usize::from(key)] && !self.is_readable(key);
            ensure!(!due, "key {key} is gone without invalidation");
        }
        Ok(())
    }

    fn is_readable(&self, key: u8) -> bool {
        let bytes = key_of(key);
        let lookup = LookupKey { id: id_of(key), key: Key::new(&bytes).unwrap() };
        self.group.query(self.now, &lookup).is_some_and(|detail| !detail.writing)
    }
}
