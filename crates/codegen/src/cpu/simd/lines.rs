//! Memory of one thread in whole cache lines, for 64-byte alignment.

use deuteron_graph::memory;

/// Elements of a line.
pub const LINE: usize = 16;

/// Elements of `f32`, from a cache line on. What is there is written and read through the pointer.
#[derive(Clone, Debug, Default)]
pub struct Lines(Vec<Line>);

#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(64))]
struct Line([f32; LINE]);

impl Lines {
    /// At least this many elements, all 0, or unwinds as [`memory`] says.
    pub fn new(elements: usize) -> Lines {
        Lines(memory::zeros(elements.div_ceil(LINE)))
    }

    /// How many there are.
    pub fn elements(&self) -> usize {
        LINE * self.0.len()
    }

    /// The first of them.
    pub fn pointer(&mut self) -> *mut f32 {
        self.0.as_mut_ptr().cast()
    }

    /// All of them one value.
    pub fn fill(&mut self, value: f32) {
        self.0.fill(Line([value; LINE]));
    }

    /// One line, counted from the first, all of one value.
    pub fn fill_line(&mut self, line: usize, value: f32) {
        self.0[line] = Line([value; LINE]);
    }
}
