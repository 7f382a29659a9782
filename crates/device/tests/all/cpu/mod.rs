//! Kernels of the CPU by hand: results of tiny cases, and jobs that do not fit refused.

mod append;
mod attention;
mod attention_backward;
mod attention_block;
mod attention_rows;
mod foreign;

use deuteron_codegen::body::Exprs;
use deuteron_codegen::{Access, ArgBinding, ArgSpec, Body, Kernel, Stage};
use deuteron_device::{Cpu, Device, DeviceError, Executable, Job, Launching, Memory, NoStates, Place, Step};
use deuteron_graph::{Dtype, Graph};

/// An argument in `f32`; a device only looks at places, so any node will do as a name.
fn argument(written: bool) -> ArgBinding {
    let graph: Graph = "x = input f32[1] ; out x".parse().unwrap();
    let (base, dtype) = (graph.inputs()[0], Dtype::F32);
    ArgBinding { base, dtype, written, offset: 0, leading: Vec::new(), table_rows: 0 }
}

/// Row work with one operand and one result in `f32`.
fn body(cols: usize, exprs: Exprs, row_values: u16, stages: Vec<Stage>) -> Body {
    let args = [false, true].map(|written| ArgSpec { dtype: Dtype::F32, access: Access::Row, written }).to_vec();
    Body { cols, flat: false, args, exprs: exprs.finish(), axes: 0, row_values, stages }
}

/// One step of a kernel.
fn step(cpu: &Cpu, kernel: Kernel, places: Vec<Place>) -> Step {
    let compiled = cpu.compile(vec![kernel.source]).unwrap().remove(0);
    Step { kernel: compiled, launch: kernel.launch, places }
}

/// A job of one kernel with this many inputs and outputs of these sizes.
fn job(cpu: &Cpu, kernel: Kernel, places: Vec<Place>, inputs: usize, outputs: &[usize]) -> Job {
    Job { steps: vec![step(cpu, kernel, places)], inputs, states: Vec::new(), outputs: outputs.to_vec(), arena: 0 }
}

/// A job that is loaded; none where there is no such kernel, or its sizes are not those of the job.
fn loaded(cpu: &Cpu, job: Option<Job>) -> Option<Box<dyn Executable>> {
    match cpu.load(job?) {
        Ok(executable) => Some(executable),
        Err(DeviceError::Job { step: 0, .. }) => None,
        Err(error) => panic!("{error}"),
    }
}

/// Loads a job and runs it twice, since what is counted is counted anew, over poisoned memory.
fn check(cpu: &Cpu, job: Option<Job>, inputs: &[&[f32]], expected: &[&[f32]]) -> Box<dyn Executable> {
    let mut executable = loaded(cpu, job).unwrap();
    let memory: Vec<Memory> = inputs.iter().map(|values| cpu.upload(&bytes(values)).unwrap()).collect();
    for _ in 0..2 {
        executable.poison().unwrap();
        executable.run(&|index| &memory[index], &mut NoStates, Launching::Eager).unwrap();
        for (index, expected) in expected.iter().enumerate() {
            let mut result = vec![0; 4 * expected.len()];
            executable.read(index, &mut result).unwrap();
            assert_eq!(result, bytes(expected), "output {index}");
        }
    }
    executable
}

/// The bytes of numbers.
fn bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|x| x.to_le_bytes()).collect()
}
