//! `moontide_fuzz::parked_sequence` under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::parked_sequence(data));
