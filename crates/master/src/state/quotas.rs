//! Quotas of tenants, where they rule (see [`Tenancy::Strict`]).
//!
//! A reservation that its tenant's quota has no room for evicts other objects of that tenant, in the order of
//! [`eviction`](super::eviction); whose they are is not known to the shards' queues, so the whole table is
//! looked at. One look makes room for a share of the quota, so that a tenant at its limit causes one look for
//! many reservations.

use std::cmp::Reverse;

use layercake_protocol::error::Refusal;
use layercake_protocol::key::Tenant;

use super::State;
use super::api::TenantStat;
use super::config::Tenancy;
use super::effects::{Effects, Reason};
use super::groups::Handle;
use super::moment::Moment;
use super::shard::{HARD_PINNED, Key, Phase, SOFT_PINNED};

/// An object that may go, with its place in the order: soft-pinned ones last.
type Candidate = (Reverse<(bool, Key)>, Handle);

impl State {
    /// Whether all tenants' keys belong into one key space.
    pub fn shares_tenants(&self) -> bool {
        self.config.tenancy == Tenancy::Shared
    }

    /// The tenants with a quota, by name; `None`: quotas don't rule.
    pub fn tenants(&self) -> Option<Vec<TenantStat>> {
        self.tenants.is_strict().then(|| self.tenants.stats())
    }

    /// Gives a tenant a quota in bytes, or another one. What it has beyond stays until it needs room.
    /// [`Refusal::InvalidArgument`]: quotas don't rule.
    pub fn set_quota(&self, tenant: &Tenant, bytes: u64) -> Result<(), Refusal> {
        self.check_strict()?;
        self.tenants.set_quota(tenant, bytes);
        Ok(())
    }

    /// Takes the quota of a tenant that stores nothing: it can't store anything any more.
    /// [`Refusal::InvalidArgument`]: quotas don't rule; [`Refusal::NotFound`]: it has none;
    /// [`Refusal::InProgress`]: it stores something.
    pub fn remove_quota(&self, tenant: &Tenant) -> Result<(), Refusal> {
        self.check_strict()?;
        self.tenants.remove_quota(tenant)
    }

    fn check_strict(&self) -> Result<(), Refusal> {
        if self.tenants.is_strict() {
            return Ok(());
        }
        Err(Refusal::invalid("this master has no quotas"))
    }

    /// Evicts objects of a tenant until its charge is `bytes` less, or a share of its quota if that is
    /// more. False: nothing of it could go.
    pub(super) fn evict_tenant(&self, now: Moment, tenant: u32, bytes: u64) -> bool {
        let _pressure = self.evicting.lock();
        let name = self.tenants.name(tenant);
        let stats = self.tenants.stats();
        let quota = stats.iter().find(|stat| stat.tenant == name);
        let quota = quota.map_or(0, |stat| stat.quota_bytes);
        if bytes > quota {
            return false;
        }
        let goal = bytes.max(self.share(quota, self.config.eviction_ratio));
        let mut candidates = self.candidates(now, tenant);
        // The last is the first to go.
        candidates.sort_unstable_by_key(|(order, _)| *order);
        let mut effects = Effects::default();
        let mut freed = 0;
        while freed < goal
            && let Some((_, handle)) = candidates.pop()
        {
            self.evict_one(now, handle, &mut effects);
            // Few, however many objects went: what one tenant gets back is one entry.
            let of_tenant = effects.discharged.iter().filter(|(of, _)| *of == tenant);
            freed = of_tenant.map(|(_, bytes)| bytes).sum();
        }
        self.tenants.count_evicted(tenant, freed);
        self.tally
            .count_eviction(effects.gone[Reason::Quota as usize].objects);
        self.carry_out(now, &mut effects);
        freed > 0
    }

    fn candidates(&self, now: Moment, tenant: u32) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for number in 0..self.shards.len() {
            let mut next = Some(0);
            while let Some(from) = next {
                let shard = self.shard(number);
                next = shard.visit(from, |slot, entry| {
                    let may_go = entry.tenant == tenant
                        && entry.phase == Phase::Complete
                        && !entry.has(HARD_PINNED)
                        && (self.config.evict_soft_pinned || !entry.has(SOFT_PINNED))
                        && shard.lease_end(slot) <= now;
                    if may_go {
                        let order = Reverse((entry.has(SOFT_PINNED), entry.order()));
                        candidates.push((order, shard.handle(slot)));
                    }
                });
            }
        }
        candidates
    }

    /// Evicts an object, with its group when its turn has come, unless somebody came to rely on it meanwhile.
    fn evict_one(&self, now: Moment, handle: Handle, effects: &mut Effects) {
        let mut shard = self.shard(handle.shard as usize);
        let Some(standing) = shard.standing(handle) else {
            return;
        };
        if standing.lease > now {
            return;
        }
        let group = shard.entry(handle.slot).group.clone();
        match group {
            None => shard.evict_member(now, handle, Reason::Quota, effects),
            Some(group) => {
                drop(shard);
                self.evict_group(now, handle, &group, Reason::Quota, effects);
            }
        }
    }
}
