//! `moontide_fuzz::disk_tombstones` under libFuzzer.
#![forbid(unsafe_code)]
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::disk_tombstones(data));
