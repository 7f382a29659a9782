//! What a launch costs on an H200: a crude roofline, enough to draw.

use super::model::Op;
use deuteron_report::CostSheet;

pub const BYTES_PER_US: f64 = 4.15e6;
pub const VECTOR_PER_US: f64 = 60e6;
pub const MATRIX_PER_US: f64 = 800e6;
const CACHE: u64 = 50 << 20;

/// The cost of these operations in one launch: what passes between them stays inside.
pub fn cost(ops: &[(usize, &Op)], all: &[Op]) -> CostSheet {
    let bytes = |op: &Op| 2 * (op.rows * op.cols) as u64;
    let inside = |id: usize| ops.iter().any(|&(other, _)| other == id);
    let (mut read, mut written, mut matrix, mut vector) = (0, 0, 0, 0);
    for &(id, op) in ops {
        for &producer in op.reads.iter().filter(|&&producer| !inside(producer)) {
            read += bytes(&all[producer]);
        }
        let flops = 2 * (op.rows * op.cols) as u64 * op.inner as u64;
        if op.kind == "matmul" {
            matrix += flops;
            read += 2 * (op.cols * op.inner) as u64 / if op.rows > 100_000 { 25 } else { 1 };
        } else if op.kind == "row" {
            vector += 9 * flops / 2;
        }
        let readers = all.iter().enumerate().skip(id).take(400).filter(|(_, other)| other.reads.contains(&id));
        if readers.clone().next().is_none() || readers.clone().any(|(reader, _)| !inside(reader)) {
            written += bytes(op);
        }
    }
    let cached = if read + written < CACHE { (read + written) * 3 / 4 } else { 0 };
    let reread = if matrix > 0 { read / 2 } else { 0 };
    let memory_us = (read + written - cached) as f64 / BYTES_PER_US;
    let cache_us = (cached + reread) as f64 / (3.0 * BYTES_PER_US);
    let matrix_us = matrix as f64 / (0.82 * MATRIX_PER_US);
    let vector_us = vector as f64 / VECTOR_PER_US;
    let terms = [("memory", memory_us), ("cache", cache_us), ("matrix", matrix_us), ("vector", vector_us)];
    let (bound, longest) = terms.into_iter().fold(("launch", 0.0), |a, b| if b.1 > a.1 { b } else { a });
    CostSheet {
        read,
        written,
        cached,
        reread,
        matrix_flops: matrix,
        vector_flops: vector,
        intensity: (matrix + vector) as f64 / (read + written).max(1) as f64,
        registers: 32 + 24 * ops.len() as u32 + if matrix > 0 { 96 } else { 0 },
        shared: if matrix > 0 { 196_608 } else { 8_192 },
        occupancy: if matrix > 0 { 0.25 } else { 0.75 },
        waves: 7.76,
        wave_efficiency: 0.97,
        launch_us: 2.2,
        memory_us,
        cache_us,
        matrix_us,
        vector_us,
        us: 2.2 + longest * 1.06,
        bound: if longest < 2.2 { "launch" } else { bound }.into(),
    }
}
