//! The result of a kernel family: plain data that a device compiles, checks and runs without knowing what it computes.
//!
//! A `Family` examines a group and makes an `Offer`: the work for the cost model, and on request the [`Kernel`], which is a
//! [`Source`] (what is compiled) and a [`Launch`] (what is run: arguments with their reach, and grids, tasks or a library call).

use std::collections::hash_map::DefaultHasher;
use std::hash::{Hash, Hasher};

use deuteron_graph::NodeId;
use deuteron_plan::{Draft, Work};

use crate::argument::{Argument, Lookup};
use crate::cpu::task::{CpuSource, Tasks};
use crate::cuda::grid::{CudaSource, Grids, Tiling};
use crate::library::{LibraryCall, LibraryLaunch};

/// A kernel of a plan.
#[derive(Debug, Clone, PartialEq)]
pub struct Kernel {
    /// the compile-time half
    pub source: Source,
    /// the run-time half
    pub launch: Launch,
}

impl Kernel {
    /// A source, and a launch that names its entries and parameters.
    pub fn new(source: Source, mut launch: Launch) -> Kernel {
        launch.fingerprint = source.fingerprint();
        Kernel { source, launch }
    }
}

/// The compiled part. Two equal sources are one compiled kernel.
#[derive(Debug, Clone, PartialEq)]
pub enum Source {
    /// a CUDA translation unit
    Cuda(CudaSource),
    /// a program that threads of the CPU run
    Cpu(CpuSource),
    /// a call of a vendor's library
    Library(LibraryCall),
}

impl Source {
    /// A number that identifies a source whose launches name entries and parameters of its text. Tasks carry their program.
    fn fingerprint(&self) -> u64 {
        let mut hasher = DefaultHasher::new();
        match self {
            Source::Cuda(source) => source.text.hash(&mut hasher),
            Source::Library(call) => call.hash(&mut hasher),
            Source::Cpu(_) => {}
        }
        hasher.finish()
    }
}

impl std::fmt::Display for Source {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Source::Cuda(source) => f.write_str(&source.text),
            Source::Cpu(source) => source.fmt(f),
            Source::Library(call) => call.fmt(f),
        }
    }
}

/// The run part. A device only checks the reach of every argument against its buffer: that a kernel accesses no byte beyond it is guaranteed by
/// the family that makes the launch. A launch of CPU tasks is therefore only made by an unsafe function,
/// [`assemble`](crate::cpu::family::assemble). Grids and library calls are data that say where a GPU reads and writes; the code that makes them
/// is responsible for their text as for any CUDA source, because nothing checks its accesses to the GPU's memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Launch {
    arguments: Vec<Argument>,
    lookups: Vec<Lookup>,
    execution: Execution,
    variant: Variant,
    tiling: Option<Tiling>,
    /// of the source it was made with
    fingerprint: u64,
}

/// How a launch is run.
#[derive(Debug, Clone, PartialEq)]
pub enum Execution {
    /// grids of a GPU, one after another
    Grids(Grids),
    /// tasks of a CPU
    Tasks(Tasks),
    /// one call of a library
    Library(Box<LibraryLaunch>),
}

/// The chosen variant, for reports and for measured launch shapes.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Variant {
    /// as text; empty if there is only one
    pub name: String,
    /// the key of a measured launch shape; empty if there is none
    pub key: String,
}

impl Launch {
    pub(crate) fn new(arguments: Vec<Argument>, execution: Execution) -> Launch {
        Launch { arguments, lookups: Vec::new(), execution, variant: Variant::default(), tiling: None, fingerprint: 0 }
    }

    /// Grids of a GPU, which touch no byte of an argument beyond its reach.
    pub fn of_grids(arguments: Vec<Argument>, grids: Grids) -> Launch {
        Launch::new(arguments, Execution::Grids(grids))
    }

    /// A call of a library, which touches no byte of an argument beyond its reach.
    pub fn of_library(arguments: Vec<Argument>, call: LibraryLaunch) -> Launch {
        Launch::new(arguments, Execution::Library(Box::new(call)))
    }

