//! Programs: ops of the catalogue and graphs of users, compiled for the operands they meet.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use deuteron::catalog::OperandType;
use deuteron::training::Training;
use deuteron::{Error, FusedOp, Graph, Layout, NodeId, Session, SessionOptions, Shape, Strategy};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyTuple;

use crate::engines::{self, Place};
use crate::errors::{self, bad_type, bad_value, failed};
use crate::operand::{Element, Transposition};
use crate::repeated::{self, Last, Repeated};
use crate::run::{self, Given};
use crate::torch::{self, Manner};

/// What Python does where a gradient may be asked for.
static DIFFERENTIATE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// What Python does with operands that are not all plain tensors of torch.
static GENERAL: PyOnceLock<Py<PyAny>> = PyOnceLock::new();

/// Calls kept of one program, at most; beyond, those are dropped that are not running and in no CUDA graph.
const CALLS: usize = 256;

/// Compiled programs between two times that free memory is returned: that takes some milliseconds, as compiling one does.
const TRIMMED: usize = 16;

/// What runs as fused kernels.
#[pyclass(frozen, weakref, module = "deuteron._native")]
pub(crate) struct Program {
    text: String,
    source: Source,
    states: Vec<String>,
    /// inputs of a graph, and the outputs that are their new values
    updates: Vec<(String, String)>,
    /// which operands are states, of either kind
    state_positions: Vec<usize>,
    operands: Vec<String>,
    /// what a kernel can do with each operand
    transpositions: Vec<Transposition>,
    outputs: Vec<String>,
    calls: Mutex<Calls>,
    last: Mutex<Option<Arc<Last>>>,
}

enum Source {
    Op(FusedOp),
    Graph(Box<Training>),
}

/// What was compiled since the process began.
#[derive(Default)]
struct Calls {
    generation: u64,
    known: HashMap<(What, Vec<u64>), Arc<Call>>,
}

/// What is asked of a program.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum What {
    Forward,
    /// forward, and what backward takes again
    Saving,
    /// the gradients of these operands
    Backward(Vec<bool>),
}

/// A compiled call.
pub(crate) struct Call {
    pub work: Work,
    /// which of what is given each input of the work is
    pub inputs: Vec<usize>,
    /// the same for states
    pub states: Vec<usize>,
    /// type of each result
    pub results: Vec<(Element, Shape)>,
    /// which result each output is, or none: an output of forward, a gradient of an operand
    pub outputs: Vec<Option<usize>>,
    /// which outputs of forward backward takes again
    pub kept: Vec<usize>,
    /// whether its outputs are gradients of the operands
    pub gives_gradients: bool,
    /// sizes and strides of each result, as Python has them
    sizes: Vec<PyOnceLock<[Py<PyTuple>; 2]>>,
}

impl Call {
    /// Whether a recorded CUDA graph uses its memory.
    fn is_captured(&self) -> bool {
        match &self.work {
            Work::Session(session) => session.lock().unwrap_or_else(PoisonError::into_inner).is_captured(),
            Work::Reference(_) => false,
        }
    }

    /// Sizes and strides of a result.
    pub fn sizes<'py>(&self, py: Python<'py>, result: usize) -> PyResult<[Bound<'py, PyTuple>; 2]> {
        let sizes = self.sizes[result].get_or_try_init(py, || -> PyResult<_> {
            let shape = &self.results[result].1;
            Ok([PyTuple::new(py, shape.dims())?.unbind(), PyTuple::new(py, shape.strides())?.unbind()])
        });
        Ok(sizes?.each_ref().map(|numbers| numbers.bind(py).clone()))
    }
}

impl Drop for Program {
    /// Sessions of the process that this one was forked from are left alone: threads that are not here may have their locks.
    fn drop(&mut self) {
        let calls = self.calls.get_mut().unwrap_or_else(PoisonError::into_inner);
        if calls.generation != engines::generation() {
            std::mem::forget(std::mem::take(&mut calls.known));
        }
        let last = self.last.get_mut().unwrap_or_else(PoisonError::into_inner).take();
        forget_foreign(last);
    }
}

/// Drops a remembered call, unless it is of the process that this one was forked from.
fn forget_foreign(last: Option<Arc<Last>>) {
    if last.as_ref().is_some_and(|last| last.generation != engines::generation()) {
        std::mem::forget(last);
    }
}

/// How a call is done.
pub(crate) enum Work {
    Session(Box<Mutex<Session>>),
    /// in `f64`, by the interpreter
    Reference(Box<Graph>),
}

