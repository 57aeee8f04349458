//! Making, mounting, losing and giving back segments.

use std::collections::HashSet;
use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Body;
use layercake_store::StoreError;
use layercake_store::node::{Node, NodeConfig, SegmentSpec};
use layercake_transport::{Batch, Direction, Engine, EngineConfig, Piece, PieceError, RemoteSlice};
use rand::RngExt as _;

use super::{MIB, engine, lending, link, until};
use crate::fake::{FakeMaster, Fault, Kind, Nature, PATIENCE};
use crate::tasks;

fn mounts(master: &FakeMaster) -> Vec<wire::Segment> {
    master
        .seen(Kind::Mount)
        .into_iter()
        .map(|seen| match seen.body {
            Body::Mount(request) => request.segment.expect("it is always sent"),
            other => panic!("{other:?}"),
        })
        .collect()
}

fn lively() -> FakeMaster {
    FakeMaster::new(Nature {
        heartbeat_every: Duration::from_millis(10),
        ..Nature::default()
    })
}

#[tokio::test]
async fn segments_are_mounted_under_the_nodes_name_with_all_that_a_client_needs() {
    let master = lively();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "rack-1", &engine).await;
    // Not a whole number of granules.
    let config = lending(&[MIB + 5000, 2 * MIB]);
    let node = Node::start(config, engine.clone(), link.clone())
        .await
        .expect("small");
    let mounted = mounts(&master);
    assert_eq!(mounted.len(), 2);
    let lens: Vec<_> = mounted.iter().map(|segment| segment.len).collect();
    assert_eq!(lens, [MIB + 4096, 2 * MIB]);
    assert!(mounted.iter().all(|segment| segment.name == "rack-1"));
    let stats = node.stats();
    assert_eq!(
        (stats.mounted_segments, stats.mounted_bytes),
        (2, 3 * MIB + 4096)
    );
    // Heartbeats name them.
    let ids: HashSet<u64> = mounted.iter().map(|segment| segment.segment_id).collect();
    let named = |master: &FakeMaster| {
        master
            .seen(Kind::Heartbeat)
            .iter()
            .any(|seen| match &seen.body {
                Body::Heartbeat(beat) => {
                    beat.segment_ids.iter().copied().collect::<HashSet<_>>() == ids
                }
                _ => false,
            })
    };
    master.until("a heartbeat names both", named).await;
    // A client gets its bytes there and back, through what it was told alone.
    let client = super::engine();
    let segment = node.segments().remove(1);
    let bytes: Vec<u8> = rand::rng().random_iter().take(100_000).collect();
    let moved = |direction, buffer: Vec<u8>| {
        let memory = client
            .register(buffer.into(), layercake_transport::Access::LocalOnly)
            .expect("a buffer");
        let transfer = client.submit(Batch {
            peer: segment.endpoint.clone().into(),
            direction,
            pieces: vec![Piece {
                local: memory.slice(0, memory.len()).expect("all of it"),
                remote: RemoteSlice {
                    region: segment.region,
                    capability: segment.capability,
                    offset: 4096,
                    len: memory.len(),
                    generation: Some(layercake_protocol::ids::Generation(7)),
                },
            }],
            checksum: false,
            deadline: None,
        });
        (memory, transfer)
    };
    let (_, transfer) = moved(Direction::Write, bytes.clone());
    assert!(transfer.await.is_ok());
    let (memory, transfer) = moved(Direction::Read, vec![0; bytes.len()]);
    assert!(transfer.await.is_ok());
    let mut back = vec![0; bytes.len()];
    memory.copy_out(0, &mut back).expect("in bounds");
    assert_eq!(back, bytes);
    node.shutdown(PATIENCE).await.expect("in time");
}

#[tokio::test]
async fn a_segment_larger_than_memory_is_refused_before_anything_is_allocated() {
    let master = FakeMaster::default();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "n", &engine).await;
    let config = lending(&[MIB, 1 << 50]);
    let error = Node::start(config, engine.clone(), link.clone())
        .await
        .expect_err("a petabyte");
    let StoreError::SegmentTooLarge { len, available, .. } = error else {
        panic!("{error}");
    };
    assert!(len > 1 << 50 && available < 1 << 50);
    assert!(!error.to_string().contains('\n'), "one line: {error}");
    assert_eq!(engine.stats().regions, 0, "not even the small one");
    // The link was not used up by the failure.
    Node::start(lending(&[MIB]), engine, link)
        .await
        .expect("small");
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused() {
    let master = FakeMaster::default();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "n", &engine).await;
    for lens in [&[][..], &[4095], &[MIB, 0]] {
        let error = Node::begin(&lending(lens), engine.clone(), link.clone()).expect_err("bad");
        assert!(error.to_string().contains("segments"), "{error}");
    }
    let node = Node::begin(&lending(&[MIB]), engine.clone(), link.clone()).expect("good");
    let unsafe_engine = Engine::start(EngineConfig {
        generation_checks: false,
        ..EngineConfig::default()
    })
    .expect("an engine");
    let error = Node::begin(&lending(&[MIB]), unsafe_engine, link.clone());
    let error = error.expect_err("nobody could be kept out");
    assert!(error.to_string().contains("generation_checks"), "{error}");
    let second = Node::begin(&lending(&[MIB]), engine, link).expect_err("a link is for one node");
    assert!(second.to_string().contains("link"), "{second}");
    node.ready().await.expect("small");
}

