//! Sets of small numbers.
//!
//! In a graph that is mostly a chain, the predecessors of a node are nearly all lower numbers, and its successors nearly all higher ones.
//! So a set stores only the words between two ends; all words below are equal, and so are all words above.

use std::cmp::Ordering;

/// A set of numbers. Words before `start` are all `below`, those after the stored ones all `above`; equal sets are stored alike.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct Bits {
    start: usize,
    words: Vec<u64>,
    below: u64,
    above: u64,
}

impl Bits {
    /// The empty set.
    pub const NONE: Bits = Bits { start: 0, words: Vec::new(), below: 0, above: 0 };

    /// Every number from `first` on.
    pub fn from(first: usize) -> Bits {
        Bits { start: first / 64, words: vec![u64::MAX << (first % 64)], below: 0, above: u64::MAX }.settled()
    }

    pub fn insert(&mut self, number: usize) {
        let at = number / 64;
        if self.contains(number) {
            return;
        }
        if self.words.is_empty() && self.below == self.above {
            self.start = at;
        }
        while at < self.start {
            self.start -= 1;
            self.words.insert(0, self.below);
        }
        while at >= self.start + self.words.len() {
            self.words.push(self.above);
        }
        self.words[at - self.start] |= 1 << (number % 64);
        self.settle();
    }

    pub fn contains(&self, number: usize) -> bool {
        self.word(number / 64) >> (number % 64) & 1 == 1
    }

    /// The lowest number >= `from` that is not in the set; `None` if there is none.
    pub fn next_missing(&self, from: usize) -> Option<usize> {
        let mut at = from / 64;
        let mut missing = !self.word(at) & (u64::MAX << (from % 64));
        while missing == 0 {
            at = (at + 1).max(if self.below == u64::MAX { self.start } else { 0 });
            if at >= self.end() && self.above == u64::MAX {
                return None;
            }
            missing = !self.word(at);
        }
        Some(at * 64 + missing.trailing_zeros() as usize)
    }

    /// The numbers >= `from` that are stored individually: all of them unless everything above the stored words is in the set.
    pub fn iter_from(&self, from: usize) -> impl Iterator<Item = usize> + '_ {
        let first = (from / 64).max(if self.below == 0 { self.start } else { 0 });
        (first..self.end()).flat_map(move |at| {
            let mut left = self.word(at);
            if at == from / 64 {
                left &= u64::MAX << (from % 64);
            }
            std::iter::from_fn(move || {
                let lowest = (left != 0).then(|| left.trailing_zeros() as usize)?;
                left &= left - 1;
                Some(at * 64 + lowest)
            })
        })
    }

    pub fn union_with(&mut self, other: &Bits) {
        *self = self.union(other);
    }

    pub fn union(&self, other: &Bits) -> Bits {
        let (start, end) = (self.start.min(other.start), self.end().max(other.end()));
        // Where one side has every number, there is nothing to look at.
        let start = if self.below == u64::MAX { self.start } else { start };
        let start = if other.below == u64::MAX { start.max(other.start) } else { start };
        let end = if self.above == u64::MAX { self.end() } else { end };
        let end = if other.above == u64::MAX { end.min(other.end()) } else { end };
        let words: Vec<u64> = (start..end).map(|at| self.word(at) | other.word(at)).collect();
        counted(words.len());
        Bits { start, words, below: self.below | other.below, above: self.above | other.above }.settled()
    }

    pub fn is_subset(&self, other: &Bits) -> bool {
        self.first_word(other, |own, other| own & !other).is_none()
    }

    pub fn is_disjoint(&self, other: &Bits) -> bool {
        self.first_word(other, |own, other| own & other).is_none()
    }

    /// The first number that is in both and not in `except`. From some number on, none is in all three.
    pub fn common_outside(&self, other: &Bits, except: &Bits) -> Option<usize> {
        let start = if self.below == 0 { self.start } else { 0 };
        let start = if other.below == 0 { start.max(other.start) } else { start };
        let end = self.end().max(other.end());
        let end = if self.above == 0 { self.end() } else { end };
        let end = if other.above == 0 { end.min(other.end()) } else { end };
        counted(end.saturating_sub(start));
        let words = (start..end).map(|at| (at, self.word(at) & other.word(at) & !except.word(at)));
        let (at, word) = words.into_iter().find(|&(_, word)| word != 0)?;
        Some(at * 64 + word.trailing_zeros() as usize)
    }

    /// The first word for which a function of both is not 0, the ends included.
    fn first_word(&self, other: &Bits, of: impl Fn(u64, u64) -> u64) -> Option<usize> {
        let (start, end) = (self.start.min(other.start), self.end().max(other.end()));
        let start = if self.below == 0 { self.start } else { start.saturating_sub(1) };
        let end = if self.above == 0 { self.end() } else { end + 1 };
        counted(end.saturating_sub(start));
        (start..end).find(|&at| of(self.word(at), other.word(at)) != 0)
    }

    fn end(&self) -> usize {
        self.start + self.words.len()
    }

    fn word(&self, at: usize) -> u64 {
        match at.checked_sub(self.start) {
            None => self.below,
            Some(position) => self.words.get(position).copied().unwrap_or(self.above),
        }
    }

    fn settled(mut self) -> Bits {
        self.settle();
        self
    }

    /// Removes stored words that equal the ends.
    fn settle(&mut self) {
        let above = self.words.iter().rev().take_while(|&&word| word == self.above).count();
        self.words.truncate(self.words.len() - above);
        if self.start == 0 {
            // Below the first word is nothing yet: it may be either.
            self.below = self.words.first().map_or(self.above, |&word| if word == u64::MAX { word } else { 0 });
        }
        let below = self.words.iter().take_while(|&&word| word == self.below).count();
        self.words.drain(..below);
        self.start += below;
        if self.words.is_empty() && self.below == self.above {
            self.start = 0;
        }
    }
}

