//! `Resize` and `Upsample`: every mode is a linear map of each axis. Where each new element is an old one, it is a view or
//! a gather; else a matmul with the weights of the neighbours.

use deuteron_graph::{BinaryOp, Shape};

use super::call::{Results, axis_of};
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::ir::{Id, Kind};

/// How positions and weights are found.
struct Rule<'w> {
    mode: &'w str,
    coordinates: &'w str,
    nearest: &'w str,
    cubic: f64,
    exclude_outside: bool,
    antialias: bool,
}

/// One axis: sizes, their ratio, and the region for cropping.
struct Axis {
    old: usize,
    new: usize,
    scale: f64,
    region: (f64, f64),
}

/// The old elements and weights that make up a new one; `None` where the region lies outside.
type Weights = Option<Vec<(usize, f64)>>;

impl Rule<'_> {
    /// The position of a new element on the old axis.
    fn position(&self, index: usize, axis: &Axis) -> f64 {
        let (x, old, scale) = (index as f64, axis.old as f64, axis.scale);
        let width = scale * old;
        match self.coordinates {
            "align_corners" if width == 1.0 => 0.0,
            "align_corners" => x * (old - 1.0) / (width - 1.0),
            "asymmetric" => x / scale,
            "pytorch_half_pixel" if width == 1.0 => -0.5,
            "tf_half_pixel_for_nn" => (x + 0.5) / scale,
            "half_pixel_symmetric" => {
                let adjustment = axis.new as f64 / width;
                old / 2.0 * (1.0 - adjustment) + (x + 0.5) / scale - 0.5
            }
            "tf_crop_and_resize" => {
                let (start, end) = axis.region;
                let along = match axis.new {
                    1 => (end - start) * (old - 1.0) / 2.0,
                    _ => x * (end - start) * (old - 1.0) / (width - 1.0),
                };
                along + start * (old - 1.0)
            }
            _ => (x + 0.5) / scale - 0.5,
        }
    }

    /// Weights of the neighbours, the first of which is `start` elements from the one below the position. `ratio` is how
    /// far the position is above that one, in (0, 1].
    fn neighbours(&self, ratio: f64, scale: f64) -> (i64, Vec<f64>) {
        let scale = if self.antialias { scale.min(1.0) } else { 1.0 };
        match self.mode {
            "nearest" => {
                let upper = match self.nearest {
                    "floor" => ratio == 1.0,
                    "ceil" => true,
                    "round_prefer_ceil" => ratio >= 0.5,
                    _ => ratio > 0.5,
                };
                (0, if upper { vec![0.0, 1.0] } else { vec![1.0, 0.0] })
            }
            "linear" => {
                let start = (-1.0 / scale).floor() as i64 + 1;
                let weight = |i: i64| (1.0 - ((i as f64 - ratio) * scale).abs()).clamp(0.0, 1.0);
                (start, (start..2 - start).map(weight).collect())
            }
            _ => {
                let start = (-2.0 / scale).floor() as i64 + 1;
                (start, (start..2 - start).map(|i| self.cubic_weight(scale * (i as f64 - ratio))).collect())
            }
        }
    }

    fn cubic_weight(&self, x: f64) -> f64 {
        let (a, x) = (self.cubic, x.abs());
        match x {
            x if x <= 1.0 => ((a + 2.0) * x - (a + 3.0)) * x * x + 1.0,
            x if x < 2.0 => ((a * x - 5.0 * a) * x + 8.0 * a) * x - 4.0 * a,
            _ => 0.0,
        }
    }

    fn weights(&self, index: usize, axis: &Axis) -> Weights {
        let position = self.position(index, axis);
        let last = axis.old as i64 - 1;
        if self.coordinates == "tf_crop_and_resize" && !(0.0..=last as f64).contains(&position) {
            return None;
        }
        let below = position.ceil() - 1.0;
        let (start, mut weights) = self.neighbours(position - below, axis.scale);
        let places: Vec<i64> = (0..weights.len() as i64).map(|offset| below as i64 + start + offset).collect();
        if self.exclude_outside {
            for (weight, place) in weights.iter_mut().zip(&places) {
                if !(0..=last).contains(place) {
                    *weight = 0.0;
                }
            }
        }
        let sum: f64 = weights.iter().sum();
        let mut merged: Vec<(usize, f64)> = Vec::new();
        for (&place, weight) in places.iter().zip(weights) {
            let place = place.clamp(0, last) as usize;
            match merged.iter_mut().find(|(own, _)| *own == place) {
                Some((_, total)) => *total += weight / sum,
                None => merged.push((place, weight / sum)),
            }
        }
        merged.retain(|&(_, weight)| weight != 0.0);
        Some(merged)
    }
}

