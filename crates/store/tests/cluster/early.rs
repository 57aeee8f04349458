//! Objects that are read while they are written: what a reader sees, and what it never sees.
//!
//! Nothing here hangs on time: a reader that must wait is asked before the writer goes on, and one that must not see
//! something is given a time after which it says so.

use std::time::Duration;

use layercake_protocol::early::{EarlyRecord, EarlyTable, EarlyToken, SlotPlace};
use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::range::ByteRange;
use layercake_protocol::replica::{PutStart, Recency};
use layercake_store::link::StartOptions;
use layercake_store::{
    ClientConfig, EarlyRead, EarlySession, PutSession, Range, RangeWrite, ReadDone, Source,
    StoreClient, StoreError,
};

use crate::common::{
    KIB, OneKey as _, PATIENCE, Spec, Via, buffer, contents, fresh_key, one, one_replica, pattern,
    refusal, whole,
};

/// Layers of the objects here, and bytes in each: no multiple of a granule.
pub(crate) const LAYERS: u64 = 4;
pub(crate) const LAYER: u64 = 24 * KIB - 40;
/// How long a reader is given that must not see anything.
const IN_VAIN: Duration = Duration::from_millis(60);

pub(crate) fn entry(key: &ObjectKey) -> PutStart {
    let rows = u32::try_from(LAYERS).expect("few");
    PutStart {
        header_rows: rows,
        ..PutStart::new(key.clone(), LAYERS * LAYER)
    }
    .early_reads()
}

pub(crate) async fn start(writer: &StoreClient, key: &ObjectKey) -> PutSession {
    let entries = vec![entry(key)];
    let config = one_replica();
    let started = writer.start_puts(entries, &config, Recency::default());
    one(started.await).expect("the key is free")
}

pub(crate) fn layer(number: u64) -> Vec<u8> {
    pattern(100 + number, LAYER)
}

pub(crate) async fn write_layer(writer: &StoreClient, session: &PutSession, number: u64) {
    let written = writer.write(session, number * LAYER, &layer(number)).await;
    assert_eq!(written.expect("up"), LAYER);
}

pub(crate) async fn early(
    reader: &StoreClient,
    key: &ObjectKey,
) -> Result<EarlySession, StoreError> {
    let keys = std::slice::from_ref(key);
    one(reader.start_early_gets(keys, Recency::default()).await)
}

/// Reads some bytes, as soon as they are there.
async fn read(
    reader: &StoreClient,
    session: &EarlySession,
    (offset, len): (u64, u64),
    within: Duration,
) -> Result<(ReadDone, Vec<u8>), StoreError> {
    let memory = buffer(reader.engine(), pattern(u64::MAX, len));
    let ranges = vec![Range {
        offset,
        local: whole(&memory),
    }];
    let reads = vec![EarlyRead { session, ranges }];
    let done = one(reader.read_early(reads, within).await)?;
    Ok((done, contents(&memory)))
}

pub(crate) async fn read_layer(
    reader: &StoreClient,
    session: &EarlySession,
    number: u64,
) -> Result<Vec<u8>, StoreError> {
    let (done, bytes) = read(reader, session, (number * LAYER, LAYER), PATIENCE).await?;
    assert_eq!(
        (done.bytes, done.verified, done.unverified),
        (LAYER, LAYER, 0)
    );
    Ok(bytes)
}

/// Whether a reader that is given a little time says that the writer has not come so far.
async fn waits_for(reader: &StoreClient, session: &EarlySession, number: u64) -> bool {
    let waited = read(reader, session, (number * LAYER, LAYER), IN_VAIN).await;
    matches!(waited, Err(StoreError::Timeout { .. }))
}

