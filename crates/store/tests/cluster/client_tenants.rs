//! Key spaces of tenants, as the master has them.

use layercake_master::state::Tenancy;
use layercake_protocol::error::Refusal;
use layercake_protocol::key::Tenant;
use layercake_store::{ClientConfig, StoreClient};

use crate::common::{Cluster, KIB, OneKey as _, Spec, Via, fresh_key, pattern, refusal};

async fn cluster(tenancy: Tenancy) -> Cluster {
    let mut spec = Spec::new(Via::Shm);
    spec.master.state.tenancy = tenancy;
    spec.start().await
}

fn tenant(name: &str) -> Tenant {
    Tenant::new(name).expect("a name")
}

async fn of(cluster: &Cluster, name: &str) -> StoreClient {
    let config = ClientConfig {
        tenant: tenant(name),
        ..ClientConfig::default()
    };
    cluster.client_with(config).await
}

#[tokio::test]
async fn tenants_are_apart_unless_the_master_has_one_key_space_for_all() {
    for (tenancy, shared) in [(Tenancy::Apart, false), (Tenancy::Shared, true)] {
        let cluster = cluster(tenancy).await;
        let (one, two) = (of(&cluster, "t1").await, of(&cluster, "t2").await);
        assert_eq!(one.link().shares_tenants(), shared);
        let key = fresh_key();
        one.store(&key, &pattern(1, KIB)).await;
        assert_eq!(two.has(&key).await, shared);
        if shared {
            // The record in front of the object names the key space, so it is read as well.
            assert_eq!(two.load(&key).await.expect("there"), pattern(1, KIB));
            assert_eq!(*two.link().tenant(), Tenant::default());
        }
    }
}

#[tokio::test]
async fn quotas_are_refused_by_name() {
    let cluster = cluster(Tenancy::Strict([(tenant("t1"), KIB)].into())).await;
    let (one, two) = (of(&cluster, "t1").await, of(&cluster, "t2").await);
    let key = fresh_key();
    let started = two.start_put(&key, KIB).await;
    assert_eq!(refusal(started), Refusal::UnknownTenant);
    let started = one.start_put(&key, KIB + 1).await;
    assert_eq!(refusal(started), Refusal::QuotaExceeded);
    one.store(&key, &pattern(1, KIB)).await;
    assert_eq!(one.load(&key).await.expect("there"), pattern(1, KIB));
}
