//! The segments of a node, each in a slot of its own, and what state they are in. Pure data.
//!
//! ```text
//! Making ──► Ready ──► Mounted ──► Leaving ──► Gone
//!    ▲         │          │
//!    └─────────┴──────────┘   the master forgot it: another memory, another id
//! ```
//!
//! A segment belongs to one life of the membership. When the master forgets it (its restart, this
//! node's silence, an unmount by somebody else), there may be writers with reservations that nobody
//! knows of any more. So its region is withdrawn, and the slot gets a new one: a late write finds no
//! memory to land in, whatever generation it carries.

use layercake_protocol::ids::{Generation, SegmentId};
use layercake_protocol::replica::Segment;
use layercake_transport::Memory;

use super::SegmentSpec;
use crate::link::Life;

/// A segment and its memory.
#[derive(Clone, Debug)]
pub(super) struct Stock {
    pub(super) segment: Segment,
    pub(super) memory: Memory,
}

#[derive(Debug)]
pub(super) enum Phase {
    /// Its memory is being made.
    Making,
    /// It is to be mounted. `offered`: the life in which that was tried already, outcome unknown.
    Ready { stock: Stock, offered: Option<Life> },
    /// The master has it.
    Mounted { stock: Stock, life: Life },
    /// It is being unmounted.
    Leaving { stock: Stock },
    /// It was unmounted, or there is no memory for it.
    Gone,
}

#[derive(Debug)]
pub(super) struct Slot {
    pub(super) spec: SegmentSpec,
    pub(super) phase: Phase,
}

/// All slots of a node.
#[derive(Debug)]
pub(super) struct Slots(Vec<Slot>);

impl Slots {
    pub(super) fn new(specs: &[SegmentSpec]) -> Self {
        let slot = |spec: &SegmentSpec| Slot {
            spec: *spec,
            phase: Phase::Making,
        };
        Self(specs.iter().map(slot).collect())
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Slot> {
        self.0.iter()
    }

    /// Gives everything up.
    pub(super) fn clear(&mut self) {
        for slot in &mut self.0 {
            slot.phase = Phase::Gone;
        }
    }

    pub(super) fn set(&mut self, slot: usize, phase: Phase) {
        self.0[slot].phase = phase;
    }

    /// Memory is there; false: the slot does not want it any more.
    pub(super) fn made(&mut self, slot: usize, stock: Stock) -> bool {
        let wanted = matches!(self.0[slot].phase, Phase::Making);
        if wanted {
            self.set(
                slot,
                Phase::Ready {
                    stock,
                    offered: None,
                },
            );
        }
        wanted
    }

    /// The next segment to mount in this life; notes that it is offered.
    pub(super) fn offer(&mut self, life: Life) -> Option<(usize, Segment)> {
        self.0.iter_mut().enumerate().find_map(|(at, slot)| {
            let Phase::Ready { stock, offered } = &mut slot.phase else {
                return None;
            };
            *offered = Some(life);
            Some((at, stock.segment.clone()))
        })
    }

    /// The master has what it was offered in this life.
    pub(super) fn mounted(&mut self, slot: usize, life: Life) {
        let slot = &mut self.0[slot];
        match std::mem::replace(&mut slot.phase, Phase::Gone) {
            Phase::Ready { stock, .. } => slot.phase = Phase::Mounted { stock, life },
            other => slot.phase = other,
        }
    }

    /// Takes the memory of what a master of an earlier life may have had: it is to be made anew.
    pub(super) fn lost_before(&mut self, life: Life) -> Vec<(usize, SegmentSpec, Memory)> {
        self.take_lost(|phase| match phase {
            Phase::Mounted { life: of, .. }
            | Phase::Ready {
                offered: Some(of), ..
            } => *of < life,
            _ => false,
        })
    }

    /// The same for these segments, as far as they are mounted.
    pub(super) fn lost(&mut self, ids: &[SegmentId]) -> Vec<(usize, SegmentSpec, Memory)> {
        self.take_lost(|phase| match phase {
            Phase::Mounted { stock, .. } => ids.contains(&stock.segment.id),
            _ => false,
        })
    }

    fn take_lost(&mut self, lost: impl Fn(&Phase) -> bool) -> Vec<(usize, SegmentSpec, Memory)> {
        let mut taken = Vec::new();
        for (at, slot) in self.0.iter_mut().enumerate() {
            if !lost(&slot.phase) {
                continue;
            }
            match std::mem::replace(&mut slot.phase, Phase::Making) {
                Phase::Ready { stock, .. } | Phase::Mounted { stock, .. } => {
                    taken.push((at, slot.spec, stock.memory));
                }
                other => slot.phase = other,
            }
        }
        taken
    }

    /// Begins to unmount a mounted segment.
    pub(super) fn leave(&mut self, id: SegmentId) -> Option<(usize, Stock, Life)> {
        self.0.iter_mut().enumerate().find_map(|(at, slot)| {
            let Phase::Mounted { stock, life } = &slot.phase else {
                return None;
            };
            if stock.segment.id != id {
                return None;
            }
            let (stock, life) = (stock.clone(), *life);
            slot.phase = Phase::Leaving {
                stock: stock.clone(),
            };
            Some((at, stock, life))
        })
    }

    /// The memory of a segment, for as long as the slot has it.
    pub(super) fn memory(&self, id: SegmentId) -> Option<&Memory> {
        self.stocks()
            .find(|stock| stock.segment.id == id)
            .map(|stock| &stock.memory)
    }

    /// Everything that is there.
    pub(super) fn stocks(&self) -> impl Iterator<Item = &Stock> {
        self.0.iter().filter_map(|slot| match &slot.phase {
            Phase::Ready { stock, .. }
            | Phase::Mounted { stock, .. }
            | Phase::Leaving { stock } => Some(stock),
            Phase::Making | Phase::Gone => None,
        })
    }

    /// The mounted segments.
    pub(super) fn mounted_segments(&self) -> impl Iterator<Item = &Segment> {
        self.0.iter().filter_map(|slot| match &slot.phase {
            Phase::Mounted { stock, .. } => Some(&stock.segment),
            _ => None,
        })
    }

    /// Whether every slot that is not gone is mounted.
    pub(super) fn is_settled(&self) -> bool {
        self.0
            .iter()
            .all(|slot| matches!(slot.phase, Phase::Mounted { .. } | Phase::Gone))
    }
}

/// The tags of memory that was just made.
pub(super) const FRESH: Generation = Generation::NONE;
