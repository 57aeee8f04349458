//! How requests get onto the stream.
//!
//! A request's body is encoded once, by the task that makes the call, not by the one that drives the
//! connection; a repetition after a reconnect sends the same bytes with another context. Protocol
//! buffers allow it: a message is the concatenation of its fields.

use bytes::{BufMut as _, Bytes};
use layercake_protocol::wire;
use prost::Message as _;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};

/// A frame on its way to the master over gRPC.
#[derive(Debug)]
pub(super) struct Outgoing {
    /// Who asks, and which call it is: a frame without a request.
    pub(super) context: wire::ClientFrame,
    /// What [`encode_body`] made.
    pub(super) body: Bytes,
}

/// The request's part of a frame.
pub(super) fn encode_body(request: wire::client_frame::Request) -> Bytes {
    wire::ClientFrame {
        context: None,
        request: Some(request),
    }
    .encode_to_vec()
    .into()
}

/// The inverse of [`encode_body`].
pub(super) fn decode_body(body: Bytes) -> Option<wire::client_frame::Request> {
    wire::ClientFrame::decode(body).ok()?.request
}

/// The codec of the stream, seen from the client.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct LinkCodec;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FrameEncoder;

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct FrameDecoder;

impl Codec for LinkCodec {
    type Encode = Outgoing;
    type Decode = wire::MasterFrame;
    type Encoder = FrameEncoder;
    type Decoder = FrameDecoder;

    fn encoder(&mut self) -> FrameEncoder {
        FrameEncoder
    }

    fn decoder(&mut self) -> FrameDecoder {
        FrameDecoder
    }
}

impl Encoder for FrameEncoder {
    type Item = Outgoing;
    type Error = Status;

    fn encode(&mut self, item: Outgoing, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.reserve(item.context.encoded_len() + item.body.len());
        item.context
            .encode(buffer)
            .map_err(|error| Status::internal(error.to_string()))?;
        buffer.put(item.body);
        Ok(())
    }
}

impl Decoder for FrameDecoder {
    type Item = wire::MasterFrame;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<wire::MasterFrame>, Status> {
        wire::MasterFrame::decode(buffer)
            .map(Some)
            .map_err(|error| Status::internal(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn context_and_body_concatenate_to_the_frame() {
        let request = wire::client_frame::Request::RemoveMatching(wire::RemoveMatchingRequest {
            pattern: "^a".to_owned(),
            force: true,
        });
        let context = wire::Context {
            term: 3,
            client_id: Some(7_u128.into()),
            request_id: 9,
            tenant: "t".to_owned(),
        };
        let body = encode_body(request.clone());
        let mut bytes = wire::ClientFrame {
            context: Some(context.clone()),
            request: None,
        }
        .encode_to_vec();
        bytes.extend_from_slice(&body);
        let frame = wire::ClientFrame::decode(bytes.as_slice()).expect("a frame");
        assert_eq!(frame.context, Some(context));
        assert_eq!(frame.request.as_ref(), Some(&request));
        assert_eq!(decode_body(body), Some(request));
    }
}
