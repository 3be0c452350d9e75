//! The part of libtest's command line that `cargo test` and `cargo nextest` need, for tests that start themselves
//! again and whose children must start without libtest: filters, `--exact`, `--skip`, `--list`, `--ignored`,
//! `--include-ignored`.

#![allow(unreachable_pub, missing_docs, reason = "part of test programs")]

use std::process::ExitCode;

/// Runs or lists the selected tests; those whose names are in `ignored` only on request, as libtest does. A failure is
/// a panic, which ends the process with an error.
pub fn run(tests: &[(&'static str, fn())], ignored: &[&str], arguments: &[String]) -> ExitCode {
    let (mut filters, mut skipped) = (Vec::new(), Vec::new());
    let (mut list, mut exact, mut only_ignored, mut include_ignored) = (false, false, false, false);
    let mut words = arguments.iter().map(String::as_str);
    while let Some(word) = words.next() {
        match word {
            "--list" => list = true,
            "--exact" => exact = true,
            "--ignored" => only_ignored = true,
            "--include-ignored" => include_ignored = true,
            "--skip" => skipped.extend(words.next()),
            "--format" | "--test-threads" | "--color" => drop(words.next()),
            flag if flag.starts_with('-') => {}
            filter => filters.push(filter),
        }
    }
    let fits = |name: &str, filter: &&str| if exact { name == *filter } else { name.contains(filter) };
    let selected = |name: &str| {
        let is_ignored = ignored.contains(&name);
        (is_ignored || !only_ignored)
            && (!is_ignored || only_ignored || include_ignored || list)
            && (filters.is_empty() || filters.iter().any(|filter| fits(name, filter)))
            && !skipped.iter().any(|filter| fits(name, filter))
    };
    for (name, test) in tests.iter().filter(|(name, _)| selected(name)) {
        if list {
            println!("{name}: test");
            continue;
        }
        test();
        println!("test {name} ... ok");
    }
    ExitCode::SUCCESS
}
