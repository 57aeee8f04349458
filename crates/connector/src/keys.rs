//! Keys of a deployment's blocks: which ranks store, and under which name.

use layercake_protocol::key::{Coordinates, KeyForm, KeySchema, ObjectKey, Parallelism, RankKeys};

use crate::checks::{Checked, Deployment};
use crate::contract::BlockHash;
use crate::error::ConnectorError;

/// Makes the keys of all storing ranks.
#[derive(Clone, Debug)]
pub struct BlockKeys {
    ranks: Vec<RankKeys>,
}

impl BlockKeys {
    /// The keys of a checked deployment.
    pub fn new(deployment: &Deployment, checked: &Checked) -> Result<Self, ConnectorError> {
        let form = if deployment.compatible_keys {
            KeyForm::Compatible
        } else {
            KeyForm::Fingerprinted(deployment.fingerprint(&checked.layout))
        };
        let schema = KeySchema::single_group(&deployment.model, form, Parallelism::default())?;
        let ranks = (0..deployment.storing_ranks)
            .map(|rank| schema.rank(Coordinates::of_rank(rank)))
            .collect::<Result<_, _>>()?;
        Ok(Self { ranks })
    }

    /// Storing ranks: objects per block.
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// The key of a block's object of one storing rank.
    pub fn key(&self, rank: usize, hash: &BlockHash) -> Result<ObjectKey, ConnectorError> {
        let keys = self.ranks.get(rank).ok_or(ConnectorError::Unsupported {
            setting: "storing rank",
            value: rank.to_string(),
            accepted: "it must be below storing_ranks",
        })?;
        Ok(keys.key(hash.as_bytes())?)
    }

    /// The keys of a list of blocks, all storing ranks of the first, then of the second, and so on.
    pub fn block_major(&self, hashes: &[BlockHash]) -> Result<Vec<ObjectKey>, ConnectorError> {
        let mut keys = Vec::with_capacity(hashes.len() * self.ranks.len());
        for hash in hashes {
            for rank in &self.ranks {
                keys.push(rank.key(hash.as_bytes())?);
            }
        }
        Ok(keys)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checks::tests::deployment;
    use crate::options::Options;

    // contract: connector-4
    #[test]
    fn one_object_per_block_and_storing_rank_with_the_fingerprint_in_its_name() {
        let deployment = deployment(2);
        let checked = deployment.check(&Options::default()).expect("covered");
        let keys = BlockKeys::new(&deployment, &checked).expect("keys");
        let hashes = [BlockHash::new(&[1]), BlockHash::new(&[2])];
        let all = keys.block_major(&hashes).expect("keys");
        let print = &checked.identity.fingerprint;
        let expected: Vec<String> = ["01@0", "01@1", "02@0", "02@1"]
            .iter()
            .map(|rest| format!("model@layercake_v1:{print}@{rest}"))
            .collect();
        assert_eq!(
            all.iter().map(ObjectKey::as_str).collect::<Vec<_>>(),
            expected
        );
        assert_eq!(keys.key(1, &hashes[1]).expect("a rank"), all[3]);
        assert!(keys.key(2, &hashes[1]).is_err());

        let plain = Deployment {
            compatible_keys: true,
            ..deployment
        };
        let plain = BlockKeys::new(&plain, &checked).expect("keys");
        assert_eq!(
            plain.key(1, &hashes[0]).expect("a rank").as_str(),
            "model@01@1"
        );
    }
}
