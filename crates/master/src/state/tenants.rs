//! Namespaces of keys, as small numbers, and what each may store.
//!
//! A tenant gets its number with its first reservation, or with its quota, and keeps it. Tenants are few and
//! set up by people. Where quotas rule, a tenant is charged for its reservations and objects, each replica
//! counted, and can store nothing beyond its quota, or without one; elsewhere nothing is charged.
//!
//! Lock: the table's is a leaf. Charges are atomic beside it.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};

use layercake_protocol::error::Refusal;
use layercake_protocol::key::Tenant;
use parking_lot::RwLock;

use super::api::TenantStat;
use super::config::Tenancy;

#[derive(Debug, Default)]
pub(crate) struct Tenants {
    /// Only tenants with a quota store anything.
    strict: bool,
    table: RwLock<Table>,
}

#[derive(Debug, Default)]
struct Table {
    numbers: HashMap<Tenant, u32>,
    accounts: Vec<Account>,
}

#[derive(Debug)]
struct Account {
    tenant: Tenant,
    /// In bytes.
    quota: Option<u64>,
    charged: AtomicU64,
    /// Reservations that did not fit.
    refused: AtomicU64,
    evicted_bytes: AtomicU64,
}

impl Table {
    fn number(&mut self, tenant: &Tenant) -> u32 {
        if let Some(number) = self.numbers.get(tenant) {
            return *number;
        }
        let next = u32::try_from(self.accounts.len()).expect("tenants don't number billions");
        self.numbers.insert(tenant.clone(), next);
        self.accounts.push(Account {
            tenant: tenant.clone(),
            quota: None,
            charged: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            evicted_bytes: AtomicU64::new(0),
        });
        next
    }
}

impl Tenants {
    pub(crate) fn new(tenancy: &Tenancy) -> Self {
        let tenants = Self {
            strict: matches!(tenancy, Tenancy::Strict(_)),
            ..Self::default()
        };
        if let Tenancy::Strict(quotas) = tenancy {
            for (tenant, quota) in quotas {
                tenants.set_quota(tenant, *quota);
            }
        }
        tenants
    }

    /// Whether quotas rule.
    pub(crate) fn is_strict(&self) -> bool {
        self.strict
    }

    /// The number of a tenant that has stored something, or has a quota.
    pub(crate) fn find(&self, tenant: &Tenant) -> Option<u32> {
        self.table.read().numbers.get(tenant).copied()
    }

    /// The number of a tenant that wants to store something, given out if it has none.
    pub(crate) fn admit(&self, tenant: &Tenant) -> Result<u32, Refusal> {
        if self.strict {
            let table = self.table.read();
            let number = table.numbers.get(tenant).copied();
            return number
                .filter(|number| table.accounts[*number as usize].quota.is_some())
                .ok_or(Refusal::UnknownTenant);
        }
        match self.find(tenant) {
            Some(number) => Ok(number),
            None => Ok(self.table.write().number(tenant)),
        }
    }

    pub(crate) fn name(&self, number: u32) -> Tenant {
        self.table.read().accounts[number as usize].tenant.clone()
    }

    /// Charges a tenant for this many bytes, if its quota has room for them.
    pub(crate) fn charge(&self, number: u32, bytes: u64) -> Result<(), Refusal> {
        let table = self.table.read();
        let account = &table.accounts[number as usize];
        let quota = account.quota.ok_or(Refusal::UnknownTenant)?;
        let fits = |charged: u64| charged.checked_add(bytes).filter(|sum| *sum <= quota);
        account
            .charged
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, fits)
            .map(drop)
            .map_err(|_| Refusal::QuotaExceeded)
    }

    pub(crate) fn discharge(&self, number: u32, bytes: u64) {
        let table = self.table.read();
        let charged = &table.accounts[number as usize].charged;
        charged.fetch_sub(bytes, Ordering::Relaxed);
    }

    /// Counts a reservation that the quota had no room for.
    pub(crate) fn count_refused(&self, number: u32) {
        let table = self.table.read();
        let refused = &table.accounts[number as usize].refused;
        refused.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts what was evicted to stay within a quota.
    pub(crate) fn count_evicted(&self, number: u32, bytes: u64) {
        let table = self.table.read();
        let evicted = &table.accounts[number as usize].evicted_bytes;
        evicted.fetch_add(bytes, Ordering::Relaxed);
    }

    /// Gives a tenant a quota, or another one. What it has beyond that stays until it is evicted or removed.
    pub(crate) fn set_quota(&self, tenant: &Tenant, bytes: u64) {
        let mut table = self.table.write();
        let number = table.number(tenant);
        table.accounts[number as usize].quota = Some(bytes);
    }

    /// Takes the quota of a tenant that stores nothing. [`Refusal::NotFound`]: it has none;
    /// [`Refusal::InProgress`]: it stores something.
    pub(crate) fn remove_quota(&self, tenant: &Tenant) -> Result<(), Refusal> {
        let mut table = self.table.write();
        let number = *table.numbers.get(tenant).ok_or(Refusal::NotFound)?;
        let account = &mut table.accounts[number as usize];
        if account.quota.is_none() {
            return Err(Refusal::NotFound);
        }
        if *account.charged.get_mut() > 0 {
            return Err(Refusal::InProgress);
        }
        account.quota = None;
        Ok(())
    }

    /// The tenants with a quota, by name.
    pub(crate) fn stats(&self) -> Vec<TenantStat> {
        let table = self.table.read();
        let stat = |account: &Account| {
            Some(TenantStat {
                tenant: account.tenant.clone(),
                quota_bytes: account.quota?,
                charged_bytes: account.charged.load(Ordering::Relaxed),
                refused: account.refused.load(Ordering::Relaxed),
                evicted_bytes: account.evicted_bytes.load(Ordering::Relaxed),
            })
        };
        let mut stats: Vec<_> = table.accounts.iter().filter_map(stat).collect();
        stats.sort_by(|a, b| a.tenant.cmp(&b.tenant));
        stats
    }
}