#[pymethods]
impl Program {
    #[new]
    #[pyo3(signature = (text, states = Vec::new(), updates = Vec::new()))]
    fn new(text: &str, states: Vec<String>, updates: Vec<(String, String)>) -> PyResult<Program> {
        let first = text.split_whitespace().next().unwrap_or_default();
        // A graph has statements.
        let is_op = !text.contains('\n') && !text.contains(';') && !text.contains(" = ");
        let names = |names: &[&str]| names.iter().map(|name| name.to_string()).collect::<Vec<_>>();
        let kept: Vec<&String> = states.iter().chain(updates.iter().map(|(state, _)| state)).collect();
        let (source, operands, outputs) = if is_op {
            let op: FusedOp = text.parse().map_err(|error| errors::of(first, error))?;
            if let Some(state) = kept.first() {
                return Err(bad_value(format!(
                    "{first}: expected no states, as an op has none, got `{state}`; use a graph"
                )));
            }
            let outputs = names(&op.outputs());
            (Source::Op(op), names(&op.operands()), outputs)
        } else {
            let mut graph: Graph = text.parse().map_err(bad_value)?;
            if graph.name().is_empty() {
                graph.set_name("graph");
            }
            let operands: Vec<String> = graph.inputs().iter().map(|&input| graph.label(input)).collect();
            if let Some(unknown) = kept.iter().find(|state| !operands.contains(state)) {
                return Err(bad_value(format!(
                    "{}: expected states among {}, got `{unknown}`",
                    graph.name(),
                    operands.join(", ")
                )));
            }
            let mut seen = HashSet::new();
            if let Some(twice) = kept.iter().find(|state| !seen.insert(**state)) {
                return Err(bad_value(format!("{}: expected each state once, got `{twice}` twice", graph.name())));
            }
            let outputs: Vec<String> = graph.outputs().iter().map(|output| output.name.clone()).collect();
            if let Some((state, unknown)) = updates.iter().find(|(_, output)| !outputs.contains(output)) {
                return Err(bad_value(format!(
                    "{}: expected the new value of `{state}` among the outputs {}, got `{unknown}`",
                    graph.name(),
                    outputs.join(", ")
                )));
            }
            let training = if kept.is_empty() { Training::new(graph) } else { Ok(Training::plain(graph)) };
            let training = training.map_err(|error| errors::of("graph", error))?;
            (Source::Graph(Box::new(training)), operands, outputs)
        };
        let transposition = |operand: &String| match &source {
            Source::Op(op) if op.reads_transposed(operand) => Transposition::Allowed,
            _ => Transposition::Refused,
        };
        let transpositions = operands.iter().map(transposition).collect();
        let kept: HashSet<&String> = kept.into_iter().collect();
        let state_positions = (0..operands.len()).filter(|&at| kept.contains(&operands[at])).collect();
        Ok(Program {
            text: text.to_string(),
            source,
            states,
            updates,
            state_positions,
            operands,
            transpositions,
            outputs,
            calls: Mutex::default(),
            last: Mutex::default(),
        })
    }

    #[getter]
    pub fn name(&self) -> &str {
        match &self.source {
            Source::Op(op) => op.name(),
            Source::Graph(training) => training.forward().name(),
        }
    }

    #[getter]
    fn text(&self) -> &str {
        &self.text
    }

