//! [`DeviceExport`]: a device region sent to another process, as one message over a Unix socket.
//!
//! ```text
//!   0      4         8                    12                     16         24                        88
//!   ├ magic ┤ vendor u32 ┤ kind u32: 1 fd, 2 handle ┤ domain u32 ├ len u64 ┤ handle, or zeros ────────┤
//! ```
//!
//! A descriptor is sent as SCM_RIGHTS. The socket must preserve message boundaries (SEQPACKET or datagrams), so that
//! message and descriptor arrive together or not at all.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use super::atomic_domain::AtomicDomain;
use super::error::DeviceError;
use super::vendor::Vendor;

const MAGIC: [u8; 4] = *b"MTG1";
const BYTES: usize = 88;

/// Data with which another process imports a region.
#[derive(Debug)]
pub struct DeviceExport {
    /// Vendor of the device.
    pub vendor: Vendor,
    /// Length of the region in bytes.
    pub len: u64,
    /// Domain of atomic operations on the region, according to its owner's device.
    pub domain: AtomicDomain,
    /// Handle of the memory.
    pub share: ShareableHandle,
}

/// Handle with which memory can be imported.
#[derive(Debug)]
pub enum ShareableHandle {
    /// Descriptor. It is closed with this value; an import does not need it afterwards.
    Descriptor(OwnedFd),
    /// IPC handle of the driver.
    Handle([u8; 64]),
}

impl DeviceExport {
    /// Sends the export and closes the descriptor.
    pub fn send(self, socket: impl AsFd) -> Result<(), DeviceError> {
        let mut bytes = [0; BYTES];
        let (kind, handle) = match &self.share {
            ShareableHandle::Descriptor(_) => (1, [0; 64]),
            ShareableHandle::Handle(handle) => (2, *handle),
        };
        let domain = match self.domain {
            AtomicDomain::Host => 0,
            AtomicDomain::Device => 1,
            AtomicDomain::Both => 2,
        };
        bytes[..4].copy_from_slice(&MAGIC);
        let values = [self.vendor.pick(1u32, 2), kind, domain];
        for (target, value) in bytes[4..16].chunks_exact_mut(4).zip(values) {
            target.copy_from_slice(&value.to_le_bytes());
        }
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes[24..].copy_from_slice(&handle);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors;
        if let ShareableHandle::Descriptor(fd) = &self.share {
            descriptors = [fd.as_fd()];
            let fits = control.push(SendAncillaryMessage::ScmRights(&descriptors));
            assert!(fits, "the control buffer holds one descriptor");
        }
        retry_on_intr(|| {
            rustix::net::sendmsg(&socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
        })
        .map_err(|source| DeviceError::System { what: "send a device export", source })?;
        Ok(())
    }

    /// Receives an export.
    pub fn receive(socket: impl AsFd) -> Result<DeviceExport, DeviceError> {
        // One byte more than expected, to detect a longer message.
        let mut bytes = [0; BYTES + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retry_on_intr(|| {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            rustix::net::recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
        })
        .map_err(|source| DeviceError::System { what: "receive a device export", source })?;
        let mut fd = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                fd = descriptors.last().or(fd);
            }
        }
        let bytes = &bytes[..received.bytes];
        if bytes.len() != BYTES || bytes[..4] != MAGIC {
            return Err(DeviceError::Export);
        }
        let field = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let vendor = match field(4) {
            1 => Vendor::Cuda,
            2 => Vendor::Hip,
            _ => return Err(DeviceError::Export),
        };
        let domain = match field(12) {
            1 => AtomicDomain::Device,
            2 => AtomicDomain::Both,
            _ => return Err(DeviceError::Export),
        };
        let len = u64::from_le_bytes(bytes[16..24].try_into().expect("eight bytes"));
        let share = match (field(8), fd) {
            (1, Some(fd)) => ShareableHandle::Descriptor(fd),
            (2, None) => ShareableHandle::Handle(bytes[24..].try_into().expect("64 bytes")),
            _ => return Err(DeviceError::Export),
        };
        Ok(DeviceExport { vendor, len, domain, share })
    }
}
