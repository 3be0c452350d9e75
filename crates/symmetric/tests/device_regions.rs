//! Regions in the memory of simulated devices: processes that create and import them with the fake driver, which
//! checks order and arguments and keeps a log.

mod child_process;
#[path = "../../heap/tests/common/libtest.rs"]
mod libtest;

use std::ffi::{c_int, c_void};
use std::process::ExitCode;

use child_process::{ChildDriver, ChildProcess, Scratch};
use libloading::os::unix::Library;
use moontide_symmetric::{AtomicDomain, DeviceError, DeviceExport, Driver, ShareableHandle, Vendor};

fn main() -> ExitCode {
    child_process::main(
        &[
            ("device_writes_are_visible_to_owner_and_importers", writes_are_visible_to_all),
            ("device_memory_is_accessed_by_copies_only", memory_is_accessed_by_copies),
            ("device_calls_come_in_documented_order", calls_come_in_order),
            ("device_region_falls_back_to_ipc_handles_without_fd_support", ipc_handles),
            ("device_fd_is_passed_by_address_to_old_hip", old_hip_takes_addresses),
            ("device_current_context_of_caller_is_restored", current_device_is_restored),
            ("device_without_peer_access_is_rejected", peers_without_access),
            ("device_out_of_memory_error_says_memory_is_full", memory_is_full),
            ("device_region_survives_importer_exit", importer_exits),
            ("device_fd_stays_valid_after_owner_exit_but_ipc_handle_does_not", owner_exits),
            ("device_region_is_unusable_in_forked_child", fork),
            ("device_atomic_domain_is_exported_with_region", domains),
            ("device_library_missing_symbol_is_named_in_error", missing_symbol),
            ("device_missing_library_error_names_env_variable", no_library),
            ("device_malformed_or_mismatched_export_is_rejected", exports_are_checked),
            ("device_world_maps_and_translates_all_regions", worlds),
            ("device_world_join_error_names_rank_without_region", world_with_missing_region),
            ("device_copies_of_concurrent_threads_do_not_interfere", concurrent_copies),
            ("device_failed_copy_wait_is_retried_then_reported", failed_copy_waits),
            ("device_read_only_memory_registers_only_where_supported", read_only_registrations),
            ("device_host_registration_is_unusable_in_forked_child", registrations_and_forks),
            ("device_dropped_world_keeps_memory_others_may_use", dropped_worlds),
            ("device_fake_driver_rejects_calls_in_wrong_order", fake_driver_rejects_misuse),
        ],
        &[],
        libtest::run,
    )
}

fn writes_are_visible_to_all() {
    for vendor in Vendor::ALL {
        let log = Scratch::new("visible");
        let driver = ChildDriver::fake(vendor).having("devices=2").logging(&log);
        let [a, b, c] = [driver.loaded(), driver.loaded(), driver.loaded()];
        assert_eq!(a.ok("create 0 100000 1 -"), "131072 PosixFd Device");
        assert_eq!(a.ok("read 99990 3"), "\0\0\0");
        b.import(0, a.export()).unwrap();
        c.import(1, a.export()).unwrap();
        a.ok("write 70000 from-a");
        assert_eq!([b.ok("read 70000 6"), c.ok("read 70000 6")], ["from-a", "from-a"]);
        b.ok("write 131066 from-b");
        assert_eq!([a.ok("read 131066 6"), c.ok("read 131066 6")], ["from-b", "from-b"]);
        c.ok("write 0 from-c");
        assert_eq!([a.ok("read 0 6"), b.ok("read 0 6")], ["from-c", "from-c"]);
        // Each process reserves addresses of its own; with address randomisation they differ.
        let addresses = [a.ok("address"), b.ok("address"), c.ok("address")];
        assert!(addresses[0] != addresses[1] || addresses[1] != addresses[2], "{addresses:?}");
        for child in [c, a, b] {
            child.ok("close");
            assert_eq!(child.ok("leaks"), "nothing left");
            child.finish();
        }
        assert_eq!(log.text().matches("exit: nothing left").count(), 3, "{}", log.text());
    }
}

