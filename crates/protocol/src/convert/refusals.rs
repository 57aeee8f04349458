//! Refusals, alone and one per key.
//!
//! A list of results holds one code per key, which is all that most refusals have to say; the few that
//! carry values have a detail beside the list, found by the key's index. A code of a later version is
//! a refusal of its key alone, so that the answers beside it still count.

use super::{aligned, invalid};
use crate::error::{Refusal, WireError};
use crate::wire;

/// The refusal's code on the wire.
fn code(refusal: &Refusal) -> i32 {
    let known = match refusal {
        Refusal::InvalidArgument { .. } => wire::Refusal::InvalidArgument,
        Refusal::NotFound => wire::Refusal::NotFound,
        Refusal::NotReady => wire::Refusal::NotReady,
        Refusal::AlreadyExists => wire::Refusal::AlreadyExists,
        Refusal::InProgress => wire::Refusal::InProgress,
        Refusal::Leased => wire::Refusal::Leased,
        Refusal::LeaseExpired => wire::Refusal::LeaseExpired,
        Refusal::NoSpace { .. } => wire::Refusal::NoSpace,
        Refusal::Superseded => wire::Refusal::Superseded,
        Refusal::Unreachable => wire::Refusal::Unreachable,
        Refusal::UnknownMember => wire::Refusal::UnknownMember,
        Refusal::WrongTerm => wire::Refusal::WrongTerm,
        Refusal::Unauthenticated => wire::Refusal::Unauthenticated,
        Refusal::Version { .. } => wire::Refusal::Version,
        Refusal::ShuttingDown => wire::Refusal::ShuttingDown,
        Refusal::TooLarge { .. } => wire::Refusal::TooLarge,
        Refusal::QuotaExceeded => wire::Refusal::QuotaExceeded,
        Refusal::UnknownTenant => wire::Refusal::UnknownTenant,
        Refusal::Unknown { code } => return *code,
    };
    known.into()
}

/// The refusal of a code, with the values of `detail`; `None` for "not refused".
fn decode(
    field: &'static str,
    code: i32,
    detail: Option<wire::Error>,
) -> Result<Option<Refusal>, WireError> {
    let Ok(known) = wire::Refusal::try_from(code) else {
        return Ok(Some(Refusal::Unknown { code }));
    };
    let wire::Error {
        detail,
        largest_free,
        ..
    } = detail.unwrap_or_default();
    Ok(Some(match known {
        wire::Refusal::Unspecified => return Err(WireError::Missing { field }),
        wire::Refusal::None => return Ok(None),
        wire::Refusal::InvalidArgument => Refusal::InvalidArgument { detail },
        wire::Refusal::NotFound => Refusal::NotFound,
        wire::Refusal::NotReady => Refusal::NotReady,
        wire::Refusal::AlreadyExists => Refusal::AlreadyExists,
        wire::Refusal::InProgress => Refusal::InProgress,
        wire::Refusal::Leased => Refusal::Leased,
        wire::Refusal::LeaseExpired => Refusal::LeaseExpired,
        wire::Refusal::NoSpace => Refusal::NoSpace { largest_free },
        wire::Refusal::Superseded => Refusal::Superseded,
        wire::Refusal::Unreachable => Refusal::Unreachable,
        wire::Refusal::UnknownMember => Refusal::UnknownMember,
        wire::Refusal::WrongTerm => Refusal::WrongTerm,
        wire::Refusal::Unauthenticated => Refusal::Unauthenticated,
        wire::Refusal::Version => Refusal::Version { detail },
        wire::Refusal::ShuttingDown => Refusal::ShuttingDown,
        wire::Refusal::TooLarge => Refusal::TooLarge { detail },
        wire::Refusal::QuotaExceeded => Refusal::QuotaExceeded,
        wire::Refusal::UnknownTenant => Refusal::UnknownTenant,
    }))
}

/// Whether the refusal says more than its code.
fn has_detail(refusal: &Refusal) -> bool {
    matches!(
        refusal,
        Refusal::InvalidArgument { .. }
            | Refusal::NoSpace { .. }
            | Refusal::Version { .. }
            | Refusal::TooLarge { .. }
    )
}

