//! `moontide_fuzz::packed_keys` under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::packed_keys(data));
