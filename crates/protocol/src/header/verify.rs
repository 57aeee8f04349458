//! How a reader checks what it read against the table of written ranges (L5).
//!
//! A checksum covers a whole row, so a read can be verified only where it takes in whole rows.
//! [`ReadPlan::new`] cuts the wanted ranges at the bounds of the rows they cover, alone or together,
//! and no further; the transport gives the CRC-32C of every piece it copied; [`ReadPlan::verify`]
//! compares. Bytes of rows that were read in part, or have no checksum, count as unverified.
//!
//! Pure, and built once per key and call: linear in the rows touched.

use thiserror::Error;

use crate::checksum::combine;
use crate::range::ByteRange;

use super::{Row, RowTable};

/// A piece of a wanted range, to be read in one go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadPiece {
    /// Which bytes of the object.
    pub range: ByteRange,
    /// Which of the wanted ranges they belong to.
    pub wanted: usize,
    /// Where in that range they start, in bytes.
    pub within: u64,
}

/// The pieces to read, and what they must add up to.
#[derive(Clone, Debug, Default)]
pub struct ReadPlan {
    pieces: Vec<ReadPiece>,
    checks: Vec<Check>,
}

/// How much of a read was verified.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Verified {
    /// Bytes whose checksum fits.
    pub verified_bytes: u64,
    /// Bytes that can't be verified.
    pub unverified_bytes: u64,
}

/// Why a read must not be served.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum VerifyError {
    /// The bytes are not those that were written.
    #[error("bytes {range} have the checksum {found:#010x}, {expected:#010x} was written")]
    Mismatch {
        /// The row.
        range: ByteRange,
        /// Its checksum in the header.
        expected: u32,
        /// The checksum of the bytes read.
        found: u32,
    },
    /// The results are not those of this plan.
    #[error("{found} results for a plan of {expected} pieces")]
    PieceCount {
        /// Pieces of the plan.
        expected: usize,
        /// Results given.
        found: usize,
    },
}

/// One copy of one row.
#[derive(Clone, Debug)]
struct Check {
    range: ByteRange,
    crc32c: u32,
    made_of: MadeOf,
}

#[derive(Clone, Debug)]
enum MadeOf {
    Piece(usize),
    /// Pieces of several wanted ranges, in ascending order.
    Pieces(Vec<usize>),
}

/// A part of a row that a wanted range holds without holding all of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Part {
    row: usize,
    range: ByteRange,
    wanted: usize,
}

impl ReadPlan {
    /// Cuts `wanted` along `rows`, which are a header's: ascending and disjoint.
    pub fn new(rows: &(impl RowTable + ?Sized), wanted: &[ByteRange]) -> Self {
        let mut plan = Self::default();
        plan.remake(rows, wanted);
        plan
    }

    /// Becomes the plan that [`new`](Self::new) makes, in the memory of the one it was.
    pub fn remake(&mut self, rows: &(impl RowTable + ?Sized), wanted: &[ByteRange]) {
        let plan = self;
        plan.pieces.clear();
        plan.checks.clear();
        let links = links(rows, wanted);
        let mut chains: Vec<(usize, Vec<usize>)> = Vec::new();
        for (index, &want) in wanted.iter().enumerate() {
            let mut at = want.start();
            for row in overlapping(rows, want) {
                let Row { range, crc32c } = rows.row(row);
                let Some(crc32c) = crc32c else { continue };
                let whole = want.contains(range);
                let checked = if whole {
                    Some(range)
                } else {
                    find_link(&links, row, index)
                };
                let Some(checked) = checked else { continue };
                plan.push(index, want, at, checked.start());
                let piece = plan.pieces.len();
                plan.push(index, want, checked.start(), checked.end());
                at = checked.end();
                if whole {
                    plan.checks.push(Check {
                        range,
                        crc32c,
                        made_of: MadeOf::Piece(piece),
                    });
                    continue;
                }
                match chains.iter_mut().find(|(of, _)| *of == row) {
                    Some((_, chain)) => chain.push(piece),
                    None => chains.push((row, vec![piece])),
                }
            }
            plan.push(index, want, at, want.end());
        }
        for (row, mut chain) in chains {
            chain.sort_unstable_by_key(|&piece| plan.pieces[piece].range);
            let Row { range, crc32c } = rows.row(row);
            plan.checks.extend(crc32c.map(|crc32c| Check {
                range,
                crc32c,
                made_of: MadeOf::Pieces(chain),
            }));
        }
    }

    /// The pieces, wanted range after wanted range, each in ascending order. Together they are the
    /// wanted ranges; an empty one has no piece.
    pub fn pieces(&self) -> &[ReadPiece] {
        &self.pieces
    }

