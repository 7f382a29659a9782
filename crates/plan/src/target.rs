//! What a plan is for.

use crate::catalog::{Catalog, Primitives};
use crate::machine::Machine;

/// What a plan is for: a machine, and the code generation it has.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// its numbers
    pub machine: &'a Machine,
    /// what can be generated for it
    pub catalog: &'a dyn Catalog,
}

impl<'a> Target<'a> {
    /// A machine for which every structure is taken to have a kernel.
    pub fn conceivable(machine: &'a Machine) -> Target<'a> {
        Target { machine, catalog: &Primitives }
    }
}
