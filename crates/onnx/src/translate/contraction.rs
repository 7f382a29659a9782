//! Matrix products: `MatMul`, `Gemm`, `Einsum`.

use deuteron_graph::BinaryOp;

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::ir::{Id, Kind};

impl<'a> Translator<'a, '_> {
    pub(super) fn contraction(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "MatMul" | "FusedMatMul" => Ok(vec![self.matmul(call)?]),
            "Gemm" => Ok(vec![self.gemm(call)?]),
            _ => self.einsum(call),
        }
    }

    /// `MatMul`, whose vectors become matrices of one row or column.
    fn matmul(&mut self, call: &Call) -> Result<Id, Problem> {
        let (a, b) = (call.input(0)?, call.input(1)?);
        if ["transBatchA", "transBatchB"].iter().any(|name| call.int(name, 0) != 0) {
            return Err(Problem::Opaque("it exchanges batch and rows".to_string()));
        }
        let (transpose_a, transpose_b) = (call.int("transA", 0) != 0, call.int("transB", 0) != 0);
        let (vector_a, vector_b) = (self.ir.shape(a).rank() == 1, self.ir.shape(b).rank() == 1);
        let left = if vector_a { self.ir.reshape(a, vec![1, self.ir.shape(a)[0]])? } else { a };
        let right = if vector_b { self.ir.reshape(b, vec![self.ir.shape(b)[0], 1])? } else { b };
        let kind = Kind::Matmul { transpose_a: transpose_a && !vector_a, transpose_b: transpose_b && !vector_b };
        let mut product = self.ir.push(kind, &[left, right])?;
        let alpha = call.float("alpha", 1.0);
        if alpha != 1.0 {
            product = self.ir.scale(product, alpha)?;
        }
        let mut dims = self.ir.shape(product).to_vec();
        if vector_b {
            dims.pop();
        }
        if vector_a {
            dims.remove(dims.len() - if vector_b { 1 } else { 2 });
        }
        Ok(self.ir.reshape(product, dims)?)
    }

    fn gemm(&mut self, call: &Call) -> Result<Id, Problem> {
        let kind = Kind::Matmul { transpose_a: call.int("transA", 0) != 0, transpose_b: call.int("transB", 0) != 0 };
        let mut result = self.ir.push(kind, &[call.input(0)?, call.input(1)?])?;
        let (alpha, beta) = (call.float("alpha", 1.0), call.float("beta", 1.0));
        if alpha != 1.0 {
            result = self.ir.scale(result, alpha)?;
        }
        // Up to opset 6 the third operand was broadcast only where it was asked for.
        call.without_effect(&["broadcast"]);
        if let (Some(mut c), true) = (call.optional(2), beta != 0.0) {
            if beta != 1.0 {
                c = self.ir.scale(c, beta)?;
            }
            result = self.ir.binary(BinaryOp::Add, result, c)?;
        }
        Ok(result)
    }

    /// A contraction of two operands in which every letter is batch, free or summed.
    fn einsum(&mut self, call: &Call) -> Results {
        let equation: String = call.text("equation").unwrap_or_default().split_whitespace().collect();
        let operands = call.all();
        let Some((left, output)) = equation.split_once("->") else {
            return Err(Problem::Opaque(format!("the equation `{equation}` has no result")));
        };
        let terms: Vec<&[u8]> = left.split(',').map(str::as_bytes).collect();
        let output = output.as_bytes();
        if terms.len() != operands.len() {
            return Err(Problem::Refused(format!("{} operands expected, got {}", terms.len(), operands.len())));
        }
        let mut sizes = std::collections::BTreeMap::new();
        for (term, &operand) in terms.iter().zip(&operands) {
            let shape = self.ir.shape(operand);
            let plain = term.iter().all(u8::is_ascii_alphabetic) && unique(term);
            if !plain || term.len() != shape.rank() {
                return Err(Problem::Opaque(format!("the equation `{equation}` is not one of plain axes")));
            }
            for (&letter, &size) in term.iter().zip(shape.iter()) {
                if *sizes.entry(letter).or_insert(size) != size {
                    return Err(Problem::Refused(format!(
                        "equal sizes for `{}` expected in `{equation}`",
                        letter as char
                    )));
                }
            }
        }
        let [a, b] = terms[..] else {
            return Err(Problem::Opaque(format!("the equation `{equation}` is not one of two operands")));
        };
        let (in_a, in_b, in_out) = (|c: &u8| a.contains(c), |c: &u8| b.contains(c), |c: &u8| output.contains(c));
        let covered = output.iter().all(|c| in_a(c) || in_b(c)) && unique(output);
        if !covered || a.iter().any(|c| !in_b(c) && !in_out(c)) || b.iter().any(|c| !in_a(c) && !in_out(c)) {
            return Err(Problem::Opaque(format!("the equation `{equation}` sums over one operand alone")));
        }
        let pick = |from: &[u8], keep: &dyn Fn(&u8) -> bool| from.iter().copied().filter(keep).collect::<Vec<u8>>();
        let batch = pick(a, &|c| in_b(c) && in_out(c));
        let summed = pick(a, &|c| in_b(c) && !in_out(c));
        let (rows, cols) = (pick(a, &|c| !in_b(c)), pick(b, &|c| !in_a(c)));
        let size = |letters: &[u8]| letters.iter().map(|letter| sizes[letter]).product::<usize>();
        let order = |term: &[u8], letters: &[&[u8]]| -> Vec<usize> {
            letters.concat().iter().filter_map(|letter| term.iter().position(|other| other == letter)).collect()
        };
        let left = self.ir.push(Kind::Transpose(order(a, &[&batch, &rows, &summed])), &operands[..1])?;
        let left = self.ir.reshape(left, vec![size(&batch), size(&rows), size(&summed)])?;
        let right = self.ir.push(Kind::Transpose(order(b, &[&batch, &summed, &cols])), &operands[1..])?;
        let right = self.ir.reshape(right, vec![size(&batch), size(&summed), size(&cols)])?;
        let product = self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: false }, &[left, right])?;
        let letters = [batch, rows, cols].concat();
        let result = self.ir.reshape(product, letters.iter().map(|letter| sizes[letter]).collect())?;
        Ok(vec![self.ir.push(Kind::Transpose(order(&letters, &[output])), &[result])?])
    }
}

fn unique(letters: &[u8]) -> bool {
    letters.iter().enumerate().all(|(index, letter)| !letters[..index].contains(letter))
}
