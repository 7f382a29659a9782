//! A graph planned and compiled once, run many times.

use std::sync::Arc;
use std::time::Duration;

use deuteron_codegen::{Kernel, Request};
use deuteron_device::{
    BorrowedMemory, CompiledKernel, Device, Executable, Inputs, Job, Launching, Memory, Moment, Place, Recorded,
    States, Step,
};
use deuteron_graph::{Call, Callee, Composite, Graph, NodeId, Op};
use deuteron_kernels::{render, render_copy, render_joined};
use deuteron_plan::{Layout, Plan, plan_pinned};

mod options;
mod storage;

pub use options::SessionOptions;
pub(crate) use storage::Storage;

use crate::engine::Engine;
use crate::error::Error;
use crate::seed::is_reshape_of;
use crate::tensor::Tensor;

/// A compiled graph. Running it allocates nothing.
pub struct Session {
    graph: Graph,
    plan: Plan,
    /// of the inputs that are not states
    layouts: Vec<Layout>,
    /// of the states: contiguous
    state_layouts: Vec<Layout>,
    kernels: Vec<Arc<CompiledKernel>>,
    executable: Box<dyn Executable>,
    times: Vec<Duration>,
    launching: Launching,
    storage: Storage,
    bytes: usize,
    targets: Vec<Targets>,
}

/// An input that has the targets of a loss. Kernels that make the loss from chunks of logits compare targets with columns, so one that is no
/// column would only be missing from the loss.
struct Targets {
    /// its position among the inputs that are not states
    input: usize,
    classes: usize,
    ignored: Option<i32>,
}

impl Session {
    /// The whole path, top to bottom: graph to plan, plan to sources, sources to the device. A [`Strategy`](deuteron_plan::Strategy)
    /// is enough where inputs are contiguous and nothing is kept.
    pub fn new(engine: &Engine, graph: &Graph, options: impl Into<SessionOptions>) -> Result<Session, Error> {
        let (options, device) = (options.into(), engine.device());
        refuse_opaque(graph)?;
        let layouts = options.check(graph)?;
        let mut storage = Storage::new(graph, &options)?;
        let plan = plan_pinned(graph, device.target(), options.strategy, &layouts, &options.pins)?;
        let in_place = storage.last_reads(&plan);
        let drafts = plan.groups.iter().map(|group| group.draft(graph, &plan.placement));
        let requests: Vec<Request> = drafts.map(|group| Request { group, in_place: &in_place }).collect();
        let mut rendered: Vec<Kernel> = if options.joined {
            let accesses = storage.accesses(&plan);
            render_joined(&requests, device.backend(), &|one, other| accesses[one].are_apart(&accesses[other]))?
        } else {
            requests.iter().map(|&request| render(request, device.backend())).collect::<Result<_, _>>()?
        };
        rendered.iter_mut().zip(options.kernels).for_each(|(generated, given)| *generated = given);
        storage.settle(graph, &plan, &rendered);
        rendered.extend(storage.copied().map(|[from, to]| render_copy(graph, from, to, device.backend())));
        let (kernels, job) = compile(device, graph, &plan, rendered, &storage)?;
        let bytes = bytes(&job);
        let executable = device.load(job)?;
        let data = graph.inputs().iter().zip(layouts).filter(|(input, _)| storage.inputs.contains(input));
        let layouts: Vec<Layout> = data.map(|(_, layout)| layout).collect();
        Ok(Session {
            graph: graph.clone(),
            times: vec![Duration::ZERO; kernels.len()],
            plan,
            state_layouts: storage
                .states
                .iter()
                .map(|state| Layout::contiguous(&graph.node(state.node).shape))
                .collect(),
            kernels,
            executable,
            launching: Launching::Eager,
            targets: targets(graph, &storage.inputs, &layouts),
            layouts,
            storage,
            bytes,
        })
    }

    /// The graph it runs.
    pub fn graph(&self) -> &Graph {
        &self.graph
    }

    /// The plan it runs by.
    pub fn plan(&self) -> &Plan {
        &self.plan
    }

    /// Bytes of memory that it holds besides inputs and states: results, intermediates, and workspaces of its kernels.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Runs the graph. Inputs are in the order of [`Graph::inputs`]; results are read with [`Session::output`].
    pub fn run(&mut self, inputs: &[&Tensor]) -> Result<(), Error> {
        self.run_with(inputs, &mut [])
    }

    /// Runs the graph on states, in the order of [`SessionOptions::states`] and then of [`SessionOptions::update`], and writes to them. They are contiguous, where the
    /// engine's kernels write, and share their memory with no other tensor. `inputs` are the others.
    pub fn run_with(&mut self, inputs: &[&Tensor], states: &mut [Tensor]) -> Result<(), Error> {
        self.check(inputs, states)?;
        let input = |index: usize| inputs[index].memory();
        Ok(self.executable.run(&input, &mut Owned(states), self.launching)?)
    }

