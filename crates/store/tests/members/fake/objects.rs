//! The objects of the small master: a map, and the answers of starts so that a repeated one gets its
//! first answer again.

use std::collections::HashMap;

use bytes::Bytes;
use layercake_protocol::convert::{Context, encode_key_results};
use layercake_protocol::error::Refusal;
use layercake_protocol::wire;
use layercake_protocol::wire::client_frame::Request as Body;
use layercake_protocol::wire::master_frame::Response as Answer;

#[derive(Clone, Copy)]
enum Entry {
    Reserved(u64),
    Complete(u64),
}

#[derive(Default)]
pub(super) struct Objects {
    entries: HashMap<String, Entry>,
    starts: HashMap<(u128, u64), wire::PutStartResponse>,
    generation: u64,
    epoch: u64,
}

type KeyResult = Result<(), Refusal>;

impl Objects {
    pub(super) fn insert(&mut self, key: &str) {
        self.generation += 1;
        self.entries
            .insert(key.to_owned(), Entry::Complete(self.generation));
    }

    pub(super) fn reservations(&self) -> usize {
        let reserved = |entry: &&Entry| matches!(entry, Entry::Reserved(_));
        self.entries.values().filter(reserved).count()
    }

    pub(super) fn apply(&mut self, context: &Context, body: Body) -> Answer {
        match body {
            Body::Exists(request) => Answer::Exists(self.exists(&request)),
            Body::GetStart(request) => Answer::GetStart(self.get_start(&request)),
            Body::GetEnd(_) => Answer::GetEnd(wire::GetEndResponse {}),
            Body::PutStart(request) => {
                let call = (context.client.0, context.request.0);
                if let Some(answer) = self.starts.get(&call) {
                    return Answer::PutStart(answer.clone());
                }
                let answer = self.put_start(&request);
                self.starts.insert(call, answer.clone());
                Answer::PutStart(answer)
            }
            Body::PutEnd(request) => results(request.objects, |object| self.put_end(&object)),
            Body::PutRevoke(request) => results(request.objects, |object| self.revoke(&object)),
            Body::TakeBack(request) => {
                let start = (context.client.0, request.start);
                let granted = self.starts.get(&start).cloned().unwrap_or_default();
                for (key, started) in request.keys.into_iter().zip(granted.results) {
                    let generation = started.generation;
                    let _ = self.revoke(&wire::ObjectRef { key, generation });
                }
                Answer::Done(wire::Done {})
            }
            Body::WaitComplete(request) => {
                results(request.keys, |key| match self.entries.get(&key) {
                    Some(Entry::Complete(_)) => Ok(()),
                    Some(Entry::Reserved(_)) => Err(Refusal::NotReady),
                    None => Err(Refusal::NotFound),
                })
            }
            Body::Remove(request) => results(request.keys, |key| {
                self.entries.remove(&key).map(drop).ok_or(Refusal::NotFound)
            }),
            _ => Answer::Error((&Refusal::invalid("not known to the test's master")).into()),
        }
    }

    fn epoch_of(&mut self, recency: Option<wire::Recency>) -> u64 {
        match recency.map_or(0, |recency| recency.epoch) {
            0 => {
                self.epoch += 1;
                self.epoch
            }
            epoch => epoch,
        }
    }

    fn exists(&mut self, request: &wire::ExistsRequest) -> wire::ExistsResponse {
        let mut states = Vec::new();
        for key in &request.keys {
            let state = match self.entries.get(key) {
                None => 0,
                Some(Entry::Complete(_)) => 1,
                Some(Entry::Reserved(_)) => 2,
            };
            states.push(state);
            if state != 1 && request.stop_at_first_miss {
                break;
            }
        }
        wire::ExistsResponse {
            states: states.into(),
            epoch: self.epoch_of(request.recency),
        }
    }

    fn get_start(&mut self, request: &wire::GetStartRequest) -> wire::GetStartResponse {
        let results = request
            .keys
            .iter()
            .map(|key| match self.entries.get(key) {
                Some(Entry::Complete(generation)) => wire::GetStarted {
                    refusal: wire::Refusal::None.into(),
                    size: 1,
                    replicas: [replica(*generation)].into(),
                    ..Default::default()
                },
                _ => wire::GetStarted {
                    refusal: wire::Refusal::NotFound.into(),
                    ..Default::default()
                },
            })
            .collect();
        wire::GetStartResponse {
            results,
            segments: vec![segment()],
            lease_ms: 10_000,
            epoch: self.epoch_of(request.recency),
        }
    }

    fn put_start(&mut self, request: &wire::PutStartRequest) -> wire::PutStartResponse {
        let results = request
            .entries
            .iter()
            .map(|entry| {
                let refusal = match self.entries.get(&entry.key) {
                    Some(Entry::Complete(_)) => wire::Refusal::AlreadyExists,
                    Some(Entry::Reserved(_)) => wire::Refusal::InProgress,
                    None => wire::Refusal::None,
                };
                if refusal != wire::Refusal::None {
                    return wire::PutStarted {
                        refusal: refusal.into(),
                        ..Default::default()
                    };
                }
                self.generation += 1;
                self.entries
                    .insert(entry.key.clone(), Entry::Reserved(self.generation));
                wire::PutStarted {
                    refusal: refusal.into(),
                    generation: self.generation,
                    replicas: [replica(self.generation)].into(),
                }
            })
            .collect();
        wire::PutStartResponse {
            results,
            segments: vec![segment()],
            epoch: self.epoch_of(request.recency),
            discard_after_ms: 30_000,
            details: Vec::new(),
            hold: None,
        }
    }

    fn put_end(&mut self, object: &wire::ObjectRef) -> KeyResult {
        match self.entries.get_mut(&object.key) {
            Some(entry @ Entry::Reserved(_)) => {
                *entry = Entry::Complete(object.generation);
                Ok(())
            }
            Some(Entry::Complete(generation)) if *generation == object.generation => Ok(()),
            _ => Err(Refusal::Superseded),
        }
    }

    fn revoke(&mut self, object: &wire::ObjectRef) -> KeyResult {
        match self.entries.get(&object.key) {
            Some(Entry::Reserved(generation)) if *generation == object.generation => {
                self.entries.remove(&object.key);
                Ok(())
            }
            _ => Err(Refusal::Superseded),
        }
    }
}

fn results<T>(items: Vec<T>, each: impl FnMut(T) -> KeyResult) -> Answer {
    let results: Vec<KeyResult> = items.into_iter().map(each).collect();
    Answer::Results(encode_key_results(&results))
}

fn replica(generation: u64) -> wire::Replica {
    wire::Replica {
        segment_id: 5,
        offset: 4096 * generation,
        header_len: 320,
        generation,
    }
}

fn segment() -> wire::Segment {
    wire::Segment {
        segment_id: 5,
        name: "n".to_owned(),
        endpoint: Some(wire::Endpoint {
            engine: Some(9_u128.into()),
            tcp: "127.0.0.1:1".to_owned(),
            host: Bytes::from(vec![0; 16]),
            shm: String::new(),
            pid: 1,
        }),
        region_id: 1,
        capability: Bytes::from(vec![0; 16]),
        len: 1 << 40,
        memory_kind: wire::MemoryKind::Host.into(),
        device_id: 0,
    }
}
