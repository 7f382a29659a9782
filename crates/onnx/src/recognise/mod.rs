//! Recognises composites by dataflow, largest first.
//!
//! Each pass visits nodes from the outputs, so that a norm with its weights is found before the norm without. A pattern's
//! interior values must have no other reader; a failure after the pattern's signature was found is reported once as a near miss.

mod activation;
mod attention;
mod linear;
mod norm;
mod softmax;

use std::collections::{BTreeMap, HashMap, HashSet};

use deuteron_graph::{BinaryOp, Composite};

use crate::imported::NearMiss;
use crate::ir::{Id, Ir, Kind, Reduction};
use crate::limits::PATTERN_DEPTH;

/// The result.
#[derive(Debug)]
pub(crate) struct Found {
    pub composites: Vec<FoundComposite>,
    pub near_misses: Vec<NearMiss>,
}

/// A composite in the canonical form.
#[derive(Debug)]
pub(crate) struct FoundComposite {
    pub id: Id,
    pub what: &'static str,
    pub at: String,
    pub operations: usize,
}

/// Finds composites and puts them in the place of what they stand for.
pub(crate) fn recognise(ir: &mut Ir) -> Found {
    let mut search = Search::new(ir);
    let passes: [&[Pattern]; 5] = [
        &[softmax::softmax],
        &[norm::norm, activation::gelu, activation::silu],
        &[attention::attention],
        &[linear::linear],
        &[activation::gated],
    ];
    for patterns in passes {
        search.pass(patterns);
    }
    search.finish()
}

/// Looks for a composite whose result is a node.
type Pattern = fn(&mut Search, Id) -> Result<Match, Miss>;

/// A composite that was found.
#[derive(Debug)]
struct Match {
    what: &'static str,
    /// The central node of the pattern: of several patterns around one node, the first failure is reported.
    heart: Id,
    kind: Kind,
    operands: Vec<Id>,
    /// What it stands for, without its result.
    interior: Vec<Id>,
}

/// Why none was.
#[derive(Debug)]
enum Miss {
    /// Nothing like it.
    No,
    /// Nearly: the composite, the node at the heart of the pattern, and what is missing.
    Near { what: &'static str, heart: Id, missing: String },
}

/// `Miss::No` from an absence.
fn or_no<T>(option: Option<T>) -> Result<T, Miss> {
    option.ok_or(Miss::No)
}

struct Search<'i> {
    ir: &'i mut Ir,
    readers: Vec<Vec<Id>>,
    is_output: Vec<bool>,
    consumed: Vec<bool>,
    operations: BTreeMap<Id, usize>,
    near_misses: Vec<NearMiss>,
    told: HashSet<(&'static str, Id)>,
    effects: HashMap<(Id, Option<bool>), attention::Effect>,
}

impl<'i> Search<'i> {
    fn new(ir: &'i mut Ir) -> Self {
        Search {
            ir,
            readers: Vec::new(),
            is_output: Vec::new(),
            consumed: Vec::new(),
            operations: BTreeMap::new(),
            near_misses: Vec::new(),
            told: HashSet::new(),
            effects: HashMap::new(),
        }
    }

    fn pass(&mut self, patterns: &[Pattern]) {
        let needed = self.ir.needed();
        self.readers = vec![Vec::new(); needed.len()];
        self.is_output = vec![false; needed.len()];
        self.consumed = vec![false; needed.len()];
        for id in self.ir.ids().filter(|id| needed[id.index()]) {
            for &input in &self.ir.node(id).inputs {
                self.readers[input.index()].push(id);
            }
        }
        for (_, id) in &self.ir.outputs {
            self.is_output[id.index()] = true;
        }
        // Nodes that this pass appends are operands of composites, and none themselves.
        for id in self.ir.ids().rev() {
            if !needed[id.index()] || self.ir.node(id).constant.is_some() {
                continue;
            }
            for pattern in patterns {
                if self.consumed[id.index()] {
                    break;
                }
                let result = pattern(self, id).and_then(|found| self.accept(id, found));
                if let Err(Miss::Near { what, heart, missing }) = result
                    && self.told.insert((what, heart))
                {
                    let at = self.ir.name(id).to_string();
                    self.near_misses.push(NearMiss { what, at, missing });
                }
            }
        }
    }

