//! Matrix products: `MatMul`, `Gemm`, and grids of places mapped by matrices.

use deuteron_graph::{BinaryOp, Shape};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::constant::Constant;
use crate::ir::{Id, Kind};

/// Rows of a matrix whose determinant is written out.
const MOST_ROWS: usize = 4;

impl<'a> Translator<'a, '_> {
    /// Determinants of small matrices, by their first rows.
    pub(super) fn determinant(&mut self, call: &Call<'a, '_>) -> Result<Id, Problem> {
        let x = call.input(0)?;
        let shape = self.ir.shape(x).clone();
        let Some(&[rows, cols]) = shape.last_chunk::<2>().filter(|[rows, cols]| rows == cols && *rows > 0) else {
            return Err(Problem::Refused(format!("square matrices expected, got {shape}")));
        };
        if rows > MOST_ROWS {
            return Err(Problem::Opaque(format!("determinants of {rows} rows are not supported")));
        }
        let rank = shape.rank();
        let mut elements = Vec::with_capacity(rows * cols);
        for row in 0..rows {
            let line = self.ir.push(Kind::Slice { axis: rank - 2, start: row, length: 1 }, &[x])?;
            for col in 0..cols {
                let element = self.ir.push(Kind::Slice { axis: rank - 1, start: col, length: 1 }, &[line])?;
                elements.push(self.ir.reshape(element, shape[..rank - 2].to_vec())?);
            }
        }
        self.expanded(&elements, rows)
    }

    /// The determinant of elements in rows.
    fn expanded(&mut self, elements: &[Id], rows: usize) -> Result<Id, Problem> {
        if rows == 1 {
            return Ok(elements[0]);
        }
        let mut sum: Option<Id> = None;
        for col in 0..rows {
            let rest = (rows..rows * rows).filter(|at| at % rows != col).map(|at| elements[at]).collect::<Vec<Id>>();
            let minor = self.expanded(&rest, rows - 1)?;
            let term = self.ir.binary(BinaryOp::Mul, elements[col], minor)?;
            sum = Some(match sum {
                None => term,
                Some(sum) if col % 2 == 1 => self.ir.binary(BinaryOp::Sub, sum, term)?,
                Some(sum) => self.ir.binary(BinaryOp::Add, sum, term)?,
            });
        }
        sum.ok_or_else(|| Problem::Refused("a matrix that is not empty expected".to_string()))
    }

    pub(super) fn contraction(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "MatMul" | "FusedMatMul" => Ok(vec![self.matmul(call)?]),
            "AffineGrid" => Ok(vec![self.affine_grid(call)?]),
            "FusedGemm" => {
                let result = self.gemm(call)?;
                let names = ["activation_alpha", "activation_beta", "activation_gamma"];
                let given = |name: &str| call.attribute(name).and_then(|attribute| attribute.float);
                let parameters: Vec<f32> = names.iter().map_while(|name| given(name)).collect();
                Ok(vec![self.fused_activation(call, result, &parameters)?])
            }
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
    /// The places of an image's elements, from -1 to 1 along each axis, mapped by the matrix of each image.
    fn affine_grid(&mut self, call: &Call) -> Result<Id, Problem> {
        let (matrices, wanted) = (call.input(0)?, self.integers(call.input(1)?, "size")?);
        let is_aligned = call.int("align_corners", 0) != 0;
        let positive = |&size: &i64| usize::try_from(size).ok().filter(|&size| size > 0);
        let sizes: Vec<usize> = wanted.iter().filter_map(positive).collect();
        let shape = self.ir.shape(matrices).clone();
        let axes = wanted.len().saturating_sub(2);
        if sizes.len() != wanted.len() || !matches!(axes, 2 | 3) || shape[..] != [sizes[0], axes, axes + 1] {
            return Err(Problem::Refused(format!(
                "a size [n, c, ..] of 2 or 3 axes and matrices [n, axes, axes + 1] expected, got {wanted:?} and {shape}"
            )));
        }
        let image = &sizes[2..];
        if is_aligned && image.contains(&1) {
            return Err(Problem::Opaque("a single place has no corners to align".to_string()));
        }
        let count = image.iter().fold(1, |product: usize, &size| product.saturating_mul(size));
        self.reserve(count.saturating_mul(axes + 1))?;
        let strides = Shape::from(image).strides();
        let place = |flat: usize, axis: usize| {
            let (at, size) = ((flat / strides[axis] % image[axis]) as f64, image[axis] as f64);
            if is_aligned { 2.0 * at / (size - 1.0) - 1.0 } else { (2.0 * at + 1.0) / size - 1.0 }
        };
        // The last axis comes first, and a 1 last.
        let mut values = Vec::with_capacity(count * (axes + 1));
        for flat in 0..count {
            values.extend((0..axes).rev().map(|axis| place(flat, axis)).chain([1.0]));
        }
        let grid = Constant::dense([count, axes + 1].into(), values, false);
        let grid = self.ir.known(grid, self.ir.element(matrices));
        let mapped = self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: true }, &[grid, matrices])?;
        Ok(self.ir.reshape(mapped, [&sizes[..1], image, &[axes]].concat())?)
    }
}
