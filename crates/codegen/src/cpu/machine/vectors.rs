//! Register allocation and instruction selection for straight-line code on one vector of columns.
//!
//! Registers are allocated in one pass. A value frees its register after its last reader; if all are in use, the value that is read
//! furthest ahead is spilled to the stack. Constants and row scalars are memory operands, unless there are registers to hold them
//! across the whole loop.

mod instructions;
mod moves;

use super::encode::{self as x86, Assembler, Masked, Memory, Operand, Size};
use super::frame::{Frame, Slot};
use super::values::{Op, Value};
use super::weave::{Woven, weave};

/// The mask of the lanes that a tail has, and the one of odd lanes.
pub const TAIL: u8 = 1;
pub const ODD: u8 = 7;
/// Mask registers for truth values.
const MASKS: std::ops::Range<u8> = 2..7;

/// An instruction set of vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Target {
    /// AVX-512 (F, BW, DQ, VL) and BMI2: 16 lanes
    Avx512 {
        /// VBMI
        picks_bytes: bool,
    },
    /// AVX2, FMA, F16C and BMI2: 8 lanes
    Avx2,
}

impl Target {
    /// Of a vector.
    pub(super) fn size(self) -> Size {
        match self {
            Target::Avx512 { .. } => Size::Zmm,
            Target::Avx2 => Size::Ymm,
        }
    }

    /// Lanes of a vector.
    pub fn width(self) -> usize {
        match self {
            Target::Avx512 { .. } => 16,
            Target::Avx2 => 8,
        }
    }

    /// Vector registers for values. With AVX2, the last one holds the mask of the tail.
    pub fn registers(self) -> u8 {
        match self {
            Target::Avx512 { .. } => 32,
            Target::Avx2 => 15,
        }
    }

    /// Whether it is AVX-512.
    pub fn is_avx512(self) -> bool {
        matches!(self, Target::Avx512 { .. })
    }
}

/// With AVX2, the register that holds the mask of the tail.
pub const TAIL_VECTOR: u8 = 15;

/// Which vectors of a loop's body are emitted, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Variant {
    /// Its number in the body; of the first one, if there are several.
    pub vector: usize,
    /// How many vectors are emitted together, their operations in turn.
    pub count: usize,
    /// Only some lanes count.
    pub tail: bool,
    /// Results use streaming stores.
    pub stream: bool,
}

impl Variant {
    /// One whole vector.
    pub fn whole(vector: usize) -> Variant {
        Variant { vector, count: 1, tail: false, stream: false }
    }

    /// Some lanes of one vector.
    pub fn tail(vector: usize) -> Variant {
        Variant { tail: true, ..Variant::whole(vector) }
    }
}

/// Leaves that stay in registers across a loop, the last registers first.
#[derive(Debug, Clone, Default)]
pub struct Held {
    /// leaf and register
    pub leaves: Vec<(Op, u8)>,
    /// The first register of the lanes of each reduction, or none where they are on the stack.
    pub gathered: Vec<Option<u8>>,
}

/// More truth values at once than there are mask registers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TooManyMasks;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Owner {
    Nobody,
    Held,
    Value(Value),
}

/// Emits instructions that have nothing to do with the operations, one at a time: it is given their number. They may use `rax`.
pub type Between<'a> = &'a mut dyn FnMut(&mut Assembler, &Frame, usize);

/// Emits `ops` for the vectors of a variant; returns the number of stack slots used.
pub fn emit(
    assembler: &mut Assembler,
    target: Target,
    frame: &mut Frame,
    ops: &[Op],
    held: &Held,
    variant: Variant,
) -> Result<usize, TooManyMasks> {
    emit_spread(assembler, target, frame, ops, held, variant, (0, &mut |_, _, _| {}))
}

