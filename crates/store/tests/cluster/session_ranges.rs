//! R7: ranges that overlap, lie outside, are empty or named twice.

use layercake_protocol::error::Refusal;
use layercake_protocol::replica::{PutStart, Recency};
use layercake_store::{Range, RangeRead, RangeWrite, StoreClient};

use crate::common::{
    Cluster, KIB, OneKey as _, Spec, Via, buffer, fresh_key, one, one_replica, pattern, refusal,
    whole,
};

async fn cluster(via: Via) -> (Cluster, StoreClient) {
    let cluster = Spec::new(via).start().await;
    let client = cluster.client().await;
    (cluster, client)
}

// contract: session-9
#[tokio::test]
async fn r7_ranges_that_can_not_be_refuse_their_entry_before_a_byte_moves() {
    let (cluster, client) = cluster(Via::Tcp).await;
    let size = 4 * KIB;
    let (bad, good) = (fresh_key(), fresh_key());
    let mut sessions = Vec::new();
    for key in [bad, good] {
        sessions.push(client.start_put(&key, size).await.expect("there is room"));
    }
    let memory = buffer(client.engine(), pattern(9, size));
    let range = |offset, len| Range {
        offset,
        local: memory.slice(0, len).expect("inside"),
    };
    let replica = sessions[0].replicas().next().expect("one");
    let stored = async || cluster.nodes[0].peek(replica.payload_offset(), 16).await;
    let before = stored().await;
    for (ranges, is_expected) in [
        (vec![range(0, 16), range(size - 8, 16)], "outside"),
        (vec![range(0, 16), range(u64::MAX, 2)], "outside"),
        (vec![range(0, 16), range(8, 0)], "0 bytes"),
        (vec![], "no ranges"),
    ] {
        let writes = vec![
            RangeWrite {
                session: &sessions[0],
                ranges,
            },
            RangeWrite {
                session: &sessions[1],
                ranges: vec![range(0, size)],
            },
        ];
        let mut written = client.write_ranges(writes).await;
        assert_eq!(
            written.pop().expect("two").expect("its neighbour is fine"),
            size
        );
        let error = one(written)
            .expect_err("not a range of the object")
            .to_string();
        assert!(error.contains(is_expected), "{error}");
        assert_eq!(
            stored().await,
            before,
            "the good range beside the bad one did not move"
        );
        assert_eq!(sessions[0].written_bytes(), 0);
    }
}

// contract: session-15
#[tokio::test]
async fn r7_overlaps_have_one_result_and_its_checksums() {
    for via in [Via::Shm, Via::Tcp] {
        let (_cluster, client) = cluster(via).await;
        let key = fresh_key();
        let size = 64 * KIB;
        let session = client.start_put(&key, size).await.expect("there is room");
        let mut expected = pattern(0, size);
        client.write(&session, 0, &expected).await.expect("up");
        // Several calls without waiting for the one before: the later one wins.
        let mut calls = Vec::new();
        for seed in 1..20_u64 {
            let (offset, len) = (seed * 1111, 3000 + seed * 100);
            let bytes = pattern(seed, len);
            let at = usize::try_from(offset).expect("small");
            expected[at..at + bytes.len()].copy_from_slice(&bytes);
            let local = whole(&buffer(client.engine(), bytes));
            let ranges = vec![Range { offset, local }];
            calls.push(client.write_ranges(vec![RangeWrite {
                session: &session,
                ranges,
            }]));
        }
        for call in calls {
            one(call.await).expect("up");
        }
        // In one call, the first range of the list has the bytes.
        let (first, second) = (pattern(77, KIB), pattern(78, KIB));
        let ranges = [(40_000, &first), (40_500, &second)].map(|(offset, bytes)| Range {
            offset,
            local: whole(&buffer(client.engine(), bytes.clone())),
        });
        let write = RangeWrite {
            session: &session,
            ranges,
        };
        assert_eq!(
            one(client.write_ranges(vec![write]).await).expect("up"),
            2 * KIB
        );
        expected[40_500..40_500 + 1024].copy_from_slice(&second);
        expected[40_000..40_000 + 1024].copy_from_slice(&first);
        client.end(session).await.expect("all is written");

        let get = client.start_get(&key).await.expect("complete");
        let (done, bytes) = client.read(&get, 0, size).await.expect("up");
        assert_eq!(bytes, expected);
        assert_eq!(
            (done.verified, done.unverified),
            (size, 0),
            "rows that were cut have checksums"
        );
    }
}

#[tokio::test]
async fn r7_a_key_twice_in_a_call_is_one_session_and_one_refusal() {
    let (_cluster, client) = cluster(Via::Shm).await;
    let key = fresh_key();
    let entries = vec![PutStart::new(key.clone(), KIB); 2];
    let mut started = client
        .start_puts(entries, &one_replica(), Recency::default())
        .await;
    let twice = refusal(started.pop().expect("two"));
    assert!(
        matches!(twice, Refusal::InProgress | Refusal::AlreadyExists),
        "{twice:?}"
    );
    let session = one(started).expect("the first has it");
    client
        .write(&session, 0, &pattern(0, KIB))
        .await
        .expect("up");
    client.end(session).await.expect("whole");
    let keys = [key.clone(), key];
    let loaded = client.get(&keys).await;
    assert_eq!(loaded.len(), 2);
    for bytes in loaded {
        assert_eq!(
            bytes.expect("complete")[..],
            pattern(0, KIB)[..],
            "both get the bytes"
        );
    }
}