    /// Puts a composite in place, if nothing else reads what would disappear.
    fn accept(&mut self, root: Id, found: Match) -> Result<(), Miss> {
        let Match { what, heart, kind, operands, mut interior } = found;
        interior.sort_unstable();
        interior.dedup();
        interior.retain(|&id| id != root && self.ir.node(id).constant.is_none() && !operands.contains(&id));
        for &id in &interior {
            let inside = |reader: &&Id| **reader == root || interior.binary_search(reader).is_ok();
            let outside = self.readers[id.index()].iter().find(|reader| !inside(reader));
            let missing = match outside {
                Some(&reader) => {
                    format!("an interior value (`{}`) is also read by `{}`", self.ir.name(id), self.ir.name(reader))
                }
                None if self.is_output[id.index()] => {
                    format!("an interior value (`{}`) is an output", self.ir.name(id))
                }
                None => continue,
            };
            return Err(Miss::Near { what, heart, missing });
        }
        let (shape, element) = self.ir.infer(&kind, &operands).map_err(|_| Miss::No)?;
        if shape != *self.ir.shape(root) || element.dtype() != self.ir.element(root).dtype() {
            return Err(Miss::No);
        }
        interior.iter().for_each(|id| self.consumed[id.index()] = true);
        self.consumed[root.index()] = true;
        let inner: usize = interior.iter().map(|id| self.operations.get(id).copied().unwrap_or(1)).sum();
        self.operations.insert(root, inner + 1);
        let node = &mut self.ir.nodes[root.index()];
        (node.kind, node.inputs) = (kind, operands);
        Ok(())
    }

    fn finish(self) -> Found {
        let needed = self.ir.needed();
        let mut composites = Vec::new();
        for id in self.ir.ids().filter(|id| needed[id.index()]) {
            let what = match &self.ir.node(id).kind {
                Kind::Composite(composite) => composite.name(),
                Kind::Softmax => Composite::Softmax.name(),
                _ => continue,
            };
            let operations = self.operations.get(&id).copied().unwrap_or(1);
            composites.push(FoundComposite { id, what, at: self.ir.name(id).to_string(), operations });
        }
        // Found from the outputs; reported from the inputs.
        let mut near_misses = self.near_misses;
        near_misses.reverse();
        Found { composites, near_misses }
    }
}

/// What patterns are made of. Nodes that are passed through are noted in `interior`.
impl Search<'_> {
    fn kind(&self, id: Id) -> &Kind {
        &self.ir.node(id).kind
    }

    fn inputs(&self, id: Id) -> &[Id] {
        &self.ir.node(id).inputs
    }

    /// The operands of a binary operation that is not known.
    fn binary(&self, id: Id, op: BinaryOp) -> Option<(Id, Id)> {
        let node = self.ir.node(id);
        match (&node.kind, &node.inputs[..]) {
            (Kind::Binary(own), &[a, b]) if *own == op && node.constant.is_none() => Some((a, b)),
            _ => None,
        }
    }

    /// Both orders of a commutative operation's operands.
    fn orders(&self, id: Id, op: BinaryOp) -> Vec<(Id, Id)> {
        self.binary(id, op).map_or_else(Vec::new, |(a, b)| vec![(a, b), (b, a)])
    }

    /// Through casts between floats.
    fn through_casts(&self, mut id: Id, interior: &mut Vec<Id>) -> Id {
        for _ in 0..PATTERN_DEPTH {
            let node = self.ir.node(id);
            match (&node.kind, &node.inputs[..]) {
                (Kind::Cast(to), &[from]) if to.is_float() && self.ir.element(from).is_float() => {
                    interior.push(id);
                    id = from;
                }
                _ => break,
            }
        }
        id
    }

    /// The operand and axes of a reduction whose axes stay, by itself or by a reshape after it.
    fn reduction(&self, id: Id, interior: &mut Vec<Id>) -> Option<(Reduction, Id, Vec<usize>)> {
        let (inner, shape) = match self.kind(id) {
            Kind::Reshape(shape) => (self.inputs(id)[0], Some(shape.clone())),
            _ => (id, None),
        };
        let Kind::Reduce { op, axes, keep } = self.kind(inner) else { return None };
        let operand = self.inputs(inner)[0];
        let from = self.ir.shape(operand);
        let kept: Vec<usize> = (0..from.rank()).map(|axis| if axes.contains(&axis) { 1 } else { from[axis] }).collect();
        let stays = match shape {
            None => *keep,
            Some(shape) => !keep && shape[..] == kept[..],
        };
        if !stays {
            return None;
        }
        interior.extend([id, inner]);
        Some((*op, operand, axes.clone()))
    }

    /// Whether two nodes give the same value: one, or two of the same operation on the same operands.
    fn same(&self, a: Id, b: Id) -> bool {
        a == b || (self.kind(a) == self.kind(b) && self.inputs(a) == self.inputs(b) && !self.inputs(a).is_empty())
    }

    /// A weight or constant with a value a column and nothing else.
    fn is_per_column(&self, id: Id, cols: usize) -> bool {
        let shape = self.ir.shape(id);
        self.ir.node(id).is_fixed && shape.cols() == cols && shape.elements() == cols && shape.rank() >= 1
    }

    /// Names of axes for a message.
    fn last_axis(&self, id: Id) -> usize {
        self.ir.shape(id).rank().saturating_sub(1)
    }
}
