//! What becomes of early readers whose writer or replica goes.

use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::replica::Recency;
use layercake_store::{ClientConfig, StoreError};

use crate::common;
use crate::common::helper::{Helper, orders, ready};
use crate::common::{
    KIB, OneKey as _, PATIENCE, Spec, Via, fresh_key, key, one, one_replica, pattern, refusal,
    replicas,
};
use crate::early::{LAYER, LAYERS, early, entry, layer, read_layer, start, write_layer};

/// The place of an object that was given up has another: a reader that knows of rows there gets an error.
// contract: session-19
#[tokio::test]
async fn a_revoke_ends_the_reader_and_a_new_owner_is_never_read() {
    for via in Via::ALL {
        let cluster = Spec::new(via).nodes(&[256 * KIB]).start().await;
        let (writer, reader) = (cluster.client().await, cluster.client().await);
        let name = fresh_key();
        let put = start(&writer, &name).await;
        let get = early(&reader, &name).await.expect("its writer publishes");
        write_layer(&writer, &put, 0).await;
        assert_eq!(
            read_layer(&reader, &get, 0).await.expect("published"),
            layer(0)
        );
        let generation = put.generation();
        let at = put.replicas().next().expect("one").offset;
        let mut waiting = std::pin::pin!(read_layer(&reader, &get, 1));
        tokio::select! {
            biased;
            early = &mut waiting => panic!("layer 1 is not written: {early:?}"),
            revoked = writer.revoke_puts(vec![put]) => one(revoked).expect("idle"),
        }
        let gone = waiting.await.expect_err("nobody will write it");
        assert!(
            matches!(gone, StoreError::WriterGone { generation: of } if of == generation),
            "{via:?}: {gone}"
        );

        // A session that has not heard of it, and finds the place in other hands.
        let again = start(&writer, &name).await;
        assert_eq!(
            again.replicas().next().expect("one").offset,
            at,
            "the place is used again"
        );
        let stale = early(&reader, &name).await.expect("its writer publishes");
        write_layer(&writer, &again, 0).await;
        assert_eq!(
            read_layer(&reader, &stale, 0).await.expect("published"),
            layer(0)
        );
        one(writer.revoke_puts(vec![again]).await).expect("idle");
        let size = LAYERS * LAYER;
        let other = start(&writer, &key("other")).await;
        assert_eq!(
            other.replicas().next().expect("one").offset,
            at,
            "and again"
        );
        writer
            .write(&other, 0, &pattern(55, size))
            .await
            .expect("up");
        let gone = read_layer(&reader, &stale, 0)
            .await
            .expect_err("another's memory");
        assert!(
            matches!(gone, StoreError::WriterGone { .. }),
            "{via:?}: {gone}"
        );
        let again = read_layer(&reader, &stale, 0).await.expect_err("for good");
        assert!(matches!(again, StoreError::WriterGone { .. }), "{again}");
    }
}

// contract: session-19
#[tokio::test]
async fn a_writer_that_was_taken_over_ends_the_reader() {
    let cluster = Spec::new(Via::Shm).start().await;
    let (writer, reader, other) = (
        cluster.client().await,
        cluster.client().await,
        cluster.client().await,
    );
    let key = fresh_key();
    let put = start(&writer, &key).await;
    let get = early(&reader, &key).await.expect("its writer publishes");
    write_layer(&writer, &put, 0).await;
    let mut waiting = std::pin::pin!(read_layer(&reader, &get, 1));
    let entries = vec![entry(&key)];
    let config = one_replica();
    let taken = other.start_upserts(entries, &config, Recency::default());
    let taken = tokio::select! {
        biased;
        early = &mut waiting => panic!("layer 1 is not written: {early:?}"),
        taken = taken => one(taken).expect("an upsert takes over"),
    };
    assert_eq!(refusal(waiting.await), Refusal::Superseded);
    // The new writer has readers of its own.
    let theirs = early(&reader, &key).await.expect("its writer publishes");
    assert_eq!(theirs.generation(), taken.generation());
    write_layer(&other, &taken, 1).await;
    assert_eq!(
        read_layer(&reader, &theirs, 1).await.expect("published"),
        layer(1)
    );
    assert_eq!(
        refusal(read_layer(&reader, &get, 1).await),
        Refusal::Superseded
    );
}

const KILLED: &str = "early_ends::helper_that_publishes_a_layer";

/// Writes the first layer, and waits to be killed.
#[tokio::test]
#[ignore = "a process of its own for the test below"]
async fn helper_that_publishes_a_layer() {
    let orders = orders();
    let (master, name) = orders.split_once(' ').expect("two words");
    let master = master.parse().expect("an address");
    let client = common::client(master, Via::Tcp.engine(), ClientConfig::default()).await;
    let put = start(&client, &key(name)).await;
    write_layer(&client, &put, 0).await;
    ready("").await;
}

// contract: session-19
#[tokio::test]
async fn a_killed_writer_ends_the_reader() {
    let ttl = Duration::from_secs(3);
    let cluster = Spec::new(Via::Tcp).ttl(ttl).start().await;
    let reader = cluster.client().await;
    let name = fresh_key();
    let orders = format!("{} {name}", cluster.master.address);
    let (helper, _) = Helper::start(KILLED, &orders).await;
    let get = early(&reader, &name).await.expect("its writer publishes");
    assert_eq!(
        read_layer(&reader, &get, 0).await.expect("published"),
        layer(0)
    );
    let mut waiting = std::pin::pin!(read_layer(&reader, &get, 1));
    tokio::select! {
        biased;
        early = &mut waiting => panic!("layer 1 is never written: {early:?}"),
        () = helper.kill() => {}
    }
    let gone = waiting.await.expect_err("nobody will write it");
    assert!(matches!(gone, StoreError::WriterGone { .. }), "{gone}");
}

#[tokio::test]
async fn a_replica_that_is_out_of_reach_is_passed_over() {
    let cluster = Spec::new(Via::Tcp)
        .nodes(&[4 * KIB * KIB, 4 * KIB * KIB])
        .start()
        .await;
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    let key = fresh_key();
    let entries = vec![entry(&key)];
    let config = replicas(2);
    let started = writer.start_puts(entries, &config, Recency::default());
    let put = one(started.await).expect("there is room");
    let get = early(&reader, &key).await.expect("its writer publishes");
    for number in [0, 1] {
        write_layer(&writer, &put, number).await;
    }
    let first = put.replicas().next().expect("two").segment;
    for node in &cluster.nodes {
        if node.node.segments()[0].id == first {
            node.engine.shutdown(PATIENCE);
        }
    }
    for number in [0, 1] {
        let bytes = read_layer(&reader, &get, number).await;
        assert_eq!(bytes.expect("the other replica has it"), layer(number));
    }
}
