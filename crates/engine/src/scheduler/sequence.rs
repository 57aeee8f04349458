//! What the scheduler keeps of a request.

use std::time::Instant;

use layercake_connector::contract::{BlockHash, BlockId, RequestId};

use crate::model::LogitsDigest;

/// Bytes of a block's hash.
const HASH_BYTES: usize = 16;

#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: RequestId,
    /// The prompt, and what was generated.
    pub(crate) tokens: Vec<u32>,
    pub(crate) prompt: usize,
    /// Tokens to generate.
    pub(crate) wanted: usize,
    /// Of the whole blocks of `tokens`.
    pub(crate) hashes: Vec<BlockHash>,
    pub(crate) table: Vec<BlockId>,
    /// Tokens whose cache is there.
    pub(crate) computed: usize,
    /// Blocks whose content the pool was told.
    pub(crate) known: usize,
    pub(crate) story: Story,
}

/// What happened to a request.
#[derive(Clone, Debug)]
pub(crate) struct Story {
    pub(crate) arrived: Instant,
    pub(crate) first_token: Option<Instant>,
    /// Tokens of the prompt that were in this engine's cache, and those that the store had.
    pub(crate) local: usize,
    pub(crate) loaded: usize,
    pub(crate) admitted: bool,
    pub(crate) preemptions: u32,
    pub(crate) cuts: u32,
    pub(crate) logits: Vec<LogitsDigest>,
}

impl Sequence {
    pub(crate) fn new(id: RequestId, prompt: Vec<u32>, wanted: usize, block_size: usize) -> Self {
        let mut sequence = Self {
            id,
            prompt: prompt.len(),
            tokens: prompt,
            wanted,
            hashes: Vec::new(),
            table: Vec::new(),
            computed: 0,
            known: 0,
            story: Story {
                arrived: Instant::now(),
                first_token: None,
                local: 0,
                loaded: 0,
                admitted: false,
                preemptions: 0,
                cuts: 0,
                logits: Vec::new(),
            },
        };
        sequence.hash(block_size);
        sequence
    }

    /// Tokens to be computed.
    pub(crate) fn left(&self) -> usize {
        self.tokens.len() - self.computed
    }

    pub(crate) fn generated(&self) -> &[u32] {
        &self.tokens[self.prompt..]
    }

    pub(crate) fn is_done(&self) -> bool {
        self.generated().len() >= self.wanted
    }

    pub(crate) fn push(&mut self, token: u32, logits: LogitsDigest, block_size: usize) {
        self.tokens.push(token);
        self.story.logits.push(logits);
        self.story.first_token.get_or_insert_with(Instant::now);
        self.hash(block_size);
    }

    /// Hashes the blocks that have become whole: each with the one before it.
    fn hash(&mut self, block_size: usize) {
        let whole = self.tokens.chunks_exact(block_size);
        for block in whole.skip(self.hashes.len()) {
            let mut hash = blake3::Hasher::new();
            if let Some(before) = self.hashes.last() {
                hash.update(before.as_bytes());
            }
            for token in block {
                hash.update(&token.to_le_bytes());
            }
            let hash = hash.finalize();
            self.hashes
                .push(BlockHash::new(&hash.as_bytes()[..HASH_BYTES]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::Logits;

    #[test]
    fn a_block_s_hash_is_that_of_all_tokens_up_to_its_end() {
        let sequence = |prompt: &[u32]| Sequence::new("r".into(), prompt.to_vec(), 2, 2);
        let a = sequence(&[1, 2, 3, 4, 5]);
        assert_eq!(a.hashes.len(), 2);
        assert_eq!(a.hashes, sequence(&[1, 2, 3, 4]).hashes);
        let b = sequence(&[9, 2, 3, 4]);
        assert!(a.hashes[0] != b.hashes[0] && a.hashes[1] != b.hashes[1]);
        let mut grown = sequence(&[1, 2, 3]);
        let logits = Logits {
            next: vec![0.0, 1.0],
            draft: Vec::new(),
        };
        grown.push(4, logits.digest(), 2);
        assert_eq!(grown.hashes, sequence(&[1, 2, 3, 4]).hashes);
        assert!(!grown.is_done());
        grown.push(logits.best(), logits.digest(), 2);
        assert!(grown.is_done());
        assert_eq!(grown.generated(), [4, 1]);
    }
}
