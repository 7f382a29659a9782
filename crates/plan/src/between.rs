//! Which groups stand between two others, while groups are merged.

use crate::bits::Bits;

/// For each group, those that come before and after it, directly or through others.
pub(crate) struct Between {
    before: Vec<Bits>,
    after: Vec<Bits>,
}

impl Between {
    /// From the groups in an order in which producers come first, and the producers of each.
    pub fn new(order: &[usize], producers: &[Vec<usize>]) -> Between {
        let count = producers.len();
        let mut between = Between { before: vec![Bits::new(count); count], after: vec![Bits::new(count); count] };
        for &group in order {
            let mut before = Bits::new(count);
            for &producer in &producers[group] {
                before.insert(producer);
                before.union_with(&between.before[producer]);
            }
            between.before[group] = before;
        }
        for &group in order.iter().rev() {
            let after = between.after[group].clone();
            for &producer in &producers[group] {
                between.after[producer].insert(group);
                between.after[producer].union_with(&after);
            }
        }
        between
    }

    /// Those that a group needs, directly or through others.
    pub fn before(&self, group: usize) -> &Bits {
        &self.before[group]
    }

    /// Those that need it.
    pub fn after(&self, group: usize) -> &Bits {
        &self.after[group]
    }

    /// A group that one of the two needs and that needs the other.
    pub fn third(&self, first: usize, second: usize) -> Option<usize> {
        let none = Bits::new(self.before.len());
        let way = |from: usize, to: usize| self.after[from].common_outside(&self.before[to], &none);
        way(first, second).or_else(|| way(second, first))
    }

    /// Makes `second` a part of `first`.
    pub fn merge(&mut self, first: usize, second: usize) {
        let mut before = self.before[first].union(&self.before[second]);
        let mut after = self.after[first].union(&self.after[second]);
        for set in [&mut before, &mut after] {
            set.remove(first);
            set.remove(second);
        }
        for group in before.iter() {
            self.after[group].union_with(&after);
            self.after[group].remove(second);
            self.after[group].insert(first);
        }
        for group in after.iter() {
            self.before[group].union_with(&before);
            self.before[group].remove(second);
            self.before[group].insert(first);
        }
        self.before[first] = before;
        self.after[first] = after;
        self.before[second] = Bits::new(self.before.len());
        self.after[second] = Bits::new(self.after.len());
    }
}
