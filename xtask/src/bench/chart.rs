//! Bar charts as SVG.

use std::fmt::Write as _;

use super::compare::figures::show;

/// Whose bars have which colour: told apart by people who see few colours, too.
const COLOURS: [&str; 4] = ["#0b6e99", "#74b3ce", "#d98032", "#7d7d7d"];

const WIDTH: f64 = 860.0;
const LABELS: f64 = 250.0;
const RIGHT: f64 = 70.0;
const BAR: f64 = 13.0;
const GAP: f64 = 12.0;
const HEAD: f64 = 78.0;
const FOOT: f64 = 34.0;

/// A chart with a group of bars for every row, and a bar in it for each of the series that has a figure.
pub(crate) struct Chart<'a> {
    pub(crate) title: &'a str,
    pub(crate) unit: &'a str,
    pub(crate) series: Vec<&'a str>,
    /// A label, and a figure for each of the series.
    pub(crate) rows: Vec<(&'a str, Vec<Option<f64>>)>,
    /// Upright lines across all rows, with their names.
    pub(crate) marks: Vec<(&'a str, f64)>,
    /// Each further step is ten times the one before.
    pub(crate) logarithmic: bool,
}

impl Chart<'_> {
    /// The chart as a file's text.
    pub(crate) fn render(&self) -> String {
        let figures = self
            .rows
            .iter()
            .flat_map(|(_, figures)| figures.iter().flatten());
        let figures = figures.copied().chain(self.marks.iter().map(|(_, at)| *at));
        let figures: Vec<f64> = figures.filter(|figure| *figure > 0.0).collect();
        let most = figures.iter().copied().fold(f64::MIN_POSITIVE, f64::max);
        let least = figures.iter().copied().fold(most, f64::min);
        let scale = if self.logarithmic {
            Scale::Logarithmic {
                from: 10_f64.powf(least.log10().floor()),
                to: most,
            }
        } else {
            Scale::Linear { to: most }
        };
        let bars: f64 = self
            .rows
            .iter()
            .map(|(_, figures)| GAP + BAR * figures.iter().flatten().count() as f64)
            .sum();
        let height = HEAD + bars + GAP + FOOT;
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
             font-family=\"Helvetica, Arial, sans-serif\" font-size=\"12\" fill=\"#222\" role=\"img\" aria-label=\"{title}\">\n\
             <rect width=\"{WIDTH}\" height=\"{height}\" fill=\"#fff\"/>\n\
             <text x=\"16\" y=\"24\" font-size=\"16\" font-weight=\"bold\">{title}</text>\n",
            title = escape(&format!(
                "{}, {}{}",
                self.title,
                self.unit,
                if self.logarithmic {
                    " (logarithmic)"
                } else {
                    ""
                }
            )),
        );
        self.legend(&mut svg);
        self.grid(&mut svg, scale, HEAD + bars + GAP);
        self.bars(&mut svg, scale);
        svg.push_str("</svg>\n");
        svg
    }

    fn legend(&self, svg: &mut String) {
        let mut x = 16.0;
        for (index, (name, colour)) in self.series.iter().zip(COLOURS).enumerate() {
            let has_bars = |(_, figures): &(_, Vec<Option<f64>>)| figures[index].is_some();
            if !self.rows.iter().any(has_bars) {
                continue;
            }
            put(
                svg,
                format_args!(
                    "<rect x=\"{x}\" y=\"36\" width=\"12\" height=\"12\" fill=\"{colour}\"/><text x=\"{}\" y=\"46\">{}</text>\n",
                    x + 17.0,
                    escape(name),
                ),
            );
            x += 40.0 + 7.0 * name.chars().count() as f64;
        }
    }

    fn grid(&self, svg: &mut String, scale: Scale, bottom: f64) {
        for tick in scale.ticks() {
            let x = scale.x(tick);
            put(
                svg,
                format_args!(
                    "<line x1=\"{x:.1}\" y1=\"{HEAD}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#ddd\"/>\
                 <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#666\">{}</text>\n",
                    bottom + 16.0,
                    number(tick),
                ),
            );
        }
        for (name, at) in &self.marks {
            let x = scale.x(*at);
            put(
                svg,
                format_args!(
                    "<line x1=\"{x:.1}\" y1=\"{}\" x2=\"{x:.1}\" y2=\"{bottom}\" stroke=\"#b00\" stroke-dasharray=\"4 3\"/>\
                 <text x=\"{x:.1}\" y=\"{}\" text-anchor=\"middle\" fill=\"#b00\">{}</text>\n",
                    HEAD - 4.0,
                    HEAD - 8.0,
                    escape(name),
                ),
            );
        }
    }

    fn bars(&self, svg: &mut String, scale: Scale) {
        let mut y = HEAD + GAP;
        for (label, figures) in &self.rows {
            let tall = BAR * figures.iter().flatten().count() as f64;
            put(
                svg,
                format_args!(
                    "<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n",
                    LABELS - 8.0,
                    y + tall / 2.0 + 4.0,
                    escape(label),
                ),
            );
            for (figure, colour) in figures.iter().zip(COLOURS) {
                let Some(figure) = figure else { continue };
                let end = scale.x(*figure).max(LABELS + 1.0);
                put(
                    svg,
                    format_args!(
                        "<rect x=\"{LABELS}\" y=\"{y:.1}\" width=\"{:.1}\" height=\"{}\" fill=\"{colour}\"/>\
                     <text x=\"{:.1}\" y=\"{:.1}\" font-size=\"11\" stroke=\"#fff\" stroke-width=\"3\" paint-order=\"stroke\">{}</text>\n",
                        end - LABELS,
                        BAR - 2.0,
                        end + 4.0,
                        y + BAR - 3.5,
                        show(*figure),
                    ),
                );
                y += BAR;
            }
            y += GAP;
        }
    }
}

