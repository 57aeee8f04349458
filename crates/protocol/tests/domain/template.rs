use std::num::NonZeroU64;

use layercake_protocol::layout::{
    AppliedRanges, EntryBuffer, LayerSpec, ObjectLayout, RangeTemplate, TemplateError,
};
use proptest::prelude::*;

use crate::layout::layers;

fn unit(bytes: u64) -> NonZeroU64 {
    NonZeroU64::new(bytes).expect("not zero")
}

fn two_entries() -> RangeTemplate {
    let layout = ObjectLayout::new([LayerSpec::new(0, [("k", 10), ("v", 4)])]).expect("valid");
    RangeTemplate::new(&layout, 0, unit(8)).expect("there")
}

#[test]
fn a_template_is_refused_where_addresses_would_be_wrong() {
    let template = two_entries();
    let buffer = |base, stride| EntryBuffer { base, stride };
    assert_eq!(
        template.bind(&[buffer(0, 10)], 4).expect_err("one missing"),
        TemplateError::BufferCount {
            expected: 2,
            found: 1
        }
    );
    assert_eq!(
        template
            .bind(&[buffer(0, 9), buffer(0, 4)], 4)
            .expect_err("overlap"),
        TemplateError::Stride {
            entry: 0,
            len: 10,
            stride: 9
        }
    );
    assert_eq!(
        template.bind(&[buffer(0, 10), buffer(u64::MAX - 15, 4)], 4),
        Err(TemplateError::Overflow {
            entry: 1,
            blocks: 4,
            base: u64::MAX - 15
        })
    );
    assert!(
        template
            .bind(&[buffer(0, 10), buffer(u64::MAX - 16, 4)], 4)
            .is_ok()
    );
    let layout = ObjectLayout::new([LayerSpec::new(0, [("k", 1)])]).expect("valid");
    assert_eq!(
        RangeTemplate::new(&layout, 1, unit(8)),
        Err(TemplateError::NoLayer { layer: 1, count: 1 })
    );
}

#[test]
fn a_block_that_the_cache_has_not_is_refused_and_leaves_nothing() {
    let buffers = [
        EntryBuffer {
            base: 0,
            stride: 16,
        },
        EntryBuffer {
            base: 64,
            stride: 4,
        },
    ];
    let bound = two_entries().bind(&buffers, 4).expect("valid");
    let mut out = AppliedRanges::default();
    bound.apply(&[3, 0], &mut out).expect("inside");
    assert_eq!(out.addresses(), [48, 56, 76, 0, 8, 64]);
    assert_eq!(out.block(1), Some(&[0, 8, 64][..]));
    assert_eq!(out.block(2), None);
    assert_eq!(
        bound.apply(&[0, 4], &mut out),
        Err(TemplateError::BlockId { id: 4, blocks: 4 })
    );
    assert!(out.addresses().is_empty());
    assert_eq!(bound.lens(), [8, 2, 4]);
    assert_eq!(bound.object_offsets(), [0, 8, 10]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    /// Bytes copied piece by piece land where copying entry by entry puts them.
    #[test]
    fn applied_pieces_are_the_entries_of_their_blocks(
        specs in layers(),
        cut in 1..50_u64,
        slack in 0..5_u64,
        ids in prop::collection::vec(0..6_u64, 0..5),
    ) {
        let layout = ObjectLayout::new(specs).expect("valid");
        let mut out = AppliedRanges::default();
        for layer in 0..layout.layer_count() {
            let template = RangeTemplate::new(&layout, layer, unit(cut)).expect("there");
            let mut base = 1000;
            let mut buffers = Vec::new();
            for place in layout.layer_entries(layer) {
                let stride = place.range.len() + slack;
                buffers.push(EntryBuffer { base, stride });
                base += stride * 6;
            }
            let bound = template.bind(&buffers, 6).expect("fits");
            bound.apply(&ids, &mut out).expect("inside");
            for (index, &id) in ids.iter().enumerate() {
                let mut found = Vec::new();
                let addresses = out.block(index).expect("applied");
                prop_assert_eq!(addresses.len(), bound.len());
                for (piece, &address) in addresses.iter().enumerate() {
                    prop_assert!(bound.lens()[piece] <= cut);
                    for byte in 0..bound.lens()[piece] {
                        found.push((bound.object_offsets()[piece] + byte, address + byte));
                    }
                }
                let mut expected = Vec::new();
                for place in layout.layer_entries(layer) {
                    let buffer = buffers[place.entry];
                    for byte in 0..place.range.len() {
                        let address = buffer.base + id * buffer.stride + byte;
                        expected.push((place.range.start() + byte, address));
                    }
                }
                prop_assert_eq!(found, expected);
            }
        }
    }
}
