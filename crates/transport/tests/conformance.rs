//! Every transport shows the behaviour of the conformance suite.

use layercake_transport::mock::{MockNetwork, Pace};
use layercake_transport::testing::conformance::{self, Pair};
use layercake_transport::{Engine, EngineConfig, TransportKind, TransportSet};

fn engine(kind: TransportKind) -> Engine {
    let config = EngineConfig {
        transports: TransportSet::only(kind),
        ..EngineConfig::default()
    };
    Engine::start(config).expect("an engine on loopback")
}

fn pair(kind: TransportKind) -> Pair {
    if kind == TransportKind::Mock {
        let network = MockNetwork::new(1, Pace::Immediate);
        let start = || {
            network
                .start(EngineConfig::default())
                .expect("an engine on no network at all")
        };
        return Pair {
            near: start(),
            far: start(),
            kind,
        };
    }
    let near = engine(kind);
    let far = if kind == TransportKind::Local {
        near.clone()
    } else {
        engine(kind)
    };
    Pair { near, far, kind }
}

macro_rules! suite {
    ($($module:ident: $kind:ident;)* @ $cases:tt) => {
        $(mod $module {
            use super::*;
            suite!(@tests $kind $cases);
        })*
    };
    (@tests $kind:ident ($($case:ident,)*)) => {
        $(
            #[test]
            fn $case() {
                conformance::run(stringify!($case), &pair(TransportKind::$kind));
            }
        )*

        /// A case that is not listed below would not be run.
        #[test]
        fn no_case_is_left_out() {
            let listed = [$(stringify!($case)),*];
            let known: Vec<_> = conformance::CASES.iter().map(|(name, _)| *name).collect();
            assert_eq!(listed.as_slice(), known.as_slice());
        }
    };
}

suite! {
    local: Local;
    shm: Shm;
    tcp: Tcp;
    mock: Mock;
    @ (
        pieces_of_all_sizes_and_offsets_are_bit_exact,
        a_hundred_thousand_small_pieces_are_one_batch,
        pieces_of_no_bytes_are_done,
        checksums_are_those_of_the_bytes,
        memory_of_every_origin_can_be_moved,
        batches_of_many_threads_do_not_mix,
        small_transfers_of_many_threads_do_not_mix,
        the_outcome_and_the_counters_name_the_transport,
        a_refused_piece_leaves_its_neighbours_alone,
        results_of_a_long_batch_are_those_of_its_pieces,
        a_late_writer_is_refused_and_a_reader_of_a_reused_place_too,
        a_fenced_place_refuses_earlier_generations,
        a_piece_that_another_of_its_batch_overtakes_does_not_land_behind_it,
        a_stale_part_fails_the_whole_piece,
        local_memory_that_is_gone_fails_its_piece,
        a_deadline_of_nothing_is_a_timeout,
        unregistering_under_load_ends_all_access,
        shutting_down_ends_every_transfer,
        a_dropped_handle_changes_nothing,
        a_cancelled_transfer_resolves,
        a_transfer_can_be_polled_waited_for_and_awaited,
        a_transfer_that_its_thread_waits_for_moves_the_same_bytes,
    )
}
