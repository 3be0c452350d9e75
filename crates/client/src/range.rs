//! Range reads: [`Store::get_range`].
//!
//! Range reads over the network are verified against the master's root: the digests of all pages of the stripe are
//! transferred, must lead to the root, and must match the pages that were read. So whole pages are transferred, and the
//! caller gets its part of them. In local memory the pages are verified zero-copy.

use std::sync::Arc;

use moontide_heap::SharedGuard;
use moontide_proto::OpFlags;
use moontide_rt::time::Instant;
use moontide_transfer::{Op, Target, run};
use moontide_types::limits::PAGE_BYTES;
use moontide_types::record::{DigestContext, PageDigests};
use moontide_types::{ErrorCode, Key, Span};

use crate::cluster::Rounds;
use crate::error::StoreError;
use crate::local::LocalLookup;
use crate::logic::{Distance, RetryDecision, classify};
use crate::nodes::is_connection_error;
use crate::read::{ReadSource, is_disk_error, unless_gone};
use crate::replica_list::ReplicaList;
use crate::store::{Inner, Store};

/// Attempts of a range read whose location was stale.
const ATTEMPTS_MAX: u32 = 4;

impl Store {
    /// Copies bytes `offset..offset + into.len()` of an object, clamped to its length. Returns the number of bytes.
    pub fn get_range(&self, key: &[u8], offset: u64, into: &mut [u8]) -> Result<Option<usize>, StoreError> {
        let inner = &*self.inner;
        let result = inner.get_range(key, offset, into, inner.deadline());
        match &result {
            Ok(Some((ReadSource::Memory(Distance::Mapped), len))) => return Ok(Some(*len)), // counted by find_key
            _ => inner.metrics.gets.inc(),
        };
        match &result {
            Ok(Some((source, len))) => inner.count_hit(*source, *len),
            Ok(None) => inner.count_miss(),
            Err(_) => inner.count_failed(),
        }
        Ok(result?.map(|(_, len)| len))
    }
}

/// Failure of a stripe's part of a range.
enum StripeError {
    /// As [`Outcome::Stale`](crate::read::Outcome::Stale).
    Stale(Option<StoreError>),
    /// The only copies were on disks, and these cannot read them.
    Lost,
    Error(StoreError),
}

