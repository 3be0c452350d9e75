//! `moontide_fuzz::report_records` under libFuzzer.
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::report_records(data));