    /// Runs the graph on memory of the caller: inputs that are not states, in order; states as they were declared; and memory for each
    /// of [`Session::results`]. Layouts are those that the session was made for. See [`Executable::run_borrowed`].
    pub fn run_borrowed(&mut self, borrowed: BorrowedMemory<'_>) -> Result<(), Error> {
        Ok(self.executable.run_borrowed(borrowed)?)
    }

    /// Whether a caller captured a run in its own CUDA graph. See [`Executable::is_captured`].
    pub fn is_captured(&self) -> bool {
        self.executable.is_captured()
    }

    /// Its results: the outputs that are not states, each once.
    pub fn results(&self) -> &[NodeId] {
        &self.storage.outputs
    }

    /// Runs the graph and measures each kernel.
    pub fn run_timed(&mut self, inputs: &[&Tensor]) -> Result<&[Duration], Error> {
        self.run_timed_with(inputs, &mut [])
    }

    /// The same on states.
    pub fn run_timed_with(&mut self, inputs: &[&Tensor], states: &mut [Tensor]) -> Result<&[Duration], Error> {
        self.check(inputs, states)?;
        let input = |index: usize| inputs[index].memory();
        self.executable.run_timed(&input, &mut Owned(states), &mut self.times)?;
        Ok(&self.times)
    }

    /// Runs the graph on a CPU and calls `watch` before and after each kernel.
    pub fn run_watched(&mut self, inputs: &[&Tensor], watch: &mut dyn FnMut(Moment)) -> Result<(), Error> {
        self.check(inputs, &mut [])?;
        let input = |index: usize| inputs[index].memory();
        Ok(self.executable.run_watched(&input, &mut Owned(&mut []), watch)?)
    }

    /// A copy of an output of the last run.
    pub fn output(&self, index: usize) -> Result<Tensor, Error> {
        let outputs = self.graph.outputs();
        let output = outputs.get(index).ok_or(Error::OutputIndex { outputs: outputs.len(), index })?;
        let node = self.graph.node(output.node);
        let slot = self.storage.outputs.iter().position(|&id| id == output.node);
        let slot = slot.ok_or_else(|| Error::OutputIsState(output.name.clone()))?;
        Tensor::read(node.dtype, node.shape.clone(), |bytes| Ok(self.executable.read(slot, bytes)?))
    }

    /// Fills outputs and intermediates with NaN, to reveal elements that the next run does not write.
    pub fn poison(&mut self) -> Result<(), Error> {
        Ok(self.executable.poison()?)
    }

    /// How later runs start their kernels: one by one, or as one CUDA graph.
    pub fn set_launching(&mut self, launching: Launching) {
        self.launching = launching;
    }

    /// The time of one run measured by the device, for `runs` runs back to back over rotating sets of inputs.
    pub fn time(&mut self, sets: &[Vec<Tensor>], runs: usize, launching: Launching) -> Result<Duration, Error> {
        self.time_with(sets, &mut [], runs, launching)
    }

    /// The same, all on the same states.
    pub fn time_with(
        &mut self,
        sets: &[Vec<Tensor>],
        states: &mut [Tensor],
        runs: usize,
        launching: Launching,
    ) -> Result<Duration, Error> {
        for set in sets {
            self.check(&set.iter().collect::<Vec<_>>(), states)?;
        }
        let memory = sets.iter().map(|set| move |index: usize| set[index].memory());
        let memory: Vec<_> = memory.collect();
        let inputs: Vec<Inputs> = memory.iter().map(|set| set as Inputs).collect();
        Ok(self.executable.time(&inputs, &mut Owned(states), runs, launching)?)
    }

    /// Its compiled kernels, one for each group of the plan unless they are [joined](SessionOptions::joined), then a copy for each state that is not written in place.
    pub fn kernels(&self) -> &[Arc<CompiledKernel>] {
        &self.kernels
    }

    /// The largest number of registers per thread of its kernels; none on a device without such a number.
    pub fn registers(&self) -> Option<u32> {
        self.kernels.iter().flat_map(|kernel| kernel.usage()).map(|entry| entry.registers).max()
    }

    /// Kernel launches and other nodes in the CUDA graph of one run, as the driver counts them. None without a CUDA graph: on a
    /// CPU, and before a run from one. The very first run does not use one ([`Session::set_launching`]); those of
    /// [`Session::time`] are.
    pub fn recorded_launches(&self) -> Result<Option<Recorded>, Error> {
        Ok(self.executable.recorded()?)
    }

    fn check(&self, inputs: &[&Tensor], states: &mut [Tensor]) -> Result<(), Error> {
        let Storage { inputs: expected, states: kept, .. } = &self.storage;
        let graph = || self.graph.name().to_string();
        if states.len() != kept.len() {
            return Err(Error::StateCount { graph: graph(), expected: kept.len(), got: states.len() });
        }
        if inputs.len() != expected.len() {
            let names: Vec<String> = expected.iter().map(|&id| self.graph.label(id)).collect();
            let (expected, names) = (expected.len(), names.join(", "));
            return Err(Error::InputCount { graph: graph(), expected, names, got: inputs.len() });
        }
        for ((&id, tensor), layout) in expected.iter().zip(inputs).zip(&self.layouts) {
            self.check_tensor(id, tensor, layout)?;
        }
        self.check_targets(inputs)?;
        for ((kept, state), layout) in kept.iter().zip(states).zip(&self.state_layouts) {
            self.check_tensor(kept.node, state, layout)?;
            if state.memory_mut().is_none() {
                return Err(Error::SharedState(self.graph.label(kept.node)));
            }
        }
        Ok(())
    }

