//! The link between engine and master: one message that is lost, late or overtaken, of every kind, for
//! an engine that saves and one that loads.
//!
//! Every run ends with the results of an engine without a store, or, under the policy `fail`, with
//! failures of requests that were to load. Afterwards the pool holds nothing wrong: an engine over a
//! link without faults reads it.

use std::time::Duration;

use layercake_connector::stats::MissReason;
use layercake_engine::run::{Completion, Engine, EngineConfig};
use layercake_store::link::Timeouts;
use serde_json::json;

use crate::cluster::{Cluster, PATIENCE, config};
use crate::meddler::{Fault, Kind, Meddler, Plan};
use crate::rig::{Ask, loaded, on_store, reference, run, same, text};

const POOL: u64 = 8 << 20;

/// How long a call waits. The fault takes this long, and all else should not; where a machine is so slow that a
/// run did not come to the fault, or a call ended by itself, it is made again with more time.
const CALLS: [Duration; 3] = [
    Duration::from_millis(300),
    Duration::from_secs(3),
    Duration::from_secs(30),
];

const KINDS: [Kind; 3] = [Kind::LookUp, Kind::Start, Kind::End];

const FAULTS: usize = 7;

/// Ranks, and whether layers are moved or whole objects.
const SHAPES: [(u32, bool); 4] = [(1, true), (2, true), (4, true), (2, false)];

