//! Curves over a common axis, such as losses over steps, as a picture.

use crate::escape::markup;
use crate::units::digits;

const WIDTH: f64 = 880.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 72.0;
const RIGHT: f64 = WIDTH - 24.0;
const TOP: f64 = 52.0;
const BOTTOM: f64 = HEIGHT - 56.0;

const INK: &str = "#1b222c";
const MUTED: &str = "#566170";
const GRID: &str = "#e3e7ec";
const COLOURS: [&str; 4] = ["#0b6bb3", "#9a5200", "#00755a", "#7a3e9d"];
const FONT: &str = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

/// Maximum number of points per curve: more would not be visible, and a run may have millions of steps.
const MOST_POINTS: usize = 2000;

/// Approximate number of ticks per axis.
const TICKS: f64 = 6.0;

/// A named line through points. Points that are NaN or infinite are left out.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve<'a> {
    /// in the legend
    pub name: &'a str,
    /// from left to right
    pub points: Vec<(f64, f64)>,
}

/// Curves as an SVG file; those without points are left out. A curve of more points than fit is drawn as means of neighbours.
pub fn curves_svg(title: &str, axis: &str, curves: &[Curve<'_>]) -> String {
    let curves: Vec<(&str, Vec<(f64, f64)>)> = curves
        .iter()
        .map(|curve| (curve.name, thinned(&curve.points)))
        .filter(|(_, points)| !points.is_empty())
        .collect();
    let all = || curves.iter().flat_map(|(_, points)| points);
    let x = Scale::around(all().map(|point| point.0), LEFT, RIGHT);
    let y = Scale::around(all().map(|point| point.1), BOTTOM, TOP);
    let mut body = grid(&x, &y, axis);
    let mut legend_at = LEFT;
    for ((name, points), colour) in curves.iter().zip(COLOURS.iter().cycle()) {
        let places: Vec<String> = points.iter().map(|&(a, b)| format!("{:.1} {:.1}", x.at(a), y.at(b))).collect();
        body += &format!(
            "<path d=\"M{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.6\" stroke-linejoin=\"round\" \
             stroke-linecap=\"round\"/>\n",
            places.join("L")
        );
        let (end, words) = (legend_at + 18.0, legend_at + 24.0);
        let last = points.last().map_or(String::new(), |point| digits(point.1));
        let words_after = format!("{name}: {last}");
        body += &format!(
            "<path d=\"M{legend_at} 38H{end}\" stroke=\"{colour}\" stroke-width=\"3\"/>\
             <text x=\"{words}\" y=\"42\" fill=\"{MUTED}\">{}</text>\n",
            markup(&words_after)
        );
        legend_at = words + 8.0 * words_after.chars().count() as f64 + 16.0;
    }
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{WIDTH}\" height=\"{HEIGHT}\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" \
         role=\"img\" aria-label=\"{title}\" font-family=\"{FONT}\" font-size=\"12\">\n<title>{title}</title>\n\
         <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n\
         <text x=\"{LEFT}\" y=\"22\" font-size=\"15\" fill=\"{INK}\">{title}</text>\n{body}</svg>\n",
        title = markup(title)
    )
}

/// Maps numbers to pixels.
struct Scale {
    low: f64,
    high: f64,
    step: f64,
    start: f64,
    end: f64,
}

impl Scale {
    /// A scale from one round number to another that holds all values.
    fn around(values: impl Iterator<Item = f64>, start: f64, end: f64) -> Scale {
        let (low, high) = values.fold((f64::MAX, f64::MIN), |(low, high), value| (low.min(value), high.max(value)));
        let (low, high) = if low > high { (0.0, 1.0) } else { (low, high) };
        let range = (high - low).max(high.abs().max(1e-9) * 1e-3);
        let magnitude = 10f64.powf((range / TICKS).log10().floor());
        let step = [1.0, 2.0, 5.0, 10.0].map(|factor| factor * magnitude);
        let step = step.into_iter().find(|step| range / step <= TICKS).unwrap_or(10.0 * magnitude);
        let (low, high) = ((low / step).floor() * step, (high / step).ceil() * step);
        Scale { low, high: if high > low { high } else { low + step }, step, start, end }
    }

