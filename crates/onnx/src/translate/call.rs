//! One operator with its operands and attributes looked up.

use std::cell::RefCell;
use std::collections::BTreeSet;
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

/// An operator, its operands and attributes. It keeps account of what was read, so that nothing is ignored by oversight: an
/// operator that is computed has read all of its attributes and operands.
#[derive(Debug)]
pub(crate) struct Call<'a, 'n> {
    pub node: &'n NodeProto<'a>,
    /// The version of the default operator set at this place: the model's, or that of the function around it.
    pub opset: i64,
    attributes: Vec<NamedAttribute<'a>>,
    inputs: Vec<Option<Id>>,
    read: RefCell<Read>,
}

/// What of a call was read.
#[derive(Debug, Default)]
struct Read {
    attributes: BTreeSet<String>,
    inputs: BTreeSet<usize>,
}

impl<'a, 'n> Call<'a, 'n> {
    pub fn new(
        node: &'n NodeProto<'a>,
        opset: i64,
        attributes: Vec<NamedAttribute<'a>>,
        inputs: Vec<Option<Id>>,
    ) -> Self {
        Call { node, opset, attributes, inputs, read: RefCell::default() }
    }
}

impl<'a> Call<'a, '_> {
    pub fn attribute(&self, name: &str) -> Option<&Attribute<'a>> {
        self.read.borrow_mut().attributes.insert(name.to_string());
        self.attributes.iter().find(|(given, _)| *given == name).map(|(_, attribute)| attribute.as_ref())
    }

    /// Attributes that do not change the result at inference.
    pub fn without_effect(&self, names: &[&str]) {
        self.read.borrow_mut().attributes.extend(names.iter().map(|name| name.to_string()));
    }

    /// The names of all attributes that are given.
    pub fn attribute_names(&self) -> impl Iterator<Item = &'a str> + '_ {
        self.attributes.iter().map(|(name, _)| *name)
    }

    /// Refuses attributes and operands that nothing read.
    pub fn all_read(&self) -> Result<(), Refusal> {
        let read = self.read.borrow();
        if let Some(name) = self.attribute_names().find(|name| !read.attributes.contains(*name)) {
            return Err(format!("attributes of the operator set's schema expected, got `{}`", short(name)));
        }
        let unread = |index: &usize| self.inputs[*index].is_some() && !read.inputs.contains(index);
        match (0..self.inputs.len()).find(unread) {
            Some(index) => Err(format!("at most {index} operands expected, got {}", self.inputs.len())),
            None => Ok(()),
        }
    }

    /// How many operands are written, given or not.
    pub fn operands(&self) -> usize {
        self.inputs.len()
    }

    /// An attribute that has to be one of some words. The first is the default.
    pub fn word<'w>(&self, name: &str, words: &[&'w str]) -> Result<&'w str, Refusal> {
        let given = self.text(name).unwrap_or(words[0]);
        let found = words.iter().find(|&&word| word == given);
        found.copied().ok_or_else(|| format!("{name} of {} expected, got `{given}`", words.join(", ")))
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
        self.read.borrow_mut().inputs.insert(position);
        self.inputs.get(position).copied().flatten()
    }

    /// All operands that are there.
    pub fn all(&self) -> Vec<Id> {
        self.read.borrow_mut().inputs.extend(0..self.inputs.len());
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
