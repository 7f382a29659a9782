//! The roofline: the rate of every kernel against the limits of memory and arithmetic units, as one SVG.
//!
//! The page embeds the same drawing; its scripts and style sheet only add hover and the dark theme. So coordinates are
//! computed here and nowhere else. Colours are attributes, which a style sheet overrides and every viewer understands.

mod axis;
mod draw;

use crate::units::{bytes, digits, flop_rate, time};
use crate::{Analysis, KernelSheet, MachineSheet};

/// The roofline as an SVG file with text as text, on a dark ground where its viewer prefers one.
///
/// Both roofs with their ridges, every kernel before (hollow) and after (filled), measured ones as diamonds. The area of
/// a point is its share of the plan's time. Kernels without arithmetic are left out.
pub fn roofline_svg(analysis: &Analysis) -> String {
    let title = format!("Roofline of {} on {}", analysis.graph, analysis.device);
    draw::standalone(&title, &points(analysis), &Roofs::of(&analysis.machine))
}

/// The same drawing for the page, or nothing if no kernel can be drawn.
pub(crate) fn embedded(analysis: &Analysis) -> String {
    let points = points(analysis);
    if points.is_empty() {
        return String::new();
    }
    draw::embedded(&points, &Roofs::of(&analysis.machine))
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Side {
    Before,
    After,
}

/// A kernel in the plot.
#[derive(Debug)]
struct Point {
    side: Side,
    /// position among the kernels of its plan
    index: usize,
    name: String,
    /// flops per byte
    intensity: f64,
    /// flops per microsecond, predicted
    rate: f64,
    /// flops per microsecond, measured
    measured_rate: Option<f64>,
    /// microseconds of all its launches over those of the slowest kernel
    share: f64,
    /// its description, line by line
    text: String,
}

/// The ceilings, in flops and bytes per microsecond; those that are not positive numbers are left out.
#[derive(Debug)]
struct Roofs {
    memory: Option<f64>,
    /// the last-level cache, where it is faster than memory
    cache: Option<f64>,
    vector: Option<f64>,
    matrix: Option<f64>,
}

impl Roofs {
    fn of(machine: &MachineSheet) -> Self {
        Self {
            memory: positive(machine.bytes_per_us),
            cache: cache(machine),
            vector: positive(machine.vector_flops_per_us),
            matrix: positive(machine.matrix_flops_per_us),
        }
    }

    /// The highest ceiling.
    fn ceiling(&self) -> Option<f64> {
        match (self.vector, self.matrix) {
            (Some(vector), Some(matrix)) => Some(vector.max(matrix)),
            (vector, matrix) => vector.or(matrix),
        }
    }

    /// What memory and the highest ceiling allow.
    fn roof(&self, intensity: f64) -> Option<f64> {
        let slope = self.memory.map(|memory| memory * intensity);
        match (slope, self.ceiling()) {
            (Some(slope), Some(ceiling)) => Some(slope.min(ceiling)),
            (slope, ceiling) => slope.or(ceiling),
        }
    }
}

fn points(analysis: &Analysis) -> Vec<Point> {
    let total = |sheet: &KernelSheet| sheet.cost.us * sheet.launches.len() as f64;
    let slowest = analysis.before.iter().chain(&analysis.after).map(total).filter_map(positive).fold(0.0, f64::max);
    let roofs = Roofs::of(&analysis.machine);
    let before = analysis.before.iter().enumerate().map(|(index, sheet)| (Side::Before, index, sheet));
    let after = analysis.after.iter().enumerate().map(|(index, sheet)| (Side::After, index, sheet));
    let mut points: Vec<Point> = before
        .chain(after)
        .filter_map(|(side, index, sheet)| {
            let flops = positive(sheet.cost.matrix_flops as f64 + sheet.cost.vector_flops as f64)?;
            let rate = positive(flops / sheet.cost.us)?;
            let intensity = positive(sheet.cost.intensity)?;
            Some(Point {
                side,
                index,
                name: sheet.name.clone(),
                intensity,
                rate,
                measured_rate: sheet.measured_us.and_then(|us| positive(flops / us)),
                share: positive(total(sheet) / slowest).unwrap_or(0.0).min(1.0),
                text: describe(side, sheet, rate, &roofs),
            })
        })
        .collect();
    // Large points first, so that small ones lie on top and can be reached.
    points.sort_by(|a, b| b.share.total_cmp(&a.share));
    points
}

fn describe(side: Side, sheet: &KernelSheet, rate: f64, roofs: &Roofs) -> String {
    let cost = &sheet.cost;
    let plan = if side == Side::Before { "before" } else { "after" };
    let mut text = format!("{}\n{plan}, {}, {} launches", sheet.name, sheet.size, sheet.launches.len());
    text += &format!("\n{} flop/B, {}", digits(cost.intensity), flop_rate(rate));
    if let Some(roof) = roofs.roof(cost.intensity) {
        text += &format!(", {} % of the roof", digits(rate / roof * 100.0));
    }
    text += &format!("\n{} read, {} written", bytes(cost.read), bytes(cost.written));
    text += &format!("\n{} predicted, limited by {}", time(cost.us), cost.bound);
    if let Some(us) = sheet.measured_us {
        text += &format!("\n{} measured", time(us));
    }
    text
}

/// Bytes a microsecond of the last-level cache, where the machine has that number and it is above memory's.
fn cache(machine: &MachineSheet) -> Option<f64> {
    let number = machine.numbers.iter().find(|number| number.name == "cache_gbps")?;
    positive(number.value * 1e3).filter(|&rate| rate > machine.bytes_per_us)
}

fn positive(value: f64) -> Option<f64> {
    (value.is_finite() && value > 0.0).then_some(value)
}
