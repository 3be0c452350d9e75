//! `moontide_fuzz::allocator` under libFuzzer.
#![forbid(unsafe_code)]
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::allocator(data));
