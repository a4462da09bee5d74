//! Figures: lines over points, several panels side by side, as SVG for the documents.
//!
//! `plotters` draws them, with only its SVG backend. The logarithm is taken here, so that zero can be drawn: at a
//! floor, which the axis names.

use anyhow::{Result, anyhow, ensure};
use plotters::coord::ranged1d::{NoDefaultFormatting, ValueFormatter};
use plotters::prelude::*;

const PANEL: (u32, u32) = (400, 340);
const LEGEND: u32 = 230;
const LINE: i32 = 18;

/// Number of points up to which a line has a mark at each.
const MARKED_MAX: usize = 40;

/// A diagram with one pair of axes.
#[derive(Debug, Clone)]
pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x: String,
    pub(crate) y: String,
    /// End of the logarithmic vertical axis, where smaller values are drawn. `None` for a linear axis from 0.
    pub(crate) floor: Option<f64>,
    pub(crate) lines: Vec<Line>,
}

/// Named points, joined in their order.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Draws the panels as one SVG. Lines of the same name share a colour and a place in the legend.
pub(crate) fn svg(panels: &[Panel]) -> Result<String> {
    ensure!(panels.iter().flat_map(|p| &p.lines).any(|l| !l.points.is_empty()), "there is no point to draw");
    let mut names: Vec<&str> = Vec::new();
    for line in panels.iter().flat_map(|p| &p.lines) {
        if !names.contains(&line.name.as_str()) {
            names.push(&line.name);
        }
    }
    let mut out = String::new();
    let width = PANEL.0 * panels.len() as u32;
    draw(&mut out, panels, &names, width).map_err(|e| anyhow!("cannot draw the figure: {e}"))?;
    out.push('\n');
    Ok(out)
}

type Failed = Box<dyn std::error::Error>;

fn draw(out: &mut String, panels: &[Panel], names: &[&str], width: u32) -> std::result::Result<(), Failed> {
    let height = PANEL.1.max(60 + LINE as u32 * names.len() as u32);
    let root = SVGBackend::with_string(out, (width + LEGEND, height)).into_drawing_area();
    root.fill(&WHITE)?;
    let (left, legend) = root.split_horizontally(width);
    for (panel, area) in panels.iter().zip(left.split_evenly((1, panels.len()))) {
        draw_panel(&area, panel, names)?;
    }
    for (at, name) in names.iter().enumerate() {
        let y = 40 + LINE * at as i32;
        legend.draw(&PathElement::new([(10, y), (34, y)], color(at).stroke_width(2)))?;
        legend.draw(&Text::new((*name).to_owned(), (42, y - 6), ("sans-serif", 13)))?;
    }
    root.present()?;
    Ok(())
}

fn draw_panel(
    area: &DrawingArea<SVGBackend<'_>, plotters::coord::Shift>,
    panel: &Panel,
    names: &[&str],
) -> std::result::Result<(), Failed> {
    let height = |y: f64| panel.floor.map_or(y, |floor| y.max(floor).log10());
    let points = || panel.lines.iter().flat_map(|l| l.points.iter().copied());
    let mut xs: Vec<f64> = points().map(|(x, _)| x).collect();
    xs.sort_by(f64::total_cmp);
    xs.dedup();
    let (Some(first), Some(last)) = (xs.first().copied(), xs.last().copied()) else { return Ok(()) };
    // A single x would make an axis without length.
    let last = if first == last { first + 1.0 } else { last };
    let top = points().map(|(_, y)| y).fold(f64::MIN_POSITIVE, f64::max);
    let (bottom, top, ys) = match panel.floor {
        Some(floor) => {
            let (from, to) = (floor.log10().floor(), top.max(floor * 10.0).log10().ceil());
            (from, to, (from as i32..=to as i32).map(f64::from).collect())
        }
        None => {
            let step = step(top);
            let count = (top / step).ceil();
            (0.0, step * count, (0..=count as u32).map(|n| f64::from(n) * step).collect::<Vec<_>>())
        }
    };
    let xs = thinned(&xs, (last - first) * 0.11);
    // The last point keeps a distance from the edge; the axis begins at the first.
    let mut chart = ChartBuilder::on(area)
        .caption(&panel.title, ("sans-serif", 15))
        .margin(12)
        .x_label_area_size(42)
        .y_label_area_size(62)
        .build_cartesian_2d(
            Marked::new(first..last + (last - first) * 0.03, xs, false),
            Marked::new(bottom..top, ys, panel.floor.is_some()),
        )?;
    let mut mesh = chart.configure_mesh();
    mesh.disable_x_mesh().light_line_style(TRANSPARENT).x_desc(&panel.x).y_desc(&panel.y);
    mesh.x_labels(12).y_labels(12).label_style(("sans-serif", 12)).draw()?;
    for line in &panel.lines {
        let at = names.iter().position(|name| *name == line.name).unwrap_or_default();
        let points = || line.points.iter().map(|(x, y)| (*x, height(*y)));
        chart.draw_series(LineSeries::new(points(), color(at).stroke_width(2)))?;
        if line.points.len() <= MARKED_MAX {
            chart.draw_series(points().map(|point| Circle::new(point, 3, color(at).filled())))?;
        }
    }
    Ok(())
}

