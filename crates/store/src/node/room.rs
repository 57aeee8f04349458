//! How much memory can be had, so that a segment that can't is refused before anything is allocated.
//!
//! Allocating would succeed: pages come at the first touch, and a process that touches too many is
//! killed, or takes its neighbours down. Two limits count: what the machine has left, and what the
//! control groups of this process leave it. Page cache counts as free in both. Where the system tells
//! neither, nothing is refused.

use std::io;
use std::path::{Path, PathBuf};

use crate::error::StoreError;

/// What limits memory, and to how many bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Room {
    pub(super) available: u64,
    pub(super) limited_by: &'static str,
}

const MACHINE: &str = "of the machine's memory";
const GROUP: &str = "under the limit of the control group";

impl Room {
    /// Refuses segments of `len` bytes together that don't fit.
    pub(super) fn check(self, len: u64) -> Result<(), StoreError> {
        if len > self.available {
            return Err(StoreError::SegmentTooLarge {
                len,
                available: self.available,
                limited_by: self.limited_by,
            });
        }
        Ok(())
    }
}

/// What this process may still use. These are files of the kernel's own and answer at once.
pub(super) fn available() -> Option<Room> {
    find(|path| std::fs::read_to_string(path))
}

fn find(read: impl Fn(&Path) -> io::Result<String>) -> Option<Room> {
    let machine = read(Path::new("/proc/meminfo"))
        .ok()
        .and_then(|text| field(&text, "MemAvailable:"))
        .map(|kib| Room {
            available: kib.saturating_mul(1024),
            limited_by: MACHINE,
        });
    let group = group_room(&read).map(|available| Room {
        available,
        limited_by: GROUP,
    });
    machine
        .into_iter()
        .chain(group)
        .min_by_key(|room| room.available)
}

/// The number behind a name at the start of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

/// What the tightest control group on the way to the root leaves.
fn group_room(read: &impl Fn(&Path) -> io::Result<String>) -> Option<u64> {
    let groups = read(Path::new("/proc/self/cgroup")).ok()?;
    groups
        .lines()
        .filter_map(|line| {
            let mut parts = line.splitn(3, ':');
            let (_, controllers, path) = (parts.next()?, parts.next()?, parts.next()?);
            let path = path.trim_start_matches('/');
            // Version 2 has one hierarchy without controllers in its line.
            if controllers.is_empty() {
                tightest(read, Path::new("/sys/fs/cgroup"), path, &V2)
            } else if controllers.split(',').any(|name| name == "memory") {
                tightest(read, Path::new("/sys/fs/cgroup/memory"), path, &V1)
            } else {
                None
            }
        })
        .min()
}

/// The names that a version of control groups has for the same things.
struct Files {
    limit: &'static str,
    usage: &'static str,
    cache: &'static str,
}

const V2: Files = Files {
    limit: "memory.max",
    usage: "memory.current",
    cache: "inactive_file ",
};
const V1: Files = Files {
    limit: "memory.limit_in_bytes",
    usage: "memory.usage_in_bytes",
    cache: "total_inactive_file ",
};

fn tightest(
    read: &impl Fn(&Path) -> io::Result<String>,
    root: &Path,
    group: &str,
    files: &Files,
) -> Option<u64> {
    let own = root.join(group);
    own.ancestors()
        .take_while(|folder| folder.starts_with(root))
        .map(PathBuf::from)
        .filter_map(|folder| {
            let number = |file: &str| read(&folder.join(file)).ok()?.trim().parse::<u64>().ok();
            // "max" is no number: no limit here.
            let limit = number(files.limit)?;
            let usage = number(files.usage)?;
            let cache = read(&folder.join("memory.stat"))
                .ok()
                .and_then(|stat| field(&stat, files.cache))
                .unwrap_or(0);
            Some(limit.saturating_sub(usage.saturating_sub(cache)))
        })
        .min()
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    fn room(files: &[(&str, &str)]) -> Option<Room> {
        let files: HashMap<_, _> = files.iter().copied().collect();
        find(|path| {
            let text = path.to_str().and_then(|path| files.get(path));
            text.map(ToString::to_string)
                .ok_or_else(|| io::ErrorKind::NotFound.into())
        })
    }

    const MEMINFO: (&str, &str) = (
        "/proc/meminfo",
        "MemTotal:  16000 kB\nMemFree: 100 kB\nMemAvailable:   8000 kB\n",
    );

    #[test]
    fn the_tightest_limit_counts() {
        assert_eq!(room(&[]), None);
        let machine = room(&[MEMINFO]).expect("told");
        assert_eq!(
            (machine.available, machine.limited_by),
            (8_192_000, MACHINE)
        );
        let v2 = [
            MEMINFO,
            ("/proc/self/cgroup", "0::/a/b\n"),
            ("/sys/fs/cgroup/a/b/memory.max", "max\n"),
            ("/sys/fs/cgroup/a/b/memory.current", "5\n"),
            ("/sys/fs/cgroup/a/memory.max", "5000000\n"),
            ("/sys/fs/cgroup/a/memory.current", "3000000\n"),
            (
                "/sys/fs/cgroup/a/memory.stat",
                "anon 7\ninactive_file 1000000\n",
            ),
        ];
        let group = room(&v2).expect("told");
        assert_eq!((group.available, group.limited_by), (3_000_000, GROUP));
        let v1 = [
            MEMINFO,
            ("/proc/self/cgroup", "4:cpu:/x\n3:memory:/x\n"),
            ("/sys/fs/cgroup/memory/x/memory.limit_in_bytes", "4096000\n"),
            ("/sys/fs/cgroup/memory/x/memory.usage_in_bytes", "96000\n"),
        ];
        assert_eq!(room(&v1).map(|room| room.available), Some(4_000_000));
    }

    #[test]
    fn what_does_not_fit_is_refused_with_the_figures() {
        let room = Room {
            available: 1000,
            limited_by: MACHINE,
        };
        assert!(room.check(1000).is_ok());
        let text = room.check(1001).expect_err("too much").to_string();
        assert!(
            text.contains("1001 bytes") && text.contains("1000 bytes"),
            "{text}"
        );
    }

    #[test]
    fn this_machine_tells() {
        assert!(available().is_some_and(|room| room.available > 0));
    }
}
