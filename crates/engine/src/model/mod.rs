//! The transformer.
//!
//! RMS norm, rotary embedding, grouped-query attention over the paged cache, gated MLP; all in `f32`.
//! Layers differ in what they cache, on purpose: plain keys and values, a latent vector from which both
//! are projected when they are read, or bytes with a scale. Behind the last layer an extra one may
//! predict the token after the next, with heads of half the size.
//!
//! Order of operations: each output is one sum over a whole input vector, in an order that depends on
//! the vector's length alone; attention sums over positions in ascending order. Ranks compute disjoint
//! outputs and put them together; nothing is summed across ranks. So neither chunks nor batches nor the
//! number of ranks change a bit.

mod attention;
mod forward;
mod math;
mod weights;

pub(crate) use forward::{BatchItem, LayerHooks, RankModel};

use layercake_connector::contract::CacheLayout;
use layercake_protocol::layout::LayerSpec;

use crate::error::EngineError;

/// Bytes of a float in the cache.
const FLOAT: u64 = 4;

/// What a layer keeps of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerKind {
    /// Keys and values as floats: two entries of equal length.
    Full,
    /// One vector of so many floats, the same on all ranks, from which keys and values are projected.
    Latent(u32),
    /// Keys and values in bytes, and a third entry with their scales.
    Quantised,
}

/// The size of a model, and the seed of its weights.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelConfig {
    /// What each decoder layer is.
    pub layers: Vec<LayerKind>,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads; divides `heads`.
    pub kv_heads: u32,
    /// Floats of a head; a multiple of 4.
    pub head_size: u32,
    /// Floats of the MLP's inner vector.
    pub mlp: u32,
    /// Number of tokens.
    pub vocab: u32,
    /// Whether an extra layer predicts the token after the next.
    pub draft_layer: bool,
    /// Makes the weights.
    pub seed: u64,
}

/// What a token takes in one entry of a layer's cache, on one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EntryShape {
    pub(crate) name: &'static str,
    pub(crate) token_bytes: u64,
}

/// One layer's shape on one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LayerShape {
    pub(crate) kind: LayerKind,
    /// Of this rank.
    pub(crate) heads: usize,
    /// Of this rank.
    pub(crate) kv_heads: usize,
    pub(crate) head_size: usize,
}

impl ModelConfig {
    /// A model for tests: five layers of all kinds and the extra one; a token takes a few microseconds.
    pub fn tiny(seed: u64) -> Self {
        Self {
            layers: vec![
                LayerKind::Full,
                LayerKind::Latent(12),
                LayerKind::Quantised,
                LayerKind::Full,
                LayerKind::Quantised,
            ],
            heads: 4,
            kv_heads: 4,
            head_size: 8,
            mlp: 48,
            vocab: 96,
            draft_layer: true,
            seed,
        }
    }

    /// A model for a demonstration: computing a prompt takes visibly longer than loading it.
    pub fn small(seed: u64) -> Self {
        Self {
            layers: (0..8)
                .map(|layer| match layer % 4 {
                    1 => LayerKind::Quantised,
                    3 => LayerKind::Latent(48),
                    _ => LayerKind::Full,
                })
                .collect(),
            heads: 8,
            kv_heads: 4,
            head_size: 16,
            mlp: 384,
            vocab: 512,
            draft_layer: true,
            seed,
        }
    }

    /// Floats of a token's hidden vector.
    pub fn hidden(&self) -> usize {
        (self.heads * self.head_size) as usize
    }

    /// All layers that have a cache, the extra one included.
    pub fn cached_layers(&self) -> usize {
        self.layers.len() + usize::from(self.draft_layer)
    }

    /// Refuses what can't be computed by `ranks` ranks.
    pub fn check(&self, ranks: u32) -> Result<(), EngineError> {
        let refuse = |name, value: u32, accepted: String| EngineError::Setting {
            name,
            value: value.to_string(),
            accepted,
        };
        if self.layers.is_empty() {
            return Err(refuse("layers", 0, "at least one is needed".to_owned()));
        }
        if ranks == 0 {
            return Err(refuse("ranks", 0, "at least one is needed".to_owned()));
        }
        for (name, value) in [
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("mlp", self.mlp),
            ("vocab", self.vocab),
        ] {
            if value == 0 || !value.is_multiple_of(ranks) {
                return Err(refuse(
                    name,
                    value,
                    format!("a multiple of {ranks} ranks is"),
                ));
            }
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let accepted = format!("a multiple of kv_heads = {} is", self.kv_heads);
            return Err(refuse("heads", self.heads, accepted));
        }
        if self.head_size == 0 || !self.head_size.is_multiple_of(4) {
            return Err(refuse(
                "head_size",
                self.head_size,
                "a multiple of 4 is".to_owned(),
            ));
        }
        Ok(())
    }

    /// The shapes of all cached layers on one of `ranks` ranks.
    pub(crate) fn shapes(&self, ranks: u32) -> Vec<LayerShape> {
        let (heads, kv_heads) = (
            (self.heads / ranks) as usize,
            (self.kv_heads / ranks) as usize,
        );
        let shape = |kind, head_size| LayerShape {
            kind,
            heads,
            kv_heads,
            head_size,
        };
        let mut shapes: Vec<_> = self
            .layers
            .iter()
            .map(|kind| shape(*kind, self.head_size as usize))
            .collect();
        if self.draft_layer {
            shapes.push(shape(LayerKind::Full, self.head_size as usize / 2));
        }
        shapes
    }