#[tokio::test]
async fn r7_one_session_may_be_named_twice_in_a_range_call() {
    let (_cluster, client) = cluster(Via::Tcp).await;
    let session = client
        .start_put(&fresh_key(), 2 * KIB)
        .await
        .expect("there is room");
    let memory = buffer(client.engine(), pattern(1, 2 * KIB));
    let part = |at| {
        vec![Range {
            offset: at,
            local: memory.slice(at, KIB).expect("inside"),
        }]
    };
    let writes = [0, KIB, 0].map(|at| RangeWrite {
        session: &session,
        ranges: part(at),
    });
    for written in client.write_ranges(writes).await {
        assert_eq!(written.expect("up"), KIB);
    }
    let key = session.key().clone();
    client.end(session).await.expect("whole");
    assert_eq!(
        client.load(&key).await.expect("complete"),
        pattern(1, 2 * KIB)
    );
}

/// Rewrites cut rows of several objects in two; their end reads the parts back together, in more than one
/// wave, and gives each object its own checksums.
// contract: session-15
#[tokio::test]
async fn one_end_takes_the_checksums_of_many_objects_anew() {
    let (_cluster, client) = cluster(Via::Tcp).await;
    let sizes = [3 * 1024 * KIB, 48 * KIB, 6 * 1024 * KIB];
    let mut sessions = Vec::new();
    let mut stored = Vec::new();
    for (seed, size) in (0..).zip(sizes) {
        let session = client.start_put(&fresh_key(), size).await;
        let session = session.expect("there is room");
        let (mut bytes, patch) = (pattern(seed, size), pattern(seed + 9, KIB));
        client.write(&session, 0, &bytes).await.expect("all of it");
        client
            .write(&session, 8 * KIB, &patch)
            .await
            .expect("a cut");
        bytes[8 << 10..9 << 10].copy_from_slice(&patch);
        stored.push((session.key().clone(), bytes));
        sessions.push(session);
    }
    for ended in client.end_puts(sessions).await {
        ended.expect("fully written");
    }
    for (key, bytes) in stored {
        let session = client.start_get(&key).await.expect("complete");
        assert_eq!(session.written_ranges().len(), 3);
        let size = session.size();
        let (done, read) = client.read(&session, 0, size).await.expect("sound");
        assert_eq!(done.verified, size, "every row has its checksum");
        assert_eq!(read, bytes);
    }
}

/// Rows of many lengths make a header longer than readers expect: it is read again, beside one that is not.
// contract: session-12
#[tokio::test]
async fn headers_of_even_and_of_uneven_rows_are_read_whole() {
    let (_cluster, client) = cluster(Via::Tcp).await;
    let rows = 200;
    let lens: [Vec<u64>; 3] = [
        vec![KIB; 200],
        (0..rows).map(|row| KIB + row).collect(),
        (0..rows).map(|row| KIB * (1 + row % 2)).collect(),
    ];
    let mut stored = Vec::new();
    for (seed, lens) in (0..).zip(&lens) {
        let bytes = pattern(seed, lens.iter().sum());
        let entry = PutStart {
            header_rows: 200,
            ..PutStart::new(fresh_key(), bytes.len() as u64)
        };
        let started = client
            .start_puts(vec![entry], &one_replica(), Recency::default())
            .await;
        let session = one(started).expect("there is room");
        let memory = buffer(client.engine(), bytes.clone());
        let mut ranges = Vec::new();
        let mut offset = 0;
        for &len in lens {
            let local = memory.slice(offset, len).expect("inside");
            ranges.push(Range { offset, local });
            offset += len;
        }
        let write = RangeWrite {
            session: &session,
            ranges,
        };
        one(client.write_ranges(vec![write]).await).expect("all of it");
        stored.push((session.key().clone(), bytes));
        one(client.end_puts(vec![session]).await).expect("fully written");
    }
    let keys: Vec<_> = stored.iter().map(|(key, _)| key.clone()).collect();
    let sessions = client.start_gets(&keys, Recency::default()).await;
    for ((session, lens), (_, bytes)) in sessions.into_iter().zip(lens).zip(stored) {
        let session = session.expect("complete");
        let written = session.written_ranges().iter();
        let found: Vec<u64> = written.map(|row| row.range.len()).collect();
        assert_eq!(found, lens);
        let (done, read) = client
            .read(&session, 0, session.size())
            .await
            .expect("sound");
        assert_eq!(done.verified, session.size());
        assert_eq!(read, bytes);
    }
}

/// Who goes when its runtime is gone already leaves nothing behind that begins again and again.
#[test]
fn calls_that_outlive_their_runtime_end_with_it() {
    let servers = tokio::runtime::Runtime::new().expect("a runtime");
    let (cluster, reader) = servers.block_on(cluster(Via::Tcp));
    let (key, size) = (fresh_key(), 64 * KIB);
    servers.block_on(reader.store(&key, &pattern(1, size)));
    let theirs = tokio::runtime::Runtime::new().expect("a runtime");
    let client = theirs.block_on(cluster.client());
    let put = theirs.block_on(client.start_put(&fresh_key(), size));
    let put = put.expect("there is room");
    let get = theirs.block_on(client.start_get(&key)).expect("stored");
    let memory = buffer(client.engine(), pattern(2, size));
    let ranges = || {
        vec![Range {
            offset: 0,
            local: whole(&memory),
        }]
    };
    let [first, second] = [(); 2].map(|()| {
        client.write_ranges([RangeWrite {
            session: &put,
            ranges: ranges(),
        }])
    });
    let read = client.read_ranges([RangeRead {
        session: &get,
        ranges: ranges(),
    }]);
    drop(theirs);
    // The second one had to wait.
    drop((read, second, first, put, get, client));
}
