use std::num::NonZeroU32;

use layercake_protocol::layout::{
    GeometryError, LayerSpec, LayoutError, ModelGeometry, ObjectLayout,
};
use layercake_protocol::range::ByteRange;
use proptest::prelude::*;

fn range(start: u64, end: u64) -> ByteRange {
    ByteRange::from_bounds(start, end).expect("ordered")
}

/// The layers of case DEV-06: unequal lengths, and one layer of two entries.
fn dev_06() -> Vec<LayerSpec> {
    vec![
        LayerSpec::new(0, [("kv", 64)]),
        LayerSpec::new(1, [("kv", 64)]),
        LayerSpec::new(2, [("kv", 24)]),
        LayerSpec::new(3, [("index", 96), ("scale", 8)]),
        LayerSpec::new(4, [("kv", 64 << 10)]),
    ]
}

#[test]
fn dev_06_offsets_are_sums_of_actual_lengths() {
    let layout = ObjectLayout::new(dev_06()).expect("valid");
    let layers: Vec<_> = (0..5)
        .map(|l| layout.layer_range(l).expect("there"))
        .collect();
    assert_eq!(
        layers,
        [
            range(0, 64),
            range(64, 128),
            range(128, 152),
            range(152, 256),
            range(256, 65_792)
        ]
    );
    assert_eq!(layout.entry_range(3, 0), Some(range(152, 248)));
    assert_eq!(layout.entry_range(3, 1), Some(range(248, 256)));
    assert_eq!(layout.object_len(), 64 + 64 + 24 + 96 + 8 + 65_536);
    assert_eq!(layout.entry_range(3, 2), None);
    assert_eq!(layout.layer_range(5), None);
}

#[test]
fn a_group_has_its_own_layer_index_and_keeps_the_physical_one() {
    let layout = ObjectLayout::new([
        LayerSpec::new(11, [("k", 8)]),
        LayerSpec::new(3, [("k", 4)]),
        LayerSpec::new(7, [("k", 2)]),
    ])
    .expect("valid");
    assert_eq!(layout.layer_count(), 3);
    let physical: Vec<_> = (0..4).map(|l| layout.physical_layer(l)).collect();
    assert_eq!(physical, [Some(3), Some(7), Some(11), None]);
    assert_eq!(layout.local_layer(7), Some(1));
    assert_eq!(layout.local_layer(0), None);
    assert_eq!(layout.layer_range(1), Some(range(4, 6)));
}

#[test]
fn every_process_arrives_at_the_same_order() {
    let a = ObjectLayout::new([
        LayerSpec::new(0, [("v", 2), ("k", 1)]),
        LayerSpec::new(1, [("k", 3)]),
    ]);
    let b = ObjectLayout::new([
        LayerSpec::new(1, [("k", 3)]),
        LayerSpec::new(0, [("k", 1), ("v", 2)]),
    ]);
    assert_eq!(a, b);
    let layout = a.expect("valid");
    assert_eq!(layout.entry_name(0, 0), Some("k"));
    assert_eq!(layout.entry_range(0, 1), Some(range(1, 3)));
}

#[test]
fn a_layout_digest_covers_order_names_and_lengths() {
    let layouts = [
        vec![LayerSpec::new(0, [("k", 1), ("v", 2)])],
        vec![LayerSpec::new(0, [("k", 2), ("v", 1)])],
        vec![LayerSpec::new(0, [("k", 1), ("w", 2)])],
        vec![LayerSpec::new(1, [("k", 1), ("v", 2)])],
        vec![LayerSpec::new(0, [("k", 1)]), LayerSpec::new(1, [("v", 2)])],
        vec![LayerSpec::new(0, [("k", 3)])],
    ];
    let mut digests: Vec<_> = layouts
        .iter()
        .map(|l| ObjectLayout::new(l.clone()).expect("valid").digest())
        .collect();
    assert_eq!(digests[0].to_string(), "2bf08fcd8ad54c83a9237bbbaf305ee3");
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), layouts.len());
}

