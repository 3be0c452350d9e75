//! `moontide_fuzz::world_messages` under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::world_messages(data));
