//! Requests counted by what became of their keys: for consoles and for metrics that know calls of one key
//! and batches apart.

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};

use layercake_protocol::error::Refusal;
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request;
use layercake_protocol::wire::master_frame::Response;

/// Upper bounds of the classes that objects are counted in by size, in bytes; one more class has no bound.
pub const SIZE_CLASSES: [u64; 7] = [
    4 << 10,
    64 << 10,
    256 << 10,
    1 << 20,
    4 << 20,
    16 << 20,
    64 << 20,
];

/// What became of the requests of one method since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CallStat {
    /// Requests for one key, or for none in particular.
    pub single: u64,
    /// Those of them that were refused.
    pub single_refused: u64,
    /// Requests for several keys.
    pub batches: u64,
    /// Batches of which every key was refused.
    pub batches_refused: u64,
    /// Batches of which some keys were refused.
    pub batches_partial: u64,
    /// Keys of all batches.
    pub items: u64,
    /// Those of them that were refused.
    pub items_refused: u64,
}

impl CallStat {
    /// Requests, of one key or of several.
    pub fn requests(&self) -> u64 {
        self.single + self.batches
    }

    /// Requests of which every key was refused.
    pub fn refused(&self) -> u64 {
        self.single_refused + self.batches_refused
    }
}

/// The calls that are counted by their keys.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// Existence queries. A key that is not there is no refusal.
    pub exists: CallStat,
    /// Starts of reads.
    pub get_start: CallStat,
    /// Reservations, those that replace an object included.
    pub put_start: CallStat,
    /// Commits.
    pub put_end: CallStat,
    /// Reservations given up by their writer.
    pub put_revoke: CallStat,
    /// Removals by key.
    pub remove: CallStat,
    /// Removals by a pattern.
    pub remove_matching: CallStat,
    /// Removals of all.
    pub remove_all: CallStat,
    /// Segments mounted.
    pub mount: CallStat,
    /// Segments unmounted.
    pub unmount: CallStat,
    /// Heartbeats.
    pub heartbeat: CallStat,
    /// Reservations refused for want of room, by key.
    pub no_space: u64,
    /// Payload bytes of reads that were started.
    pub read_bytes: u64,
    /// Reservations by size, see [`SIZE_CLASSES`].
    pub sizes: [u64; SIZE_CLASSES.len() + 1],
    /// Their payload bytes.
    pub sizes_sum: u64,
}

/// Columns of a [`CallStat`].
const COLUMNS: usize = 7;

/// What counting needs of a request once it was carried out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    counted: Counted,
    keys: u64,
    /// What was started counts as ended, too.
    ends: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Counted {
    Exists,
    GetStart,
    PutStart,
    PutEnd,
    PutRevoke,
    Remove,
    RemoveMatching,
    RemoveAll,
    Mount,
    Unmount,
    Heartbeat,
}

impl Counted {
    const COUNT: usize = 11;
}

/// What [`Calls`] is a snapshot of.
#[derive(Debug)]
pub(crate) struct CallTally {
    rows: [[AtomicU64; COLUMNS]; Counted::COUNT],
    no_space: AtomicU64,
    read_bytes: AtomicU64,
    sizes: [AtomicU64; SIZE_CLASSES.len() + 1],
    sizes_sum: AtomicU64,
}

impl Default for CallTally {
    fn default() -> Self {
        Self {
            rows: array::from_fn(|_| array::from_fn(|_| AtomicU64::new(0))),
            no_space: AtomicU64::new(0),
            read_bytes: AtomicU64::new(0),
            sizes: array::from_fn(|_| AtomicU64::new(0)),
            sizes_sum: AtomicU64::new(0),
        }
    }
}

fn add(counter: &AtomicU64, n: u64) {
    if n > 0 {
        counter.fetch_add(n, Ordering::Relaxed);
    }
}

