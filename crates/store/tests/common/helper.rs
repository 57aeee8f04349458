//! Processes of their own, for what needs a kill: this test binary, run again for one ignored test.
//!
//! A helper is told what to do by one environment variable, says `ready …` on its standard output when
//! it has done so, and lives until it is killed or its standard input ends.

use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt as _, BufReader, Lines};
use tokio::process::{Child, ChildStdout, Command};

use super::{PATIENCE, eventually};

/// The variable that carries a helper's orders.
pub(crate) const ORDERS: &str = "LAYERCAKE_TEST_HELPER";

/// A helper process. Killed when dropped.
pub(crate) struct Helper {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Helper {
    /// Runs the ignored test `name` of this binary with `orders`, and waits until it is ready. Gives
    /// what it said.
    pub(crate) async fn start(name: &str, orders: &str) -> (Self, String) {
        let mut child = Command::new(std::env::current_exe().expect("a running binary"))
            .args([
                "--ignored",
                "--exact",
                name,
                "--nocapture",
                "--test-threads=1",
            ])
            .env(ORDERS, orders)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .expect("this binary can be run again");
        let stdout = child.stdout.take().expect("piped");
        let mut helper = Self {
            child,
            lines: BufReader::new(stdout).lines(),
        };
        let said = helper.wait_for("ready").await;
        (helper, said)
    }

    /// Waits for a line that holds `word`; gives what follows it.
    pub(crate) async fn wait_for(&mut self, word: &str) -> String {
        let found = async {
            while let Ok(Some(line)) = self.lines.next_line().await {
                if let Some((_, rest)) = line.split_once(word) {
                    return rest.trim().to_owned();
                }
            }
            panic!("the helper ended without saying {word:?}");
        };
        tokio::time::timeout(PATIENCE, found)
            .await
            .expect("the helper is quick")
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id().expect("running")
    }

    /// SIGKILL, and waits until the process is gone.
    pub(crate) async fn kill(mut self) {
        self.child.kill().await.expect("it was running");
    }

    /// SIGSTOP, and waits until every thread stands still.
    pub(crate) async fn stop(&self) {
        self.signal("STOP").await;
        let threads = format!("/proc/{}/task", self.pid());
        eventually("the process is stopped", || {
            let mut threads = std::fs::read_dir(&threads).expect("the process is there");
            threads.all(|thread| {
                let stat = thread.and_then(|it| std::fs::read_to_string(it.path().join("stat")));
                // A thread that ended meanwhile stands still as well.
                stat.map_or(true, |stat| {
                    let state = stat.rsplit(')').next();
                    state.is_some_and(|rest| rest.trim().starts_with('T'))
                })
            })
        })
        .await;
    }

    /// SIGCONT.
    pub(crate) async fn resume(&self) {
        self.signal("CONT").await;
    }

    async fn signal(&self, name: &str) {
        let status = Command::new("kill")
            .args([format!("-{name}"), self.pid().to_string()])
            .status()
            .await
            .expect("kill is there");
        assert!(status.success());
    }
}

/// The orders of this process, if it is a helper.
pub(crate) fn orders() -> String {
    std::env::var(ORDERS).expect("run by the tests that need it, not by itself")
}

/// Says a line, and lives until the parent lets go or is gone.
pub(crate) async fn ready(said: &str) {
    println!("ready {said}");
    let mut input = tokio::io::stdin();
    let mut rest = Vec::new();
    let end = tokio::io::AsyncReadExt::read_to_end(&mut input, &mut rest);
    drop(tokio::time::timeout(Duration::from_mins(2), end).await);
}
