//! What the master counts about itself, as Prometheus metrics named `layercake_master_…`.
//!
//! The registry is passed in, nothing is global. Requests are counted where they are answered, through
//! handles that are looked up once; what the object table holds and has done is read when somebody
//! scrapes. Labels come from enums, so their values are bounded. Measuring never fails a request.

use std::fmt;
use std::sync::Weak;
use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::wire::client_frame::Request;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::TypedMetric as _;
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::{Histogram, exponential_buckets};
use prometheus_client::registry::Registry;

use crate::service::Core;

mod calls;
mod lanes;

pub(crate) use calls::CallTally;
pub use calls::{CallStat, Calls, SIZE_CLASSES};
use lanes::Lanes;

/// A request as metrics name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    Exists,
    GetStart,
    Renew,
    GetEnd,
    PutStart,
    UpsertStart,
    PutEnd,
    PutRevoke,
    PutSlots,
    WaitComplete,
    Remove,
    RemoveVersions,
    TakeBack,
    RemoveMatching,
    Mount,
    Unmount,
    Heartbeat,
    FenceDone,
    Join,
    Leave,
    Hello,
    Authenticate,
    ListObjects,
    StatObject,
    ListSegments,
    Status,
    /// A frame without a request.
    Unknown,
}

impl Method {
    const ALL: [(Self, &'static str); 27] = [
        (Self::Exists, "exists"),
        (Self::GetStart, "get_start"),
        (Self::Renew, "renew"),
        (Self::GetEnd, "get_end"),
        (Self::PutStart, "put_start"),
        (Self::UpsertStart, "upsert_start"),
        (Self::PutEnd, "put_end"),
        (Self::PutRevoke, "put_revoke"),
        (Self::PutSlots, "put_slots"),
        (Self::WaitComplete, "wait_complete"),
        (Self::Remove, "remove"),
        (Self::RemoveVersions, "remove_versions"),
        (Self::TakeBack, "take_back"),
        (Self::RemoveMatching, "remove_matching"),
        (Self::Mount, "mount"),
        (Self::Unmount, "unmount"),
        (Self::Heartbeat, "heartbeat"),
        (Self::FenceDone, "fence_done"),
        (Self::Join, "join"),
        (Self::Leave, "leave"),
        (Self::Hello, "hello"),
        (Self::Authenticate, "authenticate"),
        (Self::ListObjects, "list_objects"),
        (Self::StatObject, "stat_object"),
        (Self::ListSegments, "list_segments"),
        (Self::Status, "status"),
        (Self::Unknown, "unknown"),
    ];

    pub(crate) fn of(request: Option<&Request>) -> Self {
        match request {
            Some(Request::Exists(_)) => Self::Exists,
            Some(Request::GetStart(_)) => Self::GetStart,
            Some(Request::Renew(_)) => Self::Renew,
            Some(Request::GetEnd(_)) => Self::GetEnd,
            Some(Request::PutStart(_)) => Self::PutStart,
            Some(Request::UpsertStart(_)) => Self::UpsertStart,
            Some(Request::PutEnd(_)) => Self::PutEnd,
            Some(Request::PutRevoke(_)) => Self::PutRevoke,
            Some(Request::PutSlots(_)) => Self::PutSlots,
            Some(Request::WaitComplete(_)) => Self::WaitComplete,
            Some(Request::Remove(_)) => Self::Remove,
            Some(Request::RemoveVersions(_)) => Self::RemoveVersions,
            Some(Request::TakeBack(_)) => Self::TakeBack,
            Some(Request::RemoveMatching(_)) => Self::RemoveMatching,
            Some(Request::Mount(_)) => Self::Mount,
            Some(Request::Unmount(_)) => Self::Unmount,
            Some(Request::Heartbeat(_)) => Self::Heartbeat,
            Some(Request::FenceDone(_)) => Self::FenceDone,
            Some(Request::Join(_)) => Self::Join,
            Some(Request::Leave(_)) => Self::Leave,
            None => Self::Unknown,
        }
    }
}

/// A whole call's refusal as metrics name it.
fn code(refusal: &Refusal) -> &'static str {
    match refusal {
        Refusal::InvalidArgument { .. } => "invalid_argument",
        Refusal::NotFound => "not_found",
        Refusal::NotReady => "not_ready",
        Refusal::Leased => "leased",
        Refusal::InProgress => "in_progress",
        Refusal::UnknownMember => "unknown_member",
        Refusal::WrongTerm => "wrong_term",
        Refusal::Unauthenticated => "unauthenticated",
        Refusal::Version { .. } => "version",
        Refusal::ShuttingDown => "shutting_down",
        Refusal::TooLarge { .. } => "too_large",
        // The others are answers about single keys.
        _ => "other",
    }
}