// contract: session-18
#[tokio::test]
async fn layers_are_read_while_later_ones_are_not_written() {
    for via in Via::ALL {
        let cluster = Spec::new(via).start().await;
        let (writer, reader) = (cluster.client().await, cluster.client().await);
        let key = fresh_key();
        let put = start(&writer, &key).await;
        let get = early(&reader, &key).await.expect("its writer publishes");
        assert_eq!(
            (get.size(), get.generation()),
            (put.size(), put.generation())
        );
        for number in [0, 2, 1] {
            let mut waiting = std::pin::pin!(read_layer(&reader, &get, number));
            tokio::select! {
                biased;
                early = &mut waiting => panic!("layer {number} is not written: {early:?}"),
                () = write_layer(&writer, &put, number) => {}
            }
            assert_eq!(waiting.await.expect("published"), layer(number), "{via:?}");
        }
        let calls = cluster.master.object_requests();
        for number in 0..3 {
            let bytes = read_layer(&reader, &get, number)
                .await
                .expect("still there");
            assert_eq!(bytes, layer(number));
        }
        let both = read(&reader, &get, (0, 2 * LAYER), PATIENCE)
            .await
            .expect("both");
        assert_eq!(both.1, [layer(0), layer(1)].concat());
        assert_eq!(
            cluster.master.object_requests(),
            calls,
            "no call for what is there"
        );
        assert!(waits_for(&reader, &get, 3).await);
        assert!(get.completed().is_none());
        assert_eq!(refusal(reader.start_get(&key).await), Refusal::NotReady);

        write_layer(&writer, &put, 3).await;
        writer.end(put).await.expect("whole");
        // Ranges that are no rows wait for the commit, which is there.
        let part = read(&reader, &get, (10, 3 * LAYER), PATIENCE)
            .await
            .expect("complete");
        let all: Vec<u8> = (0..LAYERS).flat_map(layer).collect();
        assert_eq!(part.1, all[10..][..part.1.len()]);
        let session = get.completed().expect("it goes on as an ordinary session");
        assert_eq!(session.generation(), get.generation());
        assert_eq!(reader.load(&key).await.expect("complete"), all);
        assert!(reader.stats().bytes_early >= 5 * LAYER);
        assert_eq!(reader.stats().mismatches, 0);
    }
}

/// A commit while a reader waits for bytes that were not published in time.
// contract: session-18
#[tokio::test]
async fn a_commit_lets_readers_go_on() {
    let cluster = Spec::new(Via::Shm).start().await;
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    let key = fresh_key();
    let put = start(&writer, &key).await;
    let get = early(&reader, &key).await.expect("its writer publishes");
    for number in 0..LAYERS {
        write_layer(&writer, &put, number).await;
    }
    let mut waiting = std::pin::pin!(read(&reader, &get, (5, LAYER), PATIENCE));
    tokio::select! {
        biased;
        early = &mut waiting => panic!("half a row was read early: {early:?}"),
        ended = writer.end(put) => ended.expect("whole"),
    }
    let (_, bytes) = waiting.await.expect("complete");
    assert_eq!(bytes, [layer(0), layer(1)].concat()[5..][..bytes.len()]);
    assert!(get.completed().is_some());
    // Who begins now has an ordinary session at once.
    let late = early(&reader, &key).await.expect("complete");
    assert!(late.completed().is_some());
    assert_eq!(
        read_layer(&reader, &late, 2).await.expect("complete"),
        layer(2)
    );
}

/// The writer gives its memory to others while a write may still read it: what is not over by then was not written.
// contract: session-20
#[tokio::test]
async fn what_is_written_from_memory_that_was_withdrawn_is_not_published() {
    for via in Via::ALL {
        let cluster = Spec::new(via).start().await;
        let (writer, reader) = (cluster.client().await, cluster.client().await);
        let key = fresh_key();
        let put = start(&writer, &key).await;
        let source = Source::new();
        put.write_from(source.clone());
        let get = early(&reader, &key).await.expect("its writer publishes");
        write_layer(&writer, &put, 0).await;
        assert_eq!(
            read_layer(&reader, &get, 0).await.expect("published"),
            layer(0)
        );
        let memories = [1, 2].map(|number| buffer(writer.engine(), layer(number)));
        let [first, second] = [1, 2].map(|layers| {
            let memories = (1..).zip(&memories[..layers]);
            let ranges = memories.map(|(number, memory)| Range {
                offset: number * LAYER,
                local: whole(memory),
            });
            let (session, ranges) = (&put, ranges.collect::<Vec<_>>());
            writer.write_ranges(vec![RangeWrite { session, ranges }])
        });
        source.withdraw();
        for memory in &memories {
            memory.copy_in(0, &layer(9)).expect("inside");
        }
        let refused = writer.write(&put, 2 * LAYER, &layer(2)).await;
        assert!(matches!(refused, Err(StoreError::SourceWithdrawn)));
        // What the session is written from afterwards says nothing of calls from before.
        put.write_from(Source::new());
        for call in [first, second] {
            let withdrawn = one(call.await).expect_err("its memory changed");
            assert!(
                matches!(withdrawn, StoreError::SourceWithdrawn),
                "{withdrawn}"
            );
        }
        assert!(waits_for(&reader, &get, 1).await, "{via:?}");
        assert_eq!(writer.stats().ranges_published, 1);
        assert_eq!(put.written_bytes(), LAYER);
        // The second call waited for the first, and then read nothing any more.
        let place = put.replicas().next().expect("one").payload_offset();
        let stored = cluster.nodes[0].peek(place + 2 * LAYER, LAYER).await;
        assert!(stored != layer(9), "{via:?}");

        // From other memory it can be written to its end.
        for number in 1..LAYERS {
            write_layer(&writer, &put, number).await;
        }
        writer.end(put).await.expect("whole");
        let all: Vec<u8> = (0..LAYERS).flat_map(layer).collect();
        assert_eq!(reader.load(&key).await.expect("complete"), all);
    }
}