    /// The same with locations of indices, for messages about an index out of range.
    pub fn with_lookups(self, lookups: Vec<Lookup>) -> Launch {
        Launch { lookups, ..self }
    }

    /// The same with the name of the variant, and the key of its measured launch shape.
    pub fn with_variant(self, name: String, key: String) -> Launch {
        Launch { variant: Variant { name, key }, ..self }
    }

    /// The same with the tiles of its matmul.
    pub fn with_tiling(self, tiling: Tiling) -> Launch {
        Launch { tiling: Some(tiling), ..self }
    }

    /// Whether it was made with a source.
    pub fn is_of(&self, source: &Source) -> bool {
        self.fingerprint == source.fingerprint()
    }

    /// In the order of the kernel's arguments.
    pub fn arguments(&self) -> &[Argument] {
        &self.arguments
    }

    /// How it is run.
    pub fn execution(&self) -> &Execution {
        &self.execution
    }

    /// The grids, where it is run as such.
    pub fn grids(&self) -> Option<&Grids> {
        match &self.execution {
            Execution::Grids(grids) => Some(grids),
            Execution::Tasks(_) | Execution::Library(_) => None,
        }
    }

    /// The location of a faulty index, by the argument that the kernel names.
    pub fn lookup(&self, argument: usize) -> Option<&Lookup> {
        self.lookups.iter().find(|lookup| lookup.argument == argument)
    }

    /// The chosen variant.
    pub fn variant(&self) -> &Variant {
        &self.variant
    }

    /// The tiles of its matmul, if it has one in our kernel.
    pub fn tiling(&self) -> Option<&Tiling> {
        self.tiling.as_ref()
    }
}

/// A kernel family for targets of one kind.
pub trait Family<T>: Sync {
    /// Its offer for a group; none if its kernels do not support the group.
    fn offer<'a>(&self, request: Request<'a>, target: &'a T) -> Option<Box<dyn Offer + 'a>>;
}

/// A kernel that a family can generate.
pub trait Offer {
    /// Its work, for the cost model.
    fn work(&self) -> Work;
    /// The kernel.
    fn kernel(self: Box<Self>) -> Kernel;
}

/// An offer of two functions.
pub fn offered<'a>(work: impl Fn() -> Work + 'a, kernel: impl FnOnce() -> Kernel + 'a) -> Option<Box<dyn Offer + 'a>> {
    Some(Box::new(Offered { work, kernel }))
}

/// An offer that lowers the group on demand.
pub fn offered_lowered<'a, L: 'a>(
    lower: impl Fn() -> L + Clone + 'a,
    work: impl Fn(L) -> Work + 'a,
    kernel: impl FnOnce(L) -> Kernel + 'a,
) -> Option<Box<dyn Offer + 'a>> {
    let again = lower.clone();
    offered(move || work(lower()), move || kernel(again()))
}

struct Offered<W, K> {
    work: W,
    kernel: K,
}

impl<W: Fn() -> Work, K: FnOnce() -> Kernel> Offer for Offered<W, K> {
    fn work(&self) -> Work {
        (self.work)()
    }

    fn kernel(self: Box<Self>) -> Kernel {
        (self.kernel)()
    }
}

/// A group, and the requirements of its kernel.
#[derive(Clone, Copy)]
pub struct Request<'a> {
    /// the group
    pub group: Draft<'a>,
    /// results that may be written into the memory of the operand that they update
    pub in_place: &'a [InPlace],
}

/// A result that may be written into the memory of an operand. A kernel that does so says it in
/// [`Argument::in_place_of`](crate::Argument::in_place_of).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InPlace {
    /// the node whose buffer is read
    pub operand: NodeId,
    /// the node whose value is stored there
    pub result: NodeId,
}

impl<'a> From<Draft<'a>> for Request<'a> {
    fn from(group: Draft<'a>) -> Request<'a> {
        Request { group, in_place: &[] }
    }
}

impl<'a> From<&Draft<'a>> for Request<'a> {
    fn from(group: &Draft<'a>) -> Request<'a> {
        Request::from(*group)
    }
}
