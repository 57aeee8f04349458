//! `/metrics` with the names that dashboards of Mooncake use, and a summary for people.
//!
//! Only what can be counted here is there: nothing is shown that could never be other than zero, but for
//! those names of tiers and tasks that dashboards add up with others. Our own metrics
//! follow in the same answer.

use std::fmt::{Display, Write as _};

use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use layercake_master::state::TenantStat;
use layercake_master::{CallStat, Calls, Monitor, SIZE_CLASSES};
use prometheus_client::encoding::text::encode;

use super::{Admin, queries, quotas};

const PROMETHEUS: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Text that grows by metrics.
#[derive(Default)]
struct Page(String);

impl Page {
    fn head(&mut self, name: &str, kind: &str, help: &str) {
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    fn gauge(&mut self, name: &str, help: &str, value: impl Display) {
        self.head(name, "gauge", help);
        let _ = writeln!(self.0, "{name} {value}");
    }

    fn counter(&mut self, name: &str, help: &str, value: u64) {
        self.head(name, "counter", help);
        let _ = writeln!(self.0, "{name} {value}");
    }

    /// One metric with a value for each of some labels.
    fn family<'a>(
        &mut self,
        (name, kind, help): (&str, &str, &str),
        label: &str,
        values: impl IntoIterator<Item = (&'a str, u64)>,
    ) {
        self.head(name, kind, help);
        for (value, number) in values {
            let value = value
                .replace('\\', "\\\\")
                .replace('"', "\\\"")
                .replace('\n', "\\n");
            let _ = writeln!(self.0, "{name}{{{label}=\"{value}\"}} {number}");
        }
    }
}

pub(super) async fn metrics(State(admin): State<Admin>) -> Response {
    let mut page = Page::default();
    held(&mut page, &admin.monitor);
    let calls = admin.monitor.calls();
    sizes(&mut page, &calls);
    requests(&mut page, &calls, admin.monitor.counters().short_puts);
    reads(&mut page, &admin.monitor, &calls);
    evictions(&mut page, &admin.monitor);
    if let Some(tenants) = admin.monitor.tenants() {
        tenant_quotas(&mut page, &tenants, admin.monitor.gauges().capacity_bytes);
    }
    match encode(&mut page.0, &admin.registry) {
        Ok(()) => {
            let text = page.0.trim_end_matches("# EOF\n").to_owned();
            ([(header::CONTENT_TYPE, PROMETHEUS)], text).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// What the store holds now.
fn held(page: &mut Page, monitor: &Monitor) {
    let gauges = monitor.gauges();
    let names = queries::by_name(monitor);
    let total = |of: fn(&queries::Named) -> u64| names.values().map(of).sum::<u64>();
    page.gauge(
        "master_allocated_bytes",
        "Bytes of objects and reservations in memory",
        total(|named| named.payload),
    );
    page.gauge(
        "master_total_capacity_bytes",
        "Bytes of all segments",
        total(|named| named.capacity),
    );
    page.family(
        (
            "segment_allocated_bytes",
            "gauge",
            "Bytes of objects and reservations, by segment",
        ),
        "segment",
        names
            .iter()
            .map(|(name, named)| (name.as_str(), named.payload)),
    );
    page.family(
        ("segment_total_capacity_bytes", "gauge", "Bytes, by segment"),
        "segment",
        names
            .iter()
            .map(|(name, named)| (name.as_str(), named.capacity)),
    );
    // A dashboard adds the tiers up.
    for name in [
        "master_nof_allocated_bytes",
        "master_total_nof_capacity_bytes",
        "master_allocated_file_size_bytes",
        "master_total_file_capacity_bytes",
    ] {
        page.gauge(name, "Zero: objects are in memory only", 0);
    }
    page.gauge(
        "master_key_count",
        "Keys, the reserved ones included",
        gauges.objects + gauges.put_sessions,
    );
    page.gauge(
        "master_soft_pin_key_count",
        "Keys under a soft pin",
        gauges.soft_pinned,
    );
    page.gauge(
        "master_active_clients",
        "Clients that are alive",
        gauges.members,
    );
}

/// Reservations by size, as a histogram.
fn sizes(page: &mut Page, calls: &Calls) {
    let name = "master_value_size_bytes";
    page.head(name, "histogram", "Bytes of values that were put");
    let mut sum = 0;
    for (bound, count) in SIZE_CLASSES.iter().zip(calls.sizes) {
        sum += count;
        let _ = writeln!(page.0, "{name}_bucket{{le=\"{bound}.000000\"}} {sum}");
    }
    let count: u64 = calls.sizes.iter().sum();
    let _ = writeln!(page.0, "{name}_bucket{{le=\"+Inf\"}} {count}");
    let _ = writeln!(
        page.0,
        "{name}_sum {}\n{name}_count {count}",
        calls.sizes_sum
    );
}

/// Requests of one key, and batches.
fn requests(page: &mut Page, calls: &Calls, partial: u64) {
    let either = |stat: &CallStat| (stat.requests(), stat.refused());
    for (name, (requests, failures)) in [
        (
            "exist_key",
            (calls.exists.single, calls.exists.single_refused),
        ),
        (
            "put_start",
            (calls.put_start.single, calls.put_start.single_refused),
        ),
        (
            "put_end",
            (calls.put_end.single, calls.put_end.single_refused),
        ),
        (
            "put_revoke",
            (calls.put_revoke.single, calls.put_revoke.single_refused),
        ),
        (
            "get_replica_list",
            (calls.get_start.single, calls.get_start.single_refused),
        ),
        ("remove", either(&calls.remove)),
        ("remove_by_regex", either(&calls.remove_matching)),
        ("remove_all", either(&calls.remove_all)),
        ("mount_segment", either(&calls.mount)),
        ("unmount_segment", either(&calls.unmount)),
        ("ping", either(&calls.heartbeat)),
    ] {
        page.counter(
            &format!("master_{name}_requests_total"),
            "Requests",
            requests,
        );
        page.counter(
            &format!("master_{name}_failures_total"),
            "Requests that were refused",
            failures,
        );
    }
    page.counter(
        "master_put_start_partial_allocations_total",
        "Puts with fewer replicas than were asked for",
        partial,
    );
    page.counter(
        "master_put_start_alloc_failures_total",
        "Puts refused for want of room",
        calls.no_space,
    );
    for (name, stat) in [
        ("exist_key", calls.exists),
        ("get_replica_list", calls.get_start),
        ("put_start", calls.put_start),
        ("put_end", calls.put_end),
        ("put_revoke", calls.put_revoke),
    ] {
        for (part, help, value) in [
            ("requests", "Batches", stat.batches),
            (
                "failures",
                "Batches of which every key was refused",
                stat.batches_refused,
            ),
            (
                "partial_successes",
                "Batches of which some keys were refused",
                stat.batches_partial,
            ),
            ("items", "Keys of all batches", stat.items),
            (
                "failed_items",
                "Keys of all batches that were refused",
                stat.items_refused,
            ),
        ] {
            page.counter(&format!("master_batch_{name}_{part}_total"), help, value);
        }
    }
}

/// Hits of reads.
fn reads(page: &mut Page, monitor: &Monitor, calls: &Calls) {
    let counters = monitor.counters();
    let hits = counters.reads_started;
    page.counter(
        "mem_cache_hit_nums_",
        "Reads that found their object in memory",
        hits,
    );
    page.counter(
        "file_cache_hit_nums_",
        "Zero: objects are in memory only",
        0,
    );
    page.counter(
        "mem_cache_hit_bytes_total",
        "Bytes of reads that found their object in memory",
        calls.read_bytes,
    );
    page.counter(
        "file_cache_hit_bytes_total",
        "Zero: objects are in memory only",
        0,
    );
    page.gauge(
        "mem_cache_nums_",
        "Objects in memory",
        monitor.gauges().objects,
    );
    page.gauge("file_cache_nums_", "Zero: objects are in memory only", 0);
    page.counter("valid_get_nums_", "Reads that found their object", hits);
    page.counter("total_get_nums_", "Reads", hits + counters.read_misses);
}

fn evictions(page: &mut Page, monitor: &Monitor) {
    let counters = monitor.counters();
    let evicted = counters.evicted();
    let tried = counters.evictions_tried;
    let good = tried - counters.evictions_in_vain;
    // All of it is memory: what dashboards know by tier and what they know in all is the same.
    for (all, of_memory, help, value) in [
        (
            "master_evicted_key_count",
            "master_evicted_key_count_mem",
            "Keys that were evicted",
            evicted.objects,
        ),
        (
            "master_evicted_size_bytes",
            "master_evicted_size_bytes_mem",
            "Bytes that were evicted",
            evicted.bytes,
        ),
        (
            "master_attempted_evictions_total",
            "master_attempted_evictions_mem",
            "Times that something to evict was looked for",
            tried,
        ),
        (
            "master_successful_evictions_total",
            "master_successful_evictions_mem",
            "Times that something was evicted",
            good,
        ),
    ] {
        page.counter(all, help, value);
        page.counter(of_memory, help, value);
    }
    page.counter(
        "master_put_start_discard_cnt",
        "Puts taken from writers that never finished",
        counters.discarded_puts,
    );
    page.gauge(
        "master_put_start_discarded_staging_size",
        "Bytes held back until late writers and readers are gone",
        monitor.gauges().quarantined_bytes,
    );
}

fn tenant_quotas(page: &mut Page, tenants: &[TenantStat], capacity: u64) {
    type Column = (
        &'static str,
        &'static str,
        &'static str,
        fn(&TenantStat) -> u64,
    );
    const COLUMNS: [Column; 4] = [
        (
            "mooncake_tenant_quota_requested_bytes",
            "gauge",
            "Bytes that the tenant may store",
            |t| t.quota_bytes,
        ),
        (
            "mooncake_tenant_quota_charged_bytes",
            "gauge",
            "Bytes that the tenant stores",
            |t| t.charged_bytes,
        ),
        (
            "mooncake_tenant_quota_over_quota",
            "gauge",
            "1: the tenant stores more than it may",
            |t| u64::from(t.charged_bytes > t.quota_bytes),
        ),
        (
            "mooncake_tenant_evict_bytes_total",
            "counter",
            "Bytes evicted to keep the tenant within its quota",
            |t| t.evicted_bytes,
        ),
    ];
    for (name, kind, help, value) in COLUMNS {
        let values = tenants
            .iter()
            .map(|tenant| (tenant.tenant.as_str(), value(tenant)));
        page.family((name, kind, help), "tenant_id", values);
    }
    let effective = |tenant| quotas::effective(tenant, capacity);
    page.family(
        (
            "mooncake_tenant_quota_effective_bytes",
            "gauge",
            "Bytes that the tenant can store in the memory there is",
        ),
        "tenant_id",
        tenants
            .iter()
            .map(|tenant| (tenant.tenant.as_str(), effective(tenant))),
    );
    let name = "mooncake_tenant_quota_reject_total";
    page.head(name, "counter", "Puts that the quota had no room for");
    for tenant in tenants.iter().filter(|tenant| tenant.refused > 0) {
        let _ = writeln!(
            page.0,
            "{name}{{tenant_id={:?},reason=\"quota_exceeded\"}} {}",
            tenant.tenant.as_str(),
            tenant.refused
        );
    }
    page.gauge(
        "mooncake_tenant_quota_allocatable_capacity_bytes",
        "Bytes of all segments",
        capacity,
    );
    page.gauge(
        "mooncake_tenant_quota_requested_bytes_sum",
        "Bytes that all tenants may store",
        tenants
            .iter()
            .map(|t| u128::from(t.quota_bytes))
            .sum::<u128>(),
    );
}

pub(super) async fn summary(State(admin): State<Admin>) -> Response {
    let monitor = &admin.monitor;
    let names = queries::by_name(monitor);
    let payload: u64 = names.values().map(|named| named.payload).sum();
    let capacity: u64 = names.values().map(|named| named.capacity).sum();
    let (gauges, calls, counters) = (monitor.gauges(), monitor.calls(), monitor.counters());
    let requests = [
        ("PutStart", calls.put_start),
        ("PutEnd", calls.put_end),
        ("PutRevoke", calls.put_revoke),
        ("Get", calls.get_start),
        ("Exist", calls.exists),
        ("Del", calls.remove),
        ("DelByRegex", calls.remove_matching),
        ("DelAll", calls.remove_all),
        ("Ping", calls.heartbeat),
    ];
    let requests = requests.map(|(name, stat)| {
        let all = stat.requests();
        format!("{name}={}/{all}", all - stat.refused())
    });
    let percent = if capacity == 0 {
        0.0
    } else {
        payload as f64 * 100.0 / capacity as f64
    };
    let serving = monitor.serving();
    super::text(format!(
        "role=leader, state={}, service_ready={serving}, master={{Mem Storage: {} / {} ({percent:.1}%) | Keys: {} (soft-pinned: {}) | \
         Clients: {} | Requests since the start (Success/Total): {} | Eviction: keys={}, size={} | \
         AllocFail={} | Discarded puts={}}}\n",
        super::state::ha_state(serving),
        size(payload),
        size(capacity),
        gauges.objects + gauges.put_sessions,
        gauges.soft_pinned,
        gauges.members,
        requests.join(", "),
        counters.evicted().objects,
        size(counters.evicted().bytes),
        calls.no_space,
        counters.discarded_puts,
    ))
}

fn size(bytes: u64) -> String {
    let mut value = bytes as f64;
    for unit in ["B", "KB", "MB", "GB"] {
        if value < 1024.0 {
            return if unit == "B" {
                format!("{bytes} B")
            } else {
                format!("{value:.2} {unit}")
            };
        }
        value /= 1024.0;
    }
    format!("{value:.2} TB")
}
