//! Random bytes that can be compared in full and made again from their seed.

use crate::memory::Memory;

/// `len` random bytes of this seed.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    // A hash's output stream: fast even in a build without optimisation, as it is in every one of them.
    blake3::Hasher::new()
        .update(&seed.to_le_bytes())
        .finalize_xof()
        .fill(&mut bytes);
    bytes
}

/// Fills memory with random bytes of this seed, and returns them.
///
/// # Panics
/// If the memory is larger than the address space, which it can't be.
pub fn fill(memory: &Memory, seed: u64) -> Vec<u8> {
    let bytes = bytes(
        seed,
        usize::try_from(memory.len()).expect("mapped memory fits"),
    );
    memory.copy_in(0, &bytes).expect("the whole of it");
    bytes
}

/// All bytes of a piece of memory.
///
/// # Panics
/// If the memory is larger than the address space, which it can't be.
pub fn read(memory: &Memory) -> Vec<u8> {
    let mut bytes = vec![0; usize::try_from(memory.len()).expect("mapped memory fits")];
    memory.copy_out(0, &mut bytes).expect("the whole of it");
    bytes
}

/// Panics with the first place at which the two differ; a dump of megabytes tells nothing.
///
/// # Panics
/// If they differ.
#[track_caller]
pub fn assert_same(actual: &[u8], expected: &[u8], what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: lengths");
    if actual != expected {
        let differing = actual.iter().zip(expected).filter(|(a, b)| a != b).count();
        let first = actual.iter().zip(expected).position(|(a, b)| a != b);
        panic!(
            "{what}: {differing} bytes differ, the first at {first:?} of {}",
            actual.len()
        );
    }
}
