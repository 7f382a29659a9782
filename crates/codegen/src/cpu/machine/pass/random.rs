//! Random numbers: a group of four vectors at a time, as bits on the stack.

use std::mem::offset_of;

use super::super::encode::{self as x86, Arithmetic};
use super::super::frame::{self, Context, Frame, field};
use super::super::vectors::{Target, TooManyMasks, Variant};
use super::Passes;
use super::rows::Rows;

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
            self.group(rows, |frame, keep| frame.keep(keep).after(8))?;
        }
        Ok(())
    }

    /// Generates the bits of the next group of each set, and stores them at `to`.
    fn group(&mut self, rows: &Rows<'_>, to: impl Fn(&Frame, u16) -> frame::Slot) -> Result<(), TooManyMasks> {
        for (keep, ops) in rows.strip.keeps.iter().enumerate() {
            self.vectors(ops, rows.held, Variant::whole(0))?;
            let assembler = &mut *self.assembler;
            assembler.load(x86::RAX, frame::BITS.memory());
            assembler.compute_number(Arithmetic::Xor, x86::RAX, -1);
            assembler.store(to(&self.frame, keep as u16).memory(), x86::RAX);
        }
        let assembler = &mut *self.assembler;
        assembler.load(x86::RAX, frame::BLOCK.memory());
        assembler.compute_number(Arithmetic::Add, x86::RAX, self.target.width() as i32);
        assembler.store(frame::BLOCK.memory(), x86::RAX);
        Ok(())
    }

    /// The bits of the four vectors from `vector` on, if it is the first of them.
    pub(super) fn random(&mut self, rows: &Rows<'_>, vector: usize) -> Result<(), TooManyMasks> {
        if rows.strip.keeps.is_empty() || !vector.is_multiple_of(4) {
            return Ok(());
        }
        if !self.is_ragged() {
            return self.group(rows, |frame, keep| frame.keep(keep));
        }
        // The group at hand begins within the one that was made before, and ends within the next one.
        for keep in 0..rows.strip.keeps.len() as u16 {
            self.assembler.load(x86::RAX, self.frame.keep(keep).after(8).memory());
            self.assembler.store(self.frame.keep(keep).memory(), x86::RAX);
        }
        self.group(rows, |frame, keep| frame.keep(keep).after(8))?;
        for keep in 0..rows.strip.keeps.len() as u16 {
            let (here, next) = (self.frame.keep(keep), self.frame.keep(keep).after(8));
            let assembler = &mut *self.assembler;
            assembler.load(x86::RAX, here.memory());
            assembler.load(x86::RDX, next.memory());
            assembler.load(x86::RCX, frame::ELEMENT.memory());
            match self.target {
                Target::Avx512 => assembler.shift_right_double(x86::RAX, x86::RDX),
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
