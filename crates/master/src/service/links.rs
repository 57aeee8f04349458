//! The way from the master to its members: which stream a member listens on, and the commands that it
//! has not answered.
//!
//! A command stays here until it is answered, and is sent again on every new stream of its member and
//! when it was unanswered for a while, so a lost one is late, not gone. Commands beyond the bound are
//! left to the state machine, which repeats what is unanswered when a member joins again.
//!
//! A stream that ends does not end its member; only its absence for a member's time to live lets the
//! pending commands go, since by then the member itself is gone. One mutex, held for pushes into
//! bounded channels, never across an await.

use std::collections::{BTreeMap, HashMap};
use std::time::Duration;

use layercake_protocol::command::FenceId;
use layercake_protocol::ids::{ClientId, Term};
use layercake_protocol::wire::MasterFrame;
use layercake_protocol::wire::master_frame::Response;
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::state::Moment;

/// How long a command may be unanswered before it is sent again.
const REPEAT_AFTER: Duration = Duration::from_secs(5);

/// Tells the streams of one member apart: the latest is the one it listens on.
pub(crate) type StreamId = u64;

/// Frames on their way to one stream.
pub(crate) type Outbox = mpsc::Sender<MasterFrame>;

#[derive(Debug)]
pub(crate) struct Links {
    term: Term,
    /// Unanswered commands that are kept for one member.
    capacity: usize,
    members: Mutex<HashMap<ClientId, Link>>,
}

#[derive(Debug)]
struct Link {
    stream: Option<(StreamId, Outbox)>,
    pending: BTreeMap<FenceId, Pending>,
    /// When a stream was last there.
    seen: Moment,
}

#[derive(Debug)]
struct Pending {
    command: Response,
    sent: Option<Moment>,
}

impl Link {
    fn new(now: Moment) -> Self {
        Self {
            stream: None,
            pending: BTreeMap::new(),
            seen: now,
        }
    }

    /// Sends what was never sent on this stream, or long ago. A full stream gets the rest later.
    fn flush(&mut self, now: Moment, term: Term) {
        let Some((_, outbox)) = &self.stream else {
            return;
        };
        for pending in self.pending.values_mut() {
            if pending.sent.is_some_and(|at| now.since(at) < REPEAT_AFTER) {
                continue;
            }
            let frame = MasterFrame {
                request_id: 0,
                term: term.0,
                response: Some(pending.command.clone()),
            };
            if outbox.try_send(frame).is_err() {
                return;
            }
            pending.sent = Some(now);
        }
    }
}

impl Links {
    pub(crate) fn new(term: Term, capacity: usize) -> Self {
        Self {
            term,
            capacity,
            members: Mutex::default(),
        }
    }

    /// From now on the member listens on this stream; what is unanswered is sent there.
    pub(crate) fn attach(&self, now: Moment, member: ClientId, stream: StreamId, outbox: Outbox) {
        let mut members = self.members.lock();
        let link = members.entry(member).or_insert_with(|| Link::new(now));
        link.stream = Some((stream, outbox));
        for pending in link.pending.values_mut() {
            pending.sent = None;
        }
        link.flush(now, self.term);
    }

    /// The stream is gone; nothing happens if the member has a later one.
    /// `true`: the member has none now.
    pub(crate) fn detach(&self, now: Moment, member: ClientId, stream: StreamId) -> bool {
        let mut members = self.members.lock();
        let Some(link) = members.get_mut(&member) else {
            return true;
        };
        let was_last = link.stream.as_ref().is_some_and(|(id, _)| *id == stream);
        if was_last {
            link.stream = None;
            link.seen = now;
            if link.pending.is_empty() {
                members.remove(&member);
            }
        }
        was_last
    }

    /// Whether the member listens on a stream at the moment.
    pub(crate) fn is_attached(&self, member: ClientId) -> bool {
        let members = self.members.lock();
        members
            .get(&member)
            .is_some_and(|link| link.stream.is_some())
    }

    /// Sends a command, now or when the member is there. One that is known already stays as it is.
    pub(crate) fn command(&self, now: Moment, member: ClientId, id: FenceId, command: Response) {
        let mut members = self.members.lock();
        let link = members.entry(member).or_insert_with(|| Link::new(now));
        if link.pending.len() >= self.capacity {
            return;
        }
        link.pending.entry(id).or_insert(Pending {
            command,
            sent: None,
        });
        link.flush(now, self.term);
    }

    /// The member answered.
    pub(crate) fn answered(&self, member: ClientId, id: FenceId) {
        let mut members = self.members.lock();
        if let Some(link) = members.get_mut(&member) {
            link.pending.remove(&id);
            if link.pending.is_empty() && link.stream.is_none() {
                members.remove(&member);
            }
        }
    }

