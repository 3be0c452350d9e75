//! Runs every target on its corpus and on random changes of it, without libFuzzer: for stable compilers and CI.
//!
//! `MOONTIDE_FUZZ_ITERATIONS` sets the number of changes per target; the default is 20,000, limited to three seconds.
//! `MOONTIDE_SEED` repeats a run.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{env, fs};

use moontide_fuzz::{MESSAGES, SESSION_BODIES, TARGETS, Target, accepted_frame, accepted_message};
use moontide_proto::FrameKind;
use moontide_rt::SplitMix64;

const ITERATIONS_DEFAULT: u64 = 20_000;
const TIME_MAX: Duration = Duration::from_secs(3);

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} must be a number, not {text:?}")))
}

/// Returns the inputs of a target with their file names.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let Ok(files) = fs::read_dir(folder("corpus").join(target)) else { return vec![] };
    let mut inputs: Vec<_> = files
        .map(|file| file.unwrap())
        .map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap()))
        .collect();
    inputs.sort(); // the order of a directory varies; a seed must repeat
    inputs
}

#[test]
fn targets_never_panic_on_corpus() {
    for (name, target) in TARGETS {
        let inputs = corpus(name);
        assert!(!inputs.is_empty(), "target {name} has no corpus");
        for (file, input) in inputs {
            run(*target, &input, || format!("corpus/{name}/{file}"));
        }
    }
}

/// A seed that its target rejects tests nothing beyond the first check.
#[test]
fn corpus_contains_every_message_and_frame_kind() {
    let messages: Vec<_> =
        corpus("control_messages").iter().filter_map(|(_, input)| accepted_message(input)).collect();
    for name in MESSAGES {
        assert!(messages.iter().any(|(accepted, _)| accepted == name), "no input is a {name}");
    }
    for body in SESSION_BODIES {
        assert!(
            messages.iter().any(|(_, found)| found.as_ref() == Some(body)),
            "no session message has a {body}"
        );
    }
    let frames: Vec<_> =
        corpus("frame_header").iter().filter_map(|(_, input)| accepted_frame(input)).collect();
    for kind in FrameKind::ALL {
        assert!(frames.contains(kind), "no input is a frame of kind {kind:?}");
    }
}

#[test]
fn targets_never_panic_on_randomly_changed_corpus() {
    let seed = number("MOONTIDE_SEED").unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64)
    });
    let wanted = number("MOONTIDE_FUZZ_ITERATIONS");
    let iterations = wanted.unwrap_or(ITERATIONS_DEFAULT);
    println!("MOONTIDE_SEED={seed} MOONTIDE_FUZZ_ITERATIONS={iterations}");
    for (name, target) in TARGETS {
        let inputs: Vec<Vec<u8>> = corpus(name).into_iter().map(|(_, input)| input).collect();
        assert!(!inputs.is_empty(), "target {name} has no corpus");
        let mut random = Random(SplitMix64::new(seed));
        let started = Instant::now();
        let out_of_time = || wanted.is_none() && started.elapsed() > TIME_MAX;
        for iteration in (0..iterations).take_while(|_| !out_of_time()) {
            let input = random.change(&inputs);
            run(*target, &input, || format!("{name}, MOONTIDE_SEED={seed}, iteration {iteration}"));
        }
    }
}

#[test]
fn target_list_matches_files_and_manifest() {
    let listed: BTreeSet<String> = TARGETS.iter().map(|(name, _)| name.to_string()).collect();
    let files: BTreeSet<String> = fs::read_dir(folder("fuzz_targets"))
        .unwrap()
        .map(|file| file.unwrap().path().file_stem().unwrap().to_str().unwrap().to_string())
        .collect();
    assert_eq!(listed, files, "TARGETS and fuzz_targets/ must name the same targets");
    assert_eq!(listed.len(), TARGETS.len(), "a target is listed twice");
    let manifest = fs::read_to_string(folder("Cargo.toml")).unwrap();
    for name in listed {
        assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name} is not a binary");
        let body = fs::read_to_string(folder("fuzz_targets").join(format!("{name}.rs"))).unwrap();
        assert!(body.contains(&format!("moontide_fuzz::{name}(data)")), "{name}.rs runs another target");
    }
}

/// Runs a target. Prints the input if it fails.
fn run(target: Target, input: &[u8], origin: impl Fn() -> String) {
    if let Err(panic) = std::panic::catch_unwind(|| target(input)) {
        let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
        eprintln!("failed on {}: {hex}", origin());
        std::panic::resume_unwind(panic);
    }
}

/// Random changes of inputs.
struct Random(SplitMix64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number in `0..bound`; 0 if `bound` is 0.
    fn below(&mut self, bound: usize) -> usize {
        if bound == 0 { 0 } else { self.0.index(bound) }
    }

    /// Returns one of the inputs with one to four changes.
    fn change(&mut self, inputs: &[Vec<u8>]) -> Vec<u8> {
        let mut input = inputs[self.below(inputs.len())].clone();
        for _ in 0..=self.below(4) {
            match self.below(5) {
                0 if !input.is_empty() => {
                    let bit = self.below(input.len() * 8);
                    input[bit / 8] ^= 1 << (bit % 8);
                }
                1 => input.truncate(self.below(input.len() + 1)),
                2 => {
                    let other = &inputs[self.below(inputs.len())];
                    let from = self.below(other.len() + 1);
                    input.truncate(self.below(input.len() + 1));
                    input.extend_from_slice(&other[from..]);
                }
                3 => self.overwrite(&mut input),
                _ => {
                    let at = self.below(input.len() + 1);
                    let byte = self.next() as u8;
                    input.insert(at, byte);
                }
            }
        }
        input
    }

    /// Overwrites 1, 2, 4 or 8 bytes with an integer, often one at a limit.
    fn overwrite(&mut self, input: &mut [u8]) {
        let interesting =
            [0, 1, 0x7f, 0x80, 0xff, 0x1000, 0xffff, 1 << 31, u32::MAX.into(), 1 << 40, u64::MAX];
        let value = if self.below(3) == 0 { self.next() } else { interesting[self.below(interesting.len())] };
        let width = 1 << self.below(4);
        if let Some(last) = input.len().checked_sub(width) {
            let at = self.below(last + 1);
            input[at..at + width].copy_from_slice(&value.to_le_bytes()[..width]);
        }
    }
}
