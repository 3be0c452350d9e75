//! Guarantees of every kind of region, tested on each: host memory, devices of the fake driver, and devices of this
//! machine. The tests of real devices are ignored, because CI has none, unless `MOONTIDE_REQUIRE_DEVICE` is `cuda` or
//! `hip`: then the test of that device runs, and fails without one.

mod child_process;
#[path = "../../heap/tests/common/libtest.rs"]
mod libtest;

use std::process::ExitCode;

use child_process::{ChildDriver, ChildProcess, MemoryKind};
use moontide_symmetric::Vendor;

fn main() -> ExitCode {
    let required = std::env::var("MOONTIDE_REQUIRE_DEVICE").unwrap_or_default();
    let devices = [("cuda", "conformance_cuda_device"), ("hip", "conformance_hip_device")];
    let ignored = devices.iter().filter(|(vendor, _)| !required.eq_ignore_ascii_case(vendor));
    let ignored: Vec<&str> = ignored.map(|(_, test)| *test).collect();
    child_process::main(
        &[
            ("conformance_memfd", || {
                check(&Backend::new(ChildDriver::real(MemoryKind::Memfd), "descriptor"))
            }),
            ("conformance_cuda_fake", || check(&Backend::new(ChildDriver::fake(Vendor::Cuda), "descriptor"))),
            ("conformance_cuda_fake_handles", || {
                check(&Backend::new(ChildDriver::fake(Vendor::Cuda), "handle"))
            }),
            ("conformance_hip_fake", || check(&Backend::new(ChildDriver::fake(Vendor::Hip), "descriptor"))),
            ("conformance_hip_fake_handles", || {
                check(&Backend::new(ChildDriver::fake(Vendor::Hip), "handle"))
            }),
            ("conformance_cuda_device", || on_this_machine(Vendor::Cuda)),
            ("conformance_hip_device", || on_this_machine(Vendor::Hip)),
        ],
        &ignored,
        libtest::run,
    )
}

struct Backend {
    driver: ChildDriver,
    sharing: &'static str,
    /// Whether the memory outlives its owner: with a descriptor it does.
    outlives: bool,
}

impl Backend {
    fn new(driver: ChildDriver, sharing: &'static str) -> Backend {
        Backend { driver, sharing, outlives: sharing == "descriptor" }
    }

    fn child(&self) -> ChildProcess {
        self.driver.loaded()
    }

    fn owner(&self) -> (ChildProcess, u64) {
        let owner = self.child();
        let reply = owner.ok(&format!("create 0 {BYTES} - {}", self.sharing));
        let len = reply.split(' ').next().unwrap().parse().unwrap();
        (owner, len)
    }
}

/// A multiple of the host's pages and of no device's granularity.
const BYTES: u64 = 3 * 4096;

/// Runs the checks with both kinds of sharing, on the machine's own first device.
fn on_this_machine(vendor: Vendor) {
    let driver = ChildDriver::real(MemoryKind::Device(vendor));
    let found = {
        let child = driver.start();
        child.ask("load").and_then(|version| Ok((version, child.ask("devices")?)))
    };
    match found {
        Ok((version, devices)) if devices != "[]" => {
            println!("{vendor} {version}: {devices}");
            if devices.contains("has_descriptors: true") {
                check(&Backend::new(driver.clone(), "descriptor"));
            } else {
                println!("only handles are tested: no device can share memory by descriptor");
            }
            check(&Backend::new(driver, "handle"));
        }
        found => {
            let reason = found.err().unwrap_or_else(|| "the driver has no device".to_owned());
            panic!("no {vendor} device: {reason}");
        }
    }
}

fn check(backend: &Backend) {
    region_is_zeroed_and_long_enough(backend);
    writes_are_visible_to_all(backend);
    owner_and_importer_report_the_same(backend);
    importer_exit_does_not_affect_others(backend);
    owner_exit_does_not_affect_importers(backend);
    forked_child_cannot_use_region(backend);
    nothing_is_left(backend);
    empty_region_is_rejected(backend);
    if matches!(backend.driver.kind, MemoryKind::Device(_)) {
        device_copies_move_bytes(backend);
        registration_shares_host_memory(backend);
        partial_page_registration_is_rejected(backend);
    }
}

fn region_is_zeroed_and_long_enough(backend: &Backend) {
    let (owner, len) = backend.owner();
    assert!(len >= BYTES && len.is_multiple_of(4096), "{len}");
    for offset in [0, BYTES - 16, len - 16] {
        assert_eq!(owner.ok(&format!("read {offset} 16")), "\0".repeat(16));
    }
}

fn writes_are_visible_to_all(backend: &Backend) {
    let (owner, len) = backend.owner();
    let importers = [backend.child(), backend.child()];
    for importer in &importers {
        importer.import(0, owner.export()).unwrap();
    }
    let all = [&owner, &importers[0], &importers[1]];
    for (number, writer) in all.iter().enumerate() {
        let (text, offset) = (format!("by-{number}"), len - 16 * (number as u64 + 1));
        writer.ok(&format!("write {offset} {text}"));
        for reader in all {
            assert_eq!(reader.ok(&format!("read {offset} 4")), text);
        }
    }
    // Importers close first: see `HandleType::Ipc`.
    importers.iter().for_each(|importer| drop(importer.ok("close")));
    owner.ok("close");
}

