//! Real processes of the `layercake` binary, and waiting for what they do.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::io::{BufRead as _, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::net::TcpSocket;

/// Far above what anything here takes, also on a busy machine.
pub(crate) const DEADLINE: Duration = Duration::from_secs(90);

/// The binary without the settings of the shell that runs the tests.
pub(crate) fn layercake(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_layercake"));
    for (name, _) in std::env::vars_os() {
        let text = name.to_string_lossy();
        let known = ["LAYERCAKE_", "MOONCAKE_", "MC_"];
        if known.iter().any(|prefix| text.starts_with(prefix)) {
            command.env_remove(&name);
        }
    }
    // No argument of these tests holds a blank.
    command.args(args.split_whitespace()).stdin(Stdio::null());
    command
}

/// Polls until the condition holds. It must, by the deadline.
pub(crate) fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    let until = Instant::now() + DEADLINE;
    let pause = mpsc::channel::<()>();
    while !condition() {
        assert!(Instant::now() < until, "in time: {what}");
        let _ = pause.1.recv_timeout(Duration::from_millis(20));
    }
}

/// Waits for the end of a process; `None` if it does not come in time.
pub(crate) fn wait(child: &mut Child, within: Duration) -> Option<ExitStatus> {
    let until = Instant::now() + within;
    let pause = mpsc::channel::<()>();
    loop {
        if let Some(status) = child.try_wait().expect("our child") {
            return Some(status);
        }
        if Instant::now() > until {
            return None;
        }
        let _ = pause.1.recv_timeout(Duration::from_millis(5));
    }
}

fn read_all(mut from: impl Read + Send + 'static) -> JoinHandle<String> {
    std::thread::spawn(move || {
        let mut bytes = Vec::new();
        from.read_to_end(&mut bytes).expect("a pipe can be read");
        String::from_utf8(bytes).expect("text")
    })
}

/// What a finished process said.
#[derive(Debug)]
pub(crate) struct Said {
    pub(crate) status: ExitStatus,
    pub(crate) out: String,
    pub(crate) err: String,
}

impl Said {
    /// It ended well.
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        assert!(
            self.status.success(),
            "{}\n{}\n{}",
            self.status,
            self.out,
            self.err
        );
        self
    }

    /// It refused: a non-zero exit and exactly one line, which is the answer.
    #[track_caller]
    pub(crate) fn refused(self) -> String {
        assert!(!self.status.success(), "{}\n{}", self.out, self.err);
        let lines: Vec<&str> = self.err.lines().collect();
        assert_eq!(lines.len(), 1, "one clear line: {}", self.err);
        assert!(lines[0].starts_with("layercake: "), "{}", self.err);
        lines[0].to_owned()
    }

    /// The last line of standard output as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> Value {
        let last = self.out.lines().last().expect("a line");
        serde_json::from_str(last).unwrap_or_else(|error| panic!("{error}: {last}"))
    }
}

/// Runs a command to its end, which must come in time.
#[track_caller]
pub(crate) fn finish(mut command: Command) -> Said {
    let child = command
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn();
    finish_child(child.expect("the binary starts"))
}

#[track_caller]
pub(crate) fn finish_child(mut child: Child) -> Said {
    let out = read_all(child.stdout.take().expect("piped"));
    let err = read_all(child.stderr.take().expect("piped"));
    let Some(status) = wait(&mut child, DEADLINE) else {
        child.kill().expect("it runs");
        panic!("a process did not end in time");
    };
    Said {
        status,
        out: out.join().expect("read"),
        err: err.join().expect("read"),
    }
}

#[track_caller]
pub(crate) fn run(args: &str) -> Said {
    finish(layercake(args))
}

/// A process that runs until it is told to end, or dropped.
#[derive(Debug)]
pub(crate) struct Running {
    pub(crate) child: Child,
    stdin: Option<ChildStdin>,
    pub(crate) ready: Value,
    err: Option<JoinHandle<String>>,
}

impl Running {
    /// Starts a master or node, and waits until it is ready.
    #[track_caller]
    pub(crate) fn start(args: &str) -> Self {
        Self::spawn(layercake(&format!(
            "{args} --print-ready --exit-with-stdin"
        )))
    }

