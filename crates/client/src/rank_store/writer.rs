//! [`PushWriter`]: record at the producer, while it is written.

use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use moontide_rt::sync::Mutex;
use moontide_rt::time::Instant;
use moontide_symmetric::{PageOutcome, ReadyFlagSnapshot, RecordProgress};
use moontide_types::ErrorCode;

use super::memory::{DeviceRecord, RankMemory};
use super::ticket::Ticket;
use crate::error::StoreError;
use crate::in_place::InPlaceWrite;
use crate::put::PutOutcome;

/// Failure to commit a push.
#[derive(Debug, thiserror::Error)]
pub enum PushCommitError {
    /// Pages are missing. Contains the writer, to continue.
    #[error("pages are missing; write all pages before commit")]
    Incomplete(Box<PushWriter>),
    /// The flag on the device cannot be read. Contains the writer, to retry.
    #[error("{1}")]
    Unknown(Box<PushWriter>, StoreError),
    /// The store failed. The reservation is released.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Record that a producer writes. Dropping it releases the reservation, on a device after the kernels of this process
/// have ended: they may still be writing.
#[derive(Debug)]
#[must_use = "dropping a push releases its reservation"]
pub struct PushWriter {
    memory: RankMemory,
    /// `None` only after commit and during drop.
    plan: Option<InPlaceWrite>,
    ticket: Ticket,
    /// Pages that this process has written; each is written once.
    written: Box<[AtomicBool]>,
    /// Unwritten pages, for records on a device, whose flag the CPU cannot count.
    left: AtomicU32,
    /// Flag of a record on a device, once this process has reserved its pages for copies, which excludes kernels.
    reserved: Mutex<Option<ReadyFlagSnapshot>>,
}

impl PushWriter {
    pub(super) fn new(memory: RankMemory, plan: InPlaceWrite, ticket: Ticket) -> PushWriter {
        let written = (0..ticket.pages()).map(|_| AtomicBool::new(false)).collect();
        let (plan, left, reserved) = (Some(plan), AtomicU32::new(ticket.pages()), Mutex::default());
        PushWriter { memory, plan, ticket, written, left, reserved }
    }

    /// Returns the ticket for the consumer.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Returns the time at which the reservation expires.
    pub fn expires_at(&self) -> Instant {
        self.plan().expires_at()
    }

    /// Returns the address of the bytes in this process, for kernels. They write each page once, and flag it; then
    /// [`PushWriter::write_page`] is not called.
    pub fn address(&self) -> Option<u64> {
        match self.memory.on_device(&self.ticket) {
            Some(device_record) => Some(device_record.address()),
            None => self.plan().payload().map(|at| at.addr().get() as u64),
        }
    }

    /// Returns the address of the header word for kernels of this process; valid while `self` lives. `None` if the
    /// device cannot map it.
    pub fn word_address(&self) -> Result<Option<u64>, StoreError> {
        self.memory.word_address(self.plan().heap(), self.ticket.segment, self.ticket.slot)
    }

    /// Returns the progress of the record.
    pub fn progress(&self) -> Result<RecordProgress, StoreError> {
        self.memory.progress(&self.ticket)
    }

    /// Writes a page, and flags it. Any thread, any order, each page once. Fails if the page was written before or has
    /// another length. On a device, all pages are written this way, or all by kernels.
    pub fn write_page(&self, page: u32, bytes: &[u8]) -> Result<PageOutcome, StoreError> {
        let offset = self.begin_page(page, bytes.len() as u64)?;
        match self.memory.on_device(&self.ticket) {
            Some(device_record) => {
                self.copy_page(&device_record, page, &|| device_record.write(offset, bytes))
            }
            None => self.write_host(offset, bytes),
        }
    }

    /// As [`PushWriter::write_page`], from memory of the same device of this process.
    ///
    /// # Safety
    /// At `source` are `len` bytes that the device can read, and that nothing writes meanwhile.
    #[expect(unsafe_code, reason = "an address of a device")]
    pub unsafe fn write_page_from_device(
        &self,
        page: u32,
        source: u64,
        len: u64,
    ) -> Result<PageOutcome, StoreError> {
        let Some(device_record) = self.memory.on_device(&self.ticket) else {
            return Err(StoreError::InvalidArgument {
                what: "a copy from device memory",
                rule: NEEDS_DEVICE,
            });
        };
        let offset = self.begin_page(page, len)?;
        // SAFETY: the source is guaranteed by the caller. The target is a page of a record that only this process may
        // write, by its claim.
        self.copy_page(&device_record, page, &|| unsafe { device_record.write_from(offset, source, len) })
    }

    /// Waits for all work of this process on the device, such as kernels that compute the next pages.
    pub fn synchronize(&self) -> Result<(), StoreError> {
        self.memory.on_device(&self.ticket).map_or(Ok(()), |device_record| device_record.synchronize())
    }

