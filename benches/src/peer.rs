//! A transfer engine in a process of its own: the bench's binary, started again as a child.
//!
//! [`serve_if_child`] comes first in every `main`; in the child it never returns. The child lends one
//! region of memory and ends when its standard input does, so it can't outlive the bench.

use std::io::{BufRead as _, BufReader, Read as _};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;

use anyhow::{Context as _, Result, bail};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::ids::{Capability, EngineId, Generation, RegionId};
use layercake_transport::{Access, AllocateOptions, Engine, EngineConfig, RemoteSlice};
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use serde_json::{Value, json};

const CHILD: &str = "LAYERCAKE_BENCH_PEER_BYTES";

/// A peer process and the memory that it lends.
#[derive(Debug)]
pub struct Peer {
    child: Child,
    /// Where its engine is reached.
    pub endpoint: Arc<Endpoint>,
    region: RegionId,
    capability: Capability,
    /// Bytes of its region.
    pub len: u64,
}

/// In the child process: lends memory until the parent is gone, then exits.
pub fn serve_if_child() {
    if let Ok(bytes) = std::env::var(CHILD) {
        if let Err(error) = serve(&bytes) {
            eprintln!("peer: {error:#}");
            std::process::exit(1);
        }
        std::process::exit(0);
    }
}

fn serve(bytes: &str) -> Result<()> {
    let engine = Engine::start(EngineConfig::default())?;
    let memory = engine.allocate(
        bytes.parse()?,
        AllocateOptions {
            access: Access::RemoteReadWrite,
            generation_tags: true,
            pretouch: true,
            huge_pages: false,
        },
    )?;
    let (endpoint, region) = (engine.endpoint(), memory.region());
    println!(
        "{}",
        json!({
            "engine": endpoint.engine.0.to_string(),
            "tcp": endpoint.tcp,
            "host": endpoint.host.0,
            "shm": endpoint.shm,
            "pid": endpoint.pid,
            "region": region.region.0,
            "capability": region.capability.0,
            "len": region.len,
        })
    );
    std::io::stdin().read_to_end(&mut Vec::new())?;
    Ok(())
}

impl Peer {
    /// Starts a child that lends `bytes` of memory.
    pub fn start(bytes: u64) -> Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .env(CHILD, bytes.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .context("start the peer process")?;
        let stdout = child.stdout.take().context("the peer has no output")?;
        let mut line = String::new();
        BufReader::new(stdout).read_line(&mut line)?;
        let value: Value = serde_json::from_str(&line).context("the peer's first line")?;
        let number = |name: &str| {
            value[name]
                .as_u64()
                .with_context(|| format!("no `{name}` in {line}"))
        };
        let endpoint = Endpoint {
            engine: EngineId(value["engine"].as_str().context("no `engine`")?.parse()?),
            tcp: value["tcp"].as_str().unwrap_or_default().to_owned(),
            host: HostId(sixteen(&value["host"])?),
            shm: value["shm"].as_str().map(str::to_owned),
            pid: u32::try_from(number("pid")?)?,
        };
        Ok(Self {
            endpoint: Arc::new(endpoint),
            region: RegionId(number("region")?),
            capability: Capability(sixteen(&value["capability"])?),
            len: number("len")?,
            child,
        })
    }

    /// A part of the peer's memory.
    pub fn slice(&self, offset: u64, len: u64, generation: Option<Generation>) -> RemoteSlice {
        RemoteSlice {
            region: self.region,
            capability: self.capability,
            offset,
            len,
            generation,
        }
    }
}

impl Peer {
    /// Keeps all threads that this process and the peer have by now on one processor. A round trip costs
    /// two to three times as much between two processors as on one, and the system moves threads about as
    /// it likes: what is compared has to be in the same place.
    pub fn share_one_processor(&self) -> Result<()> {
        let mine = sched_getaffinity(None)?;
        let first = (0..CpuSet::MAX_CPU).find(|cpu| mine.is_set(*cpu));
        let mut one = CpuSet::new();
        one.set(first.context("no processor to run on")?);
        for process in [std::process::id(), self.child.id()] {
            for thread in std::fs::read_dir(format!("/proc/{process}/task"))? {
                let name = thread?.file_name();
                let id = name.to_str().and_then(|name| name.parse().ok());
                sched_setaffinity(id.and_then(Pid::from_raw), &one)?;
            }
        }
        Ok(())
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        drop(self.child.stdin.take());
        // It ends with its input; waiting only reaps it.
        let _status = self.child.wait();
    }
}

fn sixteen(value: &Value) -> Result<[u8; 16]> {
    let bytes: Vec<u8> = serde_json::from_value(value.clone())?;
    match bytes.try_into() {
        Ok(bytes) => Ok(bytes),
        Err(_) => bail!("not sixteen bytes: {value}"),
    }
}
