//! Removal by request.

use layercake_protocol::error::Refusal;
use layercake_protocol::key::Tenant;

use super::State;
use super::api::{Caller, Version};
use super::effects::{Effects, Reason};
use super::moment::Moment;

impl State {
    /// Removes complete objects. With `force` a lease does not keep the name; the memory is kept until the
    /// lease ends or is given back. A reservation belongs to its writer: it is [`Refusal::NotReady`] even
    /// with force.
    pub fn remove<K: AsRef<str>>(
        &self,
        now: Moment,
        tenant: &Tenant,
        keys: &[K],
        force: bool,
    ) -> Vec<Result<(), Refusal>> {
        let mut effects = Effects::default();
        let tenant = self.tenants.find(tenant);
        let mut remove = |key: &K| {
            let key = key.as_ref();
            let tenant = tenant.ok_or(Refusal::NotFound)?;
            let hash = self.hasher.hash(tenant, key);
            let mut shard = self.shard(hash.shard);
            let slot = shard.find(hash.tag, tenant, key);
            let slot = slot.ok_or(Refusal::NotFound)?;
            if shard.entry(slot).is_open() {
                return Err(Refusal::NotReady);
            }
            if !force && shard.lease_end(slot) > now {
                return Err(Refusal::Leased);
            }
            shard.retire(now, slot, Reason::Removed, &mut effects);
            Ok(())
        };
        let answers = keys.iter().map(&mut remove).collect();
        self.carry_out(now, &mut effects);
        answers
    }

    /// Removes complete objects of exactly these generations, leased or not: the memory is kept until the lease
    /// ends or is given back. [`Refusal::NotFound`]: the key names another version by now, or none. As in
    /// [`remove`](Self::remove), a reservation is its writer's.
    pub fn remove_versions<V: Version>(
        &self,
        now: Moment,
        caller: &Caller,
        objects: &[V],
    ) -> Vec<Result<(), Refusal>> {
        let mut effects = Effects::default();
        let tenant = self.tenants.find(&caller.tenant);
        let mut remove = |object: &V| {
            let tenant = tenant.ok_or(Refusal::NotFound)?;
            let hash = self.hasher.hash(tenant, object.key());
            let mut shard = self.shard(hash.shard);
            let named = shard.find(hash.tag, tenant, object.key());
            let of_version = |slot: &u32| shard.entry(*slot).generation == object.generation();
            let slot = named.filter(of_version).ok_or(Refusal::NotFound)?;
            if shard.entry(slot).is_open() {
                return Err(Refusal::NotReady);
            }
            shard.retire(now, slot, Reason::Removed, &mut effects);
            Ok(())
        };
        let answers = objects.iter().map(&mut remove).collect();
        self.carry_out(now, &mut effects);
        answers
    }

    /// Removes the complete objects whose keys match and returns how many; leased ones only with `force`,
    /// reserved ones never.
    pub fn remove_matching(
        &self,
        now: Moment,
        tenant: &Tenant,
        matches: &dyn Fn(&str) -> bool,
        force: bool,
    ) -> u64 {
        let Some(tenant) = self.tenants.find(tenant) else {
            return 0;
        };
        let mut removed = 0;
        let mut effects = Effects::default();
        for number in 0..self.shards.len() {
            let mut next = Some(0);
            while let Some(from) = next {
                let mut shard = self.shard(number);
                next = shard.remove_matching(now, from, tenant, matches, force, &mut effects);
                drop(shard);
                removed += effects.gone[Reason::Removed as usize].objects;
                self.carry_out(now, &mut effects);
            }
        }
        removed
    }
}
