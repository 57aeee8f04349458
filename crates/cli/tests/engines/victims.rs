//! Engines that are killed or stopped themselves, in processes of their own: this test binary, run again
//! for one ignored test, which strikes itself at its point.

use std::os::unix::process::ExitStatusExt as _;
use std::process::{Child, Command, Stdio};

use layercake_connector::options::Role;
use rustix::process::{Pid, Signal, getpid, kill_process};
use serde::{Deserialize, Serialize};

use crate::bench::{Bench, END_WITHIN, Point, Saboteur, Use};
use crate::common::{Cluster, DEADLINE, eventually, wait};

/// The variable that carries a victim's orders.
const ORDERS: &str = "LAYERCAKE_TEST_VICTIM";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Part {
    Prefill,
    Decode,
    /// It saves, and others read along.
    Publish,
}

impl Part {
    /// Look-up, start, range, end.
    fn points(self) -> [Point; 4] {
        match self {
            Self::Prefill => [Point::LookUp, Point::Start, Point::Save, Point::End],
            Self::Decode => [Point::LookUp, Point::Start, Point::Load, Point::Loaded],
            Self::Publish => [Point::LookUp, Point::Start, Point::Saving, Point::End],
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Orders {
    pub(crate) master: String,
    pub(crate) part: Part,
    pub(crate) point: Point,
    pub(crate) ranks: u32,
    pub(crate) kill: bool,
}

/// A process that is killed in the end.
pub(crate) struct Victim(pub(crate) Child);

impl Drop for Victim {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Victim {
    pub(crate) fn start(orders: &Orders) -> Self {
        let child = Command::new(std::env::current_exe().expect("a running binary"))
            .args([
                "--ignored",
                "--exact",
                "victims::victim",
                "--test-threads=1",
            ])
            .env(ORDERS, serde_json::to_string(orders).expect("plain"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        Self(child.expect("this binary can be run again"))
    }

    pub(crate) fn stands_still(&mut self) -> bool {
        assert_eq!(
            self.0.try_wait().expect("our child"),
            None,
            "its point came"
        );
        let stat = std::fs::read_to_string(format!("/proc/{}/stat", self.0.id()));
        let stat = stat.expect("it is there");
        let state = stat.rsplit(')').next();
        state.is_some_and(|rest| rest.trim().starts_with('T'))
    }
}

/// Runs as an engine of the orders.
#[test]
#[ignore = "a process of the tests below"]
fn victim() {
    let orders = std::env::var(ORDERS).expect("run by the tests that need it, not by itself");
    let orders: Orders = serde_json::from_str(&orders).expect("orders");
    let bench = Bench::new(orders.ranks);
    let (role, asks) = match orders.part {
        Part::Prefill => (Role::Both, &bench.asks[..]),
        Part::Decode => (Role::Consumer, &bench.asks[..2]),
        Part::Publish => (Role::Producer, &bench.asks[1..2]),
    };
    let signal = if orders.kill {
        Signal::KILL
    } else {
        Signal::STOP
    };
    let saboteur = Saboteur::new(&bench, orders.point, getpid(), signal);
    let mut link = bench.link(&orders.master, Use { role, ..Use::PLAIN });
    link.options.per_layer_readiness = orders.part == Part::Publish;
    let what = format!("{orders:?}");
    let (engine, found) = bench.sabotaged(link, &saboteur, asks, &what);
    // Only one that was stopped comes so far, when it goes on.
    assert!(saboteur.has_struck() && !orders.kill, "{what}");
    assert!(found.iter().all(|one| !one.failed), "{what}");
    engine.close(END_WITHIN).expect("everything ends");
}

fn cell(bench: &Bench, part: Part, point: Point, kill: bool) {
    let what = format!("{part:?}, {point:?}, kill {kill}");
    let cluster = Cluster::start(1, "16MiB", "");
    bench.fill(&cluster.address);
    let orders = Orders {
        master: cluster.address.clone(),
        part,
        point,
        ranks: bench.config.ranks,
        kill,
    };
    let mut victim = Victim::start(&orders);
    if kill {
        let status = wait(&mut victim.0, DEADLINE).expect("it ends");
        let signal = status.signal();
        assert_eq!(
            signal,
            Some(Signal::KILL.as_raw()),
            "{what}: its point came"
        );
    } else {
        eventually("it stands still", || victim.stands_still());
    }
    for reader in ["computes the rest", "reads"] {
        let loaded = bench.read(&cluster.address, &bench.asks, &format!("{what}: {reader}"));
        assert!(loaded > 0, "{what}: {reader}");
    }
    if !kill {
        kill_process(Pid::from_child(&victim.0), Signal::CONT).expect("it stands still");
        let status = wait(&mut victim.0, DEADLINE).expect("it ends");
        assert!(
            status.success(),
            "{what}: it goes on as if nothing had happened"
        );
        bench.read(&cluster.address, &bench.asks, &what);
    }
}

#[test]
fn an_engine_that_dies_harms_no_other() {
    let bench = Bench::new(4);
    for part in [Part::Prefill, Part::Decode, Part::Publish] {
        for point in part.points() {
            cell(&bench, part, point, true);
        }
    }
}

#[test]
fn an_engine_that_stands_still_harms_no_other_and_goes_on() {
    let bench = Bench::new(2);
    for part in [Part::Prefill, Part::Decode, Part::Publish] {
        for point in part.points() {
            cell(&bench, part, point, false);
        }
    }
}
