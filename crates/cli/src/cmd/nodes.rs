//! Nodes, as the list of segments tells of them. A node may lend several segments: they carry its name, and
//! it counts once.

use std::collections::BTreeSet;
use std::time::Duration;

use layercake_protocol::report::SegmentStat;

/// A node that was not heard of for this long is late, given the members' time to live (zero: not
/// known). Members report five times in that time: a late one has missed two reports, and is given up
/// in as much time again.
pub(crate) fn late_after(client_ttl: Duration) -> Duration {
    const USUAL_TTL: Duration = Duration::from_secs(10);
    if client_ttl.is_zero() {
        USUAL_TTL / 2
    } else {
        client_ttl / 2
    }
}

/// The names of all nodes.
pub(crate) fn names(segments: &[SegmentStat]) -> BTreeSet<&str> {
    let names = segments.iter().map(|stat| stat.segment.name.as_str());
    names.collect()
}

/// Nodes that were not heard of for longer than `late_after`.
pub(crate) fn late(segments: &[SegmentStat], late_after: Duration) -> BTreeSet<&str> {
    let late = segments
        .iter()
        .filter(|stat| stat.heartbeat_age > late_after);
    late.map(|stat| stat.segment.name.as_str()).collect()
}

#[cfg(test)]
mod tests {
    use layercake_protocol::endpoint::{Endpoint, HostId};
    use layercake_protocol::ids::{
        Capability, ClientId, EngineId, MemoryKind, RegionId, SegmentId,
    };
    use layercake_protocol::replica::Segment;
    use layercake_protocol::report::SegmentState;

    use super::*;

    fn segment(node: &str, id: u64, heard: Duration) -> SegmentStat {
        SegmentStat {
            segment: Segment {
                id: SegmentId(id),
                name: node.to_owned(),
                endpoint: Endpoint {
                    engine: EngineId(1),
                    tcp: "127.0.0.1:1".to_owned(),
                    host: HostId([0; 16]),
                    shm: None,
                    pid: 1,
                },
                region: RegionId(id),
                capability: Capability([0; 16]),
                len: 4096,
                kind: MemoryKind::Host,
            },
            state: SegmentState::Mounted,
            used_bytes: 0,
            largest_free: 4096,
            objects: 0,
            quarantined_bytes: 0,
            heartbeat_age: heard,
            client: ClientId(1),
        }
    }

    #[test]
    fn a_node_with_several_segments_counts_and_is_late_once() {
        let (fresh, old) = (Duration::from_secs(1), Duration::from_secs(7));
        let segments = [
            segment("b", 1, old),
            segment("a", 2, fresh),
            segment("b", 3, old),
            segment("b", 4, old),
            segment("a", 5, fresh),
        ];
        assert_eq!(Vec::from_iter(names(&segments)), ["a", "b"]);
        let late_after = late_after(Duration::from_secs(10));
        assert_eq!(Vec::from_iter(late(&segments, late_after)), ["b"]);
        assert_eq!(names(&[]).len() + late(&[], late_after).len(), 0);
    }

    #[test]
    fn late_is_who_was_silent_for_half_of_its_time_to_live() {
        for (ttl, after) in [(10, 5), (3, 1), (60, 30)] {
            let (ttl, after) = (Duration::from_secs(ttl), Duration::from_secs(after));
            let limit = late_after(ttl);
            assert!(limit >= after && limit < ttl, "{limit:?} of {ttl:?}");
            assert_eq!(limit * 2, ttl);
            let at = |heard| [segment("n", 1, heard)];
            let moment = Duration::from_millis(1);
            assert!(late(&at(limit), limit).is_empty());
            assert_eq!(late(&at(limit + moment), limit).len(), 1);
        }
        assert_eq!(
            late_after(Duration::ZERO),
            Duration::from_secs(5),
            "a master that does not tell has the usual time to live"
        );
    }
}