    #[getter]
    fn operands<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.operands)
    }

    #[getter]
    fn outputs<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.outputs)
    }

    #[getter]
    fn differentiable(&self) -> bool {
        match &self.source {
            Source::Op(op) => op.has_backward(),
            Source::Graph(_) => self.state_positions.is_empty(),
        }
    }

    /// Dtype and shape of each result; with `saving`, of all that forward hands out then, and which of those backward takes.
    #[pyo3(signature = (operands, saving = false))]
    #[allow(clippy::type_complexity)] // a tuple of Python's
    fn types<'py>(
        &self,
        py: Python<'py>,
        operands: Vec<(String, Vec<usize>)>,
        saving: bool,
    ) -> PyResult<(Vec<(&'static str, Bound<'py, PyTuple>)>, Vec<usize>)> {
        let types = self.given_types(&operands)?;
        let training = self.training(&types, &[])?;
        let saved = training.saving().map_err(|error| self.error(error))?;
        let (graph, kept) = if saving { (&saved.graph, saved.kept) } else { (training.forward(), Vec::new()) };
        let doubles = types.iter().any(|(element, _)| *element == Element::F64);
        let results = graph.outputs().iter().map(|output| {
            let node = graph.node(output.node);
            Ok((result_element(node.dtype, doubles).name(), PyTuple::new(py, node.shape.dims())?))
        });
        Ok((results.collect::<PyResult<_>>()?, kept))
    }

    /// Its graph for operands of these types in text form, and dtype and shape of each value in it.
    #[allow(clippy::type_complexity)] // a tuple of Python's
    fn graph<'py>(
        &self,
        py: Python<'py>,
        operands: Vec<(String, Vec<usize>)>,
    ) -> PyResult<(String, HashMap<String, (&'static str, Bound<'py, PyTuple>)>)> {
        let graph = self.plain_graph(&operands)?;
        let value = |id: NodeId| {
            let node = graph.node(id);
            Ok((graph.label(id), (node.dtype.name(), PyTuple::new(py, node.shape.dims())?)))
        };
        let values = graph.ids().map(value).collect::<PyResult<_>>()?;
        Ok((graph.to_string(), values))
    }

    /// Runs it as the library of its operands would have it done. Operands that an op may be without are None then.
    #[pyo3(signature = (*operands))]
    fn __call__<'py>(slf: &Bound<'py, Program>, operands: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        let (py, program) = (slf.py(), slf.get());
        match program.repeated(py, operands)? {
            Some((call, objects)) => repeated::all(py, &call, objects),
            None => Self::anew(slf, operands),
        }
    }

    /// The same of a program with one result, which comes alone.
    #[pyo3(signature = (*operands))]
    fn only<'py>(slf: &Bound<'py, Program>, operands: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        let (py, program) = (slf.py(), slf.get());
        if program.outputs.len() != 1 {
            return Err(bad_type(format!("{}: expected one result, got {}", program.name(), program.outputs.len())));
        }
        if let Some((call, mut objects)) = program.repeated(py, operands)?
            && let [Some(slot)] = call.outputs.as_slice()
            && let Some(result) = objects[*slot].take()
        {
            return Ok(result);
        }
        Self::anew(slf, operands)?.get_item(0)
    }

    /// Runs it.
    fn forward<'py>(&self, py: Python<'py>, operands: Vec<Bound<'py, PyAny>>) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let given = Given::of(self, &operands, &[], &[])?;
        let (_, results) = run::run(py, self, What::Forward, &given)?;
        Ok(results.into_iter().flatten().collect())
    }

    /// Runs it for a gradient: its outputs, and what backward takes again.
    #[allow(clippy::type_complexity)] // a tuple of Python's
    fn forward_saving<'py>(
        &self,
        py: Python<'py>,
        operands: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<(Bound<'py, PyTuple>, Vec<Bound<'py, PyAny>>)> {
        let given = Given::of(self, &operands, &[], &[])?;
        let (call, results) = run::run(py, self, What::Saving, &given)?;
        let results: Vec<Bound<'py, PyAny>> = results.into_iter().flatten().collect();
        let kept = call.kept.iter().map(|&index| results[index].clone()).collect();
        Ok((PyTuple::new(py, &results[..self.outputs.len()])?, kept))
    }

    /// The same: its outputs, then what else backward takes, each once.
    fn forward_whole<'py>(
        &self,
        py: Python<'py>,
        operands: Vec<Bound<'py, PyAny>>,
    ) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let given = Given::of(self, &operands, &[], &[])?;
        Ok(run::run(py, self, What::Saving, &given)?.1.into_iter().flatten().collect())
    }

    /// Gradients of the operands that are wanted.
    fn backward<'py>(
        &self,
        py: Python<'py>,
        operands: Vec<Bound<'py, PyAny>>,
        saved: Vec<Bound<'py, PyAny>>,
        gradients: Vec<Option<Bound<'py, PyAny>>>,
        wanted: Vec<bool>,
    ) -> PyResult<Vec<Option<Bound<'py, PyAny>>>> {
        if wanted.len() != self.operands.len() || gradients.len() != self.outputs.len() {
            let expected = format!("{} operands and {} outputs", self.operands.len(), self.outputs.len());
            let got = format!("{} and {}", wanted.len(), gradients.len());
            return Err(bad_value(format!("{}: expected gradients for {expected}, got {got}", self.name())));
        }
        let given = Given::of(self, &operands, &saved, &gradients)?;
        Ok(run::run(py, self, What::Backward(wanted), &given)?.1)
    }

    /// The plan for operands of these types.
    #[pyo3(signature = (operands, device = "auto"))]
    fn explain(&self, py: Python<'_>, operands: Vec<(String, Vec<usize>)>, device: &str) -> PyResult<String> {
        let graph = self.plain_graph(&operands)?;
        let places = engines::package_folders(py)?;
        py.detach(|| {
            let options = deuteron_cli::analyze::usual_options(device, &places)
                .map_err(|error| bad_value(format!("{error:#}")))?;
            let analysis = deuteron::analyze::analyze(&graph, &options).map_err(|error| self.error(error))?;
            deuteron_cli::analyze::text(&analysis, true).map_err(failed)
        })
    }

    /// The kernels for operands of these types.
    #[pyo3(signature = (operands, device = "auto"))]
    fn kernels(&self, py: Python<'_>, operands: Vec<(String, Vec<usize>)>, device: &str) -> PyResult<String> {
        let graph = self.plain_graph(&operands)?;
        let places = engines::package_folders(py)?;
        let choice = deuteron_cli::tuning_file::Choice::Stored;
        py.detach(|| {
            let listed = deuteron_cli::kernel::listings(device, choice, &graph, self.strategy(&graph), &places);
            let listed = listed.map_err(|error| bad_value(format!("{error:#}")))?;
            deuteron_cli::kernel::text(&listed, true).map_err(failed)
        })
    }

    fn __repr__(&self) -> String {
        format!("Program({:?})", self.text)
    }
}

