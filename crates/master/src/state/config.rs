//! What an operator can set about the state machine, and what is accepted.

use std::collections::BTreeMap;
use std::time::Duration;

use layercake_protocol::ids::{Epoch, Generation};
use layercake_protocol::key::Tenant;
use thiserror::Error;

/// Rules and sizes of a [`State`](super::State). [`validate`](Self::validate) says what is accepted.
#[derive(Clone, Debug, PartialEq)]
pub struct StateConfig {
    /// How long a read or a first probe protects an object (S5).
    pub lease: Duration,
    /// Probes alone extend a lease to at most this many times its length, counted from the first.
    pub probe_lease_factor: u32,
    /// Share of the pool's bytes in use above which eviction starts, over 0 and at most 1.
    pub high_watermark: f64,
    /// Share of the pool's bytes that one round of eviction frees beyond the watermark.
    pub eviction_ratio: f64,
    /// A member that is not heard of for this long is gone.
    pub client_ttl: Duration,
    /// A put that is not finished after this long may be taken over by whoever wants the key.
    pub discard_after: Duration,
    /// A put that is not finished after this long is dropped even if nobody wants its key.
    pub release_after: Duration,
    /// Life of a soft pin that names none; reads renew it.
    pub soft_pin_ttl: Duration,
    /// The longest life of a soft pin that a caller may ask for; a longer one is shortened to it.
    pub max_soft_pin_ttl: Duration,
    /// Whether soft-pinned objects go when nothing else is left.
    pub evict_soft_pinned: bool,
    /// Which segment a new object goes to, where its configuration does not say.
    pub strategy: Strategy,
    /// What tenants mean.
    pub tenancy: Tenancy,
    /// Parts of the object table, each with a lock of its own: a power of two, at most 4,096.
    pub shards: usize,
    /// The first reservation's number. Above everything an earlier master gave out.
    pub first_generation: Generation,
    /// The first epoch drawn. Above everything an earlier master gave out.
    pub first_epoch: Epoch,
    /// Makes the random choices of placement repeatable.
    pub seed: u64,
}

/// What tenants mean to a master.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Tenancy {
    /// Each has its own key space, and needs no setting up.
    #[default]
    Apart,
    /// Members are told to put all tenants' keys into one key space.
    Shared,
    /// Each has its own key space and a quota: payload bytes that its objects may fill, each object
    /// once. A tenant without one can't store anything.
    Strict(BTreeMap<Tenant, u64>),
}

/// How a segment is chosen among those with a hole that is large enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Strategy {
    /// The one with more room of two random ones.
    #[default]
    RoomierOfTwo,
    /// Any, with equal odds.
    Random,
    /// The one with the largest share of its bytes free.
    Roomiest,
    /// One of the caller's own process, then of its host, then as [`RoomierOfTwo`](Self::RoomierOfTwo).
    LocalFirst,
}

impl Default for StateConfig {
    fn default() -> Self {
        Self {
            lease: Duration::from_secs(10),
            probe_lease_factor: 3,
            high_watermark: 0.90,
            eviction_ratio: 0.05,
            client_ttl: Duration::from_secs(10),
            discard_after: Duration::from_secs(30),
            release_after: Duration::from_mins(10),
            soft_pin_ttl: Duration::from_mins(30),
            max_soft_pin_ttl: LONGEST,
            evict_soft_pinned: true,
            strategy: Strategy::default(),
            tenancy: Tenancy::default(),
            shards: 64,
            first_generation: Generation(1),
            first_epoch: Epoch(1),
            seed: 0,
        }
    }
}

/// A setting that the state machine can't work with.
#[derive(Clone, Debug, PartialEq, Error)]
#[error("{setting} = {value}: {accepted}")]
pub struct ConfigError {
    /// The setting's name.
    pub setting: &'static str,
    /// Its value.
    pub value: String,
    /// What is accepted.
    pub accepted: &'static str,
}

/// The longest time that a setting may name: a century, so that sums stay inside a [`Moment`](super::Moment).
const LONGEST: Duration = Duration::from_hours(100 * 366 * 24);

impl StateConfig {
    /// Checks every setting; the first that is not accepted is the error.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let refuse = |setting, value: String, accepted| {
            Err(ConfigError {
                setting,
                value,
                accepted,
            })
        };
        for (setting, value) in [
            ("lease", self.lease),
            ("client_ttl", self.client_ttl),
            ("discard_after", self.discard_after),
            ("release_after", self.release_after),
            ("soft_pin_ttl", self.soft_pin_ttl),
            ("max_soft_pin_ttl", self.max_soft_pin_ttl),
        ] {
            if value.is_zero() || value > LONGEST {
                let accepted = "a time over zero and up to a century";
                return refuse(setting, format!("{value:?}"), accepted);
            }
        }
        if self.release_after < self.discard_after {
            return refuse(
                "release_after",
                format!("{:?}", self.release_after),
                "at least discard_after",
            );
        }
        if self.probe_lease_factor == 0 {
            return refuse("probe_lease_factor", "0".into(), "1 or more");
        }
        if !(self.high_watermark > 0.0 && self.high_watermark <= 1.0) {
            return refuse(
                "high_watermark",
                self.high_watermark.to_string(),
                "over 0 and at most 1",
            );
        }
        if !(self.eviction_ratio > 0.0 && self.eviction_ratio <= 1.0) {
            return refuse(
                "eviction_ratio",
                self.eviction_ratio.to_string(),
                "over 0 and at most 1",
            );
        }
        if !self.shards.is_power_of_two() || self.shards > 4096 {
            return refuse(
                "shards",
                self.shards.to_string(),
                "a power of two from 1 to 4096",
            );
        }
        if self.first_generation == Generation::NONE {
            return refuse("first_generation", "0".into(), "1 or more");
        }
        if self.first_epoch == Epoch::UNSET {
            return refuse("first_epoch", "0".into(), "1 or more");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_accepted() {
        assert_eq!(StateConfig::default().validate(), Ok(()));
    }

    #[test]
    fn every_bad_setting_is_refused_by_name() {
        type Change = fn(&mut StateConfig);
        let cases: [(&str, Change); 15] = [
            ("lease", |c| c.lease = Duration::ZERO),
            ("lease", |c| c.lease = Duration::MAX),
            ("client_ttl", |c| c.client_ttl = Duration::ZERO),
            ("discard_after", |c| c.discard_after = Duration::ZERO),
            ("release_after", |c| {
                c.release_after = Duration::from_secs(1);
            }),
            ("soft_pin_ttl", |c| c.soft_pin_ttl = Duration::ZERO),
            ("max_soft_pin_ttl", |c| c.max_soft_pin_ttl = Duration::MAX),
            ("probe_lease_factor", |c| c.probe_lease_factor = 0),
            ("high_watermark", |c| c.high_watermark = 0.0),
            ("high_watermark", |c| c.high_watermark = f64::NAN),
            ("eviction_ratio", |c| c.eviction_ratio = 1.5),
            ("shards", |c| c.shards = 0),
            ("shards", |c| c.shards = 48),
            ("first_generation", |c| c.first_generation = Generation(0)),
            ("first_epoch", |c| c.first_epoch = Epoch(0)),
        ];
        for (setting, change) in cases {
            let mut config = StateConfig::default();
            change(&mut config);
            assert_eq!(config.validate().map_err(|e| e.setting), Err(setting));
        }
    }
}
