//! A graph planned and compiled once, run many times.

use std::sync::Arc;
use std::time::Duration;

use deuteron_codegen::{Geometry, Launch, Source, render};
use deuteron_device::{
    Device, Executable, Inputs, Job, Kernel, Launching, Lending, Memory, Place, Recorded, States, Step,
};
use deuteron_graph::{Graph, NodeId, Op};
use deuteron_plan::{Layout, Pin, Plan, Strategy, plan, plan_pinned};

use crate::engine::Engine;
use crate::error::Error;
use crate::tensor::Tensor;

/// A compiled graph. Running it allocates nothing.
pub struct Session {
    graph: Graph,
    plan: Plan,
    /// of the inputs that are no states, then of the states
    layouts: [Vec<Layout>; 2],
    kernels: Vec<Arc<Kernel>>,
    executable: Box<dyn Executable>,
    times: Vec<Duration>,
    launching: Launching,
    homes: Homes,
}

impl Session {
    /// Plans and compiles a graph whose inputs will be contiguous.
    pub fn new(engine: &Engine, graph: &Graph, strategy: Strategy) -> Result<Session, Error> {
        Session::with_layouts(engine, graph, strategy, &contiguous(graph))
    }

    /// The whole path, top to bottom: graph to plan, plan to sources, sources to the device.
    pub fn with_layouts(
        engine: &Engine,
        graph: &Graph,
        strategy: Strategy,
        layouts: &[Layout],
    ) -> Result<Session, Error> {
        Session::with(engine, graph, strategy, layouts, &[])
    }

    /// Plans and compiles a graph of which some inputs are states: memory of the caller that [`Session::run_with`] writes to
    /// and that keeps what was written. A state is read by one append alone, whose result is an output; the append then
    /// writes the new rows and nothing else, and whoever reads its result reads the state.
    pub fn with_states(
        engine: &Engine,
        graph: &Graph,
        strategy: Strategy,
        states: &[NodeId],
    ) -> Result<Session, Error> {
        Session::with(engine, graph, strategy, &contiguous(graph), states)
    }

    /// The fused plan of a graph with fusions forced or forbidden. An error says which of them cannot be kept to, and why.
    pub fn with_pins(engine: &Engine, graph: &Graph, pins: &[Pin]) -> Result<Session, Error> {
        refuse_opaque(graph)?;
        let plan = plan_pinned(graph, engine.device().target(), Strategy::Fused, &[], pins)?;
        Session::rendered(engine, graph, plan, &contiguous(graph), &[])
    }

    /// The same, with a layout for each input; those of states are contiguous.
    pub fn with(
        engine: &Engine,
        graph: &Graph,
        strategy: Strategy,
        layouts: &[Layout],
        states: &[NodeId],
    ) -> Result<Session, Error> {
        refuse_opaque(graph)?;
        let plan = plan(graph, engine.device().target(), strategy, layouts)?;
        Session::rendered(engine, graph, plan, layouts, states)
    }

    /// A plan whose kernels are generated as its device does.
    fn rendered(
        engine: &Engine,
        graph: &Graph,
        plan: Plan,
        layouts: &[Layout],
        states: &[NodeId],
    ) -> Result<Session, Error> {
        let backend = engine.device().backend();
        let sources = plan.groups.iter().map(|group| render(&group.draft(graph, &plan.placement), backend));
        let sources = sources.collect::<Result<_, _>>()?;
        Session::of(engine, graph, plan, sources, layouts, states)
    }

