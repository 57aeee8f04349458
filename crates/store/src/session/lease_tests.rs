//! The lease table against a model of the master, which knows readers by version only.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

const LEASE: Duration = Duration::from_secs(10);
const IDLE: Duration = Duration::from_mins(1);

fn key(n: u8) -> ObjectKey {
    ObjectKey::new(&format!("key {n}")).expect("short")
}

#[derive(Clone, Debug)]
enum Step {
    Announce(u8),
    /// The n-th announced start gets its answer: the key's version, or none.
    Answer(usize, Option<u8>),
    End(usize),
    /// The n-th give-back arrives at the master.
    Arrive(usize),
    /// And its answer at the client.
    Gave(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        3 => (0..3_u8).prop_map(Step::Announce),
        3 => (0..8_usize, prop::option::weighted(0.8, 1..3_u8)).prop_map(|(n, g)| Step::Answer(n, g)),
        3 => (0..8_usize).prop_map(Step::End),
        2 => (0..8_usize).prop_map(Step::Arrive),
        2 => (0..8_usize).prop_map(Step::Gave),
    ];
    prop::collection::vec(step, 1..80)
}

#[derive(Default)]
struct Model {
    /// What the master has a reader for.
    readers: BTreeMap<ObjectKey, Vec<Generation>>,
    announced: Vec<ObjectKey>,
    sessions: Vec<Arc<Lease>>,
    on_the_way: Vec<ObjectRef>,
    arrived: Vec<ObjectRef>,
}

