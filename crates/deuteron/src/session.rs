//! A graph planned and compiled once, run many times.

use std::sync::Arc;
use std::time::Duration;

use deuteron_codegen::{Launch, Source, render};
use deuteron_device::{Device, Executable, Inputs, Job, Kernel, Launching, Place, Step};
use deuteron_graph::{Graph, NodeId, Op};
use deuteron_plan::{Layout, Plan, Strategy, plan};

use crate::engine::Engine;
use crate::error::Error;
use crate::tensor::Tensor;

/// A compiled graph. Running it allocates nothing.
pub struct Session {
    graph: Graph,
    plan: Plan,
    layouts: Vec<Layout>,
    kernels: Vec<Arc<Kernel>>,
    executable: Box<dyn Executable>,
    times: Vec<Duration>,
    launching: Launching,
}

impl Session {
    /// Plans and compiles a graph whose inputs will be contiguous.
    pub fn new(engine: &Engine, graph: &Graph, strategy: Strategy) -> Result<Session, Error> {
        let layouts: Vec<Layout> =
            graph.inputs().iter().map(|&input| Layout::contiguous(&graph.node(input).shape)).collect();
        Session::with_layouts(engine, graph, strategy, &layouts)
    }

    /// The whole path, top to bottom: graph to plan, plan to sources, sources to the device.
    pub fn with_layouts(
        engine: &Engine,
        graph: &Graph,
        strategy: Strategy,
        layouts: &[Layout],
    ) -> Result<Session, Error> {
        let device = engine.device();
        refuse_opaque(graph)?;
        let plan = plan(graph, device.target(), strategy, layouts)?;
        let rendered = plan.groups.iter().map(|group| render(&group.draft(graph, &plan.placement), device.backend()));
        let rendered = rendered.collect();
        Session::of(engine, graph, plan, rendered, layouts)
    }

