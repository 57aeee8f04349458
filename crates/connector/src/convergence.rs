//! How the results of a step's loads come together (W2, W5). Pure.
//!
//! Every layer waits for its rows; a row is one object of the step with the local blocks that need it.
//! A row that fails in one layer is void in all: its blocks are published as invalid before the layer
//! counts as arrived, and later layers don't wait for it. Results that don't line up with their rows
//! fail the rows that can't be matched; nothing shifts. Aborting fails every row that has not arrived
//! everywhere.

use std::collections::BTreeSet;
use std::ops::Range;

use crate::contract::{BlockId, LayerReady};

/// The loads of a step.
#[derive(Debug)]
pub struct Convergence {
    /// Blocks of each row.
    rows: Vec<Row>,
    /// Rows that each layer still waits for.
    waiting: Vec<usize>,
    invalid: BTreeSet<BlockId>,
}

#[derive(Debug)]
struct Row {
    blocks: Vec<BlockId>,
    /// One flag per layer.
    arrived: Vec<bool>,
    failed: bool,
}

impl Convergence {
    /// A step that loads rows of these blocks in `layers` layers.
    pub fn new(rows: Vec<Vec<BlockId>>, layers: usize) -> Self {
        Self {
            waiting: vec![rows.len(); layers],
            rows: rows
                .into_iter()
                .map(|blocks| Row {
                    blocks,
                    arrived: vec![false; layers],
                    failed: false,
                })
                .collect(),
            invalid: BTreeSet::new(),
        }
    }

    /// The rows among these that are worth loading.
    pub fn alive(&self, rows: Range<usize>) -> Vec<usize> {
        rows.filter(|row| self.is_alive(*row)).collect()
    }

    /// Whether a row has not failed.
    pub fn is_alive(&self, row: usize) -> bool {
        self.rows.get(row).is_some_and(|row| !row.failed)
    }

    /// The blocks of a row.
    pub fn blocks(&self, row: usize) -> &[BlockId] {
        self.rows.get(row).map_or(&[], |row| &row.blocks)
    }

    /// What a call for one layer came to: `results` should have one answer for each of `rows`. The rows
    /// that failed with it.
    pub fn answered(&mut self, layer: usize, rows: &[usize], results: &[bool]) -> Vec<usize> {
        let mut failed = Vec::new();
        for (at, &row) in rows.iter().enumerate() {
            if results.get(at).copied().unwrap_or(false) {
                self.arrived(layer, row);
            } else if self.fail(row) {
                failed.push(row);
            }
        }
        failed
    }

    fn arrived(&mut self, layer: usize, row: usize) {
        let Some(row) = self.rows.get_mut(row).filter(|row| !row.failed) else {
            return;
        };
        if let Some(arrived) = row.arrived.get_mut(layer)
            && !*arrived
        {
            *arrived = true;
            self.waiting[layer] -= 1;
        }
    }

    /// A row failed: no layer waits for it any more. `false`: it had before.
    pub fn fail(&mut self, row: usize) -> bool {
        let Some(row) = self.rows.get_mut(row).filter(|row| !row.failed) else {
            return false;
        };
        row.failed = true;
        self.invalid.extend(&row.blocks);
        for (arrived, waiting) in row.arrived.iter().zip(&mut self.waiting) {
            if !arrived {
                *waiting -= 1;
            }
        }
        true
    }

    /// Fails every row that has not arrived in all layers. How many blocks they have.
    pub fn abort(&mut self) -> usize {
        let open = |row: &Row| !row.failed && row.arrived.contains(&false);
        let open: Vec<usize> = (0..self.rows.len())
            .filter(|&row| open(&self.rows[row]))
            .collect();
        for &row in &open {
            self.fail(row);
        }
        open.into_iter().map(|row| self.blocks(row).len()).sum()
    }

    /// Whether a layer waits for nothing, and what is void by now.
    pub fn ready(&self, layer: usize) -> Option<LayerReady> {
        let ready = self.waiting.get(layer).is_none_or(|waiting| *waiting == 0);
        ready.then(|| LayerReady {
            invalid_blocks: self.invalid.iter().copied().collect(),
        })
    }

    /// Whether no layer waits.
    pub fn is_over(&self) -> bool {
        self.waiting.iter().all(|waiting| *waiting == 0)
    }

    /// Blocks that are void.
    pub fn invalid(&self) -> &BTreeSet<BlockId> {
        &self.invalid
    }

    /// Blocks that arrived in all layers.
    pub fn loaded_blocks(&self) -> usize {
        let whole = |row: &&Row| !row.failed && !row.arrived.contains(&false);
        self.rows
            .iter()
            .filter(whole)
            .map(|row| row.blocks.len())
            .sum()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_short_answer_fails_the_rows_without_one_and_shifts_nothing() {
        let mut step = Convergence::new(vec![vec![4], vec![5], vec![6]], 2);
        assert_eq!(step.answered(0, &[0, 1, 2], &[true, false]), [1, 2]);
        let ready = step.ready(0).expect("nothing is waited for");
        assert_eq!(ready.invalid_blocks, [5, 6]);
        assert_eq!(step.ready(1), None, "row 0 is on its way");
        assert_eq!(step.alive(0..3), [0]);
        // An answer that is too long, and an arrival of a row that is void.
        assert!(step.answered(1, &[0], &[true, false, false]).is_empty());
        assert!(step.answered(1, &[1], &[true]).is_empty());
        assert!(step.is_over());
        assert_eq!(step.loaded_blocks(), 1);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(crate::SEQUENCES))]

        // contract: connector-13
        #[test]
        fn a_layer_is_ready_exactly_when_every_row_has_arrived_or_is_published_as_void(
            rows in 0_usize..6,
            layers in 1_usize..5,
            events in proptest::collection::vec((0_usize..8, 0_usize..6, 0_u8..8), 0..60),
        ) {
            let blocks: Vec<Vec<BlockId>> = (0..rows as u64).map(|row| vec![row, 100 + row]).collect();
            let mut step = Convergence::new(blocks, layers);
            // By layer, then by row.
            let mut arrived = vec![vec![false; rows]; layers];
            let mut failed = vec![false; rows];
            for (row, layer, kind) in events {
                match kind {
                    0 => {
                        let fresh = row < rows && !failed[row];
                        prop_assert_eq!(step.fail(row), fresh);
                        if fresh {
                            failed[row] = true;
                        }
                    }
                    1 if layer < layers => {
                        step.answered(layer, &[row], &[]);
                        if row < rows {
                            failed[row] = true;
                        }
                    }
                    _ => {
                        step.answered(layer, &[row], &[true]);
                        if row < rows && layer < layers && !failed[row] {
                            arrived[layer][row] = true;
                        }
                    }
                }
                for (layer, arrived) in arrived.iter().enumerate() {
                    let expected = (0..rows).all(|row| failed[row] || arrived[row]);
                    let ready = step.ready(layer);
                    prop_assert_eq!(ready.is_some(), expected);
                    let void = (0..rows).filter(|row| failed[*row]).flat_map(|row| [row as u64, 100 + row as u64]);
                    let void: BTreeSet<BlockId> = void.collect();
                    prop_assert_eq!(step.invalid(), &void);
                }
            }
            let open = (0..rows).filter(|row| !failed[*row] && arrived.iter().any(|layer| !layer[*row])).count();
            prop_assert_eq!(step.abort(), 2 * open, "two blocks each");
            prop_assert!(step.is_over());
            prop_assert_eq!(step.abort(), 0);
        }
    }
}
