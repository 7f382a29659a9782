//! The iteration over rows: one row per thread group, or row after row with a prefetch of the next one into registers or into stages of shared
//! memory.

use super::*;

impl Writer<'_> {
    pub(super) fn rows(&mut self) {
        let config = self.it.config;
        let bound = match config.resident {
            0 => format!("{}", config.threads()),
            blocks => format!("{}, {blocks}", config.threads()),
        };
        self.open(format!(
            "extern \"C\" __global__ void __launch_bounds__({bound}) row(const __grid_constant__ Parameters p) {{"
        ));
        self.line("const int lane = threadIdx.x % T, group = threadIdx.x / T;");
        self.line(match (config.parts, config.cluster) {
            (1, _) => "const int part = 0;",
            (_, false) => "const int part = blockIdx.x % PARTS;",
            (_, true) => "const int part = cluster_rank();",
        });
        self.shared_memory();
        if config.waits() {
            self.wait();
        }
        self.sums();
        match config.resident {
            0 => self.one_row(),
            _ => self.walked(),
        }
        self.write_sums();
        self.close();
    }

    /// Row after row.
    pub(super) fn walked(&mut self) {
        self.hoisted();
        match self.it.config {
            config if config.stages > 0 => self.rows_in_stages(),
            config if config.policy == Policy::Registers => self.rows_ahead(),
            _ => self.row_after_row(),
        }
    }

    /// The next grid may start; from here on, earlier ones have ended.
    pub(super) fn wait(&mut self) {
        self.line("start_next();");
        self.line("wait_for_previous();");
    }

    /// A block with a fixed set of rows.
    pub(super) fn one_row(&mut self) {
        self.line(format!("const i64 start = {};", self.span.begin));
        self.line("const int turn = 0;");
        self.open("{");
        self.place("start");
        self.addresses(|_, _| true);
        self.early_loads();
        self.sweeps();
        self.close();
    }

    /// A persistent block that iterates over rows.
    pub(super) fn row_after_row(&mut self) {
        self.line("int turn = 0;");
        self.walk();
        self.place("start");
        self.addresses(|_, _| true);
        self.early_loads();
        self.sweeps();
        self.close();
    }

    /// A persistent block that prefetches the next row into registers.
    pub(super) fn rows_ahead(&mut self) {
        let (loads, numbers) = (self.own_loads(), self.row_numbers());
        self.open("{");
        self.declare_row("w", "u", &loads, &numbers);
        self.line(format!("const i64 begin = {};", self.span.begin));
        self.open("{");
        self.fetch_row("begin", ["w", "u"], &loads, &numbers);
        self.close();
        self.line("int turn = 0;");
        self.line("#pragma unroll 2");
        self.walk();
        self.declare_row("n", "v", &loads, &numbers);
        self.line(format!("const i64 next = start + {};", self.span.step));
        self.open(format!("if (next < {}) {{", self.span.end));
        self.fetch_row("next", ["n", "v"], &loads, &numbers);
        self.close();
        self.this_row(&numbers);
        for arg in loads {
            self.line("#pragma unroll");
            self.line(format!("for (int c = 0; c < CHUNKS; ++c) w{arg}[c] = n{arg}[c];"));
        }
        for arg in numbers {
            self.line(format!("u{arg} = v{arg};"));
        }
        self.close();
        self.close();
    }

    /// A persistent block that prefetches the next rows into shared memory. Each thread copies the elements that it will read, so no
    /// barrier is needed.
    pub(super) fn rows_in_stages(&mut self) {
        let (loads, numbers) = (self.own_loads(), self.row_numbers());
        self.open("{");
        self.declare_row("", "u", &[], &numbers);
        self.line("extern __shared__ char s_rows[];");
        let sizes: Vec<String> = loads.iter().map(|&arg| format!("sizeof(Raw<{}>)", self.type_of(arg))).collect();
        self.line(format!("constexpr int STAGE = CHUNKS * T * ROWS * (int)({});", sizes.join(" + ")));
        self.line("const i64 step = (i64)(gridDim.x / PARTS) * ROWS;");
        self.line("const i64 begin = (i64)(blockIdx.x / PARTS) * ROWS;");
        self.open("for (int s = 0; s < STAGES - 1; ++s) {");
        self.line("const i64 ahead = begin + s * step;");
        self.open("if (ahead < (i64)p.rows) {");
        self.copy_row("ahead", "s", &loads);
        self.close();
        self.line("commit_copies();");
        self.close();
        self.open("{");
        self.fetch_row("begin", ["", "u"], &[], &numbers);
        self.close();
        self.line("int turn = 0, stage = 0;");
        self.walk();
        self.line("const i64 ahead = start + (STAGES - 1) * step;");
        self.open("if (ahead < (i64)p.rows) {");
        self.copy_row("ahead", "(stage == 0 ? STAGES - 1 : stage - 1)", &loads);
        self.close();
        self.line("commit_copies();");
        if !numbers.is_empty() {
            self.declare_row("", "v", &[], &numbers);
            self.line("const i64 next = start + step;");
            self.open("if (next < (i64)p.rows) {");
            self.fetch_row("next", ["", "v"], &[], &numbers);
            self.close();
        }
        self.line("await_copies<STAGES - 1>();");
        self.stage_addresses("w", "stage", &loads);
        self.this_row(&numbers);
        for arg in numbers {
            self.line(format!("u{arg} = v{arg};"));
        }
        self.line("stage = stage + 1 == STAGES ? 0 : stage + 1;");
        self.close();
        self.close();
    }

    /// Arguments of which each row has its own.
    pub(super) fn own_loads(&self) -> Vec<usize> {
        let own = |arg: &usize| !self.is_hoisted(*arg) && !self.is_late(*arg);
        self.row_loads().into_iter().filter(own).collect()
    }

    /// Arguments that are one number per row.
    pub(super) fn row_numbers(&self) -> Vec<usize> {
        let args = &self.it.body.args;
        (0..args.len()).filter(|&arg| !args[arg].written && args[arg].access == Access::PerRow).collect()
    }

    /// The work on a row that was loaded.
    pub(super) fn this_row(&mut self, numbers: &[usize]) {
        let body = self.it.body;
        self.place("start");
        self.addresses(|spec, _| spec.written);
        let late: Vec<usize> = self.row_loads().into_iter().filter(|&arg| self.is_late(arg)).collect();
        for arg in late {
            self.line(format!("const char* const g{arg} = (const char*)p.a{arg};"));
        }
        self.kept_arrays();
        numbers.iter().for_each(|&arg| {
            let load = body.ids().find(|&id| body.expr(id) == Expr::Load(arg as u16));
            load.into_iter().for_each(|id| drop(self.names.insert(id, format!("u{arg}"))));
        });
        self.sweeps();
    }

    /// Where this thread's chunks of a stage lie, an address an argument.
    pub(super) fn stage_addresses(&mut self, name: &str, stage: &str, loads: &[usize]) {
        let mut offset = format!("s_rows + {stage} * STAGE");
        for &arg in loads {
            let ty = self.type_of(arg);
            self.line(format!("Raw<{ty}>* const {name}{arg} = (Raw<{ty}>*)({offset}) + threadIdx.x;"));
            offset = format!("{offset} + CHUNKS * T * ROWS * (int)sizeof(Raw<{ty}>)");
        }
    }

    /// Starts the copies of a row to a stage.
    pub(super) fn copy_row(&mut self, start: &str, stage: &str, loads: &[usize]) {
        self.place(start);
        self.addresses(|spec, _| !spec.written);
        self.stage_addresses("n", stage, loads);
        self.line("#pragma unroll");
        self.open("for (int c = 0; c < CHUNKS; ++c) {");
        self.column();
        for &arg in loads {
            let (ty, size, access) = (self.type_of(arg), self.size_of(arg), self.access_of(arg));
            self.line(format!("copy<{ty}, {access}>(n{arg} + c * T * ROWS, g{arg} + (i64)col * {size}, in);"));
        }
        self.close();
    }

    pub(super) fn declare_row(&mut self, raw: &str, number: &str, loads: &[usize], numbers: &[usize]) {
        for &arg in loads {
            self.line(format!("Raw<{}> {raw}{arg}[CHUNKS];", self.type_of(arg)));
        }
        for &arg in numbers {
            let kind = match self.it.body.args[arg].dtype {
                Dtype::I32 => Kind::Int,
                Dtype::Bool => Kind::Truth,
                _ => Kind::Float,
            };
            self.line(format!("{} {number}{arg};", scalar_type(kind)));
        }
    }

    /// Loads what a row is read from into the named arrays and numbers.
    pub(super) fn fetch_row(&mut self, start: &str, [raw, number]: [&str; 2], loads: &[usize], numbers: &[usize]) {
        self.place(start);
        self.addresses(|spec, _| !spec.written);
        for &arg in numbers {
            self.line(format!("{number}{arg} = load_one({}{{}}, g{arg});", self.type_of(arg)));
        }
        self.fill(raw, loads);
    }

    pub(super) fn walk(&mut self) {
        let Span { begin, step, end, .. } = self.span;
        self.open(format!("for (i64 start = {begin}; start < {end}; start += {step}, turn ^= 1) {{"));
    }

    /// The row of this thread. A thread without a row computes the last one, but stores nothing.
    pub(super) fn place(&mut self, start: &str) {
        let end = self.span.end;
        self.line(format!("const bool live = ROWS == 1 || {start} + group < {end};"));
        self.line(format!("const i64 row = live ? {start} + group : {end} - 1;"));
    }
}
