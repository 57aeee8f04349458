//! The keys and the header size of a replay's blocks.

use anyhow::{Context as _, Result};
use layercake_protocol::fingerprint::{Fingerprint, FingerprintFields, TensorParallel};
use layercake_protocol::header::{HeaderSpec, MAX_ROWS};
use layercake_protocol::key::{Coordinates, KeyForm, KeySchema, ObjectKey, Parallelism, RankKeys};
use layercake_protocol::layout::ObjectLayout;

/// Tokens of a block in the traces.
pub(crate) const BLOCK_TOKENS: u32 = 512;

/// The model of all runs.
pub(crate) const MODEL: &str = "replay";

/// Makes the keys of one run.
#[derive(Clone, Debug)]
pub(crate) struct BlockKeys {
    keys: RankKeys,
    fingerprint: Fingerprint,
    rows: u32,
    tenant_len: usize,
}

impl BlockKeys {
    /// The keys of the run with this name: runs of another name or layout share nothing with it.
    pub(crate) fn new(tenant: &str, run: &str, layout: &ObjectLayout) -> Result<Self> {
        let fingerprint = FingerprintFields {
            tenant,
            model: MODEL,
            revision: run,
            kv_dtype: "pattern",
            block_size: BLOCK_TOKENS,
            tensor_parallel: TensorParallel {
                size: 1,
                storing_ranks: 1,
            },
            layout: layout.digest(),
        }
        .fingerprint();
        let form = KeyForm::Fingerprinted(fingerprint);
        let keys = KeySchema::single_group(MODEL, form, Parallelism::default())
            .and_then(|schema| schema.rank(Coordinates::of_rank(0)))
            .context("the replay's keys can't be made")?;
        let entries: usize = (0..layout.layer_count())
            .map(|layer| layout.entry_count(layer))
            .sum();
        // One range per (layer, entry); with more than a header holds, some are not verified by the
        // store, but all are by the replay.
        let rows = u32::try_from(entries.min(MAX_ROWS)).context("too many cache entries")?;
        Ok(Self {
            keys,
            fingerprint,
            rows,
            tenant_len: tenant.len(),
        })
    }

    /// The keys of these blocks.
    pub(crate) fn of(&self, ids: &[u64]) -> Result<Vec<ObjectKey>> {
        ids.iter()
            .map(|id| {
                self.keys
                    .key(&id.to_be_bytes())
                    .context("a block has no key")
            })
            .collect()
    }

    pub(crate) fn fingerprint(&self) -> Fingerprint {
        self.fingerprint
    }

    /// Rows of an object's table of written ranges.
    pub(crate) fn rows(&self) -> u32 {
        self.rows
    }

    /// What decides the header's length.
    pub(crate) fn header(&self) -> Result<HeaderSpec> {
        let [key] = &self.of(&[0])?[..] else {
            anyhow::bail!("one block has one key");
        };
        Ok(HeaderSpec {
            tenant_len: self.tenant_len,
            key_len: key.as_str().len(),
            group_len: 0,
            rows: self.rows as usize,
        })
    }
}

#[cfg(test)]
mod tests {
    use layercake_protocol::layout::ModelGeometry;

    use super::*;

    #[test]
    fn runs_layouts_and_tenants_have_keys_of_their_own_and_all_are_of_one_length() {
        let layout = |text: &str| {
            ModelGeometry::parse_layer_entries(text)
                .expect("a geometry")
                .layout()
                .clone()
        };
        let (a, b) = (
            layout("0-7:1024,1024;8:512,2048"),
            layout("0-7:1024,1024;8:2048,512"),
        );
        let key = |tenant, run, layout| {
            BlockKeys::new(tenant, run, layout)
                .and_then(|keys| keys.of(&[7]))
                .expect("a key")
        };
        let all = [
            key("default", "x", &a),
            key("default", "y", &a),
            key("other", "x", &a),
            key("default", "x", &b),
        ];
        for (i, one) in all.iter().enumerate() {
            assert!(all[..i].iter().all(|other| other != one));
        }
        let keys = BlockKeys::new("default", "x", &a).expect("keys");
        assert_eq!(keys.rows(), 18);
        let few_many = keys.of(&[0, u64::MAX]).expect("keys");
        assert_eq!(few_many[0].as_str().len(), few_many[1].as_str().len());
    }
}
