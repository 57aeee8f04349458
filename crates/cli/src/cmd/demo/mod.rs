//! `layercake demo`: the main job with real computation, in less than a minute.
//!
//! A master, a node, and three processes of the reference engine. One computes prompts and saves them;
//! one loads them from the pool and generates the same; one has no store, and says what is right.
//!
//! - `prompts`: what is asked.
//! - `messages`, `worker`: one engine process.
//! - `report`, `timeline`: what comes out.

mod messages;
mod prompts;
mod report;
mod timeline;
pub(crate) mod worker;

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use layercake_engine::model::ModelConfig;
use layercake_store::link::MasterLink;
use serde::de::DeserializeOwned;
use tokio::time::timeout;

use self::messages::{Done, Finished, FromEngine, Part, Request, Setup, ToEngine};
use self::report::{Answers, Conditions, Report};
use super::replay::cluster::{Event, ProcessId, Processes};
use super::replay::embedded::{Embedded, Shape};
use super::replay::{ChildFlags, child_flags};
use crate::config::programs::{Common, TransportSettings};
use crate::config::{Flags, Settings as _, Sources, Value as _};
use crate::connect::{self, LEAVE_WITHIN, Trust};
use crate::process::StopRequest;
use crate::security::{self, Token};
use crate::{output, process};

fn parse_duration(text: &str) -> Result<Duration, String> {
    Duration::read(text)
}

/// Options of `layercake demo`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    /// Number of requests
    #[arg(long, value_name = "N", default_value_t = 16)]
    requests: usize,
    /// Tokens that are generated for each
    #[arg(long, value_name = "N", default_value_t = 12)]
    tokens: usize,
    /// The same seed makes the same prompts and the same model
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// Ranks that share the heads of each engine: 1, 2 or 4
    #[arg(long, value_name = "N", default_value = "1")]
    ranks: NonZeroU32,
    /// Tokens that an engine computes in a step
    #[arg(long, value_name = "N", default_value_t = 512)]
    step_tokens: usize,
    /// The least time that a layer takes to compute, such as 2ms: what a larger model would take
    #[arg(long, value_name = "DURATION", value_parser = parse_duration, default_value = "0s")]
    layer_time: Duration,
    /// Load and save whole objects instead of layers, for comparison
    #[arg(long)]
    whole_objects: bool,
    /// Succeed also if loading takes no less time than computing, as it may where others use the machine
    #[arg(long)]
    ignore_times: bool,
    /// Draw one step of each engine, layer by layer
    #[arg(long, value_name = "FILE.svg")]
    timeline: Option<PathBuf>,
    /// Print the last line only, one JSON object, without the tables
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    common: Flags<Common>,
    #[command(flatten)]
    transport: Flags<TransportSettings>,
}

/// Memory of the node.
const CAPACITY: u64 = 256 << 20;
/// Objects that are no blocks: what the engines that share them have in common.
const RECORDS: u64 = 1;
/// Longest time for an engine to answer a request: far above all deadlines of one.
const ANSWER_WITHIN: Duration = Duration::from_mins(5);

/// Runs the demo.
pub(crate) fn execute(options: &Options, sources: &Sources) -> Result<()> {
    if options.requests == 0 || options.tokens == 0 || options.step_tokens == 0 {
        bail!("--requests, --tokens and --step-tokens are at least 1");
    }
    let model = ModelConfig::small(options.seed);
    model.check(options.ranks.get()).context("--ranks")?;
    let flags = [&options.common.given[..], &options.transport.given].concat();
    let resolved = sources.resolve(&[Common::TABLE, TransportSettings::TABLE], &flags)?;
    let common = Common::take(&resolved)?;
    let demo = Demo {
        prompts: prompts::make(options.seed, options.requests, model.vocab),
        options,
        token: security::token(&common)?,
        common,
        flags: child_flags(&resolved),
    };
    process::start_logging(&demo.common)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .context("can't start the runtime")?;
    let (answers, report) = runtime.block_on(demo.run_or_stop())?;
    if let Some(path) = &options.timeline {
        timeline::write(path, &answers)?;
    }
    if !options.json {
        output::print(report.tables().trim_end())?;
        if let Some(path) = &options.timeline {
            output::print(format_args!("\ntimeline: {}", path.display()))?;
        }
        output::print("")?;
    }
    output::print_json(&report)?;
    match report.faults(options.ignore_times) {
        faults if faults.is_empty() => Ok(()),
        faults => bail!("{}", faults.join("; ")),
    }
}

struct Demo<'a> {
    options: &'a Options,
    prompts: Vec<Vec<u32>>,
    common: Common,
    token: Option<Token>,
    flags: ChildFlags,
}

