//! Compiles `control.proto` without `protoc`: protox is a compiler in Rust, so the build needs no other tool.

#![forbid(unsafe_code)]

use std::error::Error;

fn main() -> Result<(), Box<dyn Error>> {
    let (file, root) = ("proto/moontide/v1/control.proto", "proto");
    println!("cargo::rerun-if-changed={root}");
    let descriptors = protox::compile([file], [root])?;
    tonic_prost_build::configure()
        // `Bytes` fields of a message decoded from `Bytes` refer to it: packed batches are not copied.
        .bytes(".")
        // Counts elements before decoding.
        .codec_path("crate::BoundedCodec")
        // Connections and servers belong to the crates that own sockets.
        .build_transport(false)
        .compile_fds(descriptors)?;
    Ok(())
}
