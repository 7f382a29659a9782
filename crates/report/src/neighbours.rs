//! Operations by name, with the readers of each result.

use std::collections::{BTreeMap, BTreeSet};

use crate::{Analysis, OpSheet};

/// The operations with their readers. Positions count from 0 in `ops`; an operation's own index is not used.
pub(crate) struct Neighbours<'a> {
    pub(crate) ops: &'a [OpSheet],
    readers: Vec<Vec<usize>>,
}

impl<'a> Neighbours<'a> {
    pub(crate) fn of(analysis: &'a Analysis) -> Self {
        let ops = analysis.ops.as_slice();
        let mut readers = vec![Vec::new(); ops.len()];
        for (reader, op) in ops.iter().enumerate() {
            for &producer in &op.reads {
                if let Some(list) = readers.get_mut(producer)
                    && list.last() != Some(&reader)
                    && producer != reader
                {
                    list.push(reader);
                }
            }
        }
        Self { ops, readers }
    }

    pub(crate) fn readers(&self, producer: usize) -> &[usize] {
        &self.readers[producer]
    }

    pub(crate) fn named(&self, at: usize, name: &str) -> bool {
        let op = &self.ops[at];
        op.name == name || (!op.label.is_empty() && op.label == name)
    }

    /// Every pair of names that are neighbours, with how often.
    pub(crate) fn pairs(&self) -> BTreeMap<(&'a str, &'a str), usize> {
        let mut pairs = BTreeMap::new();
        for (producer, readers) in self.readers.iter().enumerate() {
            for &reader in readers {
                *pairs.entry((self.ops[producer].name.as_str(), self.ops[reader].name.as_str())).or_insert(0) += 1;
            }
        }
        pairs
    }

    /// Every name and label.
    pub(crate) fn names(&self) -> BTreeSet<&'a str> {
        let names = self.ops.iter().flat_map(|op| [op.name.as_str(), op.label.as_str()]);
        names.filter(|name| !name.is_empty()).collect()
    }
}

/// The edit distance of two words: letters changed, inserted or removed.
pub fn distance(one: &str, other: &str) -> usize {
    let other: Vec<char> = other.chars().collect();
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (line, letter) in one.chars().enumerate() {
        let mut corner = row[0];
        row[0] = line + 1;
        for column in 0..other.len() {
            let changed = corner + usize::from(letter != other[column]);
            corner = row[column + 1];
            row[column + 1] = changed.min(corner + 1).min(row[column] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        assert_eq!(distance("gelu", "gelu"), 0);
        assert_eq!(distance("layernorm", "layer_norm"), 1);
        assert_eq!(distance("", "abc"), 3);
        assert_eq!(distance("kitten", "sitting"), 3);
    }
}
