//! Recognises decomposed GELU and SiLU, and their gated forms.

use std::f64::consts::{FRAC_1_SQRT_2, PI};

use deuteron_graph::{Activation, BinaryOp, Composite, UnaryOp};

use super::{Match, Miss, Search, or_no};
use crate::element::Element;
use crate::ir::{Id, Kind};
use crate::limits::{PATTERN_DEPTH, PATTERN_STEPS};

/// Coefficients of `1, x, x^2, x^3`.
type Cubic = [f64; 4];

/// `x/2 (1 + tanh u)` or `x/2 (1 + erf u)`, whatever the order of the factors.
pub(super) fn gelu(search: &mut Search, root: Id) -> Result<Match, Miss> {
    let mut interior = Vec::new();
    let mut product = Product { factor: 1.0, others: Vec::new() };
    search.factors(root, root, &mut product, &mut interior, PATTERN_DEPTH);
    let bell = product.others.iter().position(|&id| search.bell(id).is_some());
    let sum = product.others.remove(or_no(bell)?);
    let Some((offset, function)) = search.bell(sum) else { return Err(Miss::No) };
    let [x] = product.others[..] else { return Err(Miss::No) };
    let (activation, name, expected) = match search.kind(function) {
        Kind::Unary(UnaryOp::Tanh) => {
            let slope = (2.0 / PI).sqrt();
            (Activation::GeluTanh, "Tanh", [0.0, slope, 0.0, slope * 0.044715])
        }
        _ => (Activation::GeluErf, "Erf", [0.0, FRAC_1_SQRT_2, 0.0, 0.0]),
    };
    interior.extend([sum, function]);
    let near = |missing: String| Err(Miss::Near { what: "gelu", heart: function, missing });
    let argument = search.inputs(function)[0];
    let Some(cubic) = search.cubic(argument, x, &mut interior, &mut { PATTERN_STEPS }) else {
        return near(format!("the argument of `{name}` is no polynomial of the value that is multiplied"));
    };
    let close = tolerance(search.ir.element(root));
    let agrees = |got: f64, expected: f64| (got - expected).abs() <= close * expected.abs().max(1e-3);
    if !cubic.iter().zip(expected).all(|(&got, expected)| agrees(got, expected)) {
        return near(format!("the argument of `{name}` is {}, expected {}", polynomial(&cubic), polynomial(&expected)));
    }
    if !agrees(offset, 1.0) || !agrees(product.factor, 0.5) {
        return near(format!("it is {} x ({offset} + ..), expected 0.5 x (1 + ..)", product.factor));
    }
    Ok(Match {
        what: "gelu",
        heart: function,
        kind: Kind::Composite(Composite::Activation(activation)),
        operands: vec![x],
        interior,
    })
}

/// Models write their constants in their own precision, and some with four digits.
fn tolerance(element: Element) -> f64 {
    (4.0 * element.dtype().epsilon()).max(1e-4)
}

struct Product {
    factor: f64,
    others: Vec<Id>,
}

impl Search<'_> {
    /// The factors of a product, through products that nothing else reads.
    fn factors(&self, id: Id, root: Id, product: &mut Product, interior: &mut Vec<Id>, depth: usize) {
        if let Some(value) = self.ir.scalar(id) {
            product.factor *= value;
            return;
        }
        let is_open = id == root || self.readers.get(id.index()).is_some_and(|readers| readers.len() == 1);
        if depth > 0 && is_open && self.ir.node(id).constant.is_none() {
            if let Some((a, b)) = self.binary(id, BinaryOp::Mul) {
                interior.push(id);
                self.factors(a, root, product, interior, depth - 1);
                self.factors(b, root, product, interior, depth - 1);
                return;
            }
            if let Some((a, value)) = self.binary(id, BinaryOp::Div).and_then(|(a, b)| Some((a, self.ir.scalar(b)?))) {
                interior.push(id);
                product.factor /= value;
                self.factors(a, root, product, interior, depth - 1);
                return;
            }
        }
        product.others.push(id);
    }

    /// The parts of `c + tanh u` or `c + erf u`.
    fn bell(&self, id: Id) -> Option<(f64, Id)> {
        let is_bell = |id: Id| matches!(self.kind(id), Kind::Unary(UnaryOp::Tanh | UnaryOp::Erf));
        self.orders(id, BinaryOp::Add)
            .into_iter()
            .find_map(|(a, b)| Some((self.ir.scalar(a).filter(|_| is_bell(b))?, b)))
    }

    /// A value as a polynomial of `x`. The steps bound the depth too.
    fn cubic(&self, id: Id, x: Id, interior: &mut Vec<Id>, steps: &mut usize) -> Option<Cubic> {
        if id == x {
            return Some([0.0, 1.0, 0.0, 0.0]);
        }
        if let Some(value) = self.ir.scalar(id) {
            return Some([value, 0.0, 0.0, 0.0]);
        }
        *steps = steps.checked_sub(1)?;
        let result = match (self.kind(id), self.inputs(id)) {
            (Kind::Binary(op), &[a, b]) => {
                let (a, b) = (self.cubic(a, x, interior, steps)?, self.cubic(b, x, interior, steps)?);
                match op {
                    BinaryOp::Add => std::array::from_fn(|i| a[i] + b[i]),
                    BinaryOp::Sub => std::array::from_fn(|i| a[i] - b[i]),
                    BinaryOp::Mul => multiply(&a, &b)?,
                    BinaryOp::Div if b[1..] == [0.0; 3] => a.map(|coefficient| coefficient / b[0]),
                    BinaryOp::Div | BinaryOp::Max | BinaryOp::Min => return None,
                }
            }
            (Kind::Power(exponent @ (2.0 | 3.0)), &[base]) => {
                let base = self.cubic(base, x, interior, steps)?;
                let square = multiply(&base, &base)?;
                if *exponent == 2.0 { square } else { multiply(&square, &base)? }
            }
            (Kind::Unary(UnaryOp::Neg), &[inner]) => self.cubic(inner, x, interior, steps)?.map(|c| -c),
            _ => return None,
        };
        interior.push(id);
        Some(result)
    }
}

