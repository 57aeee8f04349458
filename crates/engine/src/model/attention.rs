//! Attention over the paged cache, and what it caches.
//!
//! A step's tokens are written to the cache first and then read back with all that came before: so what
//! a token attends to are always the cache's bytes, whether this step wrote them, an earlier one, or a
//! transfer.

use layercake_connector::contract::BlockId;

use super::math::{Rope, dot};
use super::weights::{Cached, LayerWeights};
use super::{LayerKind, LayerShape};
use crate::cache::PagedCache;
use crate::error::EngineError;

/// Steps of a quantised number to each side of zero.
const STEPS: f32 = 127.0;

/// One sequence's keys or values, position after position, all heads of this rank.
struct Read {
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// What attention needs of a layer.
pub(super) struct Attention<'a> {
    pub(super) layer: usize,
    pub(super) shape: &'a LayerShape,
    pub(super) weights: &'a LayerWeights,
    pub(super) rope: &'a Rope,
    pub(super) cache: &'a PagedCache,
}

/// What a step's tokens bring to a layer: made before the layer's cache is touched.
pub(super) struct Projected {
    pub(super) q: Vec<f32>,
    /// Keys, or latent vectors.
    first: Vec<f32>,
    /// Values, if they are cached.
    second: Vec<f32>,
}

impl Attention<'_> {
    /// Queries and what will be cached, for tokens with normed hidden vectors `x`.
    pub(super) fn project(&self, x: &[f32]) -> Projected {
        let (first, second) = match &self.weights.cached {
            Cached::KeysAndValues { k, v } => (k.apply(x), v.apply(x)),
            Cached::Latent { down, .. } => (down.apply(x), Vec::new()),
        };
        Projected {
            q: self.weights.q.apply(x),
            first,
            second,
        }
    }

    /// Writes one token's row of `projected`, and turns its queries.
    pub(super) fn store(
        &self,
        projected: &mut Projected,
        row: usize,
        position: usize,
        table: &[BlockId],
    ) -> Result<(), EngineError> {
        let q = self.shape.heads * self.shape.head_size;
        self.rope.turn(position, &mut projected.q[row * q..][..q]);
        let write = |entry, bytes: &[u8]| {
            self.cache
                .write((self.layer, entry), table, position, bytes)
        };
        if let LayerKind::Latent(size) = self.shape.kind {
            let size = size as usize;
            return write(0, &to_bytes(&projected.first[row * size..][..size]));
        }
        let kv = self.shape.kv_heads * self.shape.head_size;
        let keys = &mut projected.first[row * kv..][..kv];
        self.rope.turn(position, keys);
        let values = &projected.second[row * kv..][..kv];
        if self.shape.kind == LayerKind::Full {
            write(0, &to_bytes(keys))?;
            return write(1, &to_bytes(values));
        }
        let mut scales = Vec::with_capacity(2 * self.shape.kv_heads);
        for (entry, floats) in [(0, &*keys), (1, values)] {
            let mut bytes = Vec::with_capacity(kv);
            for head in floats.chunks_exact(self.shape.head_size) {
                scales.push(quantise(head, &mut bytes));
            }
            write(entry, &bytes)?;
        }
        write(2, &to_bytes(&scales))
    }

    fn read(&self, table: &[BlockId], tokens: usize) -> Result<Read, EngineError> {
        let bytes = |entry| self.cache.read((self.layer, entry), table, tokens);
        Ok(match (&self.weights.cached, self.shape.kind) {
            (Cached::Latent { k, v, .. }, _) => {
                let latent = to_floats(&bytes(0)?);
                let mut keys = k.apply(&latent);
                for (position, keys) in keys.chunks_exact_mut(k.rows()).enumerate() {
                    self.rope.turn(position, keys);
                }
                Read {
                    keys,
                    values: v.apply(&latent),
                }
            }
            (_, LayerKind::Quantised) => {
                let scales = to_floats(&bytes(2)?);
                let floats = |bytes: &[u8], second: bool| {
                    let heads = bytes.chunks_exact(self.shape.head_size);
                    let kv = self.shape.kv_heads;
                    let values = heads.enumerate().flat_map(|(at, head)| {
                        let at = at / kv * 2 * kv + at % kv + usize::from(second) * kv;
                        let scale = scales[at];
                        head.iter()
                            .map(move |byte| f32::from(byte.cast_signed()) * scale)
                    });
                    values.collect()
                };
                Read {
                    keys: floats(&bytes(0)?, false),
                    values: floats(&bytes(1)?, true),
                }
            }
            _ => Read {
                keys: to_floats(&bytes(0)?),
                values: to_floats(&bytes(1)?),
            },
        })
    }

    /// What this rank's heads see, for the tokens from position `start` on whose queries are `q`.
    pub(super) fn attend(
        &self,
        q: &[f32],
        start: usize,
        table: &[BlockId],
    ) -> Result<Vec<f32>, EngineError> {
        let (size, kv_heads) = (self.shape.head_size, self.shape.kv_heads);
        let width = self.shape.heads * size;
        let tokens = q.len() / width;
        let read = self.read(table, start + tokens)?;
        let group = self.shape.heads / kv_heads;
        let scale = 1.0 / (size as f32).sqrt();
        let mut out = vec![0.0; q.len()];
        let mut weights = Vec::with_capacity(start + tokens);
        for token in 0..tokens {
            for head in 0..self.shape.heads {
                let at = token * width + head * size;
                let (q, out) = (&q[at..at + size], &mut out[at..at + size]);
                let of = |all: &'_ [f32], position: usize| {
                    let at = (position * kv_heads + head / group) * size;
                    at..(at + size).min(all.len())
                };
                weights.clear();
                let seen = 0..=start + token;
                weights.extend(seen.map(|at| dot(q, &read.keys[of(&read.keys, at)]) * scale));
                softmax(&mut weights);
                for (position, weight) in weights.iter().enumerate() {
                    let values = &read.values[of(&read.values, position)];
                    for (out, value) in out.iter_mut().zip(values) {
                        *out += weight * value;
                    }
                }
            }
        }
        Ok(out)
    }
}