impl Program {
    /// A call like the last one, by its fast path; none if it is another.
    fn repeated<'py>(&self, py: Python<'py>, operands: &Bound<'py, PyTuple>) -> PyResult<Option<Repeated<'py>>> {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner).clone();
        last.map_or(Ok(None), |last| last.repeat(py, self, operands))
    }

    /// A call by the general path: its results as a tuple.
    fn anew<'py>(slf: &Bound<'py, Program>, operands: &Bound<'py, PyTuple>) -> PyResult<Bound<'py, PyAny>> {
        let (py, program) = (slf.py(), slf.get());
        let mut objects: Vec<Bound<'py, PyAny>> = operands.iter().collect();
        let expected = program.operands.len();
        if objects.len() > expected
            && matches!(program.source, Source::Op(_))
            && objects.iter().filter(|object| !object.is_none()).count() == expected
        {
            objects.retain(|object| !object.is_none());
        }
        match torch::manner(py, &objects)? {
            Manner::Plain => {
                let given = Given::of(program, &objects, &[], &[])?;
                let (call, results) = run::run(py, program, What::Forward, &given)?;
                if let Some(last) = Last::of(py, &call, &given, &objects) {
                    program.remember(last);
                }
                let results: Vec<_> = results.into_iter().flatten().collect();
                Ok(PyTuple::new(py, results)?.into_any())
            }
            Manner::Differentiated => {
                let differentiate = DIFFERENTIATE.import(py, "deuteron._torch", "differentiate")?;
                differentiate.call1((slf, PyTuple::new(py, objects)?))
            }
            Manner::Other => GENERAL.import(py, "deuteron._call", "general")?.call1((slf, PyTuple::new(py, objects)?)),
        }
    }

    /// Names of its operands.
    pub fn operand_names(&self) -> &[String] {
        &self.operands
    }

    /// Whether it is an op of the catalogue, and not a graph.
    pub fn is_op(&self) -> bool {
        matches!(self.source, Source::Op(_))
    }

    /// Remembers a call for others like it.
    fn remember(&self, last: Last) {
        let mut remembered = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        forget_foreign(remembered.replace(Arc::new(last)));
    }

    /// Which operands are states.
    pub fn state_positions(&self) -> &[usize] {
        &self.state_positions
    }

    pub fn output_names(&self) -> &[String] {
        &self.outputs
    }

    /// Which operands may be read as their transpose.
    pub fn transpositions(&self) -> &[Transposition] {
        &self.transpositions
    }

    /// An error with the program's name.
    pub fn error(&self, error: Error) -> PyErr {
        errors::of(self.name(), error)
    }

    /// How a graph of the program is planned.
    fn strategy(&self, graph: &Graph) -> Strategy {
        match &self.source {
            Source::Op(_) => deuteron::catalog::strategy(graph),
            Source::Graph(_) => Strategy::Fused,
        }
    }

    /// The call for what is given: known, or compiled now.
    pub fn call(&self, py: Python<'_>, what: What, given: &Given<'_>) -> PyResult<Arc<Call>> {
        let generation = engines::generation();
        let key = (what, given.signature());
        {
            let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
            if calls.generation != generation {
                // Sessions of the process that this one was forked from: their threads are not here.
                std::mem::forget(std::mem::take(&mut calls.known));
                calls.generation = generation;
            }
            if let Some(call) = calls.known.get(&key) {
                return Ok(call.clone());
            }
        }
        let engine = engines::engine(py, given.place)?;
        let (types, transposed, place) = (given.types(), given.transposed(), given.place);
        let made = py.detach(|| {
            let made = self.compile(&engine, &key.0, &types, &transposed);
            if place == Place::Cpu {
                trim();
            }
            made
        })?;
        let mut calls = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        if calls.known.len() >= CALLS {
            calls.known.retain(|_, call| Arc::strong_count(call) > 1 || call.is_captured());
        }
        Ok(calls.known.entry(key).or_insert(Arc::new(made)).clone())
    }

    fn compile(
        &self,
        engine: &deuteron::Engine,
        what: &What,
        given: &[Option<(Element, Layout)>],
        transposed: &[usize],
    ) -> PyResult<Call> {
        let operands: Vec<(Element, Shape)> = given[..self.operands.len()]
            .iter()
            .flatten()
            .map(|(element, layout)| (*element, layout.shape.clone()))
            .collect();
        let training = self.training(&operands, transposed)?;
        let wrong = |error| self.error(error);
        let (graph, kept) = match what {
            What::Forward => (training.forward().clone(), Vec::new()),
            What::Saving => {
                let saving = training.saving().map_err(wrong)?;
                (saving.graph, saving.kept)
            }
            What::Backward(wanted) => {
                let first = given.len() - self.outputs.len();
                let of: Vec<bool> = given[first..].iter().map(Option::is_some).collect();
                (self.backward_graph(&training, &of, wanted).map_err(wrong)?, Vec::new())
            }
        };
        let doubles = operands.iter().any(|(element, _)| *element == Element::F64);
        let kept_names = training.kept_names();
        let position = |name: &str| -> Option<usize> {
            let among =
                |names: &[String], start: usize| names.iter().position(|known| known == name).map(|at| start + at);
            let gradient = || {
                let at = self.outputs.iter().position(|known| Some(known.as_str()) == name.strip_prefix("d_"))?;
                Some(self.operands.len() + kept_names.len() + at)
            };
            among(&self.operands, 0).or_else(|| among(&kept_names, self.operands.len())).or_else(gradient)
        };
        let input = |name: &String| graph.find(name).filter(|id| graph.inputs().contains(id));
        let states: Vec<NodeId> = self.states.iter().filter_map(input).collect();
        let result = |name: &String| graph.outputs().iter().find(|output| output.name == *name);
        let updates = self.updates.iter().filter_map(|(state, output)| Some((input(state)?, result(output)?.node)));
        let updates: Vec<(NodeId, NodeId)> = updates.collect();
        let all_states: Vec<NodeId> = states.iter().copied().chain(updates.iter().map(|&(state, _)| state)).collect();
        let from = |id: NodeId| {
            let name = graph.label(id);
            let found = position(&name).filter(|&at| given.get(at).is_some_and(Option::is_some));
            found.ok_or_else(|| failed(format!("{}: nothing is given for `{name}`", self.name())))
        };
        let inputs = graph
            .inputs()
            .iter()
            .copied()
            .filter(|id| !all_states.contains(id))
            .map(from)
            .collect::<PyResult<Vec<usize>>>()?;
        let state_positions = all_states.iter().copied().map(from).collect::<PyResult<Vec<usize>>>()?;
        let (work, nodes) = if doubles {
            let nodes = graph.outputs().iter().map(|output| output.node).collect::<Vec<_>>();
            (Work::Reference(Box::new(graph.clone())), nodes)
        } else {
            let layouts = graph.inputs().iter().map(|&id| {
                let at = from(id)?;
                Ok(given[at]
                    .as_ref()
                    .map_or_else(|| Layout::contiguous(&graph.node(id).shape), |(_, layout)| layout.clone()))
            });
            let layouts = layouts.collect::<PyResult<Vec<Layout>>>()?;
            let options = SessionOptions::from(self.strategy(&graph)).layouts(layouts).states(states);
            let options = if updates.is_empty() { options } else { options.joined() };
            let options = updates.iter().fold(options, |options, &(state, result)| options.update(state, result));
            let session = Session::new(engine, &graph, options).map_err(wrong)?;
            let nodes = session.results().to_vec();
            (Work::Session(Box::new(Mutex::new(session))), nodes)
        };
        let results =
            nodes.iter().map(|&node| (result_element(graph.node(node).dtype, doubles), graph.node(node).shape.clone()));
        let slot = |node: NodeId| nodes.iter().position(|&known| known == node);
        let outputs = match what {
            What::Forward | What::Saving => graph.outputs().iter().map(|output| slot(output.node)).collect(),
            What::Backward(_) => {
                let gradient =
                    |name: &String| graph.outputs().iter().find(|output| output.name.strip_prefix("d_") == Some(name));
                self.operands.iter().map(|name| gradient(name).and_then(|output| slot(output.node))).collect()
            }
        };
        let results: Vec<(Element, Shape)> = results.collect();
        let sizes = results.iter().map(|_| PyOnceLock::new()).collect();
        let (states, gives_gradients) = (state_positions, matches!(what, What::Backward(_)));
        Ok(Call { work, inputs, states, results, outputs, kept, gives_gradients, sizes })
    }

    fn backward_graph(&self, training: &Training, of: &[bool], wrt: &[bool]) -> Result<Graph, Error> {
        match &self.source {
            Source::Op(op) if !op.has_backward() => Err(Error::NoBackward(op.name())),
            _ => training.backward(of, wrt),
        }
    }

    /// The graph over operands of these types, with what its gradient takes.
    fn training(&self, operands: &[(Element, Shape)], transposed: &[usize]) -> PyResult<Training> {
        match &self.source {
            Source::Op(op) => op.training_transposed(&types(operands), transposed).map_err(|error| self.error(error)),
            Source::Graph(training) => {
                let graph = training.forward();
                for (&input, (element, shape)) in graph.inputs().iter().zip(operands) {
                    let node = graph.node(input);
                    let fits =
                        *element == Element::Of(node.dtype) || (*element == Element::F64 && node.dtype.is_float());
                    if !fits || *shape != node.shape {
                        let got = format!("{}{shape}", element.name());
                        let expected = format!("{}{}", node.dtype, node.shape);
                        return Err(bad_value(format!(
                            "{}: expected `{}` to be {expected}, got {got}",
                            graph.name(),
                            graph.label(input)
                        )));
                    }
                }
                Ok((**training).clone())
            }
        }
    }

    /// The types of operands by their words.
    fn given_types(&self, operands: &[(String, Vec<usize>)]) -> PyResult<Vec<(Element, Shape)>> {
        if operands.len() != self.operands.len() {
            return Err(run::wrong_count(self, operands.len()));
        }
        operands.iter().map(|(dtype, sizes)| Ok((Element::find(dtype)?, Shape::new(sizes.clone())))).collect()
    }

    fn plain_graph(&self, operands: &[(String, Vec<usize>)]) -> PyResult<Graph> {
        Ok(self.training(&self.given_types(operands)?, &[])?.forward().clone())
    }
}

