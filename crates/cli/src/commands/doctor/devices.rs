//! UCX and GPUs.

use moontide_bench::format_bytes;
use moontide_symmetric::{DeviceError, DeviceInfo, Driver, Vendor};
use moontide_transfer::ucx::{ENV, MIN_FOR_USE, OldVersions, Ucx};

use super::{Check, names_in};

pub(super) fn ucx() -> Check {
    let install = format!(
        "only needed for RDMA: install OpenUCX {}.{} or newer, or set {ENV} to its libucp.so.0",
        MIN_FOR_USE.major, MIN_FOR_USE.minor
    );
    let named =
        std::env::var_os(ENV).map_or(String::new(), |path| format!(" ({ENV}={})", path.to_string_lossy()));
    match Ucx::load(None) {
        Err(error) => Check::missing("ucx", format!("not loaded{named}: {error}"), install),
        Ok(ucx) => {
            let detail = format!("{} from {}{named}", ucx.version(), ucx.path().display());
            match ucx.usable(OldVersions::Refuse) {
                Ok(()) => Check::ok("ucx", detail),
                Err(_) => Check::limited("ucx", format!("{detail}, too old"), install),
            }
        }
    }
}

/// Returns one check for the device files, and one per driver with its devices.
pub(super) fn gpus() -> Vec<Check> {
    let drivers: Vec<Check> = Vendor::ALL.into_iter().filter_map(driver).collect();
    let devices = names_in("/dev");
    let is_nvidia = |name: &String| name.strip_prefix("nvidia").is_some_and(|n| n.parse::<u32>().is_ok());
    let nvidia = devices.iter().filter(|name| is_nvidia(name)).count();
    let files = match (nvidia, devices.iter().any(|name| name == "kfd")) {
        (0, false) => "no /dev/nvidia*, no /dev/kfd".to_owned(),
        (0, true) => "AMD, /dev/kfd".to_owned(),
        (n, false) => format!("{n} NVIDIA devices"),
        (n, true) => format!("{n} NVIDIA devices; AMD, /dev/kfd"),
    };
    let has_files = !files.starts_with("no ");
    let gpu = match (drivers.is_empty(), has_files) {
        (true, false) => Check::missing(
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

/// Checks a vendor's driver; `None` if it is not installed and the environment names none.
fn driver(vendor: Vendor) -> Option<Check> {
    let name = match vendor {
        Vendor::Cuda => "cuda",
        Vendor::Hip => "hip",
    };
    let loaded = Driver::load(vendor, None);
    if matches!(loaded, Err(DeviceError::NotInstalled { .. })) && std::env::var_os(vendor.env()).is_none() {
        return None;
    }
    let detail = loaded.and_then(|driver| {
        let devices = driver.devices()?;
        let (version, path, count) = (driver.version(), driver.path().display(), devices.len());
        let plural = if count == 1 { "" } else { "s" };
        let mut detail = format!("{version} from {path}, {count} device{plural}");
        for (number, device) in devices.iter().enumerate() {
            detail += &describe(number, device);
        }
        Ok(detail)
    });
    Some(match detail {
        Ok(detail) => {
            Check::limited(name, detail, "not tested on real hardware; see docs/devices.md for first steps")
        }
        Err(error) => {
            Check::limited(name, error.to_string(), "objects are kept in host memory until it works")
        }
    })
}

fn describe(number: usize, device: &DeviceInfo) -> String {
    let sharing = match (device.has_vmm, device.has_descriptors) {
        (true, true) => "by descriptor",
        (true, false) => "by handle (no descriptors)",
        (false, _) => "by handle (no virtual memory management)",
    };
    let granularity = device
        .granularity
        .map_or(String::new(), |granularity| format!(" in steps of {}", format_bytes(granularity)));
    let atomics = if device.has_host_atomics { "with" } else { "not with" };
    let peers = device.peers.iter().enumerate().filter(|&(peer, can)| *can && peer != number);
    let peers: Vec<String> = peers.map(|(peer, _)| peer.to_string()).collect();
    let access = match (device.peers.len(), peers.is_empty()) {
        (1, _) => String::new(),
        (_, true) => "; no access to other devices".to_owned(),
        (_, false) => format!("; access to {}", peers.join(", ")),
    };
    let DeviceInfo { name, architecture, memory_bytes, .. } = device;
    let memory = format_bytes(*memory_bytes);
    format!(
        "\n{number}: {name}, {architecture}, {memory}; shares {sharing}{granularity}; atomics {atomics} the host{access}"
    )
}
