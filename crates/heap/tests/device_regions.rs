//! Regions in the memory of a device that does not exist: processes that make and import them by the fake driver, which
//! checks order and arguments and keeps a log.

#[path = "common/libtest.rs"]
mod libtest;
mod puppet;

use std::ffi::{c_int, c_void};
use std::process::ExitCode;

use libloading::os::unix::Library;
use moontide_heap::{AtomicDomain, DeviceError, DeviceOffer, Driver, Share, Vendor};
use puppet::{Puppet, Puppeteer, Scratch};

fn main() -> ExitCode {
    puppet::main(
        &[
            ("device_bytes_are_seen_by_all_at_their_own_addresses", bytes_are_seen_by_all),
            ("device_memory_is_reached_by_copies_alone", memory_is_reached_by_copies),
            ("device_calls_come_in_the_documented_order", calls_come_in_order),
            ("device_handles_stand_in_where_descriptors_are_missing", handles_stand_in),
            ("device_descriptors_go_to_old_hip_by_address", old_hip_takes_addresses),
            ("device_of_the_caller_is_put_back", the_callers_device_is_put_back),
            ("device_peers_that_cannot_access_are_refused", peers_that_cannot_access),
            ("device_memory_that_is_full_says_so", full_memory_says_so),
            ("device_importer_that_dies_takes_nothing_along", importer_dies),
            ("device_owner_that_dies_leaves_descriptors_valid", owner_dies),
            ("device_regions_do_not_cross_a_fork", fork),
            ("device_domain_is_declared_and_travels", domains),
            ("device_library_without_a_symbol_is_refused_by_name", missing_symbol),
            ("device_library_that_is_none_says_how_to_name_one", no_library),
            ("device_offers_are_checked", offers_are_checked),
            ("device_worlds_map_all_regions_and_translate", worlds),
            ("device_worlds_name_the_rank_that_has_no_region", worlds_with_a_gap),
            ("device_copies_of_many_threads_keep_apart", copies_of_many_threads),
            ("device_copies_that_cannot_be_waited_for_say_so", copies_without_an_end),
            ("device_windows_need_no_more_than_reading", windows_to_be_read),
            ("device_windows_do_not_cross_a_fork", windows_and_forks),
            ("device_worlds_that_are_dropped_keep_what_others_may_use", worlds_dropped),
            ("device_fake_driver_complains_about_wrong_orders", the_fake_complains),
        ],
        libtest::run,
    )
}

fn bytes_are_seen_by_all() {
    for vendor in Vendor::ALL {
        let log = Scratch::new("seen");
        let stage = Puppeteer::fake(vendor).having("devices=2").logging(&log);
        let [a, b, c] = [stage.loaded(), stage.loaded(), stage.loaded()];
        assert_eq!(a.ok("create 0 100000 1 -"), "131072 Descriptor Device");
        assert_eq!(a.ok("read 99990 3"), "\0\0\0");
        b.import(0, a.offer()).unwrap();
        c.import(1, a.offer()).unwrap();
        a.ok("write 70000 from-a");
        assert_eq!([b.ok("read 70000 6"), c.ok("read 70000 6")], ["from-a", "from-a"]);
        b.ok("write 131066 from-b");
        assert_eq!([a.ok("read 131066 6"), c.ok("read 131066 6")], ["from-b", "from-b"]);
        c.ok("write 0 from-c");
        assert_eq!([a.ok("read 0 6"), b.ok("read 0 6")], ["from-c", "from-c"]);
        // The reservation is the process's own choice; with address randomisation no two agree.
        let addresses = [a.ok("address"), b.ok("address"), c.ok("address")];
        assert!(addresses[0] != addresses[1] || addresses[1] != addresses[2], "{addresses:?}");
        for puppet in [c, a, b] {
            puppet.ok("close");
            assert_eq!(puppet.ok("left"), "nothing left");
            puppet.finish();
        }
        assert_eq!(log.text().matches("exit: nothing left").count(), 3, "{}", log.text());
    }
}