impl CallTally {
    /// A request has come, with so many keys in a list of its own.
    pub(crate) fn ask(&self, request: Option<&Request>, listed: usize) -> Option<Asked> {
        let (counted, keys) = match request? {
            Request::Exists(_) => (Counted::Exists, listed),
            Request::GetStart(_) => (Counted::GetStart, listed),
            Request::PutStart(start) => (Counted::PutStart, self.ask_puts(Some(start))),
            Request::UpsertStart(request) => {
                (Counted::PutStart, self.ask_puts(request.start.as_ref()))
            }
            Request::PutSlots(request) => {
                let puts = request.entries.iter().filter_map(|slot| slot.put.as_ref());
                self.ask_sizes(puts);
                (Counted::PutStart, request.entries.len())
            }
            Request::PutEnd(_) => (Counted::PutEnd, listed),
            Request::PutRevoke(_) => (Counted::PutRevoke, listed),
            Request::Remove(_) | Request::RemoveVersions(_) => (Counted::Remove, listed),
            Request::RemoveMatching(request) if request.pattern.is_empty() => {
                (Counted::RemoveAll, 1)
            }
            Request::RemoveMatching(_) => (Counted::RemoveMatching, 1),
            Request::Mount(_) => (Counted::Mount, 1),
            Request::Unmount(_) => (Counted::Unmount, 1),
            Request::Heartbeat(_) => (Counted::Heartbeat, 1),
            _ => return None,
        };
        Some(Asked {
            counted,
            keys: keys as u64,
            ends: matches!(request, Some(Request::PutSlots(_))),
        })
    }

    fn ask_puts(&self, start: Option<&wire::PutStartRequest>) -> usize {
        let entries = start.map_or(&[][..], |start| &start.entries);
        self.ask_sizes(entries.iter());
        entries.len()
    }

