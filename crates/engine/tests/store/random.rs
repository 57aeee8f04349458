//! Random lives of an engine on a network that fails: whatever happens in whatever order, requests end,
//! results are right, and nothing is left over.

use std::collections::HashMap;
use std::time::Duration;

use layercake_engine::model::LogitsDigest;
use layercake_engine::run::{Completion, Engine, EngineConfig};
use layercake_transport::PieceError;
use layercake_transport::mock::{Conditions, MockNetwork, Pace};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use serde_json::json;

use crate::cluster::{Cluster, PATIENCE, config};
use crate::rig::{reference, text};

/// Lives that are lived on one pool, one after the other.
const LIVES: usize = 120;
/// Tokens that every request wants.
const WANTED: usize = 4;

#[derive(Clone, Debug)]
enum Act {
    /// One of a few beginnings, and one of a few ends.
    Submit {
        beginning: u32,
        len: usize,
        end: u32,
    },
    Steps(usize),
    Preempt(usize),
    Abort(usize),
    /// So many of a thousand pieces fail from here on.
    Failures(u32),
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0..3_u32, 0..40_usize, 10..14_u32)
            .prop_map(|(beginning, len, end)| Act::Submit { beginning, len, end }),
        5 => (1..6_usize).prop_map(Act::Steps),
        1 => (0..20_usize).prop_map(Act::Preempt),
        1 => (0..20_usize).prop_map(Act::Abort),
        1 => prop_oneof![Just(0), Just(20), Just(200)].prop_map(Act::Failures),
    ]
}

#[derive(Clone, Debug)]
struct Life {
    acts: Vec<Act>,
    ranks: u32,
    blocks: u64,
    step_tokens: usize,
    sharing: bool,
    layerwise: bool,
}

fn life() -> impl Strategy<Value = Life> {
    let shape = (prop_oneof![Just(1_u32), Just(2)], 14..60_u64, 3..60_usize);
    let modes = (any::<bool>(), any::<bool>());
    (prop::collection::vec(act(), 4..24), shape, modes).prop_map(
        |(acts, (ranks, blocks, step_tokens), (sharing, layerwise))| Life {
            acts,
            ranks,
            blocks,
            step_tokens,
            sharing,
            layerwise,
        },
    )
}

/// What each prompt comes to.
#[derive(Default)]
struct Truth(HashMap<Vec<u32>, (Vec<u32>, Vec<LogitsDigest>)>);

impl Truth {
    fn of(&mut self, prompt: &[u32]) -> &(Vec<u32>, Vec<LogitsDigest>) {
        self.0.entry(prompt.to_vec()).or_insert_with(|| {
            let asks = [("r".to_owned(), prompt.to_vec(), WANTED)];
            let one = reference(&config(), &asks).remove(0);
            (one.tokens, one.logits)
        })
    }
}

/// Lives one life; gives what was asked and what ended.
fn live(life: &Life, cluster: &Cluster, network: &MockNetwork) -> (Vec<Vec<u32>>, Vec<Completion>) {
    let config = EngineConfig {
        ranks: life.ranks,
        blocks: life.blocks,
        step_tokens: life.step_tokens,
        prefix_caching: life.sharing,
        ..config()
    };
    let link = cluster.link(&json!({"use_layerwise": life.layerwise}));
    let mut engine = Engine::with_store(&config, &link).expect("a good configuration");
    let mut asked: Vec<Vec<u32>> = Vec::new();
    for act in &life.acts {
        match act {
            Act::Submit {
                beginning,
                len,
                end,
            } => {
                let prompt = [&text(*beginning, 30)[..], &text(*end, *len)].concat();
                let prompt = prompt[..prompt.len().min(50)].to_vec();
                let id = asked.len().to_string();
                engine
                    .submit(id.as_str(), prompt.clone(), WANTED)
                    .expect("54 tokens fit");
                asked.push(prompt);
            }
            Act::Steps(count) => {
                for _ in 0..*count {
                    engine.step().expect("no rank is lost");
                }
            }
            Act::Preempt(which) => drop(engine.preempt(&which.to_string().as_str().into())),
            Act::Abort(which) => drop(engine.abort(&which.to_string().as_str().into())),
            Act::Failures(thousandths) => network.set_conditions(Conditions {
                latency: Duration::ZERO..=Duration::from_millis(5),
                failures: f64::from(*thousandths) / 1000.0,
                error: PieceError::PeerGone,
                part_bytes: 64,
            }),
        }
    }
    let ended = engine.run().expect("no rank is lost");
    assert_eq!(engine.open(), 0);
    assert_eq!(engine.idle_blocks() as u64, life.blocks, "blocks come back");
    engine.close(PATIENCE).expect("everything ends");
    network.set_conditions(Conditions::default());
    (asked, ended)
}

#[test]
fn whatever_happens_requests_end_and_results_are_right() {
    let network = MockNetwork::new(11, Pace::Immediate);
    // Small enough that lives evict what others have stored.
    let cluster = Cluster::with(&[256 << 10], Some(network.clone()));
    let mut truth = Truth::default();
    let (mut loaded, mut cuts) = (0, 0);
    // No shrinking: the pool is not the same any more when a life is lived again.
    let mut runner = TestRunner::deterministic();
    for _ in 0..LIVES {
        let tree = life().new_tree(&mut runner).expect("a life");
        let life = tree.current();
        let (asked, ended) = live(&life, &cluster, &network);
        assert_eq!(ended.len(), asked.len(), "each ends once: {life:?}");
        for one in ended {
            let number: usize = one.id.as_str().parse().expect("a number");
            let (tokens, logits) = truth.of(&asked[number]);
            let upto = one.tokens.len();
            assert!(one.failed || upto == WANTED, "{} of {life:?}", one.id);
            assert_eq!(
                one.tokens,
                tokens[..upto],
                "tokens of {} of {life:?}",
                one.id
            );
            assert_eq!(
                one.logits,
                logits[..upto],
                "logits of {} of {life:?}",
                one.id
            );
            loaded += one.loaded_tokens;
            cuts += one.cuts;
        }
    }
    assert!(
        loaded > 0,
        "lives find what others have stored; {cuts} loads failed"
    );
}
