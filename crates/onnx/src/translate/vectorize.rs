//! `TfIdfVectorizer` of whole numbers: how often each of some known sequences occurs, its numbers side by side or at equal distances.

use deuteron_graph::{BinaryOp, CompareOp};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::element::Element;
use crate::ir::{Id, Kind, Reduction};

/// Comparisons that are written out.
const MOST_STEPS: usize = 4096;

/// Numbers that follow each other, and the column that counts them.
struct Gram<'n> {
    numbers: &'n [i64],
    position: usize,
}

impl<'a> Translator<'a, '_> {
    pub(super) fn vectorize(&mut self, call: &Call<'a, '_>) -> Results {
        let x = call.input(0)?;
        let from = self.ir.shape(x).clone();
        let (rows, cols) = match from[..] {
            [cols] => (1, cols),
            [rows, cols] => (rows, cols),
            _ => return Err(Problem::Refused(format!("a sequence, or a batch of them, expected, got shape {from}"))),
        };
        if call.attribute("pool_strings").is_some() || self.ir.element(x).is_float() {
            return Err(Problem::Opaque("its sequences are text".to_string()));
        }
        let mode = match call.text("mode") {
            Some(mode @ ("TF" | "IDF" | "TFIDF")) => mode,
            other => return Err(Problem::Refused(format!("mode of TF, IDF, TFIDF expected, got {other:?}"))),
        };
        let list = |name: &str| call.ints(name).unwrap_or_default().to_vec();
        let (pool, starts, columns) = (list("pool_int64s"), list("ngram_counts"), list("ngram_indexes"));
        let length = |name: &str| usize::try_from(call.int(name, 0)).unwrap_or(0);
        let (shortest, longest, skips) =
            (length("min_gram_length"), length("max_gram_length"), length("max_skip_count"));
        let weights = call.attribute("weights").map(|attribute| attribute.floats.clone()).unwrap_or_default();
        let grams = grams(&pool, &starts)?;
        let width =
            columns.iter().copied().max().and_then(|most| usize::try_from(most).ok()).map_or(0, |most| most + 1);
        let is_known = grams.len() == columns.len()
            && columns.iter().all(|&column| column >= 0)
            && (weights.is_empty() || weights.len() == grams.len());
        if !is_known || width > MOST_STEPS {
            let got = format!("got {}, {} and {}", grams.len(), columns.len(), weights.len());
            return Err(Problem::Refused(format!("a column and a weight of each sequence expected, {got}")));
        }
        let counted = |gram: &&Gram| (shortest..=longest).contains(&gram.numbers.len());
        let steps: usize = grams.iter().filter(counted).map(|gram| gram.numbers.len() * (skips + 1)).sum();
        if steps > MOST_STEPS {
            return Err(Problem::Opaque(format!("{steps} comparisons of sequences are more than are unrolled")));
        }
        let lines = self.ir.reshape(x, vec![rows, cols])?;
        let mut made: Vec<Option<Id>> = vec![None; width];
        for gram in grams.iter().filter(counted) {
            let mut count = self.occurrences(lines, gram.numbers, skips)?;
            let weight = weights.get(gram.position).map_or(1.0, |&weight| weight.into());
            if mode == "IDF" {
                let one = self.ir.number(1.0, count);
                count = self.ir.binary(BinaryOp::Min, count, one)?;
            }
            if mode != "TF" {
                count = self.ir.scale(count, weight)?;
            }
            made[columns[gram.position] as usize] = Some(count);
        }
        let nothing = self.ir.known(Constant::filled([rows, 1].into(), 0.0), Element::F32);
        let parts: Vec<Id> = made.into_iter().map(|part| part.unwrap_or(nothing)).collect();
        if parts.is_empty() {
            return Err(Problem::Refused("at least one sequence expected".to_string()));
        }
        let table = self.ir.push(Kind::Concat { axis: 1 }, &parts)?;
        let dims = if from.rank() == 1 { vec![width] } else { vec![rows, width] };
        Ok(vec![self.ir.reshape(table, dims)?])
    }

    /// How often numbers occur in each line, at every distance up to `skips` others between two of them: `[lines, 1]`.
    fn occurrences(&mut self, lines: Id, numbers: &[i64], skips: usize) -> Result<Id, Problem> {
        let (rows, cols) = (self.ir.shape(lines)[0], self.ir.shape(lines)[1]);
        let mut sum = self.ir.known(Constant::filled([rows, 1].into(), 0.0), Element::F32);
        // A single number has no distance.
        let distances = if numbers.len() == 1 { 1 } else { skips + 1 };
        for distance in 1..=distances {
            let reach = (numbers.len() - 1).saturating_mul(distance);
            let Some(length) = cols.checked_sub(reach).filter(|&length| length > 0) else { break };
            let mut all: Option<Id> = None;
            for (index, &number) in numbers.iter().enumerate() {
                let slice = Kind::Slice { axis: 1, start: index * distance, length };
                let part = self.ir.push(slice, &[lines])?;
                let is_there = self.ir.compare_number(CompareOp::Eq, part, number as f64)?;
                let is_there = self.ir.cast(is_there, Element::F32)?;
                all = Some(match all {
                    Some(all) => self.ir.binary(BinaryOp::Mul, all, is_there)?,
                    None => is_there,
                });
            }
            if let Some(all) = all {
                let count = self.ir.reduce(Reduction::Sum, all, vec![1], true)?;
                sum = self.ir.binary(BinaryOp::Add, sum, count)?;
            }
        }
        Ok(sum)
    }
}

/// The sequences of a pool: all of one number, then all of two, and so on.
fn grams<'n>(pool: &'n [i64], starts: &[i64]) -> Result<Vec<Gram<'n>>, Problem> {
    let refuse =
        || Problem::Refused("ngram_counts within the pool expected, each a multiple of its length on".to_string());
    let mut grams = Vec::new();
    for (index, &start) in starts.iter().enumerate() {
        let end = starts.get(index + 1).copied().unwrap_or(pool.len() as i64);
        let (start, end) = (usize::try_from(start).map_err(|_| refuse())?, usize::try_from(end).map_err(|_| refuse())?);
        let part = pool.get(start..end).ok_or_else(refuse)?;
        if !part.len().is_multiple_of(index + 1) {
            return Err(refuse());
        }
        for numbers in part.chunks_exact(index + 1) {
            grams.push(Gram { numbers, position: grams.len() });
        }
    }
    Ok(grams)
}