/// All operations of a region work on memory that the host cannot access; a host thread that does access it is
/// killed. Without `blind`, on the same driver, it reads the bytes.
fn memory_is_accessed_by_copies() {
    let cases = Vendor::ALL.map(|vendor| [(vendor, "blind=1", "signal 11"), (vendor, "blind=0", "found 65")]);
    for (vendor, settings, touched) in cases.into_iter().flatten() {
        for sharing in ["descriptor", "handle"] {
            let driver = ChildDriver::fake(vendor).having(settings);
            let [a, b] = [driver.loaded(), driver.loaded()];
            a.ok(&format!("create 0 100000 - {sharing}"));
            b.import(0, a.export()).unwrap();
            for (child, other) in [(&a, &b), (&b, &a)] {
                assert_eq!(child.ok("read 99000 4"), "\0\0\0\0");
                child.ok("write 0 ABCDEFGH");
                assert_eq!([child.ok("read 0 8"), other.ok("read 0 8")], ["ABCDEFGH"; 2]);
                child.ok("copy 0 70000 8");
                child.ok("copy-back 70002 80000 4");
                assert_eq!([other.ok("read 70000 8"), other.ok("read 80000 4")], ["ABCDEFGH", "CDEF"]);
                child.ok("register 4096 write");
                child.ok("host-write 7 shown");
                child.ok("copy-from-host 7 90000 5");
                child.ok("copy-to-host 70000 4088 8");
                assert_eq!([other.ok("read 90000 5"), child.ok("host-read 4088 8")], ["shown", "ABCDEFGH"]);
                assert_eq!(child.ok("touch"), touched, "{vendor} {sharing} {settings}");
            }
            for child in [b, a] {
                child.ok("close");
                assert_eq!(child.ok("leaks"), "nothing left");
            }
        }
    }
}

/// Returns the names of the calls in a log.
fn calls(log: &Scratch) -> Vec<String> {
    let text = log.text();
    let name = |line: &str| Some(line.split_once(' ')?.1.split_once('(')?.0.to_owned());
    text.lines().filter_map(name).collect()
}

fn calls_come_in_order() {
    let enter = |vendor: Vendor| match vendor {
        Vendor::Cuda => "DevicePrimaryCtxRetain CtxGetCurrent CtxSetCurrent",
        Vendor::Hip => "GetDevice SetDevice",
    };
    let again = |vendor: Vendor| match vendor {
        Vendor::Cuda => "CtxGetCurrent CtxSetCurrent",
        Vendor::Hip => "GetDevice SetDevice",
    };
    let leave = |vendor: Vendor| match vendor {
        Vendor::Cuda => "CtxSetCurrent",
        Vendor::Hip => "SetDevice",
    };
    for vendor in Vendor::ALL {
        let (prefix, version, sync, release) = match vendor {
            Vendor::Cuda => ("cu", "DriverGetVersion", "CtxSynchronize", "DevicePrimaryCtxRelease_v2"),
            Vendor::Hip => ("hip", "RuntimeGetVersion", "DeviceSynchronize", ""),
        };
        let (stream, destroy, v2) = match vendor {
            Vendor::Cuda => ("StreamCreate", "StreamDestroy_v2", "_v2"),
            Vendor::Hip => ("StreamCreateWithFlags", "StreamDestroy", ""),
        };
        let (enter, again, leave) = (enter(vendor), again(vendor), leave(vendor));
        let expected = |text: String| -> Vec<String> {
            text.split_whitespace().map(|call| format!("{prefix}{call}")).collect()
        };
        let end = format!("{again} {sync} {destroy} MemUnmap MemAddressFree MemRelease {leave} {release}");
        let host = if vendor == Vendor::Cuda { "MemHost" } else { "Host" };
        let query = if vendor == Vendor::Cuda { "DeviceGetAttribute" } else { "" };
        let registration = format!(
            "DeviceGet {enter} {query} {host}Register{v2} {host}GetDevicePointer{v2} {leave} \
             {again} {sync} {host}Unregister {leave} {release}"
        );
        let copy = |kind: &str| {
            let query = if kind == "DtoD" { "PointerGetAttribute" } else { "" };
            format!("{again} {query} Memcpy{kind}Async{v2} StreamSynchronize {leave}")
        };

        let [owner_log, importer_log] = [Scratch::new("owner"), Scratch::new("importer")];
        let owner = ChildDriver::fake(vendor).logging(&owner_log).loaded();
        owner.ok("create 0 1 - -");
        let importer = ChildDriver::fake(vendor).logging(&importer_log).loaded();
        importer.import(0, owner.export()).unwrap();
        for message in [
            "write 0 abc",
            "read 0 3",
            "copy 0 8 3",
            "copy-back 8 16 3",
            "synchronize",
            "register 4096 read",
            "unregister",
            "close",
        ] {
            importer.ok(message);
        }
        owner.ok("close");
        let attributes = "DeviceGetAttribute DeviceGetAttribute DeviceGetAttribute";
        assert_eq!(
            calls(&owner_log),
            expected(format!(
                "Init {version} DeviceGet {enter} {attributes} {stream} MemGetAllocationGranularity MemCreate \
                 MemAddressReserve MemMap MemSetAccess MemsetD8Async StreamSynchronize \
                 MemExportToShareableHandle {leave} {end}"
            ))
        );
        assert_eq!(
            calls(&importer_log),
            expected(format!(
                "Init {version} DeviceGet {enter} {stream} MemGetAllocationGranularity \
                 MemImportFromShareableHandle MemAddressReserve MemMap MemSetAccess {leave} \
                 {} {} {} {} {again} {sync} {leave} {registration} {end}",
                copy("HtoD"),
                copy("DtoH"),
                copy("DtoD"),
                copy("DtoD"),
            ))
        );
    }
}

