//! The drawing of the roofline.

use super::axis::Axis;
use super::{Point, Roofs, Side};
use crate::escape::markup;
use crate::units::{byte_rate, digits, flop_rate};

const WIDTH: f64 = 880.0;
const HEIGHT: f64 = 500.0;
const LEFT: f64 = 92.0;
const RIGHT: f64 = WIDTH - 96.0;
const TOP: f64 = 44.0;
const BOTTOM: f64 = HEIGHT - 58.0;

/// Names written beside points: the slowest kernels of the chosen plan.
const LABELS: usize = 7;

// Light ground; `page/charts.css` names the same classes for both themes, `DARK` for a file of its own.
const INK: &str = "#1b222c";
const MUTED: &str = "#566170";
const GRID: &str = "#e3e7ec";
const BEFORE: &str = "#9a5200";
const AFTER: &str = "#0b6bb3";
const MEASURED: &str = "#00755a";
/// The colours of the page's dark theme, where a viewer prefers it.
const DARK: &str = "@media(prefers-color-scheme:dark){.roof-ground{fill:#0f141a}.roof-grid{stroke:#2b3541}.roof-words,.roof-legend{fill:#a3afbc}\
    .roof-slope{stroke:#a3afbc}.roof-line{stroke:#e8edf3}.roof-names,.roof-labels{fill:#e8edf3}.roof-labels{stroke:#0f141a}\
    .roof-before circle,.roof-key-before{stroke:#e0a45a}.roof-after circle,.roof-key-after{fill:#5aaeef;stroke:#5aaeef}\
    .roof-measured,.roof-key-measured{stroke:#4fcca6}}";
const FONT: &str = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif";

pub(super) fn standalone(title: &str, points: &[Point], roofs: &Roofs) -> String {
    let title = markup(title);
    let ground = format!(
        "<style>{DARK}</style>\n<rect class=\"roof-ground\" width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"#ffffff\"/>\n"
    );
    let size = format!(" width=\"{WIDTH}\" height=\"{HEIGHT}\"");
    format!("{}<title>{title}</title>\n{ground}{}</svg>\n", open(&size), drawing(points, roofs))
}

pub(super) fn embedded(points: &[Point], roofs: &Roofs) -> String {
    format!("{}{}</svg>\n", open(" class=\"roofline\" id=\"roofline-drawing\""), drawing(points, roofs))
}

fn open(attributes: &str) -> String {
    format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\"{attributes} viewBox=\"0 0 {WIDTH} {HEIGHT}\" role=\"img\" \
         aria-label=\"roofline\" font-family=\"{FONT}\" font-size=\"12\">\n"
    )
}

fn drawing(points: &[Point], roofs: &Roofs) -> String {
    let ridges = [roofs.vector, roofs.matrix].map(|ceiling| Some(ceiling? / roofs.memory?));
    // A kernel that takes no time to speak of must not stretch the axes: it lies on the edge if it is far out.
    let heavy = || points.iter().filter(|point| point.share > 0.003 || points.len() < 4);
    let x = Axis::around(heavy().map(|point| point.intensity).chain(ridges.into_iter().flatten()), LEFT, RIGHT);
    let rates = heavy().flat_map(|point| [Some(point.rate), point.measured_rate]).flatten();
    let y = Axis::around(rates.chain(roofs.vector).chain(roofs.matrix), BOTTOM, TOP);

    let mut out = grid(&x, &y);
    let mut taken = Vec::new();
    out += &roof_lines(&x, &y, roofs, points, &mut taken);
    out += &markers(&x, &y, points);
    out += &names(&x, &y, points, taken);
    out += &legend(points.iter().any(|point| point.measured_rate.is_some()));
    out
}

