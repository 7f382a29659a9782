//! Scopes of names: graphs, taken branches, inlined functions.

use std::collections::HashMap;
use std::rc::Rc;

use super::{Call, NamedAttribute, Translator};
use crate::error::OnnxError;
use crate::ir::Id;
use crate::limits::MAX_DEPTH;
use crate::schema::{Attribute, Function, GraphProto, NodeProto, default_opset};

/// Names of a graph, a branch or a function's body.
#[derive(Debug, Default)]
pub(super) struct Scope<'a> {
    pub values: HashMap<&'a str, Id>,
    /// Attributes of the call, in a function's body.
    pub attributes: Vec<NamedAttribute<'a>>,
    /// A function's body does not see the names around the call.
    pub is_function: bool,
}

impl<'a, 'm> Translator<'a, 'm> {
    pub(super) fn bind(&mut self, name: &'a str, id: Id) {
        if let Some(scope) = self.scopes.last_mut() {
            scope.values.insert(name, id);
        }
    }

    pub(super) fn lookup(&self, name: &str) -> Option<Id> {
        for scope in self.scopes.iter().rev() {
            if let Some(&id) = scope.values.get(name) {
                return Some(id);
            }
            if scope.is_function {
                return None;
            }
        }
        None
    }

    /// Attributes with those of the surrounding function's call put in.
    pub(super) fn resolve(&self, attributes: &[Rc<Attribute<'a>>]) -> Vec<NamedAttribute<'a>> {
        let frame = self.scopes.iter().rev().find(|scope| scope.is_function);
        let given =
            |name: &str| frame?.attributes.iter().find(|(given, _)| *given == name).map(|(_, value)| value.clone());
        let resolved = attributes.iter().filter_map(|attribute| match attribute.reference {
            "" => Some((attribute.name, attribute.clone())),
            reference => Some((attribute.name, given(reference)?)),
        });
        resolved.collect()
    }

    pub(super) fn function(
        &mut self,
        function: &'m Function<'a>,
        node: &NodeProto<'a>,
        inputs: Vec<Option<Id>>,
        mut attributes: Vec<NamedAttribute<'a>>,
    ) -> Result<(), OnnxError> {
        self.descend()?;
        attributes.extend(function.defaults.iter().map(|attribute| (attribute.name, attribute.clone())));
        let values = function.inputs.iter().zip(inputs).filter_map(|(&name, id)| Some((name, id?))).collect();
        self.scopes.push(Scope { values, attributes, is_function: true });
        let outside = self.opset;
        self.opset = default_opset(&function.opsets).unwrap_or(outside);
        self.run(&function.nodes)?;
        self.opset = outside;
        self.leave(&function.outputs, node)
    }

    /// Takes the branch of an `If` whose condition is known. Where it is not, both are computed and one is selected; a branch
    /// that does not fit the sizes is left out, and said.
    pub(super) fn branch(&mut self, call: &Call<'a, '_>, node: &NodeProto<'a>) -> Result<bool, OnnxError> {
        let Some(condition) = call.optional(0) else { return Ok(false) };
        if let Some(value) = self.scalar(condition) {
            let name = if value != 0.0 { "then_branch" } else { "else_branch" };
            let Some(results) = self.branch_results(call, node, name)? else { return Ok(false) };
            node.outputs.iter().zip(results).for_each(|(&name, id)| self.bind(name, id));
            return Ok(true);
        }
        let (depth, opset) = (self.scopes.len(), self.opset);
        let mut outcomes = Vec::new();
        for name in ["then_branch", "else_branch"] {
            let had_misfit = self.has_misfit;
            outcomes.push(self.branch_results(call, node, name));
            // What is within a branch that is left out does not matter.
            if !matches!(outcomes.last(), Some(Ok(Some(_)))) {
                self.has_misfit = had_misfit;
            }
            self.scopes.truncate(depth);
            self.opset = opset;
        }
        let other = outcomes.pop();
        let results = match (outcomes.pop(), other) {
            (Some(Ok(Some(taken))), Some(Ok(Some(left)))) => {
                self.notes.push(format!(
                    "both branches of `{}` are computed: which is taken depends on the input",
                    node.label()
                ));
                let select = |(a, b): (Id, Id)| self.ir.select(condition, a, b);
                let selected = taken.into_iter().zip(left).map(select).collect::<Result<Vec<Id>, _>>();
                let Ok(selected) = selected else { return Ok(false) };
                selected
            }
            (Some(Ok(Some(taken))), Some(Err(error))) => {
                self.notes
                    .push(format!("`{}` is taken to be true: the other branch does not fit ({error})", node.label()));
                taken
            }
            (Some(Err(error)), Some(Ok(Some(left)))) => {
                self.notes
                    .push(format!("`{}` is taken to be false: the other branch does not fit ({error})", node.label()));
                left
            }
            (Some(Err(error)), Some(Err(_))) => {
                self.notes.push(format!("neither branch of `{}` fits the sizes ({error})", node.label()));
                self.has_misfit = true;
                return Ok(false);
            }
            _ => return Ok(false),
        };
        node.outputs.iter().zip(results).for_each(|(&name, id)| self.bind(name, id));
        Ok(true)
    }

    /// The results of a branch, if there is one.
    fn branch_results(
        &mut self,
        call: &Call<'a, '_>,
        node: &NodeProto<'a>,
        name: &str,
    ) -> Result<Option<Vec<Id>>, OnnxError> {
        let Some(reader) = call.attribute(name).and_then(|attribute| attribute.graph) else { return Ok(None) };
        self.descend()?;
        self.spend(reader.len() / 64)?;
        let graph = GraphProto::read(reader)?;
        self.scopes.push(Scope::default());
        self.note_infos(&graph);
        self.initializers(&graph)?;
        self.run(&graph.nodes)?;
        let outputs: Vec<&'a str> = graph.outputs.iter().map(|output| output.name).collect();
        Ok(Some(self.results_of(&outputs, node)?))
    }

    pub(super) fn descend(&self) -> Result<(), OnnxError> {
        if self.scopes.len() <= MAX_DEPTH {
            return Ok(());
        }
        Err(OnnxError::Limit { what: "functions and branches within each other", limit: MAX_DEPTH })
    }

    /// Leaves a body: its outputs become the node's.
    pub(super) fn leave(&mut self, outputs: &[&'a str], node: &NodeProto<'a>) -> Result<(), OnnxError> {
        let results = self.results_of(outputs, node)?;
        node.outputs.iter().zip(results).for_each(|(&name, id)| self.bind(name, id));
        Ok(())
    }

    /// Leaves a body with its outputs.
    fn results_of(&mut self, outputs: &[&'a str], node: &NodeProto<'a>) -> Result<Vec<Id>, OnnxError> {
        let mut results = Vec::new();
        for &inner in outputs.iter().take(node.outputs.len()) {
            let undefined = || OnnxError::Undefined { reader: node.label(), value: inner.to_string() };
            results.push(self.lookup(inner).ok_or_else(undefined)?);
        }
        self.scopes.pop();
        Ok(results)
    }
}
