//! `cargo xtask bench --page`: plots and tables of the page of results, from the published figures.
//!
//! What stands between the two marks of the page is written here; all else on it is written by hand.

use std::fmt::Write as _;

use anyhow::{Context as _, Result, bail};

use super::chart::Chart;
use super::compare::figures::{BANDWIDTH, GROUPS, Group, KEYS, LATENCY, Line, show};
use super::compare::{MOONCAKE, OURS, OURS_TCP, PUBLISHED, PUBLISHED_LINK, Place, Results};
use crate::run;

const PAGE: &str = "docs/performance/index.md";
const BEGIN: &str = "<!-- figures: written by `cargo xtask bench --page` -->";
const END: &str = "<!-- figures end -->";

/// A plot of the figures of a group, or of what they cost.
struct Plot {
    file: &'static str,
    group: &'static Group,
    cost: bool,
    /// For figures that differ by more than a factor of ten.
    logarithmic: bool,
}

const PLOTS: [Plot; 5] = [
    plot("bandwidth.svg", &BANDWIDTH, false, false),
    plot("bandwidth-cost.svg", &BANDWIDTH, true, false),
    plot("calls.svg", &LATENCY, false, true),
    plot("keys.svg", &KEYS, false, true),
    plot("keys-cost.svg", &KEYS, true, true),
];

const fn plot(file: &'static str, group: &'static Group, cost: bool, logarithmic: bool) -> Plot {
    Plot {
        file,
        group,
        cost,
        logarithmic,
    }
}

pub(crate) fn write() -> Result<()> {
    for (name, text) in render()? {
        std::fs::write(run::root().join(&name), text).with_context(|| format!("write {name}"))?;
        println!("{name}");
    }
    Ok(())
}

/// The plots and the page, by the names of their files.
fn render() -> Result<Vec<(String, String)>> {
    let read = |name: &str| {
        std::fs::read_to_string(run::root().join(name)).with_context(|| format!("read {name}"))
    };
    let parse = |name: &str| -> Result<Results> {
        serde_json::from_str(&read(name)?).with_context(|| format!("read {name}"))
    };
    let results = parse(PUBLISHED)?;
    let page = read(PAGE)?;
    let Some((before, rest)) = page.split_once(BEGIN) else {
        bail!("{PAGE} has no mark `{BEGIN}`");
    };
    let Some((_, after)) = rest.split_once(END) else {
        bail!("{PAGE} has no mark `{END}`");
    };
    let mut text = figures(&results);
    if run::root().join(PUBLISHED_LINK).is_file() {
        over_a_link(&mut text, &parse(PUBLISHED_LINK)?);
    }
    let plots = PLOTS.iter().map(|plot| {
        let name = format!("docs/performance/{}", plot.file);
        (name, chart(&results, plot).render())
    });
    let page = format!("{before}{BEGIN}\n\n{text}\n{END}{after}");
    Ok(plots.chain([(PAGE.to_owned(), page)]).collect())
}

/// The figure of a line that a plot or table shows, and its unit.
fn shown(group: &Group, cost: bool) -> (Option<&'static str>, &'static str) {
    match group.cost {
        Some((figure, unit)) if cost => (Some(figure), unit),
        _ => (None, group.unit),
    }
}

fn place(line: &Line, figure: Option<&'static str>) -> Place<'static> {
    figure.map_or_else(|| line.place(), |figure| line.of(figure))
}

fn chart<'a>(results: &'a Results, plot: &Plot) -> Chart<'a> {
    let series = results.providers();
    let (figure, unit) = shown(plot.group, plot.cost);
    let rows = plot.group.lines.iter().map(|line| {
        let figures = series.iter();
        let figures = figures.map(|provider| results.median(provider, place(line, figure)));
        (line.label, figures.collect())
    });
    Chart {
        title: plot.group.title,
        unit,
        rows: rows.collect(),
        marks: if unit == "GB/s" {
            marks(results)
        } else {
            Vec::new()
        },
        logarithmic: plot.logarithmic,
        series,
    }
}

/// The best that the machine can do.
fn marks(results: &Results) -> Vec<(&'static str, f64)> {
    let best = |of: &str| {
        let figures = results
            .machine
            .iter()
            .filter(|(name, _)| name.starts_with(of));
        figures.map(|(_, figure)| *figure).reduce(f64::max)
    };
    [
        ("raw sockets", best("sockets")),
        ("plain copies", best("copies")),
    ]
    .into_iter()
    .filter_map(|(name, figure)| Some((name, figure?)))
    .collect()
}

/// Everything between the marks.
fn figures(results: &Results) -> String {
    let mut text = String::from("| condition | |\n| --- | --- |\n");
    for (name, value) in &results.conditions {
        put(&mut text, format_args!("| {name} | {value} |\n"));
    }
    for (name, figure) in &results.machine {
        let name = name.replace('_', " ");
        put(
            &mut text,
            format_args!("| {name} | {} GB/s |\n", show(*figure)),
        );
    }
    for group in GROUPS {
        let heading = [group.title, group.unit].map(str::trim);
        let heading = heading.into_iter().filter(|part| !part.is_empty());
        let heading = heading.collect::<Vec<_>>().join(", ");
        put(&mut text, format_args!("\n### {heading}\n\n"));
        plots(&mut text, group, false);
        table(&mut text, results, group, false);
        if let Some((_, unit)) = group.cost {
            put(
                &mut text,
                format_args!("\nWhat that costs, in {unit} of all processes together:\n\n"),
            );
            plots(&mut text, group, true);
            table(&mut text, results, group, true);
        }
    }
    failures(&mut text, results);
    kernel(&mut text, results);
    text
}

