use std::sync::Arc;
use std::time::{Duration, Instant};

use layercake_protocol::ids::{Capability, Generation, MemoryKind, RegionId};
use proptest::prelude::*;

use super::*;
use crate::batch::Direction;
use crate::error::Refusal;

const SOON: Duration = Duration::from_millis(20);

fn registry() -> Arc<Registry> {
    Arc::new(Registry::new())
}

fn allocate(registry: &Arc<Registry>, len: u64, access: Access) -> Memory {
    let options = AllocateOptions {
        access,
        generation_tags: true,
        ..AllocateOptions::default()
    };
    Memory::new(
        registry.allocate(len, options).expect("some memory"),
        Arc::clone(registry),
    )
}

#[test]
fn what_cannot_be_registered_is_refused_with_the_reason() {
    let registry = registry();
    let buffer = vec![0_u8; 8192];
    let addr = buffer.as_ptr() as usize;
    let register = |addr, len, kind| {
        let entry = registry.register_foreign(addr, len, kind, Access::RemoteRead);
        entry.map(|entry| Memory::new(entry, Arc::clone(&registry)))
    };
    let host = MemoryKind::Host;
    assert!(matches!(register(addr, 0, host), Err(Error::EmptyRegion)));
    assert!(matches!(register(0, 10, host), Err(Error::NullAddress)));
    assert!(matches!(
        register(usize::MAX - 5, 10, host),
        Err(Error::AddressOverflow { .. })
    ));
    assert!(matches!(
        register(addr, u64::MAX, host),
        Err(Error::AddressOverflow { .. })
    ));
    for kind in [
        MemoryKind::Cuda { device: 3 },
        MemoryKind::Rocm { device: 0 },
        MemoryKind::Npu { device: 1 },
    ] {
        let error = register(addr, 10, kind).expect_err("a device");
        assert!(error.to_string().contains(&kind.to_string()), "{error}");
    }
    let first = register(addr + 100, 100, host).expect("free");
    for (at, len) in [(100, 100), (0, 101), (199, 1), (150, 10), (0, 8192)] {
        match register(addr + at, len, host) {
            Err(Error::Overlap { region, .. }) => assert_eq!(region, first.id()),
            other => panic!("{at}..+{len}: {other:?}"),
        }
    }
    let before = register(addr, 100, host).expect("it ends where the other begins");
    let after = register(addr + 200, 100, host).expect("it begins where the other ends");
    first.unregister(Duration::ZERO).expect("nobody uses it");
    let again = register(addr + 100, 100, host).expect("free again");
    assert_ne!(again.id(), first.id(), "an id is never used twice");
    drop((before, after));
    assert!(registry.allocate(0, AllocateOptions::default()).is_err());
    assert!(
        registry
            .register(Vec::new().into(), Access::LocalOnly)
            .is_err()
    );
}

#[test]
fn a_registration_that_outlived_its_memory_is_in_nobodys_way() {
    let registry = registry();
    let buffer = vec![0_u8; 8192];
    let addr = buffer.as_ptr() as usize;
    let stale = registry
        .register_foreign(addr, 8192, MemoryKind::Host, Access::LocalOnly)
        .map(|entry| Memory::new(entry, Arc::clone(&registry)))
        .expect("free");
    // The allocator gave the same addresses out again, to the engine this time.
    let own = registry
        .register(buffer.into(), Access::LocalOnly)
        .map(|entry| Memory::new(entry, Arc::clone(&registry)))
        .expect("memory of its own");
    let foreign = || registry.register_foreign(addr, 10, MemoryKind::Host, Access::LocalOnly);
    assert!(matches!(foreign(), Err(Error::Overlap { region, .. }) if region == stale.id()));
    own.unregister(Duration::ZERO).expect("nobody uses it");
    assert!(foreign().is_err(), "the first registration still stands");
    stale.unregister(Duration::ZERO).expect("nobody uses it");
    foreign().expect("free again");
}

#[test]
fn a_pinned_region_is_waited_for_and_kept() {
    let registry = registry();
    let memory = allocate(&registry, 4096, Access::RemoteReadWrite);
    let capability = memory.region().capability;
    let pin = registry
        .open(memory.id(), &capability)
        .expect("its capability");
    let refused = memory.unregister(SOON).expect_err("in use");
    assert!(matches!(refused, Error::StillInFlight { .. }));
    let unknown = registry.open(memory.id(), &capability).map(|_| ());
    assert_eq!(unknown, Err(Refusal::UnknownRegion), "withdrawn at once");
    assert!(
        memory
            .slice(0, 10)
            .is_ok_and(|slice| !slice.pin_into(&mut Pins::new()))
    );
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| memory.unregister(Duration::from_secs(20)));
        drop(pin);
        waiting.join().expect("no panic").expect("the pin is gone");
    });
    memory
        .unregister(Duration::ZERO)
        .expect("again is harmless");
}

