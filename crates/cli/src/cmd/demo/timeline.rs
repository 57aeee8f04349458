//! The picture of a demo: one step of the engine that saves and one of the engine that loads, as an SVG
//! file. Each layer is a row; computation in its upper half, what is moved for it in its lower half.

use std::path::Path;

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::prelude::*;

use super::messages::{Done, Kind, Stretch};
use super::report::Answers;

const WIDTH: u32 = 1100;
const ROW: u32 = 26;
const HEAD: u32 = 44;
const FOOT: u32 = 40;
const INK: RGBColor = RGBColor(0x22, 0x2A, 0x31);
const GRID: RGBColor = RGBColor(0xE3, 0xE6, 0xE8);

type Drawn = Result<(), Box<dyn std::error::Error>>;
type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

impl Kind {
    fn colour(self) -> RGBColor {
        match self {
            Self::Compute => RGBColor(0x4F, 0x9D, 0x69),
            Self::Wait => RGBColor(0xC0, 0x39, 0x2B),
            Self::Load => RGBColor(0x1B, 0x6C, 0xA8),
            Self::Save => RGBColor(0xC4, 0x5A, 0x1D),
        }
    }

    fn name(self) -> &'static str {
        match self {
            Self::Compute => "compute",
            Self::Wait => "wait for a load",
            Self::Load => "load",
            Self::Save => "save",
        }
    }

    /// The part of a row, from above.
    fn part(self) -> (f64, f64) {
        match self {
            Self::Compute | Self::Wait => (0.08, 0.5),
            Self::Load | Self::Save => (0.54, 0.92),
        }
    }
}

/// Writes the picture.
pub(crate) fn write(path: &Path, answers: &Answers) -> Result<()> {
    draw(path, answers)
        .map_err(|error| anyhow!("can't write the timeline {}: {error}", path.display()))
}

/// The request whose step says most: the one that loaded most.
fn richest(answers: &Answers) -> Option<usize> {
    let loaded = |index: &usize| answers.decode[*index].loaded_tokens;
    (0..answers.decode.len()).max_by_key(loaded)
}

fn draw(path: &Path, answers: &Answers) -> Drawn {
    // A step that saves nothing shows nothing: the first request saves all that it has.
    let saves = answers.prefill.first();
    let loads = richest(answers).and_then(|index| answers.decode.get(index));
    let panels: Vec<(&str, &Done)> = [
        ("prefill: saves hide behind what follows", saves),
        ("decode: loads hide behind what comes before", loads),
    ]
    .into_iter()
    .filter_map(|(title, done)| Some((title, done?)))
    .collect();
    let height =
        |done: &Done| HEAD + FOOT + ROW * u32::try_from(done.exposed_us.len()).unwrap_or(1);
    let total: u32 = panels.iter().map(|(_, done)| height(done)).sum();
    let root = SVGBackend::new(path, (WIDTH, total + 30)).into_drawing_area();
    root.fill(&WHITE)?;
    legend(&root)?;
    let (_, mut rest) = root.split_vertically(30);
    for (title, done) in panels {
        let (here, below) = rest.split_vertically(height(done));
        panel(&here, title, done)?;
        rest = below;
    }
    root.present()?;
    Ok(())
}

fn legend(root: &Area<'_>) -> Drawn {
    let font = ("sans-serif", 14).into_font().color(&INK);
    let mut x = 60;
    for kind in [Kind::Compute, Kind::Wait, Kind::Load, Kind::Save] {
        let square = [(x, 12), (x + 14, 26)];
        root.draw(&Rectangle::new(square, kind.colour().filled()))?;
        root.draw(&Text::new(kind.name(), (x + 20, 12), font.clone()))?;
        x += 150;
    }
    Ok(())
}

fn panel(area: &Area<'_>, title: &str, done: &Done) -> Drawn {
    let layers = done.exposed_us.len() as f64;
    let end = done
        .spans
        .iter()
        .map(|span| span.end_us)
        .fold(1.0, f64::max)
        / 1000.0;
    let mut chart = ChartBuilder::on(area)
        .caption(title, ("sans-serif", 16).into_font().color(&INK))
        .margin_right(20)
        .x_label_area_size(FOOT)
        .y_label_area_size(60)
        .margin_left(8)
        // The first layer is above; a layer's number is in the middle of its row.
        .build_cartesian_2d(0.0..end * 1.01, layers - 0.5..-0.5)?;
    chart
        .configure_mesh()
        .disable_y_mesh()
        .light_line_style(TRANSPARENT)
        .bold_line_style(GRID)
        .axis_style(INK)
        .x_desc("ms")
        .y_desc("layer")
        .y_labels(done.exposed_us.len())
        .y_label_formatter(&|layer| format!("{layer:.0}"))
        .x_label_formatter(&|ms| format!("{}", (ms * 1000.0).round() / 1000.0))
        .draw()?;
    // A bar has a dot at least, or it would not be seen. The axis is somewhat shorter than the picture.
    let dot = end * 1.2 / f64::from(WIDTH);
    let bar = |span: &Stretch| {
        let (from, to) = span.kind.part();
        let row = f64::from(span.layer) - 0.5;
        let begin = span.begin_us / 1000.0;
        let corners = [
            (begin, row + from),
            ((span.end_us / 1000.0).max(begin + dot), row + to),
        ];
        Rectangle::new(corners, span.kind.colour().filled())
    };
    // A wait that is over before a dot is full would be drawn as one.
    let seen = |span: &&Stretch| {
        let ms = (span.end_us - span.begin_us) / 1000.0;
        span.kind != Kind::Wait || ms * f64::from(WIDTH) > end
    };
    chart.draw_series(done.spans.iter().filter(seen).map(bar))?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_stretch_is_drawn_in_its_colour() {
        let stretch = |layer, kind, begin_us| Stretch {
            layer,
            kind,
            begin_us,
            end_us: begin_us + 100.0,
        };
        let done = |kind| Done {
            exposed_us: vec![1.0, 2.0],
            loaded_tokens: 4,
            spans: vec![stretch(0, Kind::Compute, 0.0), stretch(1, kind, 50.0)],
            ..Done::default()
        };
        let answers = Answers {
            prefill: vec![done(Kind::Save)],
            decode: vec![Done::default(), done(Kind::Load), done(Kind::Wait)],
            ..Answers::default()
        };
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("t.svg");
        write(&path, &answers).expect("drawn");
        let svg = std::fs::read_to_string(&path).expect("text");
        assert!(svg.starts_with("<svg") && svg.contains("prefill") && svg.contains("decode"));
        let bars = |colour: &str| svg.matches(&format!("fill=\"{colour}\"")).count();
        assert_eq!(
            (bars("#4F9D69"), bars("#C45A1D")),
            (3, 2),
            "with the legend"
        );
        assert!(write(Path::new("/nowhere/t.svg"), &answers).is_err());
    }
}
