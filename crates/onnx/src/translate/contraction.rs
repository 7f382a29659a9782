//! Matrix products: `MatMul`, `Gemm`, `Conv` over patches, `Einsum`.

use deuteron_graph::{BinaryOp, Shape};

use super::call::Results;
use super::{Call, Problem, Translator};
use crate::ir::{Id, Kind};

impl<'a> Translator<'a, '_> {
    pub(super) fn contraction(&mut self, call: &Call<'a, '_>) -> Results {
        match call.node.op {
            "MatMul" | "FusedMatMul" => Ok(vec![self.matmul(call)?]),
            "Gemm" => Ok(vec![self.gemm(call)?]),
            "Conv" => self.convolution(call),
            _ => self.einsum(call),
        }
    }

    /// `MatMul`, whose vectors become matrices of one row or column.
    fn matmul(&mut self, call: &Call) -> Result<Id, Problem> {
        let (a, b) = (call.input(0)?, call.input(1)?);
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
        if let (Some(mut c), true) = (call.optional(2), beta != 0.0) {
            if beta != 1.0 {
                c = self.ir.scale(c, beta)?;
            }
            result = self.ir.binary(BinaryOp::Add, result, c)?;
        }
        Ok(result)
    }

    /// Patches that do not overlap are rows of a product; other convolutions are only described.
    fn convolution(&mut self, call: &Call) -> Results {
        let (x, weight) = (call.input(0)?, call.input(1)?);
        let (from, kernel) = (self.ir.shape(x).clone(), self.ir.shape(weight).clone());
        if from.rank() < 3 || kernel.rank() != from.rank() {
            return Err(Problem::Refused(format!("x [n, c, ..] and w [o, c, ..] expected, got {from} and {kernel}")));
        }
        let axes = from.rank() - 2;
        let list = |name: &str, otherwise: i64, count: usize| -> Result<Vec<i64>, Problem> {
            let values = call.ints(name).map_or_else(|| vec![otherwise; count], <[i64]>::to_vec);
            let fits = values.len() == count && values.iter().all(|value| (0..=i64::from(i32::MAX)).contains(value));
            if fits { Ok(values) } else { Err(Problem::Refused(format!("{count} {name} of at least 0 expected"))) }
        };
        let (strides, dilations, mut pads) =
            (list("strides", 1, axes)?, list("dilations", 1, axes)?, list("pads", 0, 2 * axes)?);
        let same = matches!(call.text("auto_pad"), Some("SAME_UPPER" | "SAME_LOWER"));
        if same {
            pads.fill(0);
        }
        let group = call.int("group", 1);
        if strides.contains(&0) || dilations.contains(&0) || group < 1 {
            return Err(Problem::Refused("strides, dilations and groups of at least 1 expected".to_string()));
        }
        let mut spatial = Vec::new();
        for axis in 0..axes {
            let reach = dilations[axis].saturating_mul(kernel[axis + 2] as i64 - 1).saturating_add(1);
            let size = from[axis + 2] as i64;
            let padded = size.saturating_add(pads[axis]).saturating_add(pads[axis + axes]);
            let count = if same {
                (size + strides[axis] - 1) / strides[axis]
            } else {
                (padded - reach).div_euclid(strides[axis]) + 1
            };
            spatial.push(usize::try_from(count).map_err(|_| format!("a kernel within {from} expected, got {kernel}"))?);
        }
        let is_patches = group == 1
            && kernel[1] == from[1]
            && !same
            && pads.iter().all(|&pad| pad == 0)
            && dilations.iter().all(|&dilation| dilation == 1)
            && (0..axes).all(|axis| strides[axis] as usize == kernel[axis + 2])
            && 2 + 2 * axes <= deuteron_graph::MAX_RANK;
        if is_patches {
            return Ok(vec![self.patches(call, x, weight, &spatial)?]);
        }
        let dims: Vec<usize> = [from[0], kernel[0]].into_iter().chain(spatial).collect();
        let shape = Shape::new(dims);
        let terms = kernel[1..].iter().map(|&size| size as u64).fold(2, u64::saturating_mul);
        let Some(elements) = shape.checked_elements() else {
            return Err(Problem::Refused(format!("a result of at most 2^48 elements expected, got {shape}")));
        };
        let why = "a convolution of overlapping or padded patches is not a primitive".to_string();
        let results = vec![(self.ir.element(x), shape)];
        Ok(self.opaque(call, why, terms.saturating_mul(elements as u64), false, results))
    }

    fn patches(&mut self, call: &Call, mut x: Id, weight: Id, spatial: &[usize]) -> Result<Id, Problem> {
        let kernel = self.ir.shape(weight).clone();
        let axes = spatial.len();
        for (axis, &count) in spatial.iter().enumerate() {
            let length = count.saturating_mul(kernel[axis + 2]);
            x = self.ir.push(Kind::Slice { axis: axis + 2, start: 0, length }, &[x])?;
        }
        let (batch, channels) = (self.ir.shape(x)[0], kernel[1]);
        let mut dims = vec![batch, channels];
        spatial.iter().zip(&kernel[2..]).for_each(|(&count, &size)| dims.extend([count, size]));
        let split = self.ir.reshape(x, dims)?;
        // [n, c, h, kh, w, kw] -> [n, h, w, c, kh, kw]
        let counts = (0..axes).map(|axis| 2 + 2 * axis);
        let sizes = (0..axes).map(|axis| 3 + 2 * axis);
        let permutation = [0].into_iter().chain(counts).chain([1]).chain(sizes).collect();
        let ordered = self.ir.push(Kind::Transpose(permutation), &[split])?;
        let (patches, terms): (usize, usize) = (spatial.iter().product(), kernel[1..].iter().product());
        let rows = self.ir.reshape(ordered, vec![batch, patches, terms])?;
        let matrix = self.ir.reshape(weight, vec![kernel[0], terms])?;
        let mut result = self.ir.push(Kind::Matmul { transpose_a: false, transpose_b: true }, &[rows, matrix])?;
        if let Some(bias) = call.optional(2) {
            result = self.ir.binary(BinaryOp::Add, result, bias)?;
        }
        let channels_first = self.ir.push(Kind::Transpose(vec![0, 2, 1]), &[result])?;
        let dims = [batch, kernel[0]].into_iter().chain(spatial.iter().copied()).collect();
        Ok(self.ir.reshape(channels_first, dims)?)
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
