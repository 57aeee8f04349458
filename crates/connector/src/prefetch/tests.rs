//! The controller against every fixed depth, in virtual time.

use proptest::prelude::*;

use super::*;

const US: fn(u64) -> Duration = Duration::from_micros;

const LAYERS: usize = 48;
/// Microseconds that a layer computes for.
const COMPUTE: f64 = 400.0;
const LAYER_BYTES: u64 = 4 << 20;
/// What it costs to have a layer ahead all through a step, in microseconds of waiting.
const AHEAD: f64 = 5.0;
/// Steps that are counted, and those before them in which the controller gets to know the link.
const STEPS: usize = 40;
const WARM_UP: usize = 10;

/// A transport as the simulation sees it. Whatever is under way has an equal share of the link, or waits for
/// its turn; then it is on its way for a while.
#[derive(Clone, Copy)]
struct Link {
    shared: bool,
    /// Microseconds of the link's time that a layer takes, from a draw.
    service: fn(u64) -> u64,
    latency: fn(u64) -> u64,
}

/// A layer that is under way.
struct Load {
    layer: usize,
    since: f64,
    /// What it still needs of the link's time.
    left: f64,
    latency: f64,
    /// When it arrives, once it needs nothing more of the link.
    at: Option<f64>,
}

struct Simulation {
    link: Link,
    begun: Instant,
    seed: u64,
    now: f64,
    loads: Vec<Load>,
    prefetch: Prefetch,
    /// Layers of the step that were asked for and are not computed yet, times microseconds.
    ahead: f64,
    /// Layers that were asked for, and that were computed.
    asked: usize,
    computed: usize,
}

impl Simulation {
    fn random(&mut self) -> u64 {
        self.seed = self
            .seed
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        self.seed >> 33
    }

    fn time(&self) -> Instant {
        self.begun + Duration::from_secs_f64(self.now / 1e6)
    }

    fn ask(&mut self, layer: usize) {
        let draw = self.random();
        self.prefetch.ask(LAYER_BYTES, self.time());
        self.asked += 1;
        self.loads.push(Load {
            layer,
            since: self.now,
            left: (self.link.service)(draw) as f64,
            latency: (self.link.latency)(draw) as f64,
            at: None,
        });
    }

    /// How long loads take for a microsecond of the link's time, and how many are served.
    fn served(&self) -> usize {
        let waiting = self.loads.iter().filter(|load| load.at.is_none()).count();
        if self.link.shared {
            waiting
        } else {
            waiting.min(1)
        }
    }

    /// Lets time pass until `until`, or until something happens. The layers that arrived.
    fn pass(&mut self, until: f64) -> Vec<usize> {
        let served = self.served();
        let waiting = self.loads.iter().filter(|load| load.at.is_none());
        let done = waiting
            .take(served)
            .map(|load| self.now + load.left * served as f64);
        let arrivals = self.loads.iter().filter_map(|load| load.at);
        let next = done.chain(arrivals).fold(until, f64::min);
        let share = (next - self.now) / served.max(1) as f64;
        self.ahead += (next - self.now) * (self.asked - self.computed) as f64;
        self.now = next;
        let waiting = self.loads.iter_mut().filter(|load| load.at.is_none());
        for load in waiting.take(served) {
            load.left -= share;
            if load.left < 1e-6 {
                load.at = Some(next + load.latency);
            }
        }
        let here = |load: &mut Load| load.at.is_some_and(|at| at <= next);
        let arrived: Vec<Load> = self.loads.extract_if(.., here).collect();
        for load in &arrived {
            let took = Duration::from_secs_f64((next - load.since) / 1e6);
            self.prefetch.land(LAYER_BYTES, took, self.time());
        }
        arrived.iter().map(|load| load.layer).collect()
    }

