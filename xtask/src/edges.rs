//! The arrows between the crates: a lower layer never knows a higher one, and nothing that is built for
//! use has code that is for tests.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Result, bail};
use cargo_metadata::{DependencyKind, MetadataCommand};

use crate::run;

/// Which of our crates each crate may use in its normal build. Benches and xtask are free, and so
/// are the tests of every crate.
const ALLOWED: [(&str, &[&str]); 8] = [
    ("layercake-protocol", &[]),
    ("layercake-transport", &["layercake-protocol"]),
    (
        "layercake-store",
        &["layercake-protocol", "layercake-transport"],
    ),
    (
        "layercake-connector",
        &[
            "layercake-protocol",
            "layercake-transport",
            "layercake-store",
        ],
    ),
    (
        "layercake-engine",
        &[
            "layercake-protocol",
            "layercake-transport",
            "layercake-store",
            "layercake-connector",
        ],
    ),
    // The master moves no bytes: it knows the messages and nothing else.
    ("layercake-master", &["layercake-protocol"]),
    (
        "layercake-cli",
        &[
            "layercake-protocol",
            "layercake-transport",
            "layercake-store",
            "layercake-connector",
            "layercake-engine",
            "layercake-master",
        ],
    ),
    (
        "layercake-python",
        &[
            "layercake-protocol",
            "layercake-transport",
            "layercake-store",
            "layercake-connector",
            "layercake-master",
        ],
    ),
];

/// Features that only tests may ask for: one package that does turns them on for all that are built with it.
const FOR_TESTS: [&str; 2] = ["mock", "testing"];

const FREE: [&str; 2] = ["layercake-benches", "xtask"];

pub(crate) fn check() -> Result<()> {
    eprintln!("+ dependency arrows");
    let metadata = MetadataCommand::new()
        .current_dir(run::root())
        .no_deps()
        .exec()?;
    let allowed: BTreeMap<&str, &[&str]> = ALLOWED.into_iter().collect();
    let ours: BTreeSet<&str> = metadata
        .packages
        .iter()
        .map(|package| package.name.as_str())
        .collect();
    let mut wrong = Vec::new();
    for package in &metadata.packages {
        let name = package.name.as_str();
        for dependency in &package.dependencies {
            let for_tests = |feature: &&String| FOR_TESTS.contains(&feature.as_str());
            if dependency.kind == DependencyKind::Normal
                && ours.contains(dependency.name.as_str())
                && let Some(feature) = dependency.features.iter().find(for_tests)
            {
                let target = &dependency.name;
                wrong.push(format!(
                    "{name} may ask for {target}'s feature {feature} in its tests only"
                ));
            }
        }
        if FREE.contains(&name) {
            continue;
        }
        let Some(allowed) = allowed.get(name) else {
            wrong.push(format!("{name} is not in the table of allowed arrows"));
            continue;
        };
        for dependency in &package.dependencies {
            let target = dependency.name.as_str();
            if dependency.kind == DependencyKind::Normal
                && ours.contains(target)
                && !allowed.contains(&target)
            {
                wrong.push(format!("{name} may not use {target}"));
            }
        }
    }
    if wrong.is_empty() {
        Ok(())
    } else {
        bail!("forbidden arrows between crates:\n  {}", wrong.join("\n  "))
    }
}
