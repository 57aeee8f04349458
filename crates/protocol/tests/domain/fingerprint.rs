use layercake_protocol::fingerprint::{
    Fingerprint, FingerprintFields, GroupSignature, LayoutDigest, LayoutSignature, TensorParallel,
};
use proptest::prelude::*;

const FIELDS: FingerprintFields<'_> = FingerprintFields {
    tenant: "default",
    model: "org/model",
    revision: "main",
    kv_dtype: "bfloat16",
    block_size: 128,
    tensor_parallel: TensorParallel {
        size: 8,
        storing_ranks: 4,
    },
    layout: LayoutDigest([7; 16]),
};

fn group(block_size: u32, layers: &[&str], page_bytes: &[u64]) -> GroupSignature {
    GroupSignature {
        block_size,
        layers: layers.iter().map(|&l| l.to_owned()).collect(),
        page_bytes: page_bytes.to_vec(),
    }
}

fn signature() -> LayoutSignature {
    LayoutSignature {
        tp_size: 2,
        stages: vec![vec![
            group(16, &["model.layers.0", "model.layers.1"], &[1024, 1024]),
            group(64, &["model.layers.2"], &[4096]),
        ]],
    }
}

// A change of these values turns every stored block into a miss: it needs a new schema version.
#[test]
fn digests_keep_their_values() {
    assert_eq!(
        FIELDS.fingerprint().to_string(),
        "1961209bbddfcb80dbb829383f9a27b3"
    );
    assert_eq!(
        signature().digest().to_string(),
        "e17c0014b10aacef3585aa446c3355d5"
    );
}

#[test]
fn a_digest_is_written_and_read_as_32_digits() {
    let digest = Fingerprint([0x0f; 16]);
    assert_eq!(digest.to_string(), "0f".repeat(16));
    assert_eq!(digest.to_string().parse(), Ok(digest));
    for wrong in [
        "",
        "0f",
        &"0F".repeat(16),
        &"+f".repeat(16),
        &"0".repeat(33),
    ] {
        let error = wrong.parse::<Fingerprint>().expect_err(wrong);
        assert_eq!(error.text, wrong);
    }
}

#[test]
fn every_field_counts_in_a_fingerprint() {
    let others = [
        FingerprintFields {
            tenant: "other",
            ..FIELDS
        },
        FingerprintFields {
            model: "org/other",
            ..FIELDS
        },
        FingerprintFields {
            revision: "other",
            ..FIELDS
        },
        FingerprintFields {
            kv_dtype: "float8_e4m3",
            ..FIELDS
        },
        FingerprintFields {
            block_size: 64,
            ..FIELDS
        },
        FingerprintFields {
            tensor_parallel: TensorParallel {
                size: 4,
                storing_ranks: 4,
            },
            ..FIELDS
        },
        FingerprintFields {
            tensor_parallel: TensorParallel {
                size: 8,
                storing_ranks: 8,
            },
            ..FIELDS
        },
        FingerprintFields {
            layout: LayoutDigest([8; 16]),
            ..FIELDS
        },
        // The same text, divided otherwise among the fields.
        FingerprintFields {
            tenant: "defaultorg",
            model: "/model",
            ..FIELDS
        },
        FingerprintFields {
            model: "main",
            revision: "org/model",
            ..FIELDS
        },
    ];
    let mut seen = vec![FIELDS.fingerprint()];
    for other in others {
        let fingerprint = other.fingerprint();
        assert!(!seen.contains(&fingerprint), "{other:?}");
        seen.push(fingerprint);
    }
    assert_eq!(FIELDS.fingerprint(), seen[0]);
}

#[test]
fn order_membership_pages_and_stages_count_in_a_layout_digest() {
    let mut others = vec![signature()];
    let mut change = |edit: fn(&mut LayoutSignature)| {
        let mut other = signature();
        edit(&mut other);
        others.push(other);
    };
    change(|s| s.tp_size = 4);
    change(|s| s.stages[0].swap(0, 1));
    change(|s| s.stages[0][0].layers.swap(0, 1));
    change(|s| s.stages[0][0].page_bytes[1] = 2048);
    change(|s| s.stages[0][0].block_size = 32);
    change(|s| {
        let group = s.stages[0].remove(1);
        s.stages.push(vec![group]);
    });
    change(|s| {
        let layer = s.stages[0][0].layers.remove(1);
        s.stages[0][1].layers.insert(0, layer);
    });
    change(|s| s.stages.push(Vec::new()));
    let mut digests: Vec<_> = others.iter().map(LayoutSignature::digest).collect();
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), others.len());
}

fn texts() -> impl Strategy<Value = String> {
    prop::string::string_regex("[ab:@]{0,3}").expect("valid")
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn fingerprints_are_equal_exactly_for_equal_fields(
        a in (texts(), texts(), texts(), texts(), 0..3_u32, 0..3_u32, 0..3_u32, 0..2_u8),
        b in (texts(), texts(), texts(), texts(), 0..3_u32, 0..3_u32, 0..3_u32, 0..2_u8),
    ) {
        let fingerprint = |f: &(String, String, String, String, u32, u32, u32, u8)| {
            FingerprintFields {
                tenant: &f.0,
                model: &f.1,
                revision: &f.2,
                kv_dtype: &f.3,
                block_size: f.4,
                tensor_parallel: TensorParallel { size: f.5, storing_ranks: f.6 },
                layout: LayoutDigest([f.7; 16]),
            }
            .fingerprint()
        };
        prop_assert_eq!(fingerprint(&a), fingerprint(&a.clone()));
        prop_assert_eq!(fingerprint(&a) == fingerprint(&b), a == b);
    }
}