#[test]
fn dropping_the_handle_withdraws_and_keeps_what_is_in_use() {
    let registry = registry();
    let memory = allocate(&registry, 4096, Access::RemoteReadWrite);
    memory.copy_in(0, b"bytes").expect("inside");
    let (id, capability) = (memory.id(), memory.region().capability);
    let pin = registry.open(id, &capability).expect("its capability");
    let begun = Instant::now();
    drop(memory);
    assert!(
        begun.elapsed() < Duration::from_secs(5),
        "it does not wait for the pin"
    );
    assert!(registry.open(id, &capability).is_err());
    assert_eq!(registry.len(), 0);
    let source = pin.entry().source(0, 5).expect("inside");
    let mut bytes = [0; 5];
    crate::racy::copy(crate::racy::Target::from_slice(&mut bytes), source);
    assert_eq!(&bytes, b"bytes", "the memory is still there");
}

#[test]
fn only_the_right_capability_opens_a_region() {
    let registry = registry();
    let (a, b) = (
        allocate(&registry, 64, Access::RemoteRead),
        allocate(&registry, 64, Access::RemoteRead),
    );
    let open = |id, capability: &Capability| {
        registry
            .open(id, capability)
            .map(|served| served.entry().id())
    };
    assert_eq!(open(a.id(), &a.region().capability), Ok(a.id()));
    assert_eq!(
        open(a.id(), &b.region().capability),
        Err(Refusal::BadCapability)
    );
    assert_eq!(
        open(a.id(), &Capability::draw()),
        Err(Refusal::BadCapability)
    );
    assert_eq!(
        open(RegionId(77), &a.region().capability),
        Err(Refusal::UnknownRegion)
    );
}

#[test]
fn allocated_memory_is_sealed_shared_and_zero() {
    let registry = registry();
    for huge_pages in [false, true] {
        let options = AllocateOptions {
            pretouch: true,
            huge_pages,
            generation_tags: true,
            access: Access::RemoteRead,
        };
        let entry = registry.allocate(100_001, options).expect("some memory");
        let memory = Memory::new(entry, Arc::clone(&registry));
        let entry = memory.entry();
        let fd = entry.fd().expect("a memfd");
        let seals = rustix::fs::fcntl_get_seals(fd).expect("a memfd");
        let wanted = rustix::fs::SealFlags::SHRINK
            | rustix::fs::SealFlags::GROW
            | rustix::fs::SealFlags::SEAL;
        assert!(seals.contains(wanted));
        let other = Mapping::shared(fd, 100_001, true).expect("mapped a second time");
        let mut bytes = vec![1; 100_001];
        memory.copy_out(0, &mut bytes).expect("inside");
        assert!(bytes.iter().all(|byte| *byte == 0));
        memory.copy_in(8, &7_u64.to_ne_bytes()).expect("inside");
        let word = other.atomics()[1].load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(word, 7, "both mappings show the same memory");
        assert_eq!(memory.tags(0, memory.len()).expect("tagged").len(), 25);
        assert!(memory.copy_in(100_000, &[0; 2]).is_err());
        assert!(memory.slice(u64::MAX, 2).is_err());
        assert!(memory.fence(100_001, 1, Generation(1)).is_err());
    }
}

#[test]
fn a_slice_is_filled_by_as_many_bytes_and_not_after_its_memory_was_withdrawn() {
    let registry = registry();
    let memory = allocate(&registry, 100, Access::LocalOnly);
    let slice = memory.slice(10, 4).expect("inside");
    assert!(slice.fill(&[1, 2, 3, 4]));
    assert!(!slice.fill(&[9; 3]) && !slice.fill(&[9; 5]));
    let mut bytes = [0; 6];
    memory.copy_out(9, &mut bytes).expect("inside");
    assert_eq!(bytes, [0, 1, 2, 3, 4, 0]);
    memory.unregister(SOON).expect("nothing is under way");
    assert!(!slice.fill(&[9; 4]));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn an_operation_passes_exactly_if_it_is_inside_and_allowed(
        offset in prop_oneof![0_u64..300, any::<u64>()],
        len in prop_oneof![0_u64..300, any::<u64>()],
        access in prop_oneof![
            Just(Access::LocalOnly), Just(Access::RemoteRead), Just(Access::RemoteWrite), Just(Access::RemoteReadWrite)
        ],
        read: bool,
    ) {
        let registry = registry();
        let memory = allocate(&registry, 200, access);
        let direction = if read { Direction::Read } else { Direction::Write };
        let allowed = if read { access.allows_read() } else { access.allows_write() };
        let inside = u128::from(offset) + u128::from(len) <= 200;
        let passes = memory.entry().check_op(direction, offset, len).is_ok();
        prop_assert_eq!(passes, allowed && inside && len > 0);
    }
}
