//! Answers that are kept for a while, so that a call repeated after a broken stream does not happen twice.
//!
//! A put start that was carried out but whose answer was lost would, repeated, find its own keys "in
//! progress"; a remove would find nothing. Such calls are recorded under (client, request id): the
//! repeated one gets the first one's answer, or waits for it if it is still being worked on. Calls that
//! are harmless to repeat are not recorded.
//!
//! A start that its caller has given up may come after the word of that: its number is kept, too, apart from the answers,
//! so that giving many starts up forgets none of them.
//!
//! Kept per client: the latest answers, up to a number of answers and of keys, and at most until a
//! reservation may be taken over, from when on the old answer would be a lie. One mutex, held briefly.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use layercake_protocol::convert::PutStartAnswer;
use layercake_protocol::error::Refusal;
use layercake_protocol::ids::{ClientId, RequestId};
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::config::Limits;
use crate::state::Moment;

/// An answer that is kept.
#[derive(Clone, Debug)]
pub(crate) enum Answer {
    /// To a put or upsert start.
    PutStart(Arc<PutStartAnswer>),
    /// To a remove.
    Results(Arc<[Result<(), Refusal>]>),
    /// To a remove by pattern.
    Removed(u64),
}

impl Answer {
    fn keys(&self) -> usize {
        match self {
            Self::PutStart(answer) => answer.results.len(),
            Self::Results(results) => results.len(),
            Self::Removed(_) => 1,
        }
    }
}

/// One recorded call.
#[derive(Debug, Default)]
pub(crate) struct Record {
    answer: OnceLock<Answer>,
    done: Notify,
}

impl Record {
    /// The answer, when there is one. Waits for whoever is at work on it.
    pub(crate) async fn answer(&self) -> Answer {
        loop {
            // Registered before looking, so that an answer in between is not missed.
            let done = self.done.notified();
            if let Some(answer) = self.answer.get() {
                return answer.clone();
            }
            done.await;
        }
    }
}

/// What to do about a call.
#[derive(Debug)]
pub(crate) enum Role {
    /// Carry it out, and give the answer to [`Replays::finish`].
    First(Arc<Record>),
    /// It is being, or was, carried out: take that answer.
    Repeated(Arc<Record>),
    /// Its caller has given it up.
    TakenBack,
}

#[derive(Debug)]
pub(crate) struct Replays {
    answers: usize,
    keys: usize,
    keep: Duration,
    clients: Mutex<HashMap<ClientId, Client>>,
}

#[derive(Debug, Default)]
struct Client {
    /// The oldest first.
    calls: VecDeque<(RequestId, Moment, Arc<Record>)>,
    /// The greatest number of a call so far. Nearly all calls have a greater one: they need not be looked for.
    greatest: Option<RequestId>,
    keys: usize,
    /// Starts that were given up before they came; the oldest first.
    taken_back: VecDeque<(RequestId, Moment)>,
}

/// Numbers of starts that are kept for a client who has given them up.
const TAKEN_BACK: usize = 4096;

impl Client {
    fn record(&self, request: RequestId) -> Option<&Arc<Record>> {
        if Some(request) > self.greatest {
            return None;
        }
        // A repeated call is a recent one.
        let mut calls = self.calls.iter().rev();
        let (_, _, record) = calls.find(|(id, _, _)| *id == request)?;
        Some(record)
    }

    fn forget_oldest(&mut self) {
        if let Some((_, _, record)) = self.calls.pop_front() {
            self.keys -= record.answer.get().map_or(0, Answer::keys);
        }
    }
}

impl Replays {
    pub(crate) fn new(limits: &Limits, keep: Duration) -> Self {
        Self {
            answers: limits.replays_per_client,
            keys: limits.replayed_keys_per_client,
            keep,
            clients: Mutex::default(),
        }
    }

    /// Records a call, or finds the one that it repeats.
    pub(crate) fn begin(&self, now: Moment, client: ClientId, request: RequestId) -> Role {
        let mut clients = self.clients.lock();
        let client = clients.entry(client).or_default();
        if let Some(record) = client.record(request) {
            return Role::Repeated(Arc::clone(record));
        }
        if client.taken_back.iter().any(|(id, _)| *id == request) {
            return Role::TakenBack;
        }
        let record = Arc::<Record>::default();
        let call = (request, now, Arc::clone(&record));
        client.calls.push_back(call);
        client.greatest = client.greatest.max(Some(request));
        Role::First(record)
    }

    /// Finds the start that its caller gives up; `None`: it has not come, and will be turned away.
    pub(crate) fn take_back(
        &self,
        now: Moment,
        client: ClientId,
        start: RequestId,
    ) -> Option<Arc<Record>> {
        let mut clients = self.clients.lock();
        let client = clients.entry(client).or_default();
        let record = client.record(start).map(Arc::clone);
        if record.is_none() {
            if client.taken_back.len() == TAKEN_BACK {
                client.taken_back.pop_front();
            }
            client.taken_back.push_back((start, now));
        }
        record
    }

