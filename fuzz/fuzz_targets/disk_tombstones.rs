//! `moontide_fuzz::disk_tombstones` under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::disk_tombstones(data));
