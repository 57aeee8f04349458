//! Objects with a replica on each of two nodes, of which one is killed.

use layercake_connector::options::{FailurePolicy, Role};
use layercake_store::link::{LinkConfig, MasterLink};
use rustix::process::Signal;

use crate::bench::{Bench, END_WITHIN, Point, Saboteur, Use};
use crate::common::Cluster;

/// Puts a replica of everything on each node; how many objects there are.
fn copy_everything(bench: &Bench, cluster: &Cluster) -> usize {
    let store = bench.link(&cluster.address, Use::PLAIN).store;
    let names = ["node-1".to_owned(), "node-2".to_owned()];
    bench.runtime.block_on(async {
        let config = LinkConfig::new(cluster.address.clone(), "tool");
        let tool = MasterLink::connect(config).await.expect("it is up");
        let page = tool.list("", 1000, None).await.expect("a list");
        for object in &page.objects {
            let copied = store.copy_replicas(&object.key, &names).await;
            copied.expect("there is room");
            let stat = store.stat(&object.key).await.expect("it is there");
            assert_eq!(stat.object.replicas.len(), 2);
        }
        page.objects.len()
    })
}

/// Under the policy `fail`: whatever could not be read would end its request.
#[test]
fn a_node_that_is_killed_costs_nothing_where_another_has_a_replica() {
    for (ranks, layers) in [(1, true), (4, true), (2, false)] {
        let bench = Bench::new(ranks);
        // Whole objects have no layers to be told of.
        let points = [Point::LookUp, Point::Start, Point::Load];
        for point in points.into_iter().take(if layers { 3 } else { 2 }) {
            for node in 0..2 {
                let what = format!("{ranks} ranks, layers {layers}, {point:?}, node {node}");
                let cluster = Cluster::start(2, "16MiB", "");
                bench.fill(&cluster.address);
                let stored = bench.asks[0].1.len() as u64 / u64::from(bench.config.block_size);
                let objects = copy_everything(&bench, &cluster) as u64;
                assert_eq!(objects, stored * u64::from(ranks), "{what}");

                let victim = cluster.nodes[node].pid();
                let saboteur = Saboteur::new(&bench, point, victim, Signal::KILL);
                let how = Use {
                    role: Role::Consumer,
                    policy: FailurePolicy::Fail,
                    ..Use::PLAIN
                };
                let mut link = bench.link(&cluster.address, how);
                link.options.layerwise = layers;
                let (engine, found) = bench.sabotaged(link, &saboteur, &bench.asks[..1], &what);
                assert!(saboteur.has_struck(), "{what}");
                assert!(!found[0].failed, "{what}");
                assert_eq!(found[0].cuts, 0, "{what}: nothing is recomputed");
                let tokens = stored * u64::from(bench.config.block_size);
                assert_eq!(found[0].loaded_tokens as u64, tokens, "{what}");
                engine.close(END_WITHIN).expect("everything ends");
            }
        }
    }
}
