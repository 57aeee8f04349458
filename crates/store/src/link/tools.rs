//! Calls for people and tools: unary, beside the stream.

use layercake_protocol::convert::{
    MAX_MESSAGE_BYTES, TICKET_METADATA, decode_status, encode_ticket,
};
use layercake_protocol::error::{Refusal, WireError};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::report::{SegmentStat, Status as MasterStatus};
use layercake_protocol::wire;
use layercake_protocol::wire::master_client::MasterClient;
use tokio::time::{Instant, timeout_at};
use tonic::transport::Channel;
use tonic::{Request, Response, Status};

use super::MasterLink;
use super::types::{ObjectDetail, ObjectPage};
use crate::error::StoreError;

impl MasterLink {
    /// Objects of this link's tenant whose keys begin with `prefix`, in key order: at most `limit` (0:
    /// the master's default), behind `after`.
    pub async fn list(
        &self,
        prefix: &str,
        limit: u32,
        after: Option<&ObjectKey>,
    ) -> Result<ObjectPage, StoreError> {
        let request = wire::ListObjectsRequest {
            tenant: self.tenant().as_str().to_owned(),
            prefix: prefix.to_owned(),
            limit,
            after: after.map_or_else(String::new, |key| key.as_str().to_owned()),
        };
        let answer = self
            .unary(request, async |mut client, request| {
                client.list_objects(request).await
            })
            .await?;
        let objects = answer.objects.into_iter().map(TryInto::try_into);
        Ok(ObjectPage {
            objects: self.checked(objects.collect())?,
            more: answer.more,
        })
    }

    /// One object of this link's tenant.
    pub async fn stat(&self, key: &ObjectKey) -> Result<ObjectDetail, StoreError> {
        let request = wire::StatObjectRequest {
            tenant: self.tenant().as_str().to_owned(),
            key: key.as_str().to_owned(),
        };
        let answer = self
            .unary(request, async |mut client, request| {
                client.stat_object(request).await
            })
            .await?;
        if answer.refusal != i32::from(wire::Refusal::None) {
            let error = wire::Error {
                refusal: answer.refusal,
                ..Default::default()
            };
            return Err(StoreError::Refused(self.checked(Refusal::try_from(error))?));
        }
        let missing = WireError::Missing { field: "object" };
        let object = self.checked(answer.object.ok_or(missing))?;
        let segments = answer.segments.into_iter().map(TryInto::try_into);
        Ok(ObjectDetail {
            object: self.checked(object.try_into())?,
            segments: self.checked(segments.collect())?,
        })
    }

    /// All segments.
    pub async fn segments(&self) -> Result<Vec<SegmentStat>, StoreError> {
        let answer = self
            .unary(wire::ListSegmentsRequest {}, async |mut client, request| {
                client.list_segments(request).await
            })
            .await?;
        let segments = answer.segments.into_iter().map(TryInto::try_into);
        self.checked(segments.collect())
    }

    /// The master's totals.
    pub async fn status(&self) -> Result<MasterStatus, StoreError> {
        let answer = self
            .unary(wire::StatusRequest {}, async |mut client, request| {
                client.status(request).await
            })
            .await?;
        self.checked(answer.try_into())
    }

    async fn unary<Q: Clone, A>(
        &self,
        request: Q,
        call: impl AsyncFn(MasterClient<Channel>, Request<Q>) -> Result<Response<A>, Status>,
    ) -> Result<A, StoreError> {
        let shared = self.shared();
        let within = shared.config.timeouts.call;
        let deadline = Instant::now() + within;
        let mut renewed = false;
        loop {
            let connection = shared.ready(deadline).await?;
            let client = MasterClient::new(connection.channel.clone())
                .max_decoding_message_size(MAX_MESSAGE_BYTES);
            let mut request = Request::new(request.clone());
            request
                .metadata_mut()
                .insert(TICKET_METADATA, encode_ticket(&connection.ticket));
            match timeout_at(deadline, call(client, request)).await {
                Ok(Ok(answer)) => return Ok(answer.into_inner()),
                // A ticket that was not shown for long is forgotten, and beside a lane nobody notices that
                // the connection for these calls has gone: greet anew for another.
                Ok(Err(status))
                    if !renewed
                        && (decode_status(&status) == Some(Refusal::Unauthenticated)
                            || connection.lane().is_some() && is_broken(&status)) =>
                {
                    renewed = true;
                    connection.stop.cancel();
                    if timeout_at(deadline, connection.ended()).await.is_err() {
                        return Err(shared.unreachable("the connection is ending".to_owned()));
                    }
                }
                Ok(Err(status)) => return Err(shared.status_error(&status)),
                Err(_) => {
                    return Err(StoreError::MasterTimeout {
                        master: shared.master.clone(),
                        after: within,
                    });
                }
            }
        }
    }

    fn checked<T>(&self, value: Result<T, WireError>) -> Result<T, StoreError> {
        value.map_err(|error| self.shared().bad_answer(error))
    }
}

/// Whether a status is that of a connection, not an answer.
fn is_broken(status: &Status) -> bool {
    std::error::Error::source(status).is_some() && decode_status(status).is_none()
}
