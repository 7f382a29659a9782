//! Runs a graph's GPU kernels on the emulator and compares them with the f64 reference. Needs neither a GPU nor a CUDA compiler.

use std::collections::BTreeMap;
use std::path::Path;

use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, with_library};
use deuteron_codegen::{Kernel, Source};
use deuteron_emulator::{Lanes, Schedule};
use deuteron_graph::{Graph, NodeId};
use deuteron_kernels::ladder::{Rung, WIDEST};
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_plan::{Machine, Plan, Quantity, Strategy, Target, plan};

use crate::error::Error;
use crate::listing::launch_of;
use crate::seed;
use crate::session::refuse_opaque;
use crate::tensor::Tensor;
use crate::verify::{Expected, Verification};

pub use deuteron_emulator::{Accesses, EmulatorError, Toolchain, Traffic};

/// The GPU whose kernels are emulated.
const ARCH: Arch = Arch::Sm90a;
const PROFILE: &str = "h200";

/// Which kernels are run.
#[derive(Debug, Clone, Default)]
pub struct Choice<'a> {
    /// a rung of a ladder in place of the only kernel
    pub rung: Option<&'a Rung>,
    /// A text in place of that of the only kernel, in which comments may stand for the device-side library; of a rung, all of it or its own
    /// part.
    pub text: Option<String>,
}

/// Only the whole text of a rung defines its parameters.
const PARAMETERS: &str = "struct Parameters";

/// The kernels that the emulator ran, and their results.
#[derive(Debug, Clone)]
pub struct Emulation {
    /// in their order
    pub kernels: Vec<EmulatedKernel>,
    /// outputs against the reference
    pub verification: Verification,
}

/// A kernel that the emulator ran.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmulatedKernel {
    /// the name of its group
    pub name: String,
    /// `row<<<8, 96>>>`
    pub launches: Vec<String>,
    /// the cost of its accesses, if the toolchain counts them
    pub accesses: Option<Accesses>,
    /// by `printf` in its text
    pub printed: String,
}

/// Plans a graph for an H200 and runs it on inputs from seed 1, each kernel under `orders` orders of its threads. Files go to `folder`.
pub fn emulate(
    toolchain: &Toolchain,
    folder: &Path,
    graph: &Graph,
    strategy: Strategy,
    choice: &Choice,
    schedules: u64,
) -> Result<Emulation, Error> {
    let machine = Machine::profile(PROFILE)?;
    let processors = machine.count(Quantity::Processors);
    let (plan, kernels) = kernels(graph, &machine, strategy, choice)?;
    let schedule = Schedule { resident: processors, lanes: Lanes::Together, seeds: 1..schedules + 1 };
    let tensors = seed::inputs(graph, 1)?;
    let mut memory = Values::new(graph, &tensors)?;
    let mut said = Vec::new();
    for (index, kernel) in kernels.iter().enumerate() {
        let arguments = kernel.launch.arguments();
        let bytes: Vec<&[u8]> = memory.of(graph, arguments.iter().map(|argument| argument.base));
        let folder = folder.join(index.to_string());
        let ran = deuteron_emulator::run(toolchain, &folder, kernel, &bytes, &schedule)?;
        said.push((ran.accesses, ran.printed));
        let written = arguments.iter().zip(ran.results).filter(|(argument, _)| argument.written);
        written.for_each(|(argument, bytes)| memory.set(argument.base, bytes));
    }
    let outputs = graph.outputs().iter().map(|output| memory.tensor(graph, output.node));
    let arrays = tensors.iter().map(Tensor::to_array).collect::<Result<Vec<_>, _>>()?;
    let verification = Expected::new(graph, &arrays)?.verify(graph, &outputs.collect::<Result<Vec<_>, _>>()?)?;
    let ran = plan.groups.iter().zip(&kernels).zip(said).map(|((group, kernel), (accesses, printed))| EmulatedKernel {
        accesses,
        printed,
        name: group.name.clone(),
        launches: kernel.launch.grids().map_or(Vec::new(), |grids| grids.list.iter().map(launch_of).collect()),
    });
    Ok(Emulation { kernels: ran.collect(), verification })
}

/// The plan of a graph for an H200 and its kernels, as chosen.
fn kernels(
    graph: &Graph,
    machine: &Machine,
    strategy: Strategy,
    choice: &Choice,
) -> Result<(Plan, Vec<Kernel>), Error> {
    refuse_opaque(graph)?;
    let target = CudaTarget::new(ARCH, machine.count(Quantity::Processors));
    let plan = plan(graph, Target { machine, catalog: CudaCatalog::of(ARCH) }, strategy, &[])?;
    let drafts = || plan.groups.iter().map(|group| group.draft(graph, &plan.placement));
    let backend = Backend::Cuda(target.clone());
    let mut kernels = drafts().map(|draft| render(draft, &backend)).collect::<Result<Vec<_>, _>>()?;
    let is_replaced = choice.rung.is_some() || choice.text.is_some();
    if is_replaced && kernels.len() != 1 {
        return Err(Error::NotOneKernel { graph: graph.name().to_string(), kernels: kernels.len() });
    }
    if let Some(rung) = choice.rung {
        let kernel = drafts().next().and_then(|draft| rung.kernel(&draft, &target));
        let refused = || Error::NoRung { rung: rung.name, graph: graph.name().to_string(), widest: WIDEST };
        kernels = vec![kernel.ok_or_else(refused)?];
    }
    if let Some(text) = &choice.text {
        let replaced = kernels.into_iter().map(|kernel| match kernel.source {
            Source::Cuda(source) => {
                let text = with_library(text);
                let part = choice.rung.and_then(|rung| rung.text()).filter(|_| !text.contains(PARAMETERS));
                let text = part.map_or(text.clone(), |part| source.text.replace(&part, &text));
                Kernel::new(Source::Cuda(CudaSource { text, ..source }), kernel.launch)
            }
            source => Kernel::new(source, kernel.launch),
        });
        kernels = replaced.collect();
    }
    Ok((plan, kernels))
}

/// Bytes of every value that has a buffer.
struct Values {
    bytes: BTreeMap<NodeId, Vec<u8>>,
}

impl Values {
    fn new(graph: &Graph, inputs: &[Tensor]) -> Result<Values, Error> {
        let bytes = graph.inputs().iter().zip(inputs).map(|(&id, tensor)| Ok((id, tensor.to_bytes()?)));
        Ok(Values { bytes: bytes.collect::<Result<_, Error>>()? })
    }

    /// The bytes of some values. Elements that no kernel wrote are NaN.
    fn of(&mut self, graph: &Graph, nodes: impl Iterator<Item = NodeId> + Clone) -> Vec<&[u8]> {
        for node in nodes.clone() {
            self.bytes.entry(node).or_insert_with(|| vec![0xff; graph.node(node).bytes()]);
        }
        nodes.map(|node| self.bytes[&node].as_slice()).collect()
    }

    fn set(&mut self, node: NodeId, bytes: Vec<u8>) {
        self.bytes.insert(node, bytes);
    }

    fn tensor(&self, graph: &Graph, node: NodeId) -> Result<Tensor, Error> {
        let of = graph.node(node);
        let unwritten = vec![0xff; of.bytes()];
        Tensor::from_bytes(of.dtype, of.shape.clone(), self.bytes.get(&node).unwrap_or(&unwritten))
    }
}
