//! As much of libtest's command line as `cargo test` and `cargo nextest` need, for tests that start themselves again and
//! whose children must start bare: filters, `--exact`, `--skip`, `--list`, `--ignored`.

#![allow(unreachable_pub, missing_docs, reason = "part of test programs")]

use std::process::ExitCode;

/// Runs or lists the tests that are wanted. A failure is a panic, which ends the process with an error.
pub fn run(tests: &[(&'static str, fn())], arguments: &[String]) -> ExitCode {
    let (mut filters, mut skipped) = (Vec::new(), Vec::new());
    let (mut list, mut exact, mut ignored) = (false, false, false);
    let mut words = arguments.iter().map(String::as_str);
    while let Some(word) = words.next() {
        match word {
            "--list" => list = true,
            "--exact" => exact = true,
            "--ignored" => ignored = true,
            "--skip" => skipped.extend(words.next()),
            "--format" | "--test-threads" | "--color" => drop(words.next()),
            flag if flag.starts_with('-') => {}
            filter => filters.push(filter),
        }
    }
    let fits = |name: &str, filter: &&str| if exact { name == *filter } else { name.contains(filter) };
    let wanted = |name: &str| {
        !ignored // there are none
            && (filters.is_empty() || filters.iter().any(|filter| fits(name, filter)))
            && !skipped.iter().any(|filter| fits(name, filter))
    };
    for (name, test) in tests.iter().filter(|(name, _)| wanted(name)) {
        if list {
            println!("{name}: test");
            continue;
        }
        test();
        println!("test {name} ... ok");
    }
    ExitCode::SUCCESS
}