impl Model {
    fn has_reader(&self, object: &ObjectRef) -> bool {
        self.readers
            .get(&object.key)
            .is_some_and(|held| held.contains(&object.generation))
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// contract: lease-3
    #[test]
    fn the_master_has_a_reader_for_every_session_and_none_besides(steps in steps()) {
        let now = Instant::now();
        let mut table = LeaseTable::default();
        let mut model = Model::default();
        for step in steps {
            let mut gives = Vec::new();
            match step {
                Step::Announce(n) => {
                    table.begin_start(&key(n));
                    model.announced.push(key(n));
                }
                Step::Answer(n, generation) if !model.announced.is_empty() => {
                    let at = n % model.announced.len();
                    if !table.may_start(&model.announced[at]) {
                        continue;
                    }
                    let key = model.announced.remove(at);
                    let granted = generation.map(|g| {
                        let generation = Generation(u64::from(g));
                        let readers = model.readers.entry(key.clone()).or_default();
                        if !readers.contains(&generation) {
                            readers.push(generation);
                        }
                        (generation, Grant { sent: now, lease: LEASE })
                    });
                    model.sessions.extend(table.finish_start(&key, granted, now, &mut gives));
                }
                Step::End(n) if !model.sessions.is_empty() => {
                    let lease = model.sessions.remove(n % model.sessions.len());
                    table.end(&lease, &mut gives);
                }
                Step::Arrive(n) if !model.on_the_way.is_empty() => {
                    let object = model.on_the_way.remove(n % model.on_the_way.len());
                    model.readers.entry(object.key.clone()).or_default()
                        .retain(|held| *held != object.generation);
                    model.arrived.push(object);
                }
                Step::Gave(n) if !model.arrived.is_empty() => {
                    let object = model.arrived.remove(n % model.arrived.len());
                    table.gave(&object);
                }
                _ => {}
            }
            model.on_the_way.extend(gives);
            for lease in &model.sessions {
                prop_assert!(model.has_reader(lease.object()), "a session lost its lease");
            }
            prop_assert_eq!(table.sessions(), model.sessions.len() as u64);
        }
        // Everything ends: nothing stays behind on either side.
        for key in std::mem::take(&mut model.announced) {
            table.finish_start(&key, None, now, &mut model.on_the_way);
        }
        for lease in std::mem::take(&mut model.sessions) {
            table.end(&lease, &mut model.on_the_way);
        }
        for object in model.on_the_way.iter().chain(&model.arrived) {
            let held = model.readers.entry(object.key.clone()).or_default();
            held.retain(|held| *held != object.generation);
            table.gave(object);
        }
        prop_assert!(model.readers.values().all(Vec::is_empty), "a lease was never given back");
        prop_assert!(table.keys.is_empty());
    }
}

fn started(table: &mut LeaseTable, now: Instant) -> Arc<Lease> {
    table.begin_start(&key(0));
    let granted = Some((
        Generation(1),
        Grant {
            sent: now,
            lease: LEASE,
        },
    ));
    table
        .finish_start(&key(0), granted, now, &mut Vec::new())
        .expect("granted")
}

#[test]
fn a_read_that_straddles_the_end_of_the_lease_fails_and_so_do_later_ones() {
    let start = Instant::now();
    let mut table = LeaseTable::default();
    let lease = started(&mut table, start);
    lease.begin_read(start).expect("fresh");
    lease.end_read(start + LEASE / 2).expect("inside");
    lease.begin_read(start + LEASE / 2).expect("inside");
    assert_eq!(lease.end_read(start + LEASE), Err(Over));
    lease.renewed(Grant {
        sent: start + LEASE,
        lease: LEASE,
    });
    assert_eq!(
        lease.begin_read(start + LEASE),
        Err(Over),
        "what is over stays over"
    );
    let fresh = started(&mut table, start + LEASE);
    fresh
        .begin_read(start + LEASE)
        .expect("a new start is a new lease");
    let mut gives = Vec::new();
    table.end(&lease, &mut gives);
    assert!(gives.is_empty(), "the new session still needs it");
    table.end(&fresh, &mut gives);
    assert_eq!(gives.len(), 1);
}

// contract: lease-2
#[test]
fn leases_in_use_are_renewed_in_time_and_idle_ones_are_left_to_run_out() {
    let start = Instant::now();
    let mut table = LeaseTable::default();
    let lease = started(&mut table, start);
    assert!(table.due(start, IDLE).is_empty());
    let mut now = start;
    while now < start + IDLE {
        now += LEASE / 3;
        let due = table.due(now, IDLE);
        if now < start + IDLE {
            assert_eq!(due.len(), 1, "at {:?}", now - start);
        }
        assert!(table.due(now, IDLE).is_empty(), "one renewal at a time");
        for lease in &due {
            lease.renewed(Grant {
                sent: now,
                lease: LEASE,
            });
            lease.end_renewal();
        }
    }
    assert!(table.due(start + IDLE, IDLE).is_empty());
    lease.begin_read(now).expect("renewed");
    assert_eq!(
        table.due(now + IDLE * 2, IDLE).len(),
        1,
        "a read under way is use"
    );
    lease.end_renewal();
    assert_eq!(
        table.due(now + IDLE * 2, IDLE).len(),
        1,
        "a renewal that failed is repeated"
    );
    lease.end_renewal();
    lease.lapse();
    assert!(table.due(now + IDLE * 2, IDLE).is_empty());
    assert_eq!(lease.end_read(now), Err(Over));
}

#[test]
fn a_kept_lease_is_not_given_back() {
    let (mut table, mut gives, now) = (LeaseTable::default(), Vec::new(), Instant::now());
    let grant = Grant {
        sent: now,
        lease: LEASE,
    };
    let mut start = |table: &mut LeaseTable| {
        table.begin_start(&key(1));
        let granted = Some((Generation(1), grant));
        table
            .finish_start(&key(1), granted, now, &mut gives)
            .expect("granted")
    };
    let (kept, other) = (start(&mut table), start(&mut table));
    kept.keep();
    table.end(&other, &mut gives);
    table.end(&kept, &mut gives);
    assert_eq!(gives, [], "one session wanted it kept");
    assert!(table.due(now + LEASE / 2, IDLE).is_empty(), "nor renewed");
    assert!(table.may_start(&key(1)));
}