/// The same with so many other instructions spread evenly between the operations.
pub fn emit_spread(
    assembler: &mut Assembler,
    target: Target,
    frame: &mut Frame,
    ops: &[Op],
    held: &Held,
    variant: Variant,
    (others, between): (usize, Between<'_>),
) -> Result<usize, TooManyMasks> {
    let Woven { ops, places } = &weave(ops, variant.count);
    let mut uses: Vec<Vec<u32>> = vec![Vec::new(); ops.len()];
    for (at, op) in ops.iter().enumerate() {
        op.operands().for_each(|operand| uses[operand.index()].push(at as u32));
    }
    let mut owners = [Owner::Nobody; 32];
    owners[usize::from(target.registers())..].fill(Owner::Held);
    let vectors = frame.vectors;
    for &register in held.leaves.iter().map(|(_, register)| register) {
        owners[usize::from(register)] = Owner::Held;
    }
    for first in held.gathered.iter().flatten() {
        owners[usize::from(*first)..][..vectors].fill(Owner::Held);
    }
    let mut walk = Walk {
        assembler,
        target,
        frame,
        ops,
        places,
        held,
        variant,
        uses,
        owners,
        masks: [None; 8],
        registers: vec![None; ops.len()],
        slots: vec![None; ops.len()],
        spilled: 0,
        free_slots: Vec::new(),
        retired: Vec::new(),
        at: 0,
        locked: Vec::new(),
        out_of_masks: false,
    };
    let mut done = 0;
    for (at, &op) in ops.iter().enumerate() {
        while done < others && done * ops.len() <= at * others {
            between(walk.assembler, walk.frame, done);
            done += 1;
        }
        walk.at = at as u32;
        walk.locked.clear();
        walk.free_slots.append(&mut walk.retired);
        walk.op(op, Value(walk.at));
    }
    if walk.out_of_masks { Err(TooManyMasks) } else { Ok(walk.spilled) }
}

struct Walk<'a> {
    assembler: &'a mut Assembler,
    target: Target,
    frame: &'a mut Frame,
    ops: &'a [Op],
    /// The vector of each operation, counted from the first one.
    places: &'a [u8],
    held: &'a Held,
    variant: Variant,
    /// Where each value is read, in order.
    uses: Vec<Vec<u32>>,
    owners: [Owner; 32],
    masks: [Option<Value>; 8],
    /// The register of each value: of vectors, or of masks.
    registers: Vec<Option<u8>>,
    /// The slot of the stack of each value.
    slots: Vec<Option<Slot>>,
    spilled: usize,
    free_slots: Vec<Slot>,
    /// Slots whose values are read for the last time by the operation that is emitted.
    retired: Vec<Slot>,
    /// The operation that is emitted.
    at: u32,
    /// Registers that it uses.
    locked: Vec<u8>,
    out_of_masks: bool,
}

