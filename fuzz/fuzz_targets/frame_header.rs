//! `moontide_fuzz::frame_header` under libFuzzer.
#![forbid(unsafe_code)]
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::frame_header(data));