    /// Reserves a page for this call. Returns its offset in the record.
    fn begin_page(&self, page: u32, len: u64) -> Result<u64, StoreError> {
        let wrong = |what, rule| Err(StoreError::InvalidArgument { what, rule });
        let Some(written) = self.written.get(page as usize) else {
            return wrong("page", "below the number of pages");
        };
        let is_last = page as usize + 1 == self.written.len();
        let expected = if is_last { self.ticket.last_page_bytes() } else { self.ticket.page_bytes };
        if len != expected {
            return wrong("the length of a page", "page_bytes, or the rest for the last page");
        }
        // Relaxed: it only decides which call writes; the flag orders the bytes.
        if written.swap(true, Ordering::Relaxed) {
            return wrong("page", "written once");
        }
        Ok(u64::from(page) * self.ticket.page_bytes)
    }

    /// Writes a page in host memory, and counts it.
    #[expect(unsafe_code, reason = "memory that other processes map")]
    fn write_host(&self, offset: u64, bytes: &[u8]) -> Result<PageOutcome, StoreError> {
        let Some(payload) = self.plan().payload() else {
            return Err(StoreError::refused(ErrorCode::Gone));
        };
        // SAFETY: inside of the record, as `begin_page` checks. By the claim, only this process may write the record,
        // and by its mark only this call may write the page. `bytes` does not overlap, since there are no references to
        // the record.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), payload.as_ptr().add(offset as usize), bytes.len());
        }
        let flag = self.memory.world().flag(self.ticket.rank, self.ticket.flag_offset);
        Ok(flag.page_done(self.ticket.epoch))
    }

    /// Copies a page into device memory and counts it; sets the flag with the last one. After an error the page may be
    /// written again.
    fn copy_page(
        &self,
        device_record: &DeviceRecord<'_>,
        page: u32,
        copy: &dyn Fn() -> Result<(), StoreError>,
    ) -> Result<PageOutcome, StoreError> {
        let again = |error| {
            self.written[page as usize].store(false, Ordering::Relaxed);
            error
        };
        let reserved = self.reserve_for_copy(device_record).map_err(again)?;
        copy().map_err(again)?;
        // AcqRel: the thread that counts last continues after the copies of all other threads.
        if self.left.fetch_sub(1, Ordering::AcqRel) != 1 {
            return Ok(PageOutcome::Pending);
        }
        let done = reserved.completed(self.ticket.epoch);
        for (at, bytes) in [done.left_bytes(), done.word_bytes()] {
            device_record.write_flag(at, &bytes).map_err(|error| {
                self.left.fetch_add(1, Ordering::AcqRel);
                again(error)
            })?;
        }
        Ok(PageOutcome::Complete)
    }

    /// Reserves the pages for copies by this process. Fails if a kernel has counted one.
    fn reserve_for_copy(&self, device_record: &DeviceRecord<'_>) -> Result<ReadyFlagSnapshot, StoreError> {
        let mut reserved = self.reserved.lock();
        if let Some(flag) = *reserved {
            return Ok(flag);
        }
        let flag = device_record.flag()?.reserved_for_copy(self.ticket.epoch, self.ticket.pages());
        let rule = "all written by kernels, or all by copies";
        let flag = flag.ok_or(StoreError::InvalidArgument { what: "pages in device memory", rule })?;
        for (at, bytes) in [flag.word_bytes(), flag.left_bytes()] {
            device_record.write_flag(at, &bytes)?;
        }
        *reserved = Some(flag);
        Ok(flag)
    }

    /// Publishes the record as an ordinary object. All pages must be flagged.
    pub fn commit(mut self) -> Result<PutOutcome, PushCommitError> {
        match self.progress() {
            Ok(RecordProgress::Complete) => {}
            Ok(_) => return Err(PushCommitError::Incomplete(Box::new(self))),
            Err(error) => return Err(PushCommitError::Unknown(Box::new(self), error)),
        }
        Ok(self.plan.take().expect(PLAN_TAKEN).commit()?)
    }

    fn plan(&self) -> &InPlaceWrite {
        self.plan.as_ref().expect(PLAN_TAKEN)
    }
}

const PLAN_TAKEN: &str = "taken only by commit and drop";

impl Drop for PushWriter {
    fn drop(&mut self) {
        let Some(plan) = self.plan.take() else { return };
        match self.memory.synchronize() {
            true => drop(plan),
            // A kernel may still write the memory: keep the reservation until the process exits.
            false => std::mem::forget(plan),
        }
    }
}

/// Rule for calls with device addresses.
pub(super) const NEEDS_DEVICE: &str = "used only if the records are in device memory";
