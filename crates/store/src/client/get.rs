//! Getting whole objects, made of sessions.
//!
//! Small objects come along with their headers, in one trip. The others are read in waves of bounded
//! size; all leases are renewed until their object is there.

use bytes::Bytes;
use layercake_protocol::key::ObjectKey;

use super::StoreClient;
use super::get_start::GetOptions;
use super::read::{RangeRead, ReadDone};
use super::records::Eager;
use super::scratch::Scratch;
use super::write::Range;
use crate::error::StoreError;
use crate::session::GetSession;

/// Objects of at most this many bytes are fetched together with their headers.
const EAGER: u64 = 64 << 10;

/// Copies of at most this many bytes are done in place.
const BRIEF: u64 = 128 << 10;

/// Bytes that [`StoreClient::get`] has under way at a time, unless one object is larger.
const WAVE: u64 = 64 << 20;

/// Ranges of one object to get.
#[derive(Clone, Debug)]
pub struct GetRequest {
    /// Its key.
    pub key: ObjectKey,
    /// Which bytes, and where to.
    pub ranges: Vec<Range>,
}

impl StoreClient {
    /// Whole objects. The answers align with `keys`; a key may be there more than once.
    pub async fn get(&self, keys: &[ObjectKey]) -> Vec<Result<Bytes, StoreError>> {
        let eager = Eager::Always(EAGER);
        let opened = self.open(keys, GetOptions::default(), eager).await;
        let mut answers = Vec::with_capacity(opened.len());
        let mut ended = Vec::with_capacity(opened.len());
        let mut large = Vec::new();
        for (index, opened) in opened.into_iter().enumerate() {
            answers.push(match opened {
                Ok(session) => {
                    if let Some(payload) = &session.shared().payload {
                        let bytes = payload.bytes.clone();
                        ended.push(session);
                        Ok(bytes)
                    } else {
                        large.push((index, session));
                        Ok(Bytes::new())
                    }
                }
                Err(error) => Err(error),
            });
        }
        let mut rest = large.as_slice();
        while !rest.is_empty() {
            let (wave, later) = rest.split_at(wave_of(rest));
            for ((index, _), result) in wave.iter().zip(self.get_wave(wave).await) {
                answers[*index] = result;
            }
            rest = later;
        }
        ended.extend(large.into_iter().map(|(_, session)| session));
        self.end_gets(ended).await;
        answers
    }

    async fn get_wave(&self, wave: &[(usize, GetSession)]) -> Vec<Result<Bytes, StoreError>> {
        let buffer = |session: &GetSession| {
            let buffer = self.core().scratch.take(session.size())?;
            let local = buffer.slice(0, session.size())?;
            Ok((buffer, local))
        };
        let buffers: Vec<Result<_, StoreError>> =
            wave.iter().map(|(_, session)| buffer(session)).collect();
        let reads = wave
            .iter()
            .zip(&buffers)
            .filter_map(|((_, session), buffer)| {
                let (_, local) = buffer.as_ref().ok()?;
                let ranges = vec![Range {
                    offset: 0,
                    local: local.clone(),
                }];
                Some(RangeRead { session, ranges })
            });
        let mut done = self.read_ranges(reads).await.into_iter();
        let mut answers = Vec::with_capacity(wave.len());
        for buffer in buffers {
            answers.push(match buffer {
                Ok((buffer, local)) => match done.next() {
                    Some(Ok(_)) => copied(buffer, local.len()).await,
                    Some(Err(error)) => Err(error),
                    None => Err(StoreError::UnknownSession),
                },
                Err(error) => Err(error),
            });
        }
        answers
    }

    /// Ranges of objects into local memory. The answers align with `requests`; a key may be there more
    /// than once.
    pub async fn get_into(&self, requests: Vec<GetRequest>) -> Vec<Result<ReadDone, StoreError>> {
        let keys: Vec<ObjectKey> = requests.iter().map(|request| request.key.clone()).collect();
        let options = GetOptions {
            fetch: EAGER,
            ..GetOptions::default()
        };
        let sessions = self.start_gets(&keys, options).await;
        let reads = sessions
            .iter()
            .zip(requests)
            .filter_map(|(session, request)| {
                let session = session.as_ref().ok()?;
                Some(RangeRead {
                    session,
                    ranges: request.ranges,
                })
            });
        let mut done = self.read_ranges(reads).await.into_iter();
        let mut answers = Vec::with_capacity(sessions.len());
        let mut ended = Vec::with_capacity(sessions.len());
        for session in sessions {
            answers.push(match session {
                Ok(session) => {
                    ended.push(session);
                    done.next().unwrap_or(Err(StoreError::UnknownSession))
                }
                Err(error) => Err(error),
            });
        }
        self.end_gets(ended).await;
        answers
    }
}

/// How many of the first sessions make one wave: at least one.
fn wave_of(sessions: &[(usize, GetSession)]) -> usize {
    let mut bytes = 0_u64;
    let fitting = sessions.iter().take_while(|(_, session)| {
        bytes = bytes.saturating_add(session.size());
        bytes <= WAVE
    });
    fitting.count().max(1)
}

/// Megabytes are copied on a thread for what blocks, not on the runtime's.
async fn copied(buffer: Scratch, len: u64) -> Result<Bytes, StoreError> {
    let copy = move || {
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        buffer.copy_out(0, &mut bytes)?;
        buffer.recycle();
        Ok(bytes.into())
    };
    if len <= BRIEF {
        return copy();
    }
    let copied = tokio::task::spawn_blocking(copy).await;
    copied.unwrap_or(Err(StoreError::Closed))
}
