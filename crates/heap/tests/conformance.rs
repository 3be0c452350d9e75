//! What every kind of region promises, said once and run on each: memory of the host, devices by the fake driver, and
//! devices of this machine if it has some. A machine without one says so and goes on; with `MOONTIDE_CONFORMANCE_NEEDS=cuda`
//! (or `hip`) it fails instead, for people who want to know.

#[path = "common/libtest.rs"]
mod libtest;
mod puppet;

use std::process::ExitCode;

use moontide_heap::Vendor;
use puppet::{Puppet, Puppeteer, Stage};

fn main() -> ExitCode {
    puppet::main(
        &[
            ("conformance_memfd", || check(&Backend::new(Puppeteer::real(Stage::Memfd), "descriptor"))),
            ("conformance_cuda_fake", || check(&Backend::new(Puppeteer::fake(Vendor::Cuda), "descriptor"))),
            ("conformance_cuda_fake_handles", || {
                check(&Backend::new(Puppeteer::fake(Vendor::Cuda), "handle"))
            }),
            ("conformance_hip_fake", || check(&Backend::new(Puppeteer::fake(Vendor::Hip), "descriptor"))),
            ("conformance_hip_fake_handles", || check(&Backend::new(Puppeteer::fake(Vendor::Hip), "handle"))),
            ("conformance_cuda_device", || on_this_machine(Vendor::Cuda)),
            ("conformance_hip_device", || on_this_machine(Vendor::Hip)),
        ],
        libtest::run,
    )
}

struct Backend {
    stage: Puppeteer,
    sharing: &'static str,
    /// Whether the memory outlives its owner: by descriptor it does.
    outlives: bool,
}

impl Backend {
    fn new(stage: Puppeteer, sharing: &'static str) -> Backend {
        Backend { stage, sharing, outlives: sharing == "descriptor" }
    }

    fn actor(&self) -> Puppet {
        self.stage.loaded()
    }

    fn owner(&self) -> (Puppet, u64) {
        let owner = self.actor();
        let told = owner.ok(&format!("create 0 {BYTES} - {}", self.sharing));
        let len = told.split(' ').next().unwrap().parse().unwrap();
        (owner, len)
    }
}

/// A multiple of the host's pages and of no device's granularity.
const BYTES: u64 = 3 * 4096;

/// Both ways of sharing, on the machine's own first device.
fn on_this_machine(vendor: Vendor) {
    let stage = Puppeteer::real(Stage::Device(vendor));
    let needed = std::env::var("MOONTIDE_CONFORMANCE_NEEDS").unwrap_or_default();
    let found = {
        let actor = stage.start();
        actor.ask("load").and_then(|version| Ok((version, actor.ask("devices")?)))
    };
    match found {
        Ok((version, devices)) if devices != "[]" => {
            println!("{vendor} {version}: {devices}");
            if devices.contains("has_descriptors: true") {
                check(&Backend::new(stage.clone(), "descriptor"));
            } else {
                println!("the first way is skipped: no device shares by descriptor");
            }
            check(&Backend::new(stage, "handle"));
        }
        found => {
            let why = found.err().unwrap_or_else(|| "the driver has no device".to_owned());
            assert!(!needed.eq_ignore_ascii_case(&vendor.to_string()), "{vendor} is needed: {why}");
            println!("skipped, there is no device of {vendor}: {why}");
        }
    }
}

fn check(backend: &Backend) {
    a_region_is_zeroed_and_long_enough(backend);
    all_see_what_anyone_writes(backend);
    both_sides_say_the_same_of_it(backend);
    an_importers_end_is_nobody_elses(backend);
    an_owners_end_is_nobody_elses(backend);
    a_forked_child_has_none(backend);
    nothing_is_left(backend);
    a_region_without_bytes_is_refused(backend);
    if matches!(backend.stage.stage, Stage::Device(_)) {
        bytes_go_between_addresses_of_devices(backend);
        a_window_shows_what_the_host_has(backend);
        a_window_is_whole_pages(backend);
    }
}

fn a_region_is_zeroed_and_long_enough(backend: &Backend) {
    let (owner, len) = backend.owner();
    assert!(len >= BYTES && len.is_multiple_of(4096), "{len}");
    for offset in [0, BYTES - 16, len - 16] {
        assert_eq!(owner.ok(&format!("read {offset} 16")), "\0".repeat(16));
    }
}

fn all_see_what_anyone_writes(backend: &Backend) {
    let (owner, len) = backend.owner();
    let importers = [backend.actor(), backend.actor()];
    for importer in &importers {
        importer.import(0, owner.offer()).unwrap();
    }
    let all = [&owner, &importers[0], &importers[1]];
    for (number, writer) in all.iter().enumerate() {
        let (text, offset) = (format!("by-{number}"), len - 16 * (number as u64 + 1));
        writer.ok(&format!("write {offset} {text}"));
        for reader in all {
            assert_eq!(reader.ok(&format!("read {offset} 4")), text);
        }
    }
    // Importers let go first: see `Sharing::Handle`.
    importers.iter().for_each(|importer| drop(importer.ok("close")));
    owner.ok("close");
}

