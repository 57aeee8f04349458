//! Quotas of tenants, and which key space their keys lie in.

use crate::harness::*;

/// Two tenants with a quota of 4 MiB each, in a pool of 64 MiB.
fn world() -> World {
    let quotas = ["t1", "t2"].map(|name| (tenant(name), 4 * MIB));
    let world = World::with(StateConfig {
        tenancy: Tenancy::Strict(quotas.into()),
        ..StateConfig::default()
    });
    world.node("n0", 32 * MIB);
    world.node("n1", 32 * MIB);
    world
}

fn tenant(name: &str) -> Tenant {
    Tenant::new(name).unwrap()
}

fn of(world: &World, name: &str) -> Caller {
    Caller {
        tenant: tenant(name),
        ..world.client()
    }
}

fn charged(world: &World, name: &str) -> u64 {
    let tenants = world.state.tenants().unwrap();
    let stat = tenants
        .into_iter()
        .find(|stat| stat.tenant.as_str() == name);
    stat.unwrap().charged_bytes
}

fn read_all(world: &World, caller: &Caller, keys: &[ObjectKey]) -> usize {
    let found = keys.iter().filter(|key| world.read(caller, key).is_ok());
    found.count()
}

#[test]
fn only_tenants_with_a_quota_store_anything() {
    let world = world();
    for name in ["default", "t3"] {
        let caller = of(&world, name);
        assert_eq!(
            world.put(&caller, &key("k"), 1),
            Err(Refusal::UnknownTenant)
        );
        assert_eq!(world.read(&caller, &key("k")), Err(Refusal::NotFound));
    }
    let (one, two) = (of(&world, "t1"), of(&world, "t2"));
    world.store(&one, &key("k"), 1);
    assert_eq!(world.read(&two, &key("k")), Err(Refusal::NotFound));
    world.store(&two, &key("k"), 2);
    assert_eq!(world.read(&one, &key("k")).unwrap().size, 1);
}

#[test]
fn a_full_quota_evicts_the_tenants_own_oldest_objects_and_no_others() {
    let world = world();
    let (one, two) = (of(&world, "t1"), of(&world, "t2"));
    let (keys, others) = (keys("k", 0..8), keys("o", 0..3));
    for key in &others {
        world.store(&two, key, MIB);
    }
    for key in &keys {
        world.store(&one, key, MIB);
        assert!(charged(&world, "t1") <= 4 * MIB);
    }
    assert_eq!(read_all(&world, &one, &keys[..4]), 0);
    assert_eq!(read_all(&world, &one, &keys[4..]), 4);
    assert_eq!(read_all(&world, &two, &others), 3);
    let evicted = world.state.counters().evicted_quota;
    assert_eq!((evicted.objects, evicted.bytes), (4, 4 * MIB));
    let stat = &world.state.tenants().unwrap()[0];
    assert_eq!((stat.evicted_bytes, stat.refused), (4 * MIB, 0));
}

#[test]
fn what_is_leased_pinned_or_being_written_is_not_evicted_for_a_quota() {
    let world = world();
    let caller = of(&world, "t1");
    world.store(&caller, &key("leased"), MIB);
    world.read(&caller, &key("leased")).unwrap();
    let hard = ReplicateConfig {
        hard_pin: true,
        ..ReplicateConfig::default()
    };
    world.store_with(&caller, PutStart::new(key("pinned"), MIB), &hard);
    let open = world.put(&caller, &key("open"), MIB).unwrap();
    world.store(&caller, &key("free"), MIB);
    world.store(&caller, &key("next"), MIB);
    assert_eq!(world.read(&caller, &key("free")), Err(Refusal::NotFound));
    world.read(&caller, &key("next")).unwrap();
    assert_eq!(
        world.put(&caller, &key("more"), MIB),
        Err(Refusal::QuotaExceeded)
    );
    assert_eq!(world.state.tenants().unwrap()[0].refused, 1);
    assert_eq!(
        world.put(&caller, &key("pinned"), MIB),
        Err(Refusal::AlreadyExists)
    );
    assert_eq!(world.revoke(&caller, &key("open"), &open), Ok(()));
    world.store(&caller, &key("more"), MIB);
}

