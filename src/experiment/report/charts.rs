//! Charts as SVG text. Colours are names that the page around them defines, so that a chart follows its light or dark dress;
//! legends are the page's too, so that they never cover a line.

use anyhow::{Result, anyhow};
use plotters::coord::Shift;
use plotters::coord::cartesian::Cartesian2d;
use plotters::coord::types::RangedCoordf64;
use plotters::prelude::*;

/// Size of a chart in its own units; the page scales it to its column.
const SIZE: (u32, u32) = (440, 290);
const TEXT: (&str, u32) = ("sans-serif", 14);

/// A colour by what it stands for.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Paint {
    /// Text and axes.
    Ink,
    /// Lines behind the data.
    Grid,
    /// What is not measured: formulas, published figures.
    Reference,
    /// The nth of the things compared.
    Series(u8),
}

/// Series beyond take the colours again from the first.
pub const SERIES: u8 = 6;

impl Paint {
    /// The CSS variable that the page gives a value.
    pub fn variable(self) -> String {
        match self {
            Paint::Ink => "--ink".to_owned(),
            Paint::Grid => "--grid".to_owned(),
            Paint::Reference => "--reference".to_owned(),
            Paint::Series(nth) => format!("--series-{}", nth % SERIES),
        }
    }

    /// A colour that stands for the name while the chart is drawn: the drawing library knows numbers only.
    fn stand_in(self) -> RGBColor {
        match self {
            Paint::Ink => RGBColor(1, 2, 3),
            Paint::Grid => RGBColor(1, 2, 4),
            Paint::Reference => RGBColor(1, 2, 5),
            Paint::Series(nth) => RGBColor(1, 2, 16 + nth % SERIES),
        }
    }

    fn all() -> impl Iterator<Item = Paint> {
        [Paint::Ink, Paint::Grid, Paint::Reference].into_iter().chain((0..SERIES).map(Paint::Series))
    }
}

/// One line of a chart.
#[derive(Clone, Debug)]
pub struct Line {
    pub name: String,
    pub paint: Paint,
    pub mark: Mark,
    pub points: Vec<(f64, f64)>,
}

/// How a line is drawn.
#[derive(Copy, Clone, PartialEq, Eq, Debug)]
pub enum Mark {
    /// A line through dots: measured.
    Solid,
    /// The same, dashed, for a second figure of the same thing.
    Dashed,
    /// A thin line without dots: computed.
    Thin,
    /// Rings without a line: others' figures.
    Rings,
}

/// Lines over numbers.
#[derive(Clone, Debug)]
pub struct LineChart {
    pub title: String,
    pub x_label: &'static str,
    pub y_label: &'static str,
    /// Top of the vertical axis; by default a little above the highest point.
    pub y_max: Option<f64>,
    pub lines: Vec<Line>,
}

/// Bars in groups, one bar of each series in a group.
#[derive(Clone, Debug)]
pub struct BarChart {
    pub title: String,
    pub x_label: &'static str,
    pub y_label: &'static str,
    pub groups: Vec<String>,
    pub series: Vec<(String, Paint, Vec<f64>)>,
}

fn drawn(error: impl std::fmt::Display) -> anyhow::Error {
    anyhow!("cannot draw a chart: {error}")
}

impl LineChart {
    /// What the page's legend shows.
    pub fn legend(&self) -> Vec<(&str, Paint, Mark)> {
        self.lines.iter().map(|line| (line.name.as_str(), line.paint, line.mark)).collect()
    }

    /// # Errors
    /// If the drawing library refuses, which it does for sizes that do not fit only.
    pub fn svg(&self) -> Result<String> {
        let all = || self.lines.iter().flat_map(|line| &line.points);
        let x_max = all().map(|point| point.0).fold(1.0, f64::max);
        let y_max = self.y_max.unwrap_or_else(|| 1.08 * all().map(|point| point.1).fold(1e-9, f64::max));
        draw(|area| {
            let mut chart = axes(area).build_cartesian_2d(0.0..x_max * 1.03, 0.0..y_max).map_err(drawn)?;
            mesh(&mut chart, (self.x_label, self.y_label), 8, &|x| short(*x))?;
            for line in &self.lines {
                let color = line.paint.stand_in();
                let points = || line.points.iter().copied();
                match line.mark {
                    Mark::Solid => {
                        chart.draw_series(LineSeries::new(points(), color.stroke_width(2))).map_err(drawn)?;
                        let dots = points().map(|at| Circle::new(at, 3, color.filled()));
                        chart.draw_series(dots).map_err(drawn)?;
                    }
                    Mark::Dashed => {
                        let dashes = DashedLineSeries::new(points(), 5, 4, color.stroke_width(2));
                        chart.draw_series(dashes).map_err(drawn)?;
                        let dots = points().map(|at| Circle::new(at, 3, color.filled()));
                        chart.draw_series(dots).map_err(drawn)?;
                    }
                    Mark::Thin => {
                        chart.draw_series(LineSeries::new(points(), color.stroke_width(1))).map_err(drawn)?;
                    }
                    Mark::Rings => {
                        let rings = points().map(|at| Circle::new(at, 5, color.stroke_width(2)));
                        chart.draw_series(rings).map_err(drawn)?;
                    }
                }
            }
            Ok(())
        })
    }
}

impl BarChart {
    /// What the page's legend shows.
    pub fn legend(&self) -> Vec<(&str, Paint, Mark)> {
        self.series.iter().map(|(name, paint, _)| (name.as_str(), *paint, Mark::Solid)).collect()
    }