fn grid(x: &Axis, y: &Axis) -> String {
    let mut lines = String::new();
    let mut words = String::new();
    for decade in x.decades() {
        let at = x.at(decade);
        lines += &format!("M{at:.1} {TOP}V{BOTTOM}");
        let text = if (1e-3..1e6).contains(&decade) { format!("{decade}") } else { format!("{decade:e}") };
        words += &format!("<text x=\"{at:.1}\" y=\"{}\" text-anchor=\"middle\">{text}</text>\n", BOTTOM + 19.0);
    }
    for decade in y.decades() {
        let at = y.at(decade);
        lines += &format!("M{LEFT} {at:.1}H{RIGHT}");
        let text = flop_rate(decade).replace(".00", "").replace(".0 ", " ");
        words += &format!("<text x=\"{}\" y=\"{:.1}\" text-anchor=\"end\">{text}</text>\n", LEFT - 9.0, at + 4.0);
    }
    let middle = (LEFT + RIGHT) / 2.0;
    format!(
        "<path class=\"roof-grid\" d=\"{lines}\" stroke=\"{GRID}\" fill=\"none\"/>\n\
         <g class=\"roof-words\" fill=\"{MUTED}\">\n{words}\
         <text x=\"{middle}\" y=\"{}\" text-anchor=\"middle\">arithmetic intensity, flops per byte</text>\n</g>\n",
        BOTTOM + 42.0
    )
}

/// The roofs with their names; adds the areas of the names to `taken`.
fn roof_lines(x: &Axis, y: &Axis, roofs: &Roofs, points: &[Point], taken: &mut Vec<Area>) -> String {
    let mut lines = String::new();
    let mut words = String::new();
    for (name, ceiling) in [("vector", roofs.vector), ("matrix", roofs.matrix)] {
        let Some(ceiling) = ceiling else { continue };
        let ridge = roofs.memory.map_or(x.first(), |memory| ceiling / memory);
        let (start, level) = (x.at(ridge), y.at(ceiling));
        lines += &format!("M{start:.1} {level:.1}H{RIGHT}");
        // The name stands beyond the line's end, where no point can be.
        let (at, below) = (RIGHT + 8.0, level + 13.0);
        let rate = flop_rate(ceiling);
        words += &format!(
            "<text x=\"{at}\" y=\"{level:.1}\">{name}</text><text x=\"{at}\" y=\"{below:.1}\">{rate}</text>\n"
        );
        if roofs.memory.is_some() {
            words += &ridge_name(x, y, (start, level, &digits(ridge)), points, taken);
        }
    }
    let mut cache = String::new();
    if let Some(rate) = roofs.cache
        && let Some([x0, y0, x1, y1]) = slope(x, y, rate, roofs)
    {
        cache = format!(
            "<path class=\"roof-slope\" d=\"M{x0:.1} {y0:.1}L{x1:.1} {y1:.1}\" stroke=\"{MUTED}\" stroke-width=\"1.2\" \
             stroke-dasharray=\"5 4\" fill=\"none\"/>\n"
        );
        words += &slope_name(x, y, ([x0, y0, x1, y1], true), &format!("cache {}", byte_rate(rate)), points, taken);
    }
    if let Some(memory) = roofs.memory
        && let Some([x0, y0, x1, y1]) = slope(x, y, memory, roofs)
    {
        lines += &format!("M{x0:.1} {y0:.1}L{x1:.1} {y1:.1}");
        // Above it the cache's line would go through its name.
        let above = cache.is_empty();
        words += &slope_name(x, y, ([x0, y0, x1, y1], above), &format!("memory {}", byte_rate(memory)), points, taken);
    }
    format!(
        "{cache}<path class=\"roof-line\" d=\"{lines}\" stroke=\"{INK}\" stroke-width=\"1.6\" fill=\"none\"/>\n\
         <g class=\"roof-names\" fill=\"{INK}\">\n{words}</g>\n"
    )
}

/// The line of a rate of bytes: from where it meets the floor or the left edge to the highest ceiling.
fn slope(x: &Axis, y: &Axis, rate: f64, roofs: &Roofs) -> Option<[f64; 4]> {
    let start = x.first().max(y.first() / rate);
    let end = roofs.ceiling().map_or(x.last(), |ceiling| ceiling / rate).min(y.last() / rate).min(x.last());
    (start < end).then(|| [x.at(start), y.at(rate * start), x.at(end), y.at(rate * end)])
}

