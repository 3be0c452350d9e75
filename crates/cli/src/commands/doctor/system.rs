//! Kernel, processors, limits of a process, clock.

use rustix::process::{Pid, PidfdFlags, Resource};

use super::{Check, kernel_file, names_in};

/// The first kernel with pidfd_open, by which a node learns that a client has ended.
const KERNEL_MIN: (u32, u32) = (5, 3);
/// Connections, regions and rings of one busy process.
const DESCRIPTORS_WANTED: u64 = 16_384;
/// A master and a node alone need some hundred.
const DESCRIPTORS_MIN: u64 = 256;
/// The pid namespace in which a machine starts has this number on every Linux.
const FIRST_PID_NAMESPACE: &str = "pid:[4026531836]";

pub(super) fn kernel() -> Check {
    let uname = rustix::system::uname();
    let (name, release) = (uname.sysname().to_string_lossy(), uname.release().to_string_lossy());
    let found = format!("{name} {release}");
    let check = match version(&release) {
        Some(version) if version >= KERNEL_MIN => Check::ok("kernel", found),
        _ => {
            let next = format!("run Linux {}.{} or newer: nodes need pidfd_open", KERNEL_MIN.0, KERNEL_MIN.1);
            Check::absent("kernel", found, next)
        }
    };
    check.needed()
}

/// The first two numbers of a kernel's release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit()).map(str::parse);
    Some((numbers.next()?.ok()?, numbers.next()?.ok()?))
}

pub(super) fn processor() -> Check {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let (features, best) = vector_features();
    let listed = if features.is_empty() { "no wide vectors".to_owned() } else { features.join(", ") };
    let found = format!("{cores} cores for this process, {}, {listed}", std::env::consts::ARCH);
    match (best, cores) {
        (false, _) => Check::limited(
            "processor",
            found,
            "digests are computed with narrow vectors; a processor with AVX2 does it several times faster",
        ),
        (true, 1) => Check::limited(
            "processor",
            found,
            "give the process more than one core: calls share it with copies",
        ),
        (true, _) => Check::ok("processor", found),
    }
}

/// Which of the features that digests use are there, and whether the most important one is.
#[cfg(target_arch = "x86_64")]
fn vector_features() -> (Vec<&'static str>, bool) {
    let known = [
        ("sse4.2", is_x86_feature_detected!("sse4.2")),
        ("avx2", is_x86_feature_detected!("avx2")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
    ];
    let names = known.into_iter().filter(|(_, here)| *here).map(|(name, _)| name).collect();
    (names, is_x86_feature_detected!("avx2"))
}

/// Elsewhere vectors are part of the architecture.
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
            "the kernel does not say",
            "nothing to do on a machine with one socket; else mount /sys in the container",
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
        return Check::limited("clock", "the kernel does not say", "mount /sys in the container to find out");
    };
    // These are read without entering the kernel.
    if ["tsc", "kvm-clock", "arch_sys_counter", "hyperv_clocksource_tsc_page"].contains(&current.as_str()) {
        return Check::ok("clock", current);
    }
    let available = kernel_file(&format!("{directory}/available_clocksource")).unwrap_or_default();
    let next = format!(
        "every reading is a system call; available here: {available}; prefer tsc (kernel parameter tsc=reliable)"
    );
    Check::limited("clock", current, next)
}

pub(super) fn descriptors() -> Check {
    let limit = rustix::process::getrlimit(Resource::Nofile);
    let soft = limit.current.unwrap_or(u64::MAX);
    let show = |limit: Option<u64>| limit.map_or("unlimited".to_owned(), |limit| limit.to_string());
    let found = format!("{} open files, at most {}", show(limit.current), show(limit.maximum));
    let next =
        format!("raise it: ulimit -n {DESCRIPTORS_WANTED}, or LimitNOFILE={DESCRIPTORS_WANTED} in the unit");
    let check = match soft {
        ..DESCRIPTORS_MIN => Check::absent("descriptors", found, next),
        DESCRIPTORS_MIN..DESCRIPTORS_WANTED => Check::limited("descriptors", found, next),
        _ => Check::ok("descriptors", found),
    };
    check.needed()
}

pub(super) fn processes() -> Check {
    let me = rustix::process::getpid();
    let namespace = std::fs::read_link("/proc/self/ns/pid").map(|link| link.to_string_lossy().into_owned());
    match (pidfd_works(me), namespace.as_deref()) {
        (Err(errno), _) => Check::absent(
            "processes",
            format!("pidfd_open is refused: {errno}"),
            "allow pidfd_open in the container's seccomp profile; without it no client can share memory with a node",
        ),
        (Ok(()), Ok(FIRST_PID_NAMESPACE)) => {
            Check::ok("processes", "pidfd works; the machine's own pid namespace")
        }
        (Ok(()), Ok(other)) => Check::limited(
            "processes",
            format!("pidfd works; a pid namespace of its own, {other}"),
            "node and engines share memory only within one pid namespace: share it (--pid=container:…, shareProcessNamespace) or go over TCP",
        ),
        (Ok(()), Err(_)) => Check::limited(
            "processes",
            "pidfd works; /proc cannot be read",
            "mount /proc: nodes check their clients by it",
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
    fn releases_of_kernels_are_compared_by_their_numbers() {
        assert_eq!(version("6.1.0-18-amd64"), Some((6, 1)));
        assert_eq!(version("5.15.167.4-microsoft-standard-WSL2"), Some((5, 15)));
        assert_eq!(version("4.19"), Some((4, 19)));
        assert_eq!(version("unknown"), None);
        assert!(version("4.19").unwrap() < KERNEL_MIN && version("5.10.1").unwrap() >= KERNEL_MIN);
    }
}
