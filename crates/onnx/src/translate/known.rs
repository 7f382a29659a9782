//! Operators that give constants: shapes, ranges, fills, triangles.

use deuteron_graph::Shape;

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Id, Kind};
use crate::limits::{FOLD_VALUE_ELEMENTS, MAX_DIMS};
use crate::weight::shape_of;

impl<'a> Translator<'a, '_> {
    pub(super) fn known(&mut self, call: &Call<'a, '_>) -> Results {
        let result = match call.node.op {
            "Shape" => self.shape(call)?,
            "Size" => {
                let elements = self.ir.shape(call.input(0)?).elements() as f64;
                self.ir.known_scalar(elements, Element::I64)
            }
            "Constant" => self.constant(call)?,
            "ConstantOfShape" => self.fill(call)?,
            "Range" => self.range(call)?,
            "Trilu" => self.triangle(call)?,
            "EyeLike" => self.identity_matrix(call)?,
            "NonZero" => self.non_zero(call)?,
            _ => self.window_function(call)?,
        };
        Ok(vec![result])
    }

    /// Whole numbers that have to be known: shapes, axes, starts.
    pub(super) fn integers(&mut self, id: Id, what: &str) -> Result<Vec<i64>, Problem> {
        match self.given(id) {
            // Shapes and axes are short; a longer tensor is something else.
            Some(constant) if constant.shape.elements() <= MAX_DIMS * MAX_DIMS => Ok(constant.integers()),
            Some(constant) => {
                Err(Problem::Refused(format!("{what} expected, got a tensor of shape {}", constant.shape)))
            }
            None => Err(Problem::Opaque(format!("its {what} depend on the input"))),
        }
    }

    /// Reserves memory for a constant.
    pub(super) fn reserve(&mut self, elements: usize) -> Result<(), Problem> {
        if self.ir.folder.spend(elements, elements.saturating_mul(8)) {
            return Ok(());
        }
        Err(Problem::Opaque(format!(
            "a constant of {elements} elements is more than is folded ({FOLD_VALUE_ELEMENTS})"
        )))
    }

    fn shape(&mut self, call: &Call) -> Result<Id, Problem> {
        let shape = self.ir.shape(call.input(0)?);
        let rank = shape.rank() as i64;
        let bound = |value: i64| (if value < 0 { value.saturating_add(rank) } else { value }).clamp(0, rank) as usize;
        let (start, end) = (bound(call.int("start", 0)), bound(call.int("end", rank)));
        let sizes: Vec<f64> = shape[start.min(end)..end].iter().map(|&size| size as f64).collect();
        let constant = Constant::dense(Shape::from([sizes.len()]), sizes, false);
        Ok(self.ir.known(constant, Element::I64))
    }

    fn constant(&mut self, call: &Call<'a, '_>) -> Result<Id, Problem> {
        if let Some(tensor) = call.attribute("value").and_then(|attribute| attribute.tensor.as_ref()) {
            let name = call.node.outputs.first().copied().unwrap_or_default();
            return Ok(self.tensor(tensor, name)?);
        }
        for name in call.attribute_names() {
            let Some(attribute) = call.attribute(name) else { continue };
            let (values, element, is_scalar) = match name {
                "value_int" => (vec![attribute.int.unwrap_or(0) as f64], Element::I64, true),
                "value_float" => (vec![f64::from(attribute.float.unwrap_or(0.0))], Element::F32, true),
                "value_ints" => (attribute.ints.iter().map(|&x| x as f64).collect(), Element::I64, false),
                "value_floats" => (attribute.floats.iter().map(|&x| f64::from(x)).collect(), Element::F32, false),
                _ => continue,
            };
            self.reserve(values.len())?;
            let shape = if is_scalar { Shape::scalar() } else { Shape::from([values.len()]) };
            return Ok(self.ir.known(Constant::dense(shape, values, false), element));
        }
        Err(Problem::Opaque("its value is text or sparse".to_string()))
    }

    fn fill(&mut self, call: &Call<'a, '_>) -> Result<Id, Problem> {
        let dims = self.integers(call.input(0)?, "sizes")?;
        let shape = shape_of(&call.node.label(), &dims)?;
        let (value, element) = match call.attribute("value").and_then(|attribute| attribute.tensor.as_ref()) {
            Some(tensor) => {
                let stored = self.find(tensor, "value")?;
                if stored.shape.elements() != 1 {
                    return Err(Problem::Refused(format!("one value expected, got shape {}", stored.shape)));
                }
                (stored.decode(self.file)?.uniform().unwrap_or(0.0), stored.element)
            }
            None => (0.0, Element::F32),
        };
        Ok(self.ir.known(Constant::filled(shape, value), element))
    }

    fn range(&mut self, call: &Call) -> Result<Id, Problem> {
        let ids = [call.input(0)?, call.input(1)?, call.input(2)?];
        // The type that a function computes in: sums of floats are exact enough here.
        call.without_effect(&["stash_type"]);
        let [Some(start), Some(limit), Some(step)] = ids.map(|id| self.scalar(id)) else {
            return Err(Problem::Opaque("its bounds depend on the input".to_string()));
        };
        let count = ((limit - start) / step).ceil().max(0.0);
        // A step of 0 gives NaN.
        if count.is_nan() || count > FOLD_VALUE_ELEMENTS as f64 {
            return Err(Problem::Refused(format!(
                "a range of at most 2^24 numbers expected, got {start}..{limit} by {step}"
            )));
        }
        let count = count as usize;
        self.reserve(count)?;
        let values = (0..count).map(|i| start + i as f64 * step).collect();
        Ok(self.ir.known(Constant::dense(Shape::from([count]), values, false), self.ir.element(ids[0])))
    }

    /// The upper or lower triangle: other elements become 0.
    fn triangle(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let offset = match call.optional(1) {
            Some(id) => self.scalar(id).ok_or_else(|| Problem::Opaque("its diagonal depends on the input".into()))?,
            None => 0.0,
        };
        let upper = call.int("upper", 1) != 0;
        let shape = self.ir.shape(x).clone();
        let Some([rows, cols]) = shape.last_chunk::<2>().copied() else {
            return Err(Problem::Refused(format!("a matrix expected, got shape {shape}")));
        };
        self.reserve(rows.saturating_mul(cols))?;
        let kept = |i: usize, j: usize| {
            let beyond = j as f64 - i as f64;
            f64::from(if upper { beyond >= offset } else { beyond <= offset })
        };
        let values = (0..rows).flat_map(|i| (0..cols).map(move |j| kept(i, j))).collect();
        let mask = self.ir.known(Constant::dense(Shape::from([rows, cols]), values, true), Element::Bool);
        let element = self.ir.element(x);
        if element == Element::Bool {
            return Ok(self.ir.push(Kind::Logic(crate::ir::Logic::And), &[mask, x])?);
        }
        let zero = self.ir.known_scalar(0.0, element);
        Ok(self.ir.push(Kind::Select, &[mask, x, zero])?)
    }

    fn identity_matrix(&mut self, call: &Call) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        let element = Element::from_number(call.int("dtype", 0)).unwrap_or(self.ir.element(x));
        let [rows, cols] = shape[..] else {
            return Err(Problem::Refused(format!("a matrix expected, got shape {shape}")));
        };
        self.reserve(rows.saturating_mul(cols))?;
        let offset = call.int("k", 0);
        let value = |i: usize, j: usize| f64::from((j as i64).saturating_sub(offset) == i as i64);
        let values = (0..rows).flat_map(|i| (0..cols).map(move |j| value(i, j))).collect();
        Ok(self.ir.known(Constant::dense(shape, values, element == Element::Bool), element))
    }

    fn non_zero(&mut self, call: &Call) -> Result<Id, Problem> {
        let Some(constant) = self.given(call.input(0)?) else {
            return Err(Problem::Opaque("how many elements it finds depends on the input".to_string()));
        };
        let shape = constant.shape.clone();
        self.reserve(shape.elements().saturating_mul(shape.rank().max(1)))?;
        let found: Vec<usize> =
            constant.values().enumerate().filter(|(_, value)| *value != 0.0).map(|(position, _)| position).collect();
        let strides = shape.strides();
        let index = |axis: usize, position: usize| (position / strides[axis] % shape[axis]) as f64;
        let values = (0..shape.rank()).flat_map(|axis| found.iter().map(move |&position| (axis, position)));
        let values = values.map(|(axis, position)| index(axis, position)).collect();
        Ok(self.ir.known(Constant::dense(Shape::from([shape.rank(), found.len()]), values, false), Element::I64))
    }

    /// A Hann, Hamming or Blackman window.
    fn window_function(&mut self, call: &Call) -> Result<Id, Problem> {
        let size = self.integers(call.input(0)?, "size")?;
        let size = size.first().and_then(|&size| usize::try_from(size).ok());
        let size = size.ok_or_else(|| "a size of at least 0 expected".to_string())?;
        let number = call.int("output_datatype", 1);
        let Some(element) = Element::from_number(number).filter(|element| element.is_float()) else {
            return Err(Problem::Opaque(format!("ONNX element type {number} is not one of windows here")));
        };
        let period = if call.int("periodic", 1) != 0 { size } else { size.saturating_sub(1) };
        let terms: &[f64] = match call.node.op {
            "HannWindow" => &[0.5, 0.5],
            "HammingWindow" => &[25.0 / 46.0, 21.0 / 46.0],
            _ => &[0.42, 0.5, 0.08],
        };
        self.reserve(size)?;
        let value = |index: usize| -> f64 {
            let angle = 2.0 * std::f64::consts::PI * index as f64 / period.max(1) as f64;
            let sign = |term: usize| if term.is_multiple_of(2) { 1.0 } else { -1.0 };
            terms.iter().enumerate().map(|(term, factor)| sign(term) * factor * (term as f64 * angle).cos()).sum()
        };
        let values = (0..size).map(|index| element.round(value(index))).collect();
        Ok(self.ir.known(Constant::dense([size].into(), values, false), element))
    }
}
