//! One step on one rank: from tokens to logits.

use layercake_connector::contract::BlockId;

use super::attention::Attention;
use super::math::{Rope, add, gated, rms_norm};
use super::weights::{Ends, LayerWeights};
use super::{LayerShape, Logits, ModelConfig};
use crate::cache::PagedCache;
use crate::error::EngineError;
use crate::parallel::Port;

/// One request's tokens in a step.
#[derive(Clone, Debug)]
pub(crate) struct BatchItem {
    pub(crate) tokens: Vec<u32>,
    /// Position of the first of them.
    pub(crate) start: usize,
    pub(crate) table: Vec<BlockId>,
    /// Whether the last token's logits are wanted.
    pub(crate) logits: bool,
}

/// Where the connector comes in.
pub(crate) trait LayerHooks {
    /// Before the layer's cache is touched.
    fn before(&mut self, layer: u32) -> Result<(), EngineError>;

    /// When the layer's cache is written.
    fn written(&mut self, layer: u32) -> Result<(), EngineError>;

    /// When the layer is computed.
    fn computed(&mut self, layer: u32);
}

/// A rank's part of the model, and its cache.
#[derive(Debug)]
pub(crate) struct RankModel {
    ends: Ends,
    layers: Vec<Layer>,
    decoder_layers: usize,
    cache: PagedCache,
}

#[derive(Debug)]
struct Layer {
    shape: LayerShape,
    weights: LayerWeights,
    rope: Rope,
}

impl RankModel {
    /// `room`: the most tokens of a sequence.
    pub(crate) fn new(
        config: &ModelConfig,
        (rank, ranks): (u32, u32),
        room: usize,
        cache: PagedCache,
    ) -> Self {
        let place = (rank as usize, ranks as usize);
        let layers = config.shapes(ranks).into_iter().enumerate();
        let layers = layers.map(|(at, shape)| {
            let mut rope = Rope::new(shape.head_size);
            rope.reach(room);
            Layer {
                weights: LayerWeights::new(config, &shape, at, place),
                rope,
                shape,
            }
        });
        Self {
            ends: Ends::new(config, place.0, place.1),
            layers: layers.collect(),
            decoder_layers: config.layers.len(),
            cache,
        }
    }

    /// Computes a step. One answer an item.
    pub(crate) fn forward(
        &self,
        batch: &[BatchItem],
        port: &mut Port,
        hooks: &mut dyn LayerHooks,
    ) -> Result<Vec<Option<Logits>>, EngineError> {
        let embedded = self.embed(batch);
        let mut x = embedded.clone();
        let mut next = Vec::new();
        for at in 0..self.layers.len() {
            if at == self.decoder_layers {
                next = self.logits(batch, &x, port)?;
                // The extra layer starts from what is known of the token, and the token itself.
                add(&mut x, &embedded);
            }
            self.layer(at, batch, &mut x, port, hooks)?;
        }
        let last = self.logits(batch, &x, port)?;
        let (next, draft) = if self.layers.len() > self.decoder_layers {
            (next, last)
        } else {
            (last, vec![Vec::new(); batch.len()])
        };
        let each = batch.iter().zip(next.into_iter().zip(draft));
        let each = each.map(|(item, (next, draft))| item.logits.then_some(Logits { next, draft }));
        Ok(each.collect())
    }

    fn embed(&self, batch: &[BatchItem]) -> Vec<f32> {
        let embedding = &self.ends.embedding;
        let tokens = batch.iter().flat_map(|item| &item.tokens);
        let rows = tokens.flat_map(|token| {
            let at = *token as usize * embedding.inputs;
            &embedding.weights[at..at + embedding.inputs]
        });
        rows.copied().collect()
    }

    fn layer(
        &self,
        at: usize,
        batch: &[BatchItem],
        x: &mut [f32],
        port: &mut Port,
        hooks: &mut dyn LayerHooks,
    ) -> Result<(), EngineError> {
        let layer = &self.layers[at];
        let number = u32::try_from(at).unwrap_or(u32::MAX);
        let weights = &layer.weights;
        let attention = Attention {
            layer: at,
            shape: &layer.shape,
            weights,
            rope: &layer.rope,
            cache: &self.cache,
        };
        let mut projected = attention.project(&rms_norm(x, &weights.attention_norm));
        hooks.before(number)?;
        let mut row = 0;
        for item in batch {
            for position in item.start..item.start + item.tokens.len() {
                attention.store(&mut projected, row, position, &item.table)?;
                row += 1;
            }
        }
        let width = layer.shape.heads * layer.shape.head_size;
        let mut seen = Vec::with_capacity(projected.q.len());
        let mut queries = &projected.q[..];
        for item in batch {
            let (q, rest) = queries.split_at(item.tokens.len() * width);
            seen.extend(attention.attend(q, item.start, &item.table)?);
            queries = rest;
        }
        hooks.written(number)?;
        let tokens = row;
        let seen = port.gather(&seen, tokens)?;
        let out = port.gather(&weights.out.apply(&seen), tokens)?;
        add(x, &out);
        let normed = rms_norm(x, &weights.mlp_norm);
        let inner = gated(&weights.gate.apply(&normed), &weights.up.apply(&normed));
        let inner = port.gather(&inner, tokens)?;
        let out = port.gather(&weights.down.apply(&inner), tokens)?;
        add(x, &out);
        hooks.computed(number);
        Ok(())
    }

    /// The logits of each item's last token. For those that are not wanted nothing is computed.
    fn logits(
        &self,
        batch: &[BatchItem],
        x: &[f32],
        port: &mut Port,
    ) -> Result<Vec<Vec<f32>>, EngineError> {
        let width = self.ends.norm.len();
        let (mut end, mut last) = (0, Vec::new());
        for item in batch {
            end += item.tokens.len() * width;
            if item.logits {
                last.extend_from_slice(&x[end - width..end]);
            }
        }
        let wanted = last.len() / width;
        let normed = rms_norm(&last, &self.ends.norm);
        let all = port.gather(&self.ends.logits.apply(&normed), wanted)?;
        let mut each = all.chunks_exact((all.len() / wanted.max(1)).max(1));
        let logits = batch.iter().map(|item| {
            let of = if item.logits { each.next() } else { None };
            of.map(<[f32]>::to_vec).unwrap_or_default()
        });
        Ok(logits.collect())
    }
}