/// Registers.
impl Walk<'_> {
    /// The vector of the body that a value belongs to.
    fn vector_of(&self, value: Value) -> usize {
        self.variant.vector + usize::from(self.places[value.index()])
    }

    /// The vector of the body that the operation at hand works on.
    fn vector_at_hand(&self) -> usize {
        self.vector_of(Value(self.at))
    }

    /// The register of the lanes that a reduction gathers from a vector, if they are in one.
    fn gathered(&self, reduction: u16, vector: usize) -> Option<u8> {
        let first = self.held.gathered[usize::from(reduction)]?;
        Some(first + (vector % self.frame.vectors) as u8)
    }

    /// Where a value is read after the operation that is emitted.
    fn next_use(&self, value: Value) -> Option<u32> {
        self.uses[value.index()].iter().copied().find(|&at| at > self.at)
    }

    /// The register that holds a leaf across the loop.
    fn held(&self, value: Value) -> Option<u8> {
        let op = self.ops[value.index()];
        if let Op::Gathered(reduction) = op {
            return self.gathered(reduction, self.vector_of(value));
        }
        if let Op::GatheredFrom(reduction, vector) = op {
            return self.held.gathered[usize::from(reduction)].map(|first| first + vector);
        }
        self.held.leaves.iter().find(|(leaf, _)| *leaf == op).map(|&(_, register)| register)
    }

    fn register(&self, value: Value) -> Option<u8> {
        self.registers[value.index()].or_else(|| self.held(value))
    }

    /// A free register, after spilling the value that is read furthest ahead if necessary.
    fn free(&mut self) -> u8 {
        let count = usize::from(self.target.registers());
        let found = (0..count)
            .find(|&register| self.owners[register] == Owner::Nobody && !self.locked.contains(&(register as u8)));
        if let Some(register) = found {
            return register as u8;
        }
        let mut furthest = None;
        for register in 0..count as u8 {
            let Owner::Value(value) = self.owners[usize::from(register)] else { continue };
            let next = self.next_use(value).unwrap_or(u32::MAX);
            if !self.locked.contains(&register) && furthest.is_none_or(|(known, _, _)| known < next) {
                furthest = Some((next, register, value));
            }
        }
        let (_, register, value) = furthest.expect("operations have fewer operands than there are registers");
        if !self.ops[value.index()].is_leaf() && self.slots[value.index()].is_none() {
            let slot = self.free_slots.pop().unwrap_or_else(|| {
                self.spilled += 1;
                self.frame.spill(self.spilled - 1)
            });
            self.slots[value.index()] = Some(slot);
            self.plain(x86::VMOVUPS_STORE, (register, 0, Operand::Memory(slot.memory())));
        }
        self.registers[value.index()] = None;
        self.owners[usize::from(register)] = Owner::Nobody;
        register
    }

    /// A register that is free after this operation.
    fn temporary(&mut self) -> u8 {
        let register = self.free();
        self.locked.push(register);
        register
    }

    fn own(&mut self, value: Value, register: u8) {
        self.registers[value.index()] = Some(register);
        self.owners[usize::from(register)] = Owner::Value(value);
    }

    /// A value in a register.
    fn vector(&mut self, value: Value) -> u8 {
        let register = self.register(value).unwrap_or_else(|| {
            let register = self.free();
            match self.slots[value.index()] {
                Some(slot) => self.plain(x86::VMOVUPS, (register, 0, Operand::Memory(slot.memory()))),
                None => self.leaf(self.ops[value.index()], register),
            }
            self.own(value, register);
            register
        });
        self.locked.push(register);
        register
    }

    /// A value as the last operand of an instruction.
    fn operand(&mut self, value: Value) -> Operand {
        if let Some(register) = self.register(value) {
            self.locked.push(register);
            return Operand::Register(register);
        }
        if let Some(slot) = self.slots[value.index()] {
            return Operand::Memory(slot.memory());
        }
        match (self.ops[value.index()], self.target) {
            (Op::Const(bits), Target::Avx512 { .. }) => {
                Operand::Broadcast(Memory::constant(self.assembler.constant(&bits.to_le_bytes())))
            }
            (Op::Const(bits), Target::Avx2) => Operand::Memory(self.repeated(bits)),
            (Op::Scalar(scalar), Target::Avx512 { .. }) => Operand::Broadcast(self.frame.scalar(scalar)),
            _ => Operand::Register(self.vector(value)),
        }
    }

    /// A constant of AVX2, in all lanes.
    fn repeated(&mut self, bits: u32) -> Memory {
        let bytes: Vec<u8> = bits.to_le_bytes().repeat(8);
        Memory::constant(self.assembler.constant(&bytes))
    }

    /// Whether a value is no constant or scalar that would have to be loaded.
    fn is_at_hand(&self, value: Value) -> bool {
        self.register(value).is_some()
    }

    /// Makes a leaf.
    fn leaf(&mut self, op: Op, to: u8) {
        load_leaf(self.assembler, self.target, self.frame, op, to);
    }

    /// Frees the registers of operands without further readers.
    fn release(&mut self, op: Op) {
        for value in op.operands() {
            if self.next_use(value).is_some() {
                continue;
            }
            self.retired.extend(self.slots[value.index()].take());
            if let Some(register) = self.registers[value.index()].take() {
                match self.is_mask(value) {
                    true => self.masks[usize::from(register)] = None,
                    // The lanes of a reduction stay theirs, though the value that went to them is read no more.
                    false if self.owners[usize::from(register)] == Owner::Held => {}
                    false => self.owners[usize::from(register)] = Owner::Nobody,
                }
            }
        }
    }

    fn is_mask(&self, value: Value) -> bool {
        self.target.is_avx512() && self.ops[value.index()].is_question()
    }

    /// The register for the result of an operation whose operands are all read before it is written.
    fn result(&mut self, op: Op, value: Value) -> u8 {
        self.release(op);
        // A reduction's step goes straight to its lanes, unless some of these must stay.
        let register = self.gathers(value).filter(|_| !self.variant.tail);
        let register = register.unwrap_or_else(|| {
            self.locked.clear();
            self.free()
        });
        match self.owners[usize::from(register)] {
            Owner::Held => self.registers[value.index()] = Some(register),
            _ => self.own(value, register),
        }
        register
    }

    /// The register of a reduction's lanes, if this value becomes them and nothing reads the old ones later.
    fn gathers(&self, value: Value) -> Option<u8> {
        let [only] = *self.uses[value.index()] else { return None };
        let Op::Gather(reduction, _) = self.ops[only as usize] else { return None };
        let register = self.gathered(reduction, self.vector_of(value))?;
        // A step is emitted as a whole, so that only its own operations could.
        let later = (self.at + 1..only).any(|at| {
            let mut operands = self.ops[at as usize].operands();
            operands.any(|operand| self.ops[operand.index()] == Op::Gathered(reduction))
        });
        (!later).then_some(register)
    }

    fn mask(&mut self, value: Value) -> u8 {
        let free = MASKS.into_iter().find(|&mask| self.masks[usize::from(mask)].is_none());
        self.out_of_masks |= free.is_none();
        let mask = free.unwrap_or(MASKS.start);
        self.masks[usize::from(mask)] = Some(value);
        self.registers[value.index()] = Some(mask);
        mask
    }
}

/// A leaf in all lanes of a register.
pub fn load_leaf(assembler: &mut Assembler, target: Target, frame: &Frame, op: Op, to: u8) {
    let size = target.size();
    match op {
        Op::Const(bits) => {
            let at = assembler.constant(&bits.to_le_bytes());
            let from = Operand::Memory(Memory::constant(at));
            assembler.vector(x86::VBROADCASTSS, size, Masked::All, (to, 0, from), None);
        }
        Op::Scalar(scalar) => {
            let from = Operand::Memory(frame.scalar(scalar));
            assembler.vector(x86::VBROADCASTSS, size, Masked::All, (to, 0, from), None);
        }
        Op::Bytes(bytes) => {
            let from = Operand::Memory(Memory::constant(assembler.constant(&bytes.numbers())));
            assembler.vector(x86::VMOVUPS, size, Masked::All, (to, 0, from), None);
        }
        Op::CountUp => {
            let lanes: Vec<u8> = (0..target.width() as u32).flat_map(u32::to_le_bytes).collect();
            let from = Operand::Memory(Memory::constant(assembler.constant(&lanes)));
            assembler.vector(x86::VMOVUPS, size, Masked::All, (to, 0, from), None);
        }
        _ => unreachable!("{op:?} is not a leaf"),
    }
}
