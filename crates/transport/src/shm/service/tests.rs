//! Peers that are attached, have a copy under way, and break the protocol.

use super::super::slots::PeerSlots;
use super::super::socket::Received;
use super::*;
use crate::config::{EngineConfig, TransportKind, TransportSet};
use crate::engine::Engine;
use crate::memory::{Access, AllocateOptions, Memory};
use crate::shm::greeting::InitiatorStep;
use crate::shm::wire::MAX_LEN;
use crate::testing::eventually;

const LIMIT: Duration = Duration::from_secs(20);
const ME: EngineId = EngineId(77);

/// An initiator that says what it likes.
struct Raw {
    channel: Channel,
    slots: PeerSlots,
}

impl Raw {
    fn attach(owner: &Engine) -> Self {
        let endpoint = owner.endpoint();
        let name = endpoint.shm.as_deref().expect("it shares memory");
        let channel = Channel::connect(name).expect("it listens");
        let (mut greeting, hello) = InitiatorGreeting::new(ME, endpoint.engine, None);
        channel.send(&hello.encode(), &[]).expect("sent");
        loop {
            let received = receive(&channel);
            let message = Message::decode(&received.bytes).expect("a message");
            match greeting.on_message(&message) {
                InitiatorStep::Send(message) => channel.send(&message.encode(), &[]).expect("sent"),
                InitiatorStep::Attached { .. } => {
                    let slots = received.descriptors.last().expect("slots came along");
                    let slots = PeerSlots::map(slots).expect("mapped");
                    return Self { channel, slots };
                }
                other => panic!("not attached: {other:?}"),
            }
        }
    }

    fn open(&self, memory: &Memory) {
        let region = memory.region();
        let open = Message::Open {
            region: region.region,
            capability: region.capability,
        };
        self.channel.send(&open.encode(), &[]).expect("sent");
        let answer = receive(&self.channel);
        let answer = Message::decode(&answer.bytes).expect("a message");
        assert!(matches!(answer, Message::Opened { .. }), "{answer:?}");
    }
}

fn receive(channel: &Channel) -> Received {
    let mut received = None;
    let arrived = eventually(LIMIT, || {
        received = channel.receive().ok().map(|it| it.expect("open"));
        received.is_some()
    });
    assert!(arrived, "no answer");
    received.expect("it arrived")
}

fn owner() -> (Engine, Memory) {
    let engine = Engine::start(EngineConfig {
        transports: TransportSet::only(TransportKind::Shm),
        ..EngineConfig::default()
    })
    .expect("an engine");
    let options = AllocateOptions {
        access: Access::RemoteReadWrite,
        ..AllocateOptions::default()
    };
    let memory = engine.allocate(4096, options).expect("some memory");
    (engine, memory)
}

#[test]
fn a_peer_that_breaks_the_protocol_counts_until_it_has_hung_up() {
    let garbage: [&[u8]; 3] = [&[0xEE; 40], &[1; MAX_LEN + 1], &[]];
    for (round, garbage) in garbage.into_iter().enumerate() {
        let (engine, memory) = owner();
        let raw = Raw::attach(&engine);
        raw.open(&memory);
        let copying = raw.slots.raise();
        raw.channel.send(garbage, &[]).expect("sent");
        let told = eventually(LIMIT, || !raw.channel.is_open());
        assert!(told, "round {round}: it is told to go");
        // What it says now is not listened to.
        let _unread = raw.channel.send(garbage, &[]);

        assert!(engine.holders(ME).attached, "round {round}");
        assert!(!engine.wait_detached(ME, Duration::ZERO));
        let mark = engine.quiet_mark(Some(ME));
        assert!(
            !engine.wait_over(&mark, Duration::from_millis(20)),
            "round {round}: it may still copy"
        );
        let unregistered = memory.unregister(Duration::from_millis(20));
        assert!(unregistered.is_err(), "round {round}: it may still copy");

        if round % 2 == 0 {
            // Its process ends in the middle of the copy.
            drop(raw.channel);
        } else {
            drop(copying);
            assert!(engine.wait_over(&mark, LIMIT), "its copy is over");
            assert!(engine.holders(ME).attached, "it may begin another");
            drop(raw.channel);
        }
        assert!(engine.wait_detached(ME, LIMIT), "round {round}");
        assert!(engine.is_over(&mark));
        memory.unregister(LIMIT).expect("nobody copies any more");
    }
}

#[test]
fn a_region_that_was_dropped_in_use_is_freed_without_anybody_asking() {
    let (engine, memory) = owner();
    let raw = Raw::attach(&engine);
    raw.open(&memory);
    let copying = raw.slots.raise();
    drop(memory);
    assert_eq!(engine.lingering(), 1);
    drop(copying);
    assert!(eventually(LIMIT, || engine.lingering() == 0));
}