    fn ask_sizes<'a>(&self, entries: impl Iterator<Item = &'a wire::PutStart>) {
        for entry in entries {
            add(
                &self.sizes[SIZE_CLASSES.partition_point(|bound| *bound < entry.size)],
                1,
            );
            // A size that makes no sense may wrap the sum, which is no worse.
            add(&self.sizes_sum, entry.size);
        }
    }

    /// A request was answered.
    pub(crate) fn answered(&self, asked: Asked, result: &Result<Response, Refusal>) {
        let Asked {
            counted,
            keys,
            ends,
        } = asked;
        let refused = match result {
            Ok(response) => self.refused_keys(response),
            Err(_) => keys.max(1),
        };
        self.count(counted, keys, refused);
        if ends && refused < keys {
            self.count(Counted::PutEnd, keys - refused, 0);
        }
    }

    fn count(&self, counted: Counted, keys: u64, refused: u64) {
        let [
            single,
            single_refused,
            batches,
            batches_refused,
            partial,
            items,
            items_refused,
        ] = &self.rows[counted as usize];
        if keys <= 1 {
            add(single, 1);
            add(single_refused, refused);
            return;
        }
        add(batches, 1);
        add(batches_refused, u64::from(refused == keys));
        add(partial, u64::from(refused > 0 && refused < keys));
        add(items, keys);
        add(items_refused, refused);
    }

    /// Keys that were refused in an answer, which are counted further by what the answer is.
    fn refused_keys(&self, response: &Response) -> u64 {
        let none = i32::from(wire::Refusal::None);
        let no_space = i32::from(wire::Refusal::NoSpace);
        let count =
            |wanted: &mut dyn Iterator<Item = bool>| wanted.filter(|hit| *hit).count() as u64;
        match response {
            Response::GetStart(answer) => {
                let got = answer.results.iter().filter(|got| got.refusal == none);
                let (found, bytes) = got.fold((0, 0_u64), |(found, bytes), got| {
                    (found + 1, bytes.saturating_add(got.size))
                });
                add(&self.read_bytes, bytes);
                answer.results.len() as u64 - found
            }
            Response::PutStart(answer) => {
                let refusals = || answer.results.iter().map(|started| started.refusal);
                add(
                    &self.no_space,
                    count(&mut refusals().map(|refusal| refusal == no_space)),
                );
                count(&mut refusals().map(|refusal| refusal != none))
            }
            Response::Results(answer) => {
                count(&mut answer.refusals.iter().map(|refusal| *refusal != none))
            }
            Response::PutSlots(answer) => {
                let refusals = answer.results.iter().flat_map(|results| &results.refusals);
                count(&mut refusals.map(|refusal| *refusal != none))
            }
            _ => 0,
        }
    }

    pub(crate) fn snapshot(&self) -> Calls {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let stat = |counted: Counted| {
            let [
                single,
                single_refused,
                batches,
                batches_refused,
                partial,
                items,
                items_refused,
            ] = &self.rows[counted as usize];
            CallStat {
                single: load(single),
                single_refused: load(single_refused),
                batches: load(batches),
                batches_refused: load(batches_refused),
                batches_partial: load(partial),
                items: load(items),
                items_refused: load(items_refused),
            }
        };
        Calls {
            exists: stat(Counted::Exists),
            get_start: stat(Counted::GetStart),
            put_start: stat(Counted::PutStart),
            put_end: stat(Counted::PutEnd),
            put_revoke: stat(Counted::PutRevoke),
            remove: stat(Counted::Remove),
            remove_matching: stat(Counted::RemoveMatching),
            remove_all: stat(Counted::RemoveAll),
            mount: stat(Counted::Mount),
            unmount: stat(Counted::Unmount),
            heartbeat: stat(Counted::Heartbeat),
            no_space: load(&self.no_space),
            read_bytes: load(&self.read_bytes),
            sizes: array::from_fn(|class| load(&self.sizes[class])),
            sizes_sum: load(&self.sizes_sum),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn puts(sizes: &[u64]) -> Request {
        let entries = sizes.iter().map(|size| wire::PutStart {
            size: *size,
            ..Default::default()
        });
        Request::PutStart(wire::PutStartRequest {
            entries: entries.collect(),
            ..Default::default()
        })
    }

    fn started(refusals: &[wire::Refusal]) -> Response {
        let results = refusals.iter().map(|refusal| wire::PutStarted {
            refusal: (*refusal).into(),
            ..Default::default()
        });
        Response::PutStart(wire::PutStartResponse {
            results: results.collect(),
            ..Default::default()
        })
    }

    fn count(tally: &CallTally, request: &Request, result: &Result<Response, Refusal>) {
        let listed = if matches!(request, Request::GetStart(_)) {
            2
        } else {
            0
        };
        let asked = tally
            .ask(Some(request), listed)
            .expect("such a call is counted");
        tally.answered(asked, result);
    }

    #[test]
    fn calls_of_one_key_and_batches_are_counted_apart() {
        let tally = CallTally::default();
        let (none, full) = (wire::Refusal::None, wire::Refusal::NoSpace);
        count(&tally, &puts(&[1]), &Ok(started(&[none])));
        count(&tally, &puts(&[1]), &Ok(started(&[full])));
        count(&tally, &puts(&[1, 4097]), &Ok(started(&[none, none])));
        count(&tally, &puts(&[1, 1, 1]), &Ok(started(&[none, full, full])));
        count(&tally, &puts(&[1, u64::MAX]), &Err(Refusal::ShuttingDown));
        let calls = tally.snapshot();
        let expected = CallStat {
            single: 2,
            single_refused: 1,
            batches: 3,
            batches_refused: 1,
            batches_partial: 1,
            items: 7,
            items_refused: 4,
        };
        assert_eq!(calls.put_start, expected);
        assert_eq!(
            (calls.put_start.requests(), calls.put_start.refused()),
            (5, 2)
        );
        assert_eq!(calls.no_space, 3);
        assert_eq!(calls.sizes, [7, 1, 0, 0, 0, 0, 0, 1]);
    }

    #[test]
    fn reads_count_their_bytes_and_removals_of_all_stand_apart() {
        let tally = CallTally::default();
        let read = Request::GetStart(wire::GetStartRequest::default());
        let got = |refusal: wire::Refusal, size| wire::GetStarted {
            refusal: refusal.into(),
            size,
            ..Default::default()
        };
        let answer = Response::GetStart(wire::GetStartResponse {
            results: vec![
                got(wire::Refusal::None, 77),
                got(wire::Refusal::NotFound, 0),
            ],
            ..Default::default()
        });
        count(&tally, &read, &Ok(answer));
        for pattern in ["", "x"] {
            let removal = Request::RemoveMatching(wire::RemoveMatchingRequest {
                pattern: pattern.into(),
                force: false,
            });
            let answer = Response::RemoveMatching(wire::RemoveMatchingResponse { removed: 1 });
            count(&tally, &removal, &Ok(answer));
        }
        let calls = tally.snapshot();
        assert_eq!((calls.read_bytes, calls.get_start.batches_partial), (77, 1));
        assert_eq!(
            (calls.remove_all.single, calls.remove_matching.single),
            (1, 1)
        );
    }
}
