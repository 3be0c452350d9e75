//! Human-readable properties of a driver's devices. Allocates nothing and creates no context.

use std::ffi::{CStr, c_char, c_int};

use super::driver::Driver;
use super::error::DeviceError;
use super::ffi::{Attribute, DriverCalls, VendorApi};
use super::region::{allocation_on, granularity};

/// Properties of one device, as its driver reports them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Name of the model.
    pub name: String,
    /// Architecture, e.g. `sm_90` or `gfx942`.
    pub architecture: String,
    /// Size of its memory in bytes.
    pub memory_bytes: u64,
    /// Whether it has virtual memory management.
    pub has_vmm: bool,
    /// Whether its memory can be shared as a descriptor; if not, IPC handles are used.
    pub has_descriptors: bool,
    /// Regions' lengths are multiples of this number of bytes; `None` without virtual memory management.
    pub granularity: Option<u64>,
    /// Whether the link to the host carries atomics.
    pub has_host_atomics: bool,
    /// Whether it can access each device, by device number. True for itself.
    pub peers: Vec<bool>,
}

impl Driver {
    /// Returns all devices that are visible to this process.
    pub fn devices(self) -> Result<Vec<DeviceInfo>, DeviceError> {
        let mut count = 0;
        // SAFETY: a valid pointer.
        unsafe { self.check_process()?.device_count(&mut count) }?;
        (0..count).map(|ordinal| self.device(ordinal, count)).collect()
    }

    fn device(self, ordinal: c_int, count: c_int) -> Result<DeviceInfo, DeviceError> {
        let (mut device, mut memory, mut name) = (0, 0, [0; 256]);
        // SAFETY: valid pointers; the name's buffer has the given length.
        unsafe {
            self.device_get(&mut device, ordinal)?;
            self.device_name(name.as_mut_ptr(), name.len() as c_int, device)?;
            self.device_memory(&mut memory, device)?;
        }
        let has = |attribute| self.attribute(attribute, device).map(|value| value != 0);
        let has_vmm = has(Attribute::Vmm)?;
        let mut peers = Vec::new();
        for peer in 0..count {
            let (mut can, mut peer_device) = (1, 0);
            if peer != ordinal {
                // SAFETY: valid pointers.
                unsafe {
                    self.device_get(&mut peer_device, peer)?;
                    self.can_access_peer(&mut can, device, peer_device)?;
                }
            }
            peers.push(can != 0);
        }
        Ok(DeviceInfo {
            name: text(&name),
            architecture: self.architecture(device)?,
            memory_bytes: memory as u64,
            has_vmm,
            has_descriptors: has_vmm && has(Attribute::PosixFd)?,
            granularity: match has_vmm {
                true => Some(granularity(self, &allocation_on(ordinal as u32))?),
                false => None,
            },
            has_host_atomics: has(Attribute::HostAtomics)?,
            peers,
        })
    }

    fn architecture(self, device: c_int) -> Result<String, DeviceError> {
        match self.vendor_api() {
            VendorApi::Cuda { .. } => {
                let [major, minor] = [Attribute::ComputeMajor, Attribute::ComputeMinor]
                    .map(|attribute| self.attribute(attribute, device));
                Ok(format!("sm_{}{}", major?, minor?))
            }
            VendorApi::Hip { properties, .. } => {
                // Longer than the struct of any known release; new releases only append to it.
                let mut bytes = [0u64; 512];
                // SAFETY: long enough, and aligned for all its fields.
                self.check("hipGetDevicePropertiesR0600", unsafe {
                    properties(bytes.as_mut_ptr().cast(), device)
                })?;
                const NAME: usize = 1160 / 8; // see `VendorApi::Hip`
                let name: Vec<c_char> = bytes[NAME..NAME + 32]
                    .iter()
                    .flat_map(|word| word.to_ne_bytes())
                    .map(|byte| byte as c_char)
                    .collect();
                Ok(text(&name))
            }
        }
    }
}

/// Returns the text up to the zero, or all of it.
fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|&char| char as u8).collect();
    let bytes = CStr::from_bytes_until_nul(&bytes).map_or(&bytes[..], CStr::to_bytes);
    String::from_utf8_lossy(bytes).into_owned()
}