fn both_sides_say_the_same_of_it(backend: &Backend) {
    let (owner, importer) = (backend.actor(), backend.actor());
    let told = owner.ok(&format!("create 0 {BYTES} - {}", backend.sharing));
    assert_eq!(importer.import(0, owner.offer()).unwrap(), told);
    let domain = told.split(' ').next_back().unwrap();
    match backend.stage.stage {
        Stage::Memfd => assert_eq!(domain, "Host"),
        Stage::Device(_) => assert!(["Device", "Both"].contains(&domain), "{domain}"),
    }
    importer.ok("close");
}

fn an_importers_end_is_nobody_elses(backend: &Backend) {
    let (owner, _) = backend.owner();
    let (closing, dying, staying) = (backend.actor(), backend.actor(), backend.actor());
    for importer in [&closing, &dying, &staying] {
        importer.import(0, owner.offer()).unwrap();
    }
    closing.ok("write 0 one");
    closing.ok("close");
    dying.ok("write 3 two");
    dying.kill();
    for reader in [&owner, &staying] {
        assert_eq!(reader.ok("read 0 6"), "onetwo");
    }
    staying.ok("close");
    owner.ok("close");
}

fn an_owners_end_is_nobody_elses(backend: &Backend) {
    if !backend.outlives {
        return;
    }
    for dies in [false, true] {
        let (owner, _) = backend.owner();
        let importer = backend.actor();
        importer.import(0, owner.offer()).unwrap();
        owner.ok("write 0 still");
        if dies {
            owner.kill();
        } else {
            owner.ok("close");
        }
        assert_eq!(importer.ok("read 0 5"), "still");
        importer.ok("write 0 there");
        assert_eq!(importer.ok("read 0 5"), "there");
    }
}

fn a_forked_child_has_none(backend: &Backend) {
    let (owner, _) = backend.owner();
    let importer = backend.actor();
    importer.import(0, owner.offer()).unwrap();
    assert_eq!([owner.ok("fork"), importer.ok("fork")], ["refused", "refused"]);
    owner.ok("write 0 mine");
    assert_eq!(importer.ok("read 0 4"), "mine");
    importer.ok("close");
}

/// From the second round on: the first may open what a driver keeps for good.
fn nothing_is_left(backend: &Backend) {
    let (owner, importer) = (backend.actor(), backend.actor());
    let mut before = None;
    for _ in 0..3 {
        owner.ok(&format!("create 0 {BYTES} - {}", backend.sharing));
        importer.import(0, owner.offer()).unwrap();
        importer.ok("drop");
        owner.ok("drop");
        let now = [owner.ok("fds"), importer.ok("fds")];
        assert_eq!(*before.get_or_insert_with(|| now.clone()), now);
    }
}

fn a_region_without_bytes_is_refused(backend: &Backend) {
    let error = backend.actor().ask(&format!("create 0 0 - {}", backend.sharing)).unwrap_err();
    assert!(error.contains("region of 0 bytes"), "{error}");
}

fn bytes_go_between_addresses_of_devices(backend: &Backend) {
    let (owner, len) = backend.owner();
    let importer = backend.actor();
    importer.import(0, owner.offer()).unwrap();
    owner.ok("write 0 there");
    importer.ok(&format!("copy 0 {} 5", len - 5));
    importer.ok("settle");
    assert_eq!(owner.ok(&format!("read {} 5", len - 5)), "there");
    owner.ok("write 100 and-back");
    importer.ok("copy-back 100 200 8");
    assert_eq!([owner.ok("read 200 8"), owner.ok("read 0 5")], ["and-back", "there"]);
    // Nothing is no copy, also at the end.
    importer.ok(&format!("copy 0 {len} 0"));
    importer.ok("crowd 3 20");
    importer.ok("close");
    owner.ok("close");
}

fn a_window_shows_what_the_host_has(backend: &Backend) {
    let (owner, _) = backend.owner();
    for access in ["read", "write"] {
        owner.ok(&format!("window 8192 {access}"));
        for text in ["first", "again"] {
            owner.ok(&format!("show 5000 {text}"));
            owner.ok("take 5000 10 5");
            assert_eq!(owner.ok("read 10 5"), text, "{access}");
        }
        if access == "write" {
            owner.ok("write 20 back");
            owner.ok("give 20 8188 4");
            assert_eq!([owner.ok("look 8188 4"), owner.ok("look 5000 5")], ["back", "again"]);
        }
        // One at a time, and both ways to end it.
        owner.ok(if access == "read" { "shut" } else { "close" });
    }
}

fn a_window_is_whole_pages(backend: &Backend) {
    let actor = backend.actor();
    for (skip, bytes) in [(0, 0), (0, 100), (1, 4096), (0, 4097)] {
        let error = actor.ask(&format!("slit {skip} {bytes}")).unwrap_err();
        assert!(error.contains("give whole pages of"), "{error}");
    }
}