type Labels = [(&'static str, &'static str); 2];

/// Handles of one method.
#[derive(Debug)]
struct PerMethod {
    name: &'static str,
    ok: Counter,
    duration: Histogram,
}

/// The handles that requests count with.
#[derive(Debug)]
pub(crate) struct Metrics {
    methods: Vec<PerMethod>,
    requests: Family<Labels, Counter>,
    /// Requests by what became of their keys.
    pub(crate) calls: CallTally,
    /// Streams that are open.
    pub(crate) streams: Gauge,
    /// Connections that are open.
    pub(crate) connections: Gauge,
    /// Framed lanes that are open.
    pub(crate) lanes: Lanes,
}

impl Metrics {
    /// Registers them.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let registry = registry.sub_registry_with_prefix("layercake_master");
        let requests = Family::<Labels, Counter>::default();
        registry.register(
            "requests",
            "Requests answered, by method and by ok or the refusal of the whole call",
            requests.clone(),
        );
        let durations =
            Family::<[(&'static str, &'static str); 1], Histogram>::new_with_constructor(
                // 2 microseconds to 2 seconds: a batch of any size fits in.
                || Histogram::new(exponential_buckets(2e-6, 4.0, 11)),
            );
        registry.register(
            "request_duration_seconds",
            "Time from a request's arrival to its answer, waiting included",
            durations.clone(),
        );
        let streams = Gauge::default();
        registry.register(
            "streams",
            "Streams of members that are open",
            streams.clone(),
        );
        let connections = Gauge::default();
        registry.register(
            "connections",
            "Connections that are open",
            connections.clone(),
        );
        let lanes = Lanes::register(registry);
        let methods = Method::ALL
            .iter()
            .map(|(_, name)| PerMethod {
                name,
                ok: requests.get_or_create_owned(&[("method", name), ("code", "ok")]),
                duration: durations.get_or_create_owned(&[("method", name)]),
            })
            .collect();
        Self {
            methods,
            requests,
            calls: CallTally::default(),
            streams,
            connections,
            lanes,
        }
    }

    /// A request was answered.
    pub(crate) fn answered(&self, method: Method, refusal: Option<&Refusal>, took: Duration) {
        // `ALL` lists the methods in the order of their declaration.
        let Some(per_method) = self.methods.get(method as usize) else {
            return;
        };
        per_method.duration.observe(took.as_secs_f64());
        match refusal {
            None => {
                per_method.ok.inc();
            }
            Some(refusal) => {
                let labels = [("method", per_method.name), ("code", code(refusal))];
                self.requests.get_or_create(&labels).inc();
            }
        }
    }
}

/// Reads the object table when somebody scrapes.
#[derive(Debug)]
pub(crate) struct StateCollector {
    pub(crate) core: Weak<Core>,
}

impl Collector for StateCollector {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let Some(core) = self.core.upgrade() else {
            return Ok(());
        };
        let gauges = core.state.gauges();
        for (name, help, value) in [
            ("term", "Term of this master", core.term.0),
            ("objects", "Complete objects", gauges.objects),
            (
                "objects_soft_pinned",
                "Objects under a soft pin",
                gauges.soft_pinned,
            ),
            (
                "objects_removed_leased",
                "Objects without a name whose memory readers still rely on",
                gauges.removed_leased,
            ),
            (
                "leases_active",
                "Leases of open read sessions",
                gauges.get_sessions,
            ),
            (
                "fences",
                "Reservations whose places wait until their writer is known to be gone",
                gauges.fences,
            ),
            (
                "commands_unanswered",
                "Commands to members that wait for their answers",
                core.links.unanswered() as u64,
            ),
            (
                "replays_kept",
                "Answers kept in case their calls are repeated",
                core.replays.len() as u64,
            ),
            (
                "topics_watched",
                "Keys and segments that calls wait for",
                core.waiters.len() as u64,
            ),
            (
                "members",
                "Members that are alive and can move bytes",
                gauges.members,
            ),
            (
                "holds",
                "Places that clients have in advance for small objects",
                gauges.holds,
            ),
            (
                "hold_bytes",
                "Bytes of those that are no object's; they count as used",
                gauges.hold_bytes,
            ),
            ("segments", "Mounted segments", gauges.segments),
            (
                "segment_capacity_bytes",
                "Bytes of all segments",
                gauges.capacity_bytes,
            ),
            (
                "segment_used_bytes",
                "Bytes in use in all segments, in whole granules, held-back ones included",
                gauges.used_bytes,
            ),
            (
                "segment_requested_bytes",
                "Bytes that objects and their headers asked for, held-back ones included",
                gauges.requested_bytes,
            ),
            (
                "segment_quarantined_bytes",
                "Freed bytes that are held back",
                gauges.quarantined_bytes,
            ),
            (
                "segment_largest_free_bytes",
                "The largest piece that could be had",
                gauges.largest_free,
            ),
        ] {
            let gauge = ConstGauge::new(value);
            gauge.encode(encoder.encode_descriptor(name, help, None, gauge.metric_type())?)?;
        }
        sessions(&mut encoder, gauges.put_sessions, gauges.get_sessions)?;
        counters(&mut encoder, &core.state.counters())
    }
}

