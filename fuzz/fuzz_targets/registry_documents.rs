//! `moontide_fuzz::registry_documents` under libFuzzer.
#![forbid(unsafe_code)]
#![no_main]
libfuzzer_sys::fuzz_target!(|data: &[u8]| moontide_fuzz::registry_documents(data));
