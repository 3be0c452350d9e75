//! [`PendingRecord`]: record at the consumer, before and after it is complete.

use std::time::Duration;

use moontide_heap::SharedSlotHold;
use moontide_rt::time::Instant;
use moontide_symmetric::RecordProgress;
use moontide_types::Span;
use moontide_types::record::State;

use super::memory::RankMemory;
use super::ticket::Ticket;
use super::writer::NEEDS_DEVICE;
use crate::error::StoreError;

/// Record that a consumer waits for. Its memory is not reused while this lives; on a device, not before the kernels of
/// this process have ended that run when it is dropped.
#[derive(Debug)]
pub struct PendingRecord {
    memory: RankMemory,
    /// `None` only during drop.
    hold: Option<SharedSlotHold>,
    span: Span,
    ticket: Ticket,
}

/// Outcome of a wait.
#[derive(Debug)]
pub enum WaitOutcome {
    /// All pages are written.
    Ready(ReadyRecord),
    /// The timeout has passed; wait again, or drop the record.
    TimedOut(PendingRecord),
    /// The producer has exited or aborted.
    Gone,
}

impl PendingRecord {
    pub(super) fn new(memory: RankMemory, hold: SharedSlotHold, span: Span, ticket: Ticket) -> PendingRecord {
        PendingRecord { memory, hold: Some(hold), span, ticket }
    }

    fn hold(&self) -> &SharedSlotHold {
        self.hold.as_ref().expect("taken only by drop")
    }

    /// Returns the ticket of the record.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Returns the address of the bytes in this process, for kernels that poll the flag themselves.
    pub fn address(&self) -> Option<u64> {
        match self.memory.on_device(&self.ticket) {
            Some(device_record) => Some(device_record.address()),
            None => self.hold().payload(self.span).map(|at| at.addr().get() as u64),
        }
    }

    /// Returns the address of the header word for kernels of this process; valid while `self` lives. `None` if the
    /// device cannot map it.
    pub fn word_address(&self) -> Result<Option<u64>, StoreError> {
        self.memory.word_address(self.hold().heap(), self.ticket.segment, self.ticket.slot)
    }

    /// Returns the progress of the record, without waiting.
    pub fn progress(&self) -> Result<RecordProgress, StoreError> {
        let by_flag = || self.memory.progress(&self.ticket);
        Ok(match (by_flag()?, self.hold().state()) {
            (RecordProgress::Complete, _) => RecordProgress::Complete,
            // An ordinary put has no flag.
            (_, Some(State::Ready)) => RecordProgress::Complete,
            (found, Some(State::Writing)) => found,
            // Either the record was completed just now and is being committed, or its producer is gone.
            _ if by_flag()? == RecordProgress::Complete => RecordProgress::Complete,
            _ => RecordProgress::Gone,
        })
    }

    /// Copies the bytes if the record is complete. `false`: it is not, and nothing was copied.
    ///
    /// # Panics
    /// If the buffer has another length, or in a forked child.
    #[expect(unsafe_code, reason = "memory that other processes map")]
    pub fn copy_into(&self, buffer: &mut [u8]) -> Result<bool, StoreError> {
        assert_eq!(buffer.len() as u64, self.span.len());
        if self.progress()? != RecordProgress::Complete {
            return Ok(false);
        }
        if let Some(device_record) = self.memory.on_device(&self.ticket) {
            device_record.read(buffer)?;
            return Ok(true);
        }
        let at = self
            .hold()
            .payload(self.span)
            .expect("a record is not usable after a fork; get the object again");
        // SAFETY: in bounds, as `payload` checks. Its pages are complete according to the flag, which is not set
        // before, and no process writes them again before the hold ends. `buffer` does not overlap: there are no
        // references to a record.
        unsafe { std::ptr::copy_nonoverlapping(at.as_ptr(), buffer.as_mut_ptr(), buffer.len()) };
        Ok(true)
    }

    /// As [`PendingRecord::copy_into`], into memory of the same device of this process.
    ///
    /// # Safety
    /// At `target` is space for the record's bytes that this process's devices can write, and that nothing else uses
    /// meanwhile.
    #[expect(unsafe_code, reason = "an address of a device")]
    pub unsafe fn copy_to_device(&self, target: u64) -> Result<bool, StoreError> {
        let Some(device_record) = self.memory.on_device(&self.ticket) else {
            return Err(StoreError::InvalidArgument { what: "a copy to device memory", rule: NEEDS_DEVICE });
        };
        if self.progress()? != RecordProgress::Complete {
            return Ok(false);
        }
        // Wait for kernels that still use the old content of the target.
        device_record.synchronize()?;
        // SAFETY: the target is guaranteed by the caller; the source as in `copy_into`.
        unsafe { device_record.read_to(target) }?;
        Ok(true)
    }

    /// Polls the flag until all pages are written.
    pub fn wait(self, timeout: Duration) -> Result<WaitOutcome, StoreError> {
        let until = Instant::now() + timeout;
        let mut polls = 0u32;
        loop {
            match self.progress()? {
                RecordProgress::Complete => return Ok(WaitOutcome::Ready(ReadyRecord { record: self })),
                RecordProgress::Gone => return Ok(WaitOutcome::Gone),
                RecordProgress::Pending if Instant::now() >= until => return Ok(WaitOutcome::TimedOut(self)),
                RecordProgress::Pending => {}
            }
            polls += 1;
            match polls {
                0..200 => std::hint::spin_loop(),
                200..400 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(20)),
            }
        }
    }
}

impl Drop for PendingRecord {
    fn drop(&mut self) {
        let hold = self.hold.take();
        if !self.memory.synchronize() {
            // A kernel may still read the memory: hold it until the process exits.
            std::mem::forget(hold);
        }
    }
}

/// Complete record.
#[derive(Debug)]
pub struct ReadyRecord {
    record: PendingRecord,
}

impl ReadyRecord {
    /// Returns the bytes, zero-copy. `None` if they are in device memory: use [`PendingRecord::copy_into`], or a
    /// kernel.
    ///
    /// # Panics
    /// In a forked child: the memory is not mapped there.
    #[expect(unsafe_code, reason = "memory that other processes map")]
    pub fn bytes(&self) -> Option<&[u8]> {
        let PendingRecord { memory, span, ticket, .. } = &self.record;
        if memory.on_device(ticket).is_some() {
            return None;
        }
        let at = self
            .record
            .hold()
            .payload(*span)
            .expect("a record is not usable after a fork; get the object again");
        // SAFETY: in bounds, as `payload` checks. Its pages are complete according to the flag, which is not set
        // before, and no process writes them again before the hold ends.
        Some(unsafe { std::slice::from_raw_parts(at.as_ptr(), span.len() as usize) })
    }

    /// Returns the record, for copies and addresses.
    pub fn record(&self) -> &PendingRecord {
        &self.record
    }

    /// Returns the ticket of the record.
    pub fn ticket(&self) -> Ticket {
        self.record.ticket
    }
}