    /// Whether any piece can be verified, so that checksums are worth computing.
    pub fn wants_checksums(&self) -> bool {
        !self.checks.is_empty()
    }

    /// Compares the CRC-32C of every piece, in the order of [`pieces`](Self::pieces), with the rows.
    pub fn verify(&self, crcs: &[Option<u32>]) -> Result<Verified, VerifyError> {
        if crcs.len() != self.pieces.len() {
            return Err(VerifyError::PieceCount {
                expected: self.pieces.len(),
                found: crcs.len(),
            });
        }
        let mut verified_bytes = 0;
        for check in &self.checks {
            let found = match &check.made_of {
                MadeOf::Piece(piece) => crcs[*piece],
                MadeOf::Pieces(chain) => self.combined(chain, crcs),
            };
            match found {
                Some(found) if found != check.crc32c => {
                    return Err(VerifyError::Mismatch {
                        range: check.range,
                        expected: check.crc32c,
                        found,
                    });
                }
                Some(_) => verified_bytes += check.range.len(),
                None => {}
            }
        }
        let total: u64 = self.pieces.iter().map(|p| p.range.len()).sum();
        Ok(Verified {
            verified_bytes,
            unverified_bytes: total - verified_bytes,
        })
    }

    fn combined(&self, chain: &[usize], crcs: &[Option<u32>]) -> Option<u32> {
        chain.iter().try_fold(0, |crc, &piece| {
            let len = self.pieces[piece].range.len();
            Some(combine(crc, crcs[piece]?, len))
        })
    }

    fn push(&mut self, wanted: usize, want: ByteRange, start: u64, end: u64) {
        if let Ok(range) = ByteRange::from_bounds(start, end)
            && !range.is_empty()
        {
            self.pieces.push(ReadPiece {
                range,
                wanted,
                within: start - want.start(),
            });
        }
    }
}

/// Indices of the rows that share bytes with `want`.
fn overlapping(rows: &(impl RowTable + ?Sized), want: ByteRange) -> std::ops::Range<usize> {
    let count = rows.count();
    let first = first_not(rows, 0..count, |range| range.end() <= want.start());
    let end = if want.is_empty() {
        first
    } else {
        first_not(rows, first..count, |range| range.start() < want.end())
    };
    first..end
}

/// The first row that is not as `below` says, as all before it are.
fn first_not(
    rows: &(impl RowTable + ?Sized),
    within: std::ops::Range<usize>,
    below: impl Fn(ByteRange) -> bool,
) -> usize {
    let (mut low, mut high) = (within.start, within.end);
    while low < high {
        let middle = low + (high - low) / 2;
        if below(rows.row(middle).range) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

/// The parts of rows that no wanted range covers alone, but several do together: for each such row a
/// chain of parts that cover it without overlap. Sorted by row and wanted range.
fn links(rows: &(impl RowTable + ?Sized), wanted: &[ByteRange]) -> Vec<Part> {
    let mut parts = Vec::new();
    for (index, &want) in wanted.iter().enumerate() {
        let range = overlapping(rows, want);
        let Some(last) = range.clone().last() else {
            continue;
        };
        // Only the outermost rows can stick out of the wanted range.
        let ends = [range.start, last];
        for &at in &ends[..if range.start == last { 1 } else { 2 }] {
            let Row { range, crc32c } = rows.row(at);
            if crc32c.is_some()
                && !want.contains(range)
                && let Some(range) = want.intersection(range)
            {
                parts.push(Part {
                    row: at,
                    range,
                    wanted: index,
                });
            }
        }
    }
    if parts.len() < 2 {
        return Vec::new();
    }
    parts.sort_unstable();
    let mut links = Vec::new();
    for parts in parts.chunk_by(|a, b| a.row == b.row) {
        let row = rows.row(parts[0].row).range;
        if wanted.iter().any(|want| want.contains(row)) {
            continue;
        }
        let before = links.len();
        let mut at = row.start();
        for part in parts {
            if part.range.start() > at {
                break;
            }
            if let Ok(range) = ByteRange::from_bounds(at, part.range.end())
                && !range.is_empty()
            {
                links.push(Part { range, ..*part });
                at = range.end();
            }
        }
        if at != row.end() {
            links.truncate(before);
        }
    }
    links.sort_unstable_by_key(|link| (link.row, link.wanted));
    links
}

fn find_link(links: &[Part], row: usize, wanted: usize) -> Option<ByteRange> {
    links
        .binary_search_by_key(&(row, wanted), |link| (link.row, link.wanted))
        .ok()
        .map(|at| links[at].range)
}
