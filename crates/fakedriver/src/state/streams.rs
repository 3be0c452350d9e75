//! Streams and their work. Nothing is done when it is enqueued: copies happen when the caller waits, so that a caller
//! that forgets to wait reads old bytes.
//!
//! A real driver may do the work at any time in between. Arguments are checked when the work is enqueued; when it is
//! done, the memory is checked once more, and a violation is recorded if it is gone.

use std::ffi::c_int;

use super::{Access, Done, DriverState, require};
use crate::codes::{ILLEGAL_ADDRESS, INVALID_HANDLE, INVALID_VALUE};

/// Operation of a stream. `host` is an address of the host, the others are device addresses.
#[derive(Clone, Copy, Debug)]
pub(crate) enum StreamOp {
    Fill { target: u64, value: u8, bytes: u64 },
    HostToDevice { target: u64, host: u64, bytes: u64 },
    DeviceToHost { host: u64, source: u64, bytes: u64 },
    DeviceToDevice { target: u64, source: u64, bytes: u64 },
}

#[derive(Debug)]
pub(super) struct Stream {
    pub(super) device: c_int,
    ops: Vec<StreamOp>,
}

impl StreamOp {
    /// Returns the same operation with device addresses replaced by those that `resolve` returns for them.
    fn resolve(self, resolve: &dyn Fn(u64, u64, Access) -> Result<u64, c_int>) -> Result<StreamOp, c_int> {
        Ok(match self {
            StreamOp::Fill { target, value, bytes } => {
                StreamOp::Fill { target: resolve(target, bytes, Access::Write)?, value, bytes }
            }
            StreamOp::HostToDevice { target, host, bytes } => {
                StreamOp::HostToDevice { target: resolve(target, bytes, Access::Write)?, host, bytes }
            }
            StreamOp::DeviceToHost { host, source, bytes } => {
                StreamOp::DeviceToHost { host, source: resolve(source, bytes, Access::Read)?, bytes }
            }
            StreamOp::DeviceToDevice { target, source, bytes } => StreamOp::DeviceToDevice {
                target: resolve(target, bytes, Access::Write)?,
                source: resolve(source, bytes, Access::Read)?,
                bytes,
            },
        })
    }

    /// # Safety
    /// All its addresses belong to mappings that permit the access.
    unsafe fn perform(self) {
        let at = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        // SAFETY: guaranteed by the caller.
        unsafe {
            match self {
                StreamOp::Fill { target, value, bytes } => at(target).write_bytes(value, bytes as usize),
                StreamOp::HostToDevice { target, host: source, bytes }
                | StreamOp::DeviceToHost { host: target, source, bytes }
                | StreamOp::DeviceToDevice { target, source, bytes } => {
                    at(target).copy_from(at(source), bytes as usize)
                }
            }
        }
    }
}

impl DriverState {
    pub(crate) fn create_stream(&mut self, flags: u32) -> Result<u64, c_int> {
        let device = self.current()?;
        // Stricter than a real driver: regions must not use a stream that waits for the legacy stream.
        require(flags == 1, INVALID_VALUE)?;
        self.handles_made += 1;
        let stream = 0x00cd_0000 + self.handles_made;
        self.streams.insert(stream, Stream { device, ops: vec![] });
        Ok(stream)
    }

    /// Returns a stream. Fails for the legacy stream, whose number is 0.
    fn stream(&mut self, stream: u64) -> Result<&mut Stream, c_int> {
        let device = self.current()?;
        require(!self.is_broken, ILLEGAL_ADDRESS)?;
        self.streams.get_mut(&stream).filter(|stream| stream.device == device).ok_or(INVALID_HANDLE)
    }

    /// Acts as if a kernel had used an invalid address: no device does any work from now on.
    pub(crate) fn break_devices(&mut self) {
        self.is_broken = true;
    }

    pub(crate) fn enqueue(&mut self, stream: u64, op: StreamOp) -> Done {
        self.stream(stream)?;
        op.resolve(&|address, bytes, access| self.resolve(address, bytes, access))?;
        match op {
            StreamOp::HostToDevice { host, bytes, .. } | StreamOp::DeviceToHost { host, bytes, .. } => {
                require(host != 0 || bytes == 0, INVALID_VALUE)?;
                require(!self.is_device_memory(host, bytes), INVALID_VALUE)?;
            }
            StreamOp::DeviceToDevice { target, source, bytes } => {
                require(target.abs_diff(source) >= bytes, INVALID_VALUE)?;
            }
            StreamOp::Fill { .. } => {}
        }
        self.stream(stream)?.ops.push(op);
        Ok(())
    }

    pub(crate) fn synchronize_stream(&mut self, stream: u64) -> Done {
        let ops = std::mem::take(&mut self.stream(stream)?.ops);
        for op in ops {
            let Ok(op) = op.resolve(&|address, bytes, access| self.resolve(address, bytes, access)) else {
                self.violations.push("memory was freed while a copy was in flight".to_owned());
                continue;
            };
            // SAFETY: the device addresses were resolved just now, to views or registrations that are mapped for such
            // an
            // access and remain so while the state is borrowed; the host's bytes belong to the caller until it has
            // waited.
            unsafe { op.perform() };
        }
        Ok(())
    }

    /// Waits for all work of the current device.
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
