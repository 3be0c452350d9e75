//! Ranges of objects: [`Store::get_range`].
//!
//! Bytes that cross the network are believed only as far as the master's root: the digests of all pages of the stripe
//! come along, must lead to the root, and each page that was read must match its own. So whole pages travel, and the
//! caller gets its part of them. On this host the pages are looked at in place.

use std::sync::Arc;
use std::time::Instant;

use moontide_heap::SharedGuard;
use moontide_proto::OpFlags;
use moontide_transfer::{Op, Target, run};
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::record::{DigestContext, PageDigests};
use moontide_types::{ErrorCode, Key, Span};

use crate::decide::{Nearness, Verdict, judge};
use crate::error::StoreError;
use crate::local::Found;
use crate::place::Placed;
use crate::read::{Served, is_of_disk};
use crate::store::{Inner, Store};

/// How often a range is looked up anew when its place was not right.
const ATTEMPTS_MAX: u32 = 4;

impl Store {
    /// Copies bytes `offset..offset + into.len()` of an object, or as many of them as it has; how many.
    pub fn get_range(&self, key: &[u8], offset: u64, into: &mut [u8]) -> Result<Option<usize>, StoreError> {
        let inner = &*self.inner;
        let answer = inner.get_range(key, offset, into, inner.deadline());
        match &answer {
            Ok(Some((Served::Memory(Nearness::Mapped), len))) => return Ok(Some(*len)), // counted when it was found
            _ => inner.metrics.requested.inc(),
        };
        match &answer {
            Ok(Some((served, len))) => inner.count_hit(*served, *len),
            Ok(None) => inner.count_miss(),
            Err(_) => inner.count_failed(),
        }
        Ok(answer?.map(|(_, len)| len))
    }
}

