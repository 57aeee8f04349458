//! The processes of a replay: spawned from this very binary, watched, killed by their handles.
//!
//! Every child reads a pipe from this process as its standard input and ends when that closes, so no
//! child outlives the replay, however it ends. A child's standard output is lines for us, its standard
//! error lines for people; both are read by one task a child, which ends with the child's output.
//! `LAYERCAKE_*` variables are not handed down: a child gets its settings as flags, and the token in
//! the variable meant for it.

use std::collections::HashMap;
use std::process::{ExitStatus, Stdio};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use indicatif::ProgressBar;
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::config::ENV_PREFIX;
use crate::security::{ENV_TOKEN, Token};

/// Longest time for a child to say that it is ready, beyond what its work takes.
const READY_WITHIN: Duration = Duration::from_secs(20);

/// Longest time for a child to end after its standard input closed.
const END_WITHIN: Duration = Duration::from_secs(6);

/// Names a child for as long as the replay runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct ProcessId(usize);

/// What a child did.
#[derive(Debug)]
pub(crate) enum Event {
    /// It wrote a line.
    Line(ProcessId, String),
    /// It closed its standard output: it is gone, or as good as.
    Closed(ProcessId),
}

impl ProcessId {
    #[cfg(test)]
    pub(crate) fn for_tests(number: usize) -> Self {
        Self(number)
    }
}

struct Process {
    name: String,
    child: Child,
    stdin: Option<ChildStdin>,
    /// The last line for people is held back: it is the reason if the child dies of it.
    last_words: Arc<Mutex<Option<String>>>,
}

/// The children of a replay.
pub(crate) struct Processes {
    token: Option<Token>,
    bar: ProgressBar,
    alive: HashMap<ProcessId, Process>,
    next: usize,
    events: mpsc::Receiver<Event>,
    report: mpsc::Sender<Event>,
    readers: JoinSet<()>,
}

impl Processes {
    /// No child yet. What children say to people is shown above `bar`.
    pub(crate) fn new(token: Option<Token>, bar: ProgressBar) -> Self {
        let (report, events) = mpsc::channel(64);
        Self {
            token,
            bar,
            alive: HashMap::new(),
            next: 0,
            events,
            report,
            readers: JoinSet::new(),
        }
    }

    /// Starts this binary with `args`.
    pub(crate) fn spawn(&mut self, name: &str, args: &[String]) -> Result<ProcessId> {
        let binary = std::env::current_exe().context("can't find this program's own file")?;
        let mut command = Command::new(binary);
        command
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            // A terminal's Ctrl-C is for the replay, which ends its children in order.
            .process_group(0)
            .kill_on_drop(true);
        for (variable, _) in std::env::vars_os() {
            if variable.to_string_lossy().starts_with(ENV_PREFIX) {
                command.env_remove(variable);
            }
        }
        if let Some(token) = &self.token {
            command.env(ENV_TOKEN, &token.text);
        }
        let mut child = command
            .spawn()
            .with_context(|| format!("can't start {name}"))?;
        let (stdin, stdout, stderr) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(stdout), Some(stderr)) = (stdout, stderr) else {
            bail!("{name} has no pipes");
        };
        let id = ProcessId(self.next);
        self.next += 1;
        let last_words = Arc::new(Mutex::new(None));