    /// The member left: its commands are moot. Its stream may live on, and the member may join again.
    pub(crate) fn forget(&self, member: ClientId) {
        let mut members = self.members.lock();
        if let Some(link) = members.get_mut(&member) {
            link.pending.clear();
            if link.stream.is_none() {
                members.remove(&member);
            }
        }
    }

    /// Repeats what is long unanswered, and forgets members without a stream for `ttl`.
    pub(crate) fn tick(&self, now: Moment, ttl: Duration) {
        self.members.lock().retain(|_, link| {
            link.flush(now, self.term);
            link.stream.is_some() || now.since(link.seen) < ttl
        });
    }

    /// Commands that wait for their answers.
    pub(crate) fn unanswered(&self) -> usize {
        let members = self.members.lock();
        members.values().map(|link| link.pending.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use layercake_protocol::wire;

    use super::*;

    const MEMBER: ClientId = ClientId(1);
    const TTL: Duration = Duration::from_secs(10);

    fn at(seconds: u64) -> Moment {
        Moment::START + Duration::from_secs(seconds)
    }

    fn fence(fence_id: u64) -> Response {
        Response::Fence(wire::FenceCommand {
            fence_id,
            ..Default::default()
        })
    }

    /// The ids of the commands that have arrived.
    fn arrived(stream: &mut mpsc::Receiver<MasterFrame>) -> Vec<FenceId> {
        std::iter::from_fn(|| stream.try_recv().ok())
            .map(|frame| {
                assert_eq!((frame.request_id, frame.term), (0, 9));
                match frame.response {
                    Some(Response::Fence(fence)) => fence.fence_id,
                    other => panic!("not a fence: {other:?}"),
                }
            })
            .collect()
    }

    fn links() -> Links {
        Links::new(Term(9), 100)
    }

    #[test]
    fn commands_are_sent_again_on_a_new_stream_until_they_are_answered() {
        let links = links();
        links.command(at(0), MEMBER, 1, fence(1));
        let (sender, mut first) = mpsc::channel(10);
        links.attach(at(0), MEMBER, 1, sender);
        links.command(at(0), MEMBER, 2, fence(2));
        links.command(at(0), MEMBER, 2, fence(2));
        assert_eq!(arrived(&mut first), [1, 2], "each once, in order");
        links.answered(MEMBER, 1);
        assert!(links.detach(at(1), MEMBER, 1));
        let (sender, mut second) = mpsc::channel(10);
        links.attach(at(2), MEMBER, 2, sender);
        assert_eq!(arrived(&mut second), [2]);
        links.answered(MEMBER, 2);
        assert_eq!(links.unanswered(), 0);
        links.tick(at(60), TTL);
        assert_eq!(arrived(&mut second), []);
    }

    #[test]
    fn a_command_without_an_answer_is_repeated() {
        let links = links();
        let (sender, mut stream) = mpsc::channel(10);
        links.attach(at(0), MEMBER, 1, sender);
        links.command(at(0), MEMBER, 1, fence(1));
        links.tick(at(1), TTL);
        assert_eq!(arrived(&mut stream), [1]);
        links.tick(at(5), TTL);
        assert_eq!(arrived(&mut stream), [1]);
    }

    #[test]
    fn a_full_stream_gets_the_rest_when_it_has_room() {
        let links = links();
        let (sender, mut stream) = mpsc::channel(2);
        links.attach(at(0), MEMBER, 1, sender);
        for id in 1..=5 {
            links.command(at(0), MEMBER, id, fence(id));
        }
        let mut ids = arrived(&mut stream);
        while ids.len() < 5 {
            links.tick(at(0), TTL);
            let more = arrived(&mut stream);
            assert!(!more.is_empty(), "stuck after {ids:?}");
            ids.extend(more);
        }
        assert_eq!(ids, [1, 2, 3, 4, 5]);
    }

    #[test]
    fn the_end_of_an_older_stream_changes_nothing() {
        let links = links();
        let (older, _gone) = mpsc::channel(10);
        let (newer, mut stream) = mpsc::channel(10);
        links.attach(at(0), MEMBER, 1, older);
        links.attach(at(1), MEMBER, 2, newer);
        assert!(!links.detach(at(2), MEMBER, 1), "it has a later one");
        links.command(at(3), MEMBER, 7, fence(7));
        assert_eq!(arrived(&mut stream), [7]);
    }

    #[test]
    fn what_a_member_leaves_unanswered_goes_with_it_and_is_bounded() {
        let links = links();
        for id in 0..1000 {
            links.command(at(0), MEMBER, id, fence(id));
        }
        assert_eq!(links.unanswered(), 100);
        links.tick(at(9), TTL);
        assert_eq!(links.unanswered(), 100);
        links.tick(at(10), TTL);
        assert_eq!(links.unanswered(), 0);
        links.command(at(11), MEMBER, 1, fence(1));
        links.forget(MEMBER);
        assert_eq!(links.unanswered(), 0);
    }
}
