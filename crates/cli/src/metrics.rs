//! What nodes and transfer engines count, as Prometheus metrics: `layercake_transfer_…` (T8) and
//! `layercake_node_…`.

use std::fmt;
use std::sync::{Arc, Weak};

use layercake_store::Node;
use layercake_transport::{Engine, OperationStats};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::TypedMetric;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

/// Reads an engine's counters when somebody scrapes.
#[derive(Debug)]
struct EngineCollector(Engine);

/// Registers the counters of `engine`.
pub(crate) fn register_engine(registry: &mut Registry, engine: &Engine) {
    registry
        .sub_registry_with_prefix("layercake_transfer")
        .register_collector(Box::new(EngineCollector(engine.clone())));
}

type Read = fn(&OperationStats) -> u64;

/// What is counted per transport and direction.
const OPERATIONS: [(&str, &str, Read); 5] = [
    (
        "bytes",
        "Bytes that arrived, for batches of this process",
        |s| s.bytes,
    ),
    (
        "pieces",
        "Pieces that arrived, for batches of this process",
        |s| s.pieces,
    ),
    (
        "batches",
        "Batches that ended, whatever became of their pieces",
        |s| s.batches,
    ),
    ("served_bytes", "Bytes moved on behalf of peers", |s| {
        s.served_bytes
    }),
    (
        "served_pieces",
        "Operations carried out on behalf of peers",
        |s| s.served_pieces,
    ),
];

type ReadTime = fn(&OperationStats) -> f64;

const TIMES: [(&str, &str, ReadTime); 3] = [
    (
        "queue_seconds",
        "Time until a batch's first byte was handed on, summed",
        |s| s.queue.as_secs_f64(),
    ),
    (
        "wire_seconds",
        "Time from there to a batch's end, summed",
        |s| s.wire.as_secs_f64(),
    ),
    (
        "copy_seconds",
        "Time that threads spent moving the bytes, summed",
        |s| s.copy.as_secs_f64(),
    ),
];

impl Collector for EngineCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let stats = self.0.stats();
        let labels = |operation: &OperationStats| {
            [
                ("transport", operation.transport.name()),
                ("direction", operation.direction.name()),
            ]
        };
        for (name, help, read) in OPERATIONS {
            let mut family =
                encoder.encode_descriptor(name, help, None, ConstCounter::<u64>::TYPE)?;
            for operation in &stats.operations {
                let value = ConstCounter::new(read(operation));
                value.encode(family.encode_family(&labels(operation))?)?;
            }
        }
        for (name, help, read) in TIMES {
            let mut family =
                encoder.encode_descriptor(name, help, None, ConstCounter::<f64>::TYPE)?;
            for operation in &stats.operations {
                let value = ConstCounter::new(read(operation));
                value.encode(family.encode_family(&labels(operation))?)?;
            }
        }
        let mut family = encoder.encode_descriptor(
            "failures",
            "Pieces that failed, by transport and error",
            None,
            ConstCounter::<u64>::TYPE,
        )?;
        for operation in &stats.operations {
            for (error, count) in &operation.errors {
                let labels = [
                    ("transport", operation.transport.name()),
                    ("direction", operation.direction.name()),
                    ("code", error.name()),
                ];
                ConstCounter::new(*count).encode(family.encode_family(&labels)?)?;
            }
        }
        for (error, count) in &stats.unrouted {
            let labels = [
                ("transport", "none"),
                ("direction", "none"),
                ("code", error.name()),
            ];
            ConstCounter::new(*count).encode(family.encode_family(&labels)?)?;
        }
        for (name, help, value) in [
            (
                "security_refusals",
                "Operations of peers that were not entitled to them",
                stats.security_refusals,
            ),
            (
                "malformed",
                "Connections closed because a peer broke the protocol",
                stats.malformed,
            ),
            (
                "untrusted",
                "Connections closed because a peer could not prove the token",
                stats.untrusted,
            ),
            (
                "turned_away",
                "Connections closed because there were too many",
                stats.turned_away,
            ),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(
                name,
                help,
                None,
                counter.metric_type(),
            )?)?;
        }
        for (name, help, value) in [
            (
                "tcp_connections",
                "TCP connections that are open",
                stats.tcp_connections,
            ),
            (
                "regions",
                "Regions of memory that are registered",
                stats.regions,
            ),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        Ok(())
    }
}

/// Reads a node's numbers when somebody scrapes.
#[derive(Debug)]
struct NodeCollector(Weak<Node>);

/// Registers the numbers of `node`, for as long as it lives.
pub(crate) fn register_node(registry: &mut Registry, node: &Arc<Node>) {
    registry
        .sub_registry_with_prefix("layercake_node")
        .register_collector(Box::new(NodeCollector(Arc::downgrade(node))));
}

impl Collector for NodeCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(node) = self.0.upgrade() else {
            return Ok(());
        };
        let stats = node.stats();
        for (name, help, value) in [
            (
                "capacity_bytes",
                "Bytes that the node is to lend",
                stats.capacity_bytes,
            ),
            (
                "mounted_bytes",
                "Bytes that the master has",
                stats.mounted_bytes,
            ),
            (
                "segments",
                "Segments that the master has",
                stats.mounted_segments,
            ),
            (
                "fences_waiting",
                "Fences that wait for a writer that stands still",
                stats.fences_waiting,
            ),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        for (name, help, value) in [
            (
                "segments_replaced",
                "Segments brought anew because the master forgot their predecessors",
                stats.replaced_segments,
            ),
            (
                "fences",
                "Places that late writers were kept out of",
                stats.fences_done,
            ),
        ] {
            let counter = ConstCounter::new(value);
            counter.encode(encoder.encode_descriptor(
                name,
                help,
                None,
                counter.metric_type(),
            )?)?;
        }
        Ok(())
    }
}
