//! `get_into_ranges`: pieces of many objects into pieces of many buffers, in one call.
//!
//! Arguments are nested: for each buffer a list of keys, and for each of these lists of offsets and sizes. Every
//! range has its own answer. Where lists don't fit each other, the ranges of the list in question are refused.

use layercake_store::Range;
use pyo3::prelude::*;

use super::report::tell;
use super::{NOT_SET_UP, PyMooncakeStore};
use crate::args::{Ints, Keys, Ragged};
use crate::core::StoreCore;
use crate::core::code::{self, INVALID};
use crate::core::reasons::invalid;

/// Answers of one buffer: for each key those of its ranges.
type Answers = Vec<Vec<i64>>;

/// What one buffer is to be filled with.
struct Buffer {
    start: u64,
    keys: Keys,
    dst: Ragged,
    src: Ragged,
    sizes: Ragged,
}

impl Buffer {
    fn fits(&self) -> bool {
        [&self.dst, &self.src, &self.sizes]
            .iter()
            .all(|rows| rows.len() == self.keys.len())
    }

    /// As many refusals as there seem to be ranges.
    fn refused(&self) -> Answers {
        let rows = [&self.dst, &self.src, &self.sizes];
        let len = |index| {
            let known = rows.iter().find(|rows| index < rows.len());
            known.map_or(1, |rows| rows.row(index).len())
        };
        (0..self.keys.len())
            .map(|index| vec![INVALID; len(index)])
            .collect()
    }

    /// The ranges of one key, whose object has this size: `None` for one without bytes. None at all if the
    /// lists don't fit.
    fn ranges(
        &self,
        core: &StoreCore,
        key: usize,
        size: Result<u64, i64>,
    ) -> Vec<Result<Option<Range>, i64>> {
        let (dst, src, sizes) = (self.dst.row(key), self.src.row(key), self.sizes.row(key));
        if dst.len() != src.len() || src.len() != sizes.len() {
            invalid("the lists of one key differ in length");
            return Vec::new();
        }
        let mut resolver = core.engine().resolver();
        let ranges = dst.iter().zip(src).zip(sizes);
        ranges
            .map(|((&dst, &src), &len)| {
                let size = size?;
                if src.checked_add(len).is_none_or(|end| end > size) {
                    return Err(code::beyond(src, len, size));
                }
                if len == 0 {
                    return Ok(None);
                }
                // Beyond the last address no buffer is registered.
                let start = self.start.saturating_add(dst);
                let local = resolver.registered(start, len).map_err(invalid)?;
                Ok(Some(Range { offset: src, local }))
            })
            .collect()
    }
}

/// A range that can be read, and where its answer belongs: buffer, key, position.
struct Wanted {
    answer: (usize, usize, usize),
    /// Position of the key among those of all buffers.
    entry: usize,
    range: Range,
}

fn read(core: &StoreCore, buffers: &[Buffer]) -> Vec<Answers> {
    let open = core.open_gets(&Keys::joined(buffers.iter().map(|buffer| &buffer.keys)));
    let mut answers = Vec::with_capacity(buffers.len());
    let mut wanted = Vec::new();
    let mut first = 0;
    for (at, buffer) in buffers.iter().enumerate() {
        let mut refused = buffer.refused();
        if buffer.fits() {
            for (key, answers) in refused.iter_mut().enumerate() {
                let entry = first + key;
                let size = open.size(entry);
                for (index, range) in buffer.ranges(core, key, size).into_iter().enumerate() {
                    match range {
                        Ok(Some(range)) => wanted.push(Wanted {
                            answer: (at, key, index),
                            entry,
                            range,
                        }),
                        Ok(None) => answers[index] = 0,
                        Err(refusal) => answers[index] = refusal,
                    }
                }
            }
        } else {
            let rows = [buffer.dst.len(), buffer.src.len(), buffer.sizes.len()];
            code::lists_differ(buffer.keys.len(), &rows);
        }
        first += buffer.keys.len();
        answers.push(refused);
    }
    let places: Vec<_> = wanted.iter().map(|wanted| wanted.answer).collect();
    let ranges = wanted
        .into_iter()
        .map(|wanted| (wanted.entry, wanted.range));
    for ((at, key, index), code) in places.into_iter().zip(open.read_each(ranges.collect())) {
        answers[at][key][index] = code;
    }
    answers
}

/// Writes down what failed, range by range.
fn tell_of(call: &'static str, buffers: &[Buffer], answers: &[Answers]) {
    let mut codes = Vec::new();
    let mut keys = Vec::new();
    for (buffer, answers) in buffers.iter().zip(answers) {
        for (key, ranges) in answers.iter().enumerate() {
            keys.resize(keys.len() + ranges.len(), (&buffer.keys, key));
            codes.extend_from_slice(ranges);
        }
    }
    tell(call, &codes, |index| {
        let (all, key) = keys[index];
        all.name(key)
    });
}

#[pymethods]
impl PyMooncakeStore {
    /// Reads ranges of objects into registered buffers.
    ///
    /// Args:
    ///     buffer_ptrs: *n* addresses, each in a registered buffer.
    ///     all_keys: For each buffer a row of keys.
    ///     all_dst_offsets: For each buffer and key a row of places behind the buffer's address, in bytes.
    ///     all_src_offsets: For each of these the place in the object, in bytes.
    ///     all_sizes: For each of these the size in bytes.
    ///
    /// Returns:
    ///     Bytes or a code for each range, in lists nested like the offsets.
    fn get_into_ranges(
        &self,
        py: Python<'_>,
        buffer_ptrs: Ints,
        all_keys: Vec<Keys>,
        all_dst_offsets: Vec<Ragged>,
        all_src_offsets: Vec<Ragged>,
        all_sizes: Vec<Ragged>,
    ) -> PyResult<Vec<Answers>> {
        const NAME: &str = "get_into_ranges";
        let lens = [
            all_keys.len(),
            all_dst_offsets.len(),
            all_src_offsets.len(),
            all_sizes.len(),
        ];
        if lens.iter().any(|len| *len != buffer_ptrs.0.len()) {
            let code = code::lists_differ(buffer_ptrs.0.len(), &lens);
            tell(NAME, &[code], |_| "all buffers".to_owned());
            return Ok(vec![vec![vec![code]]; buffer_ptrs.0.len()]);
        }
        let lists = all_dst_offsets
            .into_iter()
            .zip(all_src_offsets)
            .zip(all_sizes);
        let buffers = buffer_ptrs.0.into_iter().zip(all_keys).zip(lists);
        let buffers: Vec<Buffer> = buffers
            .map(|((start, keys), ((dst, src), sizes))| Buffer {
                start,
                keys,
                dst,
                src,
                sizes,
            })
            .collect();
        let core = self.core()?;
        let answers: Vec<Answers> = if let Some(core) = core {
            py.detach(|| read(&core, &buffers))
        } else {
            invalid(NOT_SET_UP);
            buffers.iter().map(Buffer::refused).collect()
        };
        tell_of(NAME, &buffers, &answers);
        Ok(answers)
    }
}
