//! Compiles the `.proto` files with a compiler written in Rust, so that no `protoc` is needed.

use std::path::Path;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    // `proto` is a link to the repository's folder, so that the packaged crate holds the files too.
    let root = Path::new("proto");
    let files = [
        "layercake/v1/common.proto",
        "layercake/v1/master.proto",
        "layercake/v1/peer.proto",
    ];
    for file in files {
        println!("cargo:rerun-if-changed={}", root.join(file).display());
    }
    let descriptors = protox::compile(files, [root])?;
    tonic_prost_build::configure()
        .bytes(".")
        // Written by hand, since a start answers with one of them for each key.
        .extern_path(".layercake.v1.PutStarted", "started::PutStarted")
        .extern_path(".layercake.v1.GetStarted", "started::GetStarted")
        .compile_fds(descriptors)?;
    Ok(())
}
