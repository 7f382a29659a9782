//! Which atoms stand between others.

use crate::bits::Bits;

/// For each atom, those that come before and after it, directly or through others. Atoms are numbered so that producers come first.
pub(crate) struct Between {
    before: Vec<Bits>,
    after: Vec<Bits>,
}

impl Between {
    /// From the producers of each.
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

    /// Those that an atom needs, directly or through others.
    pub fn before(&self, atom: usize) -> &Bits {
        &self.before[atom]
    }

    /// Those that need it.
    pub fn after(&self, atom: usize) -> &Bits {
        &self.after[atom]
    }
}
