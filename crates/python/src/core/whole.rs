//! Whole objects from and to local memory: coded.
//!
//! Reading is done in two steps, since what fits is known only when the size is: [`StoreCore::open_gets`]
//! finds the objects and leases them, the caller says which ranges go where, and
//! [`OpenGets::read`] moves the bytes. The leases are left to run out: whoever reads here has no other way
//! to say that the object is still of interest.

use std::cell::OnceCell;
use std::collections::HashSet;

use layercake_protocol::code::ResultCode;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::ReplicateConfig;
use layercake_protocol::report::SegmentStat;
use layercake_store::{
    GetOptions, GetSession, PutOutcome, PutRequest, Range, RangeRead, StoreError,
};
use layercake_transport::LocalSlice;

use super::StoreCore;
use super::code::{self, ABSENT, Call, INVALID};
use super::reasons::{self, because, invalid};
use crate::args::Keys;
use crate::memory::Use;

/// Objects of at most this many bytes come along with their headers where that saves a round trip; the copy that it costs
/// is little then.
const FETCH: u64 = 64 << 10;

/// One object to put, or the code that its entry is answered with.
pub(crate) type PutItem = Result<PutRequest, i64>;

/// A request, and the position of its answer.
type Placed = (usize, PutRequest);

/// Ranges of one object to read, or the code that its entry is answered with.
pub(crate) type ReadItem = Result<Vec<Range>, i64>;

impl StoreCore {
    /// Local memory as pieces, for the coded calls: empty ones are skipped.
    pub(crate) fn pieces(
        &self,
        addrs: &[u64],
        lens: &[u64],
        of: Use,
        call: Call,
    ) -> Result<Vec<LocalSlice>, i64> {
        code::check_row(&[addrs.len(), lens.len()])?;
        let mut resolver = self.engine().resolver();
        let pieces = addrs.iter().zip(lens).filter(|(_, len)| **len > 0);
        pieces
            .map(|(&addr, &len)| {
                let piece = resolver.any(addr, len, of);
                piece.map_err(|error| code::of_memory(&error, call))
            })
            .collect()
    }

    /// The code of an object that no segment can take, wherever its bytes are. `largest`: the segment with the most
    /// memory, asked for once in a call.
    pub(crate) fn without_room(&self, lens: &[u64], largest: &OnceCell<u64>) -> Option<i64> {
        let size = lens
            .iter()
            .fold(0, |sum: u64, len| sum.saturating_add(*len));
        let largest = *largest.get_or_init(|| {
            let segments = self.block(self.client().link().segments());
            let sizes = |segments: Vec<SegmentStat>| segments.iter().map(|s| s.segment.len).max();
            // Where that is not known, the memory is what is wrong.
            segments.map_or(u64::MAX, |segments| sizes(segments).unwrap_or(0))
        });
        (size > largest).then(|| {
            let reason = format_args!("no segment has room for {size} bytes");
            because(ResultCode::NO_SPACE.as_result(), reason)
        })
    }

    /// Stores objects: 0 also where the key has an object or a writer. With `replace`, what is there is
    /// replaced; a key that is named twice has its last value. An error of `look_up` ends the wait for other
    /// upserts, before anything is stored.
    pub(crate) fn put<E>(
        &self,
        items: Vec<PutItem>,
        config: &ReplicateConfig,
        replace: bool,
        mut look_up: impl FnMut() -> Result<(), E>,
    ) -> Result<Vec<i64>, E> {
        if config.replicas == 0 {
            let code = invalid("0 replicas: at least 1 is needed");
            return Ok(vec![code; items.len()]);
        }
        let mut answers = vec![INVALID; items.len()];
        let mut left: Vec<Placed> = Vec::with_capacity(items.len());
        for (index, item) in items.into_iter().enumerate() {
            match item {
                Ok(request) => left.push((index, request)),
                Err(code) => answers[index] = code,
            }
        }
        let keys = left.iter().map(|(_, request)| &request.key);
        let look_up = || reasons::apart(&mut look_up);
        let turn = replace.then(|| self.turns.take(keys, look_up));
        let _turn = turn.transpose()?;
        while !left.is_empty() {
            let (round, later) = if replace {
                first_of_each_key(left)
            } else {
                (left, Vec::new())
            };
            left = later;
            let (indices, requests): (Vec<usize>, Vec<PutRequest>) = round.into_iter().unzip();
            let client = self.client();
            let done = if replace {
                self.block(client.upsert(requests, config))
            } else {
                self.block(client.put(requests, config))
            };
            for (index, outcome) in indices.into_iter().zip(done) {
                answers[index] = put_code(outcome);
            }
        }
        Ok(answers)
    }

