//! Forced and forbidden fusions, and their effect on the search.

use crate::search::problem::Atom;

/// A forced or forbidden fusion, by the operations' names: every place of the graph where they are
/// consecutive.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pin {
    /// They must share a kernel.
    Force(Vec<String>),
    /// They must not share a kernel.
    Forbid(Vec<String>),
}

impl Pin {
    /// What the user asked for: force or forbid.
    pub fn verb(&self) -> &'static str {
        match self {
            Pin::Force(_) => "force",
            Pin::Forbid(_) => "forbid",
        }
    }

    /// The names of the operations.
    pub fn names(&self) -> &[String] {
        let (Pin::Force(names) | Pin::Forbid(names)) = self;
        names
    }
}

/// Excluded groups, and atoms that must share a kernel.
#[derive(Debug, Clone, Default)]
pub(crate) struct Restriction {
    pub together: Vec<Vec<Atom>>,
    pub apart: Vec<Vec<Atom>>,
}

impl Restriction {
    pub fn allows(&self, group: &[Atom]) -> bool {
        let holds = |set: &Vec<Atom>| set.iter().all(|atom| group.binary_search(atom).is_ok());
        let touches = |set: &Vec<Atom>| set.iter().any(|atom| group.binary_search(atom).is_ok());
        self.together.iter().all(|set| !touches(set) || holds(set)) && !self.apart.iter().any(holds)
    }

    /// The same with atoms that must share a kernel.
    pub fn with_together(mut self, set: &[Atom]) -> Restriction {
        self.together.push(set.to_vec());
        self
    }

    /// The same with atoms that must not share a kernel.
    pub fn with_apart(mut self, set: &[Atom]) -> Restriction {
        self.apart.push(set.to_vec());
        self
    }

    /// Forbidden sets that a group of these atoms would fuse.
    pub fn forbids(&self, group: &[Atom]) -> Vec<Vec<Atom>> {
        let held = |set: &&Vec<Atom>| set.iter().all(|atom| group.binary_search(atom).is_ok());
        self.apart.iter().filter(held).cloned().collect()
    }

    pub fn is_empty(&self) -> bool {
        self.together.is_empty() && self.apart.is_empty()
    }
}
