//! Row work as functions that another kernel calls: what makes the first operand of a product, what follows its sums, and what
//! follows rows that a block has finished.

use super::{Emission, Span, Writer};
use crate::cuda::row_config::Policy;

/// `prologue::run(p, put)`: all threads of a block make the operand and call `put(row, column, value)` for each element.
pub(crate) fn emit_prologue(emission: &Emission) -> String {
    let mut writer = Writer::new(emission);
    writer.open("namespace head {");
    writer.constants_of_rows();
    writer.parameters();
    writer.open("template <class Put> static __device__ __forceinline__ void run(const Parameters& p, Put put) {");
    writer.line("const int lane = threadIdx.x % T, group = threadIdx.x / T;");
    writer.line("const int part = 0, turn = 0;");
    writer.shared_memory();
    writer.place("0");
    writer.addresses(|spec| !spec.written);
    writer.early_loads();
    writer.sweeps();
    writer.close();
    writer.close();
    writer.text()
}

/// `epilogue::run(p, row, col, sums)`: one thread does what follows V sums of a row, of each product.
pub(crate) fn emit_epilogue(emission: &Emission) -> String {
    debug_assert_eq!(emission.config.policy, Policy::Streamed, "every value is read where it is needed");
    let mut writer = Writer::new(emission);
    writer.open("namespace tail {");
    writer.line(format!("constexpr int COLS = {};", emission.body.cols));
    writer.parameters();
    writer.open(
        "static __device__ __forceinline__ void run(const Parameters& p, const i64 row, const int col, const F* sums) {",
    );
    writer.line("const bool live = true, in = true;");
    writer.addresses(|_| true);
    for id in writer.reachable() {
        match emission.passes.uniform[id.index()] {
            true => writer.number(id),
            false => writer.lanes(id, 0),
        }
    }
    if let Some(pass) = emission.passes.list.first() {
        writer.lane_stages(0, pass, &[]);
    }
    writer.close();
    writer.close();
    writer.text()
}

/// `run(p, first, end, s_memory)`: all threads of a block do the work of the rows from `first` to before `end`, of which there is one at
/// least. Where several warps share a row, they meet in `s_memory`.
pub(crate) fn emit_following(emission: &Emission) -> String {
    let mut writer = Writer::new(emission);
    writer.span = Span::GIVEN;
    writer.constants_of_rows();
    writer.line("");
    writer.parameters();
    writer.open(
        "static __device__ __forceinline__ void run(const Parameters& p, const i64 first, const i64 end, char* s_memory) {",
    );
    writer.line("const int lane = threadIdx.x % T, group = threadIdx.x / T;");
    writer.line("const int part = 0;");
    writer.shared_memory();
    writer.walked();
    writer.close();
    writer.text()
}

impl Writer<'_> {
    fn constants_of_rows(&mut self) {
        let config = self.it.config;
        self.line(format!("constexpr int T = {};", config.threads_per_row));
        self.line(format!("constexpr int ROWS = {};", config.rows_per_block));
        self.line(format!("constexpr int CHUNKS = {};", config.chunks));
        self.line(format!("constexpr int COLS = {};", self.it.body.cols));
    }

    fn text(self) -> String {
        self.lines.iter().flat_map(|line| [line.text.as_str(), "\n"]).collect()
    }
}
