//! The owner's answer to the first frame in flight, as it comes in piece by piece.

use super::frame::{FLAG_TRAILER, FrameError, HEADER_LEN, Header, Kind, decode_status};
use super::inbuf::InBuf;
use super::payload::PayloadCursor;
use super::raw::{self, Span};
use super::work::Frame;
use crate::batch::Direction;
use crate::error::PieceError;

#[derive(Debug, Default)]
pub(super) struct Answer {
    stage: Stage,
    cursor: PayloadCursor,
}

#[derive(Clone, Copy, Debug, Default)]
enum Stage {
    #[default]
    Header,
    Payload {
        trailer: usize,
    },
    Trailer {
        len: usize,
    },
}

/// What a step came to.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// So many bytes must be buffered before there is another step; for payload none need be.
    Needs(usize),
    /// The first frame in flight is answered.
    Answered,
    /// The peer wants a sign of life.
    Ping(u64),
}

impl Answer {
    /// Takes what is buffered one step further. `first` is the first frame in flight with its number.
    pub(super) fn step(
        &mut self,
        inbuf: &mut InBuf,
        first: Option<(u64, &mut Frame)>,
    ) -> Result<Step, FrameError> {
        match self.stage {
            Stage::Header => self.header(inbuf, first),
            Stage::Payload { trailer } => {
                let (_, frame) = first.ok_or(FrameError::AnswerMismatch)?;
                self.payload(inbuf, frame, trailer)
            }
            Stage::Trailer { len } => {
                let (_, frame) = first.ok_or(FrameError::AnswerMismatch)?;
                self.trailer(inbuf, frame, len)
            }
        }
    }

    /// The places that the next payload bytes go to.
    pub(super) fn gather(&self, spans: &mut Vec<Span>) {
        // An owner sends the bytes of what it did not refuse, and they all have a place.
        self.cursor.gather(spans, &mut []);
    }

    /// Payload bytes have come to their places.
    pub(super) fn advance(&mut self, n: usize, frame: &mut Frame) {
        self.cursor
            .advance(n, |index, span| arrived(frame, index, span));
    }

    fn header(
        &mut self,
        inbuf: &mut InBuf,
        first: Option<(u64, &mut Frame)>,
    ) -> Result<Step, FrameError> {
        let available = inbuf.available();
        let Some(bytes) = available.first_chunk() else {
            return Ok(Step::Needs(HEADER_LEN));
        };
        let header = Header::decode(bytes)?;
        let len = HEADER_LEN + header.body_len();
        let Some(body) = available.get(HEADER_LEN..len) else {
            return Ok(Step::Needs(len));
        };
        if header.kind == Kind::Ping {
            inbuf.consume(len);
            return Ok(Step::Ping(header.seq));
        }
        let expected = first.as_ref().map(|(seq, _)| *seq);
        let Some((_, frame)) = first.filter(|(seq, _)| *seq == header.seq) else {
            return Err(FrameError::UnexpectedAnswer {
                seq: header.seq,
                expected,
            });
        };
        check_kind(&header, frame)?;
        for (op, status) in frame.ops.iter_mut().zip(body) {
            op.result = decode_status(*status)?.map_err(PieceError::Refused);
        }
        inbuf.consume(len);
        if header.kind != Kind::Data {
            return Ok(Step::Answered);
        }
        self.cursor.clear();
        for op in &frame.ops {
            let len = if op.result.is_ok() { op.local.len } else { 0 };
            self.cursor.push(op.local.part(0, len));
        }
        if self.cursor.left() as u64 != u64::from(header.payload) {
            return Err(FrameError::AnswerMismatch);
        }
        self.stage = Stage::Payload {
            trailer: header.trailer_len(),
        };
        self.payload(inbuf, frame, header.trailer_len())
    }

    fn payload(
        &mut self,
        inbuf: &mut InBuf,
        frame: &mut Frame,
        trailer: usize,
    ) -> Result<Step, FrameError> {
        self.cursor
            .take(inbuf, |index, span| arrived(frame, index, span));
        if self.cursor.left() > 0 {
            return Ok(Step::Needs(0));
        }
        if trailer > 0 {
            self.stage = Stage::Trailer { len: trailer };
            return self.trailer(inbuf, frame, trailer);
        }
        self.stage = Stage::Header;
        Ok(Step::Answered)
    }

    fn trailer(
        &mut self,
        inbuf: &mut InBuf,
        frame: &mut Frame,
        len: usize,
    ) -> Result<Step, FrameError> {
        let Some(statuses) = inbuf.available().get(..len) else {
            return Ok(Step::Needs(len));
        };
        for (op, status) in frame.ops.iter_mut().zip(statuses) {
            let after = decode_status(*status)?.map_err(PieceError::Refused);
            op.result = op.result.and(after);
        }
        inbuf.consume(len);
        self.stage = Stage::Header;
        Ok(Step::Answered)
    }
}

fn arrived(frame: &mut Frame, index: usize, span: Span) {
    if frame.job.wants_checksum()
        && let Some(op) = frame.ops.get_mut(index)
    {
        op.crc = raw::checksum(op.crc, span);
    }
}

/// Whether the answer is of the kind that the question asks for.
fn check_kind(header: &Header, frame: &Frame) -> Result<(), FrameError> {
    let fits = if frame.is_probe() {
        header.kind == Kind::Pong
    } else {
        match frame.job.direction() {
            Direction::Write => header.kind == Kind::Written,
            Direction::Read => {
                header.kind == Kind::Data
                    && (frame.has_generation || header.flags & FLAG_TRAILER == 0)
            }
        }
    };
    if fits && usize::from(header.count) == frame.ops.len() {
        Ok(())
    } else {
        Err(FrameError::AnswerMismatch)
    }
}
