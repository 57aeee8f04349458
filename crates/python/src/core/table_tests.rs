//! What callers may conclude from a code.

use std::sync::Arc;
use std::time::Duration;

use layercake_transport::PieceError;

use super::*;

/// Faults of the arguments.
fn bad_arguments() -> Vec<StoreError> {
    vec![
        Refusal::invalid("a bad argument").into(),
        Refusal::TooLarge {
            detail: "too much".to_owned(),
        }
        .into(),
        StoreError::InvalidConfig {
            setting: "replicas",
            detail: "0".to_owned(),
        },
        StoreError::OutOfBounds {
            offset: 10,
            len: 1,
            size: 10,
        },
        StoreError::EmptyRange { offset: 0 },
    ]
}

/// What happens to calls whose arguments are as they should be.
fn failures() -> Vec<StoreError> {
    let engine = layercake_transport::Error::EmptyRegion;
    let refused = [
        Refusal::NotFound,
        Refusal::NotReady,
        Refusal::InProgress,
        Refusal::Superseded,
        Refusal::Unreachable,
        Refusal::UnknownMember,
        Refusal::WrongTerm,
        Refusal::ShuttingDown,
        Refusal::NoSpace { largest_free: 0 },
        Refusal::QuotaExceeded,
        Refusal::UnknownTenant,
        Refusal::Unknown { code: 99 },
    ];
    let mut all: Vec<StoreError> = refused.into_iter().map(StoreError::from).collect();
    all.extend([
        StoreError::MasterUnreachable {
            master: "m:1".into(),
            reason: "refused".into(),
        },
        StoreError::MasterTimeout {
            master: "m:1".into(),
            after: Duration::from_secs(2),
        },
        StoreError::Closed,
        StoreError::Transfer {
            offset: 0,
            len: 1,
            source: PieceError::PeerGone,
        },
        StoreError::Incomplete { first_missing: 0 },
        StoreError::Unconfirmed,
        StoreError::SourceWithdrawn,
        StoreError::SessionEnded,
        StoreError::UnknownSession,
        StoreError::Published { offset: 0, len: 1 },
        StoreError::Engine(Arc::new(engine)),
        StoreError::Thread {
            name: "worker",
            source: Arc::new(std::io::ErrorKind::WouldBlock.into()),
        },
        StoreError::SegmentTooLarge {
            len: 2,
            available: 1,
            limited_by: "the host",
        },
        StoreError::Timeout {
            what: "a call",
            after: Duration::from_secs(1),
        },
    ]);
    all
}

#[test]
fn a_write_that_failed_says_that_its_memory_is_free_and_a_bad_argument_is_one() {
    for error in failures() {
        let code = of(&error, Call::WholeWrite);
        assert!(code.releases_buffers(true), "{code:?} for {error}");
    }
    for error in bad_arguments() {
        let code = of(&error, Call::WholeWrite);
        assert_eq!(code, ResultCode::INVALID_ARGUMENT, "{error}");
    }
}

#[test]
fn a_read_that_failed_says_that_its_memory_is_free() {
    for error in failures().iter().chain(&bad_arguments()) {
        let code = of(error, Call::WholeRead);
        assert!(code.releases_buffers(false), "{code:?} for {error}");
    }
}

#[test]
fn what_can_t_be_reached_is_not_promised_and_a_session_that_meets_it_failed() {
    let unreachable = Refusal::Unreachable.into();
    assert_eq!(of(&unreachable, Call::Question), ResultCode::NOT_FOUND);
    assert_eq!(of(&unreachable, Call::WholeRead), ResultCode::NOT_FOUND);
    assert_eq!(of(&unreachable, Call::Session), ResultCode::TRANSFER_FAILED);
    assert_eq!(of(&unreachable, Call::WholeWrite), ResultCode::WRITE_ENDED);
}

#[test]
fn sessions_know_what_went_wrong() {
    for (error, code) in [
        (Refusal::Superseded.into(), ResultCode::NOT_OWNER),
        (Refusal::UnknownTenant.into(), ResultCode::UNKNOWN_TENANT),
        (StoreError::Unconfirmed, ResultCode::TRANSFER_FAILED),
        (StoreError::SessionEnded, ResultCode::INVALID_ARGUMENT),
        (StoreError::UnknownSession, ResultCode::INVALID_ARGUMENT),
    ] {
        assert_eq!(of(&error, Call::Session), code, "{error}");
    }
}
