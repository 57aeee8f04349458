//! Engines that are to share blocks, and can't.

use layercake_connector::ConnectorError;
use layercake_engine::EngineError;
use layercake_engine::run::{Engine, EngineConfig};
use serde_json::json;

use crate::cluster::{Cluster, PATIENCE, config};

#[test]
fn an_engine_that_differs_from_its_group_is_refused_before_its_first_request() {
    let cluster = Cluster::start(8 << 20);
    let options = json!({"sharing_group": "chat"});
    let start = |config: &EngineConfig| Engine::with_store(config, &cluster.link(&options));
    let first = start(&config()).expect("the first");
    let other = EngineConfig {
        block_size: 8,
        ..config()
    };
    let refused = start(&other).expect_err("it differs");
    assert!(
        matches!(
            refused,
            EngineError::Connector(ConnectorError::Sharing { .. })
        ),
        "{refused}"
    );
    assert!(refused.to_string().contains("block_size"), "{refused}");
    // Any thread may start one that may block, and close it.
    let blocking = cluster.link(&options);
    let runtime = blocking.runtime.clone();
    let same = runtime.spawn_blocking(move || {
        let engine = Engine::with_store(&config(), &blocking)?;
        engine.close(PATIENCE)
    });
    let same = runtime.block_on(same).expect("no panic");
    same.expect("as the first");
    first.close(PATIENCE).expect("everything ends");
}
