//! The gRPC methods. All but the first two want a ticket.

use std::sync::Arc;

use layercake_protocol::convert::{ListedFrame, MAX_MESSAGE_BYTES};
use layercake_protocol::error::Refusal;
use layercake_protocol::key::{KeyError, ObjectKey, Tenant};
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Call;
use layercake_protocol::wire::master_server::{Master, MasterServer};
use tokio::time::Instant;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};

use super::Core;
use super::calls::Places;
use super::stream::Conversation;
use crate::metrics::Method;
use crate::state::List;

/// Objects on a page where the caller names no number.
const DEFAULT_PAGE: u32 = 1000;
/// The most objects on a page.
const LARGEST_PAGE: u32 = 10_000;

/// The service, as gRPC calls it.
#[derive(Clone, Debug)]
pub(crate) struct MasterService {
    core: Arc<Core>,
}

impl MasterService {
    /// The service with its limits set.
    pub(crate) fn serve(core: Arc<Core>) -> MasterServer<Self> {
        MasterServer::new(Self { core })
            .max_decoding_message_size(MAX_MESSAGE_BYTES)
            .max_encoding_message_size(MAX_MESSAGE_BYTES)
    }

    fn admit(&self, metadata: &MetadataMap) -> Result<(), Refusal> {
        if self.core.closing.is_cancelled() {
            return Err(Refusal::ShuttingDown);
        }
        self.core.door.admit(self.core.now(), metadata)
    }

    /// Counts a call and makes its answer.
    fn answered<T>(
        &self,
        method: Method,
        begun: Instant,
        result: Result<T, Refusal>,
    ) -> Result<Response<T>, Status> {
        self.core
            .metrics
            .answered(method, result.as_ref().err(), begun.elapsed());
        match result {
            Ok(answer) => Ok(Response::new(answer)),
            Err(refusal) => Err((&refusal).into()),
        }
    }

    async fn list(
        &self,
        request: wire::ListObjectsRequest,
    ) -> Result<wire::ListObjectsResponse, Refusal> {
        let tenant = tenant(&request.tenant)?;
        let limit = match request.limit {
            0 => DEFAULT_PAGE,
            limit => limit.min(LARGEST_PAGE),
        };
        let core = Arc::clone(&self.core);
        // A look at every key of the table: not on a thread that answers others.
        let scan = self.core.work.spawn_blocking(move || {
            core.state.list(
                core.now(),
                &List {
                    tenant: &tenant,
                    prefix: &request.prefix,
                    after: &request.after,
                    limit: limit as usize,
                },
            )
        });
        // It can only fail when the runtime goes down.
        let listing = scan.await.map_err(|_| Refusal::ShuttingDown)?;
        Ok(wire::ListObjectsResponse {
            objects: listing.objects.into_iter().map(Into::into).collect(),
            more: listing.more,
        })
    }

    fn stat(&self, request: &wire::StatObjectRequest) -> Result<wire::StatObjectResponse, Refusal> {
        let key = ObjectKey::new(&request.key).map_err(|error| refuse(&error))?;
        let tenant = tenant(&request.tenant)?;
        let stat = self.core.state.stat(self.core.now(), &tenant, &key);
        Ok(match stat {
            Ok(stat) => {
                let mut places = Places::new(&self.core.state);
                for replica in &stat.replicas {
                    places.add(replica);
                }
                let segments = places.into_segments();
                wire::StatObjectResponse {
                    refusal: wire::Refusal::None.into(),
                    object: Some(stat.into()),
                    segments: segments.iter().map(Into::into).collect(),
                }
            }
            Err(refusal) => wire::StatObjectResponse {
                refusal: wire::Error::from(&refusal).refusal,
                object: None,
                segments: Vec::new(),
            },
        })
    }
}

fn refuse(error: &KeyError) -> Refusal {
    Refusal::invalid(error.to_string())
}

