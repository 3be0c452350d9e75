//! Compiles `control.proto` without `protoc`: protox is a compiler in Rust, so a checkout builds by itself.

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let (file, root) = ("proto/moontide/v1/control.proto", "proto");
    println!("cargo::rerun-if-changed={root}");
    let descriptors = protox::compile([file], [root])?;
    tonic_prost_build::configure()
        // `Bytes` fields of a message decoded from `Bytes` point into it: packed batches are not copied.
        .bytes(".")
        // Elements are counted before they are decoded.
        .codec_path("crate::BoundedCodec")
        // Connecting and serving belong to the crates that own sockets.
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
