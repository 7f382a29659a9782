//! The config of a row kernel, which maps it to threads: plain data with its reason.

use std::fmt;

/// Where values are kept between passes over a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Policy {
    /// no rows: every thread takes the next elements
    Flat,
    /// in registers
    Registers,
    /// in shared memory
    Shared,
    /// nowhere: every pass starts from memory
    Streamed,
}

impl Policy {
    /// All of them.
    pub const ALL: [Policy; 4] = [Policy::Flat, Policy::Registers, Policy::Shared, Policy::Streamed];

    /// The word in files.
    pub fn name(self) -> &'static str {
        match self {
            Policy::Flat => "flat",
            Policy::Registers => "registers",
            Policy::Shared => "shared",
            Policy::Streamed => "streamed",
        }
    }
}

/// A launch shape. Two configs of one body give two kernels that compute the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct RowConfig {
    /// where values are kept
    pub policy: Policy,
    /// neighbouring columns that a thread takes at once
    pub vector: usize,
    /// threads that share a row within a block
    pub threads_per_row: usize,
    /// rows that a block processes at once
    pub rows_per_block: usize,
    /// number of chunks of `vector` columns per thread and row
    pub chunks: usize,
    /// blocks that share a row
    pub parts: usize,
    /// whether those blocks reduce together, as a cluster
    pub cluster: bool,
    /// resident persistent blocks per multiprocessor; 0: one block per few rows
    pub resident: usize,
    /// stages of rows in shared memory for a persistent block: the current one and those in flight; 0: the next
    /// row is in registers
    pub stages: usize,
    /// whether offsets of rows need 64 bits
    pub wide: bool,
    /// in words
    pub why: String,
}

impl RowConfig {
    /// Whether another config makes the same kernel.
    pub fn is_same(&self, other: &RowConfig) -> bool {
        RowConfig { why: String::new(), ..self.clone() } == RowConfig { why: String::new(), ..other.clone() }
    }

    /// Threads of a block.
    pub fn threads(&self) -> usize {
        self.threads_per_row * self.rows_per_block
    }

    /// Whether its grid waits for earlier ones by itself, and may start before they have ended. A grid of persistent blocks
    /// relies on an even distribution of its blocks, which only an idle machine guarantees.
    pub fn waits(&self) -> bool {
        self.resident == 0
    }

    /// Blocks of a launch over this many rows (elements, in a flat kernel).
    pub fn blocks(&self, rows: usize, processors: usize) -> usize {
        let a_block = match self.policy {
            Policy::Flat => self.threads() * self.vector * self.chunks,
            _ => self.rows_per_block,
        };
        let all = rows.div_ceil(a_block.max(1));
        match self.resident {
            0 => all,
            resident => all.min((resident * processors / self.parts).max(1)),
        }
    }
}

impl fmt::Display for RowConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.vector * self.chunks;
        match self.policy {
            Policy::Flat => write!(
                f,
                "{} threads per block, {} x {} elements per thread",
                self.threads(),
                self.chunks,
                self.vector
            )?,
            _ => write!(
                f,
                "{} threads per row, {} rows per block, {columns} columns per thread by {}",
                self.threads_per_row, self.rows_per_block, self.vector
            )?,
        }
        match self.policy {
            Policy::Flat | Policy::Registers => {}
            Policy::Shared => f.write_str(", row in shared memory")?,
            Policy::Streamed => f.write_str(", row read again for each sweep")?,
        }
        if self.parts > 1 {
            let how = if self.cluster { " as a cluster" } else { "" };
            write!(f, ", {} blocks a row{how}", self.parts)?;
        }
        if self.resident > 0 {
            write!(f, ", {} resident blocks per multiprocessor", self.resident)?;
        }
        if self.stages > 0 {
            write!(f, ", {} rows ahead in shared memory", self.stages - 1)?;
        }
        write!(f, ": {}", self.why)
    }
}