/// The name of a ridge beside it, where it meets the fewest points and names.
fn ridge_name(
    x: &Axis,
    y: &Axis,
    (start, level, ridge): (f64, f64, &str),
    points: &[Point],
    taken: &mut Vec<Area>,
) -> String {
    let half = (ridge.chars().count() + 6) as f64 * LETTER / 2.0;
    let places = [
        (start - 7.0, level - 5.0, "end"),
        (start + 9.0, level + 16.0, "start"),
        (start + 12.0, level - 7.0, "start"),
        (start + 22.0, level + 32.0, "start"),
        (start - 22.0, level - 22.0, "end"),
    ];
    let area = |&(at, below, anchor): &(f64, f64, &str)| {
        let middle = if anchor == "end" { at - half } else { at + half };
        Area::around(middle, below - 4.0, half, 8.0)
    };
    let met = |place: &(f64, f64, &str)| {
        let outside = area(place).right > RIGHT || area(place).left < LEFT || area(place).top < 26.0;
        let others = circles(x, y, points).chain(taken.iter().copied());
        others.filter(|other| area(place).meets(other)).count() + 100 * usize::from(outside)
    };
    let place = places.into_iter().min_by_key(met).unwrap_or(places[0]);
    taken.push(area(&place));
    let (at, below, anchor) = place;
    format!(
        "<circle class=\"roof-ridge\" cx=\"{start:.1}\" cy=\"{level:.1}\" r=\"2.5\" stroke=\"none\"/>\
         <text x=\"{at:.1}\" y=\"{below:.1}\" text-anchor=\"{anchor}\">ridge {ridge}</text>\n"
    )
}

/// The places of the points.
fn circles<'a>(x: &'a Axis, y: &'a Axis, points: &'a [Point]) -> impl Iterator<Item = Area> + 'a {
    points.iter().map(|point| Area::around(x.at(point.intensity), y.at(point.rate), radius(point), radius(point)))
}

/// The name along the slope, above it or below, where it meets the fewest points and names.
fn slope_name(
    x: &Axis,
    y: &Axis,
    ([x0, y0, x1, y1], above): ([f64; 4], bool),
    name: &str,
    points: &[Point],
    taken: &mut Vec<Area>,
) -> String {
    let away = if above { 12.0 } else { -12.0 };
    let angle = (y1 - y0).atan2(x1 - x0);
    let length = name.chars().count() as f64 * (LETTER + 1.0);
    // Little squares along the text stand for it: it runs at an angle.
    let squares = |share: f64| {
        let (left, bottom) = (x0 + (x1 - x0) * share + away * angle.sin(), y0 + (y1 - y0) * share - away * angle.cos());
        (0..8).map(move |part| {
            let along = length * f64::from(part) / 7.0;
            Area::around(left + along * angle.cos(), bottom + along * angle.sin(), 8.0, 8.0)
        })
    };
    let names = taken.clone();
    let met = |share: f64| {
        let others = circles(x, y, points).chain(names.iter().copied());
        others.filter(|other| squares(share).any(|square| square.meets(other))).count()
    };
    let share = [0.3, 0.15, 0.45, 0.6, 0.7, 0.05].into_iter().min_by_key(|&share| met(share)).unwrap_or(0.3);
    taken.extend(squares(share));
    let (at_x, at_y) = (x0 + (x1 - x0) * share, y0 + (y1 - y0) * share);
    let (degrees, down) = (angle.to_degrees(), if above { -7 } else { 16 });
    format!("<text transform=\"translate({at_x:.1} {at_y:.1}) rotate({degrees:.1})\" dy=\"{down}\">{name}</text>\n")
}

fn radius(point: &Point) -> f64 {
    4.0 + 10.0 * point.share.sqrt()
}

fn markers(x: &Axis, y: &Axis, points: &[Point]) -> String {
    let mut out = String::new();
    for point in points {
        let (at_x, at_y, radius) = (x.at(point.intensity), y.at(point.rate), radius(point));
        let (class, paint) = match point.side {
            Side::Before => ("roof-before", format!("fill=\"none\" stroke=\"{BEFORE}\" stroke-width=\"1.6\"")),
            Side::After => ("roof-after", format!("fill=\"{AFTER}\" fill-opacity=\"0.72\" stroke=\"{AFTER}\"")),
        };
        out += &format!(
            "<g class=\"roof-point {class}\" data-side=\"{}\" data-kernel-index=\"{}\" pointer-events=\"all\"><title>{}</title>",
            if point.side == Side::Before { "before" } else { "after" },
            point.index,
            markup(&point.text)
        );
        if let Some(rate) = point.measured_rate {
            // A line from predicted to measured: its length is the model's error.
            let (level, half) = (y.at(rate), 5.0);
            out += &format!(
                "<path class=\"roof-measured\" d=\"M{at_x:.1} {at_y:.1}V{level:.1}m0 -{half}l{half} {half}l-{half} \
                 {half}l-{half} -{half}z\" fill=\"none\" stroke=\"{MEASURED}\" stroke-width=\"1.4\"/>"
            );
        }
        out += &format!("<circle cx=\"{at_x:.1}\" cy=\"{at_y:.1}\" r=\"{radius:.1}\" {paint}/></g>\n");
    }
    out
}