    /// What a step costs, in microseconds.
    fn step(&mut self) -> Cost {
        self.prefetch.clear();
        (self.ahead, self.asked, self.computed) = (0.0, 0, 0);
        let begun = self.now;
        let (mut next, mut waited) = (0, 0.0);
        let mut there = [false; LAYERS];
        let mut compute = |sim: &mut Self, there: &mut [bool], layer: usize, until: Option<f64>| {
            let begun = sim.now;
            while until.map_or(!there[layer], |until| sim.now < until) {
                let mut look_again = f64::INFINITY;
                while next < LAYERS && next <= layer + sim.prefetch.depth(LAYERS) {
                    match sim.prefetch.has_room(sim.time()) {
                        Err(wait) if !sim.loads.is_empty() => {
                            // Timers know whole milliseconds.
                            let millis = wait.map(|wait| wait.as_secs_f64() * 1e3);
                            look_again =
                                millis.map_or(look_again, |ms| sim.now + ms.ceil().max(1.0) * 1e3);
                            break;
                        }
                        _ => sim.ask(next),
                    }
                    next += 1;
                }
                for layer in sim.pass(until.unwrap_or(f64::INFINITY).min(look_again)) {
                    there[layer] = true;
                }
            }
            sim.now - begun
        };
        for layer in 0..LAYERS {
            let exposed = compute(self, &mut there, layer, None);
            waited += exposed;
            let until = self.now + COMPUTE;
            compute(self, &mut there, layer, Some(until));
            let micros = |micros: f64| Duration::from_secs_f64(micros / 1e6);
            self.prefetch
                .note_compute(layer, micros(COMPUTE), micros(exposed));
            self.computed += 1;
        }
        let ahead = self.ahead / (self.now - begun);
        Cost { waited, ahead }
    }
}

/// What a step costs.
#[derive(Clone, Copy)]
struct Cost {
    /// Microseconds in which the computation waited.
    waited: f64,
    /// Layers that were ahead of it, on average.
    ahead: f64,
}

impl Cost {
    /// What is asked for early takes the link from others, and is for nothing if the step is left.
    fn total(self) -> f64 {
        self.waited + self.ahead * AHEAD
    }
}

/// The average step of a model.
fn cost(link: Link, setting: PrefetchLayers) -> Cost {
    let mut simulation = Simulation {
        link,
        begun: Instant::now(),
        seed: 7,
        now: 0.0,
        loads: Vec::new(),
        prefetch: Prefetch::new(setting),
        ahead: 0.0,
        asked: 0,
        computed: 0,
    };
    for _ in 0..WARM_UP {
        simulation.step();
    }
    // All settings see the same draws from here on.
    simulation.seed = 11;
    let steps: Vec<Cost> = (0..STEPS).map(|_| simulation.step()).collect();
    let mean = |of: fn(&Cost) -> f64| steps.iter().map(of).sum::<f64>() / STEPS as f64;
    Cost {
        waited: mean(|cost| cost.waited),
        ahead: mean(|cost| cost.ahead),
    }
}

fn fixed(depth: usize) -> PrefetchLayers {
    PrefetchLayers::Fixed(NonZeroUsize::new(depth).expect("above 0"))
}

