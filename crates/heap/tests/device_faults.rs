//! Every call to the driver fails once, in the owner and in an importer: the error names the call, the next attempt works,
//! and nothing is left behind, neither at the driver nor among the descriptors.

#[path = "common/libtest.rs"]
mod libtest;
mod puppet;

use std::collections::HashMap;
use std::process::ExitCode;

use moontide_heap::Vendor;
use puppet::{Puppet, Puppeteer, Scratch};

fn main() -> ExitCode {
    puppet::main(
        &[
            ("device_owner_survives_every_failure_cuda", || owners(Vendor::Cuda)),
            ("device_owner_survives_every_failure_hip", || owners(Vendor::Hip)),
            ("device_importer_survives_every_failure_cuda", || importers(Vendor::Cuda)),
            ("device_importer_survives_every_failure_hip", || importers(Vendor::Hip)),
        ],
        libtest::run,
    )
}

const WISHES: [&str; 2] = ["descriptor", "handle"];

fn owners(vendor: Vendor) {
    for wish in WISHES {
        let make = format!("create 0 100000 - {wish}");
        every_failure(vendor, &|puppet| puppet.ask(&make));
    }
}

fn importers(vendor: Vendor) {
    for wish in WISHES {
        let owner = Puppeteer::fake(vendor).loaded();
        owner.ok(&format!("create 0 100000 - {wish}"));
        every_failure(vendor, &|puppet| puppet.import(0, owner.offer()));
        owner.ok("close");
        assert_eq!(owner.ok("left"), "nothing left", "{wish}");
    }
}

/// What a puppet does from its beginning to its end, each step until it works. Returns what was refused.
fn life(puppet: &Puppet, begin: &dyn Fn(&Puppet) -> Result<String, String>, end: &str) -> Vec<String> {
    let mut refused = Vec::new();
    let mut until_it_works = |step: &dyn Fn() -> Result<String, String>| {
        loop {
            match step() {
                Ok(answer) => return answer,
                Err(error) => refused.push(error),
            }
            assert!(refused.len() < 3, "one failure was planned: {refused:?}");
        }
    };
    until_it_works(&|| puppet.ask("load"));
    until_it_works(&|| begin(puppet));
    until_it_works(&|| puppet.ask("write 3 abc"));
    until_it_works(&|| puppet.ask("copy 3 9 3"));
    until_it_works(&|| puppet.ask("window 4096 read"));
    until_it_works(&|| puppet.ask("show 5 def"));
    until_it_works(&|| puppet.ask("take 5 12 3"));
    until_it_works(&|| puppet.ask("settle"));
    assert_eq!(until_it_works(&|| puppet.ask("read 9 6")), "abcdef");
    until_it_works(&|| puppet.ask(end));
    refused
}

fn every_failure(vendor: Vendor, begin: &dyn Fn(&Puppet) -> Result<String, String>) {
    let log = Scratch::new("plan");
    let clean = Puppeteer::fake(vendor).logging(&log).start();
    assert_eq!(life(&clean, begin, "close"), [""; 0]);
    let descriptors = clean.ok("fds");
    let mut counts: HashMap<String, u32> = HashMap::new();
    let mut plans = Vec::new();
    for line in log.text().lines() {
        let name = line.split_once(' ').unwrap().1.split_once('(').unwrap().0.to_owned();
        let count = counts.entry(name.clone()).or_insert(0);
        *count += 1;
        plans.push((name, *count));
    }
    assert!(plans.len() > 15, "{plans:?}");
    let last = plans.iter().rposition(|(name, _)| name.contains("MemcpyDtoH")).unwrap();
    for (number, (call, nth)) in plans.iter().enumerate() {
        // Dropping says nothing, so it is looked at where the end begins.
        let ends: &[&str] = if number > last { &["close", "drop"] } else { &["close"] };
        for end in ends {
            let trace = Scratch::new("trace");
            let stage = Puppeteer::fake(vendor).logging(&trace).failing(&format!("{call}:{nth}:304"));
            let puppet = stage.start();
            let refused = life(&puppet, begin, end);
            let context = || format!("{call}:{nth} and {end}\n{}", trace.text());
            if *end == "close" {
                assert_eq!(refused.len(), 1, "{refused:?} {}", context());
                let told = format!(
                    "{call} failed with 304 (OS call failed or operation not supported on this OS); "
                );
                assert!(refused[0].starts_with(&told) && refused[0].len() > told.len() + 20, "{refused:?}");
            }
            assert_eq!(puppet.ok("left"), "nothing left", "{}", context());
            assert_eq!(puppet.ok("fds"), descriptors, "{}", context());
            let failures = trace.text().lines().filter(|line| !line.ends_with("= 0")).count();
            assert_eq!(failures, 1, "the driver found nothing else to refuse: {}", context());
        }
    }
}
