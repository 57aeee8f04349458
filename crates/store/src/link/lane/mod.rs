//! A framed lane to the master, from the client's side: see [`layercake_protocol::lane`] for the bytes.
//!
//! `line` is the byte stream, which readers and writers share; `writer` how callers' frames get onto it;
//! `reader` how frames come off it. Callers do both themselves where they can. This module opens a lane: it proves the token both ways once more, since
//! another connection may lead to another peer, and a ticket is not shown to one that has proven nothing.

mod line;
mod reader;
mod writer;

use std::io;
use std::sync::Arc;

use layercake_protocol::convert::MAX_MESSAGE_BYTES;
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::lane::{MAGIC, put_frame};
use layercake_protocol::wire;
use layercake_protocol::wire::lane_answer::Answer;

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
}

/// Opens a lane and greets the master on it.
pub(super) async fn open<C: Connector>(
    shared: &Shared,
    connector: &C,
) -> Result<Arc<Lane>, StoreError> {
    let broken = |error: io::Error| shared.unreachable(error.to_string());
    let io = connector.connect(&shared.master).await.map_err(broken)?;
    let line = match C::opened(io).map_err(broken)? {
        Opened::Socket(tcp) => Line::socket(tcp).map_err(broken)?,
        Opened::Stream(io) => Line::stream(io),
    };
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
    Ok(Arc::new(Lane { writer, reader }))
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
