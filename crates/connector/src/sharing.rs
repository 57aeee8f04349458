//! Engines that want to share blocks find out in the pool whether they can (C5).
//!
//! They are given one name. Whoever comes first records its [`Identity`] under it, as an object that is never evicted, and
//! everybody else compares. So two engines that nobody introduced to each other, such as those of a split into prefill and
//! decode, don't go on with a cache that stays cold. Which deployments should share is not to be guessed from the pool:
//! it may hold any number that differ, which is why there is a name.

use std::time::Duration;

use layercake_protocol::error::Refusal;
use layercake_protocol::key::ObjectKey;
use layercake_protocol::replica::ReplicateConfig;
use layercake_store::{PutOutcome, StoreClient, StoreError};

use crate::checks::Identity;
use crate::error::ConnectorError;

/// Copies of the record, each on another node as far as there are any.
const COPIES: u32 = 2;

/// Times that a record may go while it is being read.
const ATTEMPTS: usize = 4;

/// Compares an identity with the one that the group has recorded, or records it. An answer within this time, or none.
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
    let recorded = tokio::time::timeout(within, recorded(store, &key, ours, within)).await;
    let theirs = match recorded {
        Ok(Ok(None)) => return Ok(()),
        Ok(Ok(Some(theirs))) => theirs,
        Ok(Err(detail)) => return Err(refused(detail)),
        Err(_) => {
            return Err(refused(format!(
                "the store did not answer within {within:?}"
            )));
        }
    };
    ours.check_peer(&theirs).map_err(|differs| {
        refused(format!(
            "{differs}; what the first engine of the group was is in the object {key}, to be removed when none of them is left"
        ))
    })
}

/// The group's identity, if it is not ours that is recorded now.
async fn recorded(
    store: &StoreClient,
    key: &ObjectKey,
    ours: &Identity,
    within: Duration,
) -> Result<Option<Identity>, String> {
    let text = serde_json::to_vec(ours).map_err(|error| error.to_string())?;
    let config = ReplicateConfig {
        replicas: COPIES,
        hard_pin: true,
        ..ReplicateConfig::default()
    };
    let keys = std::slice::from_ref(key);
    let mut last = StoreError::UnknownSession;
    for _ in 0..ATTEMPTS {
        let put = store.put_bytes(&[(key.clone(), &text)], &config).await;
        match put.into_iter().next() {
            Some(Ok(PutOutcome::Stored)) => return Ok(None),
            Some(Ok(PutOutcome::InProgress)) => {
                // Its first engine starts at this moment. What comes of it is seen below.
                drop(store.wait_complete(keys, within).await);
            }
            Some(Err(error)) => return Err(error.to_string()),
            // Somebody has recorded it before.
            Some(Ok(_)) | None => {}
        }
        match store.get(keys).await.into_iter().next() {
            Some(Ok(bytes)) => {
                let theirs = serde_json::from_slice(&bytes);
                return theirs
                    .map(Some)
                    .map_err(|error| format!("the object {key} is no identity: {error}"));
            }
            // It went between the two.
            Some(Err(error @ StoreError::Refused(Refusal::NotFound | Refusal::NotReady))) => {
                last = error;
            }
            Some(Err(error)) => return Err(error.to_string()),
            None => {}
        }
    }
    Err(last.to_string())
}