fn color(at: usize) -> PaletteColor<Palette99> {
    Palette99::pick(at)
}

/// Returns a step of an axis: 1, 2 or 5 times a power of ten, so that about five steps reach `top`.
fn step(top: f64) -> f64 {
    let raw = top / 5.0;
    let power = 10_f64.powf(raw.log10().floor());
    [1.0, 2.0, 5.0, 10.0].into_iter().map(|n| n * power).find(|step| *step >= raw).unwrap_or(raw)
}

/// Returns the ascending places with enough distance for their labels, including the last one.
fn thinned(places: &[f64], apart: f64) -> Vec<f64> {
    let mut kept: Vec<f64> = Vec::new();
    for place in places.iter().rev() {
        if kept.last().is_none_or(|next| next - place >= apart) {
            kept.push(*place);
        }
    }
    kept.reverse();
    kept
}

/// An axis with labels exactly at these places, so that a measured point has its number below it, if there is room.
#[derive(Clone)]
struct Marked {
    inner: plotters::coord::types::RangedCoordf64,
    marks: Vec<f64>,
    is_logarithm: bool,
}

impl Marked {
    fn new(range: std::ops::Range<f64>, marks: Vec<f64>, is_logarithm: bool) -> Self {
        Self { inner: range.into(), marks, is_logarithm }
    }
}

impl Ranged for Marked {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, value: &f64, limit: (i32, i32)) -> i32 {
        self.inner.map(value, limit)
    }

    fn key_points<Hint: plotters::coord::ranged1d::KeyPointHint>(&self, _: Hint) -> Vec<f64> {
        self.marks.clone()
    }

    fn range(&self) -> std::ops::Range<f64> {
        self.inner.range()
    }
}

impl ValueFormatter<f64> for Marked {
    fn format_ext(&self, value: &f64) -> String {
        let value = if self.is_logarithm { 10_f64.powf(*value) } else { *value };
        // From 1,000 on without a fraction. Below with twelve digits, because more would show that 0.3 is inexact.
        let value = if value.abs() >= 1e3 { value.round() } else { value };
        format!("{}", format!("{value:.12}").parse::<f64>().unwrap_or(value))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn panel(floor: Option<f64>, lines: &[(&str, &[(f64, f64)])]) -> Panel {
        let lines =
            lines.iter().map(|(name, points)| Line { name: (*name).to_owned(), points: points.to_vec() }).collect();
        Panel { title: "Title".to_owned(), x: "writes, %".to_owned(), y: "lost, %".to_owned(), floor, lines }
    }

    fn circles(svg: &str) -> Vec<(i32, i32)> {
        let number = |tag: &str, name: &str| -> i32 {
            let value = tag.split(&format!("{name}=\"")).nth(1).expect("the attribute");
            value.split('"').next().expect("an end").parse().expect("a number")
        };
        svg.split("<circle ").skip(1).map(|tag| (number(tag, "cx"), number(tag, "cy"))).collect()
    }

    #[test]
    fn figure_has_all_points() {
        let lines: [(&str, &[(f64, f64)]); 2] =
            [("one", &[(1.0, 30.0), (2.0, 3.0), (3.0, 0.3)]), ("two", &[(1.0, 0.0)])];
        let svg = svg(&[panel(Some(1e-4), &lines), panel(None, &[("one", &[(0.9, 1.0)])])]).expect("drawn");
        let points = circles(&svg);
        assert_eq!(points.len(), 5, "{svg}");
        // Equal factors are equal distances; zero is at the floor, below all others; the axis begins at the lowest x.
        assert!((points[1].1 - points[0].1 - (points[2].1 - points[1].1)).abs() <= 1, "{points:?}");
        assert!(points[3].1 > points[2].1 && points[3].0 == points[0].0, "{points:?}");
        for text in ["Title", "writes, %", "lost, %", ">\none\n", ">\ntwo\n", "0.0001"] {
            assert!(svg.contains(text), "{text} is not in {svg}");
        }
        assert_eq!(svg.matches(">\none\n").count(), 1, "a line has one place in the legend");
    }

    #[test]
    fn without_points_there_is_no_figure() {
        assert!(svg(&[]).is_err());
        assert!(svg(&[panel(None, &[("one", &[])])]).is_err());
    }

    #[test]
    fn labels_that_would_overlap_are_left_out() {
        assert_eq!(thinned(&[0.0, 1.0, 2.0, 5.0, 9.0, 9.5, 10.0], 2.0), [0.0, 2.0, 5.0, 10.0]);
    }

    #[test]
    fn steps_are_round() {
        for (top, expected) in [(1.0, 0.2), (7.0, 2.0), (100.0, 20.0), (0.03, 0.01)] {
            assert!((step(top) - expected).abs() < expected / 1e6, "{top}: {}", step(top));
        }
    }
}