fn faults(call: Duration) -> [Fault; FAULTS] {
    [
        Fault::LoseRequest,
        Fault::LoseAnswer,
        Fault::Cut,
        Fault::Delay(Duration::from_millis(20)),
        Fault::Delay(call * 3 / 2),
        Fault::ReorderRequest,
        Fault::ReorderAnswer,
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Prefill,
    Decode,
}

/// Two conversations that share a beginning, and one that shares none.
fn asks() -> Vec<Ask> {
    let shared = text(30, 14);
    let ask = |id: &str, prompt| (id.to_owned(), prompt, 2);
    vec![
        ask("one", [&shared[..], &text(31, 9)].concat()),
        ask("other", [&shared[..], &text(32, 5)].concat()),
        ask("alone", text(33, 17)),
    ]
}

/// What a run had to do without.
#[derive(Debug, Default)]
struct Lost {
    lookups: u64,
    loads: u64,
    saves: u64,
    /// Leases that were not given back, as far as the client knows. Sessions that follow each other closely share one: then
    /// these are too many.
    leases: u64,
}

struct Bench {
    side: Side,
    config: EngineConfig,
    layerwise: bool,
    expected: Vec<Completion>,
}

impl Bench {
    fn new(side: Side, ranks: u32, layerwise: bool) -> Self {
        let config = EngineConfig {
            ranks,
            step_tokens: 19,
            ..config()
        };
        Self {
            side,
            layerwise,
            expected: reference(&config, &asks()),
            config,
        }
    }

    /// Whether what is found is right, or reported.
    #[track_caller]
    fn judge(&self, found: &[Completion], policy: &str, what: &str) {
        if policy == "recompute" {
            return same(found, &self.expected, what);
        }
        let (failed, good): (Vec<_>, Vec<_>) = found.iter().cloned().partition(|one| one.failed);
        for one in &failed {
            assert!(one.loaded_tokens > 0, "{what}: {} had no load", one.id);
        }
        let expected: Vec<_> = self
            .expected
            .iter()
            .filter(|one| good.iter().any(|found| found.id == one.id))
            .cloned()
            .collect();
        assert_eq!(found.len(), self.expected.len(), "{what}");
        same(&good, &expected, what);
    }

    /// One cell; `None`: the machine was too slow for the fault to be met. Else whether another message
    /// overtook the one that it met.
    fn cell(&self, call: Duration, plan: Plan, policy: &str) -> Option<bool> {
        let what = format!(
            "{:?}, {} ranks, layerwise {}, {plan:?}, {policy}",
            self.side, self.config.ranks, self.layerwise
        );
        let cluster = Cluster::start(POOL);
        let clean = || cluster.link(&json!({"use_layerwise": self.layerwise}));
        // The leases of the first reader are given back, by themselves, before the second one starts.
        let (role, rounds) = match self.side {
            Side::Prefill => ("kv_both", 1),
            Side::Decode => ("kv_consumer", 2),
        };
        if self.side == Side::Decode {
            let all = on_store(&self.config, &clean(), &asks());
            same(&all, &self.expected, "filled");
        }
        let meddler = Meddler::start(&cluster.runtime, cluster.address, plan);
        let timeouts = Timeouts {
            call,
            // A link that is held up is not taken for a broken one.
            ping: call * 10,
            ..Timeouts::default()
        };
        let store = cluster.client_by(meddler.address, timeouts);
        let options = json!({
            "use_layerwise": self.layerwise,
            "kv_role": role,
            "kv_load_failure_policy": policy,
        });
        let link = cluster.link_of(store, &options);
        let mut lost = Lost::default();
        for _ in 0..rounds {
            let mut engine = Engine::with_store(&self.config, &link).expect("good");
            let found = run(&mut engine, &asks());
            self.judge(&found, policy, &what);
            assert_eq!(engine.idle_blocks() as u64, self.config.blocks, "{what}");
            let cuts = found.iter().map(|one| one.cuts).sum::<u32>();
            lost.loads += u64::from(cuts) + found.iter().filter(|one| one.failed).count() as u64;
            let (scheduler, workers) = engine.connector_stats().expect("it has a store");
            lost.lookups += scheduler.missed(MissReason::Master);
            lost.saves += workers
                .iter()
                .map(|worker| worker.failed_saves)
                .sum::<u64>();
            engine.close(PATIENCE).expect("everything ends");
            if plan.kind == Kind::End && self.side == Side::Decode {
                cluster.eventually("leases are given back", |_| meddler.struck() > 0);
            }
        }
        let again = on_store(&self.config, &clean(), &asks());
        same(&again, &self.expected, &format!("{what}, afterwards"));
        if self.side == Side::Decode {
            assert!(loaded(&again) > 0, "{what}, afterwards");
        }
        if meddler.struck() == 0 {
            return None;
        }
        // Returns when leases that are being given back have been.
        cluster.runtime.block_on(link.store.end_gets(Vec::new()));
        let stats = link.store.stats();
        lost.leases = stats.gets_started.saturating_sub(stats.leases_returned);
        let was_felt = self.felt(plan, call, &lost, &meddler, &what);
        was_felt.then_some(meddler.overtaken() > 0)
    }

    /// Sees to it that the fault had the effect that it must have. False: it had one though it must have none,
    /// which happens where a call's time was over for other reasons.
    #[track_caller]
    fn felt(&self, plan: Plan, call: Duration, lost: &Lost, meddler: &Meddler, what: &str) -> bool {
        let of_kind = match (plan.kind, self.side) {
            (Kind::LookUp, _) => lost.lookups,
            (Kind::Start, Side::Prefill) => lost.saves,
            (Kind::Start, Side::Decode) => lost.loads,
            // A commit that nobody answered is asked again.
            (Kind::End, Side::Prefill) => lost.saves + meddler.repeated() as u64,
            (Kind::End, Side::Decode) => lost.leases,
        };
        match plan.fault {
            Fault::LoseRequest | Fault::LoseAnswer => assert!(of_kind > 0, "{what}: {lost:?}"),
            Fault::Delay(pause) if pause > call => assert!(of_kind > 0, "{what}: {lost:?}"),
            Fault::Cut => assert!(meddler.reconnected() > 0, "{what}: {lost:?}"),
            // Leases that were shared look like lost ones. The next call for their objects waits for the late end.
            Fault::Delay(_) if (plan.kind, self.side) == (Kind::End, Side::Decode) => {}
            // It came late, and nobody minded.
            Fault::Delay(_) => return of_kind == 0,
            // Where no other message came, it never did.
            Fault::ReorderRequest | Fault::ReorderAnswer => {
                assert!(of_kind > 0 || meddler.overtaken() > 0, "{what}: {lost:?}");
            }
        }
        true
    }

    /// All kinds and faults. Most of a cell's time is waiting, so they run side by side.
    fn all(&self) {
        let overtaken = KINDS.into_iter().flat_map(|kind| {
            let policies: &[&str] = match (kind, self.side) {
                (Kind::Start, Side::Decode) => &["recompute", "fail"],
                _ => &["recompute"],
            };
            let cells = (0..FAULTS).flat_map(|at| policies.iter().map(move |policy| (at, *policy)));
            std::thread::scope(|scope| {
                let cells: Vec<_> = cells
                    .map(|(at, policy)| scope.spawn(move || self.met(kind, at, policy)))
                    .collect();
                let met = cells.into_iter().map(|cell| cell.join().expect("it holds"));
                met.collect::<Vec<_>>()
            })
        });
        let overtaken = overtaken.filter(|overtaken| *overtaken).count();
        assert!(overtaken > 0, "some messages were overtaken");
    }

    /// A cell, with more time where it is needed.
    fn met(&self, kind: Kind, fault: usize, policy: &str) -> bool {
        // Not always the first rank's.
        let spared = match (kind, self.side) {
            // One for all ranks.
            (Kind::LookUp, _) | (Kind::End, Side::Decode) => 0,
            _ => self.config.ranks as usize / 2,
        };
        let cells = CALLS.iter().find_map(|call| {
            let fault = faults(*call)[fault];
            let plan = Plan {
                kind,
                fault,
                spared,
            };
            self.cell(*call, plan, policy)
        });
        cells.unwrap_or_else(|| panic!("no {kind:?} met the fault as it should"))
    }
}

#[test]
fn a_message_of_an_engine_that_saves() {
    for (ranks, layerwise) in SHAPES {
        Bench::new(Side::Prefill, ranks, layerwise).all();
    }
}

#[test]
fn a_message_of_an_engine_that_loads() {
    for (ranks, layerwise) in SHAPES {
        Bench::new(Side::Decode, ranks, layerwise).all();
    }
}
