//! The work of one launch, counted.

/// Classes of vector arithmetic, by cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// a load or a store of a strip
    Move,
    /// between f32 and a narrower type
    Convert,
    /// addition, product, comparison, selection
    Simple,
    /// division, square root, reciprocal
    Divide,
    /// exponential
    Exp,
    /// tanh, sigmoid, GELU, SiLU
    Tanh,
    /// error function, logarithm
    Erf,
    /// random bits
    Random,
    /// into a row reduction
    Reduce,
    /// into a column sum
    Column,
}

impl Class {
    /// All of them, in the order of [`Work::vectors`].
    pub const ALL: [Class; 10] = [
        Class::Move,
        Class::Convert,
        Class::Simple,
        Class::Divide,
        Class::Exp,
        Class::Tanh,
        Class::Erf,
        Class::Random,
        Class::Reduce,
        Class::Column,
    ];

    /// Floating point operations per element, as a GPU's vector units spend them.
    pub fn flops(self) -> f64 {
        match self {
            Class::Move => 0.0,
            Class::Convert | Class::Simple | Class::Reduce | Class::Column => 1.0,
            Class::Divide | Class::Exp => 8.0,
            Class::Tanh => 16.0,
            Class::Erf => 24.0,
            Class::Random => 24.0,
        }
    }
}

/// Lanes of the vectors that [`Work`] counts.
pub const LANES: usize = 16;

/// The work of one launch.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Work {
    /// vectors of [`LANES`] elements that each class works on; a part of a vector counts as one
    pub vectors: [f64; Class::ALL.len()],
    /// partial vectors, at most one at the end of each row, which are masked
    pub tails: f64,
    /// scalar operations, all rows together
    pub row_scalars: f64,
    /// rows that are started one by one; 0 in an elementwise kernel
    pub rows: f64,
    /// sets of rows that are processed together
    pub flights: f64,
    /// arguments read or written along the row, all sets of rows together
    pub row_arguments: f64,
    /// row reductions that are finished, all rows together
    pub reductions: f64,
    /// instructions of a tile machine handed out, all rows together
    pub dispatches: f64,
    /// pieces the work can be split into
    pub chunks: f64,
    /// the last piece as a share of the others
    pub last_chunk: f64,
    /// elements of column sums that are added up at the end, on one thread
    pub finished: f64,
    /// whether results are too large for the caches
    pub streams: bool,
    /// bytes touched above which its results count as too large; 0 if they never do
    pub stream_from: f64,
    /// elements moved one by one by a strided copy
    pub copied: f64,
    /// pieces of rows added into a table
    pub scattered: f64,
    /// pieces of a table's rows that are written
    pub cleared: f64,
    /// matmuls of a batch, each divided into blocks
    pub products: f64,
    /// flops of matrix products
    pub matrix_flops: f64,
    /// the same with partial tiles rounded up to what the machine computes
    pub padded_flops: f64,
    /// elements of operands and results that blocks of products copy
    pub packed: f64,
    /// bits of the matrix operands
    pub matrix_bits: u32,
    /// rows of a product's result, of one product of a batch
    pub matrix_rows: usize,
    /// row-sized values alive at once
    pub live_rows: usize,
    /// waits between blocks of a GPU kernel, in barriers over all blocks
    pub waits: f64,
    /// time of the kernel, including its launch, if its family has a formula fitted to measured kernels: the family chooses among
    /// its kernels by it, so the planner takes the same number instead of its own estimate
    pub microseconds: Option<f64>,
    /// why separate kernels are faster although the numbers above do not show it: a search does not choose it
    pub drawback: Option<&'static str>,
    /// work that every worker repeats before its share of the rest
    pub each: Option<Box<Work>>,
    /// work that starts after all of the rest and is distributed again: a matmul in attention's kernel, or work after a matmul
    pub next: Option<Box<Work>>,
}

impl Work {
    /// Adds `count` vectors of a class.
    pub fn add(&mut self, class: Class, count: f64) {
        self.vectors[class as usize] += count;
    }

    /// Vectors of a class.
    pub fn of(&self, class: Class) -> f64 {
        self.vectors[class as usize]
    }

    /// Flops of the vector units.
    pub fn vector_flops(&self) -> f64 {
        let vectors: f64 = Class::ALL.iter().map(|&class| self.of(class) * class.flops()).sum();
        let others: f64 = [&self.each, &self.next].into_iter().flatten().map(|work| work.vector_flops()).sum();
        vectors * LANES as f64 + self.row_scalars + others
    }

    /// Flops of matmuls, including those of the following phase.
    pub fn all_matrix_flops(&self) -> f64 {
        self.matrix_flops + self.next.as_ref().map_or(0.0, |next| next.all_matrix_flops())
    }
}
