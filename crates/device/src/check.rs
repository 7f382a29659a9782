//! The checks of every device when it loads a job, so that running needs no checks: each argument stays inside its buffer,
//! inputs are not written, and a written range overlaps nothing except an operand that it replaces. That a kernel stays inside the reach of
//! its arguments is guaranteed by the code that makes the launch ([`Launch`](deuteron_codegen::Launch)).

use deuteron_codegen::Argument;

use crate::device::{Inputs, States};
use crate::error::DeviceError;
use crate::job::{Job, Place, Step};
use crate::memory::BorrowedMemory;

/// Checks every step; returns the required bytes of each input.
pub(crate) fn check(job: &Job) -> Result<Vec<usize>, DeviceError> {
    let mut input_bytes = vec![0; job.inputs];
    for (index, step) in job.steps.iter().enumerate() {
        let refused = |(argument, problem)| mismatch(index, argument, problem);
        check_step(step, job, &mut input_bytes).map_err(refused)?;
    }
    Ok(input_bytes)
}

/// Checks that every input has the bytes it must have.
pub(crate) fn check_inputs(input_bytes: &[usize], input: Inputs<'_, '_>) -> Result<(), DeviceError> {
    for (index, &expected) in input_bytes.iter().enumerate() {
        let got = input(index).len();
        if got < expected {
            return Err(DeviceError::InputSize { input: index, expected, got });
        }
    }
    Ok(())
}

/// Required alignment of the caller's outputs: the widest vector that kernels store.
pub(crate) const OUTPUT_ALIGNMENT: usize = 16;

/// Checks that borrowed memory has the counts and sizes of a job, and that outputs are aligned for vectors.
pub(crate) fn check_borrowed(
    borrowed: &BorrowedMemory<'_>,
    inputs: &[usize],
    states: &[usize],
    outputs: &[usize],
) -> Result<(), DeviceError> {
    let BorrowedMemory { inputs: given, states: kept, outputs: results, .. } = borrowed;
    if given.len() != inputs.len() {
        return Err(DeviceError::InputCount { expected: inputs.len(), got: given.len() });
    }
    if kept.len() != states.len() {
        return Err(DeviceError::StateCount { expected: states.len(), got: kept.len() });
    }
    if results.len() != outputs.len() {
        return Err(DeviceError::OutputCount { expected: outputs.len(), got: results.len() });
    }
    for (input, (span, &expected)) in given.iter().zip(inputs).enumerate() {
        if span.bytes < expected {
            return Err(DeviceError::InputSize { input, expected, got: span.bytes });
        }
    }
    for (state, (span, &expected)) in kept.iter().zip(states).enumerate() {
        if span.bytes < expected {
            return Err(DeviceError::StateSize { state, expected, got: span.bytes });
        }
    }
    for (output, (span, &expected)) in results.iter().zip(outputs).enumerate() {
        let aligned = expected == 0 || span.address.is_multiple_of(OUTPUT_ALIGNMENT as u64);
        if span.bytes < expected || !aligned {
            let (alignment, got, address) = (OUTPUT_ALIGNMENT, span.bytes, span.address);
            return Err(DeviceError::OutputPlace { output, expected, alignment, got, address });
        }
    }
    Ok(())
}

/// Checks that there are as many states as the job has.
pub(crate) fn check_states(state_bytes: &[usize], states: &dyn States) -> Result<(), DeviceError> {
    let (expected, got) = (state_bytes.len(), states.count());
    if expected == got { Ok(()) } else { Err(DeviceError::StateCount { expected, got }) }
}

fn check_step(step: &Step, job: &Job, input_bytes: &mut [usize]) -> Result<(), (usize, String)> {
    let arguments = step.launch.arguments();
    if step.places.len() != arguments.len() {
        return Err((0, format!("expected {} arguments, got {}", arguments.len(), step.places.len())));
    }
    for (position, (argument, place)) in arguments.iter().zip(&step.places).enumerate() {
        let available = match *place {
            Place::Input(input) if input < job.inputs && !argument.written => {
                input_bytes[input] = input_bytes[input].max(argument.reach);
                argument.reach
            }
            Place::Output(output) => job.outputs.get(output).copied().unwrap_or(0),
            Place::Arena { offset, bytes } if offset.checked_add(bytes).is_some_and(|end| end <= job.arena) => bytes,
            Place::State(state) => job.states.get(state).copied().unwrap_or(0),
            Place::Input(_) | Place::Arena { .. } => 0,
        };
        if argument.reach > available {
            return Err((position, format!("it touches {} bytes, its buffer has {available}", argument.reach)));
        }
        check_in_place(step, argument).map_err(|problem| (position, problem))?;
        let overlapping = arguments.iter().zip(&step.places).enumerate().find(|&(other, (theirs, place_of_other))| {
            let written = argument.written || theirs.written;
            let in_place = argument.in_place_of == Some(other) || theirs.in_place_of == Some(position);
            other != position && written && !in_place && overlap(place, place_of_other)
        });
        if let Some((other, _)) = overlapping {
            return Err((position, format!("it overlaps argument {other}, and one is written")));
        }
    }
    Ok(())
}

/// A result that replaces an operand is in the operand's memory, which is a state.
fn check_in_place(step: &Step, argument: &Argument) -> Result<(), String> {
    let Some(operand) = argument.in_place_of else { return Ok(()) };
    let position = step.launch.arguments().iter().position(|other| std::ptr::eq(other, argument));
    let places = position.and_then(|position| Some((step.places.get(position)?, step.places.get(operand)?)));
    match places {
        Some((Place::State(result), Place::State(state))) if result == state => Ok(()),
        _ => Err(format!("expected the state that argument {operand} is, which it takes the place of")),
    }
}

fn overlap(a: &Place, b: &Place) -> bool {
    match (*a, *b) {
        (Place::Arena { offset: x, bytes: n }, Place::Arena { offset: y, bytes: m }) => {
            x < y.saturating_add(m) && y < x.saturating_add(n)
        }
        (a, b) => a == b,
    }
}

pub(crate) fn mismatch(step: usize, argument: usize, problem: String) -> DeviceError {
    DeviceError::Job { step, argument, problem }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_of_the_arena_overlap_where_they_share_a_byte() {
        let range = |offset, bytes| Place::Arena { offset, bytes };
        let middle = range(64, 32);
        for other in [middle, range(64, 1), range(95, 1), range(32, 33), range(0, 256), range(0, usize::MAX)] {
            assert!(overlap(&middle, &other) && overlap(&other, &middle), "{other:?}");
        }
        for other in [range(0, 64), range(96, 32), range(usize::MAX, 32), Place::Input(0)] {
            assert!(!overlap(&middle, &other) && !overlap(&other, &middle), "{other:?}");
        }
        assert!(overlap(&Place::Output(1), &Place::Output(1)) && !overlap(&Place::Output(1), &Place::State(1)));
    }
}
