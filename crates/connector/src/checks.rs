//! What is checked before the first request (C5, W15): one clear message each, naming the setting.
//!
//! A [`Deployment`] is what scheduler and workers are both told. [`Deployment::check`] refuses what
//! this connector does not cover, and gives the [`Identity`]: what two sides must have in common,
//! compared by [`Identity::check_peer`] with both values in the message. A difference is an error,
//! never a cold cache.

use layercake_protocol::fingerprint::{Fingerprint, FingerprintFields, TensorParallel};
use layercake_protocol::layout::ObjectLayout;
use layercake_store::StoreClient;
use serde::{Deserialize, Serialize};

use crate::contract::CacheLayout;
use crate::error::ConnectorError;
use crate::options::{Options, Role};

/// How the engine runs its forward pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Execution {
    /// Every layer's hooks run.
    Eager,
    /// Graphs that are cut at attention, so that hooks run between them.
    PiecewiseGraph,
    /// One graph whose replay runs no hook.
    FullGraph {
        /// The engine can fall back to piecewise graphs.
        can_lower: bool,
    },
}

/// What an engine says about itself; the same for scheduler and workers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Deployment {
    /// Namespace of its objects.
    pub tenant: String,
    /// The model's name.
    pub model: String,
    /// Revision or another id of the weights.
    pub revision: String,
    /// Data type of the cache.
    pub kv_dtype: String,
    /// Tokens in a block.
    pub block_size: u32,
    /// Tensor-parallel ranks.
    pub tp_size: u32,
    /// Tensor-parallel ranks whose bytes differ; the others hold copies and store nothing.
    pub storing_ranks: u32,
    /// Pipeline stages.
    pub pp_size: u32,
    /// Prefill-context ranks.
    pub pcp_size: u32,
    /// Decode-context ranks.
    pub dcp_size: u32,
    /// One element per KV cache group.
    pub groups: Vec<CacheLayout>,
    /// Keys in the plain form that other implementations read, without a fingerprint.
    pub compatible_keys: bool,
    /// How the forward pass runs.
    pub execution: Execution,
    /// The engine keeps every chunk's blocks until the request ends. False where it keeps them for a step only:
    /// then committed blocks are loaded again for every later chunk, no block is shared between
    /// requests, and chunks end with whole blocks. Only a producer can do without. Within a step every layer has
    /// memory of its own: caches that layers share are refused when they are registered.
    pub retains_blocks: bool,
}

/// A checked deployment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    /// The layout of a block's object.
    pub layout: ObjectLayout,
    /// What it must have in common with others.
    pub identity: Identity,
    /// How the forward pass has to run: a full graph that could be lowered is.
    pub execution: Execution,
}

/// What two sides must have in common to read each other's blocks. Serialisable, so that workers can
/// send theirs to the scheduler, and engines theirs to each other.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Identity {
    /// Namespace of the objects, as the deployment names it.
    pub tenant: String,
    /// The model's name.
    pub model: String,
    /// Revision or another id of the weights.
    pub revision: String,
    /// Tokens in a block.
    pub block_size: u32,
    /// Data type of the cache.
    pub kv_dtype: String,
    /// Tensor-parallel ranks.
    pub tp_size: u32,
    /// Those that store.
    pub storing_ranks: u32,
    /// Digest of layers, entries and lengths.
    pub layout: String,
    /// The whole deployment's fingerprint, tenant, model and revision included.
    pub fingerprint: String,
    /// Keys without a fingerprint: other names for the same blocks.
    pub compatible_keys: bool,
}

impl Deployment {
    /// Refuses what is not covered, by name.
    pub fn check(&self, options: &Options) -> Result<Checked, ConnectorError> {
        for (setting, value) in [
            ("pipeline_parallel_size", self.pp_size),
            ("prefill_context_parallel_size", self.pcp_size),
            ("decode_context_parallel_size", self.dcp_size),
        ] {
            if value != 1 {
                return Err(unsupported(setting, value, "only 1 is"));
            }
        }
        let [group] = self.groups.as_slice() else {
            return Err(unsupported(
                "number of KV cache groups",
                self.groups.len(),
                "exactly one is",
            ));
        };
        if self.block_size == 0 {
            return Err(unsupported("block_size", 0, "at least 1 token is needed"));
        }
        if self.tp_size == 0 {
            return Err(unsupported(
                "tensor_parallel_size",
                0,
                "at least 1 is needed",
            ));
        }
        if self.storing_ranks == 0 || !self.tp_size.is_multiple_of(self.storing_ranks) {
            return Err(unsupported(
                "storing_ranks",
                self.storing_ranks,
                "it must divide tensor_parallel_size",
            ));
        }
        if !self.retains_blocks && options.role != Role::Producer {
            return Err(unsupported(
                "kv_role",
                options.role.name(),
                "an engine that does not retain blocks loses those that are not whole with every step: only kv_producer is",
            ));
        }
        let layout = group.object()?;
        let fingerprint = self.fingerprint(&layout);
        Ok(Checked {
            identity: Identity {
                tenant: self.tenant.clone(),
                model: self.model.clone(),
                revision: self.revision.clone(),
                block_size: self.block_size,
                kv_dtype: self.kv_dtype.clone(),
                tp_size: self.tp_size,
                storing_ranks: self.storing_ranks,
                layout: layout.digest().to_string(),
                fingerprint: fingerprint.to_string(),
                compatible_keys: self.compatible_keys,
            },
            layout,
            execution: self.lowered(options)?,
        })
    }

