//! Column sums: accumulated by each block, written to the workspace, and added up by a second kernel.

use std::fmt::Write as _;

use super::{Writer, partials};
use crate::body::{Origin, Stage};
use crate::cuda::row_config::Policy;

impl Writer<'_> {
    pub(super) fn sums(&mut self) {
        for (index, (_, width)) in partials(self.it.body).into_iter().enumerate() {
            let lanes = self.is_lane_sum(width);
            self.origin = self.column_sum(index);
            match (lanes, self.sums_in_registers()) {
                (true, true) => {
                    self.line(format!("F sum{index}[CHUNKS];"));
                    self.line("#pragma unroll");
                    self.line(format!(
                        "for (int c = 0; c < CHUNKS; ++c) sum{index}[c] = lanes<F>([](int) {{ return 0.0f; }});"
                    ));
                }
                (true, false) => {
                    let at = self.sum_address(index);
                    self.line(format!("float* const g_sum{index} = {at};"));
                    self.open("for (int c = 0; c < CHUNKS; ++c) {");
                    self.line("const int col = ((part * CHUNKS + c) * T + lane) * V;");
                    self.open("for (int i = 0; i < V; ++i) {");
                    self.line(format!("if (col < COLS) g_sum{index}[col + i] = 0.0f;"));
                    self.close();
                    self.close();
                }
                (false, _) => self.line(format!("float sum{index} = 0.0f;")),
            }
        }
        self.origin = None;
    }

    /// The stage of a partial.
    fn column_sum(&self, index: usize) -> Option<Origin> {
        let stages = self.it.body.stages.iter().enumerate();
        let mut sums = stages.filter(|(_, stage)| matches!(stage, Stage::ColumnSum { .. }));
        sums.nth(index).map(|(position, _)| Origin::Stage(position))
    }

    /// Sums of one number per row are kept by one thread; in a space of one column, columns and numbers are the same.
    pub(super) fn is_lane_sum(&self, width: usize) -> bool {
        width > 1 || self.it.body.cols == 1
    }

    /// Where this block's sums of a partial go: blocks of all earlier partials come before.
    pub(super) fn sum_address(&self, index: usize) -> String {
        let widths: Vec<usize> = partials(self.it.body).iter().map(|&(_, width)| width).collect();
        let before: usize = widths[..index].iter().sum();
        format!(
            "(float*)p.workspace + (i64){before} * (gridDim.x / PARTS) + (i64)(blockIdx.x / PARTS) * {}",
            widths[index]
        )
    }

    pub(super) fn write_sums(&mut self) {
        for (index, (_, width)) in partials(self.it.body).into_iter().enumerate() {
            let rows = self.it.config.rows_per_block;
            self.origin = self.column_sum(index);
            match (self.is_lane_sum(width), self.sums_in_registers()) {
                (true, true) if rows == 1 => {
                    let at = self.sum_address(index);
                    self.line("#pragma unroll");
                    self.open("for (int c = 0; c < CHUNKS; ++c) {");
                    self.line("const int col = ((part * CHUNKS + c) * T + lane) * V;");
                    self.line(format!("float* const g_sum = {at};"));
                    self.line("#pragma unroll");
                    self.line(format!(
                        "for (int i = 0; i < V; ++i) if (col < COLS) g_sum[col + i] = sum{index}[c].v[i];"
                    ));
                    self.close();
                }
                (true, true) => {
                    // Rows of a block one after another, so that the order is fixed.
                    let at = self.sum_address(index);
                    self.open("{");
                    self.line("__shared__ float s_sum[COLS];");
                    self.open("for (int turn = 0; turn < ROWS; ++turn) {");
                    self.open("if (group == turn) {");
                    self.line("#pragma unroll");
                    self.open("for (int c = 0; c < CHUNKS; ++c) {");
                    self.line("const int col = (c * T + lane) * V;");
                    self.line("#pragma unroll");
                    self.open("for (int i = 0; i < V; ++i) {");
                    self.line(format!(
                        "if (col < COLS) s_sum[col + i] = turn == 0 ? sum{index}[c].v[i] : s_sum[col + i] + sum{index}[c].v[i];"
                    ));
                    self.close();
                    self.close();
                    self.close();
                    self.line("__syncthreads();");
                    self.close();
                    self.line(format!("float* const g_sum = {at};"));
                    self.line("for (int i = threadIdx.x; i < COLS; i += T * ROWS) g_sum[i] = s_sum[i];");
                    self.line("__syncthreads();");
                    self.close();
                }
                (true, false) => {}
                (false, _) => {
                    let at = self.sum_address(index);
                    self.open("{");
                    self.line("__shared__ float s_sum[ROWS];");
                    self.line(format!("if (lane == 0) s_sum[group] = sum{index};"));
                    self.line("__syncthreads();");
                    self.open("if (threadIdx.x == 0 && part == 0) {");
                    self.line("float total = s_sum[0];");
                    self.line("for (int i = 1; i < ROWS; ++i) total += s_sum[i];");
                    self.line(format!("*({at}) = total;"));
                    self.close();
                    self.line("__syncthreads();");
                    self.close();
                }
            }
        }
        self.origin = None;
    }

    /// Whether sums over rows are in registers: those of an epilogue are its caller's. Long rows have them in the workspace, each thread its
    /// own.
    pub(super) fn sums_in_registers(&self) -> bool {
        self.it.config.policy == Policy::Registers || !self.it.handed.is_empty()
    }

    pub(super) fn partial_index(&self, position: usize) -> usize {
        let earlier = self.it.body.stages[..position].iter();
        earlier.filter(|stage| matches!(stage, Stage::ColumnSum { .. })).count()
    }

    pub(super) fn finish_kernel(&mut self) {
        let sums = partials(self.it.body);
        if sums.is_empty() {
            return;
        }
        self.line("");
        self.open("struct FinishParameters {");
        self.line("unsigned long long workspace, blocks;");
        for (arg, _) in &sums {
            self.line(format!("unsigned long long a{arg};"));
        }
        self.depth -= 1;
        self.line("};");
        self.line("");
        self.open(
            "extern \"C\" __global__ void __launch_bounds__(1024) finish(const __grid_constant__ FinishParameters p) {",
        );
        let mut before = 0;
        for (index, &(arg, width)) in sums.iter().enumerate() {
            let ty = self.type_of(arg);
            let mut call = String::new();
            let _ = write!(call, "if (blockIdx.y == {index} && blockIdx.x * 32 < {width}) ");
            let _ = write!(
                call,
                "finish_columns<{ty}>((const float*)p.workspace + {before} * p.blocks, p.blocks, {width}, (char*)p.a{arg});"
            );
            self.origin = self.column_sum(index);
            self.line(call);
            before += width;
        }
        self.origin = None;
        self.close();
    }
}