#[test]
fn a_large_node_is_cut_into_equal_steps() {
    for bytes in [MIB, NodeConfig::STEP, NodeConfig::STEP + 1, 100 << 30] {
        let config = NodeConfig::lending(bytes, true);
        let lens: Vec<u64> = config.segments.iter().map(|spec| spec.len).collect();
        assert_eq!(lens.iter().sum::<u64>(), bytes);
        let (least, most) = (lens.iter().min(), lens.iter().max());
        assert!(most.expect("one") - least.expect("one") <= 1, "{lens:?}");
        assert!(lens.iter().all(|len| *len <= NodeConfig::STEP));
        assert!(
            config
                .segments
                .iter()
                .all(|spec: &SegmentSpec| spec.huge_pages)
        );
    }
}

#[tokio::test]
async fn a_master_that_forgot_a_node_gets_new_segments_and_the_old_ones_are_closed() {
    let master = lively();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "n", &engine).await;
    let node = Node::start(lending(&[MIB, MIB]), engine.clone(), link)
        .await
        .expect("small");
    let before = node.segments();
    // Once by silence, once by a restart.
    master.forget_members();
    master
        .until("both are mounted anew", |master| mounts(master).len() == 4)
        .await;
    let port = served.kill();
    master.restart();
    let _served = master.serve_at(port);
    master
        .until("and again", |master| mounts(master).len() == 6)
        .await;
    node.ready().await.expect("small");
    until("they count, and the others are closed", || {
        let stats = node.stats();
        (stats.mounted_segments, stats.replaced_segments) == (2, 4)
    })
    .await;
    until("memory is given back", || engine.stats().regions == 2).await;
    let ids: HashSet<u64> = mounts(&master).iter().map(|s| s.segment_id).collect();
    let regions: HashSet<u64> = mounts(&master).iter().map(|s| s.region_id).collect();
    assert_eq!((ids.len(), regions.len()), (6, 6), "nothing is used twice");
    // A writer with an old reservation finds nothing to write to.
    let client = super::engine();
    let memory = client
        .register(
            vec![1_u8; 100].into(),
            layercake_transport::Access::LocalOnly,
        )
        .expect("a buffer");
    let old = &before[0];
    let outcome = client
        .submit(Batch {
            peer: old.endpoint.clone().into(),
            direction: Direction::Write,
            pieces: vec![Piece {
                local: memory.slice(0, 100).expect("all of it"),
                remote: RemoteSlice {
                    region: old.region,
                    capability: old.capability,
                    offset: 0,
                    len: 100,
                    generation: Some(layercake_protocol::ids::Generation(u64::MAX)),
                },
            }],
            checksum: false,
            deadline: None,
        })
        .await;
    let refused = PieceError::Refused(layercake_transport::Refusal::UnknownRegion);
    assert_eq!(outcome.first_error(), Some(refused));
}

#[tokio::test]
async fn a_segment_that_only_the_master_lost_is_brought_anew() {
    let master = lively();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "n", &engine).await;
    let node = Node::start(lending(&[MIB, MIB]), engine, link)
        .await
        .expect("small");
    let [kept, lost] = <[_; 2]>::try_from(node.segments()).expect("two");
    master.miss_segments(vec![lost.id.0]);
    master
        .until("another is mounted", |master| mounts(master).len() == 3)
        .await;
    until("it counts", || node.stats().mounted_segments == 2).await;
    let now = node.segments();
    assert!(now.contains(&kept) && !now.contains(&lost));
}

#[tokio::test]
async fn a_mount_is_tried_again_while_that_may_help() {
    let master = lively();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "n", &engine).await;
    master.on(Kind::Mount, Fault::Refuse(Refusal::ShuttingDown));
    master.on(Kind::Mount, Fault::Drop);
    let node = Node::start(lending(&[MIB]), engine.clone(), link)
        .await
        .expect("at last");
    assert_eq!(node.segments().len(), 1);
    assert_eq!(mounts(&master).len(), 3);
    drop(node);
    let link = super::link(&served, "m", &engine).await;
    master.on(Kind::Mount, Fault::Refuse(Refusal::invalid("not that one")));
    let error = Node::start(lending(&[MIB]), engine, link)
        .await
        .expect_err("refused");
    assert!(error.to_string().contains("not that one"), "{error}");
}

