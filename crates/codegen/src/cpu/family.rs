//! Shared code of the CPU's kernel families: their target, and the construction of a kernel from a program and a launch.

use crate::argument::Argument;
use crate::cpu::task::{CpuLaunch, CpuSource, Tasks};
use crate::kernel::{Execution, Kernel, Launch, Source};

/// The CPU as a target. Its kernels are made for any number of threads and any instruction set.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuTarget;

/// A kernel of the CPU. Its arguments may start anywhere: loads and stores take any address.
///
/// # Safety
/// Tasks that the launch prepares touch no byte of an argument beyond its reach, and write no argument that is not `written`. A device
/// checks the reach of each argument against its buffer, and for the rest relies on this when it calls
/// [`CpuTask::run`](crate::cpu::task::CpuTask::run).
pub unsafe fn assemble(source: CpuSource, arguments: Vec<Argument>, launch: impl CpuLaunch + 'static) -> Kernel {
    let arguments = arguments.into_iter().map(|argument| Argument { alignment: 1, ..argument }).collect();
    Kernel::new(Source::Cpu(source), Launch::new(arguments, Execution::Tasks(Tasks::new(launch))))
}

/// Bytes within reach of some arguments.
pub fn touched(arguments: &[Argument]) -> usize {
    arguments.iter().map(|argument| argument.reach).sum()
}
