//! Random numbers: one or two groups of four vectors at a time, as bits on the stack.

use std::mem::offset_of;

use super::super::encode::{self as x86, Arithmetic};
use super::super::frame::{self, Context, field};
use super::super::vectors::{Target, TooManyMasks, Variant};
use super::Passes;
use super::rows::Rows;

/// The place of the group behind those at hand.
const BEHIND: usize = 2;

impl Passes<'_> {
    /// Whether the elements of a row may start within a block of random words.
    fn is_ragged(&self) -> bool {
        self.program.flat || !self.program.cols.is_multiple_of(4)
    }

    pub(super) fn start_random(&mut self, rows: &Rows<'_>) -> Result<(), TooManyMasks> {
        if rows.strip.keeps.is_empty() {
            return Ok(());
        }
        let assembler = &mut *self.assembler;
        self.frame.row_number(assembler);
        if self.program.flat {
            assembler.compute(Arithmetic::Xor, x86::RAX, x86::RAX);
        } else {
            assembler.number(x86::RDX, self.program.cols as u64);
            assembler.store(frame::BITS.memory(), x86::RDX);
            assembler.multiply(x86::RAX, frame::BITS.memory());
        }
        assembler.compute_memory(Arithmetic::Add, x86::RAX, field(offset_of!(Context, origin)));
        assembler.compute(Arithmetic::Add, x86::RAX, frame::COLUMN);
        assembler.copy(x86::RDX, x86::RAX);
        assembler.compute_number(Arithmetic::And, x86::RDX, 3);
        assembler.store(frame::ELEMENT.memory(), x86::RDX);
        assembler.shift_right(x86::RAX, 2);
        assembler.store(frame::BLOCK.memory(), x86::RAX);
        if self.is_ragged() {
            self.groups(rows, 1, |_| BEHIND)?;
        }
        Ok(())
    }

    /// Generates the bits of the next groups of each set, together, and stores those of group `g` at place `to(g)` of their set.
    fn groups(&mut self, rows: &Rows<'_>, count: usize, to: impl Fn(usize) -> usize) -> Result<(), TooManyMasks> {
        for (keep, ops) in rows.strip.keeps.iter().enumerate() {
            self.vectors(ops, rows.held, Variant { count, ..Variant::whole(0) })?;
            let assembler = &mut *self.assembler;
            for group in 0..count {
                assembler.load(x86::RAX, frame::BITS.after(8 * group as i32).memory());
                assembler.compute_number(Arithmetic::Xor, x86::RAX, -1);
                assembler.store(self.frame.keep(keep as u16, to(group)).memory(), x86::RAX);
            }
        }
        let assembler = &mut *self.assembler;
        assembler.load(x86::RAX, frame::BLOCK.memory());
        assembler.compute_number(Arithmetic::Add, x86::RAX, (count * self.target.width()) as i32);
        assembler.store(frame::BLOCK.memory(), x86::RAX);
        Ok(())
    }

    /// Groups that are generated together: two, where there are registers for the words of both.
    pub(super) fn groups_together(&self) -> usize {
        if self.target.is_avx512() { 2 } else { 1 }
    }

    /// The bits of `count` groups of four vectors, the first of which is group `first` of a body.
    pub(super) fn random(&mut self, rows: &Rows<'_>, first: usize, count: usize) -> Result<(), TooManyMasks> {
        if rows.strip.keeps.is_empty() {
            return Ok(());
        }
        if !self.is_ragged() {
            return self.groups(rows, count, |group| first + group);
        }
        // The groups at hand begin within the one that was made before, and end within the last one that is made now.
        let place = |group: usize| if group < count { first + group } else { BEHIND };
        let sets = 0..rows.strip.keeps.len() as u16;
        for keep in sets.clone() {
            self.assembler.load(x86::RAX, self.frame.keep(keep, BEHIND).memory());
            self.assembler.store(self.frame.keep(keep, first).memory(), x86::RAX);
        }
        self.groups(rows, count, |group| place(group + 1))?;
        for (keep, group) in sets.flat_map(|keep| (0..count).map(move |group| (keep, group))) {
            let (here, next) = (self.frame.keep(keep, place(group)), self.frame.keep(keep, place(group + 1)));
            let assembler = &mut *self.assembler;
            assembler.load(x86::RAX, here.memory());
            assembler.load(x86::RDX, next.memory());
            assembler.load(x86::RCX, frame::ELEMENT.memory());
            match self.target {
                Target::Avx512 { .. } => assembler.shift_right_double(x86::RAX, x86::RDX),
                Target::Avx2 => {
                    // A group has 32 bits: those behind it come from the next one.
                    assembler.shift_left(x86::RAX, 32);
                    assembler.shift_right(x86::RAX, 32);
                    assembler.shift_left(x86::RDX, 32);
                    assembler.compute(Arithmetic::Or, x86::RAX, x86::RDX);
                    assembler.shift_right_by_count(x86::RAX);
                }
            }
            assembler.store(here.memory(), x86::RAX);
        }
        Ok(())
    }
}
