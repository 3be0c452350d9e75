//! [`DeviceOffer`]: a region on its way to another process, as one message over a Unix socket.
//!
//! ```text
//!   0      4         8                    12                     16         24                        88
//!   ├ magic ┤ vendor u32 ┤ kind u32: 1 fd, 2 handle ┤ domain u32 ├ len u64 ┤ handle, or zeros ────────┤
//! ```
//!
//! A descriptor comes along as SCM_RIGHTS. The socket must keep messages apart (SEQPACKET or datagrams), so that message and
//! descriptor arrive together or not at all.

use std::io::{IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};

use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};

use super::AtomicDomain;
use super::driver::Vendor;
use super::error::DeviceError;

const MAGIC: [u8; 4] = *b"MTG1";
const BYTES: usize = 88;

/// What an importer needs.
#[derive(Debug)]
pub struct DeviceOffer {
    /// Whose device.
    pub vendor: Vendor,
    /// The region's length.
    pub len: u64,
    /// Whose atomics work on it, by its owner's device.
    pub domain: AtomicDomain,
    /// The memory itself.
    pub share: Share,
}

/// Memory that can be imported.
#[derive(Debug)]
pub enum Share {
    /// By a descriptor, which is closed with the offer: an import takes what it needs.
    Descriptor(OwnedFd),
    /// By a handle of the driver's.
    Handle([u8; 64]),
}

impl DeviceOffer {
    /// Sends it, and keeps nothing.
    pub fn send(self, socket: impl AsFd) -> Result<(), DeviceError> {
        let mut bytes = [0; BYTES];
        let (kind, handle) = match &self.share {
            Share::Descriptor(_) => (1, [0; 64]),
            Share::Handle(handle) => (2, *handle),
        };
        let domain = match self.domain {
            AtomicDomain::Host => 0,
            AtomicDomain::Device => 1,
            AtomicDomain::Both => 2,
        };
        bytes[..4].copy_from_slice(&MAGIC);
        for (place, value) in bytes[4..16].chunks_exact_mut(4).zip([self.vendor.pick(1u32, 2), kind, domain])
        {
            place.copy_from_slice(&value.to_le_bytes());
        }
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes[24..].copy_from_slice(&handle);
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        let descriptors;
        if let Share::Descriptor(fd) = &self.share {
            descriptors = [fd.as_fd()];
            assert!(control.push(SendAncillaryMessage::ScmRights(&descriptors)), "there is room for one");
        }
        retry_on_intr(|| {
            rustix::net::sendmsg(&socket, &[IoSlice::new(&bytes)], &mut control, SendFlags::NOSIGNAL)
        })
        .map_err(|source| DeviceError::System { what: "send an offer", source })?;
        Ok(())
    }

    /// Receives one.
    pub fn receive(socket: impl AsFd) -> Result<DeviceOffer, DeviceError> {
        // One byte more than due, so that a longer message is seen as one.
        let mut bytes = [0; BYTES + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let received = retry_on_intr(|| {
            let mut parts = [IoSliceMut::new(&mut bytes)];
            rustix::net::recvmsg(&socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC)
        })
        .map_err(|source| DeviceError::System { what: "receive an offer", source })?;
        let mut fd = None;
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(descriptors) = message {
                fd = descriptors.last().or(fd);
            }
        }
        let bytes = &bytes[..received.bytes];
        if bytes.len() != BYTES || bytes[..4] != MAGIC {
            return Err(DeviceError::Offer);
        }
        let field = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
        let vendor = match field(4) {
            1 => Vendor::Cuda,
            2 => Vendor::Hip,
            _ => return Err(DeviceError::Offer),
        };
        let domain = match field(12) {
            1 => AtomicDomain::Device,
            2 => AtomicDomain::Both,
            _ => return Err(DeviceError::Offer),
        };
        let len = u64::from_le_bytes(bytes[16..24].try_into().expect("eight bytes"));
        let share = match (field(8), fd) {
            (1, Some(fd)) => Share::Descriptor(fd),
            (2, None) => Share::Handle(bytes[24..].try_into().expect("64 bytes")),
            _ => return Err(DeviceError::Offer),
        };
        Ok(DeviceOffer { vendor, len, domain, share })
    }
}
