//! Range sessions: many ranges of an object between one start and one end (requirements R1 to R8).
//!
//! *To be read with* `docs/contracts/session.md` and `docs/contracts/lease.md`.
//!
//! A [`PutSession`] or [`GetSession`] is a handle on the state of one session; the methods of
//! [`StoreClient`](crate::StoreClient) work on batches of them. Range calls borrow a session; ending
//! or revoking consumes it. Dropping a put session revokes it and dropping a get session ends it, in
//! the background; neither waits.
//!
//! The rules are in pure state machines: [`put_state`] (what was written, what waits), [`lease`] (when
//! a lease is renewed and given back), [`cut`] (which bytes a call means). Here they are only wrapped
//! in locks. No lock is held across an await or while another is taken.

pub(crate) mod cut;
pub(crate) mod lease;
pub(crate) mod put_state;

mod get;
mod put;
mod put_handle;
mod source;

pub use get::GetSession;
pub(crate) use get::{GetShared, LeaseHold, Payload};
pub(crate) use put::{Intent, Made, PutShared};
pub use put_handle::PutSession;
pub use source::Source;
