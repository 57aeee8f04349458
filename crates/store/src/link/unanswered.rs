//! Starts that may have reserved something for a caller who has no answer.
//!
//! If the answer comes after its caller went away, what it grants is revoked. If the connection broke before it
//! came, the caller repeats the start under its number. One that can't, since the master is gone or its own
//! time is over, leaves the number in the outbox: should the master be back in the same life, it gives back
//! what it reserved under it, and refuses a start of that number that comes later.

use bytes::Bytes;
use layercake_protocol::ids::{Generation, RequestId};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::ObjectRef;
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Body;

use super::codec::decode_body;
use super::connection::{Request, Response};
use super::outbox::{Chore, Outbox};
use super::types::Life;

/// A put or upsert start, as far as it takes to undo it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Start {
    id: RequestId,
    pub(super) tenant: Tenant,
    body: Bytes,
}

impl Start {
    /// `None`: the request reserves nothing.
    pub(super) fn of(id: RequestId, request: &Request) -> Option<Self> {
        request.reserves.then(|| Self {
            id,
            tenant: request.tenant.clone(),
            body: request.body.clone(),
        })
    }

    /// How to give back what the answer grants, the hold as well; `None`: it grants nothing.
    pub(super) fn revoke(self, life: Life, answer: &Response) -> Option<Chore> {
        let Response::PutStart(answer) = answer else {
            return None;
        };
        let ok = i32::from(wire::Refusal::None);
        let hold = answer.hold.iter().map(|hold| hold.generation);
        let hold = hold.map(|number| ObjectRef::of_hold(Generation(number)));
        let granted = self.keys().zip(&answer.results);
        let granted = granted
            .filter(|(_, put)| put.refusal == ok)
            .filter_map(|(key, put)| {
                Some(ObjectRef {
                    key: ObjectKey::new(&key).ok()?,
                    generation: Generation(put.generation),
                })
            });
        let objects: Vec<ObjectRef> = granted.chain(hold).collect();
        (!objects.is_empty()).then_some(Chore::Revoke {
            life,
            tenant: self.tenant,
            objects,
        })
    }

    /// The message that gives back what nobody knows.
    pub(super) fn take_back(&self) -> wire::TakeBackRequest {
        wire::TakeBackRequest {
            start: self.id.0,
            keys: self.keys().collect(),
        }
    }

    fn keys(&self) -> impl Iterator<Item = String> + use<> {
        let entries = match decode_body(self.body.clone()) {
            Some(Body::PutStart(start)) => start.entries,
            Some(Body::UpsertStart(upsert)) => upsert.start.unwrap_or_default().entries,
            _ => Vec::new(),
        };
        entries.into_iter().map(|entry| entry.key)
    }
}

/// A call on its way, over as many connections as it takes. Dropped while nobody knows what became of it, a start is
/// left to the outbox.
pub(super) struct Unanswered<'a> {
    outbox: &'a Outbox,
    id: RequestId,
    request: &'a Request,
    broke_in: Option<Life>,
}

impl<'a> Unanswered<'a> {
    pub(super) fn new(outbox: &'a Outbox, id: RequestId, request: &'a Request) -> Self {
        Self {
            outbox,
            id,
            request,
            broke_in: None,
        }
    }

    /// A connection of this life broke before the answer came.
    pub(super) fn broke(&mut self, life: Life) {
        self.broke_in = Some(life);
    }

    /// There is an answer.
    pub(super) fn settled(&mut self) {
        self.broke_in = None;
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        if let Some(life) = self.broke_in
            && let Some(start) = Start::of(self.id, self.request)
        {
            self.outbox.push(Chore::TakeBack { life, start });
        }
    }
}