/// Its terms that are not zero.
fn polynomial(cubic: &Cubic) -> String {
    let powers = ["", " x", " x^2", " x^3"];
    let terms = cubic.iter().zip(powers).filter(|(coefficient, _)| **coefficient != 0.0);
    let terms: Vec<String> = terms.map(|(coefficient, power)| format!("{coefficient:.6}{power}")).collect();
    if terms.is_empty() { "0".to_string() } else { terms.join(" + ") }
}

fn multiply(a: &Cubic, b: &Cubic) -> Option<Cubic> {
    let mut result = [0.0; 4];
    for (i, a) in a.iter().enumerate() {
        for (j, b) in b.iter().enumerate() {
            match result.get_mut(i + j) {
                Some(coefficient) => *coefficient += a * b,
                None if a * b == 0.0 => {}
                None => return None,
            }
        }
    }
    Some(result)
}

/// `x sigmoid(x)`, or `x / (1 + e^-x)`.
pub(super) fn silu(search: &mut Search, root: Id) -> Result<Match, Miss> {
    let found = |x: Id, interior: Vec<Id>| {
        let kind = Kind::Composite(Composite::Activation(Activation::Silu));
        Ok(Match { what: "silu", heart: root, kind, operands: vec![x], interior })
    };
    for (x, gate) in search.orders(root, BinaryOp::Mul) {
        if !matches!(search.kind(gate), Kind::Unary(UnaryOp::Sigmoid)) {
            continue;
        }
        let argument = search.inputs(gate)[0];
        if argument == x {
            return found(x, vec![gate]);
        }
        let steep = search.orders(argument, BinaryOp::Mul).into_iter().find(|&(inner, _)| inner == x);
        if let Some(slope) = steep.and_then(|(_, slope)| search.ir.scalar(slope)) {
            let missing = format!("the argument of `Sigmoid` is {slope:.6} x, expected x (this is GELU by a sigmoid)");
            return Err(Miss::Near { what: "silu", heart: gate, missing });
        }
    }
    let (x, sum) = or_no(search.binary(root, BinaryOp::Div))?;
    let orders = search.orders(sum, BinaryOp::Add);
    let (_, exponential) = or_no(orders.into_iter().find(|&(one, _)| search.ir.scalar(one) == Some(1.0)))?;
    let Kind::Unary(UnaryOp::Exp) = search.kind(exponential) else { return Err(Miss::No) };
    let negative = search.inputs(exponential)[0];
    let Kind::Unary(UnaryOp::Neg) = search.kind(negative) else { return Err(Miss::No) };
    if search.inputs(negative)[0] == x { found(x, vec![sum, exponential, negative]) } else { Err(Miss::No) }
}

/// `silu(x) g` and `gelu(x) g`.
pub(super) fn gated(search: &mut Search, root: Id) -> Result<Match, Miss> {
    for (activation, gate) in search.orders(root, BinaryOp::Mul) {
        let Kind::Composite(Composite::Activation(function)) = search.kind(activation) else { continue };
        let (what, composite) = match (function, function.gelu()) {
            (Activation::Silu, _) => ("swiglu", Composite::Swiglu),
            (_, Some(kind)) => ("geglu", Composite::Geglu { kind }),
            (_, None) => continue,
        };
        // An activation that is squared, or scaled by a number, is no gate.
        if search.ir.shape(gate) != search.ir.shape(activation) || search.ir.node(gate).is_fixed || gate == activation {
            continue;
        }
        let operands = vec![search.inputs(activation)[0], gate];
        return Ok(Match { what, heart: root, kind: Kind::Composite(composite), operands, interior: vec![activation] });
    }
    Err(Miss::No)
}
