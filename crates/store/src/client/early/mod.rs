//! Reading what is written of objects that are not complete (decision 0020).
//!
//! A writer that opts in ([`PutStart::early_reads`](layercake_protocol::replica::PutStart::early_reads)) *publishes* each
//! range when its bytes have landed in every replica: a record with its place and checksum, in a table in front of
//! the payload. A reader asks the master once where the object lies, and then looks at the table until what it wants is
//! there. It holds no lease: what it reads is guarded by the generation tags of the memory, before and after each copy, by the
//! record's token and by the range's checksum. So bytes of memory that was given away are an error, never taken
//! for the object's.
//!
//! | module | what it does |
//! |---|---|
//! | `publish` | the writer's side: records of what has landed |
//! | `seen` | what a reader has seen of a table; pure |
//! | `ask` | the questions to the master: at the start, and when nothing comes |
//! | `look` | looks at the tables |
//! | `read` | range reads that wait |
//!
//! When the object is complete the session goes on as an ordinary one, with a lease. A lock on a session's stage is never
//! held across an await.

mod ask;
mod look;
mod publish;
mod read;
mod seen;

pub(super) use self::publish::publish;
pub use self::read::{EarlyRead, EarlyReading};

use std::fmt;
use std::sync::Arc;

use layercake_protocol::early::EarlyTable;
use layercake_protocol::ids::Generation;
use layercake_protocol::key::ObjectKey;
use parking_lot::Mutex;

use self::seen::Seen;
use super::get_start::GetOptions;
use super::places::Places;
use crate::error::StoreError;
use crate::session::GetSession;

/// How far the writer of an object has come. See [`StoreClient::progress`](crate::StoreClient::progress).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// It is being written, and what is written can be read.
    Publishing,
    /// It is complete.
    Complete,
    /// It is reserved by a writer that does not publish, or out of reach.
    Unreadable,
    /// There is none.
    Absent,
}

/// An object that is read, perhaps while it is still written. Made by
/// [`StoreClient::start_early_gets`](crate::StoreClient::start_early_gets). Clones are the same session.
#[derive(Clone)]
pub struct EarlySession {
    shared: Arc<Shared>,
}

struct Shared {
    key: ObjectKey,
    size: u64,
    generation: Generation,
    layout_id: u64,
    options: GetOptions,
    stage: Mutex<Stage>,
}

/// How far the object is, as far as the session knows.
enum Stage {
    Writing(Writing),
    Complete(GetSession),
    /// It is not there any more.
    Over(StoreError),
}

/// An object that is being written.
struct Writing {
    /// The nearest first.
    places: Places,
    /// There are more, out of this client's reach.
    left_out: bool,
    table: EarlyTable,
    seen: Seen,
}

impl EarlySession {
    fn new(shared: Shared) -> Self {
        Self {
            shared: Arc::new(shared),
        }
    }

    /// A session on an object that was complete when it began.
    fn complete(session: GetSession, options: GetOptions) -> Self {
        Self::new(Shared {
            key: session.key().clone(),
            size: session.size(),
            generation: session.generation(),
            layout_id: session.layout_id(),
            options,
            stage: Mutex::new(Stage::Complete(session)),
        })
    }

    /// The object's key.
    pub fn key(&self) -> &ObjectKey {
        &self.shared.key
    }

    /// The object's size in bytes.
    pub fn size(&self) -> u64 {
        self.shared.size
    }

    /// The object's version. It stays the same for the life of the session.
    pub fn generation(&self) -> Generation {
        self.shared.generation
    }

    /// The layout that the writer uses; 0: none.
    pub fn layout_id(&self) -> u64 {
        self.shared.layout_id
    }

    /// The ordinary session that this one has become; `None`: as far as it knows, the object is not complete.
    pub fn completed(&self) -> Option<GetSession> {
        match &*self.shared.stage.lock() {
            Stage::Complete(session) => Some(session.clone()),
            Stage::Writing(_) | Stage::Over(_) => None,
        }
    }

    /// Moves to a later stage. One that is over or complete stays so.
    fn advance(&self, to: Stage) {
        let mut stage = self.shared.stage.lock();
        if let Stage::Writing(_) = *stage {
            *stage = to;
        }
    }

    /// Whether its object is being written, with replicas that this client can't reach.
    fn leaves_out(&self) -> bool {
        matches!(&*self.shared.stage.lock(), Stage::Writing(writing) if writing.left_out)
    }

    fn is_writing(&self) -> bool {
        matches!(*self.shared.stage.lock(), Stage::Writing(_))
    }
}

impl fmt::Debug for EarlySession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EarlySession")
            .field("key", &self.shared.key)
            .field("generation", &self.shared.generation)
            .field("size", &self.shared.size)
            .finish_non_exhaustive()
    }
}

/// What a client without checksums is told: nothing else says which bytes have landed.
pub(super) fn without_checksums() -> StoreError {
    StoreError::InvalidConfig {
        setting: "checksums",
        detail: "off: objects are not read before they are complete without them".to_owned(),
    }
}
