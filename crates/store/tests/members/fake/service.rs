//! The master's side of the wire: calls, streams, and the faults that a test asked for.

use std::collections::VecDeque;
use std::pin::Pin;

use layercake_protocol::auth::{Nonce, Side, draw_nonce};
use layercake_protocol::convert::{Context, decode_ticket};
use layercake_protocol::error::Refusal;
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Body;
use layercake_protocol::wire::master_frame::Response as Answer;
use layercake_protocol::wire::master_server::Master;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_stream::{Stream, StreamExt as _};
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status, Streaming};

use super::{FakeMaster, Fault, Kind, Seen, State};

type Frames = mpsc::Sender<Result<wire::MasterFrame, Status>>;

impl FakeMaster {
    async fn serve_stream(self, mut requests: Streaming<wire::ClientFrame>, frames: Frames) {
        while let Some(Ok(frame)) = requests.next().await {
            let master = self.clone();
            let (Some(body), Some(context)) = (frame.request, frame.context) else {
                return;
            };
            let context = Context::try_from(context).expect("a context that makes sense");
            let (fault, answer, term) = master.handle(&context, body);
            let id = context.request.0;
            let frame = wire::MasterFrame {
                request_id: id,
                term,
                response: Some(answer),
            };
            match fault {
                None => {
                    if frames.send(Ok(frame)).await.is_err() {
                        return;
                    }
                }
                Some(Fault::Swallow | Fault::Ignore) => {}
                Some(Fault::Drop | Fault::ApplyThenDrop) => {
                    let _ = frames
                        .send(Err(Status::unavailable("as the test wants")))
                        .await;
                    return;
                }
                Some(Fault::Hold) => {
                    let frames = frames.clone();
                    tokio::spawn(async move {
                        master
                            .release
                            .acquire()
                            .await
                            .expect("never closed")
                            .forget();
                        let _ = frames.send(Ok(frame)).await;
                    });
                }
                Some(Fault::Refuse(_)) => {
                    let _ = frames.send(Ok(frame)).await;
                }
            }
        }
    }

    fn check_ticket(&self, metadata: &MetadataMap) -> Result<(), Status> {
        let ticket = self.state.lock().ticket;
        if decode_ticket(metadata) == Ok(Some([ticket; 16])) {
            Ok(())
        } else {
            Err(Status::from(&Refusal::Unauthenticated))
        }
    }

    fn handle(&self, context: &Context, body: Body) -> (Option<Fault>, Answer, u64) {
        let kind = Kind::of(&body);
        let mut state = self.state.lock();
        let fault = state.faults.get_mut(&kind).and_then(VecDeque::pop_front);
        state.seen.push(Seen {
            kind,
            context: context.clone(),
            body: body.clone(),
        });
        let answer = match &fault {
            Some(Fault::Drop | Fault::Ignore) => Answer::Done(wire::Done {}),
            Some(Fault::Refuse(refusal)) => Answer::Error(refusal.into()),
            _ => state.apply(context, body),
        };
        let term = state.nature.term;
        drop(state);
        self.changed.notify_waiters();
        (fault, answer, term)
    }
}

impl State {
    fn apply(&mut self, context: &Context, body: Body) -> Answer {
        let done = Answer::Done(wire::Done {});
        match body {
            Body::Join(_) => Answer::Join(wire::JoinResponse {
                shared_tenants: false,
                lease_ms: 10_000,
                term: self.nature.term,
                heartbeat_every_ms: u64::try_from(self.nature.heartbeat_every.as_millis())
                    .expect("small"),
                client_ttl_ms: 10_000,
                fresh: self.members.insert(context.client.0),
            }),
            Body::Leave(_) => {
                self.members.remove(&context.client.0);
                done
            }
            Body::Heartbeat(_) => Answer::Heartbeat(wire::HeartbeatResponse {
                known: self.members.contains(&context.client.0),
                missing_segments: self.missing.clone(),
            }),
            Body::FenceDone(_) | Body::Unmount(_) => done,
            Body::Mount(_) => Answer::Mount(wire::MountResponse::default()),
            body => self.objects.apply(context, body),
        }
    }
}

