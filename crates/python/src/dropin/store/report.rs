//! What calls that failed write to the log: one line for a call, whatever the size of its batch.
//!
//! The line says how many keys failed, with which codes and why, and names a few of them. A program that
//! does the same wrong thing over and over fills no log: of each method and code a few lines are written at once, and
//! then one every ten seconds, with the number of calls that were left out.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::args::{Keys, Names};
use crate::core::reasons;

/// Keys that a line names for each code, and characters of each.
const SAMPLES: usize = 3;
const SHOWN: usize = 64;

/// Lines of one method and code that may follow each other, and what one more costs.
const BURST: u32 = 8;
const ONE_MORE: Duration = Duration::from_secs(10);

/// How many lines are left, by method and code.
static BUDGETS: LazyLock<Mutex<HashMap<(&'static str, i64), Budget>>> =
    LazyLock::new(Mutex::default);

struct Budget {
    lines: u32,
    since: Instant,
    left_out: u64,
}

impl Budget {
    /// Takes a line: the number of calls that were left out before it; `None`: there is none.
    fn take(&mut self, now: Instant) -> Option<u64> {
        let gained = now.saturating_duration_since(self.since).as_secs() / ONE_MORE.as_secs();
        if gained > 0 {
            let gained = u32::try_from(gained).unwrap_or(BURST);
            self.lines = self.lines.saturating_add(gained).min(BURST);
            self.since = now;
        }
        if self.lines == 0 {
            self.left_out += 1;
            return None;
        }
        self.lines -= 1;
        Some(std::mem::take(&mut self.left_out))
    }
}

/// Entries of one code.
struct Group {
    code: i64,
    count: usize,
    names: Vec<String>,
}

/// What the answers of a call are about.
pub(super) trait Entries {
    fn count(&self) -> usize;

    /// What people know an entry by.
    fn name(&self, index: usize) -> String;

    /// The answers of a call that is refused as a whole, which is written down.
    fn refused(&self, call: &'static str, code: i64) -> Vec<i64> {
        let codes = vec![code; self.count()];
        tell(call, &codes, |index| self.name(index));
        codes
    }
}

impl Entries for Keys {
    fn count(&self) -> usize {
        self.len()
    }

    fn name(&self, index: usize) -> String {
        self.name(index)
    }
}

impl Entries for Names {
    fn count(&self) -> usize {
        self.len()
    }

    fn name(&self, index: usize) -> String {
        self.name(index)
    }
}

/// Writes down which entries of a call failed, if any did, with the reasons that were left for their codes. `name`
/// gives an entry's key.
pub(super) fn tell(call: &'static str, codes: &[i64], name: impl Fn(usize) -> String) {
    let reasons = reasons::take();
    if !codes.iter().any(|code| reasons::is_failure(*code)) {
        return;
    }
    let mut groups: Vec<Group> = Vec::new();
    for (index, &code) in codes.iter().enumerate() {
        if !reasons::is_failure(code) {
            continue;
        }
        let at = groups.iter().position(|group| group.code == code);
        let at = at.unwrap_or_else(|| {
            groups.push(Group {
                code,
                count: 0,
                names: Vec::new(),
            });
            groups.len() - 1
        });
        let group = &mut groups[at];
        group.count += 1;
        if group.names.len() < SAMPLES {
            group.names.push(shortened(&name(index)));
        }
    }
    let Some(left_out) = allowed(call, groups[0].code) else {
        return;
    };
    // A store that was never set up has not started it.
    crate::logs::start();
    let mut line = String::new();
    for Group { code, count, names } in &groups {
        let more = if names.len() < *count { ", …" } else { "" };
        let reason = reasons.iter().find(|(known, _)| known == code);
        let reason = reason.map_or("", |(_, reason)| reason.as_str());
        // Writing to a text can't fail.
        let _ = write!(
            line,
            "; {code} for {count} ({}{more}): {reason}",
            names.join(", ")
        );
    }
    if left_out > 0 {
        let _ = write!(line, "; {left_out} such calls before were not written down");
    }
    let failed: usize = groups.iter().map(|group| group.count).sum();
    tracing::warn!("{call}: {failed} of {} failed{line}", codes.len());
}

fn allowed(call: &'static str, code: i64) -> Option<u64> {
    let now = Instant::now();
    let mut budgets = BUDGETS.lock();
    let budget = budgets.entry((call, code)).or_insert(Budget {
        lines: BURST,
        since: now,
        left_out: 0,
    });
    budget.take(now)
}

fn shortened(name: &str) -> String {
    match name.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{:?}…", &name[..end]),
        None => format!("{name:?}"),
    }
}
