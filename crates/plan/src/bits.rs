//! Sets of small numbers.

/// A set of numbers below a fixed size.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct Bits(Box<[u64]>);

impl Bits {
    pub fn new(size: usize) -> Bits {
        Bits(vec![0; size.div_ceil(64)].into_boxed_slice())
    }

    pub fn insert(&mut self, number: usize) {
        self.0[number / 64] |= 1 << (number % 64);
    }

    pub fn remove(&mut self, number: usize) {
        self.0[number / 64] &= !(1 << (number % 64));
    }

    /// The numbers in the set, in order.
    pub fn iter(&self) -> impl Iterator<Item = usize> + '_ {
        self.0.iter().enumerate().flat_map(|(at, &word)| {
            let mut left = word;
            std::iter::from_fn(move || {
                let lowest = (left != 0).then(|| left.trailing_zeros() as usize)?;
                left &= left - 1;
                Some(at * 64 + lowest)
            })
        })
    }

    pub fn contains(&self, number: usize) -> bool {
        self.0[number / 64] >> (number % 64) & 1 == 1
    }

    pub fn union_with(&mut self, other: &Bits) {
        self.0.iter_mut().zip(&*other.0).for_each(|(word, other)| *word |= other);
    }

    pub fn union(&self, other: &Bits) -> Bits {
        Bits(self.0.iter().zip(&*other.0).map(|(a, b)| a | b).collect())
    }

    pub fn is_subset(&self, other: &Bits) -> bool {
        self.0.iter().zip(&*other.0).all(|(a, b)| a & !b == 0)
    }

    pub fn is_disjoint(&self, other: &Bits) -> bool {
        self.0.iter().zip(&*other.0).all(|(a, b)| a & b == 0)
    }

    /// The first number that is in both and not in `except`.
    pub fn common_outside(&self, other: &Bits, except: &Bits) -> Option<usize> {
        let words = self.0.iter().zip(&*other.0).zip(&*except.0).enumerate();
        words
            .map(|(at, ((a, b), c))| (at, a & b & !c))
            .find(|(_, word)| *word != 0)
            .map(|(at, word)| at * 64 + word.trailing_zeros() as usize)
    }
}
