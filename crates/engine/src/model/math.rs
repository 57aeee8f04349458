//! Vectors and matrices. Every sum has one order that depends on its length alone.

/// Lanes of a sum: enough for the compiler to use vector instructions.
const LANES: usize = 8;

/// The sum of products.
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let ((a, a_rest), (b, b_rest)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    let mut lanes = [0.0_f32; LANES];
    for (a, b) in a.iter().zip(b) {
        for lane in 0..LANES {
            lanes[lane] += a[lane] * b[lane];
        }
    }
    let mut sum = 0.0;
    for lane in lanes {
        sum += lane;
    }
    for (a, b) in a_rest.iter().zip(b_rest) {
        sum += a * b;
    }
    sum
}

/// Rows of weights; a token's vector times each of them.
#[derive(Clone, Debug)]
pub(super) struct Matrix {
    pub(super) weights: Vec<f32>,
    pub(super) inputs: usize,
}

impl Matrix {
    pub(super) fn rows(&self) -> usize {
        self.weights.len() / self.inputs
    }

    /// Applies it to the vectors of several tokens, one after the other in `x`.
    pub(super) fn apply(&self, x: &[f32]) -> Vec<f32> {
        let (rows, tokens) = (self.rows(), x.len() / self.inputs);
        let mut out = vec![0.0; tokens * rows];
        for (row, weights) in self.weights.chunks_exact(self.inputs).enumerate() {
            for (token, x) in x.chunks_exact(self.inputs).enumerate() {
                out[token * rows + row] = dot(weights, x);
            }
        }
        out
    }
}

/// Divides each token's vector by its root mean square, and scales it.
pub(super) fn rms_norm(x: &[f32], scale: &[f32]) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len());
    for x in x.chunks_exact(scale.len()) {
        let mean = dot(x, x) / x.len() as f32;
        let factor = 1.0 / (mean + 1e-6).sqrt();
        out.extend(x.iter().zip(scale).map(|(x, scale)| x * factor * scale));
    }
    out
}

/// `a += b`
pub(super) fn add(a: &mut [f32], b: &[f32]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a += b;
    }
}

/// The gate of the MLP: `silu(gate) * up`.
pub(super) fn gated(gate: &[f32], up: &[f32]) -> Vec<f32> {
    let pairs = gate.iter().zip(up);
    pairs.map(|(g, u)| g / (1.0 + (-g).exp()) * u).collect()
}

/// Angles of the rotary embedding for heads of one size, by position.
#[derive(Clone, Debug)]
pub(super) struct Rope {
    half: usize,
    /// Cosine and sine of each pair, position after position.
    turns: Vec<(f32, f32)>,
}

impl Rope {
    pub(super) fn new(head_size: usize) -> Self {
        Self {
            half: head_size / 2,
            turns: Vec::new(),
        }
    }

    /// Knows the angles of at least so many positions from here on.
    pub(super) fn reach(&mut self, positions: usize) {
        for position in self.turns.len() / self.half..positions {
            for pair in 0..self.half {
                let exponent = pair as f64 / self.half as f64;
                let angle = position as f64 * 10_000_f64.powf(-exponent);
                self.turns.push((narrow(angle.cos()), narrow(angle.sin())));
            }
        }
    }

    /// Turns all heads of one token.
    pub(super) fn turn(&self, position: usize, heads: &mut [f32]) {
        let turns = &self.turns[position * self.half..][..self.half];
        for head in heads.chunks_exact_mut(2 * self.half) {
            let (first, second) = head.split_at_mut(self.half);
            for ((a, b), (cos, sin)) in first.iter_mut().zip(second).zip(turns) {
                (*a, *b) = (*a * cos - *b * sin, *a * sin + *b * cos);
            }
        }
    }
}

fn narrow(value: f64) -> f32 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "rounding to the nearest float is what is wanted"
    )]
    let narrow = value as f32;
    narrow
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sum_has_all_its_terms() {
        for len in 0..20_u8 {
            let a: Vec<f32> = (0..len).map(f32::from).collect();
            let sum: u32 = (0..u32::from(len)).map(|n| n * n).sum();
            assert!(
                (f64::from(dot(&a, &a)) - f64::from(sum)).abs() < 1e-9,
                "{len}"
            );
        }
    }

    #[test]
    fn a_token_s_result_does_not_depend_on_its_neighbours() {
        let weights = (0..35_u8).map(|n| f32::from(n).sin()).collect();
        let matrix = Matrix { weights, inputs: 7 };
        let x: Vec<f32> = (0..21_u8).map(|n| f32::from(n).cos()).collect();
        let together = matrix.apply(&x);
        let alone: Vec<f32> = x.chunks(7).flat_map(|x| matrix.apply(x)).collect();
        assert_eq!(together, alone);
        assert_eq!(matrix.rows(), 5);
    }

    #[test]
    fn a_turn_keeps_lengths_and_depends_on_the_distance_only() {
        let mut rope = Rope::new(8);
        rope.reach(50);
        let (a, b) = ([1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], [0.5; 8]);
        let turned = |vector: [f32; 8], position| {
            let mut vector = vector;
            rope.turn(position, &mut vector);
            vector
        };
        let near = |x: f32, y: f32| (x - y).abs() < 1e-3;
        assert!(near(dot(&turned(a, 13), &turned(a, 13)), dot(&a, &a)));
        let distance = |at| dot(&turned(a, at + 5), &turned(b, at));
        assert!(near(distance(0), distance(40)));
        assert!(!near(distance(0), dot(&turned(a, 6), &turned(b, 0))));
        assert!(turned(a, 0).iter().zip(a).all(|(x, y)| near(*x, y)));
    }
}