/// Counts a program that was compiled on the CPU, and returns free memory of the heap to the system after every [`TRIMMED`] of them. Programs are kept
/// for long, and between the tensors of a loop over many lengths they stand in the way of those that follow: over 500 lengths of a model of two layers
/// the heap grew by 0.9 GB, of which 0.7 GB were free.
fn trim() {
    static COMPILED: AtomicUsize = AtomicUsize::new(0);
    if (COMPILED.fetch_add(1, Ordering::Relaxed) + 1).is_multiple_of(TRIMMED) {
        return_free_memory();
    }
}

/// Returns memory that the allocator keeps free to the system.
pub(crate) fn return_free_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        unsafe extern "C" {
            fn malloc_trim(pad: usize) -> i32;
        }
        // SAFETY: a function of glibc's that takes its own locks, and moves nothing that is in use.
        unsafe { malloc_trim(0) };
    }
}

fn types(operands: &[(Element, Shape)]) -> Vec<OperandType> {
    operands.iter().map(|(element, shape)| (element.dtype(), shape.clone())).collect()
}

/// The type of a result of a graph: where operands are `f64`, its floats are.
fn result_element(dtype: deuteron::Dtype, doubles: bool) -> Element {
    if doubles && dtype.is_float() { Element::F64 } else { Element::Of(dtype) }
}
