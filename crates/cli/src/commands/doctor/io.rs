//! Asynchronous and direct I/O on files.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::{Check, foreign, kernel_file};

/// A page, aligned as direct I/O wants it.
#[repr(align(4096))]
struct Page([u8; 4096]);

pub(super) fn io_uring() -> Check {
    match foreign::ring() {
        Ok((_, params)) => {
            Check::ok("io_uring", format!("the kernel gives a ring; features {:#x}", params.features.bits()))
        }
        Err(errno) => {
            let next = match errno {
                Errno::NOSYS => {
                    "the kernel has none, or a seccomp profile hides it; disks are then used with threads"
                }
                Errno::PERM | Errno::ACCESS => {
                    "allow io_uring_setup in the seccomp profile, and sysctl kernel.io_uring_disabled=0"
                }
                _ => "disks are used with threads until it works",
            };
            let disabled = kernel_file("/proc/sys/kernel/io_uring_disabled");
            let disabled =
                disabled.map_or(String::new(), |value| format!("; kernel.io_uring_disabled is {value}"));
            Check::absent(
                "io_uring",
                format!("refused: {errno} (errno {}){disabled}", errno.raw_os_error()),
                next,
            )
        }
    }
}

pub(super) fn direct() -> Check {
    let directory = std::env::temp_dir();
    let shown = directory.display();
    match write_directly(&directory) {
        Ok(()) => Check::ok("direct I/O", format!("O_DIRECT works in {shown}")),
        Err(errno) => Check::limited(
            "direct I/O",
            format!("refused in {shown}: {errno}"),
            "memory file systems refuse it; set TMPDIR to a directory on the disk in question and run again",
        ),
    }
}

/// Writes and reads a page of a file without a name, past the page cache.
fn write_directly(directory: &std::path::Path) -> Result<(), Errno> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::DIRECT | OFlags::CLOEXEC;
    let mut page = Box::new(Page([0x5a; 4096]));
    let file = rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)?;
    let written = rustix::io::pwrite(&file, &page.0, 0)?;
    let read = rustix::io::pread(&file, &mut page.0[..], 0)?;
    if written == 4096 && read == 4096 { Ok(()) } else { Err(Errno::IO) }
}
