//! A framed lane to the master, from the client's side: see [`layercake_protocol::lane`] for the bytes.
//!
//! `line` is the byte stream, which readers and writers share; `writer` how callers' frames get onto it;
//! `reader` how frames come off it. Callers do both themselves where they can. This module opens a lane: it proves the token both ways once more, since
//! another connection may lead to another peer, and a ticket is not shown to one that has proven nothing. To a master on the same
//! host, a lane may go over a unix socket.

mod line;
mod reader;
mod writer;

use std::io;
use std::sync::Arc;

use layercake_protocol::convert::MAX_MESSAGE_BYTES;
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::lane::{LOCAL_LANE, MAGIC, put_frame};
use layercake_protocol::wire;
use layercake_protocol::wire::lane_answer::Answer;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

use super::connector::{Connector, Opened};
use super::proofs::Proofs;
use super::shared::Shared;
use crate::error::StoreError;
use line::Line;
use reader::Reader;
pub(super) use reader::Takes;
pub(super) use writer::Offer;
use writer::Writer;

/// A lane after its greeting.
#[derive(Debug)]
pub(super) struct Lane {
    pub(super) writer: Writer,
    pub(super) reader: Reader,
    /// It goes over a unix socket of this host.
    pub(super) is_local: bool,
}

/// Opens a lane to the master's address.
pub(super) async fn open<C: Connector>(
    shared: &Shared,
    connector: &C,
) -> Result<Arc<Lane>, StoreError> {
    let opened = async {
        let io = connector.connect(&shared.master).await?;
        match C::opened(io)? {
            Opened::Socket(tcp) => Line::socket(tcp.into()),
            Opened::Stream(io) => Ok(Line::stream(io)),
        }
    };
    let line = opened
        .await
        .map_err(|error| shared.unreachable(error.to_string()))?;
    greet(shared, line, false).await
}

/// Opens a lane over a unix socket of this name in the abstract namespace, at once or not at all. A name that is no
/// master's is not called: whoever was asked as the master must not choose whom this side talks to.
pub(super) async fn open_local(shared: &Shared, name: &str) -> Result<Arc<Lane>, StoreError> {
    if !name.starts_with(LOCAL_LANE) {
        return Err(shared.unreachable(format!("{name:?} is no name of a master's socket")));
    }
    let opened = || {
        let address = SocketAddrUnix::new_abstract_name(name.as_bytes())?;
        // It does not block: where nobody listens, or too many wait already, it fails.
        let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
        connect(&socket, &address)?;
        Line::socket(socket)
    };
    let line = opened().map_err(|error: io::Error| shared.unreachable(error.to_string()))?;
    greet(shared, line, true).await
}

/// Greets the master on a lane.
async fn greet(shared: &Shared, line: Line, is_local: bool) -> Result<Arc<Lane>, StoreError> {
    let broken = |error: io::Error| shared.unreachable(error.to_string());
    let line = Arc::new(line);
    let reader = Reader::new(Arc::clone(&line));
    let proofs = Proofs::begin(shared);
    let mut said = MAGIC.to_vec();
    put_frame(&mut said, &proofs.hello()).map_err(|error| broken(io::Error::other(error)))?;
    line.write_all(&said).await.map_err(broken)?;
    let Answer::Hello(hello) = answer(shared, &reader).await? else {
        return Err(shared.bad_answer(WireError::Missing { field: "hello" }));
    };
    said.clear();
    put_frame(&mut said, &proofs.proof(hello)?).map_err(|error| broken(io::Error::other(error)))?;
    line.write_all(&said).await.map_err(broken)?;
    match answer(shared, &reader).await? {
        Answer::Admitted(admitted) => proofs.ticket(&admitted)?,
        _ => return Err(shared.bad_answer(WireError::Missing { field: "admitted" })),
    };
    reader.accept_up_to(MAX_MESSAGE_BYTES);
    let writer = Writer::new(line);
    Ok(Arc::new(Lane {
        writer,
        reader,
        is_local,
    }))
}

/// The master's next word in the greeting.
async fn answer(shared: &Shared, reader: &Reader) -> Result<Answer, StoreError> {
    let answer: wire::LaneAnswer = reader
        .message()
        .await
        .map_err(|error| shared.unreachable(error.to_string()))?
        .ok_or_else(|| shared.unreachable("it closed the lane".to_owned()))?;
    match answer.answer {
        Some(Answer::Refused(error)) => Err(match Refusal::try_from(error) {
            Ok(refusal) => shared.refused(refusal),
            Err(error) => shared.bad_answer(error),
        }),
        Some(answer) => Ok(answer),
        None => Err(shared.bad_answer(WireError::Missing { field: "answer" })),
    }
}
