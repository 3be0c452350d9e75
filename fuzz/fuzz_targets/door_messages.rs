//! `moontide_fuzz::door_messages` under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::door_messages(data));
