//! A plot of hit rates, as SVG.

use std::fmt::Write as _;
use std::path::Path;

use crate::results::{BenchError, wrong};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 56.0;
const RIGHT: f64 = 150.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = 52.0;

/// Distance of two entries of the legend.
const LINE: f64 = 22.0;

/// Colours that people with colour blindness can tell apart (Okabe and Ito, 2008), for the rows in their order.
const COLOURS: [&str; 6] = ["#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#7f7f7f"];

/// Text and lines follow the colour scheme of the reader.
const STYLE: &str = "text{font:13px sans-serif;fill:#222}.grid{stroke:#ddd}.paper{fill:#fff}\
    @media(prefers-color-scheme:dark){text{fill:#ddd}.grid{stroke:#444}.paper{fill:#1b1b1b}}";

/// The horizontal axis.
pub(crate) struct Axis<'a> {
    pub(crate) title: &'a str,
    pub(crate) values: &'a [f64],
    /// Values that have a label, with its text.
    pub(crate) labels: &'a [(f64, String)],
    pub(crate) is_logarithmic: bool,
}

/// A line of the plot: a hit rate per value of the axis.
pub(crate) struct PlotRow<'a> {
    pub(crate) name: &'a str,
    /// The subject of the plot, drawn thicker.
    pub(crate) is_subject: bool,
    pub(crate) rates: Vec<f64>,
}

/// Draws one line per row.
pub(crate) fn svg(title: &str, axis: &Axis<'_>, rows: &[PlotRow<'_>]) -> String {
    let scaled = |value: f64| if axis.is_logarithmic { value.ln() } else { value };
    let low = axis.values.iter().map(|&value| scaled(value)).fold(f64::INFINITY, f64::min);
    let high = axis.values.iter().map(|&value| scaled(value)).fold(f64::NEG_INFINITY, f64::max);
    let x = |value: f64| {
        let share = if high > low { (scaled(value) - low) / (high - low) } else { 0.5 };
        LEFT + share * (WIDTH - LEFT - RIGHT)
    };
    let rate_max = rows.iter().flat_map(|row| row.rates.iter().copied()).fold(0.0, f64::max);
    let top = ((rate_max * 10.0).ceil() / 10.0).max(0.1);
    let y = |rate: f64| HEIGHT - BOTTOM - rate / top * (HEIGHT - TOP - BOTTOM);

    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\">\n\
         <title>{title}</title>\n<style>{STYLE}</style>\n<rect class=\"paper\" width=\"{WIDTH}\" height=\"{HEIGHT}\"/>\n\
         <text x=\"{LEFT}\" y=\"24\" font-weight=\"bold\">{title}</text>\n",
        title = escaped(title),
    );
    let mut text = |x: f64, y: f64, anchor: &str, content: &str| {
        writeln!(out, "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\">{}</text>", escaped(content))
            .expect("writing to a string succeeds");
    };
    let right = WIDTH - RIGHT;
    for (value, label) in axis.labels {
        text(x(*value), HEIGHT - BOTTOM + 20.0, "middle", label);
    }
    text((LEFT + right) / 2.0, HEIGHT - 10.0, "middle", axis.title);
    let steps = 5;
    for step in 0..=steps {
        let rate = top * f64::from(step) / f64::from(steps);
        text(LEFT - 8.0, y(rate) + 4.0, "end", &format!("{rate:.2}"));
    }
    for (index, row) in rows.iter().enumerate() {
        text(right + 44.0, TOP + 10.0 + LINE * index as f64, "start", row.name);
    }
    for step in 0..=steps {
        let at = y(top * f64::from(step) / f64::from(steps));
        out += &format!("<path class=\"grid\" d=\"M{LEFT} {at:.1}H{right:.1}\"/>\n");
    }
    for (index, row) in rows.iter().enumerate() {
        let colour = COLOURS[index % COLOURS.len()];
        let width = if row.is_subject { 3.0 } else { 1.5 };
        let points = axis.values.iter().zip(&row.rates);
        let points: Vec<String> =
            points.map(|(&value, &rate)| format!("{:.1},{:.1}", x(value), y(rate))).collect();
        let line = format!("fill=\"none\" stroke=\"{colour}\" stroke-width=\"{width}\"");
        out += &format!("<polyline {line} points=\"{}\"/>\n", points.join(" "));
        let at = TOP + 6.0 + LINE * index as f64;
        out += &format!("<path {line} d=\"M{:.1} {at:.1}h24\"/>\n", right + 14.0);
    }
    out + "</svg>\n"
}

/// Writes a plot to a file, and says so.
pub(crate) fn write(file: &Path, plot: &str) -> Result<(), BenchError> {
    std::fs::write(file, plot).map_err(|error| wrong(format!("cannot write {}: {error}", file.display())))?;
    eprintln!("wrote {}", file.display());
    Ok(())
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plot_has_a_line_per_row_within_its_borders() {
        let rows = [
            PlotRow { name: "moontide", is_subject: true, rates: vec![0.1, 0.2, 0.95] },
            PlotRow { name: "lru", is_subject: false, rates: vec![0.0, 0.1, 0.9] },
        ];
        let labels = [(40.0, "40 %".to_owned())];
        let axis = Axis { title: "memory", values: &[1.0, 5.0, 40.0], labels: &labels, is_logarithmic: true };
        let plot = svg("a < b & c", &axis, &rows);
        assert!(plot.contains("a &lt; b &amp; c") && plot.contains(">moontide<") && plot.contains(">40 %<"));
        let lines: Vec<&str> = plot.lines().filter(|line| line.starts_with("<polyline")).collect();
        assert_eq!(lines.len(), 2);
        for line in lines {
            let points = line.split("points=\"").nth(1).unwrap().trim_end_matches("\"/>");
            let points: Vec<(f64, f64)> = points
                .split(' ')
                .map(|point| point.split_once(',').unwrap())
                .map(|(x, y)| (x.parse().unwrap(), y.parse().unwrap()))
                .collect();
            assert_eq!(points.len(), 3);
            assert!(
                points.windows(2).all(|pair| pair[0].0 < pair[1].0 && pair[0].1 > pair[1].1),
                "{points:?}"
            );
            assert!(
                points.iter().all(
                    |&(x, y)| (LEFT..=WIDTH - RIGHT).contains(&x) && (TOP..=HEIGHT - BOTTOM).contains(&y)
                )
            );
        }
    }

    #[test]
    fn plot_of_one_value_without_hits_is_finite() {
        let rows = [PlotRow { name: "lru", is_subject: false, rates: vec![0.0] }];
        let axis = Axis { title: "memory", values: &[5.0], labels: &[], is_logarithmic: true };
        let plot = svg("empty", &axis, &rows);
        assert!(!plot.contains("NaN") && !plot.contains("inf"), "{plot}");
    }
}
