//! Random histories of holds against a model that knows whose each granule is.

use std::collections::{BTreeMap, BTreeSet};

use layercake_protocol::command::FenceId;
use proptest::prelude::{Just, ProptestConfig, Strategy, any, prop, prop_oneof, proptest};

use crate::harness::*;
use crate::holds::{HOLD, NODE, scene, slot};

#[derive(Clone, Copy, Debug)]
enum Op {
    Grant(usize),
    /// Which hold, where, what, how long, and who says so.
    Fill(prop::sample::Index, u64, usize, u64, bool),
    GiveBack(prop::sample::Index),
    Abandon(prop::sample::Index),
    Put(usize, u64),
    Remove(usize),
    CallBack,
    Fence(prop::sample::Index, bool),
    Drop(prop::sample::Index),
    Leave(usize),
}

fn op() -> impl Strategy<Value = Op> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        3 => (0_usize..2).prop_map(Op::Grant),
        // The number behind a hold's last is another hold's, and the one after it may be a place in that.
        9 => (index(), 0_u64..65, 0_usize..12, 1_u64..9, prop::bool::weighted(0.9))
            .prop_map(|(hold, at, key, len, own)| Op::Fill(hold, at, key, len, own)),
        1 => index().prop_map(Op::GiveBack),
        1 => index().prop_map(Op::Abandon),
        3 => (0_usize..12, 1_u64..80).prop_map(|(key, len)| Op::Put(key, len)),
        3 => (0_usize..12).prop_map(Op::Remove),
        1 => Just(Op::CallBack),
        2 => (index(), any::<bool>()).prop_map(|(fence, attached)| Op::Fence(fence, attached)),
        1 => index().prop_map(Op::Drop),
        1 => (0_usize..2).prop_map(Op::Leave),
    ]
}

/// Whose a granule is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Owner {
    Hold(u64),
    Object(u64),
    Kept(u64),
}

struct Model {
    world: World,
    node: Node,
    clients: Vec<Caller>,
    /// Every hold that was ever granted, and whether it is open.
    holds: Vec<(Hold, Caller, bool)>,
    granules: BTreeMap<u64, Owner>,
    /// The greatest number that was used there.
    tags: BTreeMap<u64, u64>,
    objects: BTreeMap<usize, u64>,
    fences: BTreeMap<FenceId, ModelFence>,
    drops: BTreeMap<FenceId, (ClientId, BTreeSet<u64>)>,
    /// Given up by clients that could not say that nothing is in flight.
    in_doubt: BTreeSet<u64>,
}

struct ModelFence {
    writer: ClientId,
    numbers: BTreeSet<u64>,
    in_doubt: bool,
    raised: bool,
    confirmed: bool,
}

impl Model {
    fn new() -> Self {
        let (world, node, first) = scene();
        let clients = vec![first, world.client()];
        Self {
            world,
            node,
            clients,
            holds: Vec::new(),
            granules: BTreeMap::new(),
            tags: BTreeMap::new(),
            objects: BTreeMap::new(),
            fences: BTreeMap::new(),
            drops: BTreeMap::new(),
            in_doubt: BTreeSet::new(),
        }
    }

    /// Gives granules to somebody who must find them free, or as a part of his hold.
    fn take(&mut self, first: u64, len: u64, owner: Owner, before: Option<Owner>, tag: u64) {
        for granule in first..first + len {
            assert_eq!(self.granules.get(&granule).copied(), before, "{owner:?}");
            self.granules.insert(granule, owner);
            let last = self.tags.insert(granule, tag).unwrap_or(0);
            assert!(last < tag, "a later writer has a smaller number");
        }
    }

    fn free(&mut self, owner: Owner) {
        self.granules.retain(|_, own| *own != owner);
    }

    fn end(&mut self, number: u64, owner: Option<Owner>) {
        for (hold, _, open) in &mut self.holds {
            *open &= hold.generation.0 != number;
        }
        for own in self.granules.values_mut() {
            if *own == Owner::Hold(number) {
                *own = owner.unwrap_or(Owner::Kept(0));
            }
        }
        self.free(Owner::Kept(0));
    }

    fn open(&self, wanted: impl Fn(&Hold, &Caller) -> bool) -> Vec<u64> {
        let open = self
            .holds
            .iter()
            .filter(|(h, c, open)| *open && wanted(h, c));
        open.map(|(hold, ..)| hold.generation.0).collect()
    }

    fn call_back(&mut self, numbers: Vec<u64>) {
        for number in numbers {
            self.end(number, Some(Owner::Kept(number)));
        }
    }

