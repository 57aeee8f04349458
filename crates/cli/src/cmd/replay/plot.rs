//! The picture of a replay: hit ratio and throughput over the trace's time, as an SVG file.

use std::path::Path;
use std::time::Duration;

use anyhow::{Result, anyhow};
use plotters::prelude::*;
use plotters::style::text_anchor::{HPos, Pos, VPos};

const KIB: f64 = 1024.0;
const MIB: f64 = KIB * 1024.0;
const GIB: f64 = MIB * 1024.0;

/// One request as the plot needs it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// When it came, in the trace's time.
    pub(crate) at: Duration,
    /// When it was done, in the run's time.
    pub(crate) finished: Duration,
    pub(crate) blocks: u64,
    pub(crate) hit_blocks: u64,
    pub(crate) bytes_saved: u64,
    pub(crate) bytes_loaded: u64,
}

/// One stretch of the trace's time.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Interval {
    /// Its middle, in the unit of the axis.
    at: f64,
    hit_ratio: f64,
    /// From the trace's start to the end of this interval.
    hit_ratio_so_far: f64,
    /// Bytes per second of the run.
    saved_rate: f64,
    loaded_rate: f64,
}

const INTERVALS: usize = 90;
const WIDTH: u32 = 1000;
const HEIGHT: u32 = 680;
const SAVED: RGBColor = RGBColor(0xC4, 0x5A, 0x1D);
const LOADED: RGBColor = RGBColor(0x1B, 0x6C, 0xA8);
const FAINT: RGBColor = RGBColor(0x7F, 0xAD, 0xCF);
const INK: RGBColor = RGBColor(0x22, 0x2A, 0x31);
const GRID: RGBColor = RGBColor(0xE3, 0xE6, 0xE8);

/// The unit of the time axis and its length in seconds.
fn time_unit(span: Duration) -> (&'static str, f64) {
    match span.as_secs() {
        0..300 => ("s", 1.0),
        300..36_000 => ("min", 60.0),
        _ => ("h", 3600.0),
    }
}

/// Cuts the trace's time into intervals; those without a request are left out.
fn intervals(samples: &[Sample], count: usize) -> Vec<Interval> {
    let span = samples
        .iter()
        .map(|sample| sample.at)
        .max()
        .unwrap_or_default();
    let (_, unit) = time_unit(span);
    let width = (span.as_secs_f64() / count as f64).max(1e-9);
    let mut parts: Vec<Vec<&Sample>> = vec![Vec::new(); count];
    for sample in samples {
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "a positive quotient, at most the number of intervals"
        )]
        let part = (sample.at.as_secs_f64() / width) as usize;
        parts[part.min(count - 1)].push(sample);
    }
    let (mut hits, mut blocks, mut before) = (0, 0, Duration::ZERO);
    let mut out = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        if part.is_empty() {
            continue;
        }
        let sum = |value: fn(&Sample) -> u64| part.iter().map(|sample| value(sample)).sum::<u64>();
        let (part_hits, part_blocks) = (sum(|s| s.hit_blocks), sum(|s| s.blocks));
        hits += part_hits;
        blocks += part_blocks;
        let last = part
            .iter()
            .map(|sample| sample.finished)
            .max()
            .unwrap_or_default();
        let elapsed = last.saturating_sub(before).as_secs_f64();
        before = last.max(before);
        let rate = |bytes: u64| {
            if elapsed > 0.0 {
                bytes as f64 / elapsed
            } else {
                0.0
            }
        };
        out.push(Interval {
            at: (index as f64 + 0.5) * width / unit,
            hit_ratio: part_hits as f64 / part_blocks.max(1) as f64,
            hit_ratio_so_far: hits as f64 / blocks.max(1) as f64,
            saved_rate: rate(sum(|s| s.bytes_saved)),
            loaded_rate: rate(sum(|s| s.bytes_loaded)),
        });
    }
    out
}

/// Writes the picture.
pub(crate) fn write(path: &Path, title: &str, samples: &[Sample]) -> Result<()> {
    draw(path, title, samples)
        .map_err(|error| anyhow!("can't write the plot {}: {error}", path.display()))
}

