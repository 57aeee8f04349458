//! Weights from a seed. A row depends on the model's seed, its layer, its matrix and its place only, so
//! that a rank makes just the rows it needs, and all ranks together have the model that one would have.

use std::ops::Range;

use super::math::Matrix;
use super::{LayerKind, LayerShape, ModelConfig};

/// One layer's weights on one rank.
#[derive(Debug)]
pub(super) struct LayerWeights {
    pub(super) attention_norm: Vec<f32>,
    pub(super) q: Matrix,
    /// From the hidden vector to what is cached: keys and values, or the latent vector.
    pub(super) cached: Cached,
    /// From all heads to this rank's part of the hidden vector.
    pub(super) out: Matrix,
    pub(super) mlp_norm: Vec<f32>,
    pub(super) gate: Matrix,
    pub(super) up: Matrix,
    pub(super) down: Matrix,
}

#[derive(Debug)]
pub(super) enum Cached {
    KeysAndValues { k: Matrix, v: Matrix },
    Latent { down: Matrix, k: Matrix, v: Matrix },
}

/// What stands around the layers.
#[derive(Debug)]
pub(super) struct Ends {
    /// A token's first vector, all tokens.
    pub(super) embedding: Matrix,
    pub(super) norm: Vec<f32>,
    /// From a hidden vector to this rank's part of the logits.
    pub(super) logits: Matrix,
}

/// Names of matrices; numbers, because they are mixed into the seed.
#[derive(Clone, Copy)]
enum Name {
    Embedding = 1,
    Logits,
    Norm,
    AttentionNorm,
    Q,
    K,
    V,
    Latent,
    Out,
    MlpNorm,
    Gate,
    Up,
    Down,
}

struct Maker {
    seed: u64,
    layer: u64,
}

impl Maker {
    fn row(&self, name: Name, row: usize, len: usize, scale: f32, out: &mut Vec<f32>) {
        let start = [self.layer, name as u64, row as u64]
            .into_iter()
            .fold(mix(self.seed), |state, part| mix(state ^ mix(part)));
        for at in 0..len as u64 {
            out.push(unit(mix(start.wrapping_add(at))) * scale);
        }
    }

    fn matrix(&self, name: Name, rows: Range<usize>, inputs: usize) -> Matrix {
        // Keeps the variance of what goes through.
        let scale = (3.0 / inputs as f32).sqrt();
        let mut weights = Vec::with_capacity(rows.len() * inputs);
        for row in rows {
            self.row(name, row, inputs, scale, &mut weights);
        }
        Matrix { weights, inputs }
    }

    fn norm(&self, name: Name, len: usize) -> Vec<f32> {
        let mut scale = Vec::with_capacity(len);
        self.row(name, 0, len, 0.25, &mut scale);
        for scale in &mut scale {
            *scale += 1.0;
        }
        scale
    }
}

/// The finaliser of a well-known generator: every bit of the input changes half of the output's.
fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// A number between -1 and 1.
fn unit(bits: u64) -> f32 {
    // 24 bits are exact in a float.
    (bits >> 40) as f32 / 8_388_608.0 - 1.0
}

/// A rank's share of `all` rows.
pub(super) fn share(all: usize, rank: usize, ranks: usize) -> Range<usize> {
    let each = all / ranks;
    rank * each..(rank + 1) * each
}

impl LayerWeights {
    pub(super) fn new(
        config: &ModelConfig,
        shape: &LayerShape,
        layer: usize,
        (rank, ranks): (usize, usize),
    ) -> Self {
        let maker = Maker {
            seed: config.seed,
            layer: layer as u64 + 1,
        };
        let (hidden, size) = (config.hidden(), shape.head_size);
        let heads = |own: usize| rank * own * size..(rank + 1) * own * size;
        let all_heads = shape.heads * ranks * size;
        let cached = match shape.kind {
            LayerKind::Full | LayerKind::Quantised => Cached::KeysAndValues {
                k: maker.matrix(Name::K, heads(shape.kv_heads), hidden),
                v: maker.matrix(Name::V, heads(shape.kv_heads), hidden),
            },
            LayerKind::Latent(latent) => Cached::Latent {
                down: maker.matrix(Name::Latent, 0..latent as usize, hidden),
                k: maker.matrix(Name::K, heads(shape.kv_heads), latent as usize),
                v: maker.matrix(Name::V, heads(shape.kv_heads), latent as usize),
            },
        };
        let mlp = config.mlp as usize;
        Self {
            attention_norm: maker.norm(Name::AttentionNorm, hidden),
            q: maker.matrix(Name::Q, heads(shape.heads), hidden),
            cached,
            out: maker.matrix(Name::Out, share(hidden, rank, ranks), all_heads),
            mlp_norm: maker.norm(Name::MlpNorm, hidden),
            gate: maker.matrix(Name::Gate, share(mlp, rank, ranks), hidden),
            up: maker.matrix(Name::Up, share(mlp, rank, ranks), hidden),
            down: maker.matrix(Name::Down, share(hidden, rank, ranks), mlp),
        }
    }
}

impl Ends {
    pub(super) fn new(config: &ModelConfig, rank: usize, ranks: usize) -> Self {
        let maker = Maker {
            seed: config.seed,
            layer: 0,
        };
        let (hidden, vocab) = (config.hidden(), config.vocab as usize);
        Self {
            embedding: maker.matrix(Name::Embedding, 0..vocab, hidden),
            norm: maker.norm(Name::Norm, hidden),
            logits: maker.matrix(Name::Logits, share(vocab, rank, ranks), hidden),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_together_have_the_whole_model() {
        let config = ModelConfig::tiny(7);
        let whole = Ends::new(&config, 0, 1);
        let parts: Vec<f32> = (0..4)
            .flat_map(|rank| Ends::new(&config, rank, 4).logits.weights)
            .collect();
        assert_eq!(whole.logits.weights, parts);
        let shape = |ranks| config.shapes(ranks).remove(1);
        let whole = LayerWeights::new(&config, &shape(1), 1, (0, 1));
        let parts: Vec<f32> = (0..2)
            .flat_map(|rank| {
                LayerWeights::new(&config, &shape(2), 1, (rank, 2))
                    .q
                    .weights
            })
            .collect();
        assert_eq!(whole.q.weights, parts);
        assert!(whole.q.weights.iter().any(|w| *w < -0.1));
        assert!(whole.q.weights.iter().any(|w| *w > 0.1));
    }

    #[test]
    fn seeds_and_layers_have_weights_of_their_own() {
        let of = |seed, layer| {
            let config = ModelConfig::tiny(seed);
            LayerWeights::new(&config, &config.shapes(1)[0], layer, (0, 1))
                .q
                .weights
        };
        assert_eq!(of(1, 0), of(1, 0));
        assert_ne!(of(1, 0), of(2, 0));
        assert_ne!(of(1, 0), of(1, 3));
    }
}
