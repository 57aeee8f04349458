//! Real computation, in processes of its own: what is loaded equals what is computed. How long it takes is not looked at, since
//! tests share their machine.

mod common;

use common::{Scene, assert_fields, run};

#[test]
fn the_demo_s_engines_agree_to_the_bit() {
    let scene = Scene::with_trace("");
    let picture = scene.file("timeline.svg");
    let said = run(&format!(
        "demo --requests 5 --tokens 3 --ranks 2 --step-tokens 100 --ignore-times --json --timeline {}",
        picture.display()
    ))
    .ok();
    assert_eq!(said.err, "", "quiet when nothing is wrong");
    let report = said.json();
    assert_fields(
        &report,
        &[
            ("requests", 5),
            ("mismatches", 0),
            ("failed_requests", 0),
            ("failed_loads", 0),
            ("ranks", 2),
            ("layers", 9),
        ],
    );
    assert_eq!(report["tokens_equal"], true);
    assert_eq!(report["logits_equal"], true);
    let number = |name: &str| report[name].as_u64().expect("a number");
    // All whole blocks of 16 tokens are loaded: less than one block a request is computed again.
    assert!(
        number("prompt_tokens") - number("hit_tokens") <= 5 * 16,
        "{report}"
    );
    assert_eq!(
        number("objects"),
        number("saved_blocks"),
        "one a block and rank"
    );
    let svg = std::fs::read_to_string(picture).expect("drawn");
    assert!(
        svg.starts_with("<svg") && svg.contains("decode"),
        "{svg:.200}"
    );
}

#[test]
fn whole_objects_agree_too_and_people_get_tables() {
    let said = run("demo --requests 3 --tokens 2 --whole-objects --ignore-times").ok();
    for text in [
        "served from the pool",
        "logits are equal",
        "waited for its load",
    ] {
        assert!(said.out.contains(text), "{}", said.out);
    }
    assert!(!said.out.contains("NO"), "{}", said.out);
    // The last line is for programs.
    let last = said.out.lines().last().expect("it says something");
    let report: serde_json::Value = serde_json::from_str(last).expect("JSON");
    assert_eq!(report["tokens_equal"], true);
}

#[test]
fn ranks_that_do_not_share_the_heads_are_refused() {
    let text = run("demo --ranks 3").refused();
    assert!(
        text.contains("--ranks") && text.contains("heads = 8"),
        "{text}"
    );
    assert!(run("demo --requests 0").refused().contains("--requests"));
}
