//! What a history is made of.

use proptest::prelude::*;

use super::{CLIENTS, KEYS, NODES};

#[derive(Clone, Debug)]
pub(super) enum Op {
    Put {
        client: usize,
        key: usize,
        granules: u64,
        replicas: u32,
        hard: bool,
        upsert: bool,
    },
    Commit {
        version: prop::sample::Index,
        client: Option<usize>,
    },
    Revoke {
        version: prop::sample::Index,
        client: Option<usize>,
    },
    Get {
        client: usize,
        key: usize,
        session: bool,
    },
    Renew {
        version: prop::sample::Index,
        client: usize,
    },
    End {
        version: prop::sample::Index,
        client: usize,
    },
    Probe {
        client: usize,
        first: usize,
    },
    Remove {
        key: usize,
        force: bool,
    },
    RemoveVersion {
        version: prop::sample::Index,
    },
    Pass {
        millis: u64,
    },
    AnswerFence {
        fence: prop::sample::Index,
        attached: bool,
    },
    AnswerDrop {
        drop: prop::sample::Index,
    },
    Leave {
        client: usize,
    },
    Restart {
        node: usize,
    },
}

pub(super) fn op() -> impl Strategy<Value = Op> {
    let (client, key) = (0..CLIENTS, 0..KEYS);
    let version = any::<prop::sample::Index>;
    let ender = prop_oneof![5 => Just(None), 1 => client.clone().prop_map(Some)];
    prop_oneof![
        8 => (client.clone(), key.clone(), 1_u64..14, 1_u32..3, prop::bool::weighted(0.05), prop::bool::weighted(0.3))
            .prop_map(|(client, key, granules, replicas, hard, upsert)| {
                Op::Put { client, key, granules, replicas, hard, upsert }
            }),
        8 => (version(), ender.clone()).prop_map(|(version, client)| Op::Commit { version, client }),
        2 => (version(), ender).prop_map(|(version, client)| Op::Revoke { version, client }),
        4 => (client.clone(), key.clone(), any::<bool>())
            .prop_map(|(client, key, session)| Op::Get { client, key, session }),
        2 => (version(), client.clone()).prop_map(|(version, client)| Op::Renew { version, client }),
        3 => (version(), client.clone()).prop_map(|(version, client)| Op::End { version, client }),
        3 => (client.clone(), key.clone()).prop_map(|(client, first)| Op::Probe { client, first }),
        2 => (key, any::<bool>()).prop_map(|(key, force)| Op::Remove { key, force }),
        2 => version().prop_map(|version| Op::RemoveVersion { version }),
        4 => (1_u64..2500).prop_map(|millis| Op::Pass { millis }),
        2 => (any::<prop::sample::Index>(), any::<bool>())
            .prop_map(|(fence, attached)| Op::AnswerFence { fence, attached }),
        1 => any::<prop::sample::Index>().prop_map(|drop| Op::AnswerDrop { drop }),
        1 => client.prop_map(|client| Op::Leave { client }),
        1 => (0..NODES).prop_map(|node| Op::Restart { node }),
    ]
}