fn draw(path: &Path, title: &str, samples: &[Sample]) -> Result<(), Box<dyn std::error::Error>> {
    let points = intervals(samples, INTERVALS);
    let span = samples
        .iter()
        .map(|sample| sample.at)
        .max()
        .unwrap_or_default();
    let (unit_name, unit) = time_unit(span);
    let end = (span.as_secs_f64() / unit).max(1e-3);

    let root = SVGBackend::new(path, (WIDTH, HEIGHT)).into_drawing_area();
    root.fill(&WHITE)?;
    let middle = Pos::new(HPos::Center, VPos::Center);
    let heading = ("sans-serif", 22).into_font().color(&INK).pos(middle);
    root.draw(&Text::new(
        title.to_owned(),
        (WIDTH.cast_signed() / 2, 26),
        heading,
    ))?;
    let (_, body) = root.split_vertically(48);
    let (upper, lower) = body.split_vertically((HEIGHT - 48) / 2 - 8);

    panel(
        &upper,
        &Axes {
            end,
            top: 100.0,
            x: None,
            y: "hit ratio",
            format: &|v| format!("{v:.0} %"),
            legend: SeriesLabelPosition::LowerRight,
        },
        &[
            Line {
                name: "in this interval",
                color: FAINT,
                width: 1,
                points: series(&points, |p| p.hit_ratio * 100.0),
            },
            Line {
                name: "so far",
                color: LOADED,
                width: 3,
                points: series(&points, |p| p.hit_ratio_so_far * 100.0),
            },
        ],
    )?;
    let top = points
        .iter()
        .map(|point| point.saved_rate.max(point.loaded_rate))
        .fold(1.0, f64::max)
        // Room for the legend above the highest point.
        * 1.35;
    let (scale, scale_name) = match top {
        GIB.. => (GIB, "GiB/s"),
        MIB.. => (MIB, "MiB/s"),
        _ => (KIB, "KiB/s"),
    };
    let digits = usize::from(top / scale < 10.0);
    panel(
        &lower,
        &Axes {
            end,
            top: top / scale,
            x: Some(&format!("time in the trace ({unit_name})")),
            y: &format!("throughput ({scale_name})"),
            format: &|v| format!("{v:.digits$}"),
            legend: SeriesLabelPosition::UpperLeft,
        },
        &[
            Line {
                name: "saved",
                color: SAVED,
                width: 2,
                points: series(&points, |p| p.saved_rate / scale),
            },
            Line {
                name: "loaded",
                color: LOADED,
                width: 2,
                points: series(&points, |p| p.loaded_rate / scale),
            },
        ],
    )?;
    root.present()?;
    Ok(())
}

fn series(points: &[Interval], value: impl Fn(&Interval) -> f64) -> Vec<(f64, f64)> {
    points
        .iter()
        .map(|point| (point.at, value(point)))
        .collect()
}

struct Axes<'a> {
    end: f64,
    top: f64,
    x: Option<&'a str>,
    y: &'a str,
    format: &'a dyn Fn(f64) -> String,
    legend: SeriesLabelPosition,
}

struct Line {
    name: &'static str,
    color: RGBColor,
    width: u32,
    points: Vec<(f64, f64)>,
}

type Area<'a> = DrawingArea<SVGBackend<'a>, plotters::coord::Shift>;

fn panel(
    area: &Area<'_>,
    axes: &Axes<'_>,
    lines: &[Line],
) -> Result<(), Box<dyn std::error::Error>> {
    let mut chart = ChartBuilder::on(area)
        .margin_left(12)
        .margin_right(28)
        .margin_top(6)
        .x_label_area_size(if axes.x.is_some() { 46 } else { 30 })
        .y_label_area_size(74)
        .build_cartesian_2d(0.0..axes.end, 0.0..axes.top)?;
    let label = ("sans-serif", 15).into_font().color(&INK);
    chart
        .configure_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .x_labels(10)
        .y_labels(6)
        .x_desc(axes.x.unwrap_or_default())
        .y_desc(axes.y)
        .axis_desc_style(label.clone())
        .label_style(label.clone())
        .x_label_formatter(&|v| format!("{v:.0}"))
        .y_label_formatter(&|v| (axes.format)(*v))
        .draw()?;
    for line in lines {
        let style = line.color.stroke_width(line.width);
        chart
            .draw_series(LineSeries::new(line.points.iter().copied(), style))?
            .label(line.name)
            .legend(move |(x, y)| PathElement::new([(x, y), (x + 22, y)], style));
    }
    chart
        .configure_series_labels()
        .position(axes.legend.clone())
        .background_style(WHITE.mix(0.85))
        .border_style(GRID)
        .label_font(label)
        .margin(10)
        .legend_area_size(28)
        .draw()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(second: u64, hits: u64) -> Sample {
        Sample {
            at: Duration::from_secs(second),
            finished: Duration::from_millis(10 * (second + 1)),
            blocks: 10,
            hit_blocks: hits,
            bytes_saved: 1000,
            bytes_loaded: 500,
        }
    }

    #[test]
    fn intervals_hold_their_requests_and_the_sum_so_far() {
        let points = intervals(
            &[sample(0, 0), sample(1, 10), sample(9, 5), sample(10, 5)],
            2,
        );
        assert_eq!(points.len(), 2);
        assert!((points[0].hit_ratio - 0.5).abs() < 1e-9);
        assert!((points[1].hit_ratio_so_far - 0.5).abs() < 1e-9);
        // Two requests in the first 20 ms.
        assert!((points[0].saved_rate - 100_000.0).abs() < 1.0);
        assert!((points[0].at - 2.5).abs() < 1e-9);
    }

    #[test]
    fn a_run_of_one_request_or_none_is_drawn_too() {
        let dir = tempfile::tempdir().expect("a directory");
        for (name, samples) in [("none", vec![]), ("one", vec![sample(0, 0)])] {
            let path = dir.path().join(name);
            write(&path, "a title", &samples).expect("drawn");
            let svg = std::fs::read_to_string(path).expect("written");
            for text in ["a title", "hit ratio", "throughput", "time in the trace"] {
                assert!(svg.contains(text), "{text}");
            }
        }
        let nowhere = dir.path().join("no").join("where");
        assert!(write(&nowhere, "t", &[]).is_err());
    }
}