/// Everything that a region does works on memory that processors cannot touch; a processor that does touch it dies. Without
/// `blind`, on the same driver, it finds the bytes.
fn memory_is_reached_by_copies() {
    let stages =
        Vendor::ALL.map(|vendor| [(vendor, "blind=1", "signal 11"), (vendor, "blind=0", "found 65")]);
    for (vendor, settings, touched) in stages.into_iter().flatten() {
        for wish in ["descriptor", "handle"] {
            let stage = Puppeteer::fake(vendor).having(settings);
            let [a, b] = [stage.loaded(), stage.loaded()];
            a.ok(&format!("create 0 100000 - {wish}"));
            b.import(0, a.offer()).unwrap();
            for (puppet, other) in [(&a, &b), (&b, &a)] {
                assert_eq!(puppet.ok("read 99000 4"), "\0\0\0\0");
                puppet.ok("write 0 ABCDEFGH");
                assert_eq!([puppet.ok("read 0 8"), other.ok("read 0 8")], ["ABCDEFGH"; 2]);
                puppet.ok("copy 0 70000 8");
                puppet.ok("copy-back 70002 80000 4");
                assert_eq!([other.ok("read 70000 8"), other.ok("read 80000 4")], ["ABCDEFGH", "CDEF"]);
                puppet.ok("window 4096 write");
                puppet.ok("show 7 shown");
                puppet.ok("take 7 90000 5");
                puppet.ok("give 70000 4088 8");
                assert_eq!([other.ok("read 90000 5"), puppet.ok("look 4088 8")], ["shown", "ABCDEFGH"]);
                assert_eq!(puppet.ok("touch"), touched, "{vendor} {wish} {settings}");
            }
            for puppet in [b, a] {
                puppet.ok("close");
                assert_eq!(puppet.ok("left"), "nothing left");
            }
        }
    }
}

/// The names of the calls in a log.
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
        let question = if vendor == Vendor::Cuda { "DeviceGetAttribute" } else { "" };
        let window = format!(
            "DeviceGet {enter} {question} {host}Register{v2} {host}GetDevicePointer{v2} {leave} \
             {again} {sync} {host}Unregister {leave} {release}"
        );
        let copy = |way: &str| {
            let question = if way == "DtoD" { "PointerGetAttribute" } else { "" };
            format!("{again} {question} Memcpy{way}Async{v2} StreamSynchronize {leave}")
        };

        let [made, imported] = [Scratch::new("made"), Scratch::new("imported")];
        let owner = Puppeteer::fake(vendor).logging(&made).loaded();
        owner.ok("create 0 1 - -");
        let importer = Puppeteer::fake(vendor).logging(&imported).loaded();
        importer.import(0, owner.offer()).unwrap();
        for message in [
            "write 0 abc",
            "read 0 3",
            "copy 0 8 3",
            "copy-back 8 16 3",
            "settle",
            "window 4096 read",
            "shut",
            "close",
        ] {
            importer.ok(message);
        }
        owner.ok("close");
        let attributes = "DeviceGetAttribute DeviceGetAttribute DeviceGetAttribute";
        assert_eq!(
            calls(&made),
            expected(format!(
                "Init {version} DeviceGet {enter} {attributes} {stream} MemGetAllocationGranularity MemCreate \
                 MemAddressReserve MemMap MemSetAccess MemsetD8Async StreamSynchronize \
                 MemExportToShareableHandle {leave} {end}"
            ))
        );
        assert_eq!(
            calls(&imported),
            expected(format!(
                "Init {version} DeviceGet {enter} {stream} MemGetAllocationGranularity \
                 MemImportFromShareableHandle MemAddressReserve MemMap MemSetAccess {leave} \
                 {} {} {} {} {again} {sync} {leave} {window} {end}",
                copy("HtoD"),
                copy("DtoH"),
                copy("DtoD"),
                copy("DtoD"),
            ))
        );
    }
}