impl Inner {
    fn get_range(
        &self,
        key: &[u8],
        offset: u64,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<Option<(ReadSource, usize)>, StoreError> {
        let key = Key::new(key)?;
        let (id, found) = self.local_nodes.find_key(key);
        if let LocalLookup::Hit(guard) = found {
            let range = within(offset, into.len(), guard.bytes().len() as u64)?;
            if self.copy_part(&guard, range, &mut into[..range.len() as usize]) {
                return Ok(Some((ReadSource::Memory(Distance::Mapped), range.len() as usize)));
            }
        }
        let mut failed = None;
        for attempt in 0..ATTEMPTS_MAX {
            let cached = if attempt == 0 { self.cached_location(&id) } else { None };
            let from_cache = cached.is_some();
            let location = match cached {
                Some(location) => location,
                None => {
                    let found = self
                        .fetch_locations(&[key], Rounds::UntilDeadline, deadline)
                        .pop()
                        .expect("one result per key")?;
                    match found {
                        Some(location) => location,
                        None => return Ok(None),
                    }
                }
            };
            let range = match within(offset, into.len(), location.len()) {
                Ok(range) => range,
                // The cached length may be that of an older version.
                Err(_) if from_cache => {
                    self.invalidate_location(&location);
                    continue;
                }
                Err(error) => return Err(error),
            };
            match self.read_range(&location, range, &mut into[..range.len() as usize], deadline) {
                Ok(()) => {
                    // Replicas in memory come first.
                    let on_disk = location.is_on_disk(0);
                    let source =
                        if on_disk { ReadSource::Disk } else { ReadSource::Memory(Distance::Remote) };
                    return Ok(Some((source, range.len() as usize)));
                }
                Err(StripeError::Stale(error)) => {
                    self.invalidate_location(&location);
                    failed = error;
                }
                Err(StripeError::Lost) => return Ok(None),
                Err(StripeError::Error(error)) => {
                    if moontide_rt::mutation_enabled("stale-range") {
                        return Err(error);
                    }
                    self.invalidate_location(&location);
                    // A cached location may be stale: a look-up at the master does not count as a retry.
                    let again = Instant::now() < deadline
                        && (from_cache || error.is_retryable() && self.budget.lock().spend());
                    if !again {
                        return Err(error);
                    }
                    failed = Some(error);
                }
            }
        }
        match failed {
            // The node has left the cluster with its copy.
            Some(error) if error.code() != ErrorCode::StaleSession => Err(error),
            _ => Ok(None),
        }
    }

    /// Copies a part of an object out of local memory. Verifies the pages that it touches against their digests, and
    /// these against the root. `false`: the bytes are corrupt.
    fn copy_part(&self, guard: &SharedGuard, range: Span, into: &mut [u8]) -> bool {
        into.copy_from_slice(&guard.bytes()[range.offset() as usize..range.end() as usize]);
        let header = guard.header();
        if !self.config().verify_shm || header.flags.digestless() || range.is_empty() {
            return true;
        }
        let context = DigestContext {
            id: header.id,
            version: guard.version(),
            stripe: header.stripe_index,
            len: header.stripe_len,
        };
        let digests: Vec<u64> = guard.digests().iter().collect();
        let touched = range.offset() / PAGE_BYTES..range.end().div_ceil(PAGE_BYTES);
        let page_matches = |page: u64| {
            let (start, end) = (page * PAGE_BYTES, ((page + 1) * PAGE_BYTES).min(header.stripe_len));
            // Pinned bytes do not change.
            digests.get(page as usize)
                == Some(&context.page(page, &guard.bytes()[start as usize..end as usize]))
        };
        let matches =
            context.root_of(digests.iter().copied()) == header.root && touched.into_iter().all(page_matches);
        if !matches {
            self.metrics.corrupt.inc();
        }
        matches
    }

    fn read_range(
        &self,
        location: &Arc<ReplicaList>,
        range: Span,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<(), StripeError> {
        let mut rest = into;
        for stripe in 0..location.stripes() {
            let handle = location.handle(0, stripe);
            let start = range.offset().max(handle.stripe_offset);
            let end = range.end().min(handle.stripe_offset + handle.stripe_len);
            if start >= end {
                continue;
            }
            let (part, after) = rest.split_at_mut((end - start) as usize);
            rest = after;
            let within = Span::new(start - handle.stripe_offset, end - start).expect("inside the stripe");
            self.read_stripe_part(location, stripe, within, part, deadline)?;
        }
        Ok(())
    }

    /// Reads a part of one stripe from the first replica that has it.
    fn read_stripe_part(
        &self,
        location: &Arc<ReplicaList>,
        stripe: usize,
        range: Span,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<(), StripeError> {
        let mut last = StripeError::Error(StoreError::refused(ErrorCode::Unreachable));
        for replica in 0..location.replica_count() {
            match self.read_pages(location, replica, stripe, range, into, deadline) {
                Ok(()) => return Ok(()),
                Err(error) if is_disk_error(error.code()) && location.is_on_disk(replica) => {
                    last = StripeError::Lost;
                }
                Err(error) if error.code() == ErrorCode::Busy && location.is_on_disk(replica) => {
                    last = StripeError::Stale(None);
                }
                Err(error) => match classify(error.code()) {
                    RetryDecision::Relookup => return Err(StripeError::Stale(unless_gone(error))),
                    RetryDecision::Final => return Err(StripeError::Error(error)),
                    RetryDecision::OtherReplica => last = StripeError::Error(error),
                },
            }
        }
        Err(last)
    }

    fn read_pages(
        &self,
        location: &ReplicaList,
        replica: usize,
        stripe: usize,
        range: Span,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<(), StoreError> {
        let handle = location.handle(replica, stripe);
        let (node, link) = self.reach(handle.node, deadline)?;
        let context = location.digest_context(handle);
        let target = Target::of(handle, location.id(), location.epoch());
        let (first, end) = (range.offset() / PAGE_BYTES, range.end().div_ceil(PAGE_BYTES));
        let start = first * PAGE_BYTES;
        let mut pages = vec![0; ((end * PAGE_BYTES).min(handle.stripe_len) - start) as usize];
        let mut found = vec![0u64; (end - first) as usize];
        let op = Op::get(target, start, &mut pages);
        let digested = !location.is_digestless();
        let op = if digested { op.digested(context, &mut found).expect("whole pages") } else { op };
        let mut digests =
            vec![0; if digested { 8 * handle.stripe_len.div_ceil(PAGE_BYTES) as usize } else { 0 }];
        let mut ops = vec![op];
        if digested {
            ops.push(Op::get(
                Target { flags: target.flags.with(OpFlags::DIGESTS), ..target },
                0,
                &mut digests,
            ));
        }
        let result = run(&*link, &mut ops, deadline);
        let outcomes: Vec<_> = ops.iter().map(Op::outcome).collect();
        drop(ops);
        let is_lost = outcomes.contains(&Some(Err(ErrorCode::ConnectionLost)));
        if is_lost || result.as_ref().is_err_and(is_connection_error) {
            node.suspect(); // the next attempt asks the masters for its successor
        }
        result.map_err(|source| StoreError::Node { node: node.info.node, source })?;
        for outcome in outcomes {
            outcome.unwrap_or(Err(ErrorCode::Internal)).map_err(StoreError::refused)?;
        }
        if digested {
            let expected: Vec<u64> = PageDigests::new(&digests).iter().collect();
            let matches = context.root_of(expected.iter().copied()) == handle.stripe_root
                && expected[first as usize..end as usize] == found[..];
            if !matches {
                self.metrics.corrupt.inc();
                return Err(StoreError::Corrupt { nodes: vec![node.info.node] });
            }
        }
        let skip = (range.offset() - start) as usize;
        into.copy_from_slice(&pages[skip..skip + into.len()]);
        Ok(())
    }
}

/// Clamps a range to an object of `len` bytes. Fails if it starts behind the end.
fn within(offset: u64, wanted: usize, len: u64) -> Result<Span, StoreError> {
    let end = offset.saturating_add(wanted as u64).min(len);
    Span::new(offset, end.wrapping_sub(offset)).filter(|_| offset <= len).ok_or(StoreError::Range {
        offset,
        end: offset.saturating_add(wanted as u64),
        len,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn range_is_clamped_to_object_length() {
        let span = |offset, wanted, len| within(offset, wanted, len).ok().map(|s| (s.offset(), s.len()));
        assert_eq!(span(0, 10, 100), Some((0, 10)));
        assert_eq!(span(95, 10, 100), Some((95, 5)));
        assert_eq!(span(100, 10, 100), Some((100, 0)));
        assert_eq!(span(101, 10, 100), None);
        assert_eq!(span(u64::MAX, 10, 100), None);
    }
}
