//! Every call to the driver fails once, in the owner and in an importer: the error names the call, the next attempt
//! succeeds, and nothing is leaked, neither at the driver nor among the descriptors.

mod child_process;
#[path = "../../heap/tests/common/libtest.rs"]
mod libtest;

use std::collections::HashMap;
use std::process::ExitCode;

use child_process::{ChildDriver, ChildProcess, Scratch};
use moontide_symmetric::Vendor;

fn main() -> ExitCode {
    child_process::main(
        &[
            ("device_owner_survives_every_failure_cuda", || owners(Vendor::Cuda)),
            ("device_owner_survives_every_failure_hip", || owners(Vendor::Hip)),
            ("device_importer_survives_every_failure_cuda", || importers(Vendor::Cuda)),
            ("device_importer_survives_every_failure_hip", || importers(Vendor::Hip)),
        ],
        &[],
        libtest::run,
    )
}

const SHARINGS: [&str; 2] = ["descriptor", "handle"];

fn owners(vendor: Vendor) {
    for sharing in SHARINGS {
        let create = format!("create 0 100000 - {sharing}");
        every_failure(vendor, &|child| child.ask(&create));
    }
}

fn importers(vendor: Vendor) {
    for sharing in SHARINGS {
        let owner = ChildDriver::fake(vendor).loaded();
        owner.ok(&format!("create 0 100000 - {sharing}"));
        every_failure(vendor, &|child| child.import(0, owner.export()));
        owner.ok("close");
        assert_eq!(owner.ok("leaks"), "nothing left", "{sharing}");
    }
}

/// Runs a child from its start to its end, and repeats each step until it succeeds. Returns the errors.
fn run(
    child: &ChildProcess,
    begin: &dyn Fn(&ChildProcess) -> Result<String, String>,
    end: &str,
) -> Vec<String> {
    let mut errors = Vec::new();
    let mut retry = |step: &dyn Fn() -> Result<String, String>| {
        loop {
            match step() {
                Ok(reply) => return reply,
                Err(error) => errors.push(error),
            }
            assert!(errors.len() < 3, "more failures than injected: {errors:?}");
        }
    };
    retry(&|| child.ask("load"));
    retry(&|| begin(child));
    retry(&|| child.ask("write 3 abc"));
    retry(&|| child.ask("copy 3 9 3"));
    retry(&|| child.ask("register 4096 read"));
    retry(&|| child.ask("host-write 5 def"));
    retry(&|| child.ask("copy-from-host 5 12 3"));
    retry(&|| child.ask("synchronize"));
    assert_eq!(retry(&|| child.ask("read 9 6")), "abcdef");
    retry(&|| child.ask(end));
    errors
}

fn every_failure(vendor: Vendor, begin: &dyn Fn(&ChildProcess) -> Result<String, String>) {
    let log = Scratch::new("calls");
    let clean = ChildDriver::fake(vendor).logging(&log).start();
    assert_eq!(run(&clean, begin, "close"), [""; 0]);
    let descriptors = clean.ok("fds");
    let mut counts: HashMap<String, u32> = HashMap::new();
    let mut faults = Vec::new();
    for line in log.text().lines() {
        let name = line.split_once(' ').unwrap().1.split_once('(').unwrap().0.to_owned();
        let count = counts.entry(name.clone()).or_insert(0);
        *count += 1;
        faults.push((name, *count));
    }
    assert!(faults.len() > 15, "{faults:?}");
    let last = faults.iter().rposition(|(name, _)| name.contains("MemcpyDtoH")).unwrap();
    for (number, (call, nth)) in faults.iter().enumerate() {
        // Dropping returns no error, so it is tested only for the calls of the end.
        let ends: &[&str] = if number > last { &["close", "drop"] } else { &["close"] };
        for end in ends {
            let trace = Scratch::new("trace");
            let driver = ChildDriver::fake(vendor).logging(&trace).failing(&format!("{call}:{nth}:304"));
            let child = driver.start();
            let errors = run(&child, begin, end);
            let context = || format!("{call}:{nth} and {end}\n{}", trace.text());
            if *end == "close" {
                assert_eq!(errors.len(), 1, "{errors:?} {}", context());
                let expected = format!(
                    "{call} failed with 304 (OS call failed or operation not supported on this OS); "
                );
                let has_hint = errors[0].len() > expected.len() + 20;
                assert!(errors[0].starts_with(&expected) && has_hint, "{errors:?}");
            }
            assert_eq!(child.ok("leaks"), "nothing left", "{}", context());
            assert_eq!(child.ok("fds"), descriptors, "{}", context());
            let failures = trace.text().lines().filter(|line| !line.ends_with("= 0")).count();
            assert_eq!(failures, 1, "the driver rejected other calls, too: {}", context());
        }
    }
}
