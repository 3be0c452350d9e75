//! The corpus of every target, and random changes of it, without libFuzzer: for stable compilers and CI.
//!
//! `MOONTIDE_FUZZ_ITERATIONS` sets the changes per target; without it there are 20,000, or as many as fit into
//! three seconds. `MOONTIDE_SEED` repeats a run.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{env, fs};

use moontide_fuzz::{BODIES, MESSAGES, TARGETS, Target, accepted_frame, accepted_message};
use moontide_proto::FrameKind;

const ITERATIONS_DEFAULT: u64 = 20_000;
const TIME_MAX: Duration = Duration::from_secs(3);

fn folder(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn number(variable: &str) -> Option<u64> {
    let text = env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|_| panic!("{variable} must be a number, not {text:?}")))
}

/// The inputs of a target, by name of their file.
fn corpus(target: &str) -> Vec<(String, Vec<u8>)> {
    let Ok(files) = fs::read_dir(folder("corpus").join(target)) else { return vec![] };
    let mut inputs: Vec<_> = files
        .map(|file| file.unwrap())
        .map(|file| (file.file_name().into_string().unwrap(), fs::read(file.path()).unwrap()))
        .collect();
    inputs.sort(); // the order of a folder is not the same everywhere; a seed must repeat
    inputs
}

#[test]
fn every_corpus_file_is_harmless() {
    for (name, target) in TARGETS {
        let inputs = corpus(name);
        assert!(!inputs.is_empty(), "target {name} has no corpus");
        for (file, input) in inputs {
            run(*target, &input, || format!("corpus/{name}/{file}"));
        }
    }
}

/// A seed that its own target refuses tests nothing behind the first check.
#[test]
fn every_message_and_every_frame_is_accepted_once() {
    let messages: Vec<_> =
        corpus("control_messages").iter().filter_map(|(_, input)| accepted_message(input)).collect();
    for name in MESSAGES {
        assert!(messages.iter().any(|(accepted, _)| accepted == name), "no input is a {name}");
    }
    for body in BODIES {
        assert!(messages.iter().any(|(_, said)| said.as_ref() == Some(body)), "no session says {body}");
    }
    let frames: Vec<_> =
        corpus("frame_header").iter().filter_map(|(_, input)| accepted_frame(input)).collect();
    for kind in FrameKind::ALL {
        assert!(frames.contains(kind), "no input is a frame of kind {kind:?}");
    }
}

#[test]
fn random_changes_are_harmless() {
    let seed = number("MOONTIDE_SEED").unwrap_or_else(|| {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(1, |since| since.as_nanos() as u64)
    });
    let wanted = number("MOONTIDE_FUZZ_ITERATIONS");
    let iterations = wanted.unwrap_or(ITERATIONS_DEFAULT);
    println!("MOONTIDE_SEED={seed} MOONTIDE_FUZZ_ITERATIONS={iterations}");
    for (name, target) in TARGETS {
        let inputs: Vec<Vec<u8>> = corpus(name).into_iter().map(|(_, input)| input).collect();
        assert!(!inputs.is_empty(), "target {name} has no corpus");
        let mut random = Random(seed);
        let started = Instant::now();
        let out_of_time = || wanted.is_none() && started.elapsed() > TIME_MAX;
        for iteration in (0..iterations).take_while(|_| !out_of_time()) {
            let input = random.change(&inputs);
            run(*target, &input, || format!("{name}, MOONTIDE_SEED={seed}, iteration {iteration}"));
        }
    }
}

#[test]
fn targets_and_files_match() {
    let listed: BTreeSet<String> = TARGETS.iter().map(|(name, _)| name.to_string()).collect();
    let files: BTreeSet<String> = fs::read_dir(folder("fuzz_targets"))
        .unwrap()
        .map(|file| file.unwrap().path().file_stem().unwrap().to_str().unwrap().to_string())
        .collect();
    assert_eq!(listed, files, "TARGETS and fuzz_targets/ must name the same targets");
    assert_eq!(listed.len(), TARGETS.len(), "a target is listed twice");
    let manifest = fs::read_to_string(folder("Cargo.toml")).unwrap();
    for name in listed {
        assert!(manifest.contains(&format!("path = \"fuzz_targets/{name}.rs\"")), "{name} is no binary");
        let body = fs::read_to_string(folder("fuzz_targets").join(format!("{name}.rs"))).unwrap();
        assert!(body.contains(&format!("moontide_fuzz::{name}(data)")), "{name}.rs runs something else");
    }
}

/// Runs a target and says which input was the bad one.
fn run(target: Target, input: &[u8], origin: impl Fn() -> String) {
    if let Err(panic) = std::panic::catch_unwind(|| target(input)) {
        let hex: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
        eprintln!("failed on {}: {hex}", origin());
        std::panic::resume_unwind(panic);
    }
}

/// xorshift64*: the changes need variety, not quality.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 |= u64::from(self.0 == 0);
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// In `0..bound`; 0 if there is nothing to choose from.
    fn below(&mut self, bound: usize) -> usize {
        if bound == 0 { 0 } else { (self.next() >> 16) as usize % bound }
    }

    /// One of the inputs with one to four changes.
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

    /// An integer of 1, 2, 4 or 8 bytes at any place: those at which decoders go wrong.
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
