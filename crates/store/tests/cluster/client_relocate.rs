//! Copies and moves of replicas.

use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{Recency, ReplicateConfig};
use layercake_store::StoreClient;

use crate::common::{Cluster, KIB, MIB, OneKey as _, Spec, Via, fresh_key, one, pattern, refusal};

const NAMES: [&str; 3] = ["node-0", "node-1", "node-2"];

async fn cluster(via: Via) -> Cluster {
    Spec::new(via)
        .nodes(&[8 * MIB, 8 * MIB, 8 * MIB])
        .start()
        .await
}

fn names(indices: &[usize]) -> Vec<String> {
    indices
        .iter()
        .map(|index| NAMES[*index].to_owned())
        .collect()
}

/// The names of the segments that hold an object, in order.
async fn holders(client: &StoreClient, key: &ObjectKey) -> Vec<String> {
    let detail = client.stat(key).await.expect("it is there");
    let mut names: Vec<_> = detail
        .segments
        .into_iter()
        .map(|segment| segment.name)
        .collect();
    names.sort();
    names
}

async fn store_on(client: &StoreClient, key: &ObjectKey, bytes: &[u8], node: usize) {
    let config = ReplicateConfig {
        preferred_segments: names(&[node]),
        hard_pin: true,
        ..ReplicateConfig::default()
    };
    let put = client.put_bytes(&[(key.clone(), bytes)], &config).await;
    one(put).expect("there is room");
    assert_eq!(holders(client, key).await, names(&[node]));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replicas_are_copied_moved_and_dropped_and_keep_bytes_and_pins() {
    for via in [Via::Shm, Via::Tcp] {
        let cluster = cluster(via).await;
        let (client, reader) = (cluster.client().await, cluster.client().await);
        let (key, bytes) = (fresh_key(), pattern(7, 3 * MIB + 5 * KIB + 3));
        store_on(&client, &key, &bytes, 0).await;
        let open = one(reader
            .start_gets(std::slice::from_ref(&key), Recency::default())
            .await);
        let open = open.expect("complete");

        client
            .copy_replicas(&key, &names(&[1]))
            .await
            .expect("there is room");
        assert_eq!(holders(&client, &key).await, names(&[0, 1]));
        assert_eq!(
            reader.read(&open, 0, open.size()).await.expect("leased").1,
            bytes
        );
        assert_eq!(
            refusal(one(client.remove(std::slice::from_ref(&key), false).await)),
            Refusal::Leased
        );
        assert_eq!(
            one(reader.get(std::slice::from_ref(&key)).await).expect("complete"),
            bytes
        );
        drop(open);

        client
            .move_replica(&key, "node-0", "node-2")
            .await
            .expect("there is room");
        assert_eq!(holders(&client, &key).await, names(&[1, 2]));
        assert_eq!(
            one(reader.get(std::slice::from_ref(&key)).await).expect("complete"),
            bytes
        );
        assert!(
            client
                .stat(&key)
                .await
                .expect("it is there")
                .object
                .hard_pinned
        );

        // Where it is already, nothing happens.
        let before = client
            .stat(&key)
            .await
            .expect("it is there")
            .object
            .generation;
        client
            .copy_replicas(&key, &names(&[1, 2]))
            .await
            .expect("it is there");
        assert_eq!(
            client
                .stat(&key)
                .await
                .expect("it is there")
                .object
                .generation,
            before
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_not_be_copied_stays_as_it_is() {
    let cluster = cluster(Via::Tcp).await;
    let client = cluster.client().await;
    let (key, bytes) = (fresh_key(), pattern(8, 3 * MIB));
    store_on(&client, &key, &bytes, 0).await;
    let nobody = client.copy_replicas(&key, &["nobody".to_owned()]).await;
    assert!(matches!(refusal(nobody), Refusal::InvalidArgument { .. }));
    let elsewhere = client.move_replica(&key, "node-1", "node-2").await;
    assert!(matches!(
        refusal(elsewhere),
        Refusal::InvalidArgument { .. }
    ));
    let missing = client.copy_replicas(&fresh_key(), &names(&[1])).await;
    assert_eq!(refusal(missing), Refusal::NotFound);
    let filler = fresh_key();
    store_on(&client, &filler, &pattern(9, 7 * MIB), 1).await;
    let full = client.copy_replicas(&key, &names(&[1])).await;
    assert!(matches!(refusal(full), Refusal::NoSpace { .. }));
    assert_eq!(holders(&client, &key).await, names(&[0]));
    assert_eq!(client.load(&key).await.expect("complete"), bytes);
    let writing = client.stats().open_puts;
    assert_eq!(writing, 0, "what was begun was given up");
}
