//! `moontide_fuzz::trailer` under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::trailer(data));
