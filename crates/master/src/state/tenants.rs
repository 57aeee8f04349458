//! Namespaces of keys, as small numbers.
//!
//! A tenant gets its number with its first reservation and keeps it. Tenants are few and set up by people.

use std::collections::HashMap;

use layercake_protocol::key::Tenant;
use parking_lot::RwLock;

#[derive(Debug, Default)]
pub(crate) struct Tenants {
    table: RwLock<Table>,
}

#[derive(Debug, Default)]
struct Table {
    numbers: HashMap<Tenant, u32>,
    names: Vec<Tenant>,
}

impl Tenants {
    /// The number of a tenant that has stored something.
    pub(crate) fn find(&self, tenant: &Tenant) -> Option<u32> {
        self.table.read().numbers.get(tenant).copied()
    }

    /// The number of a tenant, given out if it has none.
    pub(crate) fn number(&self, tenant: &Tenant) -> u32 {
        if let Some(number) = self.find(tenant) {
            return number;
        }
        let mut table = self.table.write();
        let next = u32::try_from(table.names.len()).expect("tenants don't number billions");
        if let Some(number) = table.numbers.get(tenant) {
            return *number;
        }
        table.numbers.insert(tenant.clone(), next);
        table.names.push(tenant.clone());
        next
    }

    pub(crate) fn name(&self, number: u32) -> Tenant {
        self.table.read().names[number as usize].clone()
    }
}