    fn at(&self, value: f64) -> f64 {
        self.start + (value - self.low) / (self.high - self.low) * (self.end - self.start)
    }

    fn ticks(&self) -> impl Iterator<Item = f64> {
        let count = ((self.high - self.low) / self.step).round() as usize;
        (0..=count.min(64)).map(|number| self.low + number as f64 * self.step)
    }

    fn word(&self, tick: f64) -> String {
        let places = (-self.step.log10().floor()).clamp(0.0, 9.0) as usize;
        format!("{tick:.places$}")
    }
}

fn grid(x: &Scale, y: &Scale, axis: &str) -> String {
    let (mut lines, mut words) = (String::new(), String::new());
    for tick in x.ticks() {
        let at = x.at(tick);
        lines += &format!("M{at:.1} {TOP}V{BOTTOM}");
        words +=
            &format!("<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n", BOTTOM + 18.0, x.word(tick));
    }
    for tick in y.ticks() {
        let at = y.at(tick);
        lines += &format!("M{LEFT} {at:.1}H{RIGHT}");
        words +=
            &format!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>\n", LEFT - 8.0, at + 4.0, y.word(tick));
    }
    let middle = (LEFT + RIGHT) / 2.0;
    format!(
        "<path d=\"{lines}\" stroke=\"{GRID}\" fill=\"none\"/>\n<g fill=\"{MUTED}\">\n{words}\
         <text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">{}</text>\n</g>\n",
        BOTTOM + 42.0,
        markup(axis)
    )
}

/// At most [`MOST_POINTS`] points, each the mean of its neighbours.
fn thinned(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    // Sums of larger numbers would not be finite.
    let drawable = |value: f64| value.abs() < 1e300;
    let points: Vec<(f64, f64)> = points.iter().copied().filter(|&(a, b)| drawable(a) && drawable(b)).collect();
    let each = points.len().div_ceil(MOST_POINTS).max(1);
    let mean = |part: &[(f64, f64)]| {
        let count = part.len() as f64;
        part.iter().fold((0.0, 0.0), |(a, b), point| (a + point.0 / count, b + point.1 / count))
    };
    points.chunks(each).map(mean).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_picture_holds_its_curves_and_nothing_that_is_no_number() {
        let falling: Vec<(f64, f64)> = (1..=10_000).map(|step| (f64::from(step), 10.0 / f64::from(step))).collect();
        let broken = vec![(1.0, 2.0), (2.0, f64::NAN), (f64::INFINITY, 1.0), (3.0, 1e308), (4.0, 3.0)];
        let curves = [
            Curve { name: "a <b>", points: falling },
            Curve { name: "broken", points: broken },
            Curve { name: "nothing", points: Vec::new() },
        ];
        let svg = curves_svg("loss & more", "step", &curves);
        assert!(svg.starts_with("<svg") && svg.ends_with("</svg>\n"));
        assert!(svg.contains("a &lt;b&gt;") && svg.contains("loss &amp; more") && !svg.contains("nothing"));
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
        let first = svg.lines().find(|line| line.contains(COLOURS[0])).unwrap();
        assert_eq!(first.matches('L').count(), MOST_POINTS - 1);
        let last = svg.lines().find(|line| line.starts_with("<path") && line.contains(COLOURS[1])).unwrap();
        assert_eq!(last.matches('L').count(), 1, "two points are left: {last}");
    }

    #[test]
    fn curves_of_one_point_or_none_have_a_picture() {
        for points in [vec![], vec![(1.0, 0.0)], vec![(1.0, 5.0), (1.0, 5.0)]] {
            let svg = curves_svg("t", "x", &[Curve { name: "c", points }]);
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}
