//! The synchronous store client that both interfaces stand on.
//!
//! A [`StoreCore`] is one member of a cluster: an engine, a link to the master, a client and, if it lends
//! memory, a node. Nothing here knows Python: callers release the interpreter lock around every
//! method that may wait, which is all of them but those named plain below. Methods are safe to call from
//! any number of threads at once; calls overlap.
//!
//! There are two ways to ask, over the same client:
//!
//! - *Typed* ([`StoreCore::client`], [`StoreCore::block`]): the package's own interface awaits the
//!   client's methods and turns [`StoreError`](layercake_store::StoreError)s into exceptions.
//! - *Coded*: the Mooncake interface gets one `i64` per key, by `protocol`'s table ([`table`] says which
//!   error is which code). These methods never fail as a whole and never panic on what they are given.
//!
//! | coded | method | module |
//! |---|---|---|
//! | `is_exist`, `batch_is_exist` (1, 0, negative) | [`StoreCore::exists`] | `lookup` |
//! | `batch_is_readable` | [`StoreCore::readable`] | `lookup` |
//! | `get_size`, `get_replica_desc` | [`StoreCore::sizes`], [`StoreCore::describe`] | `lookup` |
//! | `remove`, `batch_remove`, `remove_by_regex`, `remove_all` | [`StoreCore::remove`], [`StoreCore::remove_matching`] | `lookup` |
//! | `put*`, `upsert*` from memory | [`StoreCore::put`] | `whole` |
//! | `get_into`, `batch_get_into*` | [`StoreCore::get_into_rows`] | `whole` |
//! | `get`, `get_batch`, `get_buffer`, `get_into_ranges` | [`StoreCore::open_gets`], then [`OpenGets::read`](whole::OpenGets::read) | `whole` |
//! | `batch_put_session_*`, `batch_put_from_multi_buffer_ranges` | [`StoreCore::start_puts`], [`write_ranges`](StoreCore::write_ranges), [`end_puts`](StoreCore::end_puts), [`revoke_puts`](StoreCore::revoke_puts) | `puts` |
//! | `batch_get_session_*`, `batch_get_into_multi_buffer_ranges` | [`StoreCore::start_gets`], [`read_ranges`](StoreCore::read_ranges), [`end_gets`](StoreCore::end_gets) | `gets` |
//! | `create_copy_task`, `create_move_task`, `query_task` | [`StoreCore::begin_task`], [`StoreCore::task`] (plain) | `tasks` |
//! | `register_buffer`, `unregister_buffer` | [`StoreCore::register`], [`StoreCore::unregister`] (plain) | `store` |
//!
//! Memory is named by address and length; what lies inside a registered buffer is used as that
//! ([`buffers`]), what does not is checked and used for the call. Argument lists of different lengths
//! are answered as the table of the Mooncake interface says: the error for every key, and nothing moves.
//!
//! Locks don't nest: addresses are resolved, and the pages of unregistered memory made present, before a table of
//! sessions is taken, and the buffers are locked for one look-up at a time. No lock is held while a call waits, but
//! for the turns of upserts (`turns`), which are taken first; that
//! of the put sessions is held, shared, while a batch is handed to the transport, which never blocks.

pub(crate) mod buffers;
pub(crate) mod code;
mod copies;
mod engine;
mod failures;
mod gets;
mod lookup;
mod puts;
pub(crate) mod reasons;
mod settings;
mod store;
mod table;
mod tasks;
mod turns;
pub(crate) mod whole;

pub(crate) use self::copies::ObjectCopy;
pub(crate) use self::engine::{EngineCore, RegisterRefused};
pub(crate) use self::settings::{EngineSettings, MemberName, StoreSettings, Trust};
pub(crate) use self::store::{Health, Keeper, SharedEngine, StoreCore};
pub(crate) use self::tasks::{Job, TaskId, TaskStatus};