#[tokio::test]
async fn what_was_published_can_not_be_written_again() {
    let cluster = Spec::new(Via::Tcp).start().await;
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    let key = fresh_key();
    let put = start(&writer, &key).await;
    let get = early(&reader, &key).await.expect("its writer publishes");
    write_layer(&writer, &put, 0).await;
    assert_eq!(
        read_layer(&reader, &get, 0).await.expect("published"),
        layer(0)
    );
    let error = writer
        .write(&put, LAYER - 1, &[1, 2])
        .await
        .expect_err("published");
    let text = error.to_string();
    assert!(matches!(error, StoreError::Published { .. }), "{text}");
    assert!(text.contains(&(LAYER - 1).to_string()), "{text}");
    assert_eq!(
        read_layer(&reader, &get, 0).await.expect("as before"),
        layer(0)
    );
    for number in 1..LAYERS {
        write_layer(&writer, &put, number).await;
    }
    writer
        .end(put)
        .await
        .expect("the refused write did no harm");
    let all: Vec<u8> = (0..LAYERS).flat_map(layer).collect();
    assert_eq!(reader.load(&key).await.expect("complete"), all);
}

/// Two calls on the same bytes: nobody sees those of the first.
#[tokio::test]
async fn bytes_that_a_later_call_writes_are_published_once() {
    let cluster = Spec::new(Via::Tcp).start().await;
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    let key = fresh_key();
    let put = start(&writer, &key).await;
    let get = early(&reader, &key).await.expect("its writer publishes");
    // Both are admitted before either is seen to have ended.
    let calls = [layer(7), layer(0)].map(|bytes| {
        let local = whole(&buffer(writer.engine(), bytes));
        let ranges = vec![Range { offset: 0, local }];
        writer.write_ranges(vec![RangeWrite {
            session: &put,
            ranges,
        }])
    });
    for call in calls {
        assert_eq!(one(call.await).expect("up"), LAYER);
    }
    assert_eq!(
        read_layer(&reader, &get, 0).await.expect("published"),
        layer(0)
    );
}

fn record(table: EarlyTable, get: &EarlySession, slot: u32, crc32c: u32) -> Vec<u8> {
    let range = ByteRange::new(LAYER, LAYER).expect("small");
    let place = SlotPlace {
        generation: get.generation(),
        slot,
    };
    table.encode(&EarlyRecord { range, crc32c }, place).to_vec()
}

