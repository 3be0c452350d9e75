//! UCX and GPUs.

use moontide_transfer::ucx::{ENV, MIN_FOR_USE, OldVersions, Ucx};

use super::{Check, foreign, names_in};

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

pub(super) fn gpu() -> Check {
    let devices = names_in("/dev");
    let nvidia: Vec<&String> = devices
        .iter()
        .filter(|name| name.strip_prefix("nvidia").is_some_and(|n| n.parse::<u32>().is_ok()))
        .collect();
    let has_amd = devices.iter().any(|name| name == "kfd");
    let has_cuda = foreign::loads("libcuda.so.1");
    let library = if has_cuda { "libcuda.so.1 loads" } else { "libcuda.so.1 does not load" };
    match (nvidia.len(), has_amd, has_cuda) {
        (0, false, _) => Check::absent(
            "gpu",
            format!("no /dev/nvidia*, no /dev/kfd; {library}"),
            "nothing to do: objects are kept in host memory",
        ),
        (n @ 1.., _, true) => Check::ok("gpu", format!("{n} of NVIDIA; {library}")),
        (n @ 1.., _, false) => Check::limited(
            "gpu",
            format!("{n} of NVIDIA; {library}"),
            "install the driver's libcuda, or run the container with the NVIDIA runtime",
        ),
        (0, true, _) => Check::limited(
            "gpu",
            "AMD, /dev/kfd",
            "memory of AMD GPUs is not used yet; objects are kept in host memory",
        ),
    }
}
