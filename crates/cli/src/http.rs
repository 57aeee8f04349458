//! `/metrics` and `/health` over HTTP, only where an address is configured.
//!
//! Metrics are read when somebody scrapes. Health is `200` while the process does its job and `503`
//! otherwise, with a JSON object that says why. Neither answer waits for anything.

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::{Context as _, Result};
use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use prometheus_client::encoding::text::encode;
use prometheus_client::registry::Registry;
use serde_json::Value;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The media type of the metrics' text.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// How a process is.
#[derive(Clone, Debug)]
pub(crate) struct Health {
    pub(crate) ok: bool,
    pub(crate) detail: Value,
}

struct Shared {
    registry: Registry,
    health: Box<dyn Fn() -> Health + Send + Sync>,
}

/// A listener that serves until it is stopped.
#[derive(Debug)]
pub(crate) struct Http {
    pub(crate) address: SocketAddr,
    stop: CancellationToken,
    served: JoinHandle<std::io::Result<()>>,
}

impl Http {
    /// Begins to serve at `address`.
    pub(crate) async fn start(
        address: SocketAddr,
        registry: Registry,
        health: impl Fn() -> Health + Send + Sync + 'static,
    ) -> Result<Self> {
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("can't listen for HTTP on {address}"))?;
        let address = listener
            .local_addr()
            .context("the HTTP listener has no address")?;
        let shared = Arc::new(Shared {
            registry,
            health: Box::new(health),
        });
        let router = Router::new()
            .route("/metrics", get(metrics))
            .route("/health", get(health_of))
            .with_state(shared);
        let stop = CancellationToken::new();
        let served = tokio::spawn(
            axum::serve(listener, router)
                .with_graceful_shutdown(stop.clone().cancelled_owned())
                .into_future(),
        );
        Ok(Self {
            address,
            stop,
            served,
        })
    }

    /// Stops serving. Connections that idle are not waited for.
    pub(crate) fn stop(self) {
        self.stop.cancel();
        self.served.abort();
    }
}

async fn metrics(State(shared): State<Arc<Shared>>) -> Response {
    let mut text = String::new();
    match encode(&mut text, &shared.registry) {
        Ok(()) => ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

async fn health_of(State(shared): State<Arc<Shared>>) -> Response {
    let Health { ok, detail } = (shared.health)();
    let status = if ok {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    let json = [(header::CONTENT_TYPE, "application/json")];
    (status, json, format!("{detail}\n")).into_response()
}
