//! `cargo xtask lint`: everything that can be judged without running the product.

use anyhow::Result;

use crate::{contracts, edges, run, tidy, wheel};

pub(crate) fn run() -> Result<()> {
    run::run(run::cargo().args(["fmt", "--all", "--check"]))?;
    edges::check()?;
    contracts::check()?;
    tidy::check()?;
    wheel::check_versions()?;
    let deny = ["--", "--deny", "warnings"];
    run::run(
        run::cargo()
            .args(["clippy", "--workspace", "--lib", "--bins"])
            .args(deny),
    )?;
    run::run(
        run::cargo()
            .args(["clippy", "--workspace", "--all-targets", "--all-features"])
            .args(deny),
    )?;
    run::run(run::cargo().env("RUSTDOCFLAGS", "--deny warnings").args([
        "doc",
        "--workspace",
        "--no-deps",
        "--all-features",
    ]))?;
    supply_chain()?;
    book()
}

/// Licences, sources and banned crates; the advisory data base is only at hand where there is a net.
fn supply_chain() -> Result<()> {
    if run::available("cargo-deny", &["--version"]) {
        run::run(run::cargo().args([
            "deny",
            "--all-features",
            "check",
            "bans",
            "licenses",
            "sources",
        ]))
    } else {
        eprintln!("not run: cargo-deny is not installed (`cargo install cargo-deny --locked`)");
        Ok(())
    }
}

fn book() -> Result<()> {
    if run::available("mdbook", &["--version"]) {
        run::run(
            std::process::Command::new("mdbook")
                .current_dir(run::root())
                .args(["build", "docs"]),
        )
    } else {
        eprintln!("not run: mdbook is not installed (`cargo install mdbook --locked`)");
        Ok(())
    }
}