fn concurrent_copies() {
    for vendor in Vendor::ALL {
        let child = ChildDriver::fake(vendor).loaded();
        child.ok("create 0 100000 - -");
        child.ok("concurrent-copies 4 50");
        child.ok("close");
        assert_eq!(child.ok("leaks"), "nothing left");
    }
}

/// A wait that fails once is repeated before the bytes are released; the copy is complete then, and the error is
/// returned. A driver that keeps failing, as after a permanent error, gives another error.
fn failed_copy_waits() {
    for (vendor, wait) in [(Vendor::Cuda, "cuStreamSynchronize"), (Vendor::Hip, "hipStreamSynchronize")] {
        let log = Scratch::new("waits");
        // The first wait is for the zeros.
        let once = ChildDriver::fake(vendor).logging(&log).failing(&format!("{wait}:2:700")).loaded();
        once.ok("create 0 1 - -");
        let error = once.ask("write 0 abc").unwrap_err();
        assert!(
            error.starts_with(&format!("{wait} failed with 700")) && !error.contains("stop this process")
        );
        assert_eq!(once.ok("read 0 3"), "abc");
        let waits = calls(&log).iter().filter(|call| *call == wait).count();
        assert_eq!(waits, 4, "expected waits: zeroing, copy, copy again, read: {}", log.text());
        once.ok("close");
        assert_eq!(once.ok("leaks"), "nothing left");

        let broken = ChildDriver::fake(vendor).loaded();
        broken.ok("create 0 1 - -");
        broken.ok("break");
        for message in ["write 0 abc", "read 0 3", "copy 0 8 3"] {
            let error = broken.ask(message).unwrap_err();
            assert!(error.contains("failed with 700") && error.contains("stop this process"), "{error}");
        }
    }
}

fn ipc_handles() {
    for (vendor, settings, sharing) in [
        (Vendor::Cuda, "vmm=0", "-"),
        (Vendor::Cuda, "fd=0", "-"),
        (Vendor::Hip, "vmm=0", "-"),
        (Vendor::Cuda, "", "handle"),
        (Vendor::Hip, "", "handle"),
    ] {
        let log = Scratch::new("handles");
        let driver = ChildDriver::fake(vendor).having(settings).logging(&log);
        let [a, b, c] = [driver.loaded(), driver.loaded(), driver.loaded()];
        // Whole blocks: a handle opens no other data.
        assert_eq!(a.ok(&format!("create 0 100000 - {sharing}")), "2097152 Ipc Device");
        let export = a.export();
        assert!(matches!(export.share, ShareableHandle::Handle(_)));
        b.import(0, export).unwrap();
        c.import(0, a.export()).unwrap();
        a.ok("write 5 from-a");
        assert_eq!([b.ok("read 5 6"), c.ok("read 5 6")], ["from-a", "from-a"]);
        c.ok("write 2097146 from-c");
        assert_eq!([a.ok("read 2097146 6"), b.ok("read 2097146 6")], ["from-c", "from-c"]);
        for child in [b, c, a] {
            child.ok("close");
            child.finish();
        }
        assert_eq!(log.text().matches("exit: nothing left").count(), 3, "{}", log.text());
        assert!(!calls(&log).iter().any(|call| call.ends_with("MemCreate")));
    }
}

fn old_hip_takes_addresses() {
    let driver = ChildDriver::fake(Vendor::Hip).having("version=60241133");
    let [a, b] = [driver.loaded(), driver.start()];
    assert_eq!(b.ok("load"), "6.2");
    a.ok("create 0 1 - -");
    b.import(0, a.export()).unwrap();
    a.ok("write 0 old");
    assert_eq!(b.ok("read 0 3"), "old");
}

fn current_device_is_restored() {
    for vendor in Vendor::ALL {
        let driver = ChildDriver::fake(vendor).having("devices=2");
        let [a, b] = [driver.loaded(), driver.loaded()];
        for child in [&a, &b] {
            child.ok("set-device 1");
        }
        let before = a.ok("current");
        assert_ne!(before, "0");
        a.ok("create 0 1 - -");
        b.import(0, a.export()).unwrap();
        b.ok("write 0 x");
        for (child, message) in [(&a, "read 0 1"), (&b, "close"), (&a, "close")] {
            child.ok(message);
            assert_eq!(child.ok("current"), before, "after {message}");
        }
        // Also if a call failed in between.
        let failing =
            driver.failing(if vendor == Vendor::Cuda { "cuMemMap:1" } else { "hipMemMap:1" }).loaded();
        failing.ok("set-device 1");
        failing.ask("create 0 1 - -").unwrap_err();
        assert_eq!(failing.ok("current"), before);
    }
}

