//! What a peer needs to know to reach an engine.

use std::fmt;

use layercake_protocol::ids::EngineId;

/// Where processes share memory and sockets: one boot of one machine, one set of namespaces. Equal
/// ids mean the same host; addresses are never compared, since they repeat across containers.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostId(pub [u8; 16]);

impl HostId {
    /// The id of the place where this process runs. Where the system does not tell, a drawn id: then
    /// no other process counts as being on the same host.
    pub fn current() -> Self {
        Self::read().unwrap_or_else(|_| Self(EngineId::draw().0.to_le_bytes()))
    }

    fn read() -> std::io::Result<Self> {
        let mut hasher = blake3::Hasher::new_derive_key("layercake v1 host id");
        hasher.update(std::fs::read("/proc/sys/kernel/random/boot_id")?.as_slice());
        // Abstract sockets live in a network namespace, process ids in a pid namespace, and rights
        // over other processes in a user namespace.
        for namespace in ["net", "pid", "user"] {
            let link = std::fs::read_link(format!("/proc/self/ns/{namespace}"))?;
            hasher
                .update(link.as_os_str().as_encoded_bytes())
                .update(b"\n");
        }
        let mut id = [0; 16];
        id.copy_from_slice(&hasher.finalize().as_bytes()[..16]);
        Ok(Self(id))
    }
}

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostId({:032x})", u128::from_le_bytes(self.0))
    }
}

/// What a peer needs to know to reach an engine. Plain data; the layers above carry it.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// The engine. A restarted process is another one, even on the same address.
    pub engine: EngineId,
    /// `host:port` of its TCP listener; empty when it does not use tcp.
    pub tcp: String,
    /// Where it runs.
    pub host: HostId,
    /// Its Unix socket's name, when it serves shared memory.
    pub shm: Option<String>,
    /// Its process id, meaningful on the same host only.
    pub pid: u32,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_id_is_stable_within_a_host() {
        assert_eq!(HostId::current(), HostId::current());
    }
}