    /// Finds and leases objects, to be read.
    pub(crate) fn open_gets(&self, keys: &Keys) -> OpenGets<'_> {
        let options = GetOptions {
            keep_lease: true,
            fetch: FETCH,
            ..GetOptions::default()
        };
        let started = self.block(self.client().start_gets(keys.good(), options));
        let sessions = started
            .into_iter()
            .map(|session| session.map_err(|error| code::of(&error, Call::WholeRead)));
        OpenGets {
            core: self,
            sessions: keys.align(sessions.collect(), |_| Err(ABSENT)),
        }
    }

    /// Reads whole objects, each into the pieces of local memory that `row` names, with exactly its size in all or,
    /// if `roomy`, at least. Gives the sizes.
    pub(crate) fn get_into_rows<'a>(
        &self,
        keys: &Keys,
        row: impl Fn(usize) -> (&'a [u64], &'a [u64]),
        roomy: bool,
    ) -> Vec<i64> {
        let open = self.open_gets(keys);
        let items = (0..open.len()).map(|index| {
            let size = open.size(index)?;
            let (addrs, lens) = row(index);
            let room = lens
                .iter()
                .fold(0, |room: u64, len| room.saturating_add(*len));
            code::check_row(&[addrs.len(), lens.len()])?;
            if room < size {
                return Err(invalid(format_args!(
                    "an object of {size} bytes does not fit into buffers of {room} bytes"
                )));
            }
            if room > size && !roomy {
                let code = Call::Session.transfer_failed().as_result();
                return Err(because(
                    code,
                    format_args!("buffers of {room} bytes are larger than the object of {size}"),
                ));
            }
            self.filled(addrs, lens, size)
        });
        let items = items.collect();
        open.read(items)
    }

    /// The ranges of an object of `size` bytes, piece after piece. Memory behind its end is not looked at: it is none
    /// of the call's business, and may not even be there.
    fn filled(&self, addrs: &[u64], lens: &[u64], size: u64) -> Result<Vec<Range>, i64> {
        let mut resolver = self.engine().resolver();
        let mut ranges = Vec::with_capacity(addrs.len());
        let mut offset = 0;
        for (&addr, &len) in addrs.iter().zip(lens) {
            let len = len.min(size - offset);
            if len == 0 {
                continue;
            }
            let local = resolver.any(addr, len, Use::Write);
            let local = local.map_err(|error| code::of_memory(&error, Call::WholeRead))?;
            ranges.push(Range { offset, local });
            offset += len;
        }
        Ok(ranges)
    }
}

/// Objects that were found and leased.
pub(crate) struct OpenGets<'a> {
    core: &'a StoreCore,
    sessions: Vec<Result<GetSession, i64>>,
}

impl OpenGets<'_> {
    pub(crate) fn len(&self) -> usize {
        self.sessions.len()
    }

    /// The size of an entry's object in bytes, or the entry's code.
    pub(crate) fn size(&self, index: usize) -> Result<u64, i64> {
        match self.sessions.get(index) {
            Some(Ok(session)) => Ok(session.size()),
            Some(Err(code)) => Err(*code),
            None => Err(INVALID),
        }
    }

    /// Reads ranges, each of the entry that stands before it, and gives the bytes of each.
    pub(crate) fn read_each(self, ranges: Vec<(usize, Range)>) -> Vec<i64> {
        let mut answers = vec![INVALID; ranges.len()];
        let mut indices = Vec::with_capacity(ranges.len());
        let mut reads = Vec::with_capacity(ranges.len());
        for (index, (entry, range)) in ranges.into_iter().enumerate() {
            match self.sessions.get(entry) {
                Some(Ok(session)) => {
                    indices.push(index);
                    let ranges = vec![range];
                    reads.push(RangeRead { session, ranges });
                }
                Some(Err(code)) => answers[index] = *code,
                None => {}
            }
        }
        self.finish(&mut answers, indices, reads);
        answers
    }

    fn finish(&self, answers: &mut [i64], indices: Vec<usize>, reads: Vec<RangeRead<'_>>) {
        let done = self.core.block(self.core.client().read_ranges(reads));
        for (index, done) in indices.into_iter().zip(done) {
            answers[index] = match done {
                Ok(done) => code::count(done.bytes),
                Err(error) => code::of(&error, Call::WholeRead),
            };
        }
    }

    /// Reads, entry by entry, and gives the bytes. Entries without an object have their own code.
    pub(crate) fn read(self, items: Vec<ReadItem>) -> Vec<i64> {
        let mut answers = vec![INVALID; self.sessions.len()];
        let mut indices = Vec::with_capacity(items.len());
        let mut reads = Vec::with_capacity(items.len());
        for (index, (session, item)) in self.sessions.iter().zip(items).enumerate() {
            match (session, item) {
                (Ok(session), Ok(ranges)) => {
                    indices.push(index);
                    reads.push(RangeRead { session, ranges });
                }
                (Err(code), _) => answers[index] = *code,
                (_, Err(code)) => answers[index] = code,
            }
        }
        self.finish(&mut answers, indices, reads);
        answers
    }
}

/// A whole object, into memory of its size.
pub(crate) fn whole(local: LocalSlice) -> Vec<Range> {
    vec![Range { offset: 0, local }]
}

fn put_code(outcome: Result<PutOutcome, StoreError>) -> i64 {
    match outcome {
        // A key that exists, or is being written, is no failure of a put.
        Ok(_) => ResultCode::OK.as_result(),
        Err(error) => code::of(&error, Call::WholeWrite),
    }
}

/// The first request of each key, and the others.
fn first_of_each_key(requests: Vec<Placed>) -> (Vec<Placed>, Vec<Placed>) {
    let mut seen: HashSet<ObjectKey> = HashSet::with_capacity(requests.len());
    requests
        .into_iter()
        .partition(|(_, request)| seen.insert(request.key.clone()))
}