fn peers_without_access() {
    for vendor in Vendor::ALL {
        let driver = ChildDriver::fake(vendor).having("devices=3,peers=0-1");
        let [a, b] = [driver.loaded(), driver.loaded()];
        let error = a.ask("create 0 1 2 -").unwrap_err();
        assert!(error.contains("MemSetAccess failed with 101 (invalid device ordinal)"), "{error}");
        assert!(error.contains("moontide doctor"), "{error}");
        assert_eq!(a.ok("leaks"), "nothing left");
        a.ok("create 0 1 1 -");
        let error = b.import(2, a.export()).unwrap_err();
        assert!(error.contains("MemSetAccess"), "{error}");
        assert_eq!(b.ok("leaks"), "nothing left");
        b.import(1, a.export()).unwrap();
        let error = b.import(9, a.export()).unwrap_err();
        assert!(error.contains("DeviceGet failed with 101"), "{error}");
    }
}

fn memory_is_full() {
    let child = ChildDriver::fake(Vendor::Cuda).having("memory=131072").loaded();
    let error = child.ask("create 0 131073 - -").unwrap_err();
    assert!(
        error.starts_with("cuMemCreate failed with 2 (out of memory); the device's memory is full"),
        "{error}"
    );
    let error = child.ask("create 0 0 - -").unwrap_err();
    assert!(error.contains("region of 0 bytes"), "{error}");
    assert_eq!(child.ok("leaks"), "nothing left");
}

fn importer_exits() {
    for vendor in Vendor::ALL {
        for sharing in ["descriptor", "handle"] {
            let driver = ChildDriver::fake(vendor);
            let [a, b] = [driver.loaded(), driver.loaded()];
            a.ok(&format!("create 0 1 - {sharing}"));
            b.import(0, a.export()).unwrap();
            b.ok("write 0 last-write");
            b.kill();
            assert_eq!(a.ok("read 0 10"), "last-write");
            let c = driver.loaded();
            c.import(0, a.export()).unwrap();
            assert_eq!(c.ok("read 0 10"), "last-write");
            c.ok("close");
            a.ok("close");
            assert_eq!(a.ok("leaks"), "nothing left");
        }
    }
}

fn owner_exits() {
    for vendor in Vendor::ALL {
        let driver = ChildDriver::fake(vendor);
        let [a, b, c] = [driver.loaded(), driver.loaded(), driver.loaded()];
        a.ok("create 0 1 - -");
        b.import(0, a.export()).unwrap();
        a.ok("write 0 from");
        let in_flight = a.export();
        a.kill();
        c.import(0, in_flight).unwrap();
        assert_eq!(b.ok("read 0 4"), "from");
        b.ok("write 0 next");
        assert_eq!(c.ok("read 0 4"), "next");
        for child in [b, c] {
            child.ok("close");
            assert_eq!(child.ok("leaks"), "nothing left");
        }

        // A handle is invalid without its owner.
        let [a, b] = [driver.loaded(), driver.loaded()];
        a.ok("create 0 1 - handle");
        let in_flight = a.export();
        a.kill();
        let error = b.import(0, in_flight).unwrap_err();
        assert!(error.contains("IpcOpenMemHandle"), "{error}");
        assert_eq!(b.ok("leaks"), "nothing left");
    }
}

fn fork() {
    for vendor in Vendor::ALL {
        for sharing in ["descriptor", "handle"] {
            let log = Scratch::new("fork");
            let driver = ChildDriver::fake(vendor).logging(&log);
            let [a, b] = [driver.loaded(), driver.loaded()];
            a.ok(&format!("create 0 1 - {sharing}"));
            b.import(0, a.export()).unwrap();
            let before = log.text();
            assert_eq!([a.ok("fork"), b.ok("fork")], ["refused", "refused"]);
            assert_eq!(log.text(), before, "a forked child called the driver");
            a.ok("write 0 whole");
            assert_eq!(b.ok("read 0 5"), "whole");
            for child in [b, a] {
                child.ok("close");
                assert_eq!(child.ok("leaks"), "nothing left");
            }
        }
    }
}

fn domains() {
    for vendor in Vendor::ALL {
        let [without, with] = ["", "atomics=1"].map(|settings| ChildDriver::fake(vendor).having(settings));
        for (owner, domain) in [(&without, "Device"), (&with, "Both")] {
            let [a, b] = [owner.loaded(), without.loaded()];
            assert_eq!(a.ok("create 0 65536 - -"), format!("65536 PosixFd {domain}"));
            assert_eq!(b.import(0, a.export()).unwrap(), format!("65536 PosixFd {domain}"));
        }
    }
}

