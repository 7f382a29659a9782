//! Elements of the row to registers and back.

use deuteron_graph::Dtype;

use super::super::encode::{self as x86, Masked, Memory, Operand, Size};
use super::super::values::{Op, Value};
use super::{TAIL, TAIL_VECTOR, Variant, Walk};

impl Walk<'_> {
    /// Where the elements of an operation are, and their type.
    fn elements(&mut self, op: Op) -> (Memory, Dtype) {
        let first = self.vector_at_hand() * self.target.width();
        match op {
            Op::Load(arg) | Op::Store(arg, _) => {
                (self.frame.argument(self.assembler, arg, first), self.frame.dtypes[usize::from(arg)])
            }
            Op::Kept(row) | Op::Keeping(row, _) => (self.frame.kept(self.assembler, row, first), Dtype::F32),
            Op::Partial(at) | Op::AddColumn(at, _) => (self.frame.partial(self.assembler, at, first), Dtype::F32),
            _ => unreachable!("{op:?} has no elements"),
        }
    }

    pub(super) fn load(&mut self, op: Op, value: Value) {
        let (from, dtype) = self.elements(op);
        let from = Operand::Memory(from);
        let to = self.result(op, value);
        let tail = self.variant.tail;
        let size = self.target.size();
        if self.target.is_avx512() {
            let (instruction, size) = match dtype.bytes() {
                4 => (x86::VMOVUPS, size),
                2 => (x86::VMOVDQU16, size.half()),
                _ => (x86::VMOVDQU8, size.half().half()),
            };
            let masked = if tail { Masked::Zero(TAIL) } else { Masked::All };
            return self.assembler.vector(instruction, size, masked, (to, 0, from), None);
        }
        let Operand::Memory(memory) = from else { unreachable!("made above") };
        match (dtype.bytes(), tail) {
            (4, false) => self.plain(x86::VMOVUPS, (to, 0, from)),
            (4, true) => self.plain(x86::VMASKMOVPS, (to, TAIL_VECTOR, from)),
            (bytes, tail) => {
                let from = match tail {
                    true => {
                        let buffer = self.frame.buffer().memory();
                        self.frame.copy_tail(self.assembler, buffer, memory, bytes);
                        Operand::Memory(buffer)
                    }
                    false => from,
                };
                let instruction = if bytes == 2 { x86::VMOVDQU } else { x86::VMOVQ };
                self.assembler.vector(instruction, Size::Xmm, Masked::All, (to, 0, from), None);
            }
        }
    }

    pub(super) fn store(&mut self, op: Op) {
        let value = op.operands().next().expect("a store has a value");
        let from = self.vector(value);
        let (to, dtype) = self.elements(op);
        let Variant { tail, stream, .. } = self.variant;
        let stream = stream && matches!(op, Op::Store(arg, _) if self.frame.streams[usize::from(arg)]);
        let size = self.target.size();
        let operands = (from, 0, Operand::Memory(to));
        if self.target.is_avx512() {
            let (instruction, past, size) = match dtype.bytes() {
                4 => (x86::VMOVUPS_STORE, x86::VMOVNTPS, size),
                2 => (x86::VMOVDQU16_STORE, x86::VMOVNTDQ, size.half()),
                _ => (x86::VMOVDQU8_STORE, x86::VMOVNTDQ, size.half().half()),
            };
            let masked = if tail { Masked::Merge(TAIL) } else { Masked::All };
            let instruction = if stream { past } else { instruction };
            return self.assembler.vector(instruction, size, masked, operands, None);
        }
        match (dtype.bytes(), tail) {
            (4, false) => self.plain(if stream { x86::VMOVNTPS } else { x86::VMOVUPS_STORE }, operands),
            (4, true) => self.plain(x86::VMASKMOVPS_STORE, (from, TAIL_VECTOR, Operand::Memory(to))),
            (bytes, tail) => {
                let instruction = match (bytes, stream) {
                    (2, true) => x86::VMOVNTDQ,
                    (2, false) => x86::VMOVDQU_STORE,
                    _ => x86::VMOVQ_STORE,
                };
                let place = if tail { self.frame.buffer().memory() } else { to };
                self.assembler.vector(instruction, Size::Xmm, Masked::All, (from, 0, Operand::Memory(place)), None);
                if tail {
                    self.frame.copy_tail(self.assembler, to, place, bytes);
                }
            }
        }
    }
}
