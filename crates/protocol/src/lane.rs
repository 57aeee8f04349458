//! The framed lane: the master's stream without gRPC around it.
//!
//! A lane is a plain byte stream to the address where the master also answers gRPC. The side that
//! opened it says [`MAGIC`], which no HTTP/2 preface begins with, then a framed
//! [`HelloRequest`](crate::wire::HelloRequest) and, when that was answered, a framed
//! [`AuthenticateRequest`](crate::wire::AuthenticateRequest): the same messages and proofs as over gRPC, so
//! that a lane stands on its own. Each is answered by a framed [`LaneAnswer`](crate::wire::LaneAnswer); a
//! refusal ends the lane. From then on [`ClientFrame`](crate::wire::ClientFrame)s and
//! [`MasterFrame`](crate::wire::MasterFrame)s go as over the `Open` stream.
//!
//! A frame is its length (32 bits, little endian) and that many bytes of a message. An empty frame asks
//! for a sign of life: the master answers it with one, and the other side sends one when it has nothing
//! else to say for [`SAY_SOMETHING_WITHIN`].
//!
//! What arrives is suspect. A length beyond the limit is an error when the head is there, and memory is
//! taken for bytes that have come, at most as much again, never for what a peer announces.

use std::time::Duration;

use prost::{DecodeError, Message};
use thiserror::Error;

use crate::convert::MAX_MESSAGE_BYTES;

/// The first bytes of a lane.
pub const MAGIC: [u8; 8] = *b"LAYERCK1";

/// What the names of unix sockets begin with on which masters answer lanes.
pub const LOCAL_LANE: &str = "layercake-";

/// The longest message of the greeting, in bytes: strangers are allowed no more.
pub const MAX_GREETING_BYTES: usize = 4 << 10;

/// How long the side that opened a lane may be silent before the master takes it for dead.
pub const SILENCE: Duration = Duration::from_secs(15);

/// The side that opened the lane says something at least this often, if only an empty frame.
pub const SAY_SOMETHING_WITHIN: Duration = Duration::from_secs(5);

/// An empty frame.
pub const EMPTY: [u8; HEAD] = [0; HEAD];

const HEAD: usize = 4;

/// What a buffer holds at least, and how large it may stay when it is empty.
const LEAST: usize = 16 << 10;
const MOST_KEPT: usize = 256 << 10;

/// Why bytes make no frame.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum LaneError {
    /// A frame announces more bytes than are accepted.
    #[error("a frame of {len} bytes, at most {most} are accepted")]
    TooLong {
        /// What it announces.
        len: usize,
        /// What is accepted.
        most: usize,
    },
    /// The bytes of a frame are not the message that belongs there.
    #[error("a frame of {len} bytes is no message of the lane: {source}")]
    NoMessage {
        /// The frame's length.
        len: usize,
        /// What is wrong with it.
        source: DecodeError,
    },
    /// The stream ended inside of a frame.
    #[error("the stream ended {had} bytes into a frame")]
    CutOff {
        /// What came of it, its head included.
        had: usize,
    },
}

/// Appends a message as a frame. A message of more than [`MAX_MESSAGE_BYTES`] is refused, and nothing
/// is appended.
pub fn put_frame(into: &mut Vec<u8>, message: &impl Message) -> Result<(), LaneError> {
    put_frame_of(into, message, &[])
}

/// As [`put_frame`]; the message's last fields are there in their encoded form.
pub fn put_frame_of(
    into: &mut Vec<u8>,
    message: &impl Message,
    rest: &[u8],
) -> Result<(), LaneError> {
    let len = message.encoded_len() + rest.len();
    let too_long = LaneError::TooLong {
        len,
        most: MAX_MESSAGE_BYTES,
    };
    if len > MAX_MESSAGE_BYTES {
        return Err(too_long);
    }
    let head = u32::try_from(len).map_err(|_| too_long)?;
    into.reserve(HEAD + len);
    into.extend_from_slice(&head.to_le_bytes());
    // Without another look at how long it is.
    message.encode_raw(into);
    into.extend_from_slice(rest);
    Ok(())
}