    /// The fingerprint of this deployment with objects of this layout.
    pub fn fingerprint(&self, layout: &ObjectLayout) -> Fingerprint {
        FingerprintFields {
            tenant: &self.tenant,
            model: &self.model,
            revision: &self.revision,
            kv_dtype: &self.kv_dtype,
            block_size: self.block_size,
            tensor_parallel: TensorParallel {
                size: self.tp_size,
                storing_ranks: self.storing_ranks,
            },
            layout: layout.digest(),
        }
        .fingerprint()
    }

    /// The storing rank whose bytes a rank has, and whether it is the one that stores them.
    pub fn storing_rank(&self, rank: u32) -> Result<(u32, bool), ConnectorError> {
        if rank >= self.tp_size {
            return Err(unsupported(
                "rank",
                rank,
                "it must be below tensor_parallel_size",
            ));
        }
        let copies = (self.tp_size / self.storing_ranks.max(1)).max(1);
        Ok((rank / copies, rank.is_multiple_of(copies)))
    }

    fn lowered(&self, options: &Options) -> Result<Execution, ConnectorError> {
        match self.execution {
            Execution::FullGraph { can_lower: false } if options.layerwise => Err(unsupported(
                "use_layerwise",
                "true under full-graph execution",
                "a full graph runs no per-layer hook: use eager execution or piecewise graphs, or set use_layerwise to false",
            )),
            Execution::FullGraph { can_lower: true } if options.layerwise => {
                tracing::warn!(
                    "use_layerwise needs per-layer hooks, which a full graph does not run: execution is lowered to piecewise graphs"
                );
                Ok(Execution::PiecewiseGraph)
            }
            execution => Ok(execution),
        }
    }
}

impl Identity {
    /// Refuses a side that differs, naming what and both values.
    pub fn check_peer(&self, theirs: &Self) -> Result<(), ConnectorError> {
        let fields = |of: &Self| {
            [
                ("tenant", of.tenant.clone()),
                ("model", of.model.clone()),
                ("revision", of.revision.clone()),
                ("block_size", of.block_size.to_string()),
                ("KV cache data type", of.kv_dtype.clone()),
                ("tensor_parallel_size", of.tp_size.to_string()),
                ("storing_ranks", of.storing_ranks.to_string()),
                ("cache layout", of.layout.clone()),
                ("fingerprint", of.fingerprint.clone()),
                ("compatible_keys", of.compatible_keys.to_string()),
            ]
        };
        let pairs = fields(self).into_iter().zip(fields(theirs));
        for ((what, ours), (_, theirs)) in pairs {
            if ours != theirs {
                return Err(ConnectorError::Mismatch { what, ours, theirs });
            }
        }
        Ok(())
    }
}

/// Refuses options that this client of the store can't serve, by name.
pub(crate) fn check_client(options: &Options, store: &StoreClient) -> Result<(), ConnectorError> {
    if options.per_layer_readiness && !store.config().checksums {
        return Err(ConnectorError::Contradiction {
            first: "per_layer_readiness = true",
            second: "the store client's checksums = false",
            detail: "without checksums nothing says which layers have landed",
        });
    }
    Ok(())
}

