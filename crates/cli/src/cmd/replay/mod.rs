//! `layercake replay`: the main job, on a trace of real requests.
//!
//! - `options`, `trace`, `plan`: what is asked for, and whether it can be done here.
//! - `cluster`, `embedded`: the processes, and what they make up.
//! - `workers`, `run`, `messages`: giving requests out and taking answers.
//! - `worker`, `request`, `staging`, `keys`, `pattern`: one client process and what it does with a request.
//! - `connector`: the same through the connector, as an engine would.
//! - `histogram`, `report`, `plot`: what comes out.
//! - `workload`: a trace of our own.

pub(crate) mod cluster;
mod connector;
pub(crate) mod embedded;
mod histogram;
mod keys;
mod messages;
mod options;
mod pattern;
mod plan;
mod plot;
mod report;
mod request;
mod run;
mod staging;
mod trace;
pub(crate) mod worker;
mod workers;
pub(crate) mod workload;

use std::fs::File;
use std::io::{self, BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use layercake_protocol::key::Tenant;
use layercake_protocol::layout::ModelGeometry;
use layercake_protocol::report::Status;
use layercake_store::link::MasterLink;
use rand::RngExt as _;
use tokio::time::{sleep, timeout};

use self::cluster::{ProcessId, Processes};
use self::embedded::{CLIENT_TTL, Embedded, Shape};
use self::keys::BlockKeys;
use self::messages::{FromWorker, Setup, ToWorker};
pub(crate) use self::options::{Options, RunOptions};
use self::report::{Conditions, MasterCounts, Report};
use self::run::{Outcome, Run};
use self::trace::Trace;
use self::workers::Workers;
use super::nodes;
use crate::config::programs::{Common, TransportSettings};
use crate::config::{ByteSize, Settings as _, Sources};
use crate::connect::{self, LEAVE_WITHIN, Trust};
use crate::output::bytes;
use crate::process::StopRequest;
use crate::security::{self, Token};
use crate::{output, process};

/// Bytes that a worker stages for one layer of a window of blocks.
const STAGING_BYTES: u64 = 32 << 20;

/// Nodes of the embedded cluster where nothing is said.
const DEFAULT_NODES: u64 = 1;

/// Runs `layercake replay`.
pub(crate) fn execute(options: &Options, sources: &Sources) -> Result<()> {
    replay(&options.trace, &options.run, sources)
}

/// Replays the trace at `path`, and shows what came out.
pub(crate) fn replay(path: &Path, options: &RunOptions, sources: &Sources) -> Result<()> {
    options.check()?;
    let geometry = options.geometry()?;
    let flags = [&options.common.given[..], &options.transport.given].concat();
    let resolved = sources.resolve(&[Common::TABLE, TransportSettings::TABLE], &flags)?;
    let common = Common::take(&resolved)?;
    let token = security::token(&common)?;
    Tenant::new(&options.tenant).context("--tenant")?;
    process::start_logging(&common)?;

    let trace = read_trace(path, options.strict)?;
    if let Some(after) = options.kill_node_after
        && after.get() > trace.len() as u64
    {
        bail!(
            "--kill-node-after {after}: the trace has only {} requests",
            trace.len()
        );
    }
    let child_flags = child_flags(&resolved);
    let run_name = options
        .run_name
        .clone()
        .unwrap_or_else(|| match options.master {
            None => "embedded".to_owned(),
            Some(_) => format!("{:016x}", rand::rng().random::<u64>()),
        });
    let keys = BlockKeys::new(&options.tenant, &run_name, geometry.layout())?;
    let place = plan::place_bytes(&keys.header()?, geometry.layout().object_len())?;
    let replay = Replay {
        title: path
            .file_name()
            .map_or("trace".into(), |name| name.to_string_lossy().into_owned()),
        trace,
        geometry,
        options,
        common,
        token,
        child_flags,
        run_name,
        place,
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("can't start the runtime")?;
    let report = runtime.block_on(replay.run_or_stop())?;
    if options.json {
        output::print_json(&report)?;
    } else {
        output::print(report.tables().trim_end())?;
        if let Some(path) = &options.plot {
            output::print(format_args!("\nplot: {}", path.display()))?;
        }
    }
    match report.faults() {
        faults if faults.is_empty() => Ok(()),
        faults => bail!("{}", faults.join("; ")),
    }
}

fn read_trace(path: &Path, strict: bool) -> Result<Trace> {
    let input: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(io::stdin().lock())
    } else {
        let file =
            File::open(path).with_context(|| format!("can't open the trace {}", path.display()))?;
        Box::new(BufReader::with_capacity(1 << 20, file))
    };
    let trace = Trace::read(input, strict).with_context(|| path.display().to_string())?;
    if let Some(complaint) = trace.complaint() {
        eprintln!("{complaint}");
    }
    Ok(trace)
}

/// The effective values as flags for the processes that this one starts.
pub(crate) fn child_flags(resolved: &crate::config::Resolved) -> ChildFlags {
    let mut flags = ChildFlags::default();
    for entry in &resolved.entries {
        let setting = entry.setting;
        // The token goes another way.
        if setting.secret || setting.name == "token_file" {
            continue;
        }
        let flag = format!("--{}={}", setting.flag_name(), entry.text);
        if setting.section.is_empty() {
            flags.common.push(flag.clone());
        }
        flags.all.push(flag);
    }
    flags
}

#[derive(Debug, Default)]
pub(crate) struct ChildFlags {
    /// What every program takes.
    pub(crate) common: Vec<String>,
    /// And what those take that move bytes.
    pub(crate) all: Vec<String>,
}

struct Replay<'a> {
    title: String,
    trace: Trace,
    geometry: ModelGeometry,
    options: &'a RunOptions,
    common: Common,
    token: Option<Token>,
    child_flags: ChildFlags,
    run_name: String,
    /// Bytes that a block takes in a segment.
    place: u64,
}

