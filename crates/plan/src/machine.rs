//! What a machine allows. One number a line, with its origin.

/// Limits that legality asks for. Bandwidths and peaks join with the cost model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Machine {
    /// Name in reports.
    pub name: String,
    /// Most tensors one row kernel may read and write.
    pub kernel_arguments: usize,
    /// Most primitives one row kernel may hold.
    pub kernel_nodes: usize,
    /// Most bytes of row-sized temporaries a row kernel may keep between passes.
    pub row_scratch: usize,
}

impl Machine {
    /// A CPU core with 2 MiB of second-level cache.
    pub fn cpu() -> Machine {
        Machine {
            name: "cpu".into(),
            // Hardware prefetchers of x86 cores follow 16 to 32 streams; beyond that rows stop arriving in time.
            kernel_arguments: 24,
            // The largest group of a GPT-2 block, forward and backward, has 29 (`fuse gpt2-block --backward --json`); planning
            // and emitting grow faster than the group.
            kernel_nodes: 256,
            // Half of an L2 of 2 MiB, so that kept rows and the rows being read stay there together.
            row_scratch: 1 << 20,
        }
    }
}