    /// Targets on the host must be classes. Those on a device are checked by its kernels, as far as these can.
    fn check_targets(&self, inputs: &[&Tensor]) -> Result<(), Error> {
        for &Targets { input, classes, ignored } in &self.targets {
            let Some(mut given) = inputs[input].host_integers() else { continue };
            let is_class = |target: i32| usize::try_from(target).is_ok_and(|class| class < classes);
            let wrong =
                given.find_map(|(row, target)| (!is_class(target) && Some(target) != ignored).then_some((row, target)));
            if let Some((row, got)) = wrong {
                let name = self.graph.label(self.storage.inputs[input]);
                return Err(Error::Target { name, last: classes.saturating_sub(1), ignored, row, got });
            }
        }
        Ok(())
    }

    fn check_tensor(&self, id: NodeId, tensor: &Tensor, layout: &Layout) -> Result<(), Error> {
        let dtype = self.graph.node(id).dtype;
        if tensor.dtype() == dtype && tensor.layout() == layout {
            return Ok(());
        }
        let describe = |dtype, layout: &Layout| {
            let strides =
                if layout.is_contiguous() { String::new() } else { format!(", strides {:?}", layout.strides) };
            format!("{dtype}{}{strides}", layout.shape)
        };
        let (expected, got) = (describe(dtype, layout), describe(tensor.dtype(), tensor.layout()));
        Err(Error::Input { name: self.graph.label(id), expected, got })
    }
}

/// The contiguous inputs that are targets of losses, as they are or in another shape.
fn targets(graph: &Graph, inputs: &[NodeId], layouts: &[Layout]) -> Vec<Targets> {
    let of_call = |call: &Call| {
        let Callee::Composite(Composite::LinearCrossEntropy { ignored, .. }) = call.callee else { return None };
        let (weight, targets) = (call.inputs.get(1)?, call.inputs.get(2)?);
        let input = inputs.iter().position(|&id| id == *targets || is_reshape_of(graph, *targets, id))?;
        layouts[input].is_contiguous().then_some(Targets { input, classes: graph.node(*weight).shape[0], ignored })
    };
    graph.calls().iter().filter_map(of_call).collect()
}

/// States that share memory with no other tensor.
struct Owned<'a>(&'a mut [Tensor]);

impl States for Owned<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn each<'a>(&'a mut self, take: &mut dyn FnMut(Option<&'a mut Memory>)) {
        self.0.iter_mut().for_each(|state| take(state.memory_mut()));
    }
}

/// Compiles the sources of a plan into a job.
pub(crate) fn compile(
    device: &dyn Device,
    graph: &Graph,
    plan: &Plan,
    rendered: Vec<Kernel>,
    storage: &Storage,
) -> Result<(Vec<Arc<CompiledKernel>>, Job), Error> {
    let (sources, launches): (Vec<_>, Vec<_>) =
        rendered.into_iter().map(|Kernel { source, launch }| (source, launch)).unzip();
    let kernels = device.compile(sources)?;
    let steps = kernels.iter().zip(launches).map(|(kernel, launch)| {
        let places: Vec<Place> = launch.arguments().iter().map(|argument| storage.place(plan, argument.base)).collect();
        Step { kernel: kernel.clone(), launch, places }
    });
    let bytes = |node: &NodeId| graph.node(*node).bytes();
    let job = Job {
        inputs: storage.inputs.len(),
        states: storage.states.iter().map(|state| bytes(&state.node)).collect(),
        outputs: storage.outputs.iter().map(bytes).collect(),
        arena: storage.arena(plan),
        steps: steps.collect(),
    };
    Ok((kernels, job))
}

/// Bytes of memory that a job owns.
fn bytes(job: &Job) -> usize {
    let grids = || job.steps.iter().filter_map(|step| step.launch.grids());
    // Kernels of one stream run one after another and share their scratch memory.
    let scratch = grids().map(|grids| grids.workspace).max().unwrap_or(0);
    let persistent: usize = grids().map(|grids| grids.persistent).sum();
    job.arena + job.outputs.iter().sum::<usize>() + scratch + persistent
}

/// Opaque operations cannot be run.
pub(crate) fn refuse_opaque(graph: &Graph) -> Result<(), Error> {
    let opaque = graph.nodes().iter().find_map(|node| match &node.op {
        Op::Opaque(opaque) => Some(opaque.name.clone()),
        _ => None,
    });
    opaque.map_or(Ok(()), |name| Err(Error::Opaque(name)))
}