#[test]
fn what_makes_no_layout_is_refused_by_name() {
    let of = |layers: Vec<LayerSpec>| ObjectLayout::new(layers);
    let name = || "k".to_owned();
    assert_eq!(of(vec![]), Err(LayoutError::NoLayers));
    assert_eq!(
        of(vec![LayerSpec::new(4, [])]),
        Err(LayoutError::NoEntries { physical: 4 })
    );
    assert_eq!(
        of(vec![
            LayerSpec::new(4, [("k", 1)]),
            LayerSpec::new(4, [("k", 1)])
        ]),
        Err(LayoutError::DuplicateLayer { physical: 4 })
    );
    assert_eq!(
        of(vec![LayerSpec::new(4, [("k", 1), ("k", 2)])]),
        Err(LayoutError::DuplicateEntry {
            physical: 4,
            name: name()
        })
    );
    assert_eq!(
        of(vec![LayerSpec::new(4, [("k", 0)])]),
        Err(LayoutError::EmptyEntry {
            physical: 4,
            name: name()
        })
    );
    assert_eq!(
        of(vec![
            LayerSpec::new(0, [("k", u64::MAX)]),
            LayerSpec::new(4, [("k", 1)])
        ]),
        Err(LayoutError::Overflow {
            physical: 4,
            name: name()
        })
    );
    assert_eq!(
        of((0..4097).map(|l| LayerSpec::new(l, [("k", 1)])).collect()),
        Err(LayoutError::TooManyLayers { count: 4097 })
    );
}

#[test]
fn both_forms_of_a_geometry_are_read() {
    let layers = NonZeroU32::new(2).expect("not zero");
    let uniform = ModelGeometry::parse_uniform(layers, "1024, 512").expect("valid");
    assert_eq!(uniform.layers(), [[1024, 512], [1024, 512]]);
    assert_eq!(uniform.to_string(), "0-1:1024,512");

    let uneven: ModelGeometry = "8:512,2048;0-7:1024,1024".parse().expect("valid");
    assert_eq!(uneven.layers().len(), 9);
    assert_eq!(uneven.layout().object_len(), 8 * 2048 + 2560);
    assert_eq!(
        uneven.layout().entry_range(8, 1),
        Some(range(16_896, 18_944))
    );
    assert_eq!(uneven.to_string(), "0-7:1024,1024;8:512,2048");
}

#[test]
fn entries_keep_the_order_in_which_they_are_given() {
    let lens: Vec<u64> = (1..=12).collect();
    let geometry = ModelGeometry::uneven(vec![lens.clone()]).expect("valid");
    let found: Vec<u64> = geometry.layout().entries().map(|e| e.range.len()).collect();
    assert_eq!(found, lens);
}

#[test]
fn a_wrong_geometry_is_refused_naming_the_piece() {
    let parse = |text: &str| text.parse::<ModelGeometry>().expect_err(text);
    let text = |t: &str| t.to_owned();
    assert_eq!(
        parse("0-3:8;2-5:16"),
        GeometryError::Overlap {
            piece: text("2-5:16"),
            layer: 2,
            earlier: text("0-3:8")
        }
    );
    assert_eq!(parse("0-3:8;5:8"), GeometryError::Gap { layer: 4, last: 5 });
    assert_eq!(parse("1:8"), GeometryError::Gap { layer: 0, last: 1 });
    assert_eq!(
        parse("0:8,0"),
        GeometryError::Zero {
            piece: text("0:8,0")
        }
    );
    for wrong in [
        "0:8,",
        "0:x",
        "0:+8",
        "0:-8",
        "0:99999999999999999999",
        "0:8:8",
    ] {
        assert!(
            matches!(parse(wrong), GeometryError::Number { piece, .. } if piece == wrong),
            "{wrong}"
        );
    }
    for wrong in [
        "3-1:8",
        "x:8",
        ":8",
        "-1:8",
        "0-:8",
        "0-4096:8",
        "0-4294967296:8",
        "+0:8",
    ] {
        assert!(
            matches!(parse(wrong), GeometryError::Layers { piece, .. } if piece == wrong),
            "{wrong}"
        );
    }
    assert_eq!(parse(""), GeometryError::Form { piece: text("") });
    assert_eq!(parse("0:8;"), GeometryError::Form { piece: text("") });
    assert!(matches!(
        parse("0-1:18446744073709551615"),
        GeometryError::Layout(LayoutError::Overflow { physical: 1, .. })
    ));
    let many = NonZeroU32::new(5000).expect("not zero");
    assert_eq!(
        ModelGeometry::uniform(many, &[8]),
        Err(GeometryError::Layout(LayoutError::TooManyLayers {
            count: 5000
        }))
    );
}

