//! `moontide_fuzz::control_messages` under libFuzzer.
#![forbid(unsafe_code)]
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::control_messages(data));
