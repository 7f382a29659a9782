//! One operator with its operands and attributes looked up.

use std::rc::Rc;

use crate::element::as_written;
use crate::error::OnnxError;
use crate::ir::{Id, Refusal};
use crate::schema::{Attribute, NodeProto, short};

/// An attribute under the name it has here: that of a function's call may be passed on under another.
pub(crate) type NamedAttribute<'a> = (&'a str, Rc<Attribute<'a>>);

/// Why an operator has no counterpart.
#[derive(Debug)]
pub(crate) enum Problem {
    /// It is malformed: what was expected and what came.
    Refused(Refusal),
    /// It is fine but cannot be expressed: why.
    Opaque(String),
    /// The file is at fault.
    Failed(OnnxError),
}

impl From<Refusal> for Problem {
    fn from(refusal: Refusal) -> Self {
        Problem::Refused(refusal)
    }
}

impl From<OnnxError> for Problem {
    fn from(error: OnnxError) -> Self {
        Problem::Failed(error)
    }
}

/// What an operator gives.
pub(crate) type Results = Result<Vec<Id>, Problem>;

/// An operator, its operands and attributes.
#[derive(Debug)]
pub(crate) struct Call<'a, 'n> {
    pub node: &'n NodeProto<'a>,
    pub attributes: Vec<NamedAttribute<'a>>,
    pub inputs: Vec<Option<Id>>,
}

impl<'a> Call<'a, '_> {
    pub fn attribute(&self, name: &str) -> Option<&Attribute<'a>> {
        self.attributes.iter().find(|(given, _)| *given == name).map(|(_, attribute)| attribute.as_ref())
    }

    pub fn int(&self, name: &str, otherwise: i64) -> i64 {
        self.attribute(name).and_then(|attribute| attribute.int).unwrap_or(otherwise)
    }

    pub fn float(&self, name: &str, otherwise: f64) -> f64 {
        self.attribute(name).and_then(|attribute| attribute.float).map_or(otherwise, |value| as_written(value.into()))
    }

    pub fn ints(&self, name: &str) -> Option<&[i64]> {
        self.attribute(name).map(|attribute| attribute.ints.as_slice())
    }

    pub fn text(&self, name: &str) -> Option<&'a str> {
        let bytes = self.attribute(name)?.text?.bytes();
        std::str::from_utf8(bytes).ok().map(short)
    }

    /// An operand that has to be there.
    pub fn input(&self, position: usize) -> Result<Id, Problem> {
        let missing = || Problem::Refused(format!("operand {position} expected, got {} operands", self.inputs.len()));
        self.optional(position).ok_or_else(missing)
    }

    /// An operand that may be left out.
    pub fn optional(&self, position: usize) -> Option<Id> {
        self.inputs.get(position).copied().flatten()
    }

    /// All operands that are there.
    pub fn all(&self) -> Vec<Id> {
        self.inputs.iter().flatten().copied().collect()
    }

    /// Whether a result is asked for.
    pub fn wants(&self, position: usize) -> bool {
        self.node.outputs.get(position).is_some_and(|name| !name.is_empty())
    }
}

/// An axis counted from the end if negative.
pub(crate) fn axis_of(axis: i64, rank: usize) -> Result<usize, Refusal> {
    let signed = rank as i64;
    let resolved = if axis < 0 { axis.checked_add(signed).unwrap_or(-1) } else { axis };
    if (0..signed).contains(&resolved) {
        return Ok(resolved as usize);
    }
    Err(format!("an axis from -{rank} to {} expected, got {axis}", signed - 1))
}

/// Several axes, each once, in order.
pub(crate) fn axes_of(axes: &[i64], rank: usize) -> Result<Vec<usize>, Refusal> {
    let mut resolved = axes.iter().map(|&axis| axis_of(axis, rank)).collect::<Result<Vec<_>, _>>()?;
    resolved.sort_unstable();
    resolved.dedup();
    if resolved.len() == axes.len() { Ok(resolved) } else { Err(format!("different axes expected, got {axes:?}")) }
}
