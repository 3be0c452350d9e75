//! Checks of kernel, processor, process limits and clock.

use rustix::process::{Pid, PidfdFlags, Resource};

use super::{Check, kernel_file, names_in};

/// First kernel with pidfd_open, with which a node detects that a client has exited.
const KERNEL_MIN: (u32, u32) = (5, 3);
/// Enough descriptors for the connections, regions and rings of a busy process.
const DESCRIPTORS_WANTED: u64 = 16_384;
/// A master or a node alone needs a few hundred.
const DESCRIPTORS_MIN: u64 = 256;
/// Inode of the initial pid namespace, the same on every Linux.
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";

pub(super) fn kernel() -> Check {
    let uname = rustix::system::uname();
    let (name, release) = (uname.sysname().to_string_lossy(), uname.release().to_string_lossy());
    let detail = format!("{name} {release}");
    let check = match version(&release) {
        Some(version) if version >= KERNEL_MIN => Check::ok("kernel", detail),
        _ => {
            let hint = format!("run Linux {}.{} or newer: nodes need pidfd_open", KERNEL_MIN.0, KERNEL_MIN.1);
            Check::missing("kernel", detail, hint)
        }
    };
    check.needed()
}

/// Returns the first two numbers of a kernel release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

pub(super) fn processor() -> Check {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (features, best) = vector_features();
    let listed = if features.is_empty() { "no vector extensions".to_owned() } else { features.join(", ") };
    let detail = format!("{cores} cores for this process, {}, {listed}", std::env::consts::ARCH);
    match (best, cores) {
        (false, _) => Check::limited(
            "processor",
            detail,
            "digests are computed without AVX2; a processor with AVX2 computes them several times faster",
        ),
        (true, 1) => {
            Check::limited("processor", detail, "assign more than one core: calls and copies share it")
        }
        (true, _) => Check::ok("processor", detail),
    }
}

/// Returns the available vector features that digests use, and whether AVX2 is one of them.
#[cfg(target_arch = "x86_64")]
fn vector_features() -> (Vec<&'static str>, bool) {
    let known = [
        ("sse4.2", is_x86_feature_detected!("sse4.2")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
    ];
    let names = known.into_iter().filter(|(_, is_available)| *is_available).map(|(name, _)| name).collect();
    (names, is_x86_feature_detected!("avx2"))
}

/// On other architectures vectors are part of the base instruction set.
#[cfg(not(target_arch = "x86_64"))]
fn vector_features() -> (Vec<&'static str>, bool) {
    (vec![], true)
}

pub(super) fn numa() -> Check {
    let directory = "/sys/devices/system/node";
    let is_node = |name: &&String| name.strip_prefix("node").is_some_and(|n| n.parse::<u32>().is_ok());
    let nodes = names_in(directory).iter().filter(is_node).count();
    match nodes {
        0 => Check::limited(
            "numa",
            "unknown: /sys cannot be read",
            "nothing to do on a host with one socket; else mount /sys in the container",
        ),
        1 => Check::ok("numa", "one node"),
        nodes => {
            let online = kernel_file(&format!("{directory}/online")).unwrap_or_default();
            Check::limited(
                "numa",
                format!("{nodes} nodes ({online})"),
                "run one moontide node per NUMA node, each under numactl --cpunodebind=N --membind=N",
            )
        }
    }
}

pub(super) fn clock() -> Check {
    let directory = "/sys/devices/system/clocksource/clocksource0";
    let Some(current) = kernel_file(&format!("{directory}/current_clocksource")) else {
        return Check::limited("clock", "unknown: /sys cannot be read", "mount /sys in the container");
    };
    // User space reads these without a system call.
    if ["tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"].contains(&current.as_str()) {
        return Check::ok("clock", current);
    }
    let available = kernel_file(&format!("{directory}/available_clocksource")).unwrap_or_default();
    let hint = format!(
        "every reading is a system call; available: {available}; prefer tsc (kernel parameter tsc=reliable)"
    );
    Check::limited("clock", current, hint)
}

pub(super) fn descriptors() -> Check {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let soft = limit.current.unwrap_or(u64::MAX);
    let show = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let detail = format!("{} open files, at most {}", show(limit.current), show(limit.maximum));
    let hint = format!(
        "raise the limit: ulimit -n {DESCRIPTORS_WANTED}, or LimitNOFILE={DESCRIPTORS_WANTED} in the unit"
    );
    let check = match soft {
        ..DESCRIPTORS_MIN => Check::missing("descriptors", detail, hint),
        DESCRIPTORS_MIN..DESCRIPTORS_WANTED => Check::limited("descriptors", detail, hint),
        _ => Check::ok("descriptors", detail),
    };
    check.needed()
}

pub(super) fn processes() -> Check {
    let me = rustix::process::getpid();
    let namespace = std::fs::read_link("/proc/self/ns/pid").map(|link| link.to_string_lossy().into_owned());
    match (pidfd_works(me), namespace.as_deref()) {
        (Err(errno), _) => Check::missing(
            "processes",
            format!("pidfd_open is refused: {errno}"),
            "allow pidfd_open in the container's seccomp profile; without it no client can share memory with a node",
        ),
        (Ok(()), Ok(FIRST_PID_NAMESPACE)) => Check::ok("processes", "pidfd works; initial pid namespace"),
        (Ok(()), Ok(other)) => Check::limited(
            "processes",
            format!("pidfd works; separate pid namespace, {other}"),
            "node and inference engines share memory only within one pid namespace: share it (--pid=container:…, shareProcessNamespace) or use TCP",
        ),
        (Ok(()), Err(_)) => Check::limited(
            "processes",
            "pidfd works; /proc cannot be read",
            "mount /proc: nodes check their clients with it",
        ),
    }
}

fn pidfd_works(me: Pid) -> Result<(), rustix::io::Errno> {
    rustix::process::pidfd_open(me, PidfdFlags::empty()).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_versions_are_parsed_and_compared_numerically() {
        assert_eq!(version("6.1.0-18-amd64"), Some((6, 1)));
        assert_eq!(version("5.15.167.4-microsoft-standard-WSL2"), Some((5, 15)));
        assert_eq!(version("4.19"), Some((4, 19)));
        assert_eq!(version("unknown"), None);
        assert!(version("4.19").unwrap() < KERNEL_MIN && version("5.10.1").unwrap() >= KERNEL_MIN);
    }
}
