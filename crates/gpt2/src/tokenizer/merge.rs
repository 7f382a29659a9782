//! Byte pair encoding: neighbours are merged, the earliest rule first, the leftmost of equals first.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::hash::{BuildHasherDefault, Hasher};

/// The rules, in the order they are applied.
#[derive(Debug, Clone, Default)]
pub struct Merges {
    rules: Vec<Rule>,
    ranks: HashMap<(u32, u32), u32, BuildHasherDefault<PairHasher>>,
}

/// Two neighbouring tokens become one.
#[derive(Debug, Clone, Copy)]
struct Rule {
    pair: (u32, u32),
    into: u32,
}

impl Merges {
    /// Room for this many rules.
    pub fn with_capacity(count: usize) -> Self {
        Merges { rules: Vec::with_capacity(count), ranks: HashMap::with_capacity_and_hasher(count, Default::default()) }
    }

    /// Adds the next rule; returns whether its pair is new.
    pub fn push(&mut self, pair: (u32, u32), into: u32) -> bool {
        let rank = self.rules.len() as u32;
        self.rules.push(Rule { pair, into });
        self.ranks.insert(pair, rank).is_none()
    }

    /// Whether there is a rule for a pair.
    pub fn has(&self, pair: (u32, u32)) -> bool {
        self.ranks.contains_key(&pair)
    }

    /// The pairs of all rules, in order.
    pub fn pairs(&self) -> impl Iterator<Item = (u32, u32)> {
        self.rules.iter().map(|rule| rule.pair)
    }
}

/// Merges the tokens of pieces. Its buffers are reused.
///
/// Candidates are in a heap, so a piece of n bytes always takes `n log n` steps.
pub struct Merger<'a> {
    merges: &'a Merges,
    /// the piece as a list of tokens; a merged token leaves a hole
    tokens: Vec<Link>,
    waiting: BinaryHeap<Reverse<Candidate>>,
}

#[derive(Clone, Copy)]
struct Link {
    token: u32,
    before: usize,
    after: usize,
}

/// A rule that may apply at a place. Ordered by rank, then place.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    rank: u32,
    at: usize,
}

/// No neighbour.
const NONE: usize = usize::MAX;

/// The id that marks a hole; no token has it.
const HOLE: u32 = u32::MAX;

impl<'a> Merger<'a> {
    pub fn new(merges: &'a Merges) -> Self {
        Merger { merges, tokens: Vec::new(), waiting: BinaryHeap::new() }
    }

    /// Appends the tokens of a piece, whose bytes are `tokens`.
    pub fn merge(&mut self, tokens: impl ExactSizeIterator<Item = u32>, out: &mut Vec<u32>) {
        self.tokens.clear();
        let count = tokens.len();
        self.tokens.extend(tokens.enumerate().map(|(at, token)| Link {
            token,
            before: at.wrapping_sub(1),
            after: if at + 1 == count { NONE } else { at + 1 },
        }));
        for at in 1..count {
            self.offer(at - 1, at);
        }
        while let Some(Reverse(candidate)) = self.waiting.pop() {
            self.apply(candidate);
        }
        let mut at = if count == 0 { NONE } else { 0 };
        while at != NONE {
            let link = self.tokens[at];
            out.push(link.token);
            at = link.after;
        }
    }

    fn offer(&mut self, left: usize, right: usize) {
        let pair = (self.tokens[left].token, self.tokens[right].token);
        if let Some(&rank) = self.merges.ranks.get(&pair) {
            self.waiting.push(Reverse(Candidate { rank, at: left }));
        }
    }

    /// Applies a rule, if its pair is still there.
    fn apply(&mut self, Candidate { rank, at }: Candidate) {
        let Rule { pair, into } = self.merges.rules[rank as usize];
        let left = self.tokens[at];
        if left.token != pair.0 || left.after == NONE {
            return;
        }
        let right = self.tokens[left.after];
        if right.token != pair.1 {
            return;
        }
        self.tokens[left.after].token = HOLE;
        self.tokens[at] = Link { token: into, after: right.after, ..left };
        if right.after != NONE {
            self.tokens[right.after].before = at;
            self.offer(at, right.after);
        }
        if left.before != NONE {
            self.offer(left.before, at);
        }
    }
}

/// Hashes a pair of ids by one multiplication. Ids are small and come from a file that the user chose.
#[derive(Default)]
pub struct PairHasher(u64);

impl Hasher for PairHasher {
    fn finish(&self) -> u64 {
        let mixed = self.0.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        mixed ^ (mixed >> 32)
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(byte);
        }
    }

    fn write_u32(&mut self, value: u32) {
        self.0 = self.0.rotate_left(32) ^ u64::from(value);
    }
}
