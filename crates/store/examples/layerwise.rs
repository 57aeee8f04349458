//! Saves one block layer by layer and loads it again, as an engine would.
//!
//! ```text
//! layercake master & layercake node &
//! cargo run -p layercake-store --example layerwise
//! ```

use std::error::Error;

use layercake_protocol::key::ObjectKey;
use layercake_protocol::layout::{LayerSpec, ObjectLayout};
use layercake_protocol::replica::{PutStart, Recency, ReplicateConfig};
use layercake_store::link::LinkConfig;
use layercake_store::{
    ClientConfig, GetOptions, PutSession, Range, RangeRead, RangeWrite, StoreClient,
};
use layercake_transport::{Access, Engine, EngineConfig, Memory};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    // One engine per process moves the bytes; the link talks to the master.
    let engine = Engine::start(EngineConfig::default())?;
    let link = LinkConfig::new("127.0.0.1:50061", "layerwise-example");
    let store = StoreClient::connect(link, engine.clone(), ClientConfig::default()).await?;

    // Four layers with K and V; the last one has a longer V. Offsets follow from the lengths.
    let layers = (0..4).map(|layer| {
        let v = if layer == 3 { 128 << 10 } else { 64 << 10 };
        LayerSpec::new(layer, [("k", 64 << 10), ("v", v)])
    });
    let layout = ObjectLayout::new(layers)?;
    let cache = engine.register(
        vec![7; usize::try_from(layout.object_len())?].into(),
        Access::LocalOnly,
    )?;

    let key = ObjectKey::new("example-model@0123456789abcdef@0")?;
    let start = PutStart::new(key.clone(), layout.object_len());
    let mut sessions = store
        .start_puts(vec![start], &ReplicateConfig::default(), Recency::default())
        .await;
    match sessions.remove(0) {
        Ok(session) => save(&store, &layout, &cache, session).await?,
        Err(refused) => println!("not saved: {refused}"),
    }

    let mut sessions = store.start_gets(&[key], GetOptions::default()).await;
    let session = sessions.remove(0)?;
    for layer in 0..layout.layer_count() {
        let range = layout.layer_range(layer).ok_or("no such layer")?;
        let local = cache.slice(range.start(), range.len())?;
        let read = RangeRead {
            session: &session,
            ranges: vec![Range {
                offset: range.start(),
                local,
            }],
        };
        let done = store.read_ranges(vec![read]).await.remove(0)?;
        println!(
            "layer {layer}: {} bytes, {} of them verified",
            done.bytes, done.verified
        );
    }
    store.end_gets(vec![session]).await;
    Ok(())
}

/// Writes every layer when it is there, then commits.
async fn save(
    store: &StoreClient,
    layout: &ObjectLayout,
    cache: &Memory,
    session: PutSession,
) -> Result<(), Box<dyn Error>> {
    for layer in 0..layout.layer_count() {
        // Here the model computes the layer.
        let range = layout.layer_range(layer).ok_or("no such layer")?;
        let local = cache.slice(range.start(), range.len())?;
        let write = RangeWrite {
            session: &session,
            ranges: vec![Range {
                offset: range.start(),
                local,
            }],
        };
        store.write_ranges(vec![write]).await.remove(0)?;
    }
    store.end_puts(vec![session]).await.remove(0)?;
    println!("saved {} bytes", layout.object_len());
    Ok(())
}