/// Uses a copy of the fake driver in which a symbol has another name, as in an old driver.
fn missing_symbol() {
    for (vendor, symbol, need) in [
        (Vendor::Cuda, "cuMemCreate", "CUDA 10.2 (440.33)"),
        (Vendor::Hip, "hipGetDevicePropertiesR0600", "ROCm 6.0"),
    ] {
        let mut bytes = std::fs::read(child_process::fake()).unwrap();
        let needle = [b"\0", symbol.as_bytes(), b"\0"].concat();
        let offsets: Vec<usize> =
            (0..bytes.len() - needle.len()).filter(|&at| bytes[at..].starts_with(&needle)).collect();
        assert!(!offsets.is_empty());
        for at in offsets {
            bytes[at + 1] = b'x';
        }
        let copy = Scratch::new("old.so");
        std::fs::write(&copy.0, bytes).unwrap();
        let error = Driver::load(vendor, Some(&copy.0)).unwrap_err();
        assert!(matches!(&error, DeviceError::Symbol { symbol: found, .. } if *found == symbol), "{error}");
        let text = error.to_string();
        assert!(text.contains(symbol) && text.contains(need) && text.contains("old.so"), "{text}");
    }
}

fn no_library() {
    for vendor in Vendor::ALL {
        let error = Driver::load(vendor, Some("/nowhere/libdriver.so".as_ref())).unwrap_err().to_string();
        assert!(error.starts_with("/nowhere/libdriver.so: ") && error.contains(vendor.env()), "{error}");
        assert_eq!(error.matches("/nowhere").count(), 1, "{error}");
        // A library that is not a driver.
        let error = Driver::load(vendor, Some("libc.so.6".as_ref())).unwrap_err().to_string();
        assert!(error.contains("libc.so.6 has no ") && error.contains("Init;"), "{error}");
    }
}

fn exports_are_checked() {
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC;
    let (left, right) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let export =
        |share| DeviceExport { vendor: Vendor::Hip, len: 1 << 40, domain: AtomicDomain::Both, share };
    export(ShareableHandle::Handle([9; 64])).send(&left).unwrap();
    let DeviceExport { vendor, len, domain, share } = DeviceExport::receive(&right).unwrap();
    assert_eq!((vendor, len, domain), (Vendor::Hip, 1 << 40, AtomicDomain::Both));
    assert!(matches!(share, ShareableHandle::Handle(handle) if handle == [9; 64]));
    let file = std::fs::File::open("/dev/null").unwrap();
    export(ShareableHandle::Descriptor(file.into())).send(&left).unwrap();
    assert!(matches!(DeviceExport::receive(&right).unwrap().share, ShareableHandle::Descriptor(_)));
    let mut bytes = [0; 88];
    bytes[..4].copy_from_slice(b"MTG1");
    for message in [&b"MTG1"[..], &[0; 88], &[1; 200], &bytes] {
        rustix::net::send(&left, message, SendFlags::empty()).unwrap();
        assert!(matches!(DeviceExport::receive(&right), Err(DeviceError::Export)), "{message:?}");
    }

    // An export of another vendor, and a descriptor of something else.
    let [cuda, hip] = Vendor::ALL.map(|vendor| ChildDriver::fake(vendor).loaded());
    cuda.ok("create 0 1 - -");
    let error = hip.import(0, cuda.export()).unwrap_err();
    assert!(error.contains("memory of CUDA, the driver is for HIP"), "{error}");
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = hip.import(0, export(ShareableHandle::Descriptor(file.into()))).unwrap_err();
    assert!(error.contains("hipMemImportFromShareableHandle failed with 1 (invalid argument)"), "{error}");
    // Longer than the exported memory.
    let DeviceExport { share, .. } = cuda.export();
    let longer = DeviceExport { vendor: Vendor::Cuda, len: 1 << 20, domain: AtomicDomain::Device, share };
    let other = ChildDriver::fake(Vendor::Cuda).loaded();
    let error = other.import(0, longer).unwrap_err();
    assert!(error.contains("cuMemMap failed"), "{error}");
    for child in [hip, other] {
        assert_eq!(child.ok("leaks"), "nothing left");
    }
}

/// Makes every rank join, and returns the results.
fn join_all(
    ranks: &[ChildProcess],
    path: &Scratch,
    bytes: &[u64],
    rest: &str,
) -> Vec<Result<String, String>> {
    let (path, count) = (path.0.display(), ranks.len());
    for (rank, (child, bytes)) in ranks.iter().zip(bytes).enumerate() {
        child.send(&format!("world {rank} {count} {path} {bytes} {rest}"));
    }
    ranks.iter().map(ChildProcess::reply).collect()
}

