//! How much memory a replay takes, and whether the machine has it.

use anyhow::{Context as _, Result, bail};
use layercake_protocol::header::HeaderSpec;
use layercake_protocol::replica::GRANULE;

use crate::config::ByteSize;

/// What one block takes in a segment, in bytes: its header and its payload, in whole granules.
pub(crate) fn place_bytes(header: &HeaderSpec, payload: u64) -> Result<u64> {
    let header = header
        .encoded_len()
        .context("the geometry makes no header")?;
    u64::from(header)
        .checked_add(payload)
        .and_then(|bytes| bytes.checked_next_multiple_of(GRANULE))
        .context("a block of this geometry is larger than any memory")
}

/// The share of a pool that is filled before anything is evicted, less room to spare: nodes fill
/// unevenly, and a master evicts from 0.9 on.
const FILL: f64 = 0.8;

/// The pool that holds `blocks` of `place` bytes without eviction.
pub(crate) fn ample_capacity(blocks: u64, place: u64, nodes: u64) -> Result<u64> {
    let need = blocks
        .checked_mul(place)
        .context("the trace's blocks are larger than any memory")?;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "positive; saturates, and is compared with the machine's memory"
    )]
    let roomy = (need as f64 / FILL) as u64;
    // Small pools need room for what is being written beside what is kept.
    Ok(roomy
        .max(need.saturating_add(nodes * 64 * place))
        .saturating_add(nodes * (1 << 20)))
}

/// One node's share of the pool, in whole granules.
pub(crate) fn share(capacity: u64, nodes: u64, place: u64) -> Result<u64> {
    let share = capacity / nodes.max(1) / GRANULE * GRANULE;
    if share < place {
        bail!(
            "--capacity {}: each of --nodes {nodes} gets {}, but one block takes {}",
            ByteSize(capacity),
            ByteSize(share),
            ByteSize(place)
        );
    }
    Ok(share)
}

/// Bytes of memory that can still be had on this machine, if it says so. Limits of a control group are
/// the nodes' business, which refuse to start.
pub(crate) fn available_memory() -> Option<u64> {
    meminfo_available(&std::fs::read_to_string("/proc/meminfo").ok()?)
}

fn meminfo_available(info: &str) -> Option<u64> {
    let line = info
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim()
        .strip_suffix("kB")?
        .trim()
        .parse::<u64>()
        .ok()?
        .checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_header_and_payload_in_granules() {
        let header = HeaderSpec {
            tenant_len: 7,
            key_len: 70,
            group_len: 0,
            rows: 16,
        };
        let len = u64::from(header.encoded_len().expect("small"));
        assert_eq!(place_bytes(&header, 4096 - len).expect("fits"), 4096);
        assert_eq!(place_bytes(&header, 4097 - len).expect("fits"), 8192);
        assert!(place_bytes(&header, u64::MAX).is_err());
    }

    #[test]
    fn an_ample_pool_stays_below_the_watermark() {
        for (blocks, nodes) in [(1, 1), (100, 3), (200_000, 2)] {
            let place = 20 << 10;
            let capacity = ample_capacity(blocks, place, nodes).expect("small");
            assert!((blocks * place) as f64 / (capacity as f64) < 0.85);
            assert!(share(capacity, nodes, place).expect("ample") * nodes >= blocks * place);
        }
        assert!(ample_capacity(u64::MAX, 4096, 1).is_err());
    }

    #[test]
    fn a_pool_without_room_for_a_block_is_refused() {
        let text = share(30 << 10, 3, 20 << 10)
            .expect_err("10 KiB a node")
            .to_string();
        assert!(text.contains("8KiB") && text.contains("20KiB"), "{text}");
    }

    #[test]
    fn available_memory_is_read_from_the_machine() {
        assert_eq!(
            meminfo_available("MemTotal:  9 kB\nMemAvailable:    2048 kB\n"),
            Some(2 << 20)
        );
        assert_eq!(meminfo_available("MemTotal: 9 kB\n"), None);
    }
}
