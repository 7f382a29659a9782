//! Runs a call on concrete operands: allocates results and runs on the caller's memory.

use std::sync::{Arc, PoisonError};

use deuteron::reference::{Array as Values, Rounding, interpret};
use deuteron::{BorrowedMemory, Dtype, Graph, Layout, Shape, Span};
use pyo3::exceptions::{PyIndexError, PyOverflowError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::engines::Place;
use crate::errors::{self, bad_type};
use crate::operand::{Access, Element, Library, Operand, Transposition};
use crate::program::{Call, Program, What, Work};
use crate::{array, dlpack, numpy, states, torch};

impl<'py> Operand<'py> {
    /// Looks at an object. `name` is for messages.
    fn of(
        object: &Bound<'py, PyAny>,
        transposition: Transposition,
        access: Access,
        name: &dyn Fn() -> String,
    ) -> PyResult<Operand<'py>> {
        if let Some(operand) = torch::operand(object, transposition, name)? {
            return Ok(operand);
        }
        if let Some(operand) = array::operand(object)? {
            return Ok(operand);
        }
        if let Some(operand) = numpy::operand(object, transposition, name)? {
            return Ok(operand);
        }
        if let Some(operand) = dlpack::operand(object, access, name)? {
            return Ok(operand);
        }
        let kind = object.get_type().name()?;
        Err(bad_type(format!(
            "{}: expected a tensor of PyTorch, an array of NumPy or an object with `__dlpack__`, got {kind}",
            name()
        )))
    }
}

/// All that a call is given: operands, kept values, gradients.
pub(crate) struct Given<'py> {
    pub list: Vec<Option<Operand<'py>>>,
    pub place: Place,
}

