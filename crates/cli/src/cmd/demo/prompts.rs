//! Prompts shaped like a chat service's: a few shared system prompts, conversations that grow turn by turn.

use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};

/// The longest prompt.
pub(crate) const MOST_TOKENS: usize = 448;

const SYSTEM_PROMPTS: usize = 3;

/// The prompts of so many requests, in the order of their arrival; the same for the same seed.
pub(crate) fn make(seed: u64, requests: usize, vocab: u32) -> Vec<Vec<u32>> {
    let mut rng = StdRng::seed_from_u64(seed);
    let text = |rng: &mut StdRng, from: usize, to: usize| -> Vec<u32> {
        let len = rng.random_range(from..=to);
        (0..len).map(|_| rng.random_range(0..vocab)).collect()
    };
    let system: Vec<Vec<u32>> = (0..SYSTEM_PROMPTS)
        .map(|_| text(&mut rng, 96, 160))
        .collect();
    let mut conversations: Vec<Vec<u32>> = Vec::new();
    let mut prompts = Vec::with_capacity(requests);
    while prompts.len() < requests {
        // Most requests go on with what was said before.
        let open = if conversations.is_empty() || rng.random_bool(0.4) {
            conversations.push(system[rng.random_range(0..SYSTEM_PROMPTS)].clone());
            conversations.len() - 1
        } else {
            rng.random_range(0..conversations.len())
        };
        let turn = text(&mut rng, 24, 72);
        let conversation = &mut conversations[open];
        conversation.extend(turn);
        if conversation.len() > MOST_TOKENS {
            conversations.swap_remove(open);
            continue;
        }
        prompts.push(conversation.clone());
        // What was answered.
        let answer = text(&mut rng, 16, 48);
        conversations[open].extend(answer);
    }
    prompts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prompts_share_beginnings_and_grow_and_have_a_seed() {
        let prompts = make(1, 40, 512);
        assert_eq!(prompts, make(1, 40, 512));
        assert_ne!(prompts, make(2, 40, 512));
        assert_eq!(prompts.len(), 40);
        let fits =
            |prompt: &Vec<u32>| prompt.len() <= MOST_TOKENS && prompt.iter().all(|t| *t < 512);
        assert!(prompts.iter().all(fits));
        let grown = prompts.iter().enumerate().filter(|(at, prompt)| {
            let before = &prompts[..*at];
            before.iter().any(|other| prompt.starts_with(other))
        });
        assert!(grown.count() > 10);
        let systems: std::collections::HashSet<_> = prompts.iter().map(|p| &p[..90]).collect();
        assert!(systems.len() <= SYSTEM_PROMPTS);
    }
}
