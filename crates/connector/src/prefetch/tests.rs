//! The controller against every fixed depth, in virtual time.

use super::*;

const US: fn(u64) -> Duration = Duration::from_micros;

/// A transport as the simulation sees it: the time each load occupies the link, which carries one at a
/// time, and the time it is on its way besides.
struct Link {
    seed: u64,
    service: fn(u64) -> u64,
    latency: fn(u64) -> u64,
}

impl Link {
    fn random(&mut self) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.seed >> 33
    }
}

/// Microseconds of waiting over many steps of a model.
fn exposed(link: &mut Link, setting: PrefetchLayers, compute: u64) -> u64 {
    const LAYERS: usize = 48;
    let room = Room {
        layers: LAYERS,
        queue: LAYERS,
        buffers: usize::MAX,
    };
    let mut prefetch = Prefetch::new(setting);
    let mut waited_in_all = 0;
    for _ in 0..50 {
        let (mut now, mut free) = (0, 0);
        let mut arrivals: Vec<u64> = Vec::new();
        for layer in 0..LAYERS {
            let until = LAYERS.min(layer + 1 + prefetch.depth(room));
            while arrivals.len() < until {
                let draw = link.random();
                free = now.max(free) + (link.service)(draw);
                let arrival = free + (link.latency)(draw);
                prefetch.note_transfer(US(arrival - now));
                arrivals.push(arrival);
            }
            let waited = arrivals[layer].saturating_sub(now);
            waited_in_all += waited;
            now += waited + compute;
            prefetch.note_compute(US(compute), US(waited));
        }
    }
    waited_in_all
}

fn compare(name: &str, service: fn(u64) -> u64, latency: fn(u64) -> u64, compute: u64) {
    let run = |setting| {
        let mut link = Link {
            seed: 7,
            service,
            latency,
        };
        exposed(&mut link, setting, compute)
    };
    let auto = run(PrefetchLayers::Auto);
    let fixed = (1..=48).map(|depth| {
        let depth = NonZeroUsize::new(depth).expect("above 0");
        (run(PrefetchLayers::Fixed(depth)), depth)
    });
    let (best, depth) = fixed.min().expect("there are depths");
    assert!(
        auto as f64 <= best as f64 * 1.05 + 1.0,
        "{name}: auto waits {auto} µs, depth {depth} {best} µs"
    );
}

#[test]
fn auto_is_as_good_as_the_best_fixed_depth() {
    compare("steady and fast", |_| 100, |_| 50, 400);
    compare("steady with latency", |_| 50, |_| 2_000, 400);
    compare("slow", |_| 900, |_| 100, 400);
    compare("jittery", |draw| 100 + draw % 500, |draw| draw % 3_000, 400);
    compare(
        "rarely stuck",
        |draw| if draw.is_multiple_of(40) { 4_000 } else { 150 },
        |_| 100,
        400,
    );
}

#[test]
fn auto_does_not_ask_for_more_than_it_needs() {
    let mut prefetch = Prefetch::new(PrefetchLayers::Auto);
    let room = Room {
        layers: 60,
        queue: 60,
        buffers: 60,
    };
    assert_eq!(prefetch.depth(room), 60, "nothing is known");
    for _ in 0..50 {
        prefetch.note_transfer(US(100));
        prefetch.note_compute(US(400), US(0));
    }
    assert_eq!(prefetch.depth(room), 2);
    for _ in 0..50 {
        prefetch.note_transfer(US(1_500));
    }
    assert_eq!(prefetch.depth(room), 5);
    prefetch.note_transfer(US(4_000));
    assert!(prefetch.depth(room) > 10, "a peak is remembered");
    for _ in 0..2_000 {
        prefetch.note_transfer(US(1_500));
    }
    assert_eq!(prefetch.depth(room), 5);
    assert_eq!(prefetch.depth(Room { queue: 3, ..room }), 3);
    assert_eq!(prefetch.depth(Room { buffers: 0, ..room }), 1);
}

#[test]
fn a_fixed_depth_stays_within_the_room() {
    let four = PrefetchLayers::Fixed(NonZeroUsize::new(4).expect("above 0"));
    let mut prefetch = Prefetch::new(four);
    prefetch.note_transfer(US(1));
    let room = Room {
        layers: 60,
        queue: 60,
        buffers: 60,
    };
    assert_eq!(prefetch.depth(room), 4);
    assert_eq!(prefetch.depth(Room { layers: 3, ..room }), 3);
}
