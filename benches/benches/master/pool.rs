//! A state machine with room for a table of a given size, and the calls that the benches make of it.

use anyhow::{Result, ensure};
use layercake_master::state::{
    Caller, Exists, GetStart, Moment, Probe, PutBatch, State, StateConfig,
};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::ids::{
    Capability, ClientId, EngineId, Generation, MemoryKind, RegionId, SegmentId,
};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{ObjectRef, PutStart, Recency, ReplicateConfig, Segment};

/// See the module's description.
pub(crate) struct Pool {
    state: State,
    caller: Caller,
    now: Moment,
    config: ReplicateConfig,
}

impl Pool {
    /// A pool with room for so many objects of 60,000 bytes.
    pub(crate) fn new(room: usize) -> Result<Self> {
        let state = State::new(StateConfig {
            high_watermark: 1.0,
            ..StateConfig::default()
        })?;
        let now = Moment::from_micros(1);
        let endpoint = Endpoint {
            engine: EngineId(1),
            tcp: "127.0.0.1:1".to_owned(),
            host: HostId([0; 16]),
            shm: None,
            pid: 1,
        };
        let client = ClientId(1);
        state.join(now, client, "bench", Some(endpoint.clone()));
        for id in 1..=8 {
            let segment = Segment {
                id: SegmentId(id),
                name: format!("n{id}"),
                endpoint: endpoint.clone(),
                region: RegionId(id),
                capability: Capability([0; 16]),
                len: (room as u64 / 8 + 4096) * 61_440,
                kind: MemoryKind::Host,
            };
            state.mount(now, client, segment, Generation::NONE)?;
        }
        Ok(Self {
            state,
            caller: Caller {
                client,
                tenant: Tenant::default(),
                location: None,
            },
            now,
            config: ReplicateConfig::default(),
        })
    }

    pub(crate) fn put_start(&self, keys: &[ObjectKey]) -> Result<Vec<ObjectRef>> {
        let batch = PutBatch {
            puts: keys
                .iter()
                .map(|key| PutStart::new(key.clone(), 60_000))
                .collect(),
            config: &self.config,
            recency: Recency::default(),
            refresh_at_end: true,
            unreachable: &[],
            upsert: false,
        };
        let (answers, _) = self.state.put_start(self.now, &self.caller, batch);
        keys.iter()
            .zip(answers)
            .map(|(key, answer)| {
                Ok(ObjectRef {
                    key: key.clone(),
                    generation: answer?.generation,
                })
            })
            .collect()
    }

    pub(crate) fn put_end(&self, objects: &[ObjectRef]) -> Result<()> {
        for answer in self
            .state
            .put_end(self.now, &self.caller, objects, self.state.draw_epoch())
        {
            answer?;
        }
        Ok(())
    }

    pub(crate) fn exists(&self, keys: &[ObjectKey]) -> Result<()> {
        let query = Exists {
            probe: Probe::Readable,
            keys,
            recency: Recency::default(),
            stop_at_first_miss: true,
            unreachable: &[],
            peek: false,
        };
        let (found, _) = self.state.exists(self.now, &self.caller, &query);
        ensure!(found.len() == keys.len(), "a stored object is missing");
        Ok(())
    }

    pub(crate) fn get_start(&self, keys: &[ObjectKey]) -> Result<Vec<ObjectRef>> {
        let query = GetStart {
            keys,
            recency: Recency::default(),
            session: true,
            unreachable: &[],
        };
        let (answers, _) = self.state.get_start(self.now, &self.caller, &query);
        keys.iter()
            .zip(answers)
            .map(|(key, answer)| {
                Ok(ObjectRef {
                    key: key.clone(),
                    generation: answer?.generation(),
                })
            })
            .collect()
    }

    pub(crate) fn get_end(&self, objects: &[ObjectRef]) {
        self.state.get_end(self.now, &self.caller, objects);
    }
}
