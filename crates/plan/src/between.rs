//! Which atoms are between others in the order of dependencies.

use crate::bits::Bits;

/// For each atom, its direct and indirect predecessors and successors. Atoms are numbered so that producers come first.
pub(crate) struct Between {
    before: Vec<Bits>,
    after: Vec<Bits>,
}

impl Between {
    /// Computed from the producers of each atom.
    pub fn new(producers: &[Vec<usize>]) -> Between {
        let count = producers.len();
        let mut before: Vec<Bits> = Vec::with_capacity(count);
        // All numbers that no atom has come after every atom: what is nearly everything to the end is then stored by where it begins.
        let mut after = vec![Bits::from(count); count];
        for producers in producers {
            let mut all = Bits::NONE;
            for &producer in producers {
                all.union_with(&before[producer]);
                all.insert(producer);
            }
            before.push(all);
        }
        for (atom, producers) in producers.iter().enumerate().rev() {
            let mut all = after[atom].clone();
            all.insert(atom);
            for &producer in producers {
                after[producer].union_with(&all);
            }
        }
        Between { before, after }
    }

    /// The direct and indirect predecessors of an atom.
    pub fn before(&self, atom: usize) -> &Bits {
        &self.before[atom]
    }

    /// Its successors.
    pub fn after(&self, atom: usize) -> &Bits {
        &self.after[atom]
    }
}
