//! `moontide_fuzz::disk_preamble` under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::disk_preamble(data));
