use std::collections::HashMap;

use layercake_protocol::fingerprint::{Fingerprint, LayoutDigest};
use layercake_protocol::key::{
    Coordinates, KeyError, KeyForm, KeySchema, ObjectKey, Parallelism, Tenant,
};
use proptest::prelude::*;

const ONE: Parallelism = Parallelism {
    pp: 1,
    pcp: 1,
    dcp: 1,
};

#[test]
fn keys_have_1_to_65535_bytes_of_utf8() {
    assert_eq!(ObjectKey::new(""), Err(KeyError::Length { len: 0 }));
    let longest = "k".repeat(65_535);
    assert_eq!(ObjectKey::new(&longest).expect("fits").as_str(), longest);
    assert_eq!(
        ObjectKey::new(&"k".repeat(65_536)),
        Err(KeyError::Length { len: 65_536 })
    );
    assert_eq!(
        ObjectKey::from_utf8(b"ab\xff"),
        Err(KeyError::NotUtf8 { valid_up_to: 2 })
    );
    let text = KeyError::Length { len: 0 }.to_string();
    assert!(text.contains('0') && text.contains("65535"), "{text}");
}

#[test]
fn a_tenant_has_1_to_255_bytes_and_a_default() {
    assert_eq!(Tenant::default().as_str(), "default");
    assert_eq!(Tenant::new("default"), Ok(Tenant::default()));
    assert!(Tenant::new(&"t".repeat(255)).is_ok());
    for len in [0, 256] {
        assert_eq!(
            Tenant::new(&"t".repeat(len)),
            Err(KeyError::TenantLength { len })
        );
    }
}

#[test]
fn a_map_of_keys_is_searched_by_text() {
    let map = HashMap::from([(ObjectKey::new("a").expect("fits"), 1)]);
    assert_eq!(map.get("a"), Some(&1));
    assert_eq!(map.get("b"), None);
}

#[test]
fn compatible_keys_are_the_plain_ones() {
    let single = KeySchema::single_group("org/model", KeyForm::Compatible, ONE).expect("valid");
    let rank = single.rank(Coordinates::of_rank(3)).expect("valid");
    let key = rank.key(&[0x0a, 0xff]).expect("fits");
    assert_eq!(key.as_str(), "org/model@0aff@3");
    assert_eq!(rank.key_of_hex("0aff"), Ok(key));

    let layout = LayoutDigest([0x11; 16]);
    let hybrid = KeySchema::hybrid("m", KeyForm::Compatible, layout, 2, 128, ONE).expect("valid");
    let rank = hybrid.rank(Coordinates::of_rank(0)).expect("valid");
    assert_eq!(
        rank.key(&[0xbe, 0xef]).expect("fits").as_str(),
        "m@mooncake_hybrid_v1:11111111111111111111111111111111@group:2@block:128@beef@0"
    );
}

#[test]
fn fingerprinted_keys_name_their_deployment_and_coordinates() {
    let form = KeyForm::Fingerprinted(Fingerprint([0x22; 16]));
    let wide = Parallelism {
        pp: 4,
        pcp: 1,
        dcp: 2,
    };
    let schema = KeySchema::single_group("a@b%", form, wide).expect("escaped");
    let at = Coordinates {
        rank: 7,
        pp: 3,
        pcp: 0,
        dcp: 1,
    };
    let key = schema.rank(at).expect("inside").key(&[1]).expect("fits");
    assert_eq!(
        key.as_str(),
        "a%40b%25@layercake_v1:22222222222222222222222222222222@01@7@pp:3/4@dcp:1/2"
    );
}

#[test]
fn what_would_make_keys_ambiguous_is_refused_by_name() {
    assert_eq!(
        KeySchema::single_group("a@b", KeyForm::Compatible, ONE),
        Err(KeyError::SeparatorInModel {
            model: "a@b".to_owned()
        })
    );
    assert_eq!(
        KeySchema::single_group("", KeyForm::Compatible, ONE),
        Err(KeyError::NoModel)
    );
    let schema = KeySchema::single_group("m", KeyForm::Compatible, ONE).expect("valid");
    assert_eq!(
        schema.rank(Coordinates {
            pcp: 1,
            ..Coordinates::default()
        }),
        Err(KeyError::Coordinate {
            kind: "pcp",
            value: 1,
            size: 1
        })
    );
    let rank = schema.rank(Coordinates::default()).expect("inside");
    assert_eq!(rank.key(&[]), Err(KeyError::NoHash));
    assert_eq!(rank.key_of_hex(""), Err(KeyError::NoHash));
    for hash in ["0A", "a@b", "xy"] {
        assert_eq!(
            rank.key_of_hex(hash),
            Err(KeyError::HashDigits {
                hash: hash.to_owned()
            })
        );
    }
    // model (1) + separators (2) + rank (1) + digits
    assert!(rank.key(&vec![0; 32_765]).is_ok());
    assert_eq!(
        rank.key(&vec![0; 32_766]),
        Err(KeyError::Length { len: 65_536 })
    );
}

