//! Checks of memory, shared memory, locked memory and huge pages.

use moontide_bench::format_bytes;
use rustix::fs::MemfdFlags;
use rustix::process::Resource;

use super::{Check, kernel_file};

/// Available memory below which a node is only useful for tests.
const AVAILABLE_WANTED: u64 = 2 << 30;
/// Size of the shared-memory region that the check creates.
const TRIED_BYTES: u64 = 1 << 20;

pub(super) fn memory() -> Check {
    let Some(meminfo) = kernel_file("/proc/meminfo") else {
        return Check::limited("memory", "unknown: /proc/meminfo cannot be read", "mount /proc");
    };
    let (total, available) = (field(&meminfo, "MemTotal"), field(&meminfo, "MemAvailable"));
    let mut detail = format!("{} of {} available", format_bytes(available), format_bytes(total));
    let mut usable = available;
    // Memory limit of a container; "max" if there is none.
    let limit = kernel_file("/sys/fs/cgroup/memory.max").and_then(|limit| limit.parse::<u64>().ok());
    if let Some(limit) = limit {
        let used =
            kernel_file("/sys/fs/cgroup/memory.current").and_then(|used| used.parse().ok()).unwrap_or(0);
        usable = usable.min(limit.saturating_sub(used));
        detail += &format!(", limited by the control group to {}", format_bytes(limit));
    }
    if usable >= AVAILABLE_WANTED {
        return Check::ok("memory", detail);
    }
    let hint = format!("start nodes with at most {} (moontide node --memory)", format_bytes(usable / 4 * 3));
    Check::limited("memory", detail, hint)
}

/// Returns a field of /proc/meminfo, in bytes.
fn field(meminfo: &str, name: &str) -> u64 {
    let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
    let kib: Option<u64> = line.and_then(|line| line.split_whitespace().next()?.parse().ok());
    kib.unwrap_or(0) << 10
}

/// Checks memfd: regions are memfds, limited only by memory and the control group, not by a mount.
pub(super) fn shared() -> Check {
    let mount = match rustix::fs::statvfs("/dev/shm") {
        Ok(shm) => {
            format!("/dev/shm has {} (not used)", format_bytes(shm.f_blocks.saturating_mul(shm.f_frsize)))
        }
        Err(_) => "no /dev/shm (not needed)".to_owned(),
    };
    let tried = rustix::fs::memfd_create("moontide-doctor", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)
        .and_then(|fd| rustix::fs::ftruncate(&fd, TRIED_BYTES));
    let check = match tried {
        Ok(()) => Check::ok("shared memory", format!("memfd works; {mount}")),
        Err(errno) => Check::missing(
            "shared memory",
            format!("memfd_create is refused: {errno}; {mount}"),
            "allow memfd_create in the container's seccomp profile: nodes allocate memory with it",
        ),
    };
    check.needed()
}

pub(super) fn locked() -> Check {
    let is_root = rustix::process::geteuid().is_root();
    let user = if is_root { "root, exempt from the limit" } else { "not root" };
    match rustix::process::getrlimit(Resource::Memlock).current {
        None => Check::ok("locked memory", format!("unlimited; {user}")),
        Some(limit) if is_root => Check::ok("locked memory", format!("{}; {user}", format_bytes(limit))),
        Some(limit) => Check::limited(
            "locked memory",
            format!("{}; {user}", format_bytes(limit)),
            "RDMA registers memory by locking it: ulimit -l unlimited, or LimitMEMLOCK=infinity in the unit",
        ),
    }
}

pub(super) fn huge_pages() -> Check {
    let directory = "/sys/kernel/mm/hugepages/hugepages-2048kB";
    let number = |name: &str| kernel_file(&format!("{directory}/{name}")).and_then(|n| n.parse::<u64>().ok());
    let (reserved, free) = (number("nr_hugepages").unwrap_or(0), number("free_hugepages").unwrap_or(0));
    let modes = kernel_file("/sys/kernel/mm/transparent_hugepage/shmem_enabled").unwrap_or_default();
    let mode = chosen(&modes).unwrap_or("unknown");
    let detail = format!("{reserved} pages of 2 MiB reserved, {free} free; shmem_enabled is {mode}");
    if free > 0 || ["always", "within_size", "advise", "force"].contains(&mode) {
        return Check::ok("huge pages", detail);
    }
    Check::limited(
        "huge pages",
        detail,
        "lookups among millions of objects are faster with huge pages: echo advise > \
         /sys/kernel/mm/transparent_hugepage/shmem_enabled, or reserve about 800 pages per 10 million objects with \
         sysctl vm.nr_hugepages",
    )
}

/// Returns the word in brackets: `never` of `always [never] advise`.
fn chosen(modes: &str) -> Option<&str> {
    modes.split_once('[')?.1.split_once(']').map(|(mode, _)| mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meminfo_and_shmem_enabled_are_parsed() {
        let meminfo = "MemTotal:       24689604 kB\nMemFree:        1 kB\nMemAvailable:   1024 kB\n";
        assert_eq!(field(meminfo, "MemTotal"), 24_689_604 << 10);
        assert_eq!(field(meminfo, "MemAvailable"), 1 << 20);
        assert_eq!(field(meminfo, "Mem"), 0);
        assert_eq!(chosen("always within_size advise [never] deny force"), Some("never"));
        assert_eq!(chosen(""), None);
    }
}
