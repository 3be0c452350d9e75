//! [`Push`]: a record on its way, at the producer.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Instant;

use moontide_heap::{Counted, FlagCopy, Progress};
use moontide_types::ErrorCode;
use parking_lot::Mutex;

use super::ground::{Ground, OnDevice};
use super::ticket::Ticket;
use crate::error::StoreError;
use crate::in_place::PlanInPlace;
use crate::put::Put;

/// Why a push has not become an object.
#[derive(Debug, thiserror::Error)]
pub enum NotCommitted {
    /// Pages are missing, and whoever writes them may go on: here it is again.
    #[error("pages are missing: commit when all of them are there")]
    Incomplete(Box<Push>),
    /// The device does not say whether all pages are there: here it is again.
    #[error("{1}")]
    Unknown(Box<Push>, StoreError),
    /// The store refused. The place is given back.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A record on its way, at the producer. Dropping it gives the place back, on a device when kernels of this process have
/// ended: they may still be writing.
#[derive(Debug)]
#[must_use = "a push that is dropped is given back"]
pub struct Push {
    ground: Ground,
    /// There until the push is dropped, or committed.
    plan: Option<PlanInPlace>,
    ticket: Ticket,
    /// Which pages this process has written: each once.
    written: Box<[AtomicBool]>,
    /// How many it has not, where the flag cannot be counted on by a processor.
    left: AtomicU32,
    /// The flag of a record on a device, once its pages are this process's to copy, and no kernel's.
    taken: Mutex<Option<FlagCopy>>,
}

impl Push {
    pub(super) fn new(ground: Ground, plan: PlanInPlace, ticket: Ticket) -> Push {
        let written = (0..ticket.pages()).map(|_| AtomicBool::new(false)).collect();
        let (plan, left, taken) = (Some(plan), AtomicU32::new(ticket.pages()), Mutex::default());
        Push { ground, plan, ticket, written, left, taken }
    }

    /// What the consumer needs.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// When the reservation ends.
    pub fn until(&self) -> Instant {
        self.plan().until()
    }

    /// Where the bytes go in this process, for a kernel. It writes each page once, and flags it; then none of
    /// [`Push::write_page`] is called.
    pub fn address(&self) -> Option<u64> {
        match self.ground.on_device(&self.ticket) {
            Some(there) => Some(there.address()),
            None => self.plan().payload().map(|at| at.addr().get() as u64),
        }
    }

    /// Where kernels of this process find the word of its header, as long as this lives. `None` if its device cannot see it.
    pub fn word_address(&self) -> Result<Option<u64>, StoreError> {
        self.ground.word_address(self.plan().heap(), self.ticket.segment, self.ticket.slot)
    }

    /// How far it is.
    pub fn progress(&self) -> Result<Progress, StoreError> {
        self.ground.progress(&self.ticket)
    }

    /// Writes a page, and flags it. Any thread, any order, each page once: a second time, or with another length than the
    /// page has, it is refused. On a device all pages are written so, or all by kernels.
    pub fn write_page(&self, page: u32, bytes: &[u8]) -> Result<Counted, StoreError> {
        let offset = self.begin_page(page, bytes.len() as u64)?;
        match self.ground.on_device(&self.ticket) {
            Some(there) => self.copy_page(&there, page, &|| there.write(offset, bytes)),
            None => self.write_here(offset, bytes),
        }
    }

    /// As [`Push::write_page`], from memory of the same device of this process.
    ///
    /// # Safety
    /// At `source` are `len` bytes that the device can read, and that nobody writes meanwhile.
    #[expect(unsafe_code, reason = "an address of a device")]
    pub unsafe fn write_page_from_device(
        &self,
        page: u32,
        source: u64,
        len: u64,
    ) -> Result<Counted, StoreError> {
        let Some(there) = self.ground.on_device(&self.ticket) else {
            return Err(StoreError::Argument { what: "a device's memory as source", rule: NEEDS_DEVICE });
        };
        let offset = self.begin_page(page, len)?;
        // SAFETY: the source, says the caller. The target is a page of a record that is this process's alone by its claim.
        self.copy_page(&there, page, &|| unsafe { there.write_from(offset, source, len) })
    }

    /// Waits for all that this process has under way on the device, such as kernels that make what is written next.
    pub fn settle(&self) -> Result<(), StoreError> {
        self.ground.on_device(&self.ticket).map_or(Ok(()), |there| there.settle())
    }