    /// A plan with a source and a launch for each of its groups.
    pub(crate) fn of(
        engine: &Engine,
        graph: &Graph,
        plan: Plan,
        rendered: Vec<(Source, Launch)>,
        layouts: &[Layout],
    ) -> Result<Session, Error> {
        let device = engine.device();
        let (kernels, job) = compile(device, graph, &plan, rendered)?;
        let executable = device.load(job)?;
        let times = vec![Duration::ZERO; plan.groups.len()];
        Ok(Session {
            graph: graph.clone(),
            plan,
            layouts: layouts.to_vec(),
            kernels,
            executable,
            times,
            launching: Launching::Eager,
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

    /// Runs the graph. Inputs are in the order of [`Graph::inputs`]; results are read with [`Session::output`].
    pub fn run(&mut self, inputs: &[&Tensor]) -> Result<(), Error> {
        self.check(inputs)?;
        Ok(self.executable.run(&|index| inputs[index].memory(), self.launching)?)
    }

    /// Runs the graph and measures each kernel.
    pub fn run_timed(&mut self, inputs: &[&Tensor]) -> Result<&[Duration], Error> {
        self.check(inputs)?;
        self.executable.run_timed(&|index| inputs[index].memory(), &mut self.times)?;
        Ok(&self.times)
    }

    /// A copy of an output of the last run.
    pub fn output(&self, index: usize) -> Result<Tensor, Error> {
        let outputs = self.graph.outputs();
        let output = outputs.get(index).ok_or(Error::OutputIndex { outputs: outputs.len(), index })?;
        let node = self.graph.node(output.node);
        let slot = output_nodes(&self.graph).iter().position(|&id| id == output.node).unwrap_or(0);
        Tensor::read(node.dtype, node.shape.clone(), |bytes| Ok(self.executable.read(slot, bytes)?))
    }

    /// Fills outputs and intermediates with NaN, so that what the next run does not write shows.
    pub fn poison(&mut self) -> Result<(), Error> {
        Ok(self.executable.poison()?)
    }

    /// How later runs start their kernels: one by one, or from a recording of all.
    pub fn set_launching(&mut self, launching: Launching) {
        self.launching = launching;
    }

    /// The time of one run as the device sees it, `runs` of them back to back over rotating sets of inputs.
    pub fn time(&mut self, sets: &[Vec<Tensor>], runs: usize, launching: Launching) -> Result<Duration, Error> {
        for set in sets {
            self.check(&set.iter().collect::<Vec<_>>())?;
        }
        let memory = sets.iter().map(|set| move |index: usize| set[index].memory());
        let memory: Vec<_> = memory.collect();
        let inputs: Vec<Inputs> = memory.iter().map(|set| set as Inputs).collect();
        Ok(self.executable.time(&inputs, runs, launching)?)
    }

    /// Its compiled kernels, one a group of the plan.
    pub fn kernels(&self) -> &[Arc<Kernel>] {
        &self.kernels
    }

    /// Registers a thread of its kernels, the most of them; none on a device without such a number.
    pub fn registers(&self) -> Option<u32> {
        self.kernels.iter().flat_map(|kernel| kernel.usage()).map(|entry| entry.registers).max()
    }

    fn check(&self, inputs: &[&Tensor]) -> Result<(), Error> {
        let expected = self.graph.inputs();
        if inputs.len() != expected.len() {
            let names: Vec<String> = expected.iter().map(|&id| self.graph.label(id)).collect();
            let (graph, names) = (self.graph.name().to_string(), names.join(", "));
            return Err(Error::InputCount { graph, expected: expected.len(), names, got: inputs.len() });
        }
        for ((&id, tensor), layout) in expected.iter().zip(inputs).zip(&self.layouts) {
            let dtype = self.graph.node(id).dtype;
            if tensor.dtype() != dtype || tensor.layout() != layout {
                let describe = |dtype, layout: &Layout| {
                    let strides =
                        if layout.is_contiguous() { String::new() } else { format!(", strides {:?}", layout.strides) };
                    format!("{dtype}{}{strides}", layout.shape)
                };
                let (expected, got) = (describe(dtype, layout), describe(tensor.dtype(), tensor.layout()));
                return Err(Error::Input { name: self.graph.label(id), expected, got });
            }
        }
        Ok(())
    }
}

/// Compiles the sources of a plan and makes a job of them.
pub(crate) fn compile(
    device: &dyn Device,
    graph: &Graph,
    plan: &Plan,
    rendered: Vec<(Source, Launch)>,
) -> Result<(Vec<Arc<Kernel>>, Job), Error> {
    let (sources, launches): (Vec<Source>, Vec<Launch>) = rendered.into_iter().unzip();
    let kernels = device.compile(sources)?;
    let steps = kernels.iter().zip(launches).map(|(kernel, launch)| {
        let places = places(graph, plan, &launch);
        Step { kernel: kernel.clone(), launch, places }
    });
    let job = Job {
        inputs: graph.inputs().len(),
        outputs: output_nodes(graph).iter().map(|&node| graph.node(node).bytes()).collect(),
        arena: plan.arena.bytes,
        steps: steps.collect(),
    };
    Ok((kernels, job))
}

/// What is only described cannot be run.
pub(crate) fn refuse_opaque(graph: &Graph) -> Result<(), Error> {
    let opaque = graph.nodes().iter().find_map(|node| match &node.op {
        Op::Opaque(opaque) => Some(opaque.name.clone()),
        _ => None,
    });
    opaque.map_or(Ok(()), |name| Err(Error::Opaque(name)))
}

/// The nodes that are handed out, each once.
fn output_nodes(graph: &Graph) -> Vec<NodeId> {
    let mut nodes: Vec<NodeId> = Vec::new();
    for output in graph.outputs() {
        if !nodes.contains(&output.node) {
            nodes.push(output.node);
        }
    }
    nodes
}

fn places(graph: &Graph, plan: &Plan, launch: &Launch) -> Vec<Place> {
    let outputs = output_nodes(graph);
    launch.args.iter().map(|arg| place(graph, plan, &outputs, arg.base)).collect()
}

fn place(graph: &Graph, plan: &Plan, outputs: &[NodeId], base: NodeId) -> Place {
    if let Some(position) = graph.inputs().iter().position(|&input| input == base) {
        return Place::Input(position);
    }
    if let Some(position) = outputs.iter().position(|&output| output == base) {
        return Place::Output(position);
    }
    // The planner gives every stored value that is no output a slot; a value without one is an error the device reports.
    let slot = plan.arena.slot(base);
    slot.map_or(Place::Arena { offset: 0, bytes: 0 }, |slot| Place::Arena { offset: slot.offset, bytes: slot.bytes })
}
