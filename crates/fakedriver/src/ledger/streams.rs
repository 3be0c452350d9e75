//! Streams, and the work in them. Nothing is done when it is asked for: copies happen when somebody waits, so that a caller
//! who forgets to wait finds old bytes.
//!
//! A real driver may do the work at any time between both. Arguments are checked when the work comes in; that the memory is
//! still there is checked once more when it is done, and complained about.

use std::ffi::c_int;

use super::{Done, Ledger, Use, require};
use crate::codes::{ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE};

/// What a stream was asked to do. `host` is an address of the host, the others are the devices'.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Job {
    Fill { target: u64, value: u8, bytes: u64 },
    In { target: u64, host: u64, bytes: u64 },
    Out { host: u64, source: u64, bytes: u64 },
    Across { target: u64, source: u64, bytes: u64 },
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) device: c_int,
    jobs: Vec<Job>,
}

impl Job {
    /// The same, with what it touches of devices' memory at other addresses: those that `reach` has for them.
    fn through(self, reach: &dyn Fn(u64, u64, Use) -> Result<u64, c_int>) -> Result<Job, c_int> {
        Ok(match self {
            Job::Fill { target, value, bytes } => {
                Job::Fill { target: reach(target, bytes, Use::Write)?, value, bytes }
            }
            Job::In { target, host, bytes } => {
                Job::In { target: reach(target, bytes, Use::Write)?, host, bytes }
            }
            Job::Out { host, source, bytes } => {
                Job::Out { host, source: reach(source, bytes, Use::Read)?, bytes }
            }
            Job::Across { target, source, bytes } => Job::Across {
                target: reach(target, bytes, Use::Write)?,
                source: reach(source, bytes, Use::Read)?,
                bytes,
            },
        })
    }

    /// # Safety
    /// All its addresses are those of mappings that may be used so.
    unsafe fn perform(self) {
        let at = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: says the caller.
        unsafe {
            match self {
                Job::Fill { target, value, bytes } => at(target).write_bytes(value, bytes as usize),
                Job::In { target, host: source, bytes }
                | Job::Out { host: target, source, bytes }
                | Job::Across { target, source, bytes } => at(target).copy_from(at(source), bytes as usize),
            }
        }
    }
}

impl Ledger {
    pub(crate) fn create_stream(&mut self, flags: u32) -> Result<u64, c_int> {
        let device = self.current()?;
        // Stricter than a real one: a stream that waits for the legacy stream is what nobody here wants.
        require(flags == 1, INVALID_VALUE)?;
        self.handles_made += 1;
        let stream = 0x00cd_0000 + self.handles_made;
        self.streams.insert(stream, Stream { device, jobs: vec![] });
        Ok(stream)
    }

    /// The legacy stream, whose number is 0, is none of ours.
    fn stream(&mut self, stream: u64) -> Result<&mut Stream, c_int> {
        let device = self.current()?;
        require(!self.is_broken, ILLEGAL_ADDRESS)?;
        self.streams.get_mut(&stream).filter(|stream| stream.device == device).ok_or(INVALID_HANDLE)
    }

    /// As if a kernel had used an address that it does not have: no device does anything any more.
    pub(crate) fn break_devices(&mut self) {
        self.is_broken = true;
    }

    pub(crate) fn enqueue(&mut self, stream: u64, job: Job) -> Done {
        self.stream(stream)?;
        job.through(&|address, bytes, how| self.reach(address, bytes, how))?;
        match job {
            Job::In { host, bytes, .. } | Job::Out { host, bytes, .. } => {
                require(host != 0 || bytes == 0, INVALID_VALUE)?;
                require(!self.is_devices(host, bytes), INVALID_VALUE)?;
            }
            Job::Across { target, source, bytes } => {
                require(target.abs_diff(source) >= bytes, INVALID_VALUE)?;
            }
            Job::Fill { .. } => {}
        }
        self.stream(stream)?.jobs.push(job);
        Ok(())
    }

    pub(crate) fn synchronize_stream(&mut self, stream: u64) -> Done {
        let jobs = std::mem::take(&mut self.stream(stream)?.jobs);
        for job in jobs {
            let Ok(job) = job.through(&|address, bytes, how| self.reach(address, bytes, how)) else {
                self.complaints.push("memory ended while a copy was under way".to_owned());
                continue;
            };
            // SAFETY: the device's side was found just now, in views or windows that are mapped for such a use and stay so
            // while the ledger is borrowed; the host's is the caller's until the work is waited for.
            unsafe { job.perform() };
        }
        Ok(())
    }

    /// All that the current device has to do.
    pub(crate) fn synchronize(&mut self) -> Done {
        let device = self.current()?;
        require(!self.is_broken, ILLEGAL_ADDRESS)?;
        let of_device = self.streams.iter().filter(|(_, stream)| stream.device == device);
        let streams: Vec<u64> = of_device.map(|(&stream, _)| stream).collect();
        streams.into_iter().try_for_each(|stream| self.synchronize_stream(stream))
    }

    pub(crate) fn destroy_stream(&mut self, stream: u64) -> Done {
        self.synchronize_stream(stream)?;
        self.streams.remove(&stream);
        Ok(())
    }
}