fn copies_of_many_threads() {
    for vendor in Vendor::ALL {
        let puppet = Puppeteer::fake(vendor).loaded();
        puppet.ok("create 0 100000 - -");
        puppet.ok("crowd 4 50");
        puppet.ok("close");
        assert_eq!(puppet.ok("left"), "nothing left");
    }
}

/// A wait that fails once is asked again before the bytes are given back; the copy then is over, and what failed is told. A
/// driver that never answers, as after an error that stays, is told in other words.
fn copies_without_an_end() {
    for (vendor, wait) in [(Vendor::Cuda, "cuStreamSynchronize"), (Vendor::Hip, "hipStreamSynchronize")] {
        let log = Scratch::new("waits");
        // The first wait is for the zeros.
        let once = Puppeteer::fake(vendor).logging(&log).failing(&format!("{wait}:2:700")).loaded();
        once.ok("create 0 1 - -");
        let error = once.ask("write 0 abc").unwrap_err();
        assert!(error.starts_with(&format!("{wait} failed with 700")) && !error.contains("end this process"));
        assert_eq!(once.ok("read 0 3"), "abc");
        let waits = calls(&log).iter().filter(|call| *call == wait).count();
        assert_eq!(waits, 4, "zeros, the copy, the copy again, the reading: {}", log.text());
        once.ok("close");
        assert_eq!(once.ok("left"), "nothing left");

        let never = Puppeteer::fake(vendor).loaded();
        never.ok("create 0 1 - -");
        never.ok("break");
        for message in ["write 0 abc", "read 0 3", "copy 0 8 3"] {
            let error = never.ask(message).unwrap_err();
            assert!(error.contains("failed with 700") && error.contains("end this process"), "{error}");
        }
    }
}

fn handles_stand_in() {
    for (vendor, settings, wish) in [
        (Vendor::Cuda, "vmm=0", "-"),
        (Vendor::Cuda, "fd=0", "-"),
        (Vendor::Hip, "vmm=0", "-"),
        (Vendor::Cuda, "", "handle"),
        (Vendor::Hip, "", "handle"),
    ] {
        let log = Scratch::new("handles");
        let stage = Puppeteer::fake(vendor).having(settings).logging(&log);
        let [a, b, c] = [stage.loaded(), stage.loaded(), stage.loaded()];
        // Whole blocks: nobody else's bytes are opened with it.
        assert_eq!(a.ok(&format!("create 0 100000 - {wish}")), "2097152 Handle Device");
        let offer = a.offer();
        assert!(matches!(offer.share, Share::Handle(_)));
        b.import(0, offer).unwrap();
        c.import(0, a.offer()).unwrap();
        a.ok("write 5 from-a");
        assert_eq!([b.ok("read 5 6"), c.ok("read 5 6")], ["from-a", "from-a"]);
        c.ok("write 2097146 from-c");
        assert_eq!([a.ok("read 2097146 6"), b.ok("read 2097146 6")], ["from-c", "from-c"]);
        for puppet in [b, c, a] {
            puppet.ok("close");
            puppet.finish();
        }
        assert_eq!(log.text().matches("exit: nothing left").count(), 3, "{}", log.text());
        assert!(!calls(&log).iter().any(|call| call.ends_with("MemCreate")));
    }
}

fn old_hip_takes_addresses() {
    let stage = Puppeteer::fake(Vendor::Hip).having("version=60241133");
    let [a, b] = [stage.loaded(), stage.start()];
    assert_eq!(b.ok("load"), "6.2");
    a.ok("create 0 1 - -");
    b.import(0, a.offer()).unwrap();
    a.ok("write 0 old");
    assert_eq!(b.ok("read 0 3"), "old");
}