#[test]
fn soft_pinned_objects_go_last_and_groups_together() {
    let world = world();
    let caller = of(&world, "t1");
    let soft = ReplicateConfig {
        soft_pin: true,
        ..ReplicateConfig::default()
    };
    world.store_with(&caller, PutStart::new(key("soft"), MIB), &soft);
    for name in ["g1", "g2"] {
        let mut put = PutStart::new(key(name), MIB);
        put.group = Some("g".to_owned());
        world.store_with(&caller, put, &ReplicateConfig::default());
    }
    world.store(&caller, &key("plain"), MIB);
    world.store(&caller, &key("next"), MIB);
    let there = |name| world.read(&caller, &key(name)).is_ok();
    assert!(!there("g1") && !there("g2"), "a group goes together");
    assert!(there("soft") && there("plain") && there("next"));
}

#[test]
fn every_replica_is_charged_and_every_way_out_takes_the_charge_away() {
    let world = world();
    let caller = of(&world, "t1");
    let twice = ReplicateConfig {
        replicas: 2,
        ..ReplicateConfig::default()
    };
    let put = |name: &str, size| PutStart::new(key(name), size);
    assert_eq!(
        world.put_with(&caller, put("large", 3 * MIB), &twice),
        Err(Refusal::QuotaExceeded)
    );
    world.store_with(&caller, put("a", MIB), &twice);
    assert_eq!(charged(&world, "t1"), 2 * MIB);
    let more = ReplicateConfig {
        replicas: 4,
        ..ReplicateConfig::default()
    };
    let started = world.put_with(&caller, put("b", MIB / 2), &more).unwrap();
    assert_eq!(
        charged(&world, "t1"),
        3 * MIB,
        "two segments hold two replicas"
    );
    assert_eq!(world.revoke(&caller, &key("b"), &started), Ok(()));
    let replacement = world.upsert(&caller, &key("a"), MIB).unwrap();
    assert_eq!(charged(&world, "t1"), 3 * MIB);
    assert_eq!(world.commit(&caller, &key("a"), &replacement), Ok(()));
    assert_eq!(charged(&world, "t1"), MIB);
    let of = tenant("t1");
    let removed = world.state.remove(world.now(), &of, &[key("a")], true);
    assert_eq!(removed, [Ok(())]);
    assert_eq!(charged(&world, "t1"), 0);
    world.put(&caller, &key("c"), MIB).unwrap();
    world.pass(SECOND * 601);
    world.tick();
    assert_eq!(charged(&world, "t1"), 0, "dropped by time");
}

#[test]
fn quotas_change_and_go_while_the_master_runs() {
    let world = world();
    let caller = of(&world, "t3");
    let name = tenant("t3");
    assert_eq!(world.state.remove_quota(&name), Err(Refusal::NotFound));
    assert_eq!(world.state.set_quota(&name, MIB), Ok(()));
    world.store(&caller, &key("k"), MIB);
    assert_eq!(world.state.remove_quota(&name), Err(Refusal::InProgress));
    assert_eq!(world.state.set_quota(&name, 10), Ok(()));
    assert_eq!(charged(&world, "t3"), MIB, "what is there stays");
    world.store(&caller, &key("small"), 10);
    assert_eq!(world.read(&caller, &key("k")), Err(Refusal::NotFound));
    let removed = world
        .state
        .remove(world.now(), &name, &[key("small")], false);
    assert_eq!(removed, [Ok(())]);
    assert_eq!(world.state.remove_quota(&name), Ok(()));
    assert_eq!(
        world.put(&caller, &key("k"), 1),
        Err(Refusal::UnknownTenant)
    );

    let plain = World::new();
    assert_eq!(plain.state.tenants(), None);
    assert!(plain.state.set_quota(&name, 1).is_err());
    assert!(plain.state.remove_quota(&name).is_err());
}
