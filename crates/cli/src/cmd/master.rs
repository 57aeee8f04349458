//! `layercake master`: the store's metadata service.

use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use clap::Args;
use layercake_master::state::StateConfig;
use layercake_master::{Master, MasterConfig};
use prometheus_client::registry::Registry;
use serde::{Deserialize, Serialize};

use super::show;
use crate::config::programs::{Common, MasterSettings};
use crate::config::{Flags, Settings as _, Sources};
use crate::http::{Health, Http};
use crate::process::{self, StopRequest};
use crate::{output, security};

/// Options of `layercake master`.
#[derive(Debug, Args)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Flags<Common>,
    #[command(flatten)]
    settings: Flags<MasterSettings>,
    #[command(flatten)]
    life: Life,
}

/// How a long-running process relates to the one that started it.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Life {
    /// Print one JSON line with the real addresses when ready
    #[arg(long)]
    pub(crate) print_ready: bool,
    /// Stop when standard input, a pipe, closes
    #[arg(long)]
    pub(crate) exit_with_stdin: bool,
}

/// The line that says that a master is ready.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Ready {
    #[serde(rename = "ready")]
    role: String,
    /// Where clients and nodes connect to.
    pub(crate) listen: SocketAddr,
    /// Where metrics and health are served, if they are.
    http: Option<SocketAddr>,
    term: u64,
    pid: u32,
}

/// Answers under way may take this long at a stop.
const GRACE: Duration = Duration::from_secs(3);

/// Runs until told to stop.
pub(crate) fn execute(options: &Options, sources: &Sources) -> Result<()> {
    let flags = [&options.common.given[..], &options.settings.given].concat();
    let resolved = sources.resolve(&[Common::TABLE, MasterSettings::TABLE], &flags)?;
    let common = Common::take(&resolved)?;
    let settings = MasterSettings::take(&resolved)?;
    let config = config(&common, &settings)?;
    process::start_logging(&common)?;
    let runtime = process::runtime(layercake_master::threads())?;
    let ran = runtime.block_on(run(config, settings.http, options.life));
    runtime.shutdown_timeout(Duration::from_millis(500));
    ran
}

fn config(common: &Common, settings: &MasterSettings) -> Result<MasterConfig> {
    Ok(MasterConfig {
        listen: settings.listen,
        token: security::token(common)?.map(|token| token.shared),
        insecure: common.insecure,
        shutdown_grace: GRACE,
        state: StateConfig {
            lease: settings.lease,
            high_watermark: settings.high_watermark.0,
            eviction_ratio: settings.eviction_ratio.0,
            client_ttl: settings.client_ttl,
            discard_after: settings.discard_after,
            release_after: settings.release_after,
            soft_pin_ttl: settings.soft_pin_ttl,
            evict_soft_pinned: settings.evict_soft_pinned,
            ..StateConfig::default()
        },
        local_lane: settings.local_lane,
        ..MasterConfig::default()
    })
}

async fn run(config: MasterConfig, http: Option<SocketAddr>, life: Life) -> Result<()> {
    let mut stop = StopRequest::listen(life.exit_with_stdin)?;
    let mut registry = Registry::default();
    let master = Master::bind(config, &mut registry).await?;
    let http = match http {
        None => None,
        Some(address) => {
            let monitor = master.monitor();
            let health = move || {
                let health = monitor.health();
                let mut detail = show::status(&health.status);
                detail["role"] = "master".into();
                detail["serving"] = health.serving.into();
                Health {
                    ok: health.serving,
                    detail,
                }
            };
            Some(Http::start(address, registry, health).await?)
        }
    };
    let ready = Ready {
        role: "master".to_owned(),
        listen: master.local_addr(),
        http: http.as_ref().map(|http| http.address),
        term: master.term().0,
        pid: std::process::id(),
    };
    tracing::info!(listen = %ready.listen, term = ready.term, "master is ready");
    if life.print_ready {
        output::print_json(&ready)?;
    }
    let served = master
        .serve(async move {
            stop.wait().await;
            process::bound_stop();
            tracing::info!("master stops");
        })
        .await;
    if let Some(http) = http {
        http.stop();
    }
    match served {
        // Members keep their connections to the last: cutting them off is how it ends.
        Err(layercake_master::Error::CutOff { grace }) => {
            tracing::debug!(?grace, "connections were cut off");
            Ok(())
        }
        other => Ok(other?),
    }
}