    #[track_caller]
    pub(crate) fn spawn(mut command: Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("the binary starts");
        let err = read_all(child.stderr.take().expect("piped"));
        let mut out = BufReader::new(child.stdout.take().expect("piped"));
        let (send, line) = mpsc::channel();
        // Ends with the line, or with the process.
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = out.read_line(&mut line);
            let _ = send.send(read.map(|_| line));
        });
        let line = line
            .recv_timeout(DEADLINE)
            .expect("ready in time")
            .expect("text");
        if line.is_empty() {
            let status = child.wait().expect("our child");
            panic!(
                "ended instead of being ready: {status}: {}",
                err.join().expect("read")
            );
        }
        let ready = serde_json::from_str(&line).expect("a ready line");
        let stdin = child.stdin.take();
        Self {
            child,
            stdin,
            ready,
            err: Some(err),
        }
    }

    pub(crate) fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).expect("it runs");
    }

    pub(crate) fn close_stdin(&mut self) {
        self.stdin = None;
    }

    /// Waits for the end; answers the status and what went to standard error.
    #[track_caller]
    pub(crate) fn end(mut self, within: Duration) -> (ExitStatus, String) {
        let status = wait(&mut self.child, within).expect("ends in time");
        let err = self.err.take().expect("taken once").join().expect("read");
        (status, err)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A master and its nodes.
#[derive(Debug)]
pub(crate) struct Cluster {
    pub(crate) master: Running,
    pub(crate) nodes: Vec<Running>,
    pub(crate) address: String,
}

impl Cluster {
    #[track_caller]
    pub(crate) fn start(nodes: usize, capacity: &str, master_flags: &str) -> Self {
        let master = Running::start(&format!("master --listen 127.0.0.1:0 {master_flags}"));
        let address = master.ready["listen"]
            .as_str()
            .expect("an address")
            .to_owned();
        let nodes = (1..=nodes)
            .map(|number| {
                Running::start(&format!(
                    "node --master {address} --name node-{number} --capacity {capacity}"
                ))
            })
            .collect();
        Self {
            master,
            nodes,
            address,
        }
    }
}

/// An address at which nobody listens, as long as this is kept: a bound socket that does not listen turns
/// everyone away, and its port goes to nobody else.
#[derive(Debug)]
pub(crate) struct NobodyThere(TcpSocket);

impl NobodyThere {
    pub(crate) fn reserve() -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        let loopback = SocketAddr::from(([127, 0, 0, 1], 0));
        socket.bind(loopback).expect("any port");
        Self(socket)
    }

    pub(crate) fn address(&self) -> SocketAddr {
        self.0.local_addr().expect("it is bound")
    }
}

/// A folder with a sample trace of this many requests.
#[derive(Debug)]
pub(crate) struct Scene {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) trace: PathBuf,
}

impl Scene {
    pub(crate) fn with_trace(text: &str) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let trace = folder.path().join("trace.jsonl");
        std::fs::write(&trace, text).expect("written");
        Self { folder, trace }
    }

    pub(crate) fn workload(requests: usize, seed: u64) -> Self {
        let text = run(&format!("workload --requests {requests} --seed {seed}"))
            .ok()
            .out;
        Self::with_trace(&text)
    }

    /// The same requests at other times, in milliseconds.
    pub(crate) fn paced(self, at: impl Fn(u64) -> u64) -> Self {
        let text = std::fs::read_to_string(&self.trace).expect("written before");
        let lines = text.lines().zip(0..).map(|(line, request)| {
            let mut line: Value = serde_json::from_str(line).expect("JSON");
            line["timestamp"] = at(request).into();
            format!("{line}\n")
        });
        std::fs::write(&self.trace, lines.collect::<String>()).expect("written");
        self
    }

    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// What a replay with one worker and an ample pool must find, counted from the trace alone.
    pub(crate) fn expected(&self) -> Expected {
        let text = std::fs::read_to_string(&self.trace).expect("written before");
        let mut expected = Expected::default();
        let mut known = std::collections::HashSet::new();
        for line in text.lines() {
            let line: Value = serde_json::from_str(line).expect("JSON");
            let ids: Vec<u64> = line["hash_ids"]
                .as_array()
                .expect("a list")
                .iter()
                .map(|id| id.as_u64().expect("a number"))
                .collect();
            expected.requests += 1;
            expected.blocks += ids.len() as u64;
            expected.hits += ids.iter().take_while(|id| known.contains(*id)).count() as u64;
            known.extend(ids);
        }
        expected.distinct = known.len() as u64;
        expected
    }
}

#[derive(Debug, Default)]
pub(crate) struct Expected {
    pub(crate) requests: u64,
    pub(crate) blocks: u64,
    pub(crate) distinct: u64,
    pub(crate) hits: u64,
}

/// Asserts fields of a JSON object.
#[track_caller]
pub(crate) fn assert_fields(value: &Value, fields: &[(&str, u64)]) {
    for (name, expected) in fields {
        assert_eq!(value[name].as_u64(), Some(*expected), "{name} in {value}");
    }
}

/// Whether a process of this id is there and not just waiting to be reaped.
pub(crate) fn alive(pid: u32) -> bool {
    let state = state_of(Path::new(&format!("/proc/{pid}")));
    !matches!(state, Some('Z' | 'X') | None)
}

/// Whether a process is gone or does nothing any more: all of its threads, which a signal reaches one after the other.
pub(crate) fn stands_still(pid: u32) -> bool {
    let Ok(mut threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else {
        return true;
    };
    threads.all(|thread| {
        let state = thread.ok().and_then(|thread| state_of(&thread.path()));
        matches!(state, Some('T' | 't' | 'Z' | 'X') | None)
    })
}

fn state_of(thread: &Path) -> Option<char> {
    let stat = std::fs::read_to_string(thread.join("stat")).ok()?;
    // The state stands behind the name, which ends with the last parenthesis.
    stat.rsplit(')').next()?.trim().chars().next()
}

/// The processes whose parent is `pid`.
pub(crate) fn children_of(pid: u32) -> Vec<u32> {
    let entries = std::fs::read_dir("/proc").expect("Linux");
    entries
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse::<u32>().ok())
        .filter(|child| parent_of(*child) == Some(pid))
        .collect()
}

fn parent_of(pid: u32) -> Option<u32> {
    let stat =
        std::fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("stat")).ok()?;
    stat.rsplit(')')
        .next()?
        .split_whitespace()
        .nth(1)?
        .parse()
        .ok()
}
