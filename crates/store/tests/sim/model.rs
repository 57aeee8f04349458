//! What may be answered, from what was asked.
//!
//! The model knows every request and every answer of every client. It does not predict answers, which
//! depend on the network; it refuses those that can't be true:
//!
//! - A reservation has a generation that no other ever had, across the master's lives.
//! - What is found is a version whose writer asked to commit it, under the key that it reserved.
//! - Of a key that nobody removes, one version at most is committed in one life of the master.
//! - What was committed is found, until the master dies or somebody removes it.

use std::collections::{HashMap, HashSet};

use layercake_protocol::ids::Generation;
use layercake_protocol::key::ObjectKey;

/// What the clients know together.
#[derive(Debug, Default)]
pub(crate) struct Model {
    /// How often the master was started. Bumped before it dies.
    pub(crate) era: u64,
    /// Who reserved a generation.
    reserved: HashMap<Generation, ObjectKey>,
    /// Generations whose writers asked for the commit, answered or not.
    offered: HashSet<Generation>,
    /// The version that was committed in an era, with an answer.
    committed: HashMap<ObjectKey, (u64, Generation)>,
    pub(crate) report: Report,
}

/// What a run came to.
#[derive(Clone, Debug, Default)]
pub(crate) struct Report {
    pub(crate) calls: u64,
    pub(crate) failed: u64,
    pub(crate) committed: u64,
    pub(crate) restarts: u64,
}

/// Keys that clients remove begin with this.
pub(crate) const CHURN: &str = "churn";

fn is_stable(key: &ObjectKey) -> bool {
    !key.as_str().starts_with(CHURN)
}

impl Model {
    pub(crate) fn reserved(&mut self, key: &ObjectKey, generation: Generation) {
        let before = self.reserved.insert(generation, key.clone());
        assert_eq!(before, None, "generation {generation} was given twice");
    }

    pub(crate) fn offers(&mut self, generation: Generation) {
        self.offered.insert(generation);
    }

    /// A commit that was asked for in `era` was answered with success.
    pub(crate) fn committed(&mut self, key: &ObjectKey, generation: Generation, era: u64) {
        self.report.committed += 1;
        if era != self.era || !is_stable(key) {
            return;
        }
        if let Some((_, other)) = self.committed.get(key).filter(|(of, _)| *of == era) {
            assert_eq!(*other, generation, "{key} was committed twice");
        }
        self.committed.insert(key.clone(), (era, generation));
    }

    /// What must be found if the question is asked now, and nobody interferes.
    pub(crate) fn expected(&self, key: &ObjectKey) -> Option<(u64, Generation)> {
        self.committed
            .get(key)
            .copied()
            .filter(|(era, _)| *era == self.era)
    }

    /// A question that was asked when `expected` held was answered.
    pub(crate) fn found(
        &self,
        key: &ObjectKey,
        found: Option<Generation>,
        expected: Option<(u64, Generation)>,
    ) {
        if let Some(generation) = found {
            let writer = self.reserved.get(&generation);
            assert_eq!(
                writer,
                Some(key),
                "generation {generation} belongs to another key"
            );
            assert!(
                self.offered.contains(&generation),
                "{key}: generation {generation} was never offered for commit"
            );
        }
        if let Some((era, generation)) = expected
            && era == self.era
        {
            assert_eq!(
                found,
                Some(generation),
                "{key} was committed, and is not found"
            );
        }
    }
}
