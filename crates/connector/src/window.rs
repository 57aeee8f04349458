//! Which sessions are open when (W7). Pure.
//!
//! Layer *l* of all blocks of a step is needed before layer *l* computes, so that the blocks of a prompt
//! can't simply be loaded one after the other. A step whose blocks fit the window keeps its sessions
//! open for all layers. A longer one is cut into tiles: groups of layers, and within a group windows of
//! blocks; a window's sessions are open for the tile's layers only. The first group has `lead` layers
//! and each further one twice as many as the one before, so that a block's session is opened about
//! log2(layers / lead) times and never more sessions are open than the window allows.

use std::num::NonZeroUsize;
use std::ops::Range;

/// Sessions of `blocks`, open for `layers`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tile {
    /// The layers, by their index in the object.
    pub layers: Range<usize>,
    /// The rows.
    pub rows: Range<usize>,
    /// No later tile opens these rows again.
    pub last: bool,
}

/// The tiles of a step in the order in which they are loaded.
#[derive(Clone, Debug)]
pub struct Tiles {
    rows: usize,
    layers: usize,
    window: usize,
    group: Range<usize>,
    at: usize,
}

impl Tiles {
    /// Of `rows` rows and `layers` layers, with at most `window` sessions open at once.
    pub fn new(rows: usize, layers: usize, window: NonZeroUsize, lead: NonZeroUsize) -> Self {
        let fits = rows <= window.get();
        let first = if fits { layers } else { lead.get().min(layers) };
        Self {
            rows,
            layers,
            window: window.get(),
            group: 0..first,
            at: 0,
        }
    }
}

impl Iterator for Tiles {
    type Item = Tile;

    fn next(&mut self) -> Option<Tile> {
        if self.rows == 0 || self.group.is_empty() {
            return None;
        }
        let end = self.rows.min(self.at.saturating_add(self.window));
        let tile = Tile {
            layers: self.group.clone(),
            rows: self.at..end,
            last: self.group.end == self.layers,
        };
        self.at = end;
        if end == self.rows {
            self.at = 0;
            let next = self.group.len().saturating_mul(2);
            self.group = self.group.end..self.layers.min(self.group.end.saturating_add(next));
        }
        Some(tile)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn n(value: usize) -> NonZeroUsize {
        NonZeroUsize::new(value).expect("above 0")
    }

    #[test]
    fn a_step_that_fits_keeps_its_sessions_for_all_layers() {
        let tiles: Vec<_> = Tiles::new(10, 61, n(10), n(2)).collect();
        assert_eq!(
            tiles,
            [Tile {
                layers: 0..61,
                rows: 0..10,
                last: true
            }]
        );
    }

    #[test]
    fn a_prompt_of_100k_tokens_opens_a_window_at_a_time_and_each_block_a_few_times() {
        let (rows, window) = (100_000 / 16, 1024);
        let tiles: Vec<_> = Tiles::new(rows, 61, n(window), n(2)).collect();
        let opened: usize = tiles.iter().map(|tile| tile.rows.len()).sum();
        assert!(tiles.iter().all(|tile| tile.rows.len() <= window));
        assert_eq!(opened, rows * 5, "groups of 2, 4, 8, 16 and 31 layers");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(crate::SEQUENCES))]

        #[test]
        fn every_layer_of_every_row_is_in_one_tile_and_no_layer_before_an_earlier_one(
            rows in 0_usize..300,
            layers in 0_usize..70,
            window in 1_usize..64,
            lead in 1_usize..80,
        ) {
            let mut seen = vec![0_usize; rows];
            let mut last_layer = 0;
            for tile in Tiles::new(rows, layers, n(window), n(lead)) {
                prop_assert!(!tile.rows.is_empty() && tile.rows.len() <= window);
                prop_assert!(tile.layers.start >= last_layer, "layers come in order");
                last_layer = tile.layers.start;
                for row in tile.rows.clone() {
                    prop_assert_eq!(seen[row], tile.layers.start, "without a gap");
                    seen[row] = tile.layers.end;
                }
                prop_assert_eq!(tile.last, tile.layers.end == layers);
            }
            prop_assert!(seen.iter().all(|&end| end == layers));
        }
    }
}