    /// # Errors
    /// As [`LineChart::svg`].
    pub fn svg(&self) -> Result<String> {
        let highest = self.series.iter().flat_map(|(_, _, values)| values).copied().fold(1e-9, f64::max);
        let (groups, bars) = (self.groups.len().max(1), self.series.len().max(1) as f64);
        draw(|area| {
            let across = 0.0..groups as f64;
            let mut chart = axes(area).build_cartesian_2d(across, 0.0..1.08 * highest).map_err(drawn)?;
            // Labels stand in the middle of a group, where the axis has a mark at every half.
            let label = |x: &f64| {
                let is_middle = (x.fract() - 0.5).abs() < 1e-6;
                let name = self.groups.get(*x as usize).filter(|_| is_middle);
                name.cloned().unwrap_or_default()
            };
            mesh(&mut chart, (self.x_label, self.y_label), 2 * groups + 1, &label)?;
            for (nth, (_, paint, values)) in self.series.iter().enumerate() {
                let width = 0.8 / bars;
                let bar = |(group, &value): (usize, &f64)| {
                    let left = group as f64 + 0.1 + nth as f64 * width;
                    Rectangle::new([(left, 0.0), (left + 0.92 * width, value)], paint.stand_in().filled())
                };
                chart.draw_series(values.iter().enumerate().map(bar)).map_err(drawn)?;
            }
            Ok(())
        })
    }
}

type Area<'a> = DrawingArea<SVGBackend<'a>, Shift>;

fn axes<'a, 'b>(area: &'a Area<'b>) -> ChartBuilder<'a, 'b, SVGBackend<'b>> {
    let mut builder = ChartBuilder::on(area);
    builder.margin(8).x_label_area_size(40).y_label_area_size(52);
    builder
}

type Chart<'a, 'b> = ChartContext<'a, SVGBackend<'b>, Cartesian2d<RangedCoordf64, RangedCoordf64>>;

/// Draws the axes, called by `names`, with about so many labels along them.
fn mesh(
    chart: &mut Chart<'_, '_>,
    names: (&str, &str),
    x_labels: usize,
    x_label: &dyn Fn(&f64) -> String,
) -> Result<()> {
    chart
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(Paint::Grid.stand_in())
        .light_line_style(TRANSPARENT)
        .axis_style(Paint::Ink.stand_in())
        .label_style(TEXT.into_font().color(&Paint::Ink.stand_in()))
        .x_desc(names.0)
        .y_desc(names.1)
        .x_labels(x_labels)
        .y_labels(6)
        .x_label_formatter(x_label)
        .y_label_formatter(&|y| short(*y))
        .draw()
        .map_err(drawn)
}

fn draw(paint: impl FnOnce(&Area<'_>) -> Result<()>) -> Result<String> {
    let mut svg = String::new();
    {
        let area = SVGBackend::with_string(&mut svg, SIZE).into_drawing_area();
        paint(&area)?;
        area.present().map_err(drawn)?;
    }
    for paint in Paint::all() {
        let RGBColor(red, green, blue) = paint.stand_in();
        svg = svg.replace(&format!("#{red:02X}{green:02X}{blue:02X}"), &format!("var({})", paint.variable()));
    }
    Ok(svg)
}

/// A number on an axis, without digits that say nothing.
fn short(value: f64) -> String {
    match value {
        whole if (whole - whole.round()).abs() < 1e-9 => format!("{whole:.0}"),
        small if small.abs() < 1.0 => format!("{small:.2}"),
        other => format!("{other:.1}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(mark: Mark) -> Line {
        let points = vec![(2.0, 95.0), (7.0, 55.5), (24.0, 17.5)];
        Line { name: "x".into(), paint: Paint::Series(1), mark, points }
    }

    #[test]
    fn lines_have_the_pages_colours_only() {
        let marks = [Mark::Solid, Mark::Dashed, Mark::Thin, Mark::Rings];
        let chart = LineChart {
            title: "t".into(),
            x_label: "prefixes",
            y_label: "hits %",
            y_max: Some(100.0),
            lines: marks.map(line).into(),
        };
        let svg = chart.svg().unwrap();
        assert!(svg.starts_with("<svg") && svg.trim_end().ends_with("</svg>"));
        assert!(svg.contains("var(--series-1)") && svg.contains("var(--ink)") && svg.contains("prefixes"));
        assert!(
            !svg.contains("#01") && !svg.contains("#000000"),
            "a colour that no dress can change:\n{svg}"
        );
    }

    #[test]
    fn bars_name_their_groups() {
        let chart = BarChart {
            title: "t".into(),
            x_label: "worker",
            y_label: "requests",
            groups: vec!["w1".into(), "w2".into(), "w3".into()],
            series: vec![
                ("a".into(), Paint::Series(0), vec![1.0, 2.0, 3.0]),
                ("b".into(), Paint::Series(1), vec![3.0, 2.0, 1.0]),
            ],
        };
        let svg = chart.svg().unwrap();
        for name in ["w1", "w2", "w3", "requests"] {
            assert!(svg.contains(name), "{name} is not in:\n{svg}");
        }
        assert_eq!(svg.matches("var(--series-0)").count(), 3);
    }

    #[test]
    fn numbers_on_axes_are_short() {
        assert_eq!([short(20.0), short(0.25), short(12.5)], ["20", "0.25", "12.5"]);
    }
}
