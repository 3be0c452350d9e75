//! Memory of GPUs as regions: made by one process with the vendor's driver, mapped by others.
//!
//! | file | what |
//! |---|---|
//! | `region` | [`DeviceRegion`]: making, importing, giving back, each step undone if a later one fails |
//! | `window` | [`HostWindow`]: memory of the host that devices see |
//! | `offer` | [`DeviceOffer`]: what goes over a Unix socket so that another process can import a region |
//! | `context` | the device as the thread's current one, and the caller's put back |
//! | `driver` | [`Driver`]: finding and loading a vendor's library at run time |
//! | `calls` | the drivers' functions, structs and numbers, as their headers have them |
//! | `survey` | what a driver says about its devices, for people |
//! | `world` | [`DeviceWorld`]: ranks that map each other's regions |
//! | `part` | [`DevicePart`]: bytes of a rank's own region, for a segment whose records are there |
//! | `error` | [`DeviceError`] |
//!
//! Both vendors have the same calls in the same order under other names, so there is one implementation over one table
//! and two columns of names. Nothing is linked: a machine without a driver runs everything else.
//!
//! **None of this was run on hardware by us.** What was run are the same calls against a driver of our own
//! (`moontide-fakedriver`), which checks order and arguments. `docs/devices.md` says what a GPU's owner runs first.
//!
//! Whatever processors modify stays in memory of the host: ranks have a [`World`](crate::World) for barriers, and for the headers
//! and trailers of records, and a [`DeviceWorld`] beside it for the records' bytes and their flags.

mod calls;
mod context;
mod driver;
mod error;
mod offer;
mod part;
mod region;
mod survey;
mod window;
mod world;

pub use driver::{Driver, Vendor};
pub use error::DeviceError;
pub use offer::{DeviceOffer, Share};
pub use part::DevicePart;
pub use region::{DeviceConfig, DeviceRegion, Sharing};
pub use survey::DeviceFacts;
pub use window::{HostWindow, WindowAccess};
pub use world::{DeviceWorld, DeviceWorldConfig, DeviceWorldError};

use crate::shm::Region;

/// Whose atomic operations on a region's words are atomic to each other. A word that several modify must lie in a region
/// whose domain covers all of them: a processor's and a device's operations on one word tear each other apart where the
/// link between the two does not carry atomics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AtomicDomain {
    /// Those of processors.
    Host,
    /// Those of devices that may access it.
    Device,
    /// All of them: the link between host and device carries atomics.
    Both,
}

impl Region {
    /// Memory of the host: processors modify its words. Devices may read them, and store to a word that is one device's alone.
    pub fn atomic_domain(&self) -> AtomicDomain {
        AtomicDomain::Host
    }
}
