//! Which host this process runs on.
//!
//! Processes share memory and sockets within one boot of one machine and one set of namespaces. Equal
//! ids mean that; addresses are never compared, since they repeat across containers.

pub use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::ids::EngineId;

/// The id of the place where this process runs. Where the system does not tell, a drawn id: then no
/// other engine counts as being on the same host.
pub(crate) fn current_host() -> HostId {
    read().unwrap_or_else(|error| {
        tracing::debug!(%error, "the host can't be told: shared memory is not used");
        HostId(EngineId::draw().0.to_le_bytes())
    })
}

fn read() -> std::io::Result<HostId> {
    let mut hasher = blake3::Hasher::new_derive_key("layercake v1 host id");
    hasher.update(std::fs::read("/proc/sys/kernel/random/boot_id")?.as_slice());
    // Abstract sockets live in a network namespace, process ids in a pid namespace, and rights over
    // other processes in a user namespace.
    for namespace in ["net", "pid", "user"] {
        let link = std::fs::read_link(format!("/proc/self/ns/{namespace}"))?;
        hasher
            .update(link.as_os_str().as_encoded_bytes())
            .update(b"\n");
    }
    let mut id = [0; 16];
    id.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
    Ok(HostId(id))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_told_and_stays_the_same() {
        assert_eq!(read().expect("a system with /proc"), current_host());
    }
}
