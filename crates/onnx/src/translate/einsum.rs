//! `Einsum`: any equation, as transposes, sums, and products of two operands at a time.
//!
//! A letter that occurs twice in an operand is its diagonal; a letter that nothing else has and the result does not is summed at
//! once. Then operands are contracted from left to right: letters of both that nothing needs later are summed by a matmul.

use std::collections::BTreeMap;

use deuteron_graph::BinaryOp;

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::ir::{Id, Kind, Reduction};
use crate::schema::short;

/// An axis of the equation: a letter, or one of those that dots stand for, counted from the last.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Label {
    Dots(usize),
    Letter(u8),
}

/// A tensor with a label for each axis, each once.
struct Term {
    id: Id,
    labels: Vec<Label>,
}

impl<'a> Translator<'a, '_> {
    pub(super) fn einsum(&mut self, call: &Call<'a, '_>) -> Results {
        let equation: String = call.text("equation").unwrap_or_default().split_whitespace().collect();
        let shown = short(&equation).to_string();
        let refuse = |what: &str| Problem::Refused(format!("{what} expected, got `{shown}`"));
        let operands = call.all();
        let (left, output) = match equation.split_once("->") {
            Some((left, output)) => (left, Some(output)),
            None => (equation.as_str(), None),
        };
        let texts: Vec<&str> = left.split(',').collect();
        if texts.len() != operands.len() {
            return Err(refuse(&format!("an equation of {} operands", operands.len())));
        }
        let mut sizes: BTreeMap<Label, usize> = BTreeMap::new();
        let mut counts: BTreeMap<Label, usize> = BTreeMap::new();
        let mut terms = Vec::with_capacity(texts.len());
        for (text, &id) in texts.iter().zip(&operands) {
            let shape = self.ir.shape(id).clone();
            let misfit = || refuse(&format!("a letter for each axis of {shape}"));
            let labels = labels_of(text, |letters| shape.rank().checked_sub(letters)).ok_or_else(misfit)?;
            if labels.len() != shape.rank() {
                return Err(misfit());
            }
            for (&label, &size) in labels.iter().zip(shape.iter()) {
                *counts.entry(label).or_default() += 1;
                let known = sizes.entry(label).or_insert(size);
                // What dots stand for repeats where its size is 1.
                if matches!(label, Label::Dots(_)) && *known == 1 {
                    *known = size;
                }
                let repeats = matches!(label, Label::Dots(_)) && size == 1;
                if *known != size && !repeats {
                    return Err(refuse("equal sizes for each letter"));
                }
            }
            terms.push(Term { id, labels });
        }
        let dots: Vec<Label> = counts.keys().filter(|label| matches!(label, Label::Dots(_))).rev().copied().collect();
        let output = match output {
            Some(text) => labels_of(text, |_| Some(dots.len())),
            // Letters that occur once, in order.
            None => {
                let once = counts.iter().filter(|(label, count)| matches!(label, Label::Letter(_)) && **count == 1);
                Some(dots.iter().copied().chain(once.map(|(&label, _)| label)).collect())
            }
        };
        let is_of_operands = |output: &Vec<Label>| {
            output.iter().all(|label| counts.contains_key(label))
                && (0..output.len()).all(|index| !output[..index].contains(&output[index]))
                && dots.iter().all(|label| output.contains(label))
        };
        let output = output.filter(is_of_operands);
        let output = output.ok_or_else(|| refuse("a result of different letters of the operands, and their dots"))?;
        for term in &mut terms {
            *term = self.distinct(Term { id: term.id, labels: std::mem::take(&mut term.labels) }, &sizes)?;
        }
        let mut rest = terms.into_iter();
        let Some(mut whole) = rest.next() else { return Err(refuse("at least one operand")) };
        while let Some(next) = rest.next() {
            let later = |label: &Label| {
                output.contains(label) || rest.as_slice().iter().any(|term| term.labels.contains(label))
            };
            let keeps = |own: &Label, other: &Term| later(own) || other.labels.contains(own);
            let left = self.summed(&whole, |label| keeps(label, &next))?;
            let right = self.summed(&next, |label| keeps(label, &left))?;
            whole = self.contracted(&left, &right, later, &sizes)?;
        }
        let whole = self.summed(&whole, |label| output.contains(label))?;
        Ok(vec![self.ir.push(Kind::Transpose(order(&whole.labels, &output)), &[whole.id])?])
    }

    /// An operand whose labels all differ: repeated ones are the diagonal, and axes of size 1 that repeat are left out.
    fn distinct(&mut self, mut term: Term, sizes: &BTreeMap<Label, usize>) -> Result<Term, Problem> {
        while let Some(second) =
            (0..term.labels.len()).find(|&second| term.labels[..second].contains(&term.labels[second]))
        {
            let label = term.labels.remove(second);
            let first = term.labels.iter().position(|&other| other == label).unwrap_or(0);
            term.labels.remove(first);
            term.labels.push(label);
            term.id = self.diagonal(term.id, first, second)?;
        }
        let shape = self.ir.shape(term.id).clone();
        let stays: Vec<bool> =
            term.labels.iter().zip(shape.iter()).map(|(label, &size)| sizes.get(label) == Some(&size)).collect();
        let kept = |index: &usize| stays[*index];
        let dims = (0..shape.rank()).filter(kept).map(|axis| shape[axis]).collect();
        let labels = (0..shape.rank()).filter(kept).map(|axis| term.labels[axis]).collect();
        Ok(Term { id: self.ir.reshape(term.id, dims)?, labels })
    }

    /// The diagonal of two axes as the last axis. Elements of a matrix of n columns lie n + 1 apart on it: all but the last are
    /// the first column of a matrix of n + 1 columns.
    fn diagonal(&mut self, x: Id, first: usize, second: usize) -> Result<Id, Problem> {
        let shape = self.ir.shape(x).clone();
        let size = shape[first];
        let others: Vec<usize> = (0..shape.rank()).filter(|&axis| axis != first && axis != second).collect();
        let permutation = others.iter().copied().chain([first, second]).collect();
        let square = self.ir.push(Kind::Transpose(permutation), &[x])?;
        let axis = others.len();
        let leading: Vec<usize> = others.iter().map(|&axis| shape[axis]).collect();
        let with = |sizes: &[usize]| [&leading[..], sizes].concat();
        let all = size.saturating_mul(size);
        let flat = self.ir.reshape(square, with(&[all]))?;
        if size <= 1 {
            return Ok(flat);
        }
        let before = self.ir.push(Kind::Slice { axis, start: 0, length: all - 1 }, &[flat])?;
        let rows = self.ir.reshape(before, with(&[size - 1, size + 1]))?;
        let column = self.ir.push(Kind::Slice { axis: axis + 1, start: 0, length: 1 }, &[rows])?;
        let column = self.ir.reshape(column, with(&[size - 1]))?;
        let last = self.ir.push(Kind::Slice { axis, start: all - 1, length: 1 }, &[flat])?;
        Ok(self.ir.push(Kind::Concat { axis }, &[column, last])?)
    }

    /// A term summed over the labels that nothing keeps.
    fn summed(&mut self, term: &Term, keeps: impl Fn(&Label) -> bool) -> Result<Term, Problem> {
        let axes: Vec<usize> = (0..term.labels.len()).filter(|&axis| !keeps(&term.labels[axis])).collect();
        let labels = term.labels.iter().copied().filter(keeps).collect();
        if axes.is_empty() {
            return Ok(Term { id: term.id, labels });
        }
        Ok(Term { id: self.ir.reduce(Reduction::Sum, term.id, axes, false)?, labels })
    }

    /// The product of two terms, summed over the labels of both that nothing needs later.
    fn contracted(
        &mut self,
        a: &Term,
        b: &Term,
        later: impl Fn(&Label) -> bool,
        sizes: &BTreeMap<Label, usize>,
    ) -> Result<Term, Problem> {
        let (in_a, in_b) = (|label: &Label| a.labels.contains(label), |label: &Label| b.labels.contains(label));
        let pick = |from: &Term, keep: &dyn Fn(&Label) -> bool| from.labels.iter().copied().filter(keep).collect();
        let batch: Vec<Label> = pick(a, &|label| in_b(label) && later(label));
        let summed: Vec<Label> = pick(a, &|label| in_b(label) && !later(label));
        let rows: Vec<Label> = pick(a, &|label| !in_b(label));
        let cols: Vec<Label> = pick(b, &|label| !in_a(label));
        let size =
            |labels: &[Label]| labels.iter().fold(1, |product: usize, label| product.saturating_mul(sizes[label]));
        let mut matrices = |term: &Term, labels: [&[Label]; 3]| -> Result<Id, Problem> {
            let ordered = self.ir.push(Kind::Transpose(order(&term.labels, &labels.concat())), &[term.id])?;
            Ok(self.ir.reshape(ordered, labels.iter().map(|labels| size(labels)).collect())?)
        };
        let left = matrices(a, [&batch, &rows, &summed])?;
        let right = matrices(b, [&batch, &summed, &cols])?;
        let product = match summed.is_empty() {
            true => self.ir.binary(BinaryOp::Mul, left, right)?,
            false => self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: false }, &[left, right])?,
        };
        let labels = [batch, rows, cols].concat();
        let id = self.ir.reshape(product, labels.iter().map(|label| sizes[label]).collect())?;
        Ok(Term { id, labels })
    }
}

/// The labels of a term. Dots stand for as many axes as `dots` tells of a term of so many letters; `None` for anything but letters
/// and dots.
fn labels_of(text: &str, dots: impl Fn(usize) -> Option<usize>) -> Option<Vec<Label>> {
    let (before, after) = match text.split_once("...") {
        Some((before, after)) => (before, Some(after)),
        None => (text, None),
    };
    let letters = |text: &str| -> Option<Vec<Label>> {
        let letter = |byte: u8| byte.is_ascii_alphabetic().then_some(Label::Letter(byte));
        text.bytes().map(letter).collect()
    };
    let mut labels = letters(before)?;
    if let Some(after) = after {
        let after = letters(after)?;
        labels.extend((0..dots(labels.len() + after.len())?).rev().map(Label::Dots));
        labels.extend(after);
    }
    Some(labels)
}

/// Where each of some labels is among others.
fn order(from: &[Label], to: &[Label]) -> Vec<usize> {
    to.iter().filter_map(|label| from.iter().position(|other| other == label)).collect()
}
