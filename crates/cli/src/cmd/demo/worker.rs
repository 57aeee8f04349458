//! `layercake demo-engine`: one engine process of a demo.
//!
//! It is started by the demo and speaks with it over standard input and output; see `messages`.

use std::io::BufRead as _;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use clap::Args;
use layercake_connector::options::{Options as ConnectorOptions, Role};
use layercake_engine::model::ModelConfig;
use layercake_engine::run::timeline::{Activity, Span};
use layercake_engine::run::{Engine, EngineConfig, StoreLink};
use layercake_store::link::MasterLink;
use layercake_store::{ClientConfig, StoreClient};
use layercake_transport::Engine as Transport;
use tokio::runtime::Runtime;

use super::messages::{Done, Finished, FromEngine, Kind, Part, Request, Setup, Stretch, ToEngine};
use super::prompts::MOST_TOKENS;
use crate::config::programs::{Common, TransportSettings};
use crate::config::{Flags, Settings as _, Sources};
use crate::connect::{self, LEAVE_WITHIN, Trust};
use crate::{output, process, security};

/// Options of `layercake demo-engine`.
#[derive(Clone, Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    pub(crate) common: Flags<Common>,
    #[command(flatten)]
    pub(crate) transport: Flags<TransportSettings>,
}

/// Blocks of an engine's cache: room for one request of the longest kind, and what is being saved of the
/// one before.
const BLOCKS: u64 = 96;
/// Longest time for saves at the end.
const END_WITHIN: Duration = Duration::from_secs(30);

/// Runs until told to finish, or until standard input closes.
pub(crate) fn execute(options: &Options, sources: &Sources) -> Result<()> {
    let flags = [&options.common.given[..], &options.transport.given].concat();
    let resolved = sources.resolve(&[Common::TABLE, TransportSettings::TABLE], &flags)?;
    let common = Common::take(&resolved)?;
    let transport = TransportSettings::take(&resolved)?;
    process::start_logging(&common)?;
    let trust = Trust {
        token: security::token(&common)?.map(|token| token.shared),
        insecure: common.insecure,
    };
    let mut messages = std::io::stdin().lock().lines().map(|line| {
        let line = line.context("standard input can't be read")?;
        serde_json::from_str(&line).with_context(|| format!("no message: \"{line}\""))
    });
    let setup = match messages.next().transpose()? {
        Some(ToEngine::Setup(setup)) => setup,
        Some(_) => bail!("the first message is no setup"),
        None => return Ok(()),
    };
    let runtime = process::runtime(1)?;
    let transport = Transport::start(connect::engine_config(&transport, &trust, None, None))?;
    let mut worker = Worker::start(&setup, &transport, &runtime, &trust)?;
    output::print_json(&FromEngine::Ready)?;
    for message in messages {
        match message? {
            ToEngine::Setup(_) => bail!("a second setup"),
            ToEngine::Request(request) => {
                output::print_json(&FromEngine::Done(worker.run(request)?))?;
            }
            ToEngine::Finish => {
                output::print_json(&FromEngine::Finished(worker.counts()))?;
                break;
            }
        }
    }
    worker.leave(&runtime)?;
    transport.shutdown(LEAVE_WITHIN);
    runtime.shutdown_timeout(LEAVE_WITHIN);
    Ok(())
}

struct Worker {
    engine: Engine,
    layers: usize,
    store: Option<(MasterLink, StoreClient)>,
}

impl Worker {
    fn start(
        setup: &Setup,
        transport: &Transport,
        runtime: &Runtime,
        trust: &Trust,
    ) -> Result<Self> {
        let model = ModelConfig::small(setup.seed);
        let layers = model.cached_layers();
        let config = EngineConfig {
            ranks: setup.ranks,
            blocks: BLOCKS,
            step_tokens: setup.step_tokens,
            // What is served from the store is to be seen.
            prefix_caching: false,
            layer_time: Duration::from_micros(setup.layer_micros),
            timeline: true,
            ..EngineConfig::new(model)
        };
        let role = match setup.part {
            Part::Alone => {
                return Ok(Self {
                    engine: Engine::local(&config, transport)?,
                    layers,
                    store: None,
                });
            }
            Part::Prefill => Role::Producer,
            Part::Decode => Role::Consumer,
        };
        let mut to_master = connect::link_config(&setup.master, setup.part.name(), trust);
        to_master.endpoint = Some(transport.endpoint().clone());
        let (link, client) = runtime.block_on(async {
            let link = MasterLink::connect(to_master).await?;
            let client = StoreClient::new(&link, transport.clone(), ClientConfig::default())?;
            anyhow::Ok((link, client))
        })?;
        let options = ConnectorOptions {
            role,
            layerwise: setup.layerwise,
            // What is served from the store is to be seen, whether it pays or not.
            decline_slow_loads: false,
            lookup_timeout: Duration::from_secs(30),
            // Engines that differed would miss each other's blocks, and only seem to work.
            sharing_group: Some("demo".to_owned()),
            ..ConnectorOptions::default()
        };
        let to_store = StoreLink {
            store: client.clone(),
            options,
            tenant: "default".to_owned(),
            runtime: runtime.handle().clone(),
            observer: None,
        };
        Ok(Self {
            engine: Engine::with_store(&config, &to_store)?,
            layers,
            store: Some((link, client)),
        })
    }