type BoxStream = Pin<Box<dyn Stream<Item = Result<wire::MasterFrame, Status>> + Send>>;

#[tonic::async_trait]
impl Master for FakeMaster {
    type OpenStream = BoxStream;

    async fn hello(
        &self,
        request: Request<wire::HelloRequest>,
    ) -> Result<Response<wire::HelloResponse>, Status> {
        let mut state = self.state.lock();
        state.hellos += 1;
        let theirs: Nonce = request
            .into_inner()
            .nonce
            .as_ref()
            .try_into()
            .expect("32 bytes");
        let ours = draw_nonce();
        let token = state.nature.token.as_ref();
        Ok(Response::new(wire::HelloResponse {
            version: Some(state.nature.version.into()),
            nonce: ours.to_vec().into(),
            proof: token.map_or_else(Default::default, |token| {
                token.prove(Side::Responder, &theirs, &ours).to_vec().into()
            }),
            token_required: token.is_some(),
            term: state.nature.term,
            lane: state.nature.claims_lanes,
        }))
    }

    async fn authenticate(
        &self,
        request: Request<wire::AuthenticateRequest>,
    ) -> Result<Response<wire::AuthenticateResponse>, Status> {
        let reached_at = request.local_addr().expect("over TCP").to_string();
        let mut state = self.state.lock();
        state.authentications += 1;
        let request = request.into_inner();
        let client: Nonce = request.client_nonce.as_ref().try_into().expect("32 bytes");
        let master: Nonce = request.master_nonce.as_ref().try_into().expect("32 bytes");
        let fits = state.nature.token.as_ref().is_none_or(|token| {
            token
                .check(Side::Initiator, &client, &master, &request.proof)
                .is_ok()
        });
        if !fits || state.nature.turns_away {
            return Err(Status::from(&Refusal::Unauthenticated));
        }
        Ok(Response::new(wire::AuthenticateResponse {
            ticket: vec![state.ticket; 16].into(),
            local_lane: state
                .nature
                .claims_socket
                .clone()
                .map(|name| wire::LocalLane { name, reached_at }),
        }))
    }

    async fn open(
        &self,
        request: Request<Streaming<wire::ClientFrame>>,
    ) -> Result<Response<BoxStream>, Status> {
        self.check_ticket(request.metadata())?;
        let (frames, receiver) = mpsc::channel(16);
        self.state.lock().streams.push(frames.clone());
        tokio::spawn(self.clone().serve_stream(request.into_inner(), frames));
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn call(
        &self,
        _: Request<wire::ClientFrame>,
    ) -> Result<Response<wire::MasterFrame>, Status> {
        Err(Status::unimplemented("not needed"))
    }

    async fn list_objects(
        &self,
        _: Request<wire::ListObjectsRequest>,
    ) -> Result<Response<wire::ListObjectsResponse>, Status> {
        Err(Status::unimplemented("not needed"))
    }

    async fn stat_object(
        &self,
        request: Request<wire::StatObjectRequest>,
    ) -> Result<Response<wire::StatObjectResponse>, Status> {
        self.check_ticket(request.metadata())?;
        Ok(Response::new(wire::StatObjectResponse {
            refusal: wire::Refusal::NotFound.into(),
            ..Default::default()
        }))
    }

    async fn list_segments(
        &self,
        _: Request<wire::ListSegmentsRequest>,
    ) -> Result<Response<wire::ListSegmentsResponse>, Status> {
        Err(Status::unimplemented("not needed"))
    }

    async fn status(
        &self,
        _: Request<wire::StatusRequest>,
    ) -> Result<Response<wire::StatusResponse>, Status> {
        Err(Status::unimplemented("not needed"))
    }
}
