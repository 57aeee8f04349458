//! Engines that want to share blocks find out in the pool whether they can (C5).
//!
//! They are given one name. Whoever comes first records its [`Identity`] under it, as an object that is never evicted, and
//! everybody else compares; if all nodes that hold it go, the next one records anew. So two engines that nobody introduced
//! to each other, such as those of a split into prefill and decode, don't go on with a cache that stays cold. Which
//! deployments should share is not to be guessed from the pool: it may hold any number that differ, which is why there is a
//! name. A group lives within the tenant of its engines' store clients: those of another tenant see another record.

use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::ReplicateConfig;
use layercake_store::{PutOutcome, StoreClient, StoreError};
use serde::{Deserialize, Serialize};

use crate::checks::Identity;
use crate::error::ConnectorError;

/// Copies of the record, each on another node as far as there are any.
const COPIES: u32 = 2;

/// Times that a record may go while it is being read.
const ATTEMPTS: usize = 4;

/// An engine that is recording is waited for so long before it is looked whether it is lost.
const LOOK: Duration = Duration::from_secs(1);

/// Between two looks, and between two attempts at first. Longer and longer, where the store can't be asked.
const PAUSE: Duration = Duration::from_millis(20);

/// The version of the record's format.
const VERSION: u32 = 1;

/// What is recorded.
#[derive(Serialize, Deserialize)]
struct Record<I> {
    version: u32,
    identity: I,
}

/// What every version of a record has.
#[derive(Deserialize)]
struct AnyRecord {
    version: u64,
}

/// What an answer is waited for.
enum Waits {
    /// The store says nothing.
    Store,
    /// Another engine is recording what it is.
    Others,
    /// The store could not say, for a reason that may pass.
    Failed(StoreError),
}

/// Compares an identity with the one that the group has recorded, or records it. An answer within this time, or none. An
/// engine that was lost while it recorded is only replaced if this is more than the master keeps its reservation.
pub(crate) async fn agree(
    store: &StoreClient,
    group: &str,
    ours: &Identity,
    within: Duration,
) -> Result<(), ConnectorError> {
    let refused = |detail: String| ConnectorError::Sharing {
        group: group.to_owned(),
        detail,
    };
    let key = ObjectKey::new(&format!("layercake/sharing-group/{group}"))?;
    let mut waits = Waits::Store;
    let recorded = recorded(store, &key, ours, &mut waits);
    let recorded = tokio::time::timeout(within, recorded).await;
    let theirs = match recorded {
        Ok(Ok(None)) => return Ok(()),
        Ok(Ok(Some(theirs))) => theirs,
        Ok(Err(detail)) => return Err(refused(detail)),
        Err(_) => {
            return Err(refused(match waits {
                Waits::Store => format!("the store did not answer within {within:?}"),
                Waits::Others => format!(
                    "another engine has begun to record what it is in the object {key}, and has not ended within {within:?}"
                ),
                Waits::Failed(error) => {
                    format!("the store could not say within {within:?}: {error}")
                }
            }));
        }
    };
    ours.check_peer(&theirs).map_err(|differs| {
        refused(format!(
            "{differs}; what the first engine of the group was is in the object {key}, to be removed when none of them is left"
        ))
    })
}

/// The group's identity, if it is not ours that is recorded now. Tries again for as long as the caller waits where the
/// store can't say for a reason that may pass.
async fn recorded(
    store: &StoreClient,
    key: &ObjectKey,
    ours: &Identity,
    waits: &mut Waits,
) -> Result<Option<Identity>, String> {
    let record = Record {
        version: VERSION,
        identity: ours,
    };
    let text = serde_json::to_vec(&record).map_err(|error| error.to_string())?;
    let config = ReplicateConfig {
        replicas: COPIES,
        hard_pin: true,
        ..ReplicateConfig::default()
    };
    let keys = std::slice::from_ref(key);
    let (mut gone, mut pause) = (0, PAUSE);
    loop {
        let put = store.put_bytes(&[(key.clone(), &text)], &config).await;
        let put = put.into_iter().next();
        let error = match put.unwrap_or(Err(StoreError::UnknownSession)) {
            Ok(PutOutcome::Stored) => return Ok(None),
            Ok(PutOutcome::InProgress) => {
                // Its first engine starts at this moment, or was lost while it did: then the reservation is given to the next
                // put, when its time is over. The caller's time ends this.
                *waits = Waits::Others;
                // A master with too many waits answers at once.
                let looked = store.wait_complete(keys, LOOK);
                tokio::join!(looked, tokio::time::sleep(PAUSE));
                continue;
            }
            // Somebody has recorded it before, or has taken this engine for lost.
            Ok(_) | Err(StoreError::Refused(Refusal::Superseded)) => {
                let got = store.get(keys).await.into_iter().next();
                match got.unwrap_or(Err(StoreError::UnknownSession)) {
                    Ok(bytes) => return decode(key, &bytes).map(Some),
                    // It went between the two.
                    Err(StoreError::Refused(Refusal::NotFound | Refusal::NotReady))
                        if gone + 1 < ATTEMPTS =>
                    {
                        gone += 1;
                        *waits = Waits::Store;
                        continue;
                    }
                    Err(error) => error,
                }
            }
            Err(error) => error,
        };
        // What was gone so often stays so, and a quota is not raised by waiting.
        let stays = matches!(
            error,
            StoreError::Refused(Refusal::NotReady | Refusal::QuotaExceeded)
        );
        if stays || !error.is_retryable() {
            return Err(error.to_string());
        }
        if !matches!(waits, Waits::Failed(_)) {
            tracing::warn!(%key, %error, "the store can't say what the sharing group is: it is asked again");
        }
        *waits = Waits::Failed(error);
        tokio::time::sleep(pause).await;
        pause = (pause * 2).min(LOOK);
    }
}

fn decode(key: &ObjectKey, bytes: &[u8]) -> Result<Identity, String> {
    let odd = |error| format!("the object {key} is no record of an identity: {error}");
    let AnyRecord { version } = serde_json::from_slice(bytes).map_err(odd)?;
    if version != u64::from(VERSION) {
        return Err(format!(
            "the object {key} is a record of version {version}, and version {VERSION} is read here: the group's engines are of different releases"
        ));
    }
    let record: Record<Identity> = serde_json::from_slice(bytes).map_err(odd)?;
    Ok(record.identity)
}