/// Layout, group, block size.
type Group = (LayoutDigest, u32, u32);

/// All that tells one object of a connector from another.
#[derive(Clone, Debug, PartialEq)]
struct Identity {
    model: String,
    form: KeyForm,
    hybrid: Option<Group>,
    parallelism: Parallelism,
    at: Coordinates,
    hash: Vec<u8>,
}

impl Identity {
    fn key(&self) -> Result<ObjectKey, KeyError> {
        let schema = match self.hybrid {
            None => KeySchema::single_group(&self.model, self.form, self.parallelism)?,
            Some((layout, group, block)) => KeySchema::hybrid(
                &self.model,
                self.form,
                layout,
                group,
                block,
                self.parallelism,
            )?,
        };
        schema.rank(self.at)?.key(&self.hash)
    }

    /// This identity with one field of the other's at a time.
    fn mixed_with(&self, other: &Self) -> [Self; 8] {
        let with = |edit: &dyn Fn(&mut Self)| {
            let mut mixed = self.clone();
            edit(&mut mixed);
            mixed
        };
        let part = |edit: &dyn Fn(&mut Group, Group)| {
            with(&|mixed| {
                if let (Some(mine), Some(theirs)) = (&mut mixed.hybrid, other.hybrid) {
                    edit(mine, theirs);
                }
            })
        };
        [
            with(&|mixed| mixed.model.clone_from(&other.model)),
            with(&|mixed| mixed.form = other.form),
            part(&|mine, theirs| mine.0 = theirs.0),
            part(&|mine, theirs| mine.1 = theirs.1),
            part(&|mine, theirs| mine.2 = theirs.2),
            with(&|mixed| mixed.parallelism = other.parallelism),
            with(&|mixed| mixed.at = other.at),
            with(&|mixed| mixed.hash.clone_from(&other.hash)),
        ]
    }
}

/// Few values of every field, so that two identities often agree in most of them.
fn identities() -> impl Strategy<Value = Identity> {
    let model = prop::sample::select(vec![
        "m",
        "m%40",
        "m@",
        "m@0a",
        "m@mooncake_hybrid_v1:x@group:0@block:1",
        "m@group:0",
        "0a",
    ]);
    let form = prop::sample::select(vec![
        KeyForm::Compatible,
        KeyForm::Fingerprinted(Fingerprint([1; 16])),
        KeyForm::Fingerprinted(Fingerprint([2; 16])),
    ]);
    let layout = (0..2_u8, 0..2_u32, 1..3_u32).prop_map(|(l, g, b)| (LayoutDigest([l; 16]), g, b));
    let parallelism =
        (1..3_u32, 1..3_u32, 1..4_u32).prop_map(|(pp, pcp, dcp)| Parallelism { pp, pcp, dcp });
    let at = (0..2_u32, 0..2_u32, 0..2_u32, 0..2_u32)
        .prop_map(|(rank, pp, pcp, dcp)| Coordinates { rank, pp, pcp, dcp });
    let hash = prop::collection::vec(prop::sample::select(vec![0_u8, 0x0a]), 1..3);
    (model, form, prop::option::of(layout), parallelism, at, hash).prop_map(
        |(model, form, hybrid, parallelism, at, hash)| Identity {
            model: model.to_owned(),
            form,
            hybrid,
            parallelism,
            at,
            hash,
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn two_identities_never_make_one_key(
        identities in prop::collection::vec(identities(), 48),
    ) {
        let mut of_key: HashMap<ObjectKey, Identity> = HashMap::new();
        let near = identities.iter().zip(&identities[1..]).flat_map(|(a, b)| a.mixed_with(b));
        for identity in near.chain(identities.iter().cloned()) {
            let Ok(key) = identity.key() else { continue };
            if let Some(other) = of_key.get(&key) {
                prop_assert_eq!(other, &identity, "{}", key);
            }
            of_key.insert(key, identity);
        }
    }
}