fn owner_and_importer_report_the_same(backend: &Backend) {
    let (owner, importer) = (backend.child(), backend.child());
    let description = owner.ok(&format!("create 0 {BYTES} - {}", backend.sharing));
    assert_eq!(importer.import(0, owner.export()).unwrap(), description);
    let domain = description.split(' ').next_back().unwrap();
    match backend.driver.kind {
        MemoryKind::Memfd => assert_eq!(domain, "Host"),
        MemoryKind::Device(_) => assert!(["Device", "Both"].contains(&domain), "{domain}"),
    }
    importer.ok("close");
}

fn importer_exit_does_not_affect_others(backend: &Backend) {
    let (owner, _) = backend.owner();
    let (closed, killed, remaining) = (backend.child(), backend.child(), backend.child());
    for importer in [&closed, &killed, &remaining] {
        importer.import(0, owner.export()).unwrap();
    }
    closed.ok("write 0 one");
    closed.ok("close");
    killed.ok("write 3 two");
    killed.kill();
    for reader in [&owner, &remaining] {
        assert_eq!(reader.ok("read 0 6"), "onetwo");
    }
    remaining.ok("close");
    owner.ok("close");
}

fn owner_exit_does_not_affect_importers(backend: &Backend) {
    if !backend.outlives {
        return;
    }
    for is_killed in [false, true] {
        let (owner, _) = backend.owner();
        let importer = backend.child();
        importer.import(0, owner.export()).unwrap();
        owner.ok("write 0 still");
        if is_killed {
            owner.kill();
        } else {
            owner.ok("close");
        }
        assert_eq!(importer.ok("read 0 5"), "still");
        importer.ok("write 0 there");
        assert_eq!(importer.ok("read 0 5"), "there");
    }
}

fn forked_child_cannot_use_region(backend: &Backend) {
    let (owner, _) = backend.owner();
    let importer = backend.child();
    importer.import(0, owner.export()).unwrap();
    assert_eq!([owner.ok("fork"), importer.ok("fork")], ["refused", "refused"]);
    owner.ok("write 0 mine");
    assert_eq!(importer.ok("read 0 4"), "mine");
    importer.ok("close");
}

/// Compares from the second round on: the first may open descriptors that a driver keeps.
fn nothing_is_left(backend: &Backend) {
    let (owner, importer) = (backend.child(), backend.child());
    let mut before = None;
    for _ in 0..3 {
        owner.ok(&format!("create 0 {BYTES} - {}", backend.sharing));
        importer.import(0, owner.export()).unwrap();
        importer.ok("drop");
        owner.ok("drop");
        let now = [owner.ok("fds"), importer.ok("fds")];
        assert_eq!(*before.get_or_insert_with(|| now.clone()), now);
    }
}

fn empty_region_is_rejected(backend: &Backend) {
    let error = backend.child().ask(&format!("create 0 0 - {}", backend.sharing)).unwrap_err();
    assert!(error.contains("region of 0 bytes"), "{error}");
}

fn device_copies_move_bytes(backend: &Backend) {
    let (owner, len) = backend.owner();
    let importer = backend.child();
    importer.import(0, owner.export()).unwrap();
    owner.ok("write 0 there");
    importer.ok(&format!("copy 0 {} 5", len - 5));
    importer.ok("synchronize");
    assert_eq!(owner.ok(&format!("read {} 5", len - 5)), "there");
    owner.ok("write 100 and-back");
    importer.ok("copy-back 100 200 8");
    assert_eq!([owner.ok("read 200 8"), owner.ok("read 0 5")], ["and-back", "there"]);
    // An empty copy succeeds, also at the end.
    importer.ok(&format!("copy 0 {len} 0"));
    importer.ok("concurrent-copies 3 20");
    importer.ok("close");
    owner.ok("close");
}

fn registration_shares_host_memory(backend: &Backend) {
    let (owner, _) = backend.owner();
    for access in ["read", "write"] {
        owner.ok(&format!("register 8192 {access}"));
        for text in ["first", "again"] {
            owner.ok(&format!("host-write 5000 {text}"));
            owner.ok("copy-from-host 5000 10 5");
            assert_eq!(owner.ok("read 10 5"), text, "{access}");
        }
        if access == "write" {
            owner.ok("write 20 back");
            owner.ok("copy-to-host 20 8188 4");
            assert_eq!([owner.ok("host-read 8188 4"), owner.ok("host-read 5000 5")], ["back", "again"]);
        }
        // One registration at a time, ended in both ways.
        owner.ok(if access == "read" { "unregister" } else { "close" });
    }
}

fn partial_page_registration_is_rejected(backend: &Backend) {
    let child = backend.child();
    for (skip, bytes) in [(0, 0), (0, 100), (1, 4096), (0, 4097)] {
        let error = child.ask(&format!("register-part {skip} {bytes}")).unwrap_err();
        assert!(error.contains("register whole pages of"), "{error}");
    }
}
