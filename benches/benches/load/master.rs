//! A master in a process of its own: the bench's binary, started again as a child. It ends when its
//! standard input does, so it can't outlive the bench.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use layercake_master::state::StateConfig;
use layercake_master::{Master, MasterConfig};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::ids::{Capability, EngineId, Generation, MemoryKind, RegionId, SegmentId};
use layercake_protocol::replica::Segment;
use layercake_store::link::{LinkConfig, MasterLink};

const LEASE: &str = "LAYERCAKE_BENCH_MASTER_LEASE_MS";

/// Segments of the pool.
const SEGMENTS: u64 = 8;

/// In the child process: serves until the parent is gone, then exits.
pub(crate) fn serve_if_child() {
    if let Ok(lease) = std::env::var(LEASE) {
        if let Err(error) = serve(&lease) {
            eprintln!("master: {error:#}");
            std::process::exit(1);
        }
        std::process::exit(0);
    }
}

fn serve(lease: &str) -> Result<()> {
    let config = MasterConfig {
        listen: ([127, 0, 0, 1], 0).into(),
        state: StateConfig {
            lease: Duration::from_millis(lease.parse()?),
            ..StateConfig::default()
        },
        ..MasterConfig::default()
    };
    raise_file_limit()?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(layercake_master::threads())
        .enable_all()
        .build()?;
    runtime.block_on(async {
        let mut registry = prometheus_client::registry::Registry::default();
        let master = Master::bind(config, &mut registry).await?;
        println!("{}", master.local_addr());
        let parent = tokio::task::spawn_blocking(|| {
            // An error is as good as the end.
            let _ended = std::io::stdin().read_to_end(&mut Vec::new());
        });
        master
            .serve(async {
                let _ended = parent.await;
            })
            .await?;
        Ok(())
    })
}

/// Allows this process as many open files as the system lets it.
pub(crate) fn raise_file_limit() -> Result<()> {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    let limit = Rlimit {
        current: maximum,
        maximum,
    };
    Ok(setrlimit(Resource::Nofile, limit)?)
}

/// A running master.
pub(crate) struct Process {
    child: Child,
    address: String,
}

impl Process {
    /// Starts a master that grants leases of this length.
    pub(crate) fn start(lease: Duration) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .env(LEASE, lease.as_millis().to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the master's process")?;
        let stdout = child.stdout.take().context("the master has no output")?;
        let mut address = String::new();
        BufReader::new(stdout).read_line(&mut address)?;
        if address.is_empty() {
            bail!("the master did not start");
        }
        Ok(Self {
            child,
            address: address.trim().to_owned(),
        })
    }

    /// A member of its own connection.
    pub(crate) async fn join(&self, name: &str) -> Result<MasterLink> {
        let config = LinkConfig {
            endpoint: Some(endpoint()),
            ..LinkConfig::new(self.address.clone(), name)
        };
        Ok(MasterLink::connect(config).await?)
    }

    /// Mounts segments of so many bytes in all. Nobody moves bytes here, so there is no memory behind them.
    pub(crate) async fn lend(&self, bytes: u64) -> Result<MasterLink> {
        let node = self.join("node").await?;
        for id in 1..=SEGMENTS {
            let segment = Segment {
                id: SegmentId(id),
                name: format!("n{id}"),
                endpoint: endpoint(),
                region: RegionId(id),
                capability: Capability([0; 16]),
                len: bytes / SEGMENTS,
                kind: MemoryKind::Host,
            };
            node.mount(&segment, Generation::NONE).await?;
        }
        node.set_mounted((1..=SEGMENTS).map(SegmentId).collect());
        Ok(node)
    }

    /// Bytes of memory in use.
    pub(crate) fn resident_bytes(&self) -> Result<u64> {
        let statm = std::fs::read_to_string(format!("/proc/{}/statm", self.child.id()))?;
        let pages: u64 = statm.split(' ').nth(1).context("statm is short")?.parse()?;
        Ok(pages * rustix::param::page_size() as u64)
    }

    /// Seconds of processor time used since the start.
    pub(crate) fn processor_time(&self) -> Result<f64> {
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.child.id()))?;
        // The name before may hold blanks.
        let (_, fields) = stat.rsplit_once(") ").context("stat has no name")?;
        let ticks: u64 = fields
            .split(' ')
            .skip(11)
            .take(2)
            .map(|field| field.parse::<u64>().unwrap_or_default())
            .sum();
        let per_second = rustix::param::clock_ticks_per_second();
        Ok(ticks as f64 / per_second as f64)
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // It ends by itself; without this it would stay as a zombie.
        let _ended = self.child.wait();
    }
}

fn endpoint() -> Endpoint {
    Endpoint {
        engine: EngineId(1),
        tcp: "127.0.0.1:1".to_owned(),
        host: HostId([0; 16]),
        shm: None,
        pid: 1,
    }
}
