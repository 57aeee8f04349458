//! The embedded cluster: a master and its nodes, as processes of this replay.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};

use super::cluster::{ProcessId, Processes};
use crate::cmd::{master, node};
use crate::config::{ByteSize, Value as _};

/// What a silent node costs: until then its objects are promised by the master, and each client finds
/// out for itself that they can't be had.
pub(crate) const CLIENT_TTL: Duration = Duration::from_secs(5);

/// What an embedded cluster is made of.
#[derive(Clone, Debug)]
pub(crate) struct Shape {
    pub(crate) nodes: u64,
    /// Bytes of each node's memory.
    pub(crate) node_capacity: u64,
    /// Length of a lease; `None`: the master's own default.
    pub(crate) lease: Option<Duration>,
    /// Flags of the master.
    pub(crate) common: Vec<String>,
    /// Flags of the nodes.
    pub(crate) flags: Vec<String>,
}

/// The processes of an embedded cluster.
#[derive(Debug)]
pub(crate) struct Embedded {
    pub(crate) address: String,
    pub(crate) master: ProcessId,
    pub(crate) nodes: Vec<ProcessId>,
}

/// Memory is touched before it is mounted, at some hundred megabytes a second on a busy machine.
pub(crate) fn time_to_touch(bytes: u64) -> Duration {
    Duration::from_secs(bytes / (200 << 20))
}

impl Embedded {
    /// Starts the master, and then all nodes at once. What was started before a failure ends with
    /// `processes`.
    pub(crate) async fn start(processes: &mut Processes, shape: &Shape) -> Result<Self> {
        let ttl = format!("{}s", CLIENT_TTL.as_secs());
        let mut args = arguments(&["master", "--listen", "127.0.0.1:0", "--client-ttl", &ttl]);
        args.extend(shape.lease.map(|lease| format!("--lease={}", lease.show())));
        args.extend(shape.common.iter().cloned());
        let master = processes.spawn("master", &args)?;
        let ready: master::Ready = processes.ready(master, Duration::ZERO).await?;
        let address = ready.listen.to_string();

        let mut nodes = Vec::new();
        let capacity = ByteSize(shape.node_capacity).to_string();
        for number in 1..=shape.nodes {
            let name = format!("node-{number}");
            let mut args = arguments(&[
                "node",
                "--master",
                &address,
                "--name",
                &name,
                "--capacity",
                &capacity,
            ]);
            args.extend(shape.flags.iter().cloned());
            nodes.push(processes.spawn(&name, &args)?);
        }
        let total = shape.node_capacity.saturating_mul(shape.nodes);
        for _ in &nodes {
            let (id, ready): (_, node::Ready) =
                processes.any_ready(&nodes, time_to_touch(total)).await?;
            if ready.capacity < shape.node_capacity {
                bail!(
                    "{} gives only {}",
                    processes.name(id),
                    ByteSize(ready.capacity)
                );
            }
        }
        Ok(Self {
            address,
            master,
            nodes,
        })
    }

    /// Sends SIGKILL to the last node.
    pub(crate) async fn kill_last_node(&self, processes: &mut Processes) -> Result<ProcessId> {
        let last = *self.nodes.last().context("there is no node to kill")?;
        processes.kill(last).await?;
        Ok(last)
    }

    /// Ends nodes and master.
    pub(crate) async fn end(&self, processes: &mut Processes) {
        processes.end(&self.nodes).await;
        processes.end(&[self.master]).await;
    }
}

fn arguments(args: &[&str]) -> Vec<String> {
    args.iter()
        .chain(&["--print-ready", "--exit-with-stdin"])
        .map(|&arg| arg.to_owned())
        .collect()
}
