//! Names and what they stand for: graphs, branches that are taken, functions that are inlined.

use std::collections::HashMap;
use std::rc::Rc;

use super::{Call, NamedAttribute, Translator};
use crate::error::OnnxError;
use crate::ir::Id;
use crate::limits::MAX_DEPTH;
use crate::schema::{Attribute, Function, GraphProto, NodeProto};

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
        self.run(&function.nodes)?;
        self.leave(&function.outputs, node)
    }

    /// Takes the branch of an `If` whose condition is known.
    pub(super) fn branch(&mut self, call: &Call<'a, '_>, node: &NodeProto<'a>) -> Result<bool, OnnxError> {
        let Some(condition) = call.inputs.first().copied().flatten().and_then(|id| self.ir.scalar(id)) else {
            return Ok(false);
        };
        let name = if condition != 0.0 { "then_branch" } else { "else_branch" };
        let Some(reader) = call.attribute(name).and_then(|attribute| attribute.graph) else { return Ok(false) };
        self.descend()?;
        self.spend(reader.len() / 64)?;
        let graph = GraphProto::read(reader)?;
        self.scopes.push(Scope::default());
        self.initializers(&graph)?;
        self.run(&graph.nodes)?;
        let outputs: Vec<&'a str> = graph.outputs.iter().map(|output| output.name).collect();
        self.leave(&outputs, node)?;
        Ok(true)
    }

    pub(super) fn descend(&self) -> Result<(), OnnxError> {
        if self.scopes.len() <= MAX_DEPTH {
            return Ok(());
        }
        Err(OnnxError::Limit { what: "functions and branches within each other", limit: MAX_DEPTH })
    }

    /// Leaves a body: its outputs become the node's.
    pub(super) fn leave(&mut self, outputs: &[&'a str], node: &NodeProto<'a>) -> Result<(), OnnxError> {
        let mut results = Vec::new();
        for (&inner, &outer) in outputs.iter().zip(&node.outputs) {
            let undefined = || OnnxError::Undefined { reader: node.label(), value: inner.to_string() };
            results.push((outer, self.lookup(inner).ok_or_else(undefined)?));
        }
        self.scopes.pop();
        results.into_iter().for_each(|(name, id)| self.bind(name, id));
        Ok(())
    }
}
