//! Answers to reads: what was asked for goes out from where it is, or is copied if it is little.

use std::time::Instant;

use super::super::admit::Admitted;
use super::super::frame::{FLAG_STATUSES, FLAG_TRAILER, Header, Kind};
use super::super::raw::{self, Span};
use super::{Conn, MAX_REPLIES};
use crate::batch::Direction;

/// An answer to a read on its way out.
#[derive(Debug)]
pub(super) struct Reply {
    admitted: Admitted,
    pub(super) since: Instant,
    /// Where the statuses behind the payload are, if they are wanted.
    trailer: Option<u64>,
}

/// Data of up to so many bytes is copied, if nothing else waits to be sent, and goes out in one call together
/// with what is said behind it; that call would cost more. As much as a peer takes in together with a header.
const COPIED: usize = 8 << 10;

impl Conn {
    pub(super) fn push_reply(&mut self, question: &Header, admitted: Admitted, places: &[Span]) {
        let all_ok = admitted.all_ok();
        let payload: usize = places.iter().map(|span| span.len).sum();
        let mut flags = if all_ok { 0 } else { FLAG_STATUSES };
        if admitted.has_checks() {
            flags |= FLAG_TRAILER;
        }
        let header = Header {
            kind: Kind::Data,
            flags,
            count: question.count,
            regions: 0,
            seq: question.seq,
            payload: u32::try_from(payload)
                .expect("no more than the frame asked for, which is capped"),
        };
        let copied = payload <= COPIED && self.out.is_empty();
        self.out.push_head(|out| {
            header.encode(out);
            if !all_ok {
                out.extend_from_slice(&admitted.statuses);
            }
            if copied {
                for span in places {
                    raw::append(out, *span);
                }
            }
        });
        if copied {
            return self.finish_copied(admitted);
        }
        for span in places {
            self.out.push_memory(*span, 0);
        }
        self.out.push_mark();
        let trailer = admitted.has_checks().then(|| {
            let len = admitted.statuses.len();
            self.out.push_head(|out| out.resize(out.len() + len, 0))
        });
        self.replies.push_back(Reply {
            admitted,
            since: self.now,
            trailer,
        });
    }

    /// The payload of a reply was copied behind its header.
    fn finish_copied(&mut self, mut admitted: Admitted) {
        if admitted.has_checks() {
            admitted.check_after();
            self.out
                .push_head(|out| out.extend_from_slice(&admitted.statuses));
        }
        self.complete_reply(admitted);
    }

    fn complete_reply(&mut self, mut admitted: Admitted) {
        admitted.complete(&self.context, Direction::Read);
        if self.spare.len() < MAX_REPLIES {
            self.spare.push(admitted);
        }
    }

    /// The payload of the first reply was handed to the socket.
    pub(super) fn finish_reply(&mut self) {
        self.out.take_mark();
        let Some(mut reply) = self.replies.pop_front() else {
            return;
        };
        if let Some(place) = reply.trailer {
            reply.admitted.check_after();
            self.out.patch(place, &reply.admitted.statuses);
        }
        self.complete_reply(reply.admitted);
    }
}
