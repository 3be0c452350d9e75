//! `moontide_fuzz::transfer_ops` under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::transfer_ops(data));
