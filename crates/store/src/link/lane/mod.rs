//! A framed lane to the master, from the client's side: see [`layercake_protocol::lane`] for the bytes.
//!
//! `line` is the byte stream, which readers and writers share; `writer` how callers' frames get onto it;
//! `reader` how frames come off it. This module opens a lane: it proves the token both ways once more, since
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

use super::connector::Connector;
use super::proofs::Proofs;
use super::shared::Shared;
use crate::error::StoreError;
use line::Line;
pub(super) use reader::Reader;
pub(super) use writer::{Offer, Writer};

/// Opens a lane and greets the master on it.
pub(super) async fn open<C: Connector>(
    shared: &Shared,
    connector: &C,
) -> Result<(Arc<Writer>, Reader), StoreError> {
    let broken = |error: io::Error| shared.unreachable(error.to_string());
    let io = connector.connect(&shared.master).await.map_err(broken)?;
    let line = Arc::new(Line::new(io));
    let mut reader = Reader::new(Arc::clone(&line));
    let proofs = Proofs::begin(shared);
    let mut said = MAGIC.to_vec();
    put_frame(&mut said, &proofs.hello()).map_err(|error| broken(io::Error::other(error)))?;
    line.write_all(&said).await.map_err(broken)?;
    let Answer::Hello(hello) = answer(shared, &mut reader).await? else {
        return Err(shared.bad_answer(WireError::Missing { field: "hello" }));
    };
    said.clear();
    put_frame(&mut said, &proofs.proof(hello)?).map_err(|error| broken(io::Error::other(error)))?;
    line.write_all(&said).await.map_err(broken)?;
    match answer(shared, &mut reader).await? {
        Answer::Admitted(admitted) => proofs.ticket(&admitted)?,
        _ => return Err(shared.bad_answer(WireError::Missing { field: "admitted" })),
    };
    reader.accept_up_to(MAX_MESSAGE_BYTES);
    Ok((Arc::new(Writer::new(line)), reader))
}

/// The master's next word in the greeting.
async fn answer(shared: &Shared, reader: &mut Reader) -> Result<Answer, StoreError> {
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