fn worlds() {
    for vendor in Vendor::ALL {
        for sharing in ["descriptor", "handle"] {
            let path = Scratch::new("world");
            let driver = ChildDriver::fake(vendor).having("devices=3");
            let ranks = [driver.loaded(), driver.loaded(), driver.loaded()];
            for joined in join_all(&ranks, &path, &[100_000; 3], &format!("{sharing} 30000")) {
                joined.unwrap();
            }
            for rank in 0..3 {
                let socket = format!("{}.device-{rank}", path.0.display());
                assert!(!std::path::Path::new(&socket).exists(), "{socket} was not removed");
            }
            for (writer, child) in ranks.iter().enumerate() {
                (0..3).for_each(|of| drop(child.ok(&format!("put {of} {} {writer}", 50 + writer))));
            }
            for child in &ranks {
                assert_eq!([0, 1, 2].map(|of| child.ok(&format!("get {of} 50 3"))), ["012"; 3]);
                child.ok("bases");
            }
            ranks.iter().for_each(|child| child.send("barrier"));
            ranks.iter().for_each(|child| drop(child.reply().unwrap()));
            ranks.iter().for_each(|child| child.send("leave"));
            for child in &ranks {
                child.reply().unwrap();
                assert_eq!(child.ok("leaks"), "nothing left");
            }
        }
    }
}

/// Dropping does not synchronize with other ranks, so memory that would end with its owner is kept.
fn dropped_worlds() {
    for vendor in Vendor::ALL {
        for (sharing, left) in [
            ("descriptor", ["nothing left"; 2]),
            ("handle", ["1 allocations, 1 streams", "1 allocations, 1 opened, 2 streams"]),
        ] {
            // HIP has no contexts to count.
            let contexts = |left: &str, count: u32| match (left, vendor) {
                ("nothing left", _) | (_, Vendor::Hip) => left.to_owned(),
                (_, Vendor::Cuda) => format!("{left}, {count} contexts"),
            };
            let path = Scratch::new("world");
            let driver = ChildDriver::fake(vendor).having("devices=2");
            let ranks = [driver.loaded(), driver.loaded()];
            for joined in join_all(&ranks, &path, &[100_000; 2], &format!("{sharing} 30000")) {
                joined.unwrap();
            }
            ranks[0].ok("put 0 7 still-there");
            ranks[1].ok("register 4096 read");
            ranks[1].ok("unregister");
            ranks[0].ok("drop-world");
            assert_eq!(ranks[0].ok("leaks"), contexts(left[0], 1), "{sharing}");
            assert_eq!(ranks[1].ok("get 0 7 11"), "still-there");
            ranks[1].ok("put 0 7 and-written");
            assert_eq!(ranks[1].ok("get 0 7 11"), "and-written");
            if sharing == "handle" {
                assert_eq!(ranks[1].ok("leaks"), contexts(left[1], 2));
            }
            ranks[1].ok("drop-world");
            assert_eq!(ranks[1].ok("leaks"), contexts(left[0], 1), "{sharing}");
        }
    }
}

fn world_with_missing_region() {
    let path = Scratch::new("world");
    let driver = ChildDriver::fake(Vendor::Cuda).having("devices=3");
    let failing = driver.clone().failing("cuMemCreate:1:2");
    let ranks = [driver.loaded(), failing.loaded(), driver.loaded()];
    let results = join_all(&ranks, &path, &[1; 3], "descriptor 1500");
    let error = |rank: usize| results[rank].as_ref().unwrap_err();
    assert!(error(1).starts_with("cuMemCreate failed with 2"), "{results:?}");
    for rank in [0, 2] {
        assert!(error(rank).starts_with("region of rank 1: connect"), "{results:?}");
        assert_eq!(ranks[rank].ok("leaks"), "nothing left");
    }
    // With handles, a rank that has exported its region keeps it: the importer may still have it open.
    let path = Scratch::new("world");
    let failing = driver.clone().failing("cuMemAlloc_v2:1:2");
    let ranks = [driver.loaded(), failing.loaded(), driver.loaded()];
    assert!(join_all(&ranks, &path, &[1; 3], "handle 1500").iter().all(Result::is_err));
    let left = [0, 1, 2].map(|rank| ranks[rank].ok("leaks"));
    assert_eq!(left, ["1 allocations, 1 streams, 1 contexts", "nothing left", "nothing left"]);
    let path = Scratch::new("world");
    let ranks = [driver.loaded(), driver.loaded()];
    let results = join_all(&ranks, &path, &[65_536, 65_537], "descriptor 1500");
    // The first rank that detects it leaves; the other one may get a connection error.
    let lengths =
        ["region of rank 1 has 131072 bytes, ours 65536", "region of rank 0 has 65536 bytes, ours 131072"];
    let mut named = 0;
    for ((rank, result), lengths) in ranks.iter().zip(&results).zip(lengths) {
        let error = result.as_ref().unwrap_err();
        named += usize::from(error.contains(lengths));
        assert!(error.starts_with("region of rank"), "{error}");
        assert_eq!(rank.ok("leaks"), "nothing left");
    }
    assert!(named > 0, "{results:?}");
}