fn the_callers_device_is_put_back() {
    for vendor in Vendor::ALL {
        let stage = Puppeteer::fake(vendor).having("devices=2");
        let [a, b] = [stage.loaded(), stage.loaded()];
        for puppet in [&a, &b] {
            puppet.ok("adopt 1");
        }
        let before = a.ok("current");
        assert_ne!(before, "0");
        a.ok("create 0 1 - -");
        b.import(0, a.offer()).unwrap();
        b.ok("write 0 x");
        for (puppet, message) in [(&a, "read 0 1"), (&b, "close"), (&a, "close")] {
            puppet.ok(message);
            assert_eq!(puppet.ok("current"), before, "after {message}");
        }
        // Also when something went wrong in between.
        let failing =
            stage.failing(if vendor == Vendor::Cuda { "cuMemMap:1" } else { "hipMemMap:1" }).loaded();
        failing.ok("adopt 1");
        failing.ask("create 0 1 - -").unwrap_err();
        assert_eq!(failing.ok("current"), before);
    }
}

fn peers_that_cannot_access() {
    for vendor in Vendor::ALL {
        let stage = Puppeteer::fake(vendor).having("devices=3,peers=0-1");
        let [a, b] = [stage.loaded(), stage.loaded()];
        let error = a.ask("create 0 1 2 -").unwrap_err();
        assert!(error.contains("MemSetAccess failed with 101 (invalid device ordinal)"), "{error}");
        assert!(error.contains("moontide doctor"), "{error}");
        assert_eq!(a.ok("left"), "nothing left");
        a.ok("create 0 1 1 -");
        let error = b.import(2, a.offer()).unwrap_err();
        assert!(error.contains("MemSetAccess"), "{error}");
        assert_eq!(b.ok("left"), "nothing left");
        b.import(1, a.offer()).unwrap();
        let error = b.import(9, a.offer()).unwrap_err();
        assert!(error.contains("DeviceGet failed with 101"), "{error}");
    }
}

fn full_memory_says_so() {
    let stage = Puppeteer::fake(Vendor::Cuda).having("memory=131072").loaded();
    let error = stage.ask("create 0 131073 - -").unwrap_err();
    assert!(
        error.starts_with("cuMemCreate failed with 2 (out of memory); the device's memory is full"),
        "{error}"
    );
    let error = stage.ask("create 0 0 - -").unwrap_err();
    assert!(error.contains("a region of 0 bytes"), "{error}");
    assert_eq!(stage.ok("left"), "nothing left");
}

fn importer_dies() {
    for vendor in Vendor::ALL {
        for wish in ["descriptor", "handle"] {
            let stage = Puppeteer::fake(vendor);
            let [a, b] = [stage.loaded(), stage.loaded()];
            a.ok(&format!("create 0 1 - {wish}"));
            b.import(0, a.offer()).unwrap();
            b.ok("write 0 last-words");
            b.kill();
            assert_eq!(a.ok("read 0 10"), "last-words");
            let c = stage.loaded();
            c.import(0, a.offer()).unwrap();
            assert_eq!(c.ok("read 0 10"), "last-words");
            c.ok("close");
            a.ok("close");
            assert_eq!(a.ok("left"), "nothing left");
        }
    }
}

fn owner_dies() {
    for vendor in Vendor::ALL {
        let stage = Puppeteer::fake(vendor);
        let [a, b, c] = [stage.loaded(), stage.loaded(), stage.loaded()];
        a.ok("create 0 1 - -");
        b.import(0, a.offer()).unwrap();
        a.ok("write 0 will");
        let on_its_way = a.offer();
        a.kill();
        c.import(0, on_its_way).unwrap();
        assert_eq!(b.ok("read 0 4"), "will");
        b.ok("write 0 heir");
        assert_eq!(c.ok("read 0 4"), "heir");
        for puppet in [b, c] {
            puppet.ok("close");
            assert_eq!(puppet.ok("left"), "nothing left");
        }

        // A handle means nothing without its owner.
        let [a, b] = [stage.loaded(), stage.loaded()];
        a.ok("create 0 1 - handle");
        let on_its_way = a.offer();
        a.kill();
        let error = b.import(0, on_its_way).unwrap_err();
        assert!(error.contains("IpcOpenMemHandle"), "{error}");
        assert_eq!(b.ok("left"), "nothing left");
    }
}

