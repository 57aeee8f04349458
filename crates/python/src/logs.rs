//! Where the libraries' log lines go: to standard error, from warnings up.
//!
//! Our threads never call into Python, so its `logging` is out of reach. `LAYERCAKE_LOG` chooses another
//! level, or levels by module as in `layercake_store=debug`; `off` silences all of it. Nothing is written
//! while nothing is wrong.

use std::sync::Once;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt;

/// Starts logging, once for a process; a value of `LAYERCAKE_LOG` that makes no sense counts as none.
pub(crate) fn start() {
    static STARTED: Once = Once::new();
    STARTED.call_once(|| {
        let wanted = std::env::var("LAYERCAKE_LOG").ok();
        let filter = wanted.and_then(|text| EnvFilter::try_new(text).ok());
        let subscriber = fmt()
            .compact()
            .with_ansi(false)
            .with_writer(std::io::stderr)
            .with_env_filter(filter.unwrap_or_else(|| EnvFilter::new("warn")))
            .finish();
        // Somebody else in this library can't have set one.
        let _ = tracing::subscriber::set_global_default(subscriber);
    });
}