#[test]
fn auto_costs_no_more_than_the_best_fixed_depth() {
    type Draw = fn(u64) -> u64;
    let links: [(&str, Draw, Draw); 5] = [
        ("steady", |_| 100, |_| 50),
        ("steady, far", |_| 50, |_| 2_000),
        ("slow", |_| 900, |_| 100),
        ("jittery", |draw| 100 + draw % 500, |draw| draw % 3_000),
        (
            "seldom stuck",
            |draw| if draw.is_multiple_of(40) { 4_000 } else { 150 },
            |_| 100,
        ),
    ];
    println!(
        "microseconds of a step: auto waits (layers ahead)   best fixed (depth, ahead)      1      4     47"
    );
    for (name, service, latency) in links {
        for shared in [false, true] {
            let link = Link {
                shared,
                service,
                latency,
            };
            let auto = cost(link, PrefetchLayers::Auto);
            let all: Vec<Cost> = (1..LAYERS).map(|depth| cost(link, fixed(depth))).collect();
            let cheapest = all
                .iter()
                .zip(1..)
                .min_by(|a, b| a.0.total().total_cmp(&b.0.total()));
            let (best, depth) = cheapest.expect("some depths");
            let kind = if shared { "shared" } else { "in turn" };
            println!(
                "{name:<14} {kind:<8} {:>12.0} ({:>4.1}) {:>12.0} ({depth:>2}, {:>4.1}) {:>10.0} {:>6.0} {:>6.0}",
                auto.waited,
                auto.ahead,
                best.waited,
                best.ahead,
                all[0].total(),
                all[3].total(),
                all[46].total()
            );
            assert!(
                auto.total() <= best.total() * 1.05,
                "{name}, {kind}: auto costs {}, depth {depth} {}",
                auto.total(),
                best.total()
            );
            // Nor does it buy that with waits.
            let exposed = all.iter().map(|cost| cost.waited);
            let least = exposed.fold(f64::INFINITY, f64::min);
            assert!(
                auto.waited <= least * 1.05,
                "{name}, {kind}: auto waits {}, the least of all depths is {least}",
                auto.waited
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(crate::SEQUENCES))]

    /// Against the rule in its plainest form: times that don't change call for their ratio, and whatever
    /// was measured, the depth stays within the room.
    #[test]
    fn the_depth_is_the_ratio_of_the_times_within_the_room(
        transfer in 1_u64..100_000,
        compute in 1_u64..100_000,
        notes in proptest::collection::vec((0_u64..1_000_000, 0_u64..1_000_000, any::<bool>()), 0..40),
        layers in 0_usize..70,
        setting in proptest::option::of(1_usize..70),
    ) {
        let most = layers.max(1);
        let set = setting.map_or(PrefetchLayers::Auto, fixed);
        let mut prefetch = Prefetch::new(set);
        prop_assert_eq!(prefetch.depth(layers), setting.unwrap_or(most).min(most));
        for _ in 0..3 {
            note_transfer(&mut prefetch, US(transfer));
            prefetch.note_compute(1, US(compute), US(0));
        }
        let ratio = usize::try_from(transfer.div_ceil(compute)).expect("small") + 1;
        let depth = prefetch.depth(layers);
        let expected = setting.unwrap_or(ratio).min(most);
        // A ratio that is whole may be found a hair above.
        prop_assert!(depth == expected || depth == (expected + 1).min(most), "{depth}, not {expected}");
        for (took, waited, moved) in notes {
            if moved {
                note_transfer(&mut prefetch, US(took));
            } else {
                prefetch.note_compute(1, US(took), US(waited));
            }
            let depth = prefetch.depth(layers);
            prop_assert!((1..=most).contains(&depth));
            prop_assert!(setting.is_none_or(|set| depth == set.min(most)));
        }
    }
}

fn note_transfer(prefetch: &mut Prefetch, took: Duration) {
    prefetch.land(1, took, Instant::now());
}

#[test]
fn auto_does_not_ask_for_more_than_it_needs() {
    let mut prefetch = Prefetch::new(PrefetchLayers::Auto);
    assert_eq!(prefetch.depth(60), 60, "nothing is known");
    for _ in 0..50 {
        note_transfer(&mut prefetch, US(100));
        prefetch.note_compute(1, US(400), US(0));
    }
    assert_eq!(prefetch.depth(60), 2);
    for _ in 0..50 {
        note_transfer(&mut prefetch, US(1_500));
    }
    assert_eq!(prefetch.depth(60), 5);
    note_transfer(&mut prefetch, US(4_000));
    assert!(prefetch.depth(60) > 10, "a peak is remembered");
    for _ in 0..2_000 {
        note_transfer(&mut prefetch, US(1_500));
    }
    assert_eq!(prefetch.depth(60), 5);
    assert_eq!(prefetch.depth(3), 3);
    assert_eq!(prefetch.depth(0), 1);
}

/// Nothing can be asked for before the step has begun: the wait for the first layer says nothing about the depth.
#[test]
fn waiting_for_the_first_layer_is_no_sign_of_too_little_depth() {
    let mut prefetch = Prefetch::new(PrefetchLayers::Auto);
    note_transfer(&mut prefetch, US(100));
    let depth = |prefetch: &mut Prefetch, waits_for: usize| {
        for _ in 0..30 {
            for layer in 0..4 {
                let waited = if layer == waits_for { 300 } else { 0 };
                prefetch.note_compute(layer, US(400), US(waited));
            }
        }
        prefetch.depth(60)
    };
    assert_eq!(depth(&mut prefetch, 0), 2);
    assert!(depth(&mut prefetch, 2) > 10);
}

#[test]
fn a_fixed_depth_stays_within_the_room() {
    let four = PrefetchLayers::Fixed(NonZeroUsize::new(4).expect("above 0"));
    let mut prefetch = Prefetch::new(four);
    note_transfer(&mut prefetch, US(1));
    assert_eq!(prefetch.depth(60), 4);
    assert_eq!(prefetch.depth(3), 3);
}
