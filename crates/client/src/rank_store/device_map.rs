//! Host memory mapped for kernels: header words, which kernels poll, and ledger cells, in which they pin what they
//! read. An emulated kernel uses the addresses of its process; a device needs memory that is registered with its driver
//! ([`HostRegistration`]).
//!
//! Invariant: memory stays mapped and registered until the last [`RankMemory`](super::memory::RankMemory) is dropped,
//! because a kernel may have its address.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ptr::NonNull;
use std::sync::Arc;

use moontide_heap::LocalHeap;
use moontide_rt::sync::Mutex;
use moontide_symmetric::{DeviceWorld, HostAccess, HostRegistration};

use crate::error::StoreError;

/// Memory mapped for kernels of this process, by its address in this process.
#[derive(Debug, Default)]
pub(super) struct DeviceMappings {
    mappings: Mutex<HashMap<usize, DeviceMapping>>,
}

/// Dropped in this order: the memory is unregistered before it is unmapped.
#[derive(Debug)]
struct DeviceMapping {
    /// `None`: kernels use the addresses of this process.
    registration: Option<HostRegistration>,
    _heap: Arc<LocalHeap>,
}

impl DeviceMappings {
    /// Maps memory of a heap for kernels of this process. Returns its address for them.
    #[expect(unsafe_code, reason = "a device reads memory without the compiler's knowledge")]
    pub(super) fn map(
        &self,
        device: Option<&DeviceWorld>,
        heap: &Arc<LocalHeap>,
        (at, len): (NonNull<u8>, usize),
        access: HostAccess,
    ) -> Result<u64, StoreError> {
        let mut mappings = self.mappings.lock();
        let host_address = at.addr().get();
        let mapping = match mappings.entry(host_address) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(vacant) => {
                let registration = match device {
                    // SAFETY: shared memory of atomics, which the heap keeps mapped; the heap is stored beside the
                    // registration.
                    Some(device) => Some(unsafe { device.window(at, len, access) }?),
                    None => None,
                };
                vacant.insert(DeviceMapping { registration, _heap: Arc::clone(heap) })
            }
        };
        Ok(mapping.registration.as_ref().map_or(host_address as u64, HostRegistration::address))
    }
}