impl<'py> Given<'py> {
    /// Looks at every object, and that they are together.
    pub fn of(
        program: &Program,
        operands: &[Bound<'py, PyAny>],
        saved: &[Bound<'py, PyAny>],
        gradients: &[Option<Bound<'py, PyAny>>],
    ) -> PyResult<Given<'py>> {
        let names = program.operand_names();
        if operands.len() != names.len() {
            return Err(wrong_count(program, operands.len()));
        }
        let mut list = Vec::with_capacity(operands.len() + saved.len() + gradients.len());
        let states = program.state_positions();
        for (position, (object, &transposition)) in operands.iter().zip(program.transpositions()).enumerate() {
            let name = || format!("{}: `{}`", program.name(), names[position]);
            let access = if states.binary_search(&position).is_ok() { Access::Update } else { Access::Read };
            let operand = Operand::of(object, transposition, access, &name).map_err(|error| {
                // Whole numbers of an op are indices.
                let is_index = program.is_op() && error.is_instance_of::<PyOverflowError>(object.py());
                if is_index { PyIndexError::new_err(error.value(object.py()).to_string()) } else { error }
            })?;
            if access == Access::Update {
                states::check(object, &operand, &name)?;
            }
            list.push(Some(operand));
        }
        states::check_apart(program.name(), names, &list, states)?;
        for object in saved {
            let name = || format!("{}: a kept value", program.name());
            list.push(Some(Operand::of(object, Transposition::Refused, Access::Read, &name)?));
        }
        for (object, output) in gradients.iter().zip(program.output_names()) {
            let name = || format!("{}: the gradient of `{output}`", program.name());
            list.push(
                object
                    .as_ref()
                    .map(|object| Operand::of(object, Transposition::Refused, Access::Read, &name))
                    .transpose()?,
            );
        }
        let mut given = Given { list, place: Place::Cpu };
        given.place = given.common_place(program)?;
        given.check_doubles(program)?;
        Ok(given)
    }

    /// What tells this call from others of its program: place, types, sizes and strides.
    pub fn signature(&self) -> Vec<u64> {
        let mut signature = Vec::with_capacity(1 + 8 * self.list.len());
        signature.push(match self.place {
            Place::Cpu => 0,
            Place::Cuda(ordinal) => 1 + ordinal as u64,
        });
        for operand in &self.list {
            match operand {
                None => signature.push(0),
                Some(operand) => {
                    signature.push(match operand.element {
                        Element::F64 => 1,
                        Element::Of(dtype) => 2 + dtype as u64,
                    });
                    signature.push(operand.transposed.into());
                    operand.axes.sign(&mut signature);
                }
            }
        }
        signature
    }

    /// Positions of those whose axes are given in the other order.
    pub fn transposed(&self) -> Vec<usize> {
        let transposed = |operand: &Option<Operand<'_>>| operand.as_ref().is_some_and(|operand| operand.transposed);
        self.list.iter().enumerate().filter(|(_, operand)| transposed(operand)).map(|(position, _)| position).collect()
    }

    /// Types and layouts.
    pub fn types(&self) -> Vec<Option<(Element, Layout)>> {
        let of = |operand: &Operand<'_>| (operand.element, operand.axes.layout());
        self.list.iter().map(|operand| operand.as_ref().map(of)).collect()
    }

    /// Where they all are. A number on the CPU beside tensors of a GPU is a mistake too: kernels read it there.
    fn common_place(&self, program: &Program) -> PyResult<Place> {
        let mut places = self.list.iter().flatten().map(|operand| operand.place);
        let first = places.next().unwrap_or(Place::Cpu);
        match self
            .list
            .iter()
            .enumerate()
            .find(|(_, operand)| operand.as_ref().is_some_and(|operand| operand.place != first))
        {
            None => Ok(first),
            Some((position, operand)) => {
                let names = program.operand_names();
                let label = names.get(position).map_or_else(|| "a gradient".to_string(), |name| format!("`{name}`"));
                let place = operand.as_ref().map_or(Place::Cpu, |operand| operand.place);
                let first_name = names.first().map_or("", String::as_str);
                Err(bad_type(format!(
                    "{}: expected all tensors on one device, got `{first_name}` on {first} and {label} on {place}",
                    program.name()
                )))
            }
        }
    }

    /// That `f64` is everywhere or nowhere.
    fn check_doubles(&self, program: &Program) -> PyResult<()> {
        let mut floats = self.list.iter().flatten().filter(|operand| operand.element.is_float());
        let doubles = self.list.iter().flatten().any(|operand| operand.element == Element::F64);
        if doubles && let Some(other) = floats.find(|operand| operand.element != Element::F64) {
            return Err(bad_type(format!(
                "{}: expected all floats to be float64 or none, got one of {}",
                program.name(),
                other.element.name()
            )));
        }
        if doubles && self.place != Place::Cpu {
            return Err(bad_type(format!(
                "{}: float64 is computed on the CPU alone, got tensors on {}",
                program.name(),
                self.place
            )));
        }
        Ok(())
    }
}

/// An error for a call with too few or too many operands.
pub(crate) fn wrong_count(program: &Program, got: usize) -> PyErr {
    let names = program.operand_names();
    errors::bad_type(format!("{}: expected {} operands ({}), got {got}", program.name(), names.len(), names.join(", ")))
}

/// Runs a call. Outputs that nothing was asked of are none.
#[allow(clippy::type_complexity)] // the call, and an object an output
pub(crate) fn run<'py>(
    py: Python<'py>,
    program: &Program,
    what: What,
    given: &Given<'py>,
) -> PyResult<(Arc<Call>, Vec<Option<Bound<'py, PyAny>>>)> {
    let call = program.call(py, what, given)?;
    let mut objects = Vec::with_capacity(call.results.len());
    let mut outputs = Vec::with_capacity(call.results.len());
    for (index, (element, shape)) in call.results.iter().enumerate() {
        let (object, address) = empty(py, given, *element, shape, call.sizes(py, index)?.each_ref())?;
        outputs.push(Span { address, bytes: shape.elements() * element.bytes() });
        objects.push(object);
    }
    let spans = |positions: &[usize]| -> Vec<Span> {
        positions.iter().filter_map(|&at| given.list[at].as_ref()).map(Operand::span).collect()
    };
    let (inputs, states) = (spans(&call.inputs), spans(&call.states));
    match &call.work {
        Work::Session(session) => {
            let stream = match given.place {
                Place::Cpu => 0,
                Place::Cuda(ordinal) => torch::stream(py, ordinal)?,
            };
            py.detach(|| {
                // SAFETY: `given` and `objects` hold the objects whose memory this is, for the host until this call returns. On a GPU the
                // run is enqueued on the stream that torch orders its own work and the reuse of its memory by.
                let borrowed = unsafe { BorrowedMemory::new(&inputs, &states, &outputs, stream) };
                session.lock().unwrap_or_else(PoisonError::into_inner).run_borrowed(borrowed)
            })
            .map_err(|error| program.error(error))?;
        }
        Work::Reference(graph) => {
            let values: Vec<Values> =
                call.inputs.iter().filter_map(|&at| given.list[at].as_ref()).map(values).collect();
            py.detach(|| refer(graph, &values, &call.results, &outputs)).map_err(|error| program.error(error))?;
        }
    }
    let mut results: Vec<Option<Bound<'py, PyAny>>> =
        call.outputs.iter().map(|slot| slot.map(|slot| objects[slot].clone())).collect();
    if call.gives_gradients {
        // A gradient lies as its operand does.
        for position in given.transposed() {
            let result = results[position].take();
            results[position] = result.map(|gradient| gradient.getattr(intern!(py, "T"))).transpose()?;
        }
    }
    Ok((call, results))
}

/// An object for a result, of the library of the first operand.
fn empty<'py>(
    py: Python<'py>,
    given: &Given<'py>,
    element: Element,
    shape: &Shape,
    sizes: [&Bound<'py, PyTuple>; 2],
) -> PyResult<(Bound<'py, PyAny>, u64)> {
    let first = given.list.iter().flatten().next();
    match first.map(|operand| (operand.library, operand)) {
        Some((Library::Torch, beside)) => torch::empty(beside, element, sizes),
        Some((Library::Numpy, beside)) => numpy::empty(&beside.object, element, sizes[0]),
        Some((Library::Dlpack, _)) | None => array::empty(py, element, shape),
    }
}

/// The values of an operand on the CPU, as `f64`.
fn values(operand: &Operand<'_>) -> Values {
    let (shape, strides) = (operand.axes.shape(), operand.axes.strides());
    let at = |element: usize| -> f64 {
        let address = operand.address as usize + element * operand.element.bytes();
        // SAFETY: the layout spans the operand's memory, which its object keeps; an element may stand at any address.
        unsafe {
            match operand.element {
                Element::F64 => (address as *const f64).read_unaligned(),
                Element::Of(Dtype::I32) => f64::from((address as *const i32).read_unaligned()),
                Element::Of(Dtype::I8) => f64::from((address as *const i8).read()),
                // Floats are all of 64 bits here; what is left are truth values.
                Element::Of(_) => f64::from((address as *const u8).read()),
            }
        }
    };
    let mut index = vec![0; shape.rank()];
    let mut list = Vec::with_capacity(shape.elements());
    for _ in 0..shape.elements() {
        list.push(at(index.iter().zip(strides).map(|(i, stride)| i * stride).sum()));
        for axis in (0..shape.rank()).rev() {
            index[axis] += 1;
            if index[axis] < shape[axis] {
                break;
            }
            index[axis] = 0;
        }
    }
    Values::new(shape, list)
}

/// Computes a graph in `f64` and stores its outputs, each where its first result is.
fn refer(
    graph: &Graph,
    values: &[Values],
    results: &[(Element, Shape)],
    outputs: &[Span],
) -> Result<(), deuteron::Error> {
    let computed = interpret(graph, values, Rounding::Exact)?.outputs;
    for ((array, (element, _)), span) in computed.iter().zip(results).zip(outputs) {
        for (index, &value) in array.values.iter().enumerate() {
            let address = span.address as usize + index * element.bytes();
            // SAFETY: the span has as many elements as the result, and nobody else has seen its object.
            unsafe {
                match element {
                    Element::F64 => (address as *mut f64).write_unaligned(value),
                    Element::Of(Dtype::I32) => (address as *mut i32).write_unaligned(value as i32),
                    Element::Of(Dtype::I8) => (address as *mut i8).write(value as i8),
                    Element::Of(_) => (address as *mut u8).write(u8::from(value != 0.0)),
                }
            }
        }
    }
    Ok(())
}