fn fork() {
    for vendor in Vendor::ALL {
        for wish in ["descriptor", "handle"] {
            let log = Scratch::new("fork");
            let stage = Puppeteer::fake(vendor).logging(&log);
            let [a, b] = [stage.loaded(), stage.loaded()];
            a.ok(&format!("create 0 1 - {wish}"));
            b.import(0, a.offer()).unwrap();
            let before = log.text();
            assert_eq!([a.ok("fork"), b.ok("fork")], ["refused", "refused"]);
            assert_eq!(log.text(), before, "a child does not reach the driver");
            a.ok("write 0 whole");
            assert_eq!(b.ok("read 0 5"), "whole");
            for puppet in [b, a] {
                puppet.ok("close");
                assert_eq!(puppet.ok("left"), "nothing left");
            }
        }
    }
}

fn domains() {
    for vendor in Vendor::ALL {
        let [without, with] = ["", "atomics=1"].map(|settings| Puppeteer::fake(vendor).having(settings));
        for (owner, domain) in [(&without, "Device"), (&with, "Both")] {
            let [a, b] = [owner.loaded(), without.loaded()];
            assert_eq!(a.ok("create 0 65536 - -"), format!("65536 Descriptor {domain}"));
            assert_eq!(b.import(0, a.offer()).unwrap(), format!("65536 Descriptor {domain}"));
        }
    }
}

/// A copy of the fake driver in which a symbol has another name: what an old driver looks like.
fn missing_symbol() {
    for (vendor, symbol, need) in [
        (Vendor::Cuda, "cuMemCreate", "CUDA 10.2 (440.33)"),
        (Vendor::Hip, "hipGetDevicePropertiesR0600", "ROCm 6.0"),
    ] {
        let mut bytes = std::fs::read(puppet::fake()).unwrap();
        let needle = [b"\0", symbol.as_bytes(), b"\0"].concat();
        let places: Vec<usize> =
            (0..bytes.len() - needle.len()).filter(|&at| bytes[at..].starts_with(&needle)).collect();
        assert!(!places.is_empty());
        for at in places {
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
        // Some library, but no driver.
        let error = Driver::load(vendor, Some("libc.so.6".as_ref())).unwrap_err().to_string();
        assert!(error.contains("libc.so.6 has no ") && error.contains("Init;"), "{error}");
    }
}

fn offers_are_checked() {
    use rustix::net::{AddressFamily, SendFlags, SocketFlags, SocketType};
    let flags = SocketFlags::CLOEXEC;
    let (left, right) =
        rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None).unwrap();
    let offer = |share| DeviceOffer { vendor: Vendor::Hip, len: 1 << 40, domain: AtomicDomain::Both, share };
    offer(Share::Handle([9; 64])).send(&left).unwrap();
    let DeviceOffer { vendor, len, domain, share } = DeviceOffer::receive(&right).unwrap();
    assert_eq!((vendor, len, domain), (Vendor::Hip, 1 << 40, AtomicDomain::Both));
    assert!(matches!(share, Share::Handle(handle) if handle == [9; 64]));
    let file = std::fs::File::open("/dev/null").unwrap();
    offer(Share::Descriptor(file.into())).send(&left).unwrap();
    assert!(matches!(DeviceOffer::receive(&right).unwrap().share, Share::Descriptor(_)));
    let mut bytes = [0; 88];
    bytes[..4].copy_from_slice(b"MTG1");
    for message in [&b"MTG1"[..], &[0; 88], &[1; 200], &bytes] {
        rustix::net::send(&left, message, SendFlags::empty()).unwrap();
        assert!(matches!(DeviceOffer::receive(&right), Err(DeviceError::Offer)), "{message:?}");
    }

    // Another vendor's, and a descriptor of something else.
    let [cuda, hip] = Vendor::ALL.map(|vendor| Puppeteer::fake(vendor).loaded());
    cuda.ok("create 0 1 - -");
    let error = hip.import(0, cuda.offer()).unwrap_err();
    assert!(error.contains("memory of CUDA, the driver is for HIP"), "{error}");
    let file = std::fs::File::open("/dev/null").unwrap();
    let error = hip.import(0, offer(Share::Descriptor(file.into()))).unwrap_err();
    assert!(error.contains("hipMemImportFromShareableHandle failed with 1 (invalid argument)"), "{error}");
    // Longer than the memory behind it.
    let DeviceOffer { share, .. } = cuda.offer();
    let longer = DeviceOffer { vendor: Vendor::Cuda, len: 1 << 20, domain: AtomicDomain::Device, share };
    let other = Puppeteer::fake(Vendor::Cuda).loaded();
    let error = other.import(0, longer).unwrap_err();
    assert!(error.contains("cuMemMap failed"), "{error}");
    for puppet in [hip, other] {
        assert_eq!(puppet.ok("left"), "nothing left");
    }
}

