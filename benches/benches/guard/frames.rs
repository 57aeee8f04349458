//! Messages of 256 keys, into bytes and out of them, with the conversion from and to domain types.

use std::time::Duration;

use anyhow::{Result, ensure};
use bytes::Bytes;
use layercake_protocol::convert::{ListedFrame, PutStartAnswer, encode_batch};
use layercake_protocol::endpoint::{Endpoint, HostId};
use layercake_protocol::ids::{
    Capability, EngineId, Epoch, Generation, MemoryKind, RegionId, SegmentId,
};
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::{ObjectRef, PutStart, PutStarted, Replica, Segment, VersionRef};
use layercake_protocol::wire;
use prost::Message as _;

use crate::{BATCH, Path, count, keys};

pub(crate) const PATHS: &[Path] = &[
    ("frame: exists of 256 keys, encoded", encode_exists),
    ("frame: exists of 256 keys, decoded", decode_exists),
    ("frame: put start of 256 keys, encoded", encode_start),
    ("frame: put start of 256 keys, decoded", decode_start),
    ("frame: put started of 256 keys, encoded", encode_started),
    ("frame: put started of 256 keys, decoded", decode_started),
    ("frame: put end of 256 objects, encoded", encode_end),
    ("frame: put end of 256 objects, decoded", decode_end),
];

fn exists(keys: &[ObjectKey]) -> Bytes {
    encode_batch(&wire::ExistsRequest::default(), keys)
}

fn encode_exists() -> Result<()> {
    let keys = keys(0)?;
    count(|| exists(&keys)).map(drop)
}

fn decode_exists() -> Result<()> {
    let sent = keys(0)?;
    let bytes = exists(&sent);
    let decoded = count(|| ListedFrame::decode(&bytes))??;
    let keys = decoded.list.keys().collect::<Result<Vec<_>, _>>()?;
    ensure!(
        keys == sent.iter().map(ObjectKey::as_str).collect::<Vec<_>>(),
        "the keys changed on the way"
    );
    Ok(())
}

fn starts() -> Result<Vec<PutStart>> {
    let keys = keys(0)?.into_iter();
    Ok(keys.map(|key| PutStart::new(key, 60_000)).collect())
}

fn start(puts: Vec<PutStart>) -> Vec<u8> {
    let request = wire::PutStartRequest {
        entries: puts.into_iter().map(Into::into).collect(),
        ..wire::PutStartRequest::default()
    };
    request.encode_to_vec()
}

fn encode_start() -> Result<()> {
    let puts = starts()?;
    count(|| start(puts)).map(drop)
}

fn decode_start() -> Result<()> {
    let sent = starts()?;
    let bytes = start(sent.clone());
    let decoded = count(|| -> Result<Vec<PutStart>> {
        let request = wire::PutStartRequest::decode(bytes.as_slice())?;
        let entries = request.entries.into_iter();
        entries.map(|entry| Ok(entry.try_into()?)).collect()
    })??;
    ensure!(decoded == sent, "the reservations changed on the way");
    Ok(())
}

fn answer() -> PutStartAnswer {
    let started = |index: usize| PutStarted {
        generation: Generation(1 + index as u64),
        replicas: [Replica {
            segment: SegmentId(1 + index as u64 % 8),
            offset: index as u64 * 61_440,
            header_len: 1024,
            generation: Generation(1 + index as u64),
        }]
        .into(),
    };
    let segment = |id: u64| Segment {
        id: SegmentId(id),
        name: format!("10.0.0.{id}:12345"),
        endpoint: Endpoint {
            engine: EngineId(id.into()),
            tcp: format!("10.0.0.{id}:4321"),
            host: HostId([7; 16]),
            shm: None,
            pid: 4242,
        },
        region: RegionId(id),
        capability: Capability([9; 16]),
        len: 4 << 30,
        kind: MemoryKind::Host,
    };
    PutStartAnswer {
        hold: None,
        results: (0..BATCH).map(|index| Ok(started(index))).collect(),
        segments: (1..=8).map(segment).collect(),
        epoch: Epoch(77),
        discard_after: Duration::from_secs(30),
    }
}

fn encode_started() -> Result<()> {
    let answer = answer();
    count(|| wire::PutStartResponse::from(&answer).encode_to_vec()).map(drop)
}

fn decode_started() -> Result<()> {
    let sent = answer();
    let bytes = wire::PutStartResponse::from(&sent).encode_to_vec();
    let decoded = count(|| -> Result<PutStartAnswer> {
        let response = wire::PutStartResponse::decode(bytes.as_slice())?;
        Ok(PutStartAnswer::decode(response, BATCH)?)
    })??;
    ensure!(decoded == sent, "the answer changed on the way");
    Ok(())
}

fn objects() -> Result<Vec<ObjectRef>> {
    let numbered = keys(0)?.into_iter().zip(1..);
    let objects = numbered.map(|(key, generation)| ObjectRef {
        key,
        generation: Generation(generation),
    });
    Ok(objects.collect())
}

fn end(objects: &[ObjectRef]) -> Bytes {
    encode_batch(&wire::PutEndRequest::default(), objects)
}

fn encode_end() -> Result<()> {
    let objects = objects()?;
    count(|| end(&objects)).map(drop)
}

fn decode_end() -> Result<()> {
    let sent = objects()?;
    let bytes = end(&sent);
    let decoded = count(|| ListedFrame::decode(&bytes))??;
    let objects = decoded.list.versions().collect::<Result<Vec<_>, _>>()?;
    let same = |(sent, got): (&ObjectRef, &VersionRef<'_>)| {
        (sent.key.as_str(), sent.generation) == (got.key, got.generation)
    };
    ensure!(
        objects.len() == sent.len() && sent.iter().zip(&objects).all(same),
        "the objects changed on the way"
    );
    Ok(())
}
