//! UCX and GPUs.

use moontide_heap::{DeviceError, DeviceFacts, Driver, Vendor};
use moontide_transfer::ucx::{ENV, MIN_FOR_USE, OldVersions, Ucx};

use super::{Check, names_in};
use crate::text::bytes;

pub(super) fn ucx() -> Check {
    let install = format!(
        "only for RDMA: install OpenUCX {}.{} or newer, or name its libucp.so.0 with {ENV}",
        MIN_FOR_USE.major, MIN_FOR_USE.minor
    );
    let named =
        std::env::var_os(ENV).map_or(String::new(), |path| format!(" ({ENV}={})", path.to_string_lossy()));
    match Ucx::load(None) {
        Err(error) => Check::absent("ucx", format!("not loaded{named}: {error}"), install),
        Ok(ucx) => {
            let found = format!("{} from {}{named}", ucx.version(), ucx.path().display());
            match ucx.usable(OldVersions::Refuse) {
                Ok(()) => Check::ok("ucx", found),
                Err(_) => Check::limited("ucx", format!("{found}, too old"), install),
            }
        }
    }
}

/// One calm line if there is nothing; else one per driver, with its devices.
pub(super) fn gpus() -> Vec<Check> {
    let drivers: Vec<Check> = Vendor::ALL.into_iter().filter_map(driver).collect();
    let devices = names_in("/dev");
    let is_nvidia = |name: &String| name.strip_prefix("nvidia").is_some_and(|n| n.parse::<u32>().is_ok());
    let nvidia = devices.iter().filter(|name| is_nvidia(name)).count();
    let files = match (nvidia, devices.iter().any(|name| name == "kfd")) {
        (0, false) => "no /dev/nvidia*, no /dev/kfd".to_owned(),
        (0, true) => "AMD, /dev/kfd".to_owned(),
        (n, false) => format!("{n} of NVIDIA"),
        (n, true) => format!("{n} of NVIDIA; AMD, /dev/kfd"),
    };
    let has_files = !files.starts_with("no ");
    let gpu = match (drivers.is_empty(), has_files) {
        (true, false) => Check::absent(
            "gpu",
            format!("{files}; no driver"),
            "nothing to do: objects are kept in host memory",
        ),
        (true, true) => Check::limited(
            "gpu",
            format!("{files}; no driver"),
            "install the vendor's driver, or run the container with its runtime",
        ),
        (false, _) => Check::ok("gpu", files),
    };
    std::iter::once(gpu).chain(drivers).collect()
}

/// A vendor's driver; none if there is none and nobody named one.
fn driver(vendor: Vendor) -> Option<Check> {
    let name = match vendor {
        Vendor::Cuda => "cuda",
        Vendor::Hip => "hip",
    };
    let loaded = Driver::load(vendor, None);
    if matches!(loaded, Err(DeviceError::Absent { .. })) && std::env::var_os(vendor.env()).is_none() {
        return None;
    }
    let found = loaded.and_then(|driver| {
        let devices = driver.devices()?;
        let (version, path, count) = (driver.version(), driver.path().display(), devices.len());
        let plural = if count == 1 { "" } else { "s" };
        let mut found = format!("{version} from {path}, {count} device{plural}");
        for (number, device) in devices.iter().enumerate() {
            found += &describe(number, device);
        }
        Ok(found)
    });
    Some(match found {
        Ok(found) => Check::limited(
            name,
            found,
            "not run on real hardware by us: docs/devices.md says what to try first",
        ),
        Err(error) => Check::limited(name, error.to_string(), "objects are kept in host memory meanwhile"),
    })
}

fn describe(number: usize, device: &DeviceFacts) -> String {
    let sharing = match (device.has_vmm, device.has_descriptors) {
        (true, true) => "by descriptor",
        (true, false) => "by handle (no descriptors)",
        (false, _) => "by handle (no virtual memory management)",
    };
    let granularity = device
        .granularity
        .map_or(String::new(), |granularity| format!(" in steps of {}", bytes(granularity)));
    let atomics = if device.has_host_atomics { "with" } else { "not with" };
    let peers = device.peers.iter().enumerate().filter(|&(peer, can)| *can && peer != number);
    let peers: Vec<String> = peers.map(|(peer, _)| peer.to_string()).collect();
    let access = match (device.peers.len(), peers.is_empty()) {
        (1, _) => String::new(),
        (_, true) => "; no access to the others".to_owned(),
        (_, false) => format!("; access to {}", peers.join(", ")),
    };
    let DeviceFacts { name, architecture, memory_bytes, .. } = device;
    let memory = bytes(*memory_bytes);
    format!(
        "\n{number}: {name}, {architecture}, {memory}; shares {sharing}{granularity}; atomics {atomics} the host{access}"
    )
}
