//! Memory for tensors. Running out of it is an error here, whereas the standard library's lists abort the process.
//!
//! Computations that allocate in many places use [`room`], [`zeros`], [`copied`] and [`collected`], which unwind to the nearest
//! [`caught`]: a `Result` in every primitive of an interpreter would be most of its code. Small lists, such as names, shapes and
//! plans, come from the standard library as usual.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

/// Not enough memory for a list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("could not allocate {bytes} bytes")]
pub struct OutOfMemory {
    /// how much was asked for
    pub bytes: usize,
}

/// An empty list with this capacity.
pub fn reserved<T>(count: usize) -> Result<Vec<T>, OutOfMemory> {
    let mut list = Vec::new();
    reserve(&mut list, count)?;
    Ok(list)
}

fn reserve<T>(list: &mut Vec<T>, count: usize) -> Result<(), OutOfMemory> {
    let missing = OutOfMemory { bytes: count.saturating_mul(size_of::<T>()) };
    list.try_reserve_exact(count.saturating_sub(list.len())).map_err(|_| missing)
}

/// An empty list with this capacity, or unwinds.
pub fn room<T>(count: usize) -> Vec<T> {
    or_unwind(reserved(count))
}

/// A list of zeros, or unwinds.
pub fn zeros<T: Default + Clone>(count: usize) -> Vec<T> {
    let mut list = room(count);
    list.resize(count, T::default());
    list
}

/// Resizes a list to this many zeros, in place if possible, or unwinds.
pub fn clear_to<T: Default + Clone>(list: &mut Vec<T>, count: usize) {
    list.clear();
    or_unwind(reserve(list, count));
    list.resize(count, T::default());
}

/// A copy of a list, or unwinds.
pub fn copied<T: Clone>(items: &[T]) -> Vec<T> {
    let mut list = room(items.len());
    list.extend_from_slice(items);
    list
}

/// The elements of an iterator, or unwinds.
pub fn collected<T>(items: impl ExactSizeIterator<Item = T>) -> Vec<T> {
    let mut list = room(items.len());
    list.extend(items);
    list
}

fn or_unwind<T>(allocated: Result<T, OutOfMemory>) -> T {
    // No panic: nothing is wrong with the program, and nothing is printed.
    allocated.unwrap_or_else(|missing| resume_unwind(Box::new(missing)))
}

/// The result of a computation, if there was enough memory. Panics are passed on.
pub fn caught<T>(compute: impl FnOnce() -> T) -> Result<T, OutOfMemory> {
    // What was half-computed is dropped on the way here.
    catch_unwind(AssertUnwindSafe(compute)).map_err(|payload| match payload.downcast::<OutOfMemory>() {
        Ok(missing) => *missing,
        Err(payload) => resume_unwind(payload),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_hold_what_was_asked_for() {
        assert_eq!(zeros::<f32>(3), [0.0; 3]);
        assert_eq!(copied(&[1, 2]), [1, 2]);
        assert_eq!(collected((0..4).map(|x| 2 * x)), [0, 2, 4, 6]);
        assert!(room::<f64>(100).capacity() >= 100);
        let mut list = vec![7, 8, 9];
        clear_to(&mut list, 2);
        assert_eq!(list, [0, 0]);
        clear_to(&mut list, 5);
        assert_eq!(list, [0; 5]);
    }

    #[test]
    fn memory_that_is_not_there_is_an_error() {
        let all = usize::MAX / 4;
        assert_eq!(reserved::<u8>(usize::MAX), Err(OutOfMemory { bytes: usize::MAX }));
        for bytes in [4 * all, usize::MAX] {
            assert_eq!(caught(|| zeros::<f32>(bytes / 4 + bytes % 4).len()), Err(OutOfMemory { bytes }));
        }
        assert_eq!(caught(|| collected((0..all).map(|x| x as u32)).len()), Err(OutOfMemory { bytes: 4 * all }));
        assert_eq!(caught(|| zeros::<u8>(5).len()), Ok(5));
    }

    #[test]
    fn panics_are_not_caught() {
        let panicked = catch_unwind(|| caught(|| panic!("a defect")));
        assert_eq!(panicked.unwrap_err().downcast_ref::<&str>(), Some(&"a defect"));
    }
}