impl<'a> Translator<'a, '_> {
    pub(super) fn resize(&mut self, call: &Call<'a, '_>) -> Results {
        let x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        let is_early = call.node.op == "Upsample" || call.opset < 11;
        let modes = ["nearest", "linear", "cubic", "bilinear"];
        let mode = call.word("mode", &modes)?;
        let coordinates = call.word(
            "coordinate_transformation_mode",
            &[
                "half_pixel",
                "half_pixel_symmetric",
                "pytorch_half_pixel",
                "align_corners",
                "asymmetric",
                "tf_half_pixel_for_nn",
                "tf_crop_and_resize",
            ],
        )?;
        let roundings = ["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"];
        let rule = Rule {
            mode: if mode == "bilinear" { "linear" } else { mode },
            coordinates: if is_early { "asymmetric" } else { coordinates },
            nearest: if is_early { "floor" } else { call.word("nearest_mode", &roundings)? },
            cubic: call.float("cubic_coeff_a", -0.75),
            exclude_outside: call.int("exclude_outside", 0) != 0,
            antialias: call.int("antialias", 0) != 0,
        };
        let outside = call.float("extrapolation_value", 0.0);
        let axes = self.resized_axes(call, &shape, is_early)?;
        let mut result = x;
        for (axis, of_axis) in axes {
            if of_axis.new == 0 || of_axis.old == 0 {
                return Err(Problem::Refused(format!("sizes of at least 1 expected, got {shape}")));
            }
            let neighbours = if rule.mode == "nearest" { 1 } else { of_axis.old };
            self.reserve(of_axis.new.saturating_mul(neighbours))?;
            let rows: Vec<Weights> = (0..of_axis.new).map(|index| rule.weights(index, &of_axis)).collect();
            result = self.resize_axis(result, axis, of_axis.old, &rows, outside)?;
        }
        Ok(vec![result])
    }

    /// Axes that change, with their sizes.
    fn resized_axes(&mut self, call: &Call, shape: &Shape, is_early: bool) -> Result<Vec<(usize, Axis)>, Problem> {
        let rank = shape.rank();
        let chosen: Vec<usize> = match call.ints("axes") {
            Some(axes) => axes.iter().map(|&axis| axis_of(axis, rank)).collect::<Result<_, _>>()?,
            None => (0..rank).collect(),
        };
        let policy = call.word("keep_aspect_ratio_policy", &["stretch", "not_larger", "not_smaller"])?;
        let attribute = call.attribute("scales").map(|attribute| attribute.floats.clone());
        let (scales, sizes) = match (attribute, is_early) {
            (Some(scales), _) => (scales.iter().map(|&scale| f64::from(scale)).collect(), Vec::new()),
            (None, true) => (self.numbers(call.optional(1), "scales")?, Vec::new()),
            (None, false) => (self.numbers(call.optional(2), "scales")?, self.numbers(call.optional(3), "sizes")?),
        };
        let region = if is_early { Vec::new() } else { self.numbers(call.optional(1), "region")? };
        let count = chosen.len();
        if [&scales, &sizes].iter().any(|list| !list.is_empty() && list.len() != count)
            || scales.len() + sizes.len() != count
        {
            return Err(Problem::Refused(format!(
                "{count} scales or sizes expected, got {} and {}",
                scales.len(),
                sizes.len()
            )));
        }
        let ratios = || chosen.iter().zip(&sizes).map(|(&axis, &size)| size / shape[axis] as f64);
        let common = match policy {
            "not_larger" if !sizes.is_empty() => Some(ratios().fold(f64::INFINITY, f64::min)),
            "not_smaller" if !sizes.is_empty() => Some(ratios().fold(0.0, f64::max)),
            _ => None,
        };
        let mut axes = Vec::new();
        for (position, &axis) in chosen.iter().enumerate() {
            let old = shape[axis];
            let (new, scale) = match (common, sizes.get(position), scales.get(position)) {
                (Some(scale), _, _) => ((scale * old as f64 + 0.5).floor(), scale),
                (None, Some(&size), _) => (size, size / old as f64),
                (None, None, Some(&scale)) => ((old as f64 * scale).floor(), scale),
                (None, None, None) => (old as f64, 1.0),
            };
            let most = f64::from(1 << 20);
            if !(0.0..=most).contains(&new) || scale.is_nan() || scale <= 0.0 {
                return Err(Problem::Refused(format!(
                    "a positive scale and a size below {most} expected, got {scale} and {new}"
                )));
            }
            let bounds = region.get(position).zip(region.get(position + count));
            let region = bounds.map_or((0.0, 1.0), |(&start, &end)| (start, end));
            axes.push((axis, Axis { old, new: new as usize, scale, region }));
        }
        Ok(axes)
    }

    /// Numbers that have to be known; none where the operand is left out or empty.
    fn numbers(&mut self, id: Option<Id>, what: &str) -> Result<Vec<f64>, Problem> {
        let Some(id) = id else { return Ok(Vec::new()) };
        match self.given(id) {
            Some(constant) if constant.shape.elements() <= 64 => Ok(constant.values().collect()),
            Some(constant) => {
                Err(Problem::Refused(format!("{what} expected, got a tensor of shape {}", constant.shape)))
            }
            None => Err(Problem::Opaque(format!("its {what} depend on the input"))),
        }
    }

    fn resize_axis(&mut self, x: Id, axis: usize, old: usize, rows: &[Weights], outside: f64) -> Result<Id, Problem> {
        let new = rows.len();
        let single = |row: &Weights| match row.as_deref() {
            Some(&[(place, 1.0)]) => Some(place),
            _ => None,
        };
        if let Some(places) = rows.iter().map(single).collect::<Option<Vec<usize>>>() {
            if new == old && places.iter().enumerate().all(|(index, &place)| index == place) {
                return Ok(x);
            }
            let shape = self.ir.shape(x).clone();
            let factor = new / old;
            let repeats =
                new == old * factor && places.iter().enumerate().all(|(index, &place)| place == index / factor);
            if repeats && shape.rank() < deuteron_graph::MAX_RANK {
                let (mut single, mut many, mut dims) = (shape.to_vec(), shape.to_vec(), shape.to_vec());
                single.insert(axis + 1, 1);
                many.insert(axis + 1, factor);
                dims[axis] = new;
                let split = self.ir.reshape(x, single)?;
                let repeated = self.ir.broadcast(split, &Shape::new(many))?;
                return Ok(self.ir.reshape(repeated, dims)?);
            }
            return self.picked(x, axis, new, |index| places[index]);
        }
        self.reserve(new.saturating_mul(old))?;
        let mut matrix = vec![0.0; new * old];
        for (index, row) in rows.iter().enumerate() {
            for &(place, weight) in row.iter().flatten() {
                matrix[index * old + place] += weight;
            }
        }
        let mapped = self.ir.linear_map(x, axis, new, matrix)?;
        if outside == 0.0 || rows.iter().all(Option::is_some) {
            return Ok(mapped);
        }
        let added = rows.iter().map(|row| if row.is_some() { 0.0 } else { outside }).collect();
        let added = self.ir.known(Constant::dense([new].into(), added, false), self.ir.element(x));
        let rank = self.ir.shape(x).rank();
        let added = self.ir.along(added, axis, rank)?;
        // What a former axis put outside is mapped with the weight of an axis that lies inside, which is 1 in sum.
        Ok(self.ir.push(Kind::Binary(BinaryOp::Add), &[mapped, added])?)
    }
}
