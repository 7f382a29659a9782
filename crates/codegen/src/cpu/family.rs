//! What the CPU's kernel families share: their target, and how a program and a launch become a kernel.

use crate::argument::Argument;
use crate::cpu::task::{CpuLaunch, CpuSource, Tasks};
use crate::kernel::{Execution, Kernel, Launch, Source};

/// The CPU as a target. Its kernels are made for any number of threads and any instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct CpuTarget;

/// A kernel of the CPU. Its arguments may start anywhere: loads and stores take any address.
pub(crate) fn assemble(source: CpuSource, arguments: Vec<Argument>, launch: impl CpuLaunch + 'static) -> Kernel {
    let arguments = arguments.into_iter().map(|argument| Argument { alignment: 1, ..argument }).collect();
    Kernel::new(Source::Cpu(source), Launch::new(arguments, Execution::Tasks(Tasks::new(launch))))
}

/// Bytes within reach of some arguments.
pub(crate) fn touched(arguments: &[Argument]) -> usize {
    arguments.iter().map(|argument| argument.reach).sum()
}