    /// Makes a page this call's, and says where it is in the record.
    fn begin_page(&self, page: u32, len: u64) -> Result<u64, StoreError> {
        let wrong = |what, rule| Err(StoreError::Argument { what, rule });
        let Some(written) = self.written.get(page as usize) else {
            return wrong("page", "below the number of pages");
        };
        let is_last = page as usize + 1 == self.written.len();
        let expected = if is_last { self.ticket.last_page_bytes() } else { self.ticket.page_bytes };
        if len != expected {
            return wrong("the length of a page", "page_bytes, or what is left for the last one");
        }
        // Relaxed: it only decides who writes; what was written is ordered by the flag.
        if written.swap(true, Ordering::Relaxed) {
            return wrong("page", "written once");
        }
        Ok(u64::from(page) * self.ticket.page_bytes)
    }

    /// Writes a page of the host's memory, and counts it.
    #[expect(unsafe_code, reason = "memory that other processes map")]
    fn write_here(&self, offset: u64, bytes: &[u8]) -> Result<Counted, StoreError> {
        let Some(payload) = self.plan().payload() else {
            return Err(StoreError::refused(ErrorCode::Gone));
        };
        // SAFETY: inside of the record, as `begin_page` checks. The claim makes the record this process's alone, and the page
        // is this call's alone by its mark; `bytes` is not part of it, since nobody has a reference to it.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                payload.as_ptr().add(offset as usize),
                bytes.len(),
            );
        }
        let flag = self.ground.world().flag(self.ticket.rank, self.ticket.flag_offset);
        Ok(flag.page_done(self.ticket.epoch))
    }

    /// Copies a page into a device's memory and counts it; with the last one raises the flag. After an error the page may be
    /// tried again.
    fn copy_page(
        &self,
        there: &OnDevice<'_>,
        page: u32,
        copy: &dyn Fn() -> Result<(), StoreError>,
    ) -> Result<Counted, StoreError> {
        let again = |error| {
            self.written[page as usize].store(false, Ordering::Relaxed);
            error
        };
        let taken = self.take_from_kernels(there).map_err(again)?;
        copy().map_err(again)?;
        // AcqRel: who counts last goes on after all other threads' copies have ended.
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return Ok(Counted::More);
        }
        let done = taken.completed(self.ticket.epoch);
        for (at, bytes) in [done.left_bytes(), done.word_bytes()] {
            there.write_flag(at, &bytes).map_err(|error| {
                self.left.fetch_add(1, Ordering::AcqRel);
                again(error)
            })?;
        }
        Ok(Counted::Complete)
    }

    /// Makes the pages this process's to copy. Refused if a kernel has counted one.
    fn take_from_kernels(&self, there: &OnDevice<'_>) -> Result<FlagCopy, StoreError> {
        let mut taken = self.taken.lock();
        if let Some(flag) = *taken {
            return Ok(flag);
        }
        let flag = there.flag()?.taken(self.ticket.epoch, self.ticket.pages());
        let rule = "all written by kernels, or all by copies";
        let flag = flag.ok_or(StoreError::Argument { what: "pages in a device's memory", rule })?;
        for (at, bytes) in [flag.word_bytes(), flag.left_bytes()] {
            there.write_flag(at, &bytes)?;
        }
        *taken = Some(flag);
        Ok(flag)
    }

    /// Makes it an object like any other. All pages must be flagged.
    pub fn commit(mut self) -> Result<Put, NotCommitted> {
        match self.progress() {
            Ok(Progress::Complete) => {}
            Ok(_) => return Err(NotCommitted::Incomplete(Box::new(self))),
            Err(error) => return Err(NotCommitted::Unknown(Box::new(self), error)),
        }
        Ok(self.plan.take().expect(UNTIL_THE_END).commit()?)
    }

    fn plan(&self) -> &PlanInPlace {
        self.plan.as_ref().expect(UNTIL_THE_END)
    }
}

const UNTIL_THE_END: &str = "there until the push is committed or dropped";

impl Drop for Push {
    fn drop(&mut self) {
        let Some(plan) = self.plan.take() else { return };
        match self.ground.settle() {
            true => drop(plan),
            // A kernel that may still be writing keeps the place: it is given back when this process ends.
            false => std::mem::forget(plan),
        }
    }
}

/// What a caller needs who brings memory of a device.
pub(super) const NEEDS_DEVICE: &str = "used where the records are in a device's memory, too";