/// Layers of any physical indices, with any number of entries of any small length.
pub(crate) fn layers() -> impl Strategy<Value = Vec<LayerSpec>> {
    let entries = prop::collection::btree_map("[a-c]{1,3}", 1..40_u64, 1..5);
    prop::collection::btree_map(0..100_u32, entries, 1..8)
        .prop_map(|layers| {
            let layers = layers.into_iter().map(|(physical, entries)| {
                LayerSpec::new(physical, entries.iter().map(|(n, &l)| (n.as_str(), l)))
            });
            layers.collect::<Vec<_>>()
        })
        .prop_shuffle()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn every_byte_belongs_to_exactly_one_entry(specs in layers()) {
        let layout = ObjectLayout::new(specs.clone()).expect("valid");
        let total: u64 = specs.iter().flat_map(|l| &l.entries).map(|e| e.len).sum();
        prop_assert_eq!(layout.object_len(), total);
        prop_assert_eq!(layout.layer_count(), specs.len());
        for offset in 0..total {
            let owners: Vec<_> = layout
                .entries()
                .filter(|e| e.range.contains_offset(offset))
                .collect();
            prop_assert_eq!(owners.len(), 1);
            let owner = owners[0];
            prop_assert_eq!(layout.locate(offset), Some(owner));
            prop_assert_eq!(layout.entry_range(owner.layer, owner.entry), Some(owner.range));
            let layers = (0..layout.layer_count())
                .filter(|&l| layout.layer_range(l).is_some_and(|r| r.contains_offset(offset)));
            prop_assert_eq!(layers.collect::<Vec<_>>(), vec![owner.layer]);
        }
        prop_assert_eq!(layout.locate(total), None);

        for spec in &specs {
            let layer = layout.local_layer(spec.physical).expect("every layer is there");
            prop_assert_eq!(layout.physical_layer(layer), Some(spec.physical));
            prop_assert_eq!(layout.entry_count(layer), spec.entries.len());
            for entry in &spec.entries {
                let places: Vec<_> = layout
                    .layer_entries(layer)
                    .filter(|place| place.name == entry.name)
                    .collect();
                prop_assert_eq!(places.len(), 1);
                prop_assert_eq!(places[0].range.len(), entry.len);
            }
        }
        let order: Vec<_> = layout.entries().map(|e| (e.physical, e.name)).collect();
        prop_assert!(order.is_sorted());
    }

    #[test]
    fn a_geometry_is_read_as_it_is_written(
        layers in prop::collection::vec(prop::collection::vec(1..4_u64, 1..4), 1..20),
    ) {
        let geometry = ModelGeometry::uneven(layers).expect("valid");
        prop_assert_eq!(geometry.to_string().parse(), Ok(geometry));
    }

    #[test]
    fn any_text_is_a_geometry_or_an_error(text in "[0-9a-b:;,. -]{0,24}") {
        if let Ok(geometry) = text.parse::<ModelGeometry>() {
            prop_assert!(geometry.layout().object_len() > 0);
        }
    }
}