    /// What a block of `block_size` tokens holds on one of `ranks` ranks.
    pub fn cache_layout(&self, ranks: u32, block_size: u32) -> CacheLayout {
        let layers = self
            .shapes(ranks)
            .into_iter()
            .zip(0..)
            .map(|(shape, layer)| {
                let entries = shape.entries().into_iter();
                let entries = entries.map(|e| (e.name, e.token_bytes * u64::from(block_size)));
                LayerSpec::new(layer, entries)
            });
        CacheLayout {
            layers: layers.collect(),
        }
    }

    /// What names these weights: two models that differ in anything have different names.
    pub fn revision(&self) -> String {
        let layers = self.layers.iter().map(|kind| match kind {
            LayerKind::Full => "f".to_owned(),
            LayerKind::Latent(size) => format!("l{size}"),
            LayerKind::Quantised => "q".to_owned(),
        });
        format!(
            "{}-h{}-k{}-s{}-m{}-v{}-d{}-seed{}",
            layers.collect::<String>(),
            self.heads,
            self.kv_heads,
            self.head_size,
            self.mlp,
            self.vocab,
            u8::from(self.draft_layer),
            self.seed
        )
    }
}

impl LayerShape {
    /// The entries in the order in which this engine keeps them.
    pub(crate) fn entries(&self) -> Vec<EntryShape> {
        let floats = (self.kv_heads * self.head_size) as u64;
        let entry = |name, token_bytes| EntryShape { name, token_bytes };
        match self.kind {
            LayerKind::Full => vec![entry("k", floats * FLOAT), entry("v", floats * FLOAT)],
            LayerKind::Latent(size) => vec![entry("latent", u64::from(size) * FLOAT)],
            LayerKind::Quantised => vec![
                entry("k", floats),
                entry("v", floats),
                entry("scale", self.kv_heads as u64 * 2 * FLOAT),
            ],
        }
    }
}

/// What the model says about the token after a position, and the one after that.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Logits {
    pub(crate) next: Vec<f32>,
    pub(crate) draft: Vec<f32>,
}

impl Logits {
    /// The likeliest next token; the first of several.
    pub(crate) fn best(&self) -> u32 {
        let mut best = (0, f32::NEG_INFINITY);
        for (token, &value) in (0..).zip(&self.next) {
            if value > best.1 {
                best = (token, value);
            }
        }
        best.0
    }

    /// A digest of every bit.
    pub(crate) fn digest(&self) -> LogitsDigest {
        let mut hash = blake3::Hasher::new();
        for value in self.next.iter().chain(&self.draft) {
            hash.update(&value.to_bits().to_le_bytes());
        }
        LogitsDigest(*hash.finalize().as_bytes())
    }
}

/// A digest of a position's logits: equal if every bit of them is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct LogitsDigest(pub [u8; 32]);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_ranks_can_t_share_are_refused_by_name() {
        let refused = |ranks, change: fn(&mut ModelConfig)| {
            let mut config = ModelConfig::tiny(1);
            change(&mut config);
            config.check(ranks).expect_err("refused").to_string()
        };
        assert!(refused(8, |_| ()).contains("heads = 4"));
        assert!(refused(2, |c| c.kv_heads = 1).contains("kv_heads = 1"));
        assert!(refused(1, |c| c.kv_heads = 3).contains("heads = 4"));
        assert!(refused(1, |c| c.head_size = 6).contains("head_size = 6"));
        assert!(refused(2, |c| c.vocab = 95).contains("vocab = 95"));
        assert!(refused(1, |c| c.layers.clear()).contains("layers"));
        assert!(refused(0, |_| ()).contains("ranks"));
        ModelConfig::tiny(1).check(4).expect("four heads");
        ModelConfig::small(1).check(4).expect("four heads");
    }

    #[test]
    fn layers_differ_in_number_and_length_of_entries() {
        let layout = ModelConfig::tiny(1).cache_layout(1, 4);
        let lens: Vec<Vec<u64>> = layout
            .layers
            .iter()
            .map(|layer| layer.entries.iter().map(|entry| entry.len).collect())
            .collect();
        assert_eq!(lens[0], [512, 512]);
        assert_eq!(lens[1], [192]);
        assert_eq!(lens[2], [128, 128, 128]);
        assert_eq!(lens[5], [256, 256]);
        layout.object().expect("a layout");
    }

    #[test]
    fn every_size_is_in_the_revision() {
        let of = |change: fn(&mut ModelConfig)| {
            let mut config = ModelConfig::tiny(1);
            change(&mut config);
            config.revision()
        };
        let all = [
            of(|_| ()),
            of(|c| c.seed = 2),
            of(|c| c.layers[0] = LayerKind::Quantised),
            of(|c| c.layers[1] = LayerKind::Latent(13)),
            of(|c| c.vocab = 97),
            of(|c| c.draft_layer = false),
        ];
        let distinct: std::collections::HashSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
    }
}