/// How a stripe's part of a range ended, if not well.
enum Fault {
    Stale,
    /// It was on disks only, and those could not bring it back.
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
    ) -> Result<Option<(Served, usize)>, StoreError> {
        let key = Key::new(key)?;
        let (id, found) = self.near.find_key(self.cluster.tenant(), key);
        if let Found::Here(guard) = found {
            let range = within(offset, into.len(), guard.bytes().len() as u64)?;
            if self.copy_part(&guard, range, &mut into[..range.len() as usize]) {
                return Ok(Some((Served::Memory(Nearness::Mapped), range.len() as usize)));
            }
        }
        for attempt in 0..ATTEMPTS_MAX {
            let remembered = if attempt == 0 { self.remembered(&id) } else { None };
            let placed = match remembered {
                Some(placed) => placed,
                None => {
                    let found = self.look_up(&[key], deadline).pop().expect("one answer per key")?;
                    match found {
                        Some(placed) => placed,
                        None => return Ok(None),
                    }
                }
            };
            let range = within(offset, into.len(), placed.len())?;
            match self.read_range(&placed, range, &mut into[..range.len() as usize], deadline) {
                Ok(()) => {
                    // Replicas in memory stand in front.
                    let on_disk = placed.is_on_disk(0);
                    let served = if on_disk { Served::Disk } else { Served::Memory(Nearness::Far) };
                    return Ok(Some((served, range.len() as usize)));
                }
                Err(Fault::Stale) => self.forget(&placed),
                Err(Fault::Lost) => return Ok(None),
                Err(Fault::Error(error)) => return Err(error),
            }
        }
        Ok(None)
    }

    /// Copies a part of an object of this host out, and compares the pages that it touches with their digests, and
    /// these with the root. `false`: the bytes are not right.
    fn copy_part(&self, guard: &SharedGuard, range: Span, into: &mut [u8]) -> bool {
        into.copy_from_slice(&guard.bytes()[range.offset() as usize..range.end() as usize]);
        let header = guard.header();
        if !self.config().verify_local || header.flags.digestless() || range.is_empty() {
            return true;
        }
        let context = DigestContext {
            id: header.id,
            version: guard.version(),
            stripe: header.stripe_index,
            len: header.stripe_len,
        };
        let known: Vec<u64> = guard.digests().iter().collect();
        let touched = range.offset() / PAGE_BYTES..range.end().div_ceil(PAGE_BYTES);
        let is_right = |page: u64| {
            let (start, end) = (page * PAGE_BYTES, ((page + 1) * PAGE_BYTES).min(header.stripe_len));
            // Looked at in place: nobody changes them while they are held.
            known.get(page as usize) == Some(&context.page(page, &guard.bytes()[start as usize..end as usize]))
        };
        let right = context.root_of(known.iter().copied()) == header.root && touched.into_iter().all(is_right);
        if !right {
            self.metrics.corrupt.inc();
        }
        right
    }

    fn read_range(
        &self,
        placed: &Arc<Placed>,
        range: Span,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Fault> {
        let mut rest = into;
        for stripe in 0..placed.stripes() {
            let handle = placed.handle(0, stripe);
            let start = range.offset().max(handle.stripe_offset);
            let end = range.end().min(handle.stripe_offset + handle.stripe_len);
            if start >= end {
                continue;
            }
            let (part, after) = rest.split_at_mut((end - start) as usize);
            rest = after;
            let within = Span::new(start - handle.stripe_offset, end - start).expect("inside the stripe");
            self.read_stripe_part(placed, stripe, within, part, deadline)?;
        }
        Ok(())
    }

    /// A part of one stripe, from the first replica that has it.
    fn read_stripe_part(
        &self,
        placed: &Arc<Placed>,
        stripe: usize,
        range: Span,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<(), Fault> {
        let mut last = Fault::Error(StoreError::refused(ErrorCode::Unreachable));
        for replica in 0..placed.replica_count() {
            match self.read_pages(placed, replica, stripe, range, into, deadline) {
                Ok(()) => return Ok(()),
                Err(error) if is_of_disk(error.code()) && placed.is_on_disk(replica) => {
                    last = Fault::Lost;
                }
                Err(error) => match judge(error.code()) {
                    Verdict::Stale => return Err(Fault::Stale),
                    Verdict::Final => return Err(Fault::Error(error)),
                    Verdict::Elsewhere => last = Fault::Error(error),
                },
            }
        }
        Err(last)
    }

    fn read_pages(
        &self,
        placed: &Placed,
        replica: usize,
        stripe: usize,
        range: Span,
        into: &mut [u8],
        deadline: Instant,
    ) -> Result<(), StoreError> {
        let handle = placed.handle(replica, stripe);
        let (node, link) = self.reach(handle.node, deadline)?;
        let context = placed.digest_context(handle);
        let target = Target::of(handle, placed.id(), placed.epoch());
        let (first, behind) = (range.offset() / PAGE_BYTES, range.end().div_ceil(PAGE_BYTES));
        let start = first * PAGE_BYTES;
        let mut pages = vec![0; ((behind * PAGE_BYTES).min(handle.stripe_len) - start) as usize];
        let mut found = vec![0u64; (behind - first) as usize];
        let op = Op::get(target, start, &mut pages);
        let digested = !placed.is_digestless();
        let op = if digested { op.digested(context, &mut found).expect("whole pages") } else { op };
        let mut digests =
            vec![0; if digested { 8 * handle.stripe_len.div_ceil(PAGE_BYTES) as usize } else { 0 }];
        let mut ops = vec![op];
        if digested {
            ops.push(Op::get(Target { flags: target.flags.with(OpFlags::DIGESTS), ..target }, 0, &mut digests));
        }
        let result = run(&*link, &mut ops, deadline);
        let outcomes: Vec<_> = ops.iter().map(Op::outcome).collect();
        drop(ops);
        result.map_err(|source| StoreError::Node { node: node.info.node, source })?;
        for outcome in outcomes {
            outcome.unwrap_or(Err(ErrorCode::Internal)).map_err(StoreError::refused)?;
        }
        if digested {
            let known: Vec<u64> = PageDigests::new(&digests).iter().collect();
            let right = context.root_of(known.iter().copied()) == handle.stripe_root
                && known[first as usize..behind as usize] == found[..];
            if !right {
                self.metrics.corrupt.inc();
                return Err(StoreError::Corrupt { nodes: vec![node.info.node] });
            }
        }
        let skip = (range.offset() - start) as usize;
        into.copy_from_slice(&pages[skip..skip + into.len()]);
        Ok(())
    }
}

/// The part of a wish that an object of this length has.
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
    fn a_range_is_cut_to_the_object() {
        let span = |offset, wanted, len| within(offset, wanted, len).ok().map(|s| (s.offset(), s.len()));
        assert_eq!(span(0, 10, 100), Some((0, 10)));
        assert_eq!(span(95, 10, 100), Some((95, 5)));
        assert_eq!(span(100, 10, 100), Some((100, 0)));
        assert_eq!(span(101, 10, 100), None);
        assert_eq!(span(u64::MAX, 10, 100), None);
    }
}