/// Names beside the slowest kernels, left out where there is no room. Each name is written once.
fn names(x: &Axis, y: &Axis, points: &[Point], mut taken: Vec<Area>) -> String {
    let circles: Vec<Area> = circles(x, y, points).collect();
    let mut written: Vec<&str> = Vec::new();
    let mut out = format!(
        "<g class=\"roof-labels\" fill=\"{INK}\" font-size=\"11\" stroke=\"#ffffff\" stroke-width=\"3\" stroke-linejoin=\"round\" paint-order=\"stroke\">\n"
    );
    for (point, circle) in points.iter().zip(&circles) {
        if written.len() == LABELS {
            break;
        }
        if written.contains(&point.name.as_str()) {
            continue;
        }
        let short = shorten(&point.name);
        let (half, space) = (short.chars().count() as f64 * LETTER / 2.0, radius(point) + 4.0);
        let (middle, level) = (x.at(point.intensity), y.at(point.rate));
        let places = [
            (middle + space + half, level),
            (middle, level + space + 6.0),
            (middle - space - half, level),
            (middle, level - space - 6.0),
            (middle, level + space + 20.0),
        ];
        let free = places.into_iter().map(|(at_x, at_y)| Area::around(at_x, at_y, half, 7.0)).find(|area| {
            let inside = area.left > LEFT && area.right < RIGHT && area.top > TOP && area.bottom < BOTTOM;
            let others = circles.iter().filter(|other| *other != circle);
            inside && !others.chain(&taken).any(|other| area.meets(other))
        });
        if let Some(area) = free {
            let (at_x, at_y) = ((area.left + area.right) / 2.0, area.bottom - 3.0);
            let text = markup(&short);
            out += &format!("<text x=\"{at_x:.1}\" y=\"{at_y:.1}\" text-anchor=\"middle\">{text}</text>\n");
            taken.push(area);
            written.push(&point.name);
        }
    }
    out + "</g>\n"
}

/// The width of a letter of a name, about.
const LETTER: f64 = 6.0;

fn shorten(name: &str) -> String {
    if name.chars().count() > 30 { name.chars().take(29).chain(['…']).collect() } else { name.into() }
}

/// An occupied rectangle.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Area {
    left: f64,
    right: f64,
    top: f64,
    bottom: f64,
}

impl Area {
    fn around(x: f64, y: f64, half_width: f64, half_height: f64) -> Self {
        Self { left: x - half_width, right: x + half_width, top: y - half_height, bottom: y + half_height }
    }

    fn meets(&self, other: &Self) -> bool {
        self.left < other.right && other.left < self.right && self.top < other.bottom && other.top < self.bottom
    }
}

fn legend(measured: bool) -> String {
    let mut out = format!(
        "<g class=\"roof-legend\" fill=\"{MUTED}\">\
         <circle class=\"roof-key-before\" cx=\"{}\" cy=\"18\" r=\"5.5\" fill=\"none\" stroke=\"{BEFORE}\" \
         stroke-width=\"1.6\"/><text x=\"{}\" y=\"22\">before</text>\
         <circle class=\"roof-key-after\" cx=\"{}\" cy=\"18\" r=\"5.5\" fill=\"{AFTER}\" fill-opacity=\"0.72\" \
         stroke=\"{AFTER}\"/><text x=\"{}\" y=\"22\">after</text>",
        LEFT + 6.0,
        LEFT + 18.0,
        LEFT + 76.0,
        LEFT + 88.0,
    );
    let mut end = LEFT + 132.0;
    if measured {
        out += &format!(
            "<path class=\"roof-key-measured\" d=\"M{end} 18m0 -5l5 5l-5 5l-5 -5z\" fill=\"none\" stroke=\"{MEASURED}\" \
             stroke-width=\"1.4\"/><text x=\"{}\" y=\"22\">measured</text>",
            end + 12.0
        );
        end += 84.0;
    }
    out + &format!("<text x=\"{end}\" y=\"22\">area: share of the time</text></g>\n")
}