/// Tells every rank to join, and hears how it went.
fn join_all(ranks: &[Puppet], path: &Scratch, bytes: &[u64], rest: &str) -> Vec<Result<String, String>> {
    let (path, count) = (path.0.display(), ranks.len());
    for (rank, (puppet, bytes)) in ranks.iter().zip(bytes).enumerate() {
        puppet.tell(&format!("world {rank} {count} {path} {bytes} {rest}"));
    }
    ranks.iter().map(Puppet::heard).collect()
}

fn worlds() {
    for vendor in Vendor::ALL {
        for sharing in ["descriptor", "handle"] {
            let path = Scratch::new("world");
            let stage = Puppeteer::fake(vendor).having("devices=3");
            let ranks = [stage.loaded(), stage.loaded(), stage.loaded()];
            for joined in join_all(&ranks, &path, &[100_000; 3], &format!("{sharing} 30000")) {
                joined.unwrap();
            }
            for rank in 0..3 {
                let door = format!("{}.device-{rank}", path.0.display());
                assert!(!std::path::Path::new(&door).exists(), "{door} is left");
            }
            for (writer, puppet) in ranks.iter().enumerate() {
                (0..3).for_each(|of| drop(puppet.ok(&format!("put {of} {} {writer}", 50 + writer))));
            }
            for puppet in &ranks {
                assert_eq!([0, 1, 2].map(|of| puppet.ok(&format!("get {of} 50 3"))), ["012"; 3]);
                puppet.ok("bases");
            }
            ranks.iter().for_each(|puppet| puppet.tell("meet"));
            ranks.iter().for_each(|puppet| drop(puppet.heard().unwrap()));
            ranks.iter().for_each(|puppet| puppet.tell("leave"));
            for puppet in &ranks {
                puppet.heard().unwrap();
                assert_eq!(puppet.ok("left"), "nothing left");
            }
        }
    }
}

/// Dropping asks nobody, so memory that ends with its owner stays.
fn worlds_dropped() {
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
            let stage = Puppeteer::fake(vendor).having("devices=2");
            let ranks = [stage.loaded(), stage.loaded()];
            for joined in join_all(&ranks, &path, &[100_000; 2], &format!("{sharing} 30000")) {
                joined.unwrap();
            }
            ranks[0].ok("put 0 7 still-there");
            ranks[1].ok("window 4096 read");
            ranks[1].ok("shut");
            ranks[0].ok("abandon");
            assert_eq!(ranks[0].ok("left"), contexts(left[0], 1), "{sharing}");
            assert_eq!(ranks[1].ok("get 0 7 11"), "still-there");
            ranks[1].ok("put 0 7 and-written");
            assert_eq!(ranks[1].ok("get 0 7 11"), "and-written");
            if sharing == "handle" {
                assert_eq!(ranks[1].ok("left"), contexts(left[1], 2));
            }
            ranks[1].ok("abandon");
            assert_eq!(ranks[1].ok("left"), contexts(left[0], 1), "{sharing}");
        }
    }
}