    fn fill(&mut self, hold: prop::sample::Index, at: u64, name: usize, len: u64, own: bool) {
        if self.holds.is_empty() {
            return;
        }
        let (hold, owner, open) = self.holds[hold.index(self.holds.len())].clone();
        let caller = if own {
            owner.clone()
        } else {
            self.world.client()
        };
        let put = slot(&hold, at, &key(&format!("k{name}")), len);
        let answer = self.world.put_slot(&caller, &put);
        if own && !self.clients.contains(&caller) {
            assert_eq!(answer, Err(Refusal::UnknownMember));
            return;
        }
        if let Some(number) = self.objects.get(&name) {
            let expected = if *number == put.generation.0 {
                Ok(())
            } else {
                Err(Refusal::AlreadyExists)
            };
            assert_eq!(answer, expected);
            return;
        }
        let number = hold.generation.0;
        let first = hold.offset / GRANULE + at;
        let unused = (first..first + len)
            .all(|granule| self.granules.get(&granule) == Some(&Owner::Hold(number)));
        if !(own && open && unused && at < HOLD) {
            assert_eq!(answer, Err(Refusal::Superseded));
            return;
        }
        assert_eq!(answer, Ok(()));
        let tag = put.generation.0;
        self.take(
            first,
            len,
            Owner::Object(tag),
            Some(Owner::Hold(number)),
            tag,
        );
        self.objects.insert(name, tag);
    }

    fn put(&mut self, name: usize, len: u64) {
        let caller = self.clients[0].clone();
        let name_of = key(&format!("k{name}"));
        match self.world.put(&caller, &name_of, granules(len)) {
            Err(refusal) => assert_eq!(refusal, Refusal::AlreadyExists),
            Ok(started) => {
                let place = started.replicas[0];
                let tag = started.generation.0;
                let first = place.offset / GRANULE;
                self.take(first, len, Owner::Object(tag), None, tag);
                self.objects.insert(name, tag);
                assert_eq!(self.world.commit(&caller, &name_of, &started), Ok(()));
            }
        }
    }

    /// What may go is gone then, and holds are called back.
    fn ask_for_all(&mut self) {
        // The whole segment: there is room only if nobody has any of it.
        let caller = self.clients[0].clone();
        let all = PutStart {
            header_rows: 1,
            ..PutStart::new(key("all"), granules(NODE))
        };
        match self
            .world
            .put_with(&caller, all, &ReplicateConfig::default())
        {
            Ok(started) => {
                self.notice_evictions();
                let tag = started.generation.0;
                self.take(0, NODE, Owner::Object(tag), None, tag);
                assert_eq!(self.world.revoke(&caller, &key("all"), &started), Ok(()));
                self.free(Owner::Object(tag));
            }
            Err(refusal) => assert!(matches!(refusal, Refusal::NoSpace { .. })),
        }
        self.call_back(self.open(|_, _| true));
        // What may go is gone.
        self.notice_evictions();
    }

    fn run(&mut self, op: Op) {
        let now = self.world.now();
        match op {
            Op::Grant(client) => {
                let caller = self.clients[client].clone();
                let own = self.open(|_, c| c.client == caller.client).len();
                if let Some(hold) = self.world.hold(&caller) {
                    assert!(own < 2);
                    let number = hold.generation.0;
                    let first = hold.offset / GRANULE;
                    self.take(first, HOLD, Owner::Hold(number), None, number);
                    self.holds.push((hold, caller, true));
                }
            }
            Op::Fill(hold, at, name, len, own) => self.fill(hold, at, name, len, own),
            Op::GiveBack(hold) if !self.holds.is_empty() => {
                let (hold, caller, _) = self.holds[hold.index(self.holds.len())].clone();
                self.world.give_back(&caller, &hold);
                self.end(hold.generation.0, None);
                self.confirm(hold.generation.0);
            }
            Op::Abandon(hold) if !self.holds.is_empty() => {
                let (hold, caller, open) = self.holds[hold.index(self.holds.len())].clone();
                let number = hold.generation.0;
                let object = ObjectRef::of_hold(hold.generation);
                if open {
                    self.world.state.put_abandon(now, &caller, &[object]);
                    self.in_doubt.insert(number);
                    self.end(number, Some(Owner::Kept(number)));
                }
            }
            Op::Put(name, len) => self.put(name, len),
            Op::Remove(name) => {
                let removed = self.world.remove(&key(&format!("k{name}")), false);
                match self.objects.remove(&name) {
                    Some(tag) => {
                        assert_eq!(removed, Ok(()));
                        self.free(Owner::Object(tag));
                    }
                    None => assert_eq!(removed, Err(Refusal::NotFound)),
                }
            }
            Op::CallBack => self.ask_for_all(),
            Op::Fence(fence, attached) if !self.fences.is_empty() => {
                let ids: Vec<_> = self.fences.keys().copied().collect();
                let id = ids[fence.index(ids.len())];
                let node = self.node.client;
                self.world.state.fence_done(now, node, id, attached);
                let fence = self.fences.get_mut(&id).unwrap();
                fence.raised = true;
                if !attached || (fence.confirmed && !fence.in_doubt) {
                    self.lift(id);
                }
            }
            Op::Drop(drop) if !self.drops.is_empty() => {
                let ids: Vec<_> = self.drops.keys().copied().collect();
                let id = ids[drop.index(ids.len())];
                let (client, numbers) = self.drops[&id].clone();
                self.world.state.fence_done(now, client, id, false);
                self.lift_where(|fence| {
                    fence.confirmed |= fence.numbers.is_subset(&numbers);
                    fence.confirmed && fence.raised && !fence.in_doubt
                });
            }
            Op::Leave(client) => {
                let left = std::mem::replace(&mut self.clients[client], self.world.client());
                for number in self.open(|_, c| c.client == left.client) {
                    self.end(number, None);
                }
                self.world.state.leave(now, left.client);
                self.lift_where(|fence| fence.writer == left.client && !fence.in_doubt);
            }
            _ => {}
        }
        self.read_events();
        self.check();
    }

