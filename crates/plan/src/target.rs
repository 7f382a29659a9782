//! The target of a plan.

use crate::catalog::{Catalog, Primitives};
use crate::machine::Machine;

/// The target of a plan: a machine and its code generation.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// its numbers
    pub machine: &'a Machine,
    /// what can be generated for it
    pub catalog: &'a dyn Catalog,
}

impl<'a> Target<'a> {
    /// A machine with the assumption that every structure has a kernel.
    pub fn conceivable(machine: &'a Machine) -> Target<'a> {
        Target { machine, catalog: &Primitives }
    }
}