/// Memory that this process maps read-only can be registered only if the device supports it. Memory that it may write
/// can always be registered.
fn read_only_registrations() {
    for (vendor, settings, can) in
        [(Vendor::Cuda, "", true), (Vendor::Cuda, "readonly=0", false), (Vendor::Hip, "", false)]
    {
        let driver = ChildDriver::fake(vendor).having(settings);
        let child = driver.loaded();
        child.ok("create 0 1 - -");
        let view = child.ask("register 4096 view");
        assert_eq!(view.is_ok(), can, "{vendor} {settings}: {view:?}");
        if let Err(error) = view {
            assert!(error.contains("failed with 1 (invalid argument); the memory must be mapped"), "{error}");
        } else {
            child.ok("host-write 100 seen");
            assert_eq!(child.ok("alias-read 100 4"), "seen");
            child.ok("copy-from-host 100 0 4");
            assert_eq!(child.ok("read 0 4"), "seen");
            let error = child.ask("copy-to-host 0 200 4").unwrap_err();
            assert!(
                error.contains("cuMemcpyDtoDAsync_v2 failed with 1"),
                "a write through a read-only registration: {error}"
            );
            child.ok("unregister");
        }
        child.ask("register 4096 view-write").unwrap_err();
        for access in ["read", "write"] {
            child.ok(&format!("register 4096 {access}"));
            child.ok("host-write 0 abc");
            assert_eq!([child.ok("alias-read 0 3"), child.ok("host-read 0 3")], ["abc", "abc"]);
            child.ok("unregister");
        }
        child.ok("close");
        assert_eq!(child.ok("leaks"), "nothing left");
    }
    // A driver that does not have the attribute yet. The attributes before it are those of the region.
    let old = ChildDriver::fake(Vendor::Cuda).failing("cuDeviceGetAttribute:4:1").loaded();
    old.ok("create 0 1 - -");
    old.ok("register 4096 read");
    old.ok("close");
    assert_eq!(old.ok("leaks"), "nothing left");
}

fn registrations_and_forks() {
    for vendor in Vendor::ALL {
        let log = Scratch::new("fork");
        let child = ChildDriver::fake(vendor).logging(&log).loaded();
        child.ok("create 0 1 - -");
        child.ok("register 4096 write");
        let before = log.text();
        assert_eq!(child.ok("fork"), "refused");
        assert_eq!(log.text(), before, "a forked child called the driver");
        child.ok("write 0 abc");
        child.ok("copy-to-host 0 9 3");
        assert_eq!(child.ok("host-read 9 3"), "abc");
        child.ok("close");
        assert_eq!(child.ok("leaks"), "nothing left");
    }
}