    fn lift(&mut self, id: FenceId) {
        let fence = self.fences.remove(&id).unwrap();
        for number in fence.numbers {
            self.free(Owner::Kept(number));
        }
    }

    fn lift_where(&mut self, mut wanted: impl FnMut(&mut ModelFence) -> bool) {
        let ids = self
            .fences
            .iter_mut()
            .filter_map(|(id, f)| wanted(f).then_some(*id));
        for id in ids.collect::<Vec<_>>() {
            self.lift(id);
        }
    }

    /// Its client says that nothing of it is in flight.
    fn confirm(&mut self, number: u64) {
        if self.in_doubt.contains(&number) {
            return;
        }
        self.free(Owner::Kept(number));
        for fence in self.fences.values_mut() {
            fence.numbers.remove(&number);
        }
        self.fences.retain(|_, fence| !fence.numbers.is_empty());
    }

    fn notice_evictions(&mut self) {
        for (name, tag) in self.objects.clone() {
            if self.world.presence(&key(&format!("k{name}"))) == Presence::Absent {
                self.objects.remove(&name);
                self.free(Owner::Object(tag));
            }
        }
    }

    fn read_events(&mut self) {
        for event in self.world.state.take_events() {
            match event {
                Event::Fence { fence, .. } => {
                    let mut numbers = BTreeSet::new();
                    for place in fence.places {
                        let first = place.offset / GRANULE;
                        for granule in first..first + place.len / GRANULE {
                            match self.granules.get(&granule) {
                                Some(Owner::Kept(number)) => {
                                    numbers.insert(*number);
                                }
                                other => panic!("fenced, but it is {other:?}"),
                            }
                            let tag = self.tags.insert(granule, place.generation.0);
                            assert!(tag < Some(place.generation.0));
                        }
                    }
                    self.fences.insert(
                        fence.id,
                        ModelFence {
                            writer: fence.writer,
                            in_doubt: numbers.is_subset(&self.in_doubt),
                            numbers,
                            raised: false,
                            confirmed: false,
                        },
                    );
                }
                Event::DropSessions { to, drop } => {
                    let numbers = drop.objects.iter().map(|o| o.generation.0).collect();
                    self.drops.insert(drop.id, (to, numbers));
                }
                _ => {}
            }
        }
    }

    /// What is in use is what somebody has.
    fn check(&self) {
        let count = |wanted: fn(&Owner) -> bool| {
            self.granules.values().filter(|owner| wanted(owner)).count() as u64 * GRANULE
        };
        let gauges = self.world.state.gauges();
        assert_eq!(
            gauges.hold_bytes,
            count(|owner| matches!(owner, Owner::Hold(_)))
        );
        assert_eq!(gauges.objects, self.objects.len() as u64);
        let kept = count(|owner| matches!(owner, Owner::Kept(_)));
        assert_eq!(gauges.quarantined_bytes, kept);
        assert_eq!(gauges.used_bytes, count(|_| true));
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn no_granule_of_a_hold_is_anybody_elses(ops in prop::collection::vec(op(), 1..80)) {
        let mut model = Model::new();
        for op in ops {
            model.run(op);
        }
    }
}