impl From<&Refusal> for wire::Error {
    fn from(refusal: &Refusal) -> Self {
        let (detail, largest_free) = match refusal {
            Refusal::InvalidArgument { detail }
            | Refusal::Version { detail }
            | Refusal::TooLarge { detail } => (detail.clone(), 0),
            Refusal::NoSpace { largest_free } => (String::new(), *largest_free),
            _ => (String::new(), 0),
        };
        Self {
            refusal: code(refusal),
            detail,
            largest_free,
        }
    }
}

impl TryFrom<wire::Error> for Refusal {
    type Error = WireError;

    fn try_from(error: wire::Error) -> Result<Self, WireError> {
        decode("error.refusal", error.refusal, Some(error))?
            .ok_or_else(|| invalid("error.refusal", "an error that refuses nothing"))
    }
}

/// The code of a key's result.
pub(super) fn encode_result<T>(result: &Result<T, Refusal>) -> i32 {
    match result {
        Ok(_) => wire::Refusal::None.into(),
        Err(refusal) => code(refusal),
    }
}

/// The details of those results that have any.
pub(super) fn encode_details<T>(results: &[Result<T, Refusal>]) -> Vec<wire::KeyDetail> {
    results
        .iter()
        .zip(0_u32..)
        .filter_map(|(result, index)| match result {
            Err(refusal) if has_detail(refusal) => Some(wire::KeyDetail {
                index,
                error: Some(refusal.into()),
            }),
            _ => None,
        })
        .collect()
}

/// Walks a list of codes and its details side by side. Details come in the order of their keys.
pub(super) struct Details {
    rest: std::iter::Peekable<std::vec::IntoIter<wire::KeyDetail>>,
    next: u32,
}

impl Details {
    pub(super) fn new(details: Vec<wire::KeyDetail>) -> Self {
        Self {
            rest: details.into_iter().peekable(),
            next: 0,
        }
    }

    /// The result of the next key, whose code is `code`; `None` for "not refused".
    pub(super) fn next(
        &mut self,
        field: &'static str,
        code: i32,
    ) -> Result<Option<Refusal>, WireError> {
        let index = self.next;
        self.next = self.next.saturating_add(1);
        let detail = self
            .rest
            .next_if(|detail| detail.index == index)
            .and_then(|detail| detail.error);
        if let Some(error) = &detail
            && error.refusal != code
        {
            return Err(invalid(
                "details",
                format!(
                    "key {index} is refused with {code} and with {}",
                    error.refusal
                ),
            ));
        }
        decode(field, code, detail)
    }

    /// Refuses details that belong to no key.
    pub(super) fn finish(mut self) -> Result<(), WireError> {
        match self.rest.next() {
            None => Ok(()),
            Some(detail) => Err(invalid(
                "details",
                format!("index {} is out of order or beyond the keys", detail.index),
            )),
        }
    }
}

/// One result per key, in order.
pub fn encode_key_results(results: &[Result<(), Refusal>]) -> wire::KeyResults {
    wire::KeyResults {
        refusals: results.iter().map(encode_result).collect(),
        details: encode_details(results),
    }
}

/// The results of `keys` keys, in order.
pub fn decode_key_results(
    results: wire::KeyResults,
    keys: usize,
) -> Result<Vec<Result<(), Refusal>>, WireError> {
    aligned("refusals", results.refusals.len(), keys)?;
    let mut details = Details::new(results.details);
    let mut decoded = Vec::with_capacity(keys);
    for code in results.refusals {
        decoded.push(details.next("refusals", code)?.map_or(Ok(()), Err));
    }
    details.finish()?;
    Ok(decoded)
}

/// One code per key, in order, for answers whose refusals never carry values.
pub fn encode_refusals(results: &[Result<(), Refusal>]) -> Vec<i32> {
    results.iter().map(encode_result).collect()
}

/// The inverse of [`encode_refusals`] for `keys` keys.
pub fn decode_refusals(
    codes: Vec<i32>,
    keys: usize,
) -> Result<Vec<Result<(), Refusal>>, WireError> {
    decode_key_results(
        wire::KeyResults {
            refusals: codes,
            details: Vec::new(),
        },
        keys,
    )
}