fn softmax(weights: &mut [f32]) {
    let most = weights.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut sum = 0.0;
    for weight in &mut *weights {
        *weight = (*weight - most).exp();
        sum += *weight;
    }
    for weight in weights {
        *weight /= sum;
    }
}

/// Appends one head in bytes, and gives what one of them stands for.
fn quantise(head: &[f32], bytes: &mut Vec<u8>) -> f32 {
    let most = head
        .iter()
        .fold(0.0_f32, |most, value| most.max(value.abs()));
    let scale = if most > 0.0 { most / STEPS } else { 1.0 };
    for value in head {
        #[expect(
            clippy::cast_possible_truncation,
            reason = "between -127 and 127, rounded; a value that is no number becomes 0"
        )]
        let step = (value / scale).round() as i8;
        bytes.push(step.cast_unsigned());
    }
    scale
}

fn to_bytes(floats: &[f32]) -> Vec<u8> {
    floats
        .iter()
        .flat_map(|float| float.to_le_bytes())
        .collect()
}

fn to_floats(bytes: &[u8]) -> Vec<f32> {
    let (floats, _) = bytes.as_chunks::<4>();
    floats
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_sum_to_one_and_the_largest_stays_so() {
        let mut weights = vec![1000.0, 1001.0, 999.0];
        softmax(&mut weights);
        assert!((weights.iter().sum::<f32>() - 1.0).abs() < 1e-6);
        assert!(weights[1] > weights[0] && weights[0] > weights[2]);
    }

    #[test]
    fn quantised_heads_are_close_to_what_they_were() {
        let head = [0.5, -1.0, 0.25, 0.0];
        let mut bytes = Vec::new();
        let scale = quantise(&head, &mut bytes);
        for (byte, value) in bytes.iter().zip(head) {
            assert!((f32::from(byte.cast_signed()) * scale - value).abs() <= scale);
        }
        let mut bytes = Vec::new();
        assert!((quantise(&[0.0, 0.0], &mut bytes) - 1.0).abs() < f32::EPSILON);
        assert_eq!(bytes, [0, 0]);
        let void = quantise(&[f32::NAN], &mut bytes);
        assert!(
            void.is_finite(),
            "bytes of a load that failed may be anything"
        );
    }
}