    /// The call's answer; whoever repeated it meanwhile gets it too.
    pub(crate) fn finish(&self, client: ClientId, record: &Arc<Record>, answer: Answer) {
        let keys = answer.keys();
        // Under the lock, so that the count of keys and the records agree.
        let mut clients = self.clients.lock();
        if record.answer.set(answer).is_ok()
            && let Some(client) = clients.get_mut(&client)
            && client
                .calls
                .iter()
                .rev()
                .any(|(_, _, own)| Arc::ptr_eq(own, record))
        {
            client.keys += keys;
            while client.calls.len() > self.answers
                || (client.keys > self.keys && client.calls.len() > 1)
            {
                client.forget_oldest();
            }
        }
        drop(clients);
        record.done.notify_waiters();
    }

    /// The client is gone.
    pub(crate) fn forget(&self, client: ClientId) {
        self.clients.lock().remove(&client);
    }

    /// Forgets what is too old to be repeated.
    pub(crate) fn tick(&self, now: Moment) {
        self.clients.lock().retain(|_, client| {
            while client
                .calls
                .front()
                .is_some_and(|(_, begun, _)| now.since(*begun) >= self.keep)
            {
                client.forget_oldest();
            }
            let taken_back = &mut client.taken_back;
            taken_back.retain(|(_, since)| now.since(*since) < self.keep);
            !client.calls.is_empty() || !taken_back.is_empty()
        });
    }

    /// Answers that are kept.
    pub(crate) fn len(&self) -> usize {
        let clients = self.clients.lock();
        clients.values().map(|client| client.calls.len()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CLIENT: ClientId = ClientId(1);

    fn replays() -> Replays {
        let limits = Limits {
            replays_per_client: 4,
            replayed_keys_per_client: 100,
            ..Default::default()
        };
        Replays::new(&limits, Duration::from_secs(30))
    }

    fn at(seconds: u64) -> Moment {
        Moment::START + Duration::from_secs(seconds)
    }

    fn results(keys: usize) -> Answer {
        Answer::Results(vec![Ok(()); keys].into())
    }

    fn carry_out(replays: &Replays, request: u64, answer: Answer) {
        match replays.begin(at(0), CLIENT, RequestId(request)) {
            Role::First(record) => replays.finish(CLIENT, &record, answer),
            role => panic!("request {request} was not made before: {role:?}"),
        }
    }

    /// Whether the request's answer is kept; asking does not record it.
    fn kept(replays: &Replays, request: u64) -> bool {
        let clients = replays.clients.lock();
        clients.get(&CLIENT).is_some_and(|client| {
            client
                .calls
                .iter()
                .any(|(id, _, _)| *id == RequestId(request))
        })
    }

    #[tokio::test]
    async fn a_repeated_call_gets_the_first_ones_answer() {
        let replays = replays();
        carry_out(&replays, 1, Answer::Removed(17));
        let Role::Repeated(record) = replays.begin(at(1), CLIENT, RequestId(1)) else {
            panic!("it was made before");
        };
        assert!(matches!(record.answer().await, Answer::Removed(17)));
        assert!(matches!(
            replays.begin(at(1), ClientId(2), RequestId(1)),
            Role::First(_)
        ));
    }

    #[test]
    fn calls_that_come_out_of_order_are_told_from_repeated_ones() {
        let replays = replays();
        for request in [2, 5, 3] {
            carry_out(&replays, request, Answer::Removed(request));
        }
        for request in [3, 5, 2] {
            let Role::Repeated(record) = replays.begin(at(1), CLIENT, RequestId(request)) else {
                panic!("{request} was made before");
            };
            assert!(matches!(record.answer.get(), Some(Answer::Removed(of)) if *of == request));
        }
        carry_out(&replays, 4, Answer::Removed(4));
    }

    #[tokio::test]
    async fn a_repeated_call_waits_for_the_first_one() {
        let replays = replays();
        let Role::First(first) = replays.begin(at(0), CLIENT, RequestId(1)) else {
            panic!("it is the first");
        };
        let Role::Repeated(second) = replays.begin(at(0), CLIENT, RequestId(1)) else {
            panic!("it is the second");
        };
        let waiting = tokio::spawn(async move { second.answer().await });
        tokio::task::yield_now().await;
        assert!(!waiting.is_finished());
        replays.finish(CLIENT, &first, Answer::Removed(3));
        let answer = waiting.await.expect("it does not panic");
        assert!(matches!(answer, Answer::Removed(3)));
    }

    #[test]
    fn answers_are_bounded_by_number_keys_and_age() {
        let replays = replays();
        for request in 0..10 {
            carry_out(&replays, request, results(10));
        }
        assert_eq!(replays.len(), 4);
        assert!(!kept(&replays, 5) && kept(&replays, 6));
        carry_out(&replays, 10, results(85));
        assert_eq!(replays.len(), 2, "95 keys fit, 105 don't");
        carry_out(&replays, 11, results(1000));
        assert!(kept(&replays, 11), "the latest is kept whatever its size");
        assert_eq!(replays.len(), 1);
        replays.tick(at(29));
        assert_eq!(replays.len(), 1);
        replays.tick(at(30));
        assert_eq!(replays.len(), 0);
        carry_out(&replays, 12, results(1));
        replays.forget(CLIENT);
        assert_eq!(replays.len(), 0);
    }
}