fn sessions(encoder: &mut DescriptorEncoder<'_>, puts: u64, gets: u64) -> fmt::Result {
    let mut family = encoder.encode_descriptor(
        "sessions_active",
        "Sessions that are open",
        None,
        ConstGauge::<u64>::TYPE,
    )?;
    for (kind, value) in [("put", puts), ("get", gets)] {
        ConstGauge::new(value).encode(family.encode_family(&[("kind", kind)])?)?;
    }
    Ok(())
}

fn counters(encoder: &mut DescriptorEncoder<'_>, counters: &crate::state::Counters) -> fmt::Result {
    let reasons = [
        ("watermark", counters.evicted_watermark),
        ("allocation", counters.evicted_allocation),
        ("quota", counters.evicted_quota),
        ("removed", counters.removed),
        ("replaced", counters.replaced),
        ("lost", counters.lost),
        ("unmounted", counters.unmounted),
    ];
    for (name, help, bytes) in [
        ("evictions", "Objects that went, by reason", false),
        (
            "evicted_bytes",
            "Payload bytes of the objects that went, by reason",
            true,
        ),
    ] {
        let mut family = encoder.encode_descriptor(name, help, None, ConstCounter::<u64>::TYPE)?;
        for (reason, amount) in reasons {
            let value = if bytes { amount.bytes } else { amount.objects };
            ConstCounter::new(value).encode(family.encode_family(&[("reason", reason)])?)?;
        }
    }
    for (name, help, value) in [
        (
            "evictions_tried",
            "Times that something to evict was looked for",
            counters.evictions_tried,
        ),
        (
            "evictions_in_vain",
            "Times that nothing could be evicted",
            counters.evictions_in_vain,
        ),
        ("puts_started", "Reservations made", counters.puts_started),
        (
            "puts_committed",
            "Reservations committed",
            counters.puts_committed,
        ),
        (
            "puts_short",
            "Reservations with fewer replicas than were asked for",
            counters.short_puts,
        ),
        (
            "puts_revoked",
            "Reservations given up by their writer",
            counters.puts_revoked,
        ),
        (
            "puts_discarded",
            "Reservations dropped because their writer never finished",
            counters.discarded_puts,
        ),
        (
            "puts_refused",
            "Reservations refused for want of room",
            counters.refused_puts,
        ),
        ("reads_started", "Reads leased", counters.reads_started),
        (
            "read_misses",
            "Reads refused because there is no such readable object",
            counters.read_misses,
        ),
        (
            "leases_lost",
            "Leases that could not be renewed",
            counters.leases_lost,
        ),
        (
            "nodes_lost",
            "Nodes that went silent, or whose name came back with another process",
            counters.lost_nodes,
        ),
        (
            "fenced_places",
            "Places held back until their late writer was known to be gone",
            counters.fenced_places,
        ),
    ] {
        let counter = ConstCounter::new(value);
        counter.encode(encoder.encode_descriptor(name, help, None, counter.metric_type())?)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use prometheus_client::encoding::text::encode;

    use super::*;

    #[test]
    fn methods_are_listed_in_the_order_of_their_declaration() {
        for (index, (method, name)) in Method::ALL.iter().enumerate() {
            assert_eq!(*method as usize, index, "{name}");
        }
    }

    #[test]
    fn requests_are_counted_by_method_and_code() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        metrics.answered(Method::Exists, None, Duration::from_micros(5));
        metrics.answered(
            Method::PutStart,
            Some(&Refusal::ShuttingDown),
            Duration::from_millis(1),
        );
        let mut text = String::new();
        encode(&mut text, &registry).expect("writing to a string");
        for line in [
            "layercake_master_requests_total{method=\"exists\",code=\"ok\"} 1",
            "layercake_master_requests_total{method=\"put_start\",code=\"shutting_down\"} 1",
            "layercake_master_request_duration_seconds_count{method=\"exists\"} 1",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }
}