fn unsupported(
    setting: &'static str,
    value: impl std::fmt::Display + Copy,
    accepted: &'static str,
) -> ConnectorError {
    ConnectorError::Unsupported {
        setting,
        value: value.to_string(),
        accepted,
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use layercake_protocol::layout::LayerSpec;

    use super::*;

    /// A deployment of `tp_size` ranks with a few uneven layers.
    pub(crate) fn deployment(tp_size: u32) -> Deployment {
        let layers = vec![
            LayerSpec::new(0, [("k", 64), ("v", 64)]),
            LayerSpec::new(1, [("latent", 24)]),
            LayerSpec::new(2, [("k", 96), ("scale", 8), ("v", 96)]),
        ];
        Deployment {
            tenant: "default".to_owned(),
            model: "model".to_owned(),
            revision: "1".to_owned(),
            kv_dtype: "f32".to_owned(),
            block_size: 4,
            tp_size,
            storing_ranks: tp_size,
            pp_size: 1,
            pcp_size: 1,
            dcp_size: 1,
            groups: vec![CacheLayout { layers }],
            compatible_keys: false,
            execution: Execution::Eager,
            retains_blocks: true,
        }
    }

    fn refusal(change: impl FnOnce(&mut Deployment)) -> String {
        let mut changed = deployment(2);
        change(&mut changed);
        let refused = changed.check(&Options::default());
        refused.expect_err("refused").to_string()
    }

    // contract: connector-1
    #[test]
    fn what_is_not_covered_is_refused_by_name() {
        assert!(refusal(|d| d.pp_size = 2).contains("pipeline_parallel_size = 2"));
        assert!(refusal(|d| d.pcp_size = 2).contains("prefill_context_parallel_size = 2"));
        assert!(refusal(|d| d.dcp_size = 4).contains("decode_context_parallel_size = 4"));
        assert!(refusal(|d| d.groups.clear()).contains("KV cache groups = 0"));
        let two = |d: &mut Deployment| d.groups.push(d.groups[0].clone());
        assert!(refusal(two).contains("KV cache groups = 2"));
        assert!(refusal(|d| d.block_size = 0).contains("block_size"));
        assert!(refusal(|d| d.tp_size = 0).contains("tensor_parallel_size"));
        assert!(refusal(|d| d.storing_ranks = 0).contains("storing_ranks"));
        assert!(refusal(|d| d.storing_ranks = 3).contains("storing_ranks = 3"));
        assert!(refusal(|d| d.groups[0].layers.clear()).contains("layer"));
    }

    #[test]
    fn layerwise_under_a_full_graph_is_refused_or_lowered() {
        let full = |can_lower| Deployment {
            execution: Execution::FullGraph { can_lower },
            ..deployment(1)
        };
        let layerwise = Options::default();
        let error = full(false)
            .check(&layerwise)
            .expect_err("no hooks run")
            .to_string();
        assert!(
            error.contains("use_layerwise") && error.contains("piecewise"),
            "{error}"
        );
        let lowered = full(true).check(&layerwise).expect("lowered");
        assert_eq!(lowered.execution, Execution::PiecewiseGraph);
        let whole = Options {
            layerwise: false,
            ..Options::default()
        };
        let kept = full(false).check(&whole).expect("no hooks are needed");
        assert_eq!(kept.execution, full(false).execution);
    }

    // contract: connector-2
    #[test]
    fn peers_that_differ_are_refused_with_both_values() {
        let options = Options::default();
        let ours = deployment(2).check(&options).expect("covered").identity;
        ours.check_peer(&ours.clone()).expect("equal");
        let compare = |change: fn(&mut Deployment)| {
            let mut other = deployment(2);
            change(&mut other);
            let theirs = other.check(&options).expect("covered").identity;
            ours.check_peer(&theirs)
                .expect_err("they differ")
                .to_string()
        };
        assert_eq!(
            compare(|d| d.block_size = 8),
            "block_size differs: 4 here, 8 there"
        );
        assert_eq!(
            compare(|d| d.kv_dtype = "f16".to_owned()),
            "KV cache data type differs: f32 here, f16 there"
        );
        let tp = compare(|d| {
            d.tp_size = 4;
            d.storing_ranks = 4;
        });
        assert_eq!(tp, "tensor_parallel_size differs: 2 here, 4 there");
        assert!(compare(|d| d.storing_ranks = 1).contains("storing_ranks differs: 2"));
        let layout = |d: &mut Deployment| d.groups[0].layers[1].entries[0].len = 25;
        assert!(compare(layout).contains("cache layout differs"));
        let revision = compare(|d| d.revision = "2".to_owned());
        assert_eq!(revision, "revision differs: 1 here, 2 there");
        let model = compare(|d| d.model = "m".to_owned());
        assert_eq!(model, "model differs: model here, m there");
        let tenant = compare(|d| d.tenant = "other".to_owned());
        assert_eq!(tenant, "tenant differs: default here, other there");
        let keys = compare(|d| d.compatible_keys = true);
        assert_eq!(keys, "compatible_keys differs: false here, true there");
    }

    #[test]
    fn copies_of_a_rank_store_nothing() {
        let deployment = Deployment {
            storing_ranks: 2,
            ..deployment(4)
        };
        let ranks: Vec<_> = (0..4)
            .map(|r| deployment.storing_rank(r).expect("a rank"))
            .collect();
        assert_eq!(ranks, [(0, true), (0, false), (1, true), (1, false)]);
        assert!(deployment.storing_rank(4).is_err());
    }
}