        let report = self.report.clone();
        let (words, bar, prefix) = (Arc::clone(&last_words), self.bar.clone(), name.to_owned());
        self.readers.spawn(async move {
            let said = async {
                let mut lines = BufReader::new(stdout).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    if report.send(Event::Line(id, line)).await.is_err() {
                        return;
                    }
                }
            };
            let complained = async {
                let mut lines = BufReader::new(stderr).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    if let Some(earlier) = words.lock().replace(line) {
                        bar.suspend(|| eprintln!("{prefix}: {earlier}"));
                    }
                }
            };
            // Only when both are at their end are its last words known.
            tokio::join!(said, complained);
            // Nobody is left to hear it when the replay is over.
            let _ = report.send(Event::Closed(id)).await;
        });
        self.alive.insert(
            id,
            Process {
                name: name.to_owned(),
                child,
                stdin,
                last_words,
            },
        );
        Ok(id)
    }

    pub(crate) fn name(&self, id: ProcessId) -> &str {
        self.alive
            .get(&id)
            .map_or("a process", |process| &process.name)
    }

    /// The next thing that a child does.
    pub(crate) async fn event(&mut self) -> Result<Event> {
        self.events.recv().await.context("no process is left")
    }

    /// Waits for the first line of a child, beyond `READY_WITHIN` for as long as `work` takes.
    pub(crate) async fn ready<T: DeserializeOwned>(
        &mut self,
        id: ProcessId,
        work: Duration,
    ) -> Result<T> {
        Ok(self.any_ready(&[id], work).await?.1)
    }

    /// Waits for the first line of any of these children.
    pub(crate) async fn any_ready<T: DeserializeOwned>(
        &mut self,
        ids: &[ProcessId],
        work: Duration,
    ) -> Result<(ProcessId, T)> {
        let within = READY_WITHIN + work;
        match timeout(within, self.event()).await {
            Ok(Ok(Event::Line(from, line))) => match serde_json::from_str(&line) {
                Ok(ready) if ids.contains(&from) => Ok((from, ready)),
                _ => bail!(
                    "{} said \"{line}\" while processes were starting",
                    self.name(from)
                ),
            },
            Ok(Ok(Event::Closed(from))) => Err(self.post_mortem(from).await),
            Ok(Err(error)) => Err(error),
            Err(_) => {
                let names: Vec<_> = ids.iter().map(|id| self.name(*id)).collect();
                bail!("{} not ready after {within:?}", names.join(", "))
            }
        }
    }

    /// Writes a line to a child.
    pub(crate) async fn tell(&mut self, id: ProcessId, line: &str) -> Result<()> {
        let process = self.alive.get_mut(&id).context("no such process")?;
        let name = &process.name;
        let stdin = process
            .stdin
            .as_mut()
            .with_context(|| format!("{name} was told to end"))?;
        let written = async {
            stdin.write_all(line.as_bytes()).await?;
            stdin.write_all(b"\n").await?;
            stdin.flush().await
        };
        written
            .await
            .with_context(|| format!("{name} does not listen any more"))
    }

    /// Sends SIGKILL.
    pub(crate) async fn kill(&mut self, id: ProcessId) -> Result<()> {
        let process = self.alive.get_mut(&id).context("no such process")?;
        process
            .child
            .kill()
            .await
            .with_context(|| format!("can't kill {}", process.name))
    }

    /// Why a child that is gone is gone, as an error.
    pub(crate) async fn post_mortem(&mut self, id: ProcessId) -> anyhow::Error {
        let Some(process) = self.alive.get_mut(&id) else {
            return anyhow::anyhow!("no such process");
        };
        let status = timeout(END_WITHIN, process.child.wait()).await;
        let how = match status {
            Ok(Ok(status)) => describe(status),
            Ok(Err(error)) => error.to_string(),
            Err(_) => "closed its output".to_owned(),
        };
        let words = process.last_words.lock().take();
        let words = words.map(|words| words.trim_start_matches("layercake: ").to_owned());
        match words {
            Some(words) => anyhow::anyhow!("{} ended ({how}): {words}", process.name),
            None => anyhow::anyhow!("{} ended ({how})", process.name),
        }
    }

    /// Ends these children, all at once: asks them by closing their standard input, and kills those
    /// that take too long.
    pub(crate) async fn end(&mut self, ids: &[ProcessId]) {
        for id in ids {
            if let Some(process) = self.alive.get_mut(id) {
                process.stdin = None;
            }
        }
        for id in ids {
            let Some(mut process) = self.alive.remove(id) else {
                continue;
            };
            let ended = timeout(END_WITHIN, process.child.wait()).await.is_ok();
            if let Some(words) = process.last_words.lock().take() {
                self.bar.suspend(|| eprintln!("{}: {words}", process.name));
            }
            if !ended {
                self.bar
                    .suspend(|| eprintln!("{} did not end in time and is killed", process.name));
                // It is gone already if this fails.
                let _ = process.child.kill().await;
            }
        }
    }
}

fn describe(status: ExitStatus) -> String {
    use std::os::unix::process::ExitStatusExt as _;
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "unknown how".to_owned(),
    }
}