/// By the lowest word in which two sets differ.
impl Ord for Bits {
    fn cmp(&self, other: &Bits) -> Ordering {
        let (start, end) = (self.start.min(other.start), self.end().max(other.end()));
        let start = if self.below == other.below { start } else { 0 };
        let differ = (start..=end).map(|at| self.word(at).cmp(&other.word(at)));
        differ.into_iter().find(|order| order.is_ne()).unwrap_or(Ordering::Equal)
    }
}

impl PartialOrd for Bits {
    fn partial_cmp(&self, other: &Bits) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

#[cfg(test)]
thread_local! {
    static WORDS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Words created and compared on this thread so far.
#[cfg(test)]
pub(crate) fn words_seen() -> usize {
    WORDS.get()
}

#[cfg(test)]
fn counted(words: usize) {
    WORDS.set(WORDS.get() + words);
}

#[cfg(not(test))]
fn counted(_words: usize) {}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const LIMIT: usize = 400;

    /// A set and what it holds below the limit, from a number: runs and single numbers, some sets without an end.
    fn pair(seed: u64) -> (Bits, BTreeSet<usize>) {
        let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let mut next = |limit: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % limit
        };
        let (mut bits, mut numbers) = (Bits::NONE, BTreeSet::new());
        if next(3) == 0 {
            let first = next(LIMIT);
            bits = Bits::from(first);
            numbers.extend(first..LIMIT);
        }
        if next(2) == 0 {
            let end = next(LIMIT);
            (0..end).for_each(|number| bits.insert(number));
            numbers.extend(0..end);
        }
        for _ in 0..next(12) {
            let number = next(LIMIT);
            bits.insert(number);
            numbers.insert(number);
        }
        (bits, numbers)
    }

    #[test]
    fn sets_without_their_ends_are_sets() {
        for seed in 0..3000 {
            let ((a, a_numbers), (b, b_numbers)) = (pair(seed), pair(seed / 2 + 7000));
            let union: BTreeSet<usize> = a_numbers.union(&b_numbers).copied().collect();
            let whole = a.union(&b);
            assert!((0..LIMIT).all(|number| whole.contains(number) == union.contains(&number)), "{a:?} {b:?}");
            assert_eq!(whole, b.union(&a));
            let ends = a.above & b.above != 0;
            assert_eq!(a.is_disjoint(&b), a_numbers.is_disjoint(&b_numbers) && !ends, "{a:?} {b:?}");
            let endless = a.above & !b.above != 0;
            assert_eq!(a.is_subset(&b), a_numbers.is_subset(&b_numbers) && !endless, "{a:?} {b:?}");
            assert!(a.is_subset(&whole) && b.is_subset(&whole));
            let missing = (0..LIMIT).find(|number| !a_numbers.contains(number));
            assert_eq!(a.next_missing(0).filter(|&number| number < LIMIT), missing, "{a:?}");
            if a.above == 0 {
                let from = missing.unwrap_or(LIMIT);
                let later: Vec<usize> = a_numbers.iter().copied().filter(|&number| number >= from).collect();
                assert_eq!(a.iter_from(from).collect::<Vec<_>>(), later, "{a:?}");
                let (c, c_numbers) = pair(seed + 11);
                let common = a_numbers.intersection(&b_numbers).find(|number| !c_numbers.contains(number));
                assert_eq!(a.common_outside(&b, &c), common.copied(), "{a:?} {b:?} {c:?}");
            }
        }
    }

    #[test]
    fn sets_are_ordered_by_their_lowest_words() {
        for seed in 0..3000 {
            let ((a, _), (b, _)) = (pair(seed), pair(seed + 1));
            let words = |bits: &Bits| (0..LIMIT / 64 + 2).map(|at| bits.word(at)).collect::<Vec<_>>();
            assert_eq!(a.cmp(&b), words(&a).cmp(&words(&b)), "{a:?} {b:?}");
        }
    }

    #[test]
    fn what_comes_before_a_link_of_a_chain_takes_one_word() {
        let mut before = Bits::NONE;
        for number in 0..10_000 {
            before.insert(number);
            assert!(before.words.len() <= 1);
        }
    }
}
