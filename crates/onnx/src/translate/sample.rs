//! Images sampled at computed places: `GridSample` and `RoiAlign`. A place lies between elements whose rows are gathered, and each
//! counts as much as the interpolation says.

use deuteron_graph::{BinaryOp, CompareOp, UnaryOp};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Function, Id, Kind, Logic, Reduction};

/// The slope of the cubic interpolation at its neighbours.
const CUBIC: f64 = -0.75;

/// Elements that one place takes part in, at most: cubic in three axes.
const MOST_TAPS: usize = 64;

/// An element on one axis: its position, and how much it counts, unless it counts as it is.
#[derive(Clone, Copy)]
struct Tap {
    position: Id,
    weight: Option<Id>,
}

/// What lies beyond the borders.
#[derive(Clone, Copy, PartialEq)]
enum Padding {
    Zeros,
    Border,
    Reflection,
}

impl<'a> Translator<'a, '_> {
    pub(super) fn grid_sample(&mut self, call: &Call<'a, '_>) -> Results {
        let (x, grid) = (call.input(0)?, call.input(1)?);
        let (image, places) = (self.ir.shape(x).clone(), self.ir.shape(grid).clone());
        let axes = image.rank().saturating_sub(2);
        let fits = (1..=3).contains(&axes)
            && places.rank() == image.rank()
            && places.cols() == axes
            && places[0] == image[0]
            && self.ir.element(x).is_float();
        if !fits {
            return Err(Problem::Refused(format!(
                "floats [n, c, ..] and a grid [n, .., axes] expected, got {image} and {places}"
            )));
        }
        let mode = call.word("mode", &["linear", "bilinear", "nearest", "cubic", "bicubic"])?;
        let padding = match call.word("padding_mode", &["zeros", "border", "reflection"])? {
            "zeros" => Padding::Zeros,
            "border" => Padding::Border,
            _ => Padding::Reflection,
        };
        let is_aligned = call.int("align_corners", 0) != 0;
        let (batch, count) = (image[0], places[1..=axes].iter().product());
        let mut result = image[..2].to_vec();
        result.extend(&places[1..=axes]);
        if image.elements() == 0 || batch * count == 0 {
            let shape = result.into();
            return Ok(vec![self.ir.known(Constant::filled(shape, 0.0), self.ir.element(x))]);
        }
        let grid = self.ir.cast(grid, Element::F32)?;
        let rows = self.ir.reshape(grid, vec![batch, count, axes])?;
        let mut taps = Vec::with_capacity(axes);
        for axis in 0..axes {
            // The last component is along the first axis.
            let size = image[axis + 2];
            let at = self.ir.push(Kind::Slice { axis: 2, start: axes - 1 - axis, length: 1 }, &[rows])?;
            let at = self.ir.reshape(at, vec![batch, count])?;
            let above = self.ir.offset(at, 1.0)?;
            let at = if is_aligned {
                self.ir.scale(above, (size as f64 - 1.0) / 2.0)?
            } else {
                let scaled = self.ir.scale(above, size as f64 / 2.0)?;
                self.ir.offset(scaled, -0.5)?
            };
            let borders = if is_aligned { (0.0, size as f64 - 1.0) } else { (-0.5, size as f64 - 0.5) };
            taps.push(self.axis_taps(at, size, borders, mode, padding)?);
        }
        // The places of each image lie in the image.
        let pixels: usize = image[2..].iter().product();
        let starts = (0..batch).map(|index| (index * pixels) as f64).collect();
        let starts = self.ir.known(Constant::dense([batch, 1].into(), starts, false), Element::I32);
        let sampled = self.interpolated(x, starts, &taps)?;
        let first = self.ir.push(Kind::Transpose(vec![0, 2, 1]), &[sampled])?;
        Ok(vec![self.ir.reshape(first, result)?])
    }

    /// The elements of one axis that a place lies between.
    fn axis_taps(
        &mut self,
        mut at: Id,
        size: usize,
        borders: (f64, f64),
        mode: &str,
        padding: Padding,
    ) -> Result<Vec<Tap>, Problem> {
        if mode == "nearest" {
            at = self.ir.unary(UnaryOp::Round, at)?;
        }
        if padding != Padding::Zeros {
            let inner = match padding {
                Padding::Reflection => self.reflected(at, borders)?,
                _ => self.clamped(at, size)?,
            };
            let below = self.ir.compare_number(CompareOp::Lt, at, borders.0)?;
            let above = self.ir.compare_number(CompareOp::Gt, at, borders.1)?;
            let outside = self.ir.push(Kind::Logic(Logic::Or), &[below, above])?;
            at = self.ir.select(outside, inner, at)?;
        }
        if mode == "nearest" {
            return Ok(vec![self.tap(at, None, size, borders, padding)?]);
        }
        let base = self.ir.push(Kind::Function(Function::Floor), &[at])?;
        let share = self.ir.binary(BinaryOp::Sub, at, base)?;
        let rest = self.rest_of_one(share)?;
        let weights = if mode.ends_with("cubic") {
            let (before, after) = (self.ir.offset(share, 1.0)?, self.ir.offset(rest, 1.0)?);
            let far = [CUBIC, -5.0 * CUBIC, 8.0 * CUBIC, -4.0 * CUBIC];
            let near = [CUBIC + 2.0, -(CUBIC + 3.0), 0.0, 1.0];
            vec![
                (-1.0, self.polynomial(before, far)?),
                (0.0, self.polynomial(share, near)?),
                (1.0, self.polynomial(rest, near)?),
                (2.0, self.polynomial(after, far)?),
            ]
        } else {
            vec![(0.0, rest), (1.0, share)]
        };
        let mut taps = Vec::with_capacity(weights.len());
        for (offset, weight) in weights {
            let position = self.ir.offset(base, offset)?;
            taps.push(self.tap(position, Some(weight), size, borders, padding)?);
        }
        Ok(taps)
    }

    /// An element by its position, which may lie beyond the borders.
    fn tap(
        &mut self,
        mut position: Id,
        mut weight: Option<Id>,
        size: usize,
        borders: (f64, f64),
        padding: Padding,
    ) -> Result<Tap, Problem> {
        match padding {
            Padding::Border => {}
            Padding::Reflection => {
                let inner = self.reflected(position, borders)?;
                position = self.ir.push(Kind::Function(Function::Floor), &[inner])?;
            }
            Padding::Zeros => {
                let from = self.ir.compare_number(CompareOp::Ge, position, 0.0)?;
                let to = self.ir.compare_number(CompareOp::Le, position, size as f64 - 1.0)?;
                let within = self.ir.push(Kind::Logic(Logic::And), &[from, to])?;
                let (one, zero) = (self.ir.number(1.0, position), self.ir.number(0.0, position));
                weight = Some(self.ir.select(within, weight.unwrap_or(one), zero)?);
            }
        }
        Ok(Tap { position: self.clamped(position, size)?, weight })
    }

    fn rest_of_one(&mut self, x: Id) -> Result<Id, Problem> {
        let one = self.ir.number(1.0, x);
        Ok(self.ir.binary(BinaryOp::Sub, one, x)?)
    }

    /// A polynomial of third degree, the highest coefficient first.
    fn polynomial(&mut self, x: Id, coefficients: [f64; 4]) -> Result<Id, Problem> {
        let mut sum = self.ir.number(coefficients[0], x);
        for &coefficient in &coefficients[1..] {
            let product = self.ir.binary(BinaryOp::Mul, sum, x)?;
            sum = self.ir.offset(product, coefficient)?;
        }
        Ok(sum)
    }

    fn clamped(&mut self, x: Id, size: usize) -> Result<Id, Problem> {
        let (least, most) = (self.ir.number(0.0, x), self.ir.number(size as f64 - 1.0, x));
        let x = self.ir.binary(BinaryOp::Max, x, least)?;
        Ok(self.ir.binary(BinaryOp::Min, x, most)?)
    }

    /// A position turned back at the borders until it is within them.
    fn reflected(&mut self, x: Id, (least, most): (f64, f64)) -> Result<Id, Problem> {
        let width = most - least;
        if width <= 0.0 {
            return Ok(self.ir.scale(x, 0.0)?);
        }
        let beyond = self.ir.offset(x, -least)?;
        let distance = self.ir.unary(UnaryOp::Abs, beyond)?;
        let share = self.ir.scale(distance, 1.0 / width)?;
        let turns = self.ir.push(Kind::Function(Function::Floor), &[share])?;
        let whole = self.ir.scale(turns, width)?;
        let rest = self.ir.binary(BinaryOp::Sub, distance, whole)?;
        let half = self.ir.scale(turns, 0.5)?;
        let even = self.ir.push(Kind::Function(Function::Floor), &[half])?;
        let is_even = self.ir.compare(CompareOp::Eq, half, even)?;
        let forth = self.ir.offset(rest, least)?;
        let limit = self.ir.number(most, x);
        let back = self.ir.binary(BinaryOp::Sub, limit, rest)?;
        Ok(self.ir.select(is_even, forth, back)?)
    }

    /// Sums of the elements `[n, places, c]` that the taps of all axes name, from the first pixel of each line of places on.
    fn interpolated(&mut self, x: Id, starts: Id, taps: &[Vec<Tap>]) -> Result<Id, Problem> {
        let picked = self.tapped(x, starts, taps)?;
        let mut sum: Option<Id> = None;
        for rows in picked {
            sum = Some(match sum {
                Some(sum) => self.ir.binary(BinaryOp::Add, sum, rows)?,
                None => rows,
            });
        }
        let sum = sum.ok_or_else(|| "at least one element expected".to_string())?;
        Ok(self.ir.cast(sum, self.ir.element(x))?)
    }

    /// For every combination of taps its elements `[n, places, c]`, as much as they count.
    fn tapped(&mut self, x: Id, starts: Id, taps: &[Vec<Tap>]) -> Result<Vec<Id>, Problem> {
        let image = self.ir.shape(x).clone();
        let axes = taps.len();
        let count: usize = taps.iter().map(Vec::len).product();
        if count > MOST_TAPS {
            return Err(Problem::Opaque(format!("sums of {count} elements per output are more than are unrolled")));
        }
        let pixels: usize = image[2..].iter().product();
        let flat = self.ir.reshape(x, vec![image[0], image[1], pixels])?;
        let rows = self.ir.push(Kind::Transpose(vec![0, 2, 1]), &[flat])?;
        let table = self.ir.reshape(rows, vec![image[0] * pixels, image[1]])?;
        let strides = image.strides();
        let mut picked = Vec::with_capacity(count);
        for combination in 0..count {
            let (mut left, mut at, mut weight) = (combination, starts, None);
            for axis in (0..axes).rev() {
                let tap = taps[axis][left % taps[axis].len()];
                left /= taps[axis].len();
                let position = self.ir.cast(tap.position, Element::I32)?;
                let step = self.ir.scale(position, strides[axis + 2] as f64)?;
                at = self.ir.binary(BinaryOp::Add, at, step)?;
                weight = match (weight, tap.weight) {
                    (Some(all), Some(own)) => Some(self.ir.binary(BinaryOp::Mul, all, own)?),
                    (all, own) => all.or(own),
                };
            }
            let rows = self.ir.push(Kind::Gather, &[table, at])?;
            let rows = self.ir.cast(rows, Element::F32)?;
            picked.push(match weight {
                Some(weight) => {
                    let dims = [&self.ir.shape(weight)[..], &[1]].concat();
                    let weight = self.ir.reshape(weight, dims)?;
                    self.ir.binary(BinaryOp::Mul, rows, weight)?
                }
                None => rows,
            });
        }
        Ok(picked)
    }

    /// Regions of images, each divided into bins, of which each is the mean or the largest of samples within it.
    pub(super) fn roi_align(&mut self, call: &Call<'a, '_>) -> Results {
        let (x, regions, images) = (call.input(0)?, call.input(1)?, call.input(2)?);
        let (image, of_regions) = (self.ir.shape(x).clone(), self.ir.shape(regions).clone());
        let count = of_regions.first().copied().unwrap_or(0);
        if image.rank() != 4 || of_regions[..] != [count, 4] || self.ir.shape(images)[..] != [count] {
            return Err(Problem::Refused(format!(
                "x [n, c, h, w], regions [r, 4] and an image of each expected, got {image} and {of_regions}"
            )));
        }
        let is_mean = call.word("mode", &["avg", "max"])? == "avg";
        let older =
            if call.opset < 16 { ["output_half_pixel", "half_pixel"] } else { ["half_pixel", "output_half_pixel"] };
        let is_shifted = call.word("coordinate_transformation_mode", &older)? == "half_pixel";
        let scale = call.float("spatial_scale", 1.0);
        let samples = usize::try_from(call.int("sampling_ratio", 0)).unwrap_or(0);
        let sizes = ["output_height", "output_width"].map(|name| usize::try_from(call.int(name, 1)).unwrap_or(0));
        if samples == 0 {
            return Err(Problem::Opaque("how many samples a bin takes depends on the input".to_string()));
        }
        let result = vec![count, image[1], sizes[0], sizes[1]];
        if image.elements() == 0 || result.contains(&0) {
            return Ok(vec![self.ir.known(Constant::filled(result.into(), 0.0), self.ir.element(x))]);
        }
        let regions = self.ir.cast(regions, Element::F32)?;
        let mut taps = Vec::with_capacity(2);
        for axis in 0..2 {
            // Regions begin and end with their columns.
            let mut ends = Vec::with_capacity(2);
            for start in [1 - axis, 3 - axis] {
                let end = self.ir.push(Kind::Slice { axis: 1, start, length: 1 }, &[regions])?;
                let end = self.ir.scale(end, scale)?;
                ends.push(self.ir.offset(end, if is_shifted { -0.5 } else { 0.0 })?);
            }
            let mut length = self.ir.binary(BinaryOp::Sub, ends[1], ends[0])?;
            if !is_shifted {
                let one = self.ir.number(1.0, length);
                length = self.ir.binary(BinaryOp::Max, length, one)?;
            }
            let lines = sizes[axis] * samples;
            let shares = (0..lines).map(|line| (line as f64 + 0.5) / lines as f64).collect();
            let shares = self.ir.known(Constant::dense([1, lines].into(), shares, false), Element::F32);
            let along = self.ir.binary(BinaryOp::Mul, length, shares)?;
            let at = self.ir.binary(BinaryOp::Add, ends[0], along)?;
            // Samples of the other axis repeat.
            let mut dims = vec![count, 1, 1];
            dims[axis + 1] = lines;
            let at = self.ir.reshape(at, dims)?;
            taps.push(self.region_taps(at, image[axis + 2])?);
        }
        let pixels = image[2] * image[3];
        let images = self.ir.cast(images, Element::I32)?;
        let starts = self.ir.scale(images, pixels as f64)?;
        let starts = self.ir.reshape(starts, vec![count, 1, 1])?;
        let picked = self.tapped(x, starts, &taps)?;
        let op = if is_mean { BinaryOp::Add } else { BinaryOp::Max };
        let mut all = picked[0];
        for &rows in &picked[1..] {
            all = self.ir.binary(op, all, rows)?;
        }
        let split = self.ir.reshape(all, vec![count, sizes[0], samples, sizes[1], samples, image[1]])?;
        let op = if is_mean { Reduction::Mean } else { Reduction::Max };
        let bins = self.ir.reduce(op, split, vec![2, 4], false)?;
        let first = self.ir.push(Kind::Transpose(vec![0, 3, 1, 2]), &[bins])?;
        Ok(vec![self.ir.cast(first, self.ir.element(x))?])
    }

    /// The two elements that a sample lies between; beyond the image by more than one, it counts nothing.
    fn region_taps(&mut self, at: Id, size: usize) -> Result<Vec<Tap>, Problem> {
        let from = self.ir.compare_number(CompareOp::Ge, at, -1.0)?;
        let to = self.ir.compare_number(CompareOp::Le, at, size as f64)?;
        let within = self.ir.push(Kind::Logic(Logic::And), &[from, to])?;
        let inner = self.clamped(at, size)?;
        let base = self.ir.push(Kind::Function(Function::Floor), &[inner])?;
        let share = self.ir.binary(BinaryOp::Sub, inner, base)?;
        let rest = self.rest_of_one(share)?;
        let next = self.ir.offset(base, 1.0)?;
        let next = self.clamped(next, size)?;
        let mut taps = Vec::with_capacity(2);
        for (position, weight) in [(base, rest), (next, share)] {
            let zero = self.ir.number(0.0, weight);
            taps.push(Tap { position, weight: Some(self.ir.select(within, weight, zero)?) });
        }
        Ok(taps)
    }
}
