//! `moontide_fuzz::control_messages` under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::control_messages(data));