impl Demo<'_> {
    /// Runs to the end, or until a signal; the children end in both cases.
    async fn run_or_stop(&self) -> Result<(Answers, Report)> {
        let mut stop = StopRequest::listen(false)?;
        let target = if self.options.json {
            ProgressDrawTarget::hidden()
        } else {
            // Hidden where standard error is no terminal.
            ProgressDrawTarget::stderr()
        };
        let bar = ProgressBar::with_draw_target(Some(3 * self.prompts.len() as u64), target);
        let style = "{elapsed_precise} {bar:40} {pos}/{len} requests, {msg}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        let mut processes = Processes::new(self.token.clone(), bar.clone());
        let result = tokio::select! {
            result = self.run(&mut processes, &bar) => result,
            () = stop.wait() => Err(anyhow::anyhow!("interrupted")),
        };
        bar.finish_and_clear();
        result
    }

    async fn run(&self, processes: &mut Processes, bar: &ProgressBar) -> Result<(Answers, Report)> {
        let shape = Shape {
            nodes: 1,
            node_capacity: CAPACITY,
            lease: None,
            common: self.flags.common.clone(),
            flags: self.flags.all.clone(),
        };
        let cluster = Embedded::start(processes, &shape).await?;
        let trust = Trust {
            token: self.token.as_ref().map(|token| token.shared.clone()),
            insecure: self.common.insecure,
        };
        let name = format!("demo-{}", std::process::id());
        let config = connect::link_config(&cluster.address, &name, &trust);
        let link = MasterLink::connect(config).await?;
        let started = Instant::now();
        let mut answers = Answers::default();
        let run = |part| self.engine(part, &cluster.address);
        let mut engines = Engines { processes, bar };
        bar.set_message("computing and saving");
        let prefill;
        (answers.prefill, prefill) = engines.run(run(Part::Prefill), self).await?;
        let objects = link.status().await?.objects.saturating_sub(RECORDS);
        bar.set_message("loading from the pool");
        let decode;
        (answers.decode, decode) = engines.run(run(Part::Decode), self).await?;
        bar.set_message("computing without a store");
        (answers.alone, _) = engines.run(run(Part::Alone), self).await?;
        let conditions = Conditions {
            prompt_tokens: self.prompts.iter().map(Vec::len).sum(),
            objects,
            ranks: self.options.ranks.get(),
            layerwise: !self.options.whole_objects,
            seconds: started.elapsed().as_secs_f64(),
        };
        if let Err(error) = link.close(LEAVE_WITHIN).await {
            tracing::debug!(%error, "the link did not close in order");
        }
        cluster.end(processes).await;
        let report = Report::new(&answers, &prefill, &decode, &conditions);
        Ok((answers, report))
    }

    fn engine(&self, part: Part, master: &str) -> Setup {
        Setup {
            part,
            master: master.to_owned(),
            seed: self.options.seed,
            ranks: self.options.ranks.get(),
            step_tokens: self.options.step_tokens,
            layer_micros: u64::try_from(self.options.layer_time.as_micros()).unwrap_or(u64::MAX),
            layerwise: !self.options.whole_objects,
        }
    }
}

/// Engine processes, one after the other: each has the machine for itself.
struct Engines<'a> {
    processes: &'a mut Processes,
    bar: &'a ProgressBar,
}

impl Engines<'_> {
    /// Starts an engine, gives it all requests one at a time, and ends it.
    async fn run(&mut self, setup: Setup, demo: &Demo<'_>) -> Result<(Vec<Done>, Finished)> {
        let name = setup.part.name();
        let mut args = vec!["demo-engine".to_owned()];
        args.extend(demo.flags.all.iter().cloned());
        let engine = self.processes.spawn(name, &args)?;
        self.tell(engine, &ToEngine::Setup(setup)).await?;
        match self.processes.ready(engine, Duration::ZERO).await? {
            FromEngine::Ready => {}
            other => bail!("{name} said {other:?} instead of being ready"),
        }
        let mut all = Vec::with_capacity(demo.prompts.len());
        for (index, prompt) in demo.prompts.iter().enumerate() {
            let request = Request {
                index,
                prompt: prompt.clone(),
                wanted: demo.options.tokens,
            };
            self.tell(engine, &ToEngine::Request(request)).await?;
            match self.answer(engine).await? {
                FromEngine::Done(done) if done.index == index => all.push(done),
                other => bail!("{name} said {other:?} instead of answering request {index}"),
            }
            self.bar.inc(1);
        }
        self.tell(engine, &ToEngine::Finish).await?;
        let FromEngine::Finished(counts) = self.answer(engine).await? else {
            bail!("{name} did not say what it had counted");
        };
        // It ends by itself now; the next one is started when it has.
        match self.event().await? {
            Event::Closed(from) if from == engine => {}
            Event::Closed(from) => return Err(self.processes.post_mortem(from).await),
            Event::Line(from, line) => {
                bail!("{} said \"{line}\" out of turn", self.processes.name(from))
            }
        }
        self.processes.end(&[engine]).await;
        Ok((all, counts))
    }

    async fn tell(&mut self, engine: ProcessId, message: &ToEngine) -> Result<()> {
        let line = serde_json::to_string(message).context("can't write a message as JSON")?;
        self.processes.tell(engine, &line).await
    }

    async fn event(&mut self) -> Result<Event> {
        let event = timeout(ANSWER_WITHIN, self.processes.event()).await;
        event.context("an engine does not answer")?
    }

    /// What the engine says next. Whatever ends meanwhile ends the demo.
    async fn answer<T: DeserializeOwned>(&mut self, engine: ProcessId) -> Result<T> {
        match self.event().await? {
            Event::Line(from, line) if from == engine => {
                let name = self.processes.name(from);
                serde_json::from_str(&line).with_context(|| format!("{name} said \"{line}\""))
            }
            Event::Line(from, line) => {
                bail!("{} said \"{line}\" out of turn", self.processes.name(from))
            }
            Event::Closed(from) => Err(self.processes.post_mortem(from).await),
        }
    }
}
