//! How a long-running process of this program starts, is told to stop, and stops in time.
//!
//! It stops on SIGINT or SIGTERM, and with `--exit-with-stdin` also when its standard input closes:
//! a pipe from its parent closes however the parent ends, SIGKILL included, so children never outlive
//! their parent. A stop that takes too long is cut short by a watchdog.

use std::future::pending;
use std::io;
use std::os::fd::AsFd as _;
use std::time::Duration;

use anyhow::{Context as _, Result};
use tokio::io::AsyncReadExt as _;
use tokio::net::unix::pipe;
use tokio::signal::unix::{Signal, SignalKind, signal};

use crate::config::programs::Common;

/// A stop must be over after this long.
const STOP_WITHIN: Duration = Duration::from_millis(4500);

/// Sends logs to standard error: nothing at the default level as long as nothing is wrong.
pub(crate) fn start_logging(common: &Common) -> Result<()> {
    let filter = tracing_subscriber::EnvFilter::try_new(&common.log).with_context(|| {
        format!(
            "setting `log`: \"{}\" is no level or list of levels",
            common.log
        )
    })?;
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(io::stderr)
        .with_ansi(false)
        .try_init()
        .map_err(|error| anyhow::anyhow!("can't start logging: {error}"))
}

/// The runtime of a process with this many threads for asynchronous work.
pub(crate) fn runtime(threads: usize) -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        .enable_all()
        .build()
        .context("can't start the threads of the runtime")
}

/// Standard input as a pipe that is read without blocking a thread.
pub(crate) fn stdin_pipe() -> Result<pipe::Receiver> {
    const WHY: &str = "standard input is not a pipe";
    let fd = io::stdin().as_fd().try_clone_to_owned().context(WHY)?;
    pipe::Receiver::from_owned_fd(fd).context(WHY)
}

/// What a process waits for when all is well.
#[derive(Debug)]
pub(crate) struct StopRequest {
    interrupt: Signal,
    terminate: Signal,
    stdin: Option<pipe::Receiver>,
}

impl StopRequest {
    /// Begins to listen. Must be called before the process says that it is ready.
    pub(crate) fn listen(exit_with_stdin: bool) -> Result<Self> {
        let listen = |kind| signal(kind).context("can't listen for signals");
        Ok(Self {
            interrupt: listen(SignalKind::interrupt())?,
            terminate: listen(SignalKind::terminate())?,
            stdin: exit_with_stdin.then(stdin_pipe).transpose()?,
        })
    }

    /// Resolves when the process is to stop.
    pub(crate) async fn wait(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            () = closed(self.stdin.as_mut()) => {}
        }
    }
}

async fn closed(stdin: Option<&mut pipe::Receiver>) {
    let Some(stdin) = stdin else {
        return pending().await;
    };
    let mut scrap = [0; 256];
    // What is written there means nothing; an error is as good as an end.
    while stdin.read(&mut scrap).await.is_ok_and(|len| len > 0) {}
}

/// Ends the process, as failed, if its stop hangs. Started when the stop begins; the process's end is
/// the thread's.
pub(crate) fn bound_stop() {
    let watchdog = std::thread::Builder::new()
        .name("stop-watchdog".to_owned())
        .spawn(|| {
            let forever = std::sync::mpsc::channel::<()>();
            let _ = forever.1.recv_timeout(STOP_WITHIN);
            eprintln!("layercake: the stop took longer than {STOP_WITHIN:?} and was cut short");
            std::process::exit(1);
        });
    if let Err(error) = watchdog {
        tracing::warn!(%error, "no watchdog over the stop");
    }
}
