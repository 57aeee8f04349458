//! Where the payload of the frame at hand goes, and how far it has come.

use super::inbuf::InBuf;
use super::raw::Span;

/// The places of one frame's payload, in order. A place at address 0 is nowhere: its bytes are read
/// and thrown away, since what was refused still travels.
#[derive(Debug, Default)]
pub(super) struct PayloadCursor {
    places: Vec<Span>,
    index: usize,
    offset: usize,
    left: usize,
}

/// Where unwanted bytes go. Never read.
pub(super) type Discard = Box<[u8]>;

/// Makes the place for unwanted bytes.
pub(super) fn discard() -> Discard {
    vec![0; 64 << 10].into_boxed_slice()
}

impl PayloadCursor {
    pub(super) fn clear(&mut self) {
        self.places.clear();
        self.index = 0;
        self.offset = 0;
        self.left = 0;
    }

    /// Appends a place; one of no bytes keeps the numbering.
    pub(super) fn push(&mut self, place: Span) {
        self.left += place.len;
        self.places.push(place);
    }

    /// Bytes that are still to come.
    pub(super) fn left(&self) -> usize {
        self.left
    }

    /// Collects the places of what is still to come, as far as one call may fill them.
    pub(super) fn gather(&self, spans: &mut Vec<Span>, discard: &mut [u8]) {
        let mut skip = self.offset;
        for place in &self.places[self.index.min(self.places.len())..] {
            let rest = place.len - skip;
            if rest == 0 {
                skip = 0;
                continue;
            }
            if place.addr == 0 {
                let sink = Span::of_mut(discard).part(0, rest);
                spans.push(sink);
                if sink.len < rest {
                    return;
                }
            } else {
                spans.push(place.part(skip, usize::MAX));
            }
            skip = 0;
        }
    }

    /// Takes note of bytes that have come. Tells which of whose they are: the place's number and the
    /// bytes.
    pub(super) fn advance(&mut self, mut n: usize, mut arrived: impl FnMut(usize, Span)) {
        debug_assert!(n <= self.left);
        self.left -= n;
        while n > 0 {
            let Some(place) = self.places.get(self.index) else {
                break;
            };
            let step = n.min(place.len - self.offset);
            if step > 0 && place.addr != 0 {
                arrived(self.index, place.part(self.offset, step));
            }
            self.offset += step;
            n -= step;
            if self.offset == place.len {
                self.index += 1;
                self.offset = 0;
            }
        }
    }

    /// Moves bytes that came together with the header to their places.
    pub(super) fn take(&mut self, buffered: &mut InBuf, mut arrived: impl FnMut(usize, Span)) {
        while self.left > 0 && !buffered.available().is_empty() {
            let Some(place) = self.places.get(self.index) else {
                break;
            };
            let rest = if place.addr == 0 {
                let n = buffered.available().len().min(place.len - self.offset);
                buffered.consume(n);
                n
            } else {
                buffered.take_into(place.part(self.offset, usize::MAX))
            };
            if rest == 0 {
                self.index += 1;
                self.offset = 0;
            } else {
                self.advance(rest, &mut arrived);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn every_wanted_byte_arrives_once_in_order(
            lens in prop::collection::vec((0_usize..2000, any::<bool>()), 1..20),
            steps in prop::collection::vec(1_usize..3000, 1..200),
        ) {
            let mut cursor = PayloadCursor::default();
            let mut next = 0x1000;
            let mut expected = Vec::new();
            for (len, wanted) in &lens {
                let addr = if *wanted { next } else { 0 };
                cursor.push(Span { addr, len: *len });
                expected.push((addr, *len));
                next += len;
            }
            let mut sink = discard();
            let mut got: Vec<(usize, usize)> = expected.iter().map(|(addr, _)| (*addr, 0)).collect();
            let mut steps = steps.iter().cycle();
            while cursor.left() > 0 {
                let mut spans = Vec::new();
                cursor.gather(&mut spans, &mut sink);
                let offered: usize = spans.iter().map(|span| span.len).sum();
                prop_assert!(offered > 0 && offered <= cursor.left());
                let n = offered.min(*steps.next().expect("cycles"));
                cursor.advance(n, |index, span| {
                    assert_eq!(span.addr, got[index].0 + got[index].1);
                    got[index].1 += span.len;
                });
            }
            for ((addr, len), (_, arrived)) in expected.iter().zip(&got) {
                prop_assert_eq!(if *addr == 0 { 0 } else { *len }, *arrived);
            }
        }
    }
}