fn worlds_with_a_gap() {
    let path = Scratch::new("world");
    let stage = Puppeteer::fake(Vendor::Cuda).having("devices=3");
    let failing = stage.clone().failing("cuMemCreate:1:2");
    let ranks = [stage.loaded(), failing.loaded(), stage.loaded()];
    let told = join_all(&ranks, &path, &[1; 3], "descriptor 1500");
    let error = |rank: usize| told[rank].as_ref().unwrap_err();
    assert!(error(1).starts_with("cuMemCreate failed with 2"), "{told:?}");
    for rank in [0, 2] {
        assert!(error(rank).starts_with("the region of rank 1: reach it"), "{told:?}");
        assert_eq!(ranks[rank].ok("left"), "nothing left");
    }
    // By handle, who has given its region to somebody keeps it: the other may still have it open.
    let path = Scratch::new("world");
    let failing = stage.clone().failing("cuMemAlloc_v2:1:2");
    let ranks = [stage.loaded(), failing.loaded(), stage.loaded()];
    assert!(join_all(&ranks, &path, &[1; 3], "handle 1500").iter().all(Result::is_err));
    let left = [0, 1, 2].map(|rank| ranks[rank].ok("left"));
    assert_eq!(left, ["1 allocations, 1 streams, 1 contexts", "nothing left", "nothing left"]);
    let path = Scratch::new("world");
    let ranks = [stage.loaded(), stage.loaded()];
    let told = join_all(&ranks, &path, &[65_536, 65_537], "descriptor 1500");
    // Who sees it first leaves; the other one may find it gone.
    let lengths = [
        "the region of rank 1 has 131072 bytes, ours 65536",
        "the region of rank 0 has 65536 bytes, ours 131072",
    ];
    let mut named = 0;
    for ((rank, told), lengths) in ranks.iter().zip(&told).zip(lengths) {
        let error = told.as_ref().unwrap_err();
        named += usize::from(error.contains(lengths));
        assert!(error.starts_with("the region of rank"), "{error}");
        assert_eq!(rank.ok("left"), "nothing left");
    }
    assert!(named > 0, "{told:?}");
}

/// Memory that this process may only read: where the device knows such windows, and nowhere else. Memory that it may write
/// has windows everywhere.
fn windows_to_be_read() {
    for (vendor, settings, can) in
        [(Vendor::Cuda, "", true), (Vendor::Cuda, "readonly=0", false), (Vendor::Hip, "", false)]
    {
        let stage = Puppeteer::fake(vendor).having(settings);
        let puppet = stage.loaded();
        puppet.ok("create 0 1 - -");
        let view = puppet.ask("window 4096 view");
        assert_eq!(view.is_ok(), can, "{vendor} {settings}: {view:?}");
        if let Err(error) = view {
            assert!(error.contains("failed with 1 (invalid argument); the memory must be mapped"), "{error}");
        } else {
            puppet.ok("show 100 seen");
            assert_eq!(puppet.ok("through 100 4"), "seen");
            puppet.ok("take 100 0 4");
            assert_eq!(puppet.ok("read 0 4"), "seen");
            let error = puppet.ask("give 0 200 4").unwrap_err();
            assert!(
                error.contains("cuMemcpyDtoDAsync_v2 failed with 1"),
                "written, and opened to be read: {error}"
            );
            puppet.ok("shut");
        }
        puppet.ask("window 4096 view-write").unwrap_err();
        for access in ["read", "write"] {
            puppet.ok(&format!("window 4096 {access}"));
            puppet.ok("show 0 abc");
            assert_eq!([puppet.ok("through 0 3"), puppet.ok("look 0 3")], ["abc", "abc"]);
            puppet.ok("shut");
        }
        puppet.ok("close");
        assert_eq!(puppet.ok("left"), "nothing left");
    }
    // A driver that does not know the question yet. The attributes before it are the region's.
    let old = Puppeteer::fake(Vendor::Cuda).failing("cuDeviceGetAttribute:4:1").loaded();
    old.ok("create 0 1 - -");
    old.ok("window 4096 read");
    old.ok("close");
    assert_eq!(old.ok("left"), "nothing left");
}