/// The figures of a slower link that differ from those of loopback.
fn over_a_link(text: &mut String, results: &Results) {
    let link = results.conditions.iter().find(|(name, _)| name == "link");
    let link = link.map_or("unknown kind", |(_, link)| link);
    let load = results
        .conditions
        .iter()
        .find(|(name, _)| name.starts_with("load"));
    let load = load.map_or(String::new(), |(name, load)| {
        format!("\nThe {name} was {load}.\n")
    });
    put(text, format_args!("\n### Over a link, {link}\n{load}"));
    for group in [&BANDWIDTH, &LATENCY] {
        put(text, format_args!("\n{}, {}:\n\n", group.title, group.unit));
        table(text, results, group, false);
    }
    failures(text, results);
}

fn plots(text: &mut String, group: &Group, cost: bool) {
    let of_group = PLOTS
        .iter()
        .filter(|plot| plot.group.title == group.title && plot.cost == cost);
    for plot in of_group {
        let (_, unit) = shown(group, cost);
        put(
            text,
            format_args!("![{}, {unit}]({})\n\n", group.title, plot.file),
        );
    }
}

fn header(text: &mut String, columns: &[&str]) {
    put(
        text,
        format_args!(
            "| | {} |\n| --- |{}\n",
            columns.join(" | "),
            " ---: |".repeat(columns.len())
        ),
    );
}

fn table(text: &mut String, results: &Results, group: &Group, cost: bool) {
    let providers = results.providers();
    let compared: Vec<&str> = [OURS, OURS_TCP]
        .into_iter()
        .filter(|name| providers.contains(name))
        .collect();
    let (figure, _) = shown(group, cost);
    let titles = compared.iter().map(|name| format!("{name}: × better"));
    let titles: Vec<String> = titles.collect();
    let mut columns = providers.clone();
    columns.extend(titles.iter().map(String::as_str));
    header(text, &columns);
    for line in group.lines {
        let place = place(line, figure);
        if providers
            .iter()
            .all(|name| results.median(name, place).is_none())
        {
            continue;
        }
        let medians = providers
            .iter()
            .map(|provider| results.median(provider, place).map(show));
        let ratios = compared.iter().map(|name| {
            let ratio = results
                .ratio(name, MOONCAKE, place)
                .filter(|ratio| *ratio > 0.0);
            ratio.map(show)
        });
        let cells = medians.chain(ratios).map(Option::unwrap_or_default);
        put(
            text,
            format_args!(
                "| {} | {} |\n",
                line.label,
                cells.collect::<Vec<_>>().join(" | ")
            ),
        );
    }
}

fn failures(text: &mut String, results: &Results) {
    for provider in results.providers() {
        for scenario in results.scenarios() {
            if let Some(error) = results.failure(provider, scenario) {
                put(
                    text,
                    format_args!("\n{provider} failed `{scenario}`: {error}\n"),
                );
            }
        }
    }
}

/// System calls and context switches, and whose code runs.
fn kernel(text: &mut String, results: &Results) {
    text.push_str(
        "\n### What the kernel is asked for\n\nSystem calls and context switches of all processes together.\n\n",
    );
    let with_unit = |line: &Line| format!("{}, per {}", line.label, results.unit(line.place()));
    per_line(text, results, &results.providers(), &COUNTS, with_unit);
    text.push_str(
        "\n### Where the processors are\n\nIn percent of the processor time of all processes together, by samples: in the provider's own code, in \
         the C library, in the kernel, in Python. Differences of five points say nothing; work that is over too soon has no line.\n\n",
    );
    let plain = |line: &Line| line.label.to_owned();
    per_line(text, results, &[OURS, MOONCAKE], &SHARES, plain);
}

/// Figures and their names.
type Columns = [(&'static str, &'static str)];

const COUNTS: [(&str, &str); 2] = [("syscalls", "calls"), ("switches", "switches")];
const SHARES: [(&str, &str); 4] = [
    ("in_provider", "own"),
    ("in_c_library", "C"),
    ("in_kernel", "kernel"),
    ("in_python", "Python"),
];

/// A table with several figures of every provider.
fn per_line(
    text: &mut String,
    results: &Results,
    providers: &[&str],
    columns: &Columns,
    label: impl Fn(&Line) -> String,
) {
    let titles = providers.iter().flat_map(|provider| {
        columns.iter().enumerate().map(move |(index, (_, name))| {
            if index == 0 {
                format!("{provider}: {name}")
            } else {
                (*name).to_owned()
            }
        })
    });
    let titles: Vec<String> = titles.collect();
    header(text, &titles.iter().map(String::as_str).collect::<Vec<_>>());
    for group in GROUPS.into_iter().filter(|group| group.cost.is_some()) {
        for line in group.lines {
            let cells = providers.iter().flat_map(|provider| {
                columns.iter().map(|(figure, _)| {
                    let median = results.median(provider, line.of(figure));
                    median.map(show).unwrap_or_default()
                })
            });
            let cells: Vec<String> = cells.collect();
            if cells.iter().any(|cell| !cell.is_empty()) {
                let label = label(line);
                put(text, format_args!("| {label} | {} |\n", cells.join(" | ")));
            }
        }
    }
}

fn put(text: &mut String, what: std::fmt::Arguments<'_>) {
    // A string takes whatever is written to it.
    let _written = text.write_fmt(what);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_and_its_plots_are_those_of_the_published_figures() {
        for (name, text) in render().expect("the published figures") {
            let there = std::fs::read_to_string(run::root().join(&name)).expect("a file");
            assert!(
                there == text,
                "{name} is out of step with {PUBLISHED}: `cargo xtask bench --page` writes it anew"
            );
        }
    }
}
