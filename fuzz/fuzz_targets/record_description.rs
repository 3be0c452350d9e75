//! `moontide_fuzz::record_description` under libFuzzer.
#![forbid(unsafe_code)]
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::record_description(data));