    /// A plan with a source and a launch for each of its groups.
    pub(crate) fn of(
        engine: &Engine,
        graph: &Graph,
        plan: Plan,
        rendered: Vec<(Source, Launch)>,
        layouts: &[Layout],
        states: &[NodeId],
    ) -> Result<Session, Error> {
        let device = engine.device();
        let homes = Homes::new(graph, states)?;
        let (kernels, job) = compile(device, graph, &plan, rendered, &homes)?;
        let executable = device.load(job)?;
        let data = graph.inputs().iter().zip(layouts).filter(|(input, _)| homes.inputs.contains(input));
        let kept = states.iter().map(|&state| Layout::contiguous(&graph.node(state).shape));
        let layouts = [data.map(|(_, layout)| layout.clone()).collect(), kept.collect()];
        let times = vec![Duration::ZERO; plan.groups.len()];
        Ok(Session {
            graph: graph.clone(),
            plan,
            layouts,
            kernels,
            executable,
            times,
            launching: Launching::Eager,
            homes,
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
        self.run_with(inputs, &mut [])
    }

    /// Runs the graph on states, in the order in which they were declared, and writes to them. They are contiguous, where the
    /// engine's kernels write, and share their memory with no other tensor. `inputs` are the others.
    pub fn run_with(&mut self, inputs: &[&Tensor], states: &mut [Tensor]) -> Result<(), Error> {
        self.check(inputs, states)?;
        let input = |index: usize| inputs[index].memory();
        Ok(self.executable.run(&input, &mut Owned(states), self.launching)?)
    }

    /// Runs the graph on memory that someone else owns: inputs that are no states, in order; states as they were declared; and a place
    /// for each of [`Session::results`]. Layouts are those that the session was made for. See [`Executable::run_lent`].
    pub fn run_lent(&mut self, lending: &Lending<'_>) -> Result<(), Error> {
        Ok(self.executable.run_lent(lending)?)
    }

    /// Whether a recording of someone else uses its memory. See [`Executable::is_kept_by_others`].
    pub fn is_kept_by_others(&self) -> bool {
        self.executable.is_kept_by_others()
    }

    /// The values that it hands out, each once: its outputs that are no states.
    pub fn results(&self) -> &[NodeId] {
        &self.homes.outputs
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

    /// A copy of an output of the last run.
    pub fn output(&self, index: usize) -> Result<Tensor, Error> {
        let outputs = self.graph.outputs();
        let output = outputs.get(index).ok_or(Error::OutputIndex { outputs: outputs.len(), index })?;
        let node = self.graph.node(output.node);
        let slot = self.homes.outputs.iter().position(|&id| id == output.node);
        let slot = slot.ok_or_else(|| Error::OutputIsState(output.name.clone()))?;
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

    /// Its compiled kernels, one a group of the plan.
    pub fn kernels(&self) -> &[Arc<Kernel>] {
        &self.kernels
    }

    /// Registers a thread of its kernels, the most of them; none on a device without such a number.
    pub fn registers(&self) -> Option<u32> {
        self.kernels.iter().flat_map(|kernel| kernel.usage()).map(|entry| entry.registers).max()
    }

    /// What the driver counts in the recording of one run: launches of kernels, and all else. None where there is no recording: on a
    /// CPU, and before a run from one. The first run of all is not from one ([`Session::set_launching`]); those of
    /// [`Session::time`] are.
    pub fn recorded_launches(&self) -> Result<Option<Recorded>, Error> {
        Ok(self.executable.recorded()?)
    }

    fn check(&self, inputs: &[&Tensor], states: &mut [Tensor]) -> Result<(), Error> {
        let Homes { inputs: expected, states: kept, .. } = &self.homes;
        let graph = || self.graph.name().to_string();
        if states.len() != kept.len() {
            return Err(Error::StateCount { graph: graph(), expected: kept.len(), got: states.len() });
        }
        if inputs.len() != expected.len() {
            let names: Vec<String> = expected.iter().map(|&id| self.graph.label(id)).collect();
            let (expected, names) = (expected.len(), names.join(", "));
            return Err(Error::InputCount { graph: graph(), expected, names, got: inputs.len() });
        }
        for ((&id, tensor), layout) in expected.iter().zip(inputs).zip(&self.layouts[0]) {
            self.check_tensor(id, tensor, layout)?;
        }
        for ((&[id, _], state), layout) in kept.iter().zip(states).zip(&self.layouts[1]) {
            self.check_tensor(id, state, layout)?;
            if state.memory_mut().is_none() {
                return Err(Error::SharedState(self.graph.label(id)));
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

/// States that share their memory with nobody.
struct Owned<'a>(&'a mut [Tensor]);

impl States for Owned<'_> {
    fn count(&self) -> usize {
        self.0.len()
    }

    fn state(&mut self, index: usize) -> Option<&mut Memory> {
        self.0.get_mut(index)?.memory_mut()
    }
}

fn contiguous(graph: &Graph) -> Vec<Layout> {
    graph.inputs().iter().map(|&input| Layout::contiguous(&graph.node(input).shape)).collect()
}

/// Compiles the sources of a plan and makes a job of them.
pub(crate) fn compile(
    device: &dyn Device,
    graph: &Graph,
    plan: &Plan,
    rendered: Vec<(Source, Launch)>,
    homes: &Homes,
) -> Result<(Vec<Arc<Kernel>>, Job), Error> {
    let (sources, launches): (Vec<Source>, Vec<Launch>) = rendered.into_iter().unzip();
    let kernels = device.compile(sources)?;
    let steps = kernels.iter().zip(launches).map(|(kernel, mut launch)| {
        let places: Vec<Place> = launch.args.iter().map(|arg| homes.place(plan, arg.base)).collect();
        if let Geometry::Append(shape) = &mut launch.geometry {
            shape.in_place = matches!(places.last(), Some(Place::State(_)));
        }
        Step { kernel: kernel.clone(), launch, places }
    });
    let bytes = |node: &NodeId| graph.node(*node).bytes();
    let job = Job {
        inputs: homes.inputs.len(),
        states: homes.states.iter().map(|[state, _]| bytes(state)).collect(),
        outputs: homes.outputs.iter().map(bytes).collect(),
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

/// Which value of a graph lives where.
pub(crate) struct Homes {
    /// handed in, and no states
    inputs: Vec<NodeId>,
    /// states, and what the append of each makes of it
    states: Vec<[NodeId; 2]>,
    /// handed out, each once, and no states
    outputs: Vec<NodeId>,
}

impl Homes {
    pub(crate) fn new(graph: &Graph, states: &[NodeId]) -> Result<Homes, Error> {
        let results = states.iter().enumerate().map(|(index, &state)| {
            let twice = states[..index].contains(&state);
            let result = appended(graph, state).filter(|_| !twice);
            let known = graph.inputs().contains(&state);
            let name = if known { graph.label(state) } else { format!("%{}", state.index()) };
            result.map(|result| [state, result]).ok_or(Error::NoState(name))
        });
        let states = results.collect::<Result<Vec<[NodeId; 2]>, Error>>()?;
        let mut outputs: Vec<NodeId> = Vec::new();
        for output in graph.outputs() {
            if !outputs.contains(&output.node) && !states.iter().any(|[_, result]| *result == output.node) {
                outputs.push(output.node);
            }
        }
        let inputs = graph.inputs().iter().copied();
        let inputs = inputs.filter(|input| !states.iter().any(|[state, _]| state == input)).collect();
        Ok(Homes { inputs, states, outputs })
    }

    fn place(&self, plan: &Plan, base: NodeId) -> Place {
        let of = |nodes: &[NodeId]| nodes.iter().position(|&node| node == base);
        if let Some(position) = of(&self.inputs) {
            return Place::Input(position);
        }
        if let Some(position) = self.states.iter().position(|pair| pair.contains(&base)) {
            return Place::State(position);
        }
        if let Some(position) = of(&self.outputs) {
            return Place::Output(position);
        }
        // The planner gives every stored value that is no output a slot; a value without one is an error the device
        // reports.
        let slot = plan.arena.slot(base);
        slot.map_or(Place::Arena { offset: 0, bytes: 0 }, |slot| Place::Arena {
            offset: slot.offset,
            bytes: slot.bytes,
        })
    }
}

/// What the one append that reads an input makes of it, if nothing else reads it and the result is handed out.
fn appended(graph: &Graph, state: NodeId) -> Option<NodeId> {
    let handed_out = |id: NodeId| graph.outputs().iter().any(|output| output.node == id);
    let mut readers = graph.ids().filter(|&id| graph.node(id).inputs.contains(&state));
    let reader = readers.next().filter(|_| graph.inputs().contains(&state) && !handed_out(state))?;
    let node = graph.node(reader);
    let alone = readers.next().is_none() && node.inputs[0] == state && !node.inputs[1..].contains(&state);
    (matches!(node.op, Op::Append { .. }) && alone && handed_out(reader)).then_some(reader)
}
