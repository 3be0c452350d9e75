//! Digest throughput.
fn main() {}
