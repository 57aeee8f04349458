//! Compiles the `.proto` files with a compiler written in Rust, so that no `protoc` is needed.

use std::path::Path;

/// Messages that are written by hand, and the fields that they are written for.
const BY_HAND: [(&str, &[&str]); 2] = [
    (
        "PutStarted",
        &[
            "1 refusal Enum Optional",
            "2 generation Uint64 Optional",
            "3 replicas Message Repeated",
        ],
    ),
    (
        "GetStarted",
        &[
            "1 refusal Enum Optional",
            "2 size Uint64 Optional",
            "3 replicas Message Repeated",
            "4 fingerprint Bytes Optional",
            "5 layout_id Fixed64 Optional",
            "6 early_token Fixed64 Optional",
            "7 early_slots Uint32 Optional",
            "8 left_out Uint32 Optional",
        ],
    ),
];

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
    for (name, written_for) in BY_HAND {
        let mut messages = descriptors.file.iter().flat_map(|file| &file.message_type);
        let message = messages.find(|message| message.name() == name);
        let fields = message.map_or(&[][..], |message| &message.field);
        let fields = fields.iter().map(|field| {
            let (kind, label) = (field.r#type(), field.label());
            format!("{} {} {kind:?} {label:?}", field.number(), field.name())
        });
        if !fields.clone().eq(written_for.iter().copied()) {
            let fields: Vec<_> = fields.collect();
            return Err(format!(
                "`{name}` has fields {fields:?}, and `src/wire/started.rs` is written for {written_for:?}"
            )
            .into());
        }
    }
    tonic_prost_build::configure()
        .bytes(".")
        // Written by hand, since a start answers with one of them for each key.
        .extern_path(".layercake.v1.PutStarted", "started::PutStarted")
        .extern_path(".layercake.v1.GetStarted", "started::GetStarted")
        .compile_fds(descriptors)?;
    Ok(())
}
