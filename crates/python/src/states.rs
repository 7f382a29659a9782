//! Requirements of states, which kernels write in place: writable memory in the layout of the graph that is not shared with any
//! other operand. Everything else is refused, since an update would be lost or would change other data.

use deuteron::Span;
use pyo3::intern;
use pyo3::prelude::*;

use crate::errors::bad_value;
use crate::operand::{Element, Library, Operand};

/// What to do about memory that does not suit.
const ADVICE: &str = "copy it to memory of its own first (`numpy.array(state, order=\"C\")`, `state.clone(memory_format=torch.contiguous_format)`), \
     hand that over and read the update there";

/// Checks one state; `object` is what the caller gave, `operand` what became of it.
pub(crate) fn check(object: &Bound<'_, PyAny>, operand: &Operand<'_>, name: &dyn Fn() -> String) -> PyResult<()> {
    let refused = |expected: &str, got: String| {
        Err(bad_value(format!("{}: expected a state {expected}, got {got}; {ADVICE}", name())))
    };
    if operand.element == Element::F64 {
        return refused("of a dtype that kernels update in place", "float64".to_string());
    }
    // An operand by DLPack is the capsule of an object; no copy is asked for there.
    let is_copy = operand.library != Library::Dlpack && !operand.object.is(object);
    if is_copy || operand.transposed || !operand.axes.is_contiguous() {
        return refused("that is C-contiguous, aligned and of native byte order", described(object));
    }
    if operand.library == Library::Numpy && is_read_only(object)? {
        return refused("that is writable", "read-only memory".to_string());
    }
    Ok(())
}

/// Checks that no memory of a state is another operand's too: `states` are positions among the operands.
pub(crate) fn check_apart(
    program: &str,
    names: &[String],
    list: &[Option<Operand<'_>>],
    states: &[usize],
) -> PyResult<()> {
    if !any_overlap(list, states) {
        return Ok(());
    }
    for &state in states {
        let Some(own) = list.get(state).and_then(Option::as_ref).map(Operand::span) else { continue };
        for (position, other) in list.iter().enumerate().filter(|&(position, _)| position != state) {
            if other.as_ref().is_some_and(|other| overlap(&own, &other.span())) {
                let other = names.get(position).map_or("another operand", String::as_str);
                return Err(bad_value(format!(
                    "{program}: expected the state `{}` in memory of its own, got memory that overlaps `{other}`; {ADVICE}",
                    names[state]
                )));
            }
        }
    }
    Ok(())
}

/// Whether a state overlaps anything, in one pass over the operands by address: an optimiser has hundreds of both.
fn any_overlap(list: &[Option<Operand<'_>>], states: &[usize]) -> bool {
    let mut is_state = vec![false; list.len()];
    states.iter().for_each(|&state| is_state[state] = true);
    let spans = list.iter().zip(is_state).filter_map(|(operand, is_state)| Some((operand.as_ref()?.span(), is_state)));
    let mut spans: Vec<(Span, bool)> = spans.filter(|(span, _)| span.bytes > 0).collect();
    spans.sort_unstable_by_key(|(span, _)| span.address);
    let (mut end_of_states, mut end) = (0, 0);
    spans.iter().any(|(span, is_state)| {
        let overlaps = span.address < if *is_state { end } else { end_of_states };
        let own = span.address.saturating_add(span.bytes as u64);
        end = end.max(own);
        if *is_state {
            end_of_states = end_of_states.max(own);
        }
        overlaps
    })
}

/// Whether some byte is between the first and the last of both.
fn overlap(one: &Span, other: &Span) -> bool {
    let end = |span: &Span| span.address.saturating_add(span.bytes as u64);
    one.bytes > 0 && other.bytes > 0 && one.address < end(other) && other.address < end(one)
}

/// Whether an array of NumPy says that it must not be written to.
fn is_read_only(object: &Bound<'_, PyAny>) -> PyResult<bool> {
    let py = object.py();
    let interface = object.getattr(intern!(py, "__array_interface__"))?;
    let (_, read_only): (u64, bool) = interface.get_item(intern!(py, "data"))?.extract()?;
    Ok(read_only)
}

/// How an object lies, in its library's words.
fn described(object: &Bound<'_, PyAny>) -> String {
    let said = |name: &str| object.getattr(name).and_then(|value| Ok(value.str()?.to_string())).ok();
    let strides = said("strides").or_else(|| Some(object.call_method0("stride").ok()?.str().ok()?.to_string()));
    let facts = [("dtype", said("dtype")), ("shape", said("shape")), ("strides", strides)];
    let words: Vec<String> = facts.into_iter().filter_map(|(word, fact)| Some(format!("{word} {}", fact?))).collect();
    if words.is_empty() { "memory that lies otherwise".to_string() } else { words.join(", ") }
}