#[derive(Clone, Copy)]
enum Scale {
    Linear { to: f64 },
    Logarithmic { from: f64, to: f64 },
}

impl Scale {
    fn x(self, figure: f64) -> f64 {
        let part = match self {
            Self::Linear { to } => figure / to,
            Self::Logarithmic { from, to } => {
                (figure.max(from).log10() - from.log10()) / (to.log10() - from.log10()).max(1e-9)
            }
        };
        LABELS + part * (WIDTH - LABELS - RIGHT)
    }

    /// Round numbers within the scale.
    fn ticks(self) -> Vec<f64> {
        match self {
            Self::Linear { to } => {
                let power = 10_f64.powf((to / 4.0).log10().floor());
                let steps = [1.0, 2.0, 5.0, 10.0].map(|step| step * power);
                let step = steps.into_iter().find(|step| to / step <= 8.0);
                let step = step.unwrap_or(to);
                (0..=8)
                    .map(|index| f64::from(index) * step)
                    .filter(|tick| *tick <= to)
                    .collect()
            }
            Self::Logarithmic { from, to } => (0..12)
                .map(|power| from * 10_f64.powi(power))
                .filter(|tick| *tick <= to)
                .collect(),
        }
    }
}

/// A tick's number: never with digits that say nothing.
fn number(tick: f64) -> String {
    let text = format!("{tick:.6}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn put(svg: &mut String, text: std::fmt::Arguments<'_>) {
    // A string takes whatever is written to it.
    let _written = svg.write_fmt(text);
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('"', "&quot;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bar_is_as_long_as_its_figure_and_a_missing_one_takes_no_room() {
        let chart = Chart {
            title: "T & co",
            unit: "GB/s",
            series: vec!["A", "B"],
            rows: vec![
                ("one", vec![Some(8.0), None]),
                ("two", vec![Some(4.0), Some(2.0)]),
            ],
            marks: vec![],
            logarithmic: false,
        };
        let svg = chart.render();
        let room = WIDTH - LABELS - RIGHT;
        for part in [1.0, 0.5, 0.25] {
            let width = format!("width=\"{:.1}\" height=\"11\"", room * part);
            assert_eq!(svg.matches(&width).count(), 1, "{width} in {svg}");
        }
        assert!(svg.contains("T &amp; co, GB/s"));
    }

    #[test]
    fn ticks_are_round_numbers_within_the_scale() {
        assert_eq!(Scale::Linear { to: 9.3 }.ticks(), [0.0, 2.0, 4.0, 6.0, 8.0]);
        let scale = Scale::Logarithmic {
            from: 0.1,
            to: 120.0,
        };
        assert_eq!(scale.ticks().len(), 4);
        assert_eq!(number(0.1), "0.1");
        assert_eq!(number(100.0), "100");
    }
}
