//! Commits of objects that were written into slots of holds.

use layercake_protocol::convert::PutSlotsAnswer;
use layercake_protocol::replica::SlotPut;
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Body;

use super::MasterLink;
use super::connection::{IfLost, Request, Response};
use super::keys::segment_ids;
use super::types::StartOptions;
use crate::error::StoreError;

impl MasterLink {
    /// Commits objects, no more than a few holds have slots for. Repeating it is harmless.
    pub(crate) async fn put_slots(
        &self,
        slots: &[SlotPut],
        options: StartOptions<'_>,
    ) -> Result<PutSlotsAnswer, StoreError> {
        let body = Body::PutSlots(wire::PutSlotsRequest {
            entries: slots.iter().map(Into::into).collect(),
            recency: Some(options.recency.into()),
            hold: options.hold,
            unreachable_segments: segment_ids(options.unreachable),
        });
        let request = Request {
            if_lost: IfLost::Repeat,
            ..self.once(body)
        };
        match self.call(&request).await?.0 {
            Response::PutSlots(answer) => PutSlotsAnswer::decode(answer, slots.len())
                .map_err(|error| self.shared().bad_answer(error)),
            _ => Err(self.shared().wrong_kind()),
        }
    }
}
