//! A state machine with memory to hand out, and the calls that benches make of it.

use anyhow::Result;
use layercake_master::state::{Caller, GetStart, Moment, PutBatch, State, StateConfig};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::ids::{
    Capability, ClientId, EngineId, Generation, MemoryKind, RegionId, SegmentId,
};
use layercake_protocol::key::{ObjectKey, Tenant};
use layercake_protocol::replica::{ObjectRef, PutStart, Recency, ReplicateConfig, Segment};

/// See the module's description. Time stands still in it.
#[derive(Debug)]
pub struct Pool {
    /// The state machine. It evicts when nothing else helps.
    pub state: State,
    /// The only member, which lends the memory, too.
    pub caller: Caller,
    /// How objects are put.
    pub config: ReplicateConfig,
}

impl Pool {
    /// When everything happens.
    pub const NOW: Moment = Moment::from_micros(1);

    /// A pool of `segments` with `len` bytes each.
    pub fn new(segments: u64, len: u64) -> Result<Self> {
        let state = State::new(StateConfig {
            high_watermark: 1.0,
            ..StateConfig::default()
        })?;
        let endpoint = Endpoint {
            engine: EngineId(1),
            tcp: "127.0.0.1:1".to_owned(),
            host: HostId([0; 16]),
            shm: None,
            pid: 1,
        };
        let client = ClientId(1);
        state.join(Self::NOW, client, "bench", Some(endpoint.clone()));
        for id in 1..=segments {
            let segment = Segment {
                id: SegmentId(id),
                name: format!("n{id}"),
                endpoint: endpoint.clone(),
                region: RegionId(id),
                capability: Capability([0; 16]),
                len,
                kind: MemoryKind::Host,
            };
            state.mount(Self::NOW, client, segment, Generation::NONE)?;
        }
        Ok(Self {
            state,
            caller: Caller {
                client,
                tenant: Tenant::default(),
                location: None,
            },
            config: ReplicateConfig::default(),
        })
    }

    /// A call that reserves these.
    pub fn batch(&self, puts: Vec<PutStart>) -> PutBatch<'_> {
        PutBatch {
            puts,
            config: &self.config,
            recency: Recency::default(),
            refresh_at_end: true,
            unreachable: &[],
            upsert: false,
        }
    }

    /// Reserves objects; a refusal is an error.
    pub fn put_start(&self, keys: &[ObjectKey], size: u64) -> Result<Vec<ObjectRef>> {
        let batch = self.batch(puts(keys, size));
        let (answers, _) = self.state.put_start(Self::NOW, &self.caller, batch);
        let generations = answers.into_iter().map(|answer| Ok(answer?.generation));
        named(keys, generations)
    }

    /// Commits what was reserved.
    pub fn put_end(&self, objects: &[ObjectRef]) -> Result<()> {
        let epoch = self.state.draw_epoch();
        let answers = self.state.put_end(Self::NOW, &self.caller, objects, epoch);
        Ok(answers.into_iter().collect::<Result<(), _>>()?)
    }

    /// A call that opens sessions.
    pub fn gets<'a>(&self, keys: &'a [ObjectKey]) -> GetStart<'a> {
        GetStart {
            keys,
            recency: Recency::default(),
            session: true,
            unreachable: &[],
        }
    }

    /// Opens sessions; a refusal is an error.
    pub fn get_start(&self, keys: &[ObjectKey]) -> Result<Vec<ObjectRef>> {
        let query = self.gets(keys);
        let (answers, _) = self.state.get_start(Self::NOW, &self.caller, &query);
        let generations = answers.into_iter().map(|answer| Ok(answer?.generation()));
        named(keys, generations)
    }
}

/// Reservations of `size` bytes each.
pub fn puts(keys: &[ObjectKey], size: u64) -> Vec<PutStart> {
    let puts = keys.iter().map(|key| PutStart::new(key.clone(), size));
    puts.collect()
}

fn named(
    keys: &[ObjectKey],
    generations: impl Iterator<Item = Result<Generation>>,
) -> Result<Vec<ObjectRef>> {
    let objects = keys.iter().zip(generations).map(|(key, generation)| {
        Ok(ObjectRef {
            key: key.clone(),
            generation: generation?,
        })
    });
    objects.collect()
}
