//! [`AtomicDomain`]: processors whose atomic operations on a word are atomic to each other.

use moontide_heap::Region;

/// Set of processors whose atomic operations on a region's words are atomic to each other. A word that several
/// processors modify must be in a region whose domain covers all of them: operations of host and device on one word
/// are torn if the link between the two does not carry atomics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicDomain {
    /// Host processors.
    Host,
    /// Devices that may access the region.
    Device,
    /// Host processors and devices: the link between them carries atomics.
    Both,
}

impl AtomicDomain {
    /// Returns the domain of shared memory, `Host`: only host processors modify its words. Devices may load them, and
    /// store to a word that only one device writes.
    pub fn of_shared_memory(_region: &Region) -> AtomicDomain {
        AtomicDomain::Host
    }
}
