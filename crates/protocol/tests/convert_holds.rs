//! Holds, and what is written into them, as messages.

use layercake_protocol::convert::PutSlotsAnswer;
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{
    Capability, EngineId, Epoch, Generation, MemoryKind, RegionId, SegmentId,
};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{GRANULE, Hold, PutStart, Segment, SlotPut};
use layercake_protocol::wire;
use prost::Message;

/// Through the bytes, as a message travels.
fn travel<M: Message + Default>(message: &M) -> M {
    M::decode(message.encode_to_vec().as_slice()).expect("what was encoded decodes")
}

fn hold() -> Hold {
    Hold {
        generation: Generation(7),
        segment: SegmentId(5),
        offset: 3 * GRANULE,
        len: 64 * GRANULE,
        epoch: Epoch(9),
    }
}

fn segment(id: u64) -> Segment {
    Segment {
        id: SegmentId(id),
        name: "n".to_owned(),
        endpoint: Endpoint {
            engine: EngineId(1),
            tcp: "127.0.0.1:1".to_owned(),
            host: HostId([1; 16]),
            shm: None,
            pid: 1,
        },
        region: RegionId(1),
        capability: Capability([1; 16]),
        len: 1 << 30,
        kind: MemoryKind::Host,
    }
}

#[test]
fn answers_travel_with_and_without_a_hold() {
    for hold in [None, Some((hold(), segment(5)))] {
        let answer = PutSlotsAnswer {
            results: vec![
                Ok(()),
                Err(Refusal::Superseded),
                Err(Refusal::invalid("size = 0")),
            ],
            hold,
        };
        let message = travel(&wire::PutSlotsResponse::from(&answer));
        assert!(PutSlotsAnswer::decode(message.clone(), 2).is_err());
        assert_eq!(PutSlotsAnswer::decode(message, 3), Ok(answer));
    }
    let elsewhere = PutSlotsAnswer {
        results: Vec::new(),
        hold: Some((hold(), segment(6))),
    };
    assert!(PutSlotsAnswer::decode((&elsewhere).into(), 0).is_err());
}

#[test]
fn slots_travel_and_need_a_number() {
    let slot = SlotPut {
        put: PutStart {
            header_rows: 2,
            prefix_index: Some(4),
            ..PutStart::new(ObjectKey::new("k").expect("short"), 4096)
        },
        generation: hold().slot(3),
    };
    assert_eq!(slot.generation, Generation(11));
    let message = travel(&wire::SlotPut::from(&slot));
    assert_eq!(SlotPut::try_from(message.clone()), Ok(slot));
    for bad in [
        wire::SlotPut {
            generation: 0,
            ..message.clone()
        },
        wire::SlotPut {
            put: None,
            ..message
        },
    ] {
        assert!(SlotPut::try_from(bad.clone()).is_err(), "{bad:?}");
    }
}

#[test]
fn holds_that_make_no_sense_are_refused() {
    let good = wire::Hold::from(&hold());
    assert_eq!(Hold::try_from(travel(&good)), Ok(hold()));
    let changes: [fn(&mut wire::Hold); 8] = [
        |h| h.segment_id = 0,
        |h| h.generation = 0,
        |h| h.generation = u64::MAX - 63,
        |h| h.offset += 1,
        |h| h.len += 1,
        |h| h.len = 0,
        |h| h.offset = u64::MAX - 4095,
        |h| h.len = u64::MAX - 4095,
    ];
    for change in changes {
        let mut bad = good;
        change(&mut bad);
        assert!(Hold::try_from(bad).is_err(), "{bad:?}");
    }
}
