//! Matrix products: `MatMul` and `Gemm`.

use deuteron_graph::BinaryOp;

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::ir::{Id, Kind};

impl<'a> Translator<'a, '_> {
    pub(super) fn contraction(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "MatMul" | "FusedMatMul" => Ok(vec![self.matmul(call)?]),
            _ => Ok(vec![self.gemm(call)?]),
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
}
