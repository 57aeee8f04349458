//! Numbers in chunks: each chunk has twice as many as the one before, up to a size that all others have.

/// See the module's description. Both sizes are powers of two.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Chunks {
    first: usize,
    largest: usize,
}

impl Chunks {
    pub(crate) const fn new(first: usize, largest: usize) -> Self {
        assert!(first.is_power_of_two() && largest.is_power_of_two() && first < largest);
        Self { first, largest }
    }

    /// Chunk of a number, and the place in it.
    pub(crate) const fn locate(self, number: u32) -> (usize, usize) {
        // Shifted so, a chunk that grows begins at its size, and the others at multiples of theirs.
        let number = number as usize + self.first;
        if number < self.largest {
            let top = number.ilog2();
            return ((top - self.first.ilog2()) as usize, number ^ (1 << top));
        }
        let growing = (self.largest / self.first).ilog2() as usize;
        let alike = number / self.largest - 1;
        (growing + alike, number % self.largest)
    }

    /// How many numbers a chunk has.
    pub(crate) const fn size(self, chunk: usize) -> usize {
        let growing = (self.largest / self.first).ilog2() as usize;
        if chunk < growing {
            self.first << chunk
        } else {
            self.largest
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_lie_one_behind_the_other() {
        const CHUNKS: Chunks = Chunks::new(32, 256);
        let mut expected = (0, 0);
        let mut sizes = Vec::new();
        for number in 0..2000 {
            assert_eq!(CHUNKS.locate(number), expected);
            expected.1 += 1;
            if expected.1 == CHUNKS.size(expected.0) {
                sizes.push(expected.1);
                expected = (expected.0 + 1, 0);
            }
        }
        assert_eq!(sizes, [32, 64, 128, 256, 256, 256, 256, 256, 256]);
        assert_eq!(CHUNKS.locate(u32::MAX).1, 31);
    }
}