fn tenant(name: &str) -> Result<Tenant, Refusal> {
    if name.is_empty() {
        return Ok(Tenant::default());
    }
    Tenant::new(name).map_err(|error| refuse(&error))
}

#[tonic::async_trait]
impl Master for MasterService {
    type OpenStream = Conversation<Streaming<wire::ClientFrame>>;

    async fn hello(
        &self,
        request: Request<wire::HelloRequest>,
    ) -> Result<Response<wire::HelloResponse>, Status> {
        let peer = request.remote_addr().into();
        let answer = self.core.hello(peer, request.get_ref());
        answer
            .map(Response::new)
            .map_err(|refusal| (&refusal).into())
    }

    async fn authenticate(
        &self,
        request: Request<wire::AuthenticateRequest>,
    ) -> Result<Response<wire::AuthenticateResponse>, Status> {
        let (remote, local) = (request.remote_addr(), request.local_addr());
        let answer = self.core.authenticate(remote.into(), request.get_ref());
        answer
            .map(|mut admitted| {
                if let (Some(remote), Some(local)) = (remote, local) {
                    admitted.local_lane = self.core.local_lane_for(remote, local);
                }
                Response::new(admitted)
            })
            .map_err(|refusal| (&refusal).into())
    }

    async fn open(
        &self,
        request: Request<Streaming<wire::ClientFrame>>,
    ) -> Result<Response<Self::OpenStream>, Status> {
        self.admit(request.metadata())
            .map_err(|refusal| Status::from(&refusal))?;
        let frames = request.into_inner();
        Ok(Response::new(Conversation::begin(
            Arc::clone(&self.core),
            frames,
        )))
    }

    async fn call(
        &self,
        request: Request<wire::ClientFrame>,
    ) -> Result<Response<wire::MasterFrame>, Status> {
        self.admit(request.metadata())
            .map_err(|refusal| Status::from(&refusal))?;
        let frame = ListedFrame::from(request.into_inner());
        let waits = matches!(
            frame.frame.request,
            Some(Call::WaitComplete(_) | Call::Unmount(_))
        );
        let answer = Arc::clone(&self.core).answer(frame, true);
        let answer = if waits {
            answer.await
        } else {
            // Whoever hangs up must not leave a batch half done.
            let task = self.core.work.spawn(answer);
            task.await
                .map_err(|_| Status::from(&Refusal::ShuttingDown))?
        };
        Ok(Response::new(answer))
    }

    async fn list_objects(
        &self,
        request: Request<wire::ListObjectsRequest>,
    ) -> Result<Response<wire::ListObjectsResponse>, Status> {
        let begun = Instant::now();
        let result = match self.admit(request.metadata()) {
            Ok(()) => self.list(request.into_inner()).await,
            Err(refusal) => Err(refusal),
        };
        self.answered(Method::ListObjects, begun, result)
    }

    async fn stat_object(
        &self,
        request: Request<wire::StatObjectRequest>,
    ) -> Result<Response<wire::StatObjectResponse>, Status> {
        let begun = Instant::now();
        let result = self
            .admit(request.metadata())
            .and_then(|()| self.stat(request.get_ref()));
        self.answered(Method::StatObject, begun, result)
    }

    async fn list_segments(
        &self,
        request: Request<wire::ListSegmentsRequest>,
    ) -> Result<Response<wire::ListSegmentsResponse>, Status> {
        let begun = Instant::now();
        let result = self.admit(request.metadata()).map(|()| {
            let segments = self.core.state.segments(self.core.now());
            wire::ListSegmentsResponse {
                segments: segments.into_iter().map(Into::into).collect(),
            }
        });
        self.answered(Method::ListSegments, begun, result)
    }

    async fn status(
        &self,
        request: Request<wire::StatusRequest>,
    ) -> Result<Response<wire::StatusResponse>, Status> {
        let begun = Instant::now();
        let result = self.admit(request.metadata()).map(|()| {
            self.core
                .state
                .status(self.core.now(), self.core.term)
                .into()
        });
        self.answered(Method::Status, begun, result)
    }
}
