//! A write that had begun before its place was fenced.

use layercake_protocol::ids::Generation;

use super::*;

// contract: transport-6
#[test]
fn a_write_under_way_is_waited_for_after_its_place_was_fenced() {
    let owner = Engine::start(config()).expect("an engine");
    let memory = memory(&owner, 128 << 10, Access::RemoteReadWrite);
    let mut writer = Raw::open(&owner);
    let payload = pattern::bytes(5, 64 << 10);
    let (first, rest) = payload.split_at(payload.len() / 2);

    let region = memory.region();
    let mut frame = Vec::new();
    Header {
        kind: Kind::Write,
        flags: 0,
        count: 1,
        regions: 1,
        seq: writer.seq,
        payload: u32::try_from(payload.len()).expect("small"),
    }
    .encode(&mut frame);
    WireRegion {
        region: region.region,
        capability: region.capability,
    }
    .encode(&mut frame);
    WireOp {
        region: 0,
        offset: 0,
        len: payload.len() as u64,
        generation: Some(Generation(5)),
    }
    .encode(&mut frame);
    writer.seq += 1;
    writer.send(&frame);
    writer.send(first);
    let admitted = || memory.tags(0, 1).expect("it has tags") == [Generation(5)];
    assert!(eventually(LIMIT, admitted), "the frame is admitted");

    memory
        .fence(0, payload.len() as u64, Generation(9))
        .expect("it has tags");
    assert!(
        !owner.wait_quiet(None, Duration::from_millis(50)),
        "half of the payload may still land"
    );
    writer.send(rest);
    assert_eq!(
        writer.answer(),
        Answer::Statuses(vec![Err(Refusal::StaleGeneration)])
    );
    assert!(owner.wait_quiet(None, LIMIT), "nothing is under way");

    // Nor does a write that stops for good keep the owner waiting for ever.
    writer.send(&frame);
    drop(writer);
    assert!(owner.wait_quiet(None, LIMIT), "the connection is gone");
}
