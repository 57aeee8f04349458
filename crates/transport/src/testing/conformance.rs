//! The behaviour that every transport shows, as cases to be run over each of them.
//!
//! A case takes a [`Pair`]: two engines that reach each other by one transport (for `local`, the same
//! one twice). [`CASES`] lists them all; a test target makes one test of each case and transport, so
//! that a new transport can't forget one.

mod data;
mod failures;
mod lifecycle;

use std::sync::Arc;

use layercake_protocol::ids::Generation;

use crate::batch::{Batch, Direction, Piece, RemoteSlice};
use crate::config::TransportKind;
use crate::endpoint::Endpoint;
use crate::engine::Engine;
use crate::memory::{Access, AllocateOptions, LocalSlice, Memory};
use crate::tcp::frame::MAX_PAYLOAD;
use crate::transfer::{Outcome, Transfer};

/// Two engines, and the transport that is to carry everything between them.
#[derive(Debug)]
pub struct Pair {
    /// Submits.
    pub near: Engine,
    /// Owns.
    pub far: Engine,
    /// The only transport that both have.
    pub kind: TransportKind,
}

/// A case, by name.
pub type Case = (&'static str, fn(&Pair));

/// Every case.
pub const CASES: &[Case] = &[
    (
        "pieces_of_all_sizes_and_offsets_are_bit_exact",
        data::pieces_of_all_sizes_and_offsets_are_bit_exact,
    ),
    (
        "a_hundred_thousand_small_pieces_are_one_batch",
        data::a_hundred_thousand_small_pieces_are_one_batch,
    ),
    (
        "pieces_of_no_bytes_are_done",
        data::pieces_of_no_bytes_are_done,
    ),
    (
        "checksums_are_those_of_the_bytes",
        data::checksums_are_those_of_the_bytes,
    ),
    (
        "memory_of_every_origin_can_be_moved",
        data::memory_of_every_origin_can_be_moved,
    ),
    (
        "batches_of_many_threads_do_not_mix",
        data::batches_of_many_threads_do_not_mix,
    ),
    (
        "small_transfers_of_many_threads_do_not_mix",
        data::small_transfers_of_many_threads_do_not_mix,
    ),
    (
        "the_outcome_and_the_counters_name_the_transport",
        data::the_outcome_and_the_counters_name_the_transport,
    ),
    (
        "a_refused_piece_leaves_its_neighbours_alone",
        failures::a_refused_piece_leaves_its_neighbours_alone,
    ),
    (
        "results_of_a_long_batch_are_those_of_its_pieces",
        failures::results_of_a_long_batch_are_those_of_its_pieces,
    ),
    (
        "a_late_writer_is_refused_and_a_reader_of_a_reused_place_too",
        failures::a_late_writer_is_refused_and_a_reader_of_a_reused_place_too,
    ),
    (
        "a_fenced_place_refuses_earlier_generations",
        failures::a_fenced_place_refuses_earlier_generations,
    ),
    (
        "a_piece_that_another_of_its_batch_overtakes_does_not_land_behind_it",
        failures::a_piece_that_another_of_its_batch_overtakes_does_not_land_behind_it,
    ),
    (
        "a_stale_part_fails_the_whole_piece",
        failures::a_stale_part_fails_the_whole_piece,
    ),
    (
        "local_memory_that_is_gone_fails_its_piece",
        failures::local_memory_that_is_gone_fails_its_piece,
    ),
    (
        "a_deadline_of_nothing_is_a_timeout",
        failures::a_deadline_of_nothing_is_a_timeout,
    ),
    (
        "unregistering_under_load_ends_all_access",
        lifecycle::unregistering_under_load_ends_all_access,
    ),
    (
        "shutting_down_ends_every_transfer",
        lifecycle::shutting_down_ends_every_transfer,
    ),
    (
        "a_dropped_handle_changes_nothing",
        lifecycle::a_dropped_handle_changes_nothing,
    ),
    (
        "a_cancelled_transfer_resolves",
        lifecycle::a_cancelled_transfer_resolves,
    ),
    (
        "a_transfer_can_be_polled_waited_for_and_awaited",
        lifecycle::a_transfer_can_be_polled_waited_for_and_awaited,
    ),
    (
        "a_transfer_that_its_thread_waits_for_moves_the_same_bytes",
        lifecycle::a_transfer_that_its_thread_waits_for_moves_the_same_bytes,
    ),
];

/// Runs one case by name.
///
/// # Panics
/// If there is no such case, or the case fails.
pub fn run(name: &str, pair: &Pair) {
    let case = CASES.iter().find(|(known, _)| *known == name);
    let (_, case) = case.unwrap_or_else(|| panic!("there is no case {name}"));
    case(pair);
}

impl Pair {
    fn peer(&self) -> Arc<Endpoint> {
        Arc::new(self.far.endpoint().clone())
    }

    /// Memory of the far engine that the near one may touch.
    fn remote(&self, len: u64, access: Access) -> Memory {
        let options = AllocateOptions {
            access,
            generation_tags: true,
            ..AllocateOptions::default()
        };
        self.far.allocate(len, options).expect("some memory")
    }

    /// Memory of the near engine.
    fn local(&self, len: u64) -> Memory {
        self.near
            .allocate(len, AllocateOptions::default())
            .expect("some memory")
    }

    fn submit(&self, direction: Direction, pieces: Vec<Piece>) -> Transfer {
        self.near.submit(Batch {
            peer: self.peer(),
            direction,
            pieces,
            checksum: true,
            deadline: None,
        })
    }

    fn run(&self, direction: Direction, pieces: Vec<Piece>) -> Outcome {
        self.submit(direction, pieces).wait()
    }

    #[track_caller]
    fn succeed(&self, direction: Direction, pieces: Vec<Piece>) {
        let outcome = self.run(direction, pieces);
        assert_eq!(
            outcome.first_error(),
            None,
            "{} over {}",
            direction.name(),
            self.kind
        );
    }
}

/// The size above which a transport splits a piece over several messages.
const CHUNK: u64 = MAX_PAYLOAD as u64;

/// A place in remote memory.
fn place(memory: &Memory, offset: u64, len: u64) -> RemoteSlice {
    let region = memory.region();
    RemoteSlice {
        region: region.region,
        capability: region.capability,
        offset,
        len,
        generation: None,
    }
}

fn tagged(memory: &Memory, offset: u64, len: u64, generation: u64) -> RemoteSlice {
    RemoteSlice {
        generation: Some(Generation(generation)),
        ..place(memory, offset, len)
    }
}

fn slice(memory: &Memory, offset: u64, len: u64) -> LocalSlice {
    memory.slice(offset, len).expect("inside")
}
