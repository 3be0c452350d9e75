//! What a driver says about its devices, for people: nothing is allocated, no context is made.

use std::ffi::{CStr, c_char, c_int};

use super::calls::{Attribute, OwnCalls};
use super::driver::Driver;
use super::error::DeviceError;
use super::region::{allocation_on, granularity};

/// One device, as its driver describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceFacts {
    /// Its name.
    pub name: String,
    /// `sm_90` or `gfx942`.
    pub architecture: String,
    /// All of its memory.
    pub memory_bytes: u64,
    /// Whether it has virtual memory management.
    pub has_vmm: bool,
    /// Whether its memory can be passed on as a descriptor; if not, handles are used.
    pub has_descriptors: bool,
    /// Of what regions' lengths are multiples; none without virtual memory management.
    pub granularity: Option<u64>,
    /// Whether the link to the host carries atomics.
    pub has_host_atomics: bool,
    /// Which devices it can access, by number; itself is one.
    pub peers: Vec<bool>,
}

impl Driver {
    /// All devices that are visible to this process.
    pub fn devices(self) -> Result<Vec<DeviceFacts>, DeviceError> {
        let mut count = 0;
        // SAFETY: a valid place.
        unsafe { self.here()?.device_count(&mut count) }?;
        (0..count).map(|ordinal| self.device(ordinal, count)).collect()
    }

    fn device(self, ordinal: c_int, count: c_int) -> Result<DeviceFacts, DeviceError> {
        let (mut device, mut memory, mut name) = (0, 0, [0; 256]);
        // SAFETY: valid places; the name's is as long as is said.
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
                // SAFETY: valid places.
                unsafe {
                    self.device_get(&mut peer_device, peer)?;
                    self.can_access_peer(&mut can, device, peer_device)?;
                }
            }
            peers.push(can != 0);
        }
        Ok(DeviceFacts {
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
        match self.own() {
            OwnCalls::Cuda { .. } => {
                let [major, minor] = [Attribute::ComputeMajor, Attribute::ComputeMinor]
                    .map(|attribute| self.attribute(attribute, device));
                Ok(format!("sm_{}{}", major?, minor?))
            }
            OwnCalls::Hip { properties, .. } => {
                // Longer than the struct of any release known, which only grows at its end.
                let mut bytes = [0u64; 512];
                // SAFETY: long enough, and aligned for everything in it.
                self.check("hipGetDevicePropertiesR0600", unsafe {
                    properties(bytes.as_mut_ptr().cast(), device)
                })?;
                const NAME: usize = 1160 / 8; // see `OwnCalls::Hip`
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

/// Up to the zero, or all of it.
fn text(chars: &[c_char]) -> String {
    let bytes: Vec<u8> = chars.iter().map(|&char| char as u8).collect();
    let bytes = CStr::from_bytes_until_nul(&bytes).map_or(&bytes[..], CStr::to_bytes);
    String::from_utf8_lossy(bytes).into_owned()
}