fn windows_and_forks() {
    for vendor in Vendor::ALL {
        let log = Scratch::new("fork");
        let puppet = Puppeteer::fake(vendor).logging(&log).loaded();
        puppet.ok("create 0 1 - -");
        puppet.ok("window 4096 write");
        let before = log.text();
        assert_eq!(puppet.ok("fork"), "refused");
        assert_eq!(log.text(), before, "a child does not reach the driver");
        puppet.ok("write 0 abc");
        puppet.ok("give 0 9 3");
        assert_eq!(puppet.ok("look 9 3"), "abc");
        puppet.ok("close");
        assert_eq!(puppet.ok("left"), "nothing left");
    }
}

/// The strictness itself: planted mistakes, each of which must be answered with its code. Were one let through, the tests
/// above would prove less than they say.
fn the_fake_complains() {
    type Address = unsafe extern "C" fn(u64, usize) -> c_int;
    // SAFETY: ours.
    let library: &'static Library = Box::leak(Box::new(unsafe { Library::new(puppet::fake()) }.unwrap()));
    macro_rules! call {
        ($name:literal, $type:ty, $($argument:expr),*) => {
            // SAFETY: with the type that the vendor's header has for it, and valid places.
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
    assert_eq!(map!(BYTES), 1, "mapped before it was made");
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
    assert_eq!(call!("cuCtxSetCurrent", SetContext, 0x1000), 201, "a context that nobody retained");
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
    assert_eq!(call!("cuMemsetD8Async", Fill, address, 0, BYTES, stream), 400, "on a stream that is gone");
    let mut fd: c_int = -1;
    type Export = unsafe extern "C" fn(*mut c_void, u64, c_int, u64) -> c_int;
    assert_eq!(call!("cuMemExportToShareableHandle", Export, (&raw mut fd).cast(), allocation, 0, 0), 1);
    assert_eq!(call!("cuMemExportToShareableHandle", Export, (&raw mut fd).cast(), allocation, 1, 0), 0);
    let left = || {
        let mut text = [0; 512];
        call!("moontide_fake_left", unsafe extern "C" fn(*mut u8, usize), text.as_mut_ptr(), text.len());
        std::ffi::CStr::from_bytes_until_nul(&text).unwrap().to_str().unwrap().to_owned()
    };
    assert_eq!(left(), "1 handles, 1 reservations, 1 mappings, 1 contexts, 1 descriptors");

    // The wrong ways down.
    assert_eq!(call!("cuMemAddressFree", Address, address, BYTES), 1, "freed while it is mapped");
    assert_eq!(call!("cuMemUnmap", Address, address, BYTES / 2), 1, "unmapped with another size");
    type Release = unsafe extern "C" fn(c_int) -> c_int;
    assert_eq!(call!("cuDevicePrimaryCtxRelease_v2", Release, 0), 0);
    assert!(left().ends_with("context 0 was released before its memory"), "{}", left());
    // The right one.
    assert_eq!(call!("cuMemUnmap", Address, address, BYTES), 0);
    assert_eq!(call!("cuMemUnmap", Address, address, BYTES), 1, "unmapped twice");
    assert_eq!(call!("cuMemAddressFree", Address, address, BYTES * 2), 1, "freed with another size");
    assert_eq!(call!("cuMemAddressFree", Address, address, BYTES), 0);
    type ReleaseHandle = unsafe extern "C" fn(u64) -> c_int;
    assert_eq!(call!("cuMemRelease", ReleaseHandle, allocation), 0);
    assert_eq!(call!("cuMemRelease", ReleaseHandle, allocation), 1, "released twice");
    assert_eq!(call!("cuDevicePrimaryCtxRelease_v2", Release, 0), 201, "released twice");
    // SAFETY: the driver made it for us.
    unsafe { libc::close(fd) };
    assert_eq!(left(), "context 0 was released before its memory");
}
