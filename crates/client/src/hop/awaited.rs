//! [`Awaited`]: a record at the consumer, before and after it has arrived.

use std::time::{Duration, Instant};

use moontide_heap::{Progress, SharedStay};
use moontide_types::Span;
use moontide_types::record::State;

use super::ground::Ground;
use super::push::NEEDS_DEVICE;
use super::ticket::Ticket;
use crate::error::StoreError;

/// A record that a consumer waits for. Its memory is not used again while this lives; on a device, not before kernels of this
/// process have ended that run when it is dropped.
#[derive(Debug)]
pub struct Awaited {
    ground: Ground,
    /// There until this is dropped.
    stay: Option<SharedStay>,
    span: Span,
    ticket: Ticket,
}

/// What became of a wait.
#[derive(Debug)]
pub enum Wait {
    /// All pages are there.
    Arrived(Arrived),
    /// Not yet; wait longer, or give up.
    Late(Awaited),
    /// The producer has died or given up.
    Gone,
}

impl Awaited {
    pub(super) fn new(ground: Ground, stay: SharedStay, span: Span, ticket: Ticket) -> Awaited {
        Awaited { ground, stay: Some(stay), span, ticket }
    }

    fn stay(&self) -> &SharedStay {
        self.stay.as_ref().expect("there until this is dropped")
    }

    /// What is waited for.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Where the bytes are in this process, for a kernel that waits for the flag itself.
    pub fn address(&self) -> Option<u64> {
        match self.ground.on_device(&self.ticket) {
            Some(there) => Some(there.address()),
            None => self.stay().payload(self.span).map(|at| at.addr().get() as u64),
        }
    }

    /// Where kernels of this process find the word of its header, as long as this lives. `None` if its device cannot see it.
    pub fn word_address(&self) -> Result<Option<u64>, StoreError> {
        self.ground.word_address(self.stay().heap(), self.ticket.segment, self.ticket.slot)
    }

    /// How far it is, without waiting.
    pub fn progress(&self) -> Result<Progress, StoreError> {
        let flagged = || self.ground.progress(&self.ticket);
        Ok(match (flagged()?, self.stay().state()) {
            (Progress::Complete, _) => Progress::Complete,
            // Put by other means, without a flag.
            (_, Some(State::Ready)) => Progress::Complete,
            (found, Some(State::Writing)) => found,
            // It was complete and is being committed just now, or there is nobody any more who could complete it.
            _ if flagged()? == Progress::Complete => Progress::Complete,
            _ => Progress::Gone,
        })
    }

    /// Copies the bytes, if all of them are there. `false`: they are not, and nothing was copied.
    ///
    /// # Panics
    /// If the room has another length, or in a forked child.
    #[expect(unsafe_code, reason = "memory that other processes map")]
    pub fn copy_into(&self, room: &mut [u8]) -> Result<bool, StoreError> {
        assert_eq!(room.len() as u64, self.span.len());
        if self.progress()? != Progress::Complete {
            return Ok(false);
        }
        if let Some(there) = self.ground.on_device(&self.ticket) {
            there.read(room)?;
            return Ok(true);
        }
        let at = self.stay().payload(self.span).expect("it does not survive a fork: get the object again");
        // SAFETY: in bounds, as `payload` checks. Its pages are complete, says the flag, which nobody raises before, and
        // nobody writes them again before the stay ends. `room` is elsewhere: nobody has a reference to a record.
        unsafe { std::ptr::copy_nonoverlapping(at.as_ptr(), room.as_mut_ptr(), room.len()) };
        Ok(true)
    }

    /// As [`Awaited::copy_into`], into memory of the same device of this process.
    ///
    /// # Safety
    /// At `target` is room for the record's bytes that this process's devices can write, and that nobody else uses
    /// meanwhile.
    #[expect(unsafe_code, reason = "an address of a device")]
    pub unsafe fn copy_to_device(&self, target: u64) -> Result<bool, StoreError> {
        let Some(there) = self.ground.on_device(&self.ticket) else {
            return Err(StoreError::Argument { what: "a device's memory as target", rule: NEEDS_DEVICE });
        };
        if self.progress()? != Progress::Complete {
            return Ok(false);
        }
        // Kernels that still use what was at the target come first.
        there.settle()?;
        // SAFETY: the target, says the caller; the source as in `copy_into`.
        unsafe { there.read_to(target) }?;
        Ok(true)
    }

    /// Looks at the flag until all pages are there.
    pub fn wait(self, timeout: Duration) -> Result<Wait, StoreError> {
        let until = Instant::now() + timeout;
        let mut looks = 0u32;
        loop {
            match self.progress()? {
                Progress::Complete => return Ok(Wait::Arrived(Arrived { awaited: self })),
                Progress::Gone => return Ok(Wait::Gone),
                Progress::NotYet if Instant::now() >= until => return Ok(Wait::Late(self)),
                Progress::NotYet => {}
            }
            looks += 1;
            match looks {
                0..200 => std::hint::spin_loop(),
                200..400 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(20)),
            }
        }
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        let stay = self.stay.take();
        if !self.ground.settle() {
            // A kernel that may still be reading keeps the memory: until this process ends.
            std::mem::forget(stay);
        }
    }
}

/// A record that has arrived, in place.
#[derive(Debug)]
pub struct Arrived {
    awaited: Awaited,
}

impl Arrived {
    /// Its bytes; `None` if they are in a device's memory: [`Awaited::copy_into`], or a kernel.
    ///
    /// # Panics
    /// In a forked child: the memory is not there.
    #[expect(unsafe_code, reason = "memory that other processes map")]
    pub fn bytes(&self) -> Option<&[u8]> {
        let Awaited { ground, span, ticket, .. } = &self.awaited;
        if ground.on_device(ticket).is_some() {
            return None;
        }
        let at = self.awaited.stay().payload(*span).expect("it does not survive a fork: get the object again");
        // SAFETY: in bounds, as `payload` checks. Its pages are complete, says the flag, which nobody raises before, and
        // nobody writes them again before the stay ends.
        Some(unsafe { std::slice::from_raw_parts(at.as_ptr(), span.len() as usize) })
    }

    /// The record, for copies and addresses.
    pub fn record(&self) -> &Awaited {
        &self.awaited
    }

    /// What it was waited for by.
    pub fn ticket(&self) -> Ticket {
        self.awaited.ticket
    }
}