/// Misuse that the fake driver must reject with the right code. If it accepted one, the tests above would prove less.
fn fake_driver_rejects_misuse() {
    type Address = unsafe extern "C" fn(u64, usize) -> c_int;
    // SAFETY: the fake driver of this workspace.
    let library: &'static Library =
        Box::leak(Box::new(unsafe { Library::new(child_process::fake()) }.unwrap()));
    macro_rules! call {
        ($name:literal, $type:ty, $($argument:expr),*) => {
            // SAFETY: with the type that the vendor's header has for it, and valid pointers.
            unsafe { library.get::<$type>($name.as_bytes()).unwrap()($($argument),*) }
        };
    }
    const BYTES: usize = 64 << 10;
    let prop: [u64; 4] = [1 | 1 << 32, 1, 0, 0]; // pinned, by descriptor; on device 0
    let access: [c_int; 3] = [1, 0, 3];
    let (mut allocation, mut address, mut context) = (0u64, 0u64, 0usize);
    macro_rules! create {
        ($bytes:expr) => {
            call!(
                "cuMemCreate",
                unsafe extern "C" fn(*mut u64, usize, *const u64, u64) -> c_int,
                &mut allocation,
                $bytes,
                prop.as_ptr(),
                0
            )
        };
    }
    macro_rules! set_access {
        () => {
            call!(
                "cuMemSetAccess",
                unsafe extern "C" fn(u64, usize, *const c_int, usize) -> c_int,
                address,
                BYTES,
                access.as_ptr(),
                1
            )
        };
    }
    macro_rules! map {
        ($bytes:expr) => {
            call!(
                "cuMemMap",
                unsafe extern "C" fn(u64, usize, usize, u64, u64) -> c_int,
                address,
                $bytes,
                0,
                allocation,
                0
            )
        };
    }
    assert_eq!(create!(BYTES), 3, "before cuInit");
    assert_eq!(call!("cuInit", unsafe extern "C" fn(u32) -> c_int, 0), 0);
    assert_eq!(create!(BYTES + 4096), 1, "no multiple of the granularity");
    assert_eq!(map!(BYTES), 1, "mapped before it was created");
    assert_eq!(create!(BYTES), 0);
    type Reserve = unsafe extern "C" fn(*mut u64, usize, usize, u64, u64) -> c_int;
    assert_eq!(call!("cuMemAddressReserve", Reserve, &mut address, BYTES + 1, 0, 0, 0), 1);
    assert_eq!(call!("cuMemAddressReserve", Reserve, &mut address, BYTES, 0, 0, 0), 0);
    assert_eq!(set_access!(), 1, "access before the mapping");
    assert_eq!(map!(BYTES * 2), 1, "mapped with another size");
    assert_eq!(map!(BYTES), 0);
    assert_eq!(map!(BYTES), 1, "mapped twice");
    type Fill = unsafe extern "C" fn(u64, u8, usize, u64) -> c_int;
    type NewStream = unsafe extern "C" fn(*mut u64, u32) -> c_int;
    type Stream = unsafe extern "C" fn(u64) -> c_int;
    let mut stream = 0u64;
    assert_eq!(call!("cuStreamCreate", NewStream, &mut stream, 1), 201, "without a context");
    assert_eq!(call!("cuMemsetD8Async", Fill, address, 0, BYTES, 0), 201, "without a context");
    type SetContext = unsafe extern "C" fn(usize) -> c_int;
    assert_eq!(call!("cuCtxSetCurrent", SetContext, 0x1000), 201, "a context without a reference");
    type Retain = unsafe extern "C" fn(*mut usize, c_int) -> c_int;
    assert_eq!(call!("cuDevicePrimaryCtxRetain", Retain, &mut context, 0), 0);
    assert_eq!(call!("cuCtxSetCurrent", SetContext, context), 0);
    assert_eq!(
        call!("cuStreamCreate", NewStream, &mut stream, 0),
        1,
        "a stream that waits for the legacy one"
    );
    assert_eq!(call!("cuStreamCreate", NewStream, &mut stream, 1), 0);
    assert_eq!(call!("cuMemsetD8Async", Fill, address, 0, BYTES, stream), 1, "without access");
    assert_eq!(set_access!(), 0);
    assert_eq!(call!("cuMemsetD8Async", Fill, address, 0, BYTES, stream), 0);
    assert_eq!(call!("cuMemsetD8Async", Fill, address, 0, BYTES + 1, stream), 1, "beyond the end");
    assert_eq!(call!("cuMemsetD8Async", Fill, address, 0, BYTES, 0), 400, "on the legacy stream");
    assert_eq!(call!("cuStreamDestroy_v2", Stream, stream), 0);
    assert_eq!(call!("cuStreamDestroy_v2", Stream, stream), 400, "destroyed twice");
    assert_eq!(call!("cuMemsetD8Async", Fill, address, 0, BYTES, stream), 400, "on a destroyed stream");
    let mut fd: c_int = -1;
    type Export = unsafe extern "C" fn(*mut c_void, u64, c_int, u64) -> c_int;
    assert_eq!(call!("cuMemExportToShareableHandle", Export, (&raw mut fd).cast(), allocation, 0, 0), 1);
    assert_eq!(call!("cuMemExportToShareableHandle", Export, (&raw mut fd).cast(), allocation, 1, 0), 0);
    let leaks = || {
        let mut text = [0; 512];
        call!("moontide_fake_leaks", unsafe extern "C" fn(*mut u8, usize), text.as_mut_ptr(), text.len());
        std::ffi::CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap().to_owned()
    };
    assert_eq!(leaks(), "1 handles, 1 reservations, 1 mappings, 1 contexts, 1 descriptors");

    // Freeing in the wrong order.
    assert_eq!(call!("cuMemAddressFree", Address, address, BYTES), 1, "freed while it is mapped");
    assert_eq!(call!("cuMemUnmap", Address, address, BYTES / 2), 1, "unmapped with another size");
    type Release = unsafe extern "C" fn(c_int) -> c_int;
    assert_eq!(call!("cuDevicePrimaryCtxRelease_v2", Release, 0), 0);
    assert!(leaks().ends_with("context 0 was released before its memory"), "{}", leaks());
    // Freeing in the right order.
    assert_eq!(call!("cuMemUnmap", Address, address, BYTES), 0);
    assert_eq!(call!("cuMemUnmap", Address, address, BYTES), 1, "unmapped twice");
    assert_eq!(call!("cuMemAddressFree", Address, address, BYTES * 2), 1, "freed with another size");
    assert_eq!(call!("cuMemAddressFree", Address, address, BYTES), 0);
    type ReleaseHandle = unsafe extern "C" fn(u64) -> c_int;
    assert_eq!(call!("cuMemRelease", ReleaseHandle, allocation), 0);
    assert_eq!(call!("cuMemRelease", ReleaseHandle, allocation), 1, "released twice");
    assert_eq!(call!("cuDevicePrimaryCtxRelease_v2", Release, 0), 201, "released twice");
    // SAFETY: the driver created it for this test.
    unsafe { libc::close(fd) };
    assert_eq!(leaks(), "context 0 was released before its memory");
}
