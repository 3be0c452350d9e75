//! Checks of io_uring and direct I/O.

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use super::{Check, kernel_file, uring_probe};

/// Buffer with the alignment that direct I/O requires.
#[repr(align(4096))]
struct Page([u8; 4096]);

pub(super) fn io_uring() -> Check {
    match uring_probe::probe_io_uring() {
        Ok((_, params)) => {
            Check::ok("io_uring", format!("io_uring_setup works; features {:#x}", params.features.bits()))
        }
        Err(errno) => {
            let hint = match errno {
                Errno::NOSYS => {
                    "kernel without io_uring, or blocked by a seccomp profile; disk I/O uses threads"
                }
                Errno::PERM | Errno::ACCESS => {
                    "allow io_uring_setup in the seccomp profile, and sysctl kernel.io_uring_disabled=0"
                }
                _ => "disk I/O uses threads until it works",
            };
            let disabled = kernel_file("/proc/sys/kernel/io_uring_disabled");
            let disabled =
                disabled.map_or(String::new(), |value| format!("; kernel.io_uring_disabled is {value}"));
            Check::missing(
                "io_uring",
                format!("refused: {errno} (errno {}){disabled}", errno.raw_os_error()),
                hint,
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
            "memory file systems refuse it; set TMPDIR to a directory on the disk to check, and run again",
        ),
    }
}

/// Writes and reads a page of an unnamed temporary file with direct I/O.
fn write_directly(directory: &std::path::Path) -> Result<(), Errno> {
    let flags = OFlags::RDWR | OFlags::TMPFILE | OFlags::DIRECT | OFlags::CLOEXEC;
    let mut page = Box::new(Page([0x5a; 4096]));
    let file = rustix::fs::open(directory, flags, Mode::RUSR | Mode::WUSR)?;
    let written = rustix::io::pwrite(&file, &page.0, 0)?;
    let read = rustix::io::pread(&file, &mut page.0[..], 0)?;
    if written == 4096 && read == 4096 { Ok(()) } else { Err(Errno::IO) }
}