/// A frame that has come.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Frame<M> {
    /// One with a message.
    Message(M),
    /// An empty one.
    Empty,
}

/// Bytes that have come, on their way to be frames.
#[derive(Debug)]
pub struct Inbox {
    /// All of it may be read into; bytes that were not taken yet are `start..end`.
    bytes: Vec<u8>,
    start: usize,
    end: usize,
    most: usize,
}

impl Inbox {
    /// An empty one, for frames of at most `most` bytes.
    pub fn new(most: usize) -> Self {
        Self {
            bytes: vec![0; LEAST],
            start: 0,
            end: 0,
            most,
        }
    }

    /// From now on frames of at most `most` bytes are accepted.
    pub fn accept_up_to(&mut self, most: usize) {
        self.most = most;
    }

    /// Room for more bytes, never empty. What is read into it counts with [`Self::filled`].
    pub fn room(&mut self) -> &mut [u8] {
        let held = self.end - self.start;
        if held == 0 {
            (self.start, self.end) = (0, 0);
            if self.bytes.len() > MOST_KEPT {
                self.bytes = vec![0; LEAST];
            }
        } else if self.end == self.bytes.len() {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, held);
            if held >= self.bytes.len() / 2 {
                self.bytes.resize(self.bytes.len() * 2, 0);
            }
        }
        &mut self.bytes[self.end..]
    }

    /// Counts bytes that were read into [`Self::room`].
    ///
    /// # Panics
    ///
    /// If there was not so much room.
    pub fn filled(&mut self, count: usize) {
        assert!(
            count <= self.bytes.len() - self.end,
            "{count} bytes do not fit"
        );
        self.end += count;
    }

    /// The next frame, if it is there as a whole.
    pub fn take<M: Message + Default>(&mut self) -> Result<Option<Frame<M>>, LaneError> {
        self.take_with(|bytes| M::decode(bytes))
    }

    /// As [`take`](Self::take); the message is what `decode` makes of its bytes.
    pub fn take_with<M>(
        &mut self,
        decode: impl FnOnce(&[u8]) -> Result<M, DecodeError>,
    ) -> Result<Option<Frame<M>>, LaneError> {
        let bytes = &self.bytes[self.start..self.end];
        let Some((head, rest)) = bytes.split_first_chunk::<HEAD>() else {
            return Ok(None);
        };
        let len = u32::from_le_bytes(*head) as usize;
        if len > self.most {
            let most = self.most;
            return Err(LaneError::TooLong { len, most });
        }
        let Some(message) = rest.get(..len) else {
            return Ok(None);
        };
        let frame = if len == 0 {
            Frame::Empty
        } else {
            Frame::Message(decode(message).map_err(|source| LaneError::NoMessage { len, source })?)
        };
        self.start += HEAD + len;
        Ok(Some(frame))
    }

    /// What the end of the stream means here: an error, if it cuts a frame.
    pub fn ended(&self) -> Result<(), LaneError> {
        match self.end - self.start {
            0 => Ok(()),
            had => Err(LaneError::CutOff { had }),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::HelloRequest;

    fn hello(program: String) -> HelloRequest {
        HelloRequest {
            program,
            ..HelloRequest::default()
        }
    }

    /// Takes bytes in as they come in portions; the frames.
    fn receive(bytes: &[u8], portions: &[usize], most: usize) -> Result<Vec<String>, LaneError> {
        let mut inbox = Inbox::new(most);
        let mut frames = Vec::new();
        let mut portions = portions.iter().copied().cycle();
        let mut rest = bytes;
        while !rest.is_empty() {
            let room = inbox.room();
            let count = portions.next().unwrap_or(1).min(room.len()).min(rest.len());
            room[..count].copy_from_slice(&rest[..count]);
            inbox.filled(count);
            rest = &rest[count..];
            while let Some(frame) = inbox.take::<HelloRequest>()? {
                frames.push(match frame {
                    Frame::Message(hello) => hello.program,
                    Frame::Empty => String::new(),
                });
            }
        }
        inbox.ended()?;
        Ok(frames)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn frames_come_out_as_they_went_in_however_the_bytes_are_cut(
            texts in proptest::collection::vec(
                prop_oneof![".{0,40}", "[a-c]{0,3000}", Just("x".repeat(100_000))], 0..12),
            portions in proptest::collection::vec(1_usize..70_000, 1..5),
            cut in 1_usize..4,
        ) {
            let mut bytes = Vec::new();
            for text in &texts {
                put_frame(&mut bytes, &hello(text.clone())).expect("short enough");
            }
            prop_assert_eq!(&receive(&bytes, &portions, MAX_MESSAGE_BYTES).expect("whole"), &texts);
            if !texts.is_empty() {
                let cut_off = receive(&bytes[..bytes.len() - cut], &portions, MAX_MESSAGE_BYTES);
                let is_cut_off = matches!(cut_off, Err(LaneError::CutOff { .. }));
                prop_assert!(is_cut_off);
            }
        }

        #[test]
        fn garbage_is_an_error_or_a_frame_and_takes_no_memory(
            bytes in proptest::collection::vec(any::<u8>(), 0..2000),
        ) {
            let mut inbox = Inbox::new(MAX_MESSAGE_BYTES);
            let room = inbox.room();
            room[..bytes.len()].copy_from_slice(&bytes);
            inbox.filled(bytes.len());
            while let Ok(Some(_)) = inbox.take::<HelloRequest>() {}
            prop_assert_eq!(inbox.room().len() + (inbox.end - inbox.start), inbox.bytes.len());
            prop_assert_eq!(inbox.bytes.len(), LEAST);
        }
    }

    #[test]
    fn a_frame_is_refused_by_its_head_alone() {
        let bytes = 4097_u32.to_le_bytes();
        let error = receive(&bytes, &[4], 4096).expect_err("too long");
        assert!(error.to_string().contains("4097") && error.to_string().contains("4096"));
        let mut inbox = Inbox::new(MAX_MESSAGE_BYTES);
        inbox.room()[..4].copy_from_slice(&(60_u32 << 20).to_le_bytes());
        inbox.filled(4);
        assert!(matches!(inbox.take::<HelloRequest>(), Ok(None)));
        assert!(inbox.room().len() <= LEAST, "nothing of it has come yet");
    }

    #[test]
    fn encoded_fields_go_behind_the_message() {
        let mut bytes = Vec::new();
        let whole = HelloRequest {
            nonce: vec![7; 32].into(),
            program: "p".to_owned(),
            version: None,
        };
        let nonce = HelloRequest {
            program: String::new(),
            ..whole.clone()
        };
        put_frame_of(&mut bytes, &nonce, &hello("p".to_owned()).encode_to_vec()).expect("short");
        bytes.extend_from_slice(&EMPTY);
        let mut inbox = Inbox::new(100);
        inbox.room()[..bytes.len()].copy_from_slice(&bytes);
        inbox.filled(bytes.len());
        assert_eq!(inbox.take().expect("good"), Some(Frame::Message(whole)));
        assert_eq!(
            inbox.take::<HelloRequest>().expect("good"),
            Some(Frame::Empty)
        );
    }

    #[test]
    fn a_buffer_that_grew_gives_its_memory_back() {
        let mut bytes = Vec::new();
        put_frame(&mut bytes, &hello("x".repeat(3 << 20))).expect("short enough");
        let mut inbox = Inbox::new(MAX_MESSAGE_BYTES);
        let mut rest = bytes.as_slice();
        while !rest.is_empty() {
            let room = inbox.room();
            let count = room.len().min(rest.len());
            room[..count].copy_from_slice(&rest[..count]);
            inbox.filled(count);
            rest = &rest[count..];
        }
        assert!(matches!(
            inbox.take::<HelloRequest>(),
            Ok(Some(Frame::Message(_)))
        ));
        assert_eq!(inbox.room().len(), LEAST);
    }
}
