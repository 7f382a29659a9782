//! The cost of memory accesses on a GPU, as the emulator counts it.

/// Accesses of one kind by all warps of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Traffic {
    /// times that a warp accessed memory, with any of its lanes
    pub accesses: u64,
    /// of global memory sectors of 32 bytes; of shared memory wavefronts
    pub served: u64,
    /// wavefronts of shared memory without bank conflicts
    pub least: u64,
    /// bytes of those sectors that some lane accessed
    pub wanted: u64,
}

/// Accesses through pointers. Instructions that copy without the registers of a thread (cp.async, TMA, wgmma) are not counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Accesses {
    /// reads of arguments and the workspace
    pub global_reads: Traffic,
    /// writes to arguments and the workspace
    pub global_writes: Traffic,
    /// reads of shared memory
    pub shared_reads: Traffic,
    /// writes to shared memory
    pub shared_writes: Traffic,
}

impl Traffic {
    /// Share of the bytes of its sectors that some lane accessed.
    pub fn used(&self) -> f64 {
        self.wanted as f64 / (self.served * 32).max(1) as f64
    }

    /// Wavefronts that bank conflicts add.
    pub fn conflicts(&self) -> u64 {
        self.served - self.least
    }

    fn parse(line: &str) -> Option<Traffic> {
        let numbers: Vec<u64> = line.split(' ').map(str::parse).collect::<Result<_, _>>().ok()?;
        let &[accesses, served, least, wanted] = numbers.as_slice() else { return None };
        Some(Traffic { accesses, served, least, wanted })
    }
}

impl Accesses {
    /// As `machine/accesses.h` writes them.
    pub(crate) fn parse(text: &str) -> Option<Accesses> {
        let traffic: Vec<Traffic> = text.lines().map(Traffic::parse).collect::<Option<_>>()?;
        let &[global_reads, global_writes, shared_reads, shared_writes] = traffic.as_slice() else { return None };
        Some(Accesses { global_reads, global_writes, shared_reads, shared_writes })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn totals_are_read_as_they_are_written() {
        let accesses = Accesses::parse("2 64 2 256\n0 0 0 0\n4 36 4 0\n0 0 0 0\n").unwrap();
        assert_eq!(accesses.global_reads.used(), 0.125);
        assert_eq!((accesses.shared_reads.accesses, accesses.shared_reads.conflicts()), (4, 32));
        assert_eq!(accesses.shared_writes, Traffic::default());
        assert_eq!(Accesses::parse("1 2 3\n"), None);
    }
}
