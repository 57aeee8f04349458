//! A piece's slot: the low half is the checksum, or an error's code, the high half says what it is.

use crate::error::PieceError;
use crate::transfer::PieceDone;

pub(super) const PENDING: u64 = 0;
const DONE: u64 = 1 << 32;
const DONE_WITH_CRC: u64 = 2 << 32;
const FAILED: u64 = 3 << 32;

pub(super) fn encode(result: Result<PieceDone, PieceError>) -> u64 {
    match result {
        Ok(PieceDone { crc32c: None }) => DONE,
        Ok(PieceDone { crc32c: Some(crc) }) => DONE_WITH_CRC | u64::from(crc),
        Err(error) => FAILED | u64::from(error.code()),
    }
}

pub(super) fn decode(slot: u64) -> Option<Result<PieceDone, PieceError>> {
    let low = slot & u64::from(u32::MAX);
    match slot & !u64::from(u32::MAX) {
        DONE => Some(Ok(PieceDone { crc32c: None })),
        DONE_WITH_CRC => Some(Ok(PieceDone {
            crc32c: u32::try_from(low).ok(),
        })),
        FAILED => u8::try_from(low)
            .ok()
            .and_then(PieceError::from_code)
            .map(Err),
        _ => None,
    }
}
