//! One pass over a row: numbers of the row, a loop over the thread's chunks of columns, reductions.

use super::*;

impl Writer<'_> {
    pub(super) fn kept_arrays(&mut self) {
        for &(id, dtype) in &self.it.passes.kept {
            self.line(format!("Raw<{}> k{}[CHUNKS];", type_name(dtype), id.index()));
        }
    }

    pub(super) fn pass(&mut self, level: usize, pass: &Pass) {
        self.line(format!("// sweep {level}"));
        // Numbers of the row that this sweep or a later one needs.
        for id in self.reachable() {
            if self.it.passes.uniform[id.index()] && self.it.passes.levels[id.index()] == level {
                self.number(id);
            }
        }
        self.row_stages(pass);
        let reductions = self.reductions(pass);
        for (slot, &(op, _, into)) in reductions.iter().enumerate() {
            self.origin = self.reduction(into);
            match op {
                ReduceOp::ArgMax => self.line(format!("Best b{level}_{slot} = ArgMax::start();")),
                _ => self
                    .line(format!("F f{level}_{slot} = lanes<F>([](int) {{ return {}::start(); }});", reduce_name(op))),
            }
        }
        self.origin = None;
        if pass.lanes.is_empty() && !self.has_lane_stage(pass) {
            self.finish_reductions(level, &reductions);
            return;
        }
        self.line(match self.it.config.policy {
            Policy::Registers | Policy::Flat => "#pragma unroll",
            // More chunks at once where each takes few registers.
            Policy::Shared | Policy::Streamed if pass.lanes.len() <= 16 => "#pragma unroll 4",
            Policy::Shared | Policy::Streamed => "#pragma unroll 1",
        });
        self.open("for (int c = 0; c < CHUNKS; ++c) {");
        self.column();
        let outer = self.names.clone();
        for &id in &pass.lanes {
            self.lanes(id, level);
        }
        self.lane_stages(level, pass, &reductions);
        self.names = outer;
        self.close();
        self.finish_reductions(level, &reductions);
    }

    /// (operation, value, row value) of a sweep's reductions.
    pub(super) fn reductions(&self, pass: &Pass) -> Vec<(ReduceOp, ExprId, u16)> {
        let of = |&position: &usize| match self.it.body.stages[position] {
            Stage::RowReduce { op, value, into } => Some((op, value, into)),
            Stage::ColumnSum { .. } | Stage::Store { .. } => None,
        };
        pass.stages.iter().filter_map(of).collect()
    }

    /// The stage that makes a number of the row.
    pub(super) fn reduction(&self, number: u16) -> Option<Origin> {
        let makes = |stage: &Stage| matches!(*stage, Stage::RowReduce { into, .. } if into == number);
        self.it.body.stages.iter().position(makes).map(Origin::Stage)
    }

    pub(super) fn is_per_row_store(&self, stage: &Stage) -> bool {
        matches!(stage, Stage::Store { arg, .. } if self.it.body.args[*arg as usize].access == Access::PerRow)
    }

    pub(super) fn has_lane_stage(&self, pass: &Pass) -> bool {
        pass.stages.iter().any(|&position| {
            let stage = &self.it.body.stages[position];
            match stage {
                Stage::RowReduce { .. } => true,
                Stage::Store { .. } => !self.is_per_row_store(stage),
                Stage::ColumnSum { width, .. } => self.is_lane_sum(*width),
            }
        })
    }

    /// Stages that work on one number per row.
    pub(super) fn row_stages(&mut self, pass: &Pass) {
        for &position in &pass.stages {
            let stage = self.it.body.stages[position];
            self.origin = Some(Origin::Stage(position));
            match stage {
                Stage::Store { arg, .. } if self.is_per_row_store(&stage) => {
                    let value = self.name_for(stored(self.it.body, &stage), self.kind_stored(arg));
                    let ty = self.type_of(arg as usize);
                    self.line(format!("if (live && lane == 0 && part == 0) store_one({ty}{{}}, g{arg}, {value});"));
                }
                Stage::ColumnSum { value, width, .. } if !self.is_lane_sum(width) => {
                    let (index, value) = (self.partial_index(position), self.name_for(value, Kind::Float));
                    self.line(format!("sum{index} += live ? {value} : 0.0f;"));
                }
                Stage::RowReduce { .. } | Stage::Store { .. } | Stage::ColumnSum { .. } => {}
            }
            self.origin = None;
        }
    }

    pub(super) fn lane_stages(&mut self, level: usize, pass: &Pass, reductions: &[(ReduceOp, ExprId, u16)]) {
        for &position in &pass.stages {
            let stage = self.it.body.stages[position];
            self.origin = Some(Origin::Stage(position));
            match stage {
                Stage::RowReduce { op, value, into } => {
                    let slot = reductions.iter().position(|&(_, _, other)| other == into).unwrap_or(0);
                    self.gather(level, slot, op, value);
                }
                Stage::ColumnSum { value, width, .. } if self.is_lane_sum(width) => {
                    let (index, value) = (self.partial_index(position), self.name_for(value, Kind::Float));
                    match self.sums_in_registers() {
                        true => {
                            self.line(format!(
                                "if (live) sum{index}[c] = lanes<F>([&](int i) {{ return sum{index}[c].v[i] + at({value}, i); }});"
                            ));
                        }
                        false => self.line(format!(
                            "if (live && in) for (int i = 0; i < V; ++i) g_sum{index}[col + i] += at({value}, i);"
                        )),
                    }
                }
                Stage::Store { arg, .. } if self.it.handed.contains(&usize::from(arg)) => {
                    let value = self.name_for(stored(self.it.body, &stage), Kind::Float);
                    self.line("#pragma unroll");
                    self.line(format!(
                        "for (int i = 0; i < V; ++i) if (live && in) put((int)row, col + i, at({value}, i));"
                    ));
                }
                Stage::Store { arg, .. } if self.staged == Some(usize::from(arg)) => {
                    let value = self.name_for(stored(self.it.body, &stage), self.kind_stored(arg));
                    self.pair(usize::from(arg), &value);
                }
                Stage::Store { arg, .. } if !self.is_per_row_store(&stage) => {
                    let value = self.name_for(stored(self.it.body, &stage), self.kind_stored(arg));
                    let (ty, size) = (self.type_of(arg as usize), self.size_of(arg as usize));
                    let access = self.access_of(arg as usize);
                    self.line(format!("store<{ty}, {access}>(g{arg} + (i64)col * {size}, {value}, live && in);"));
                }
                Stage::ColumnSum { .. } | Stage::Store { .. } => {}
            }
            self.origin = None;
        }
    }

    /// Accumulates a chunk in a reduction.
    pub(super) fn gather(&mut self, level: usize, slot: usize, op: ReduceOp, value: ExprId) {
        let value = self.name_for(value, Kind::Float);
        match op {
            ReduceOp::ArgMax => {
                self.line("#pragma unroll");
                self.line(format!(
                    "for (int i = 0; i < V; ++i) if (in) b{level}_{slot} = ArgMax::both(b{level}_{slot}, Best{{at({value}, i), col + i}});"
                ));
            }
            ReduceOp::Sum | ReduceOp::Mean | ReduceOp::Max | ReduceOp::AbsMax => {
                let name = reduce_name(op);
                let lane =
                    if op == ReduceOp::AbsMax { format!("fabsf(at({value}, i))") } else { format!("at({value}, i)") };
                self.line(format!(
                    "if (in) f{level}_{slot} = lanes<F>([&](int i) {{ return {name}::both(f{level}_{slot}.v[i], {lane}); }});"
                ));
            }
        }
    }

    /// From the threads' partials to numbers of the row, all of a sweep behind one barrier.
    pub(super) fn finish_reductions(&mut self, level: usize, reductions: &[(ReduceOp, ExprId, u16)]) {
        if reductions.is_empty() {
            return;
        }
        let config = self.it.config;
        let warps = config.threads_per_row.div_ceil(32);
        let width = config.threads_per_row.min(32);
        let several = warps > 1 || config.cluster;
        let before: usize = self.it.passes.list[..level].iter().map(|pass| self.reductions(pass).len()).sum();
        for (slot, &(op, _, into)) in reductions.iter().enumerate() {
            let name = reduce_name(op);
            let part = match op {
                ReduceOp::ArgMax => format!("b{level}_{slot}"),
                _ => format!("gather_lanes<{name}>(f{level}_{slot})"),
            };
            let ty = if op == ReduceOp::ArgMax { "Best" } else { "float" };
            let own = if several { format!("t{into}") } else { format!("r{into}_all") };
            self.origin = self.reduction(into);
            self.line(format!("const {ty} {own} = butterfly<{name}, {width}>({part});"));
            if several {
                let s = format!("{}[turn][{}]", shared_name(op), before + slot);
                match config.cluster {
                    true => self.line(format!(
                        "if ((threadIdx.x & 31) < PARTS) put(&{s}[part * {warps} + threadIdx.x / 32], {own}, threadIdx.x & 31);"
                    )),
                    false => self.line(format!("if ((threadIdx.x & 31) == 0) {s}[threadIdx.x / 32] = {own};")),
                }
            }
        }
        self.origin = None;
        if several {
            self.line(if config.cluster { "cluster_barrier();" } else { "__syncthreads();" });
        }
        for (slot, &(op, _, into)) in reductions.iter().enumerate() {
            let name = reduce_name(op);
            let ty = if op == ReduceOp::ArgMax { "Best" } else { "float" };
            self.origin = self.reduction(into);
            if several {
                let count = warps * if config.cluster { config.parts } else { 1 };
                let s = format!("{}[turn][{}]", shared_name(op), before + slot);
                self.line(format!("const {ty} r{into}_all = over_warps<{name}, {count}>({s});"));
            }
            match op {
                ReduceOp::ArgMax => {
                    self.line(format!("const int r{into} = r{into}_all.i == 0x7fffffff ? 0 : r{into}_all.i;"));
                }
                _ => self.line(format!("const float r{into} = r{into}_all;")),
            }
        }
        self.origin = None;
    }
}
