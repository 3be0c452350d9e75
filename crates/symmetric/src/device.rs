//! Device memory as regions: created by one process with the vendor's driver, mapped by others.
//!
//! | file | contents |
//! |---|---|
//! | `region` | [`DeviceRegion`]: create, import and free, each step undone if a later one fails |
//! | `host_registration` | [`HostRegistration`]: host memory that devices can access |
//! | `export` | [`DeviceExport`]: message over a Unix socket with which another process imports a region |
//! | `atomic_domain` | [`AtomicDomain`]: processors that may modify the same word |
//! | `context` | the device as the thread's current one, and restoring the caller's |
//! | `driver` | [`Driver`]: finds and loads a vendor's library at run time |
//! | `vendor` | [`Vendor`]: names, libraries and versions |
//! | `ffi` | functions, structs and constants of the drivers, as in their headers |
//! | `info` | human-readable properties of a driver's devices |
//! | `world` | [`DeviceWorld`]: ranks that map each other's regions |
//! | `error` | [`DeviceError`] |
//!
//! Both vendors have the same calls in the same order under different names, so there is one implementation over one
//! table with two columns of names. Nothing is linked: a machine without a driver runs everything else.
//!
//! **We have not run this on hardware.** Tests run the same calls against a driver of our own
//! (`moontide-fakedriver`), which checks order and arguments. `docs/devices.md` lists the first tests to run on a
//! GPU.
//!
//! Memory that the host modifies remains host memory: ranks have a [`World`](crate::World) for barriers, and for the
//! headers and trailers of records, and a [`DeviceWorld`] beside it for the records' bytes and their flags.

mod atomic_domain;
mod context;
mod driver;
mod error;
mod export;
mod ffi;
mod host_registration;
mod info;
mod region;
mod vendor;
mod world;

pub use atomic_domain::AtomicDomain;
pub use driver::Driver;
pub use error::DeviceError;
pub use export::{DeviceExport, ShareableHandle};
pub use host_registration::{HostAccess, HostRegistration};
pub use info::DeviceInfo;
pub use region::{DeviceConfig, DeviceRegion, HandleType};
pub use vendor::Vendor;
pub use world::{DeviceWorld, DeviceWorldConfig, DeviceWorldError};