#[tokio::test]
async fn an_unmounted_segment_is_drained_freed_and_not_mounted_again() {
    let master = lively();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "n", &engine).await;
    let node = Node::start(lending(&[MIB, MIB]), engine.clone(), link)
        .await
        .expect("small");
    let [first, second] = <[_; 2]>::try_from(node.segments()).expect("two");
    node.unmount(first.id, Some(Duration::from_millis(1500)))
        .await
        .expect("drained");
    let seen = master.seen(Kind::Unmount);
    let Body::Unmount(request) = &seen[0].body else {
        panic!("{seen:?}");
    };
    assert_eq!(
        (request.segment_id, request.drain, request.drain_timeout_ms),
        (first.id.0, true, 1500)
    );
    assert_eq!(engine.stats().regions, 1);
    assert_eq!(node.segments(), std::slice::from_ref(&second));
    let again = node.unmount(first.id, None).await.expect_err("gone");
    assert!(
        matches!(again, StoreError::Refused(Refusal::UnknownMember)),
        "{again}"
    );
    // A master that does not have it any more is as good as one that gave it back.
    master.on(Kind::Unmount, Fault::Refuse(Refusal::UnknownMember));
    node.unmount(second.id, None)
        .await
        .expect("gone at the master");
    assert_eq!(engine.stats().regions, 0);
    // Not even after the next join.
    master.forget_members();
    master
        .until("it joins again", |master| {
            master.seen(Kind::Join).len() >= 2
        })
        .await;
    assert_eq!(mounts(&master).len(), 2);
}

#[tokio::test]
async fn an_unmount_that_fails_leaves_the_segment_mounted() {
    let master = lively();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "n", &engine).await;
    let node = Node::start(lending(&[MIB]), engine, link)
        .await
        .expect("small");
    let id = node.segments()[0].id;
    master.on(Kind::Unmount, Fault::Refuse(Refusal::ShuttingDown));
    let error = node.unmount(id, None).await.expect_err("not now");
    assert!(error.is_retryable(), "{error}");
    assert_eq!(node.segments()[0].id, id);
    node.unmount(id, None).await.expect("now");
}

/// This process's threads that have the node's names.
fn threads() -> usize {
    let tasks = std::fs::read_dir("/proc/self/task").expect("Linux");
    tasks
        .filter_map(|task| std::fs::read_to_string(task.ok()?.path().join("comm")).ok())
        .filter(|name| name.starts_with("layercake-fence") || name.starts_with("layercake-segme"))
        .count()
}

#[tokio::test]
async fn shutting_down_unmounts_frees_and_leaves_no_task() {
    let master = lively();
    let served = master.serve();
    let engine = engine();
    let link = link(&served, "n", &engine).await;
    let before = tasks();
    let node = Node::start(lending(&[MIB, MIB]), engine.clone(), link.clone())
        .await
        .expect("small");
    assert!(tasks() > before);
    node.shutdown(PATIENCE).await.expect("in time");
    assert!(tasks() <= before, "when it returns, its tasks have ended");
    assert_eq!(engine.stats().regions, 0);
    assert_eq!(master.seen(Kind::Unmount).len(), 2);
    // One that is dropped while it is being made.
    let link = super::link(&served, "m", &engine).await;
    let others = tasks();
    let node = Node::begin(&lending(&[MIB, MIB]), engine.clone(), link.clone()).expect("small");
    drop(node);
    until("its tasks end", || tasks() <= others).await;
    until("its memory goes", || engine.stats().regions == 0).await;
}

#[test]
fn threads_end_with_their_node() {
    // In a process of its own, since other tests have nodes too: this binary, this test.
    const INNER: &str = "LAYERCAKE_TEST_THREADS";
    if std::env::var_os(INNER).is_none() {
        let status = std::process::Command::new(std::env::current_exe().expect("this binary"))
            .args(["--exact", "node::segments::threads_end_with_their_node"])
            .env(INNER, "1")
            .status()
            .expect("it starts");
        assert!(status.success());
        return;
    }
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .expect("a runtime");
    runtime.block_on(async {
        let served = FakeMaster::default().serve();
        let engine = engine();
        let link = link(&served, "n", &engine).await;
        let node = Node::start(lending(&[MIB]), engine, link)
            .await
            .expect("small");
        // A thread takes its name when it runs, and the system forgets it a little after its end.
        until("both run", || threads() == 2).await;
        node.shutdown(PATIENCE).await.expect("in time");
        until("both are gone", || threads() == 0).await;
    });
}