/// Whatever stands in a slot that was not filled, no byte is served on its word.
#[tokio::test]
async fn torn_stale_and_forged_records_are_not_believed() {
    let cluster = Spec::new(Via::Shm).start().await;
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    let key = fresh_key();
    let put = start(&writer, &key).await;
    let get = early(&reader, &key).await.expect("its writer publishes");
    write_layer(&writer, &put, 0).await;
    read_layer(&reader, &get, 0).await.expect("published");
    let keys = std::slice::from_ref(&key);
    let found = reader
        .link()
        .unfinished(keys, StartOptions::default())
        .await;
    let found = one(found.expect("the master is up").results).expect("being written");
    let table = found.early.expect("its writer publishes");
    let replica = found.replicas[0];
    let slot_at = |slot| {
        let at = table.slot_at(replica.header_len, slot);
        replica.offset + at.expect("of the table")
    };
    let node = &cluster.nodes[0];
    // The bytes that a believer would serve, under a checksum that fits them.
    node.poke(replica.payload_offset() + LAYER, &layer(9)).await;
    let crc = crc32c::crc32c(&layer(9));
    let stranger = EarlyTable {
        token: EarlyToken::random(),
        ..table
    };
    let mut torn = record(table, &get, 1, crc);
    torn[20..].fill(0);
    let mut flipped = record(table, &get, 1, crc);
    flipped[25] ^= 1;
    let earlier = {
        let place = SlotPlace {
            generation: layercake_protocol::ids::Generation(get.generation().0 - 1),
            slot: 1,
        };
        let range = ByteRange::new(LAYER, LAYER).expect("small");
        table
            .encode(&EarlyRecord { range, crc32c: crc }, place)
            .to_vec()
    };
    for bytes in [
        record(stranger, &get, 1, crc),
        record(table, &get, 2, crc),
        torn,
        flipped,
        earlier,
    ] {
        node.poke(slot_at(1), &bytes).await;
        assert!(waits_for(&reader, &get, 1).await);
    }
    // A record as the writer's own, where it has not written yet: the memory's tags know better.
    node.poke(slot_at(1), &record(table, &get, 1, crc)).await;
    let error = read_layer(&reader, &get, 1).await;
    let error = error.expect_err("nobody wrote there");
    assert!(matches!(error, StoreError::Transfer { .. }), "{error}");
    // And bytes that are not those of their record (any more).
    node.poke(replica.payload_offset(), &layer(9)).await;
    let damaged = read_layer(&reader, &get, 0).await;
    let damaged = damaged.expect_err("not what was written");
    assert!(
        matches!(damaged, StoreError::ChecksumMismatch { .. }),
        "{damaged}"
    );
    assert_eq!(reader.stats().mismatches, 1);

    let fresh = early(&reader, &key).await.expect("still being written");
    write_layer(&writer, &put, 1).await;
    assert_eq!(
        read_layer(&reader, &fresh, 1).await.expect("the writer's"),
        layer(1)
    );
}

#[tokio::test]
async fn who_did_not_opt_in_is_not_read_early() {
    let cluster = Spec::new(Via::Shm).start().await;
    let (writer, reader) = (cluster.client().await, cluster.client().await);
    let (plain, absent) = (fresh_key(), fresh_key());
    let put = writer.start_put(&plain, KIB).await.expect("room");
    assert_eq!(refusal(early(&reader, &plain).await), Refusal::NotReady);
    assert_eq!(refusal(early(&reader, &absent).await), Refusal::NotFound);
    // Its bytes may be written again.
    for seed in [1, 2] {
        writer
            .write(&put, 0, &pattern(seed, KIB))
            .await
            .expect("up");
    }
    writer.end(put).await.expect("whole");
    let keys = [plain.clone(), absent, plain];
    let calls = cluster.master.object_requests();
    let sessions = reader.start_early_gets(&keys, Recency::default()).await;
    assert_eq!(
        cluster.master.object_requests(),
        calls + 1,
        "nothing is unfinished"
    );
    assert!(sessions[0].is_ok() && sessions[2].is_ok());
    let session = sessions[0].as_ref().expect("complete");
    let (_, bytes) = read(&reader, session, (0, KIB), PATIENCE)
        .await
        .expect("complete");
    assert_eq!(bytes, pattern(2, KIB));
    let outside = read(&reader, session, (KIB, 1), PATIENCE).await;
    assert!(matches!(outside, Err(StoreError::OutOfBounds { .. })));
}

#[tokio::test]
async fn without_checksums_it_is_refused_by_name() {
    let cluster = Spec::new(Via::Shm).start().await;
    let config = ClientConfig {
        checksums: false,
        ..ClientConfig::default()
    };
    let client = cluster.client_with(config).await;
    let key = fresh_key();
    let entries = vec![entry(&key)];
    let put = one(client
        .start_puts(entries, &one_replica(), Recency::default())
        .await);
    let get = early(&client, &key).await.map(drop);
    for refused in [put.map(drop), get] {
        let text = refused
            .expect_err("nothing says what has landed")
            .to_string();
        assert!(text.contains("checksums"), "{text}");
    }
}
