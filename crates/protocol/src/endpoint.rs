//! Where a transfer engine is reached.

use std::fmt;

use crate::ids::EngineId;

/// Digest of a host's boot id and the namespaces of a process: equal on two engines exactly if they
/// can share memory and see each other's processes. An address can't tell that.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct HostId(pub [u8; 16]);

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HostId(")?;
        for byte in self.0 {
            write!(f, "{byte:02x}")?;
        }
        f.write_str(")")
    }
}

/// What a peer needs to reach one transfer engine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// The engine's run; a peer that answers with another id is another process.
    pub engine: EngineId,
    /// `host:port` of its TCP transport.
    pub tcp: String,
    /// The host it runs on.
    pub host: HostId,
    /// Name of its shared-memory transport's unix socket, if it has one.
    pub shm: Option<String>,
    /// Its process id, for people.
    pub pid: u32,
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (pid {})", self.tcp, self.pid)
    }
}