impl Replay<'_> {
    /// Runs to the end, or until a signal; the children end in both cases.
    async fn run_or_stop(&self) -> Result<Report> {
        let mut stop = StopRequest::listen(false)?;
        let bar = self.bar();
        let mut processes = Processes::new(self.token.clone(), bar.clone());
        let report = tokio::select! {
            report = self.run(&mut processes, &bar) => report,
            () = stop.wait() => Err(anyhow::anyhow!("interrupted")),
        };
        bar.finish_and_clear();
        report
    }

    fn bar(&self) -> ProgressBar {
        let target = if self.options.json {
            ProgressDrawTarget::hidden()
        } else {
            // Hidden where standard error is no terminal.
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(self.trace.len() as u64), target);
        let style = "{elapsed_precise} {bar:40} {pos}/{len} requests, {per_sec:.0}, {msg}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        bar
    }

    async fn run(&self, processes: &mut Processes, bar: &ProgressBar) -> Result<Report> {
        let embedded = match self.options.master {
            Some(_) => None,
            None => Some(self.start_cluster(processes).await?),
        };
        let address = match (&embedded, &self.options.master) {
            (Some(embedded), _) => embedded.address.clone(),
            (None, Some(address)) => address.0.clone(),
            (None, None) => bail!("there is no cluster to work with"),
        };
        let trust = Trust {
            token: self.token.as_ref().map(|token| token.shared.clone()),
            insecure: self.common.insecure,
        };
        let name = format!("replay-{}", std::process::id());
        let link = MasterLink::connect(connect::link_config(&address, &name, &trust)).await?;
        let before = link.status().await?;
        if before.segments == 0 {
            bail!("the cluster of {address} has no memory: start a node first");
        }
        let nodes = nodes::names(&link.segments().await?).len() as u64;
        let workers = self.start_workers(processes, &address).await?;
        let run = Run {
            trace: &self.trace,
            speed: self.options.speed,
            kill_node_after: self.options.kill_node_after.map(std::num::NonZero::get),
            killed: None,
            embedded: embedded.as_ref(),
            processes,
            workers: Workers::new(workers),
            bar,
        };
        let outcome = run.drive().await?;
        let after = settled_status(&link, &before, outcome.lost_nodes).await?;
        let left = link.close(LEAVE_WITHIN).await;
        if let Err(error) = left {
            tracing::debug!(%error, "the link did not close in order");
        }
        if let Some(embedded) = &embedded {
            embedded.end(processes).await;
        }
        self.finish(&outcome, nodes, &before, &after)
    }

    async fn start_cluster(&self, processes: &mut Processes) -> Result<Embedded> {
        let nodes = self
            .options
            .nodes
            .map_or(DEFAULT_NODES, std::num::NonZero::get);
        let capacity = match self.options.capacity {
            Some(ByteSize(capacity)) => capacity,
            None => plan::ample_capacity(self.trace.distinct_blocks(), self.place, nodes)?,
        };
        if let Some(available) = plan::available_memory()
            && capacity > available
        {
            let (need, have) = (bytes(capacity), bytes(available));
            match self.options.capacity {
                Some(_) => bail!(
                    "--capacity {need} is more than the {have} of free memory that this machine has"
                ),
                None => bail!(
                    "the trace's {} distinct blocks (of {}) need {need}, this machine has {have} of free memory: give a --capacity, then blocks are evicted",
                    self.trace.distinct_blocks(),
                    self.trace.blocks()
                ),
            }
        }
        let shape = Shape {
            nodes,
            lease: self.options.lease(),
            node_capacity: plan::share(capacity, nodes, self.place)?,
            flags: self.child_flags.all.clone(),
            common: self.child_flags.common.clone(),
        };
        Embedded::start(processes, &shape).await
    }

    async fn start_workers(
        &self,
        processes: &mut Processes,
        address: &str,
    ) -> Result<Vec<ProcessId>> {
        let mut workers = Vec::new();
        for number in 1..=self.options.workers.get() {
            let name = format!("worker-{number}");
            let mut args = vec!["replay-worker".to_owned()];
            args.extend(self.child_flags.all.iter().cloned());
            let id = processes.spawn(&name, &args)?;
            let setup = Setup {
                name,
                master: address.to_owned(),
                tenant: self.options.tenant.clone(),
                geometry: self.geometry.to_string(),
                run: self.run_name.clone(),
                staging_bytes: STAGING_BYTES,
                most_blocks: self.trace.most_blocks(),
                connector: self.options.connector,
            };
            let line =
                serde_json::to_string(&ToWorker::Setup(setup)).context("can't write the setup")?;
            processes.tell(id, &line).await?;
            workers.push(id);
        }
        for _ in &workers {
            let (id, said): (_, FromWorker) = processes.any_ready(&workers, Duration::ZERO).await?;
            match said {
                FromWorker::Ready => {}
                FromWorker::Failed(reason) => bail!("{}: {reason}", processes.name(id)),
                other => bail!(
                    "{} said {other:?} instead of being ready",
                    processes.name(id)
                ),
            }
        }
        Ok(workers)
    }

    fn finish(
        &self,
        outcome: &Outcome,
        nodes: u64,
        before: &Status,
        after: &Status,
    ) -> Result<Report> {
        if let Some(failure) = &outcome.totals.first_failure {
            eprintln!(
                "{} requests failed, first {failure}",
                outcome.totals.failed_requests
            );
        } else if let Some(trouble) = &outcome.totals.first_trouble {
            tracing::info!("first trouble: {trouble}");
        }
        if let Some(path) = &self.options.plot {
            let title = format!("{}: hit ratio and throughput", self.title);
            plot::write(path, &title, &outcome.samples)?;
        }
        let conditions = Conditions {
            trace: self.title.clone(),
            geometry: self.geometry.to_string(),
            block_bytes: self.geometry.layout().object_len(),
            workers: self.options.workers.get(),
            nodes,
            capacity_bytes: before.capacity_bytes,
            distinct_blocks: self.trace.distinct_blocks(),
            skipped_lines: self.trace.skipped(),
        };
        let counts = MasterCounts {
            evicted_objects: after.evicted_objects.saturating_sub(before.evicted_objects),
            refused_puts: after.refused_puts.saturating_sub(before.refused_puts),
            lost_nodes: after.lost_nodes.saturating_sub(before.lost_nodes),
        };
        Ok(Report::new(
            conditions,
            &outcome.totals,
            &outcome.measured,
            counts,
            outcome.elapsed,
        ))
    }
}

/// The master's numbers once it has noticed every node that is known to be dead; it takes its time
/// for that, and what it has not noticed by then is told as it is.
async fn settled_status(link: &MasterLink, before: &Status, lost: u64) -> Result<Status> {
    let noticed = async {
        loop {
            let status = link.status().await?;
            if status.lost_nodes >= before.lost_nodes + lost {
                return Ok(status);
            }
            sleep(Duration::from_millis(50)).await;
        }
    };
    match timeout(CLIENT_TTL * 2, noticed).await {
        Ok(status) => status,
        Err(_) => Ok(link.status().await?),
    }
}