    fn run(&mut self, request: Request) -> Result<Done> {
        debug_assert!(request.prompt.len() <= MOST_TOKENS);
        let id = request.index.to_string();
        self.engine
            .submit(id.as_str(), request.prompt, request.wanted)?;
        let mut ended = self.engine.run()?;
        let (Some(completion), true) = (ended.pop(), ended.is_empty()) else {
            bail!("one request has one end");
        };
        let spans = self.engine.take_spans();
        let mut exposed_us = vec![0.0; self.layers];
        for span in spans.iter().filter(|s| s.activity == Activity::Wait) {
            if let Some(sum) = exposed_us.get_mut(span.layer as usize) {
                *sum += micros(span.end.saturating_sub(span.begin));
            }
        }
        Ok(Done {
            index: request.index,
            tokens: completion.tokens,
            logits: completion.logits.iter().map(|logits| logits.0).collect(),
            first_token_s: completion.first_token.unwrap_or_default().as_secs_f64(),
            loaded_tokens: completion.loaded_tokens,
            failed: completion.failed,
            exposed_us,
            spans: first_step(&spans, self.layers),
        })
    }

    fn counts(&self) -> Finished {
        let Some((scheduler, workers)) = self.engine.connector_stats() else {
            return Finished::default();
        };
        Finished {
            keys_queried: scheduler.keys_queried,
            saved_blocks: workers.iter().map(|worker| worker.saved_blocks).sum(),
            loaded_blocks: workers.iter().map(|worker| worker.loaded_blocks).sum(),
            failed_loads: workers.iter().map(|worker| worker.failed_loads).sum(),
        }
    }

    fn leave(self, runtime: &Runtime) -> Result<()> {
        self.engine.close(END_WITHIN)?;
        if let Some((link, client)) = self.store {
            runtime.block_on(async {
                if let Err(error) = client.close(LEAVE_WITHIN).await {
                    tracing::debug!(%error, "the client did not close in order");
                }
                if let Err(error) = link.close(LEAVE_WITHIN).await {
                    tracing::debug!(%error, "the link did not close in order");
                }
            });
        }
        Ok(())
    }
}

fn micros(duration: Duration) -> f64 {
    (duration.as_secs_f64() * 1e7).round() / 10.0
}

/// Each layer computes before its cache is touched, and after.
const COMPUTATIONS: usize = 2;

/// What belongs to the first step. What is moved for a layer does if it began before the next step computed that layer: that
/// step's saves of it come after, and loads belong to a request's first step.
fn first_step(spans: &[Span], layers: usize) -> Vec<Stretch> {
    let Some(begin) = spans.iter().map(|span| span.begin).min() else {
        return Vec::new();
    };
    let computed = |layer: u32| {
        let of_layer = move |span: &&Span| span.layer == layer;
        let computed = spans.iter().filter(of_layer);
        computed.filter(|span| span.activity == Activity::Compute)
    };
    let last = u32::try_from(layers.saturating_sub(1)).unwrap_or(u32::MAX);
    let ends = computed(last).map(|span| span.end);
    let end = ends.take(COMPUTATIONS).last().unwrap_or_default();
    let in_step = |span: &&Span| match span.activity {
        Activity::Compute | Activity::Wait => span.end <= end,
        Activity::Load | Activity::Save => {
            let next = computed(span.layer).nth(COMPUTATIONS);
            next.is_none_or(|next| span.begin < next.begin)
        }
    };
    let stretches = spans.iter().filter(in_step).map(|span| Stretch {
        layer: span.layer,
        kind: match span.activity {
            Activity::Compute => Kind::Compute,
            Activity::Wait => Kind::Wait,
            Activity::Load => Kind::Load,
            Activity::Save => Kind::Save,
        },
        begin_us: micros(span.begin.saturating_sub(begin)),
        end_us: micros(span.end.saturating_sub(begin)),
    });
    stretches.collect()
}

#[cfg(test)]
mod tests {
    use super::Activity::{Compute, Load, Save, Wait};
    use super::*;

    #[test]
    fn a_picture_shows_one_step() {
        let span = |layer, activity, begin, end| Span {
            layer,
            activity,
            begin: Duration::from_millis(begin),
            end: Duration::from_millis(end),
        };
        let first = [
            span(0, Compute, 10, 10),
            span(0, Load, 10, 12),
            span(0, Wait, 10, 12),
            span(0, Compute, 12, 20),
            span(1, Compute, 20, 20),
            span(1, Load, 11, 15),
            span(0, Save, 20, 24),
            span(1, Compute, 20, 30),
            // It is saved while the next step computes.
            span(1, Save, 32, 45),
        ];
        let second = [
            span(0, Compute, 31, 31),
            span(0, Wait, 31, 31),
            span(0, Compute, 31, 40),
            span(1, Compute, 40, 40),
            span(0, Save, 45, 47),
            span(1, Compute, 40, 50),
            span(1, Save, 50, 55),
        ];
        let all = [&first[..], &second].concat();
        let found = first_step(&all, 2);
        assert_eq!(found, first_step(&first, 2));
        assert_eq!(found.len(), first.len());
        assert_eq!((found[0].begin_us, found[8].end_us), (0.0, 35_000.0));
        assert!(first_step(&[], 2).is_empty());
    }
}
