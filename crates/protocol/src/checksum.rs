//! The CRC-32C of two byte ranges together, from the CRC of each.
//!
//! Parts of a piece are summed by different threads, or as they come. Appending `n` bytes to a message multiplies its
//! remainder by x to the power of `8n`; with a table of the powers whose exponents are powers of two,
//! that is one multiplication per bit set in `8n`: one for the usual part.

/// The polynomial of CRC-32C, bits reflected: the lowest bit is the highest power.
const POLYNOMIAL: u32 = 0x82F6_3B78;

/// The polynomial 1.
const ONE: u32 = 1 << 31;

/// x to the power of 2 to the power of the index.
static POWERS: [u32; 64] = {
    let mut powers = [ONE >> 1; 64];
    let mut i = 1;
    while i < powers.len() {
        powers[i] = multiply(powers[i - 1], powers[i - 1]);
        i += 1;
    }
    powers
};

/// The product modulo the polynomial.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let mut product = 0;
    let mut bit = ONE;
    while bit != 0 {
        if a & bit != 0 {
            product ^= b;
        }
        b = (b >> 1) ^ (POLYNOMIAL * (b & 1));
        bit >>= 1;
    }
    product
}

/// The checksum of a range of bytes and the `len` bytes that follow it, whose checksums these are.
pub fn combine(first: u32, second: u32, len: u64) -> u32 {
    let mut moved = first;
    for power in (0..61).filter(|power| len >> power & 1 == 1) {
        moved = multiply(moved, POWERS[power + 3]);
    }
    moved ^ second
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_combine_to_the_whole(bytes: Vec<u8>, cut: prop::sample::Index) {
            let (first, second) = bytes.split_at(cut.index(bytes.len() + 1));
            let combined = combine(
                crc32c::crc32c(first),
                crc32c::crc32c(second),
                second.len() as u64,
            );
            prop_assert_eq!(combined, crc32c::crc32c(&bytes));
        }

        #[test]
        fn large_lengths_agree_with_the_library(first: u32, second: u32, len in 0..1_u64 << 45) {
            let len = usize::try_from(len).expect("64 bits");
            let expected = crc32c::crc32c_combine(first, second, len);
            prop_assert_eq!(combine(first, second, len as u64), expected);
        }
    }
}
