//! Bytes of x86-64 instructions: VEX for AVX2, EVEX for AVX-512, and a few of the general registers.
//!
//! Our own encoder: generated code needs a table of about 80 instructions of few shapes, while a crate would encode all of x86. The
//! tests compare bytes with what GNU `as` makes of the listing.

mod general;
mod operands;
mod table;

use table::Shape::{Three, Two};

pub use general::{Arithmetic, Condition};
pub use operands::*;
pub use table::*;

/// A jump target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Label(usize);

/// Writes instructions, followed by constants.
#[derive(Debug)]
pub struct Assembler {
    bytes: Vec<u8>,
    constants: Vec<u8>,
    /// The position of a displacement relative to the constants, and the end of its instruction.
    to_constants: Vec<(usize, usize)>,
    labels: Vec<Option<usize>>,
    /// The position of a jump's displacement.
    jumps: Vec<(usize, Label)>,
    /// EVEX, or else VEX.
    pub evex: bool,
    listing: Vec<(usize, String)>,
    lists: bool,
}

impl Assembler {
    /// With EVEX or without; with a listing or without.
    pub fn new(evex: bool, lists: bool) -> Assembler {
        Assembler {
            bytes: Vec::new(),
            constants: Vec::new(),
            to_constants: Vec::new(),
            labels: Vec::new(),
            jumps: Vec::new(),
            evex,
            listing: Vec::new(),
            lists,
        }
    }

    /// The bytes, constants included, and the lines of the listing.
    pub fn finish(mut self) -> (Vec<u8>, Vec<String>) {
        for (at, label) in std::mem::take(&mut self.jumps) {
            let target = self.labels[label.0].expect("every label that is jumped to is placed");
            let distance = target as i64 - (at as i64 + 4);
            self.bytes[at..at + 4].copy_from_slice(&(distance as i32).to_le_bytes());
        }
        let start = self.bytes.len().next_multiple_of(64);
        for (at, end) in std::mem::take(&mut self.to_constants) {
            let field: [u8; 4] = self.bytes[at..at + 4].try_into().expect("four bytes");
            let distance = i32::from_le_bytes(field) + (start - end) as i32;
            self.bytes[at..at + 4].copy_from_slice(&distance.to_le_bytes());
        }
        self.bytes.resize(start, 0xCC);
        self.bytes.extend_from_slice(&self.constants);
        (self.bytes, self.listing.into_iter().map(|(_, line)| line).collect())
    }

    /// The lines of the listing, each with its bytes.
    #[cfg(test)]
    pub fn instructions(&self) -> Vec<(String, Vec<u8>)> {
        let ends = self.listing.iter().skip(1).map(|&(at, _)| at).chain([self.bytes.len()]);
        self.listing.iter().zip(ends).map(|((at, line), end)| (line.clone(), self.bytes[*at..end].to_vec())).collect()
    }

    /// The position of a constant with these bytes; equal ones are shared. Their number is a power of two.
    pub fn constant(&mut self, bytes: &[u8]) -> usize {
        let found = self.constants.chunks_exact(bytes.len()).position(|chunk| chunk == bytes);
        found.map_or_else(
            || {
                self.constants.resize(self.constants.len().next_multiple_of(bytes.len()), 0);
                self.constants.extend_from_slice(bytes);
                self.constants.len() - bytes.len()
            },
            |position| position * bytes.len(),
        )
    }

    /// A label for later.
    pub fn label(&mut self) -> Label {
        self.labels.push(None);
        Label(self.labels.len() - 1)
    }

    /// Binds a label to the current position.
    pub fn place(&mut self, label: Label) {
        self.labels[label.0] = Some(self.bytes.len());
        self.list(|| format!("L{}:", label.0));
    }

    fn list(&mut self, line: impl FnOnce() -> String) {
        if self.lists {
            self.listing.push((self.bytes.len(), line()));
        }
    }

    /// A line of explanation.
    pub fn comment(&mut self, text: impl FnOnce() -> String) {
        self.list(|| format!("; {}", text()));
    }

    fn byte(&mut self, byte: u8) {
        self.bytes.push(byte);
    }

    /// ModRM, SIB and displacement. `unit` is what a short displacement of EVEX counts in; `after` bytes of the instruction follow.
    fn operand(&mut self, field: u8, operand: Operand, unit: i32, after: usize) {
        let field = (field & 7) << 3;
        let memory = match operand {
            Operand::Register(register) => return self.byte(0xC0 | field | (register & 7)),
            Operand::Memory(memory) | Operand::Broadcast(memory) => memory,
        };
        let Base::Register(base) = memory.base else {
            self.byte(field | 5);
            let at = self.bytes.len();
            self.bytes.extend_from_slice(&memory.displacement.to_le_bytes());
            self.to_constants.push((at, at + 4 + after));
            return;
        };
        let displacement = memory.displacement;
        let short =
            (displacement % unit == 0).then_some(displacement / unit).and_then(|short| i8::try_from(short).ok());
        // A base of 5 (or 13) without a displacement means something else.
        let mode = match short {
            Some(0) if base.0 & 7 != 5 => 0x00,
            Some(_) => 0x40,
            None => 0x80,
        };
        match memory.index {
            None if base.0 & 7 != 4 => self.byte(mode | field | (base.0 & 7)),
            index => {
                self.byte(mode | field | 4);
                let (index, shift) = index.map_or((4, 0), |(index, shift)| (index.0 & 7, shift));
                self.byte((shift << 6) | (index << 3) | (base.0 & 7));
            }
        }
        match (mode, short) {
            (0x40, Some(short)) => self.byte(short as u8),
            (0x80, _) => self.bytes.extend_from_slice(&displacement.to_le_bytes()),
            _ => {}
        }
    }

    /// Bit 3 of the numbers of the operand's base (or register) and of its index.
    fn high_bits(operand: Operand) -> (u8, u8) {
        match operand {
            Operand::Register(register) => ((register >> 3) & 1, 0),
            Operand::Memory(memory) | Operand::Broadcast(memory) => {
                let base = match memory.base {
                    Base::Register(base) => base.0 >> 3,
                    Base::Constants => 0,
                };
                (base, memory.index.map_or(0, |(index, _)| index.0 >> 3))
            }
        }
    }

    /// An instruction of vectors. `register` and `second` are what its [`Shape`] says; unused ones are 0.
    pub fn vector(
        &mut self,
        what: Instruction,
        size: Size,
        masked: Masked,
        operands: (u8, u8, Operand),
        number: Option<u8>,
    ) {
        let (register, second, operand) = operands;
        self.list(|| listed(what, size, masked, operands, number));
        let register = match what.shape {
            Shape::Shift(digit) => digit,
            _ => register,
        };
        if self.evex {
            self.evex(what, size, masked, (register, second, operand));
        } else {
            self.vex(what, size, (register, second, operand));
        }
        let unit = match (self.evex, operand, what.narrow) {
            (false, ..) => 1,
            (true, Operand::Broadcast(_), _) | (true, _, SCALAR) => 4,
            (true, _, narrow) => size.bytes() >> narrow,
        };
        self.operand(register, operand, unit, usize::from(number.is_some()));
        if let Some(number) = number {
            self.byte(number);
        }
    }

    fn evex(&mut self, what: Instruction, size: Size, masked: Masked, (register, second, operand): (u8, u8, Operand)) {
        let (base, index) = Self::high_bits(operand);
        let index = match operand {
            Operand::Register(register) => register >> 4,
            _ => index,
        };
        let not = |bit: u8| (bit & 1) ^ 1;
        let high = not(register >> 3) << 7 | not(index) << 6 | not(base) << 5 | not(register >> 4) << 4 | what.map;
        let middle = u8::from(what.wide) << 7 | (!second & 15) << 3 | 4 | what.prefix;
        let (mask, zero) = match masked {
            Masked::All => (0, 0),
            Masked::Merge(mask) => (mask, 0),
            Masked::Zero(mask) => (mask, 1),
        };
        let broadcast = u8::from(matches!(operand, Operand::Broadcast(_)));
        let low = zero << 7 | size.code() << 5 | broadcast << 4 | not(second >> 4) << 3 | mask;
        self.bytes.extend_from_slice(&[0x62, high, middle, low, what.opcode]);
    }

    fn vex(&mut self, what: Instruction, size: Size, (register, second, operand): (u8, u8, Operand)) {
        debug_assert!(!matches!(operand, Operand::Broadcast(_)), "VEX does not broadcast");
        self.vex_prefix(what, size.code(), (register, second, operand), false);
    }

    fn vex_prefix(&mut self, what: Instruction, length: u8, operands: (u8, u8, Operand), wide: bool) {
        let (register, second, operand) = operands;
        let (base, index) = Self::high_bits(operand);
        let not = |bit: u8| (bit & 1) ^ 1;
        let high = not(register >> 3) << 7 | not(index) << 6 | not(base) << 5 | what.map;
        let low = u8::from(wide) << 7 | (!second & 15) << 3 | length << 2 | what.prefix;
        self.bytes.extend_from_slice(&[0xC4, high, low, what.opcode]);
    }

    /// VEX instructions of general and mask registers: their numbers, `wide` for 64 bits.
    fn vex_general(&mut self, what: Instruction, operands: (u8, u8, u8), wide: bool) {
        let (register, second, operand) = operands;
        self.vex_prefix(what, 0, (register, second, Operand::Register(operand)), wide);
        self.operand(register, Operand::Register(operand), 1, 0);
    }

    /// The low `count & 255` bits of `from`, all if that is more than it has.
    pub fn bzhi(&mut self, to: General, from: General, count: General) {
        self.list(|| format!("bzhi {to}, {from}, {count}"));
        self.vex_general(Instruction::new("bzhi", 0, 2, 0xF5, Three), (to.0, count.0, from.0), true);
    }

    /// The low bits of `from`, one after the other, to where `places` has bits.
    pub fn pdep(&mut self, to: General, from: General, places: General) {
        self.list(|| format!("pdep {to}, {from}, {places}"));
        self.vex_general(Instruction::new("pdep", 3, 2, 0xF5, Three), (to.0, from.0, places.0), true);
    }

    /// A mask register from the low 16 bits of a general one.
    pub fn mask_from(&mut self, mask: u8, from: General) {
        self.list(|| format!("kmovw k{mask}, {from}"));
        self.vex_general(Instruction::new("kmovw", 0, 1, 0x92, Two), (mask, 0, from.0), false);
    }

    /// A mask register from 16 bits of memory.
    pub fn load_mask(&mut self, mask: u8, from: Memory) {
        self.list(|| format!("kmovw k{mask}, {from}"));
        let what = Instruction::new("kmovw", 0, 1, 0x90, Two);
        self.vex_prefix(what, 0, (mask, 0, Operand::Memory(from)), false);
        self.operand(mask, Operand::Memory(from), 1, 0);
    }

    /// A general register from a mask.
    pub fn mask_to(&mut self, to: General, mask: u8) {
        self.list(|| format!("kmovw {to}, k{mask}"));
        self.vex_general(Instruction::new("kmovw", 0, 1, 0x93, Two), (to.0, 0, mask), false);
    }

    /// One bit a lane from the signs of a vector's lanes.
    pub fn signs(&mut self, to: General, vector: u8) {
        self.list(|| format!("vmovmskps {to}, ymm{vector}"));
        let what = Instruction::new("vmovmskps", 0, 1, 0x50, Two);
        self.vex_prefix(what, 1, (to.0, 0, Operand::Register(vector)), false);
        self.operand(to.0, Operand::Register(vector), 1, 0);
    }

    /// All lanes of a vector the low 32 bits of a general register.
    pub fn broadcast_general(&mut self, to: u8, from: General) {
        let letter = if self.evex { 'z' } else { 'y' };
        self.list(|| format!("vpbroadcastd {letter}mm{to}, {from}"));
        if self.evex {
            let what = Instruction::new("vpbroadcastd", 1, 2, 0x7C, Two);
            self.evex(what, Size::Zmm, Masked::All, (to, 0, Operand::Register(from.0)));
            self.operand(to, Operand::Register(from.0), 1, 0);
        } else {
            let moved = Instruction::new("vmovd", 1, 1, 0x6E, Two);
            self.vex_general(moved, (to, 0, from.0), false);
            self.vex(VPBROADCASTD, Size::Ymm, (to, 0, Operand::Register(to)));
            self.operand(to, Operand::Register(to), 1, 0);
        }
    }

    /// Clears the upper halves of vectors (`vzeroupper`).
    pub fn zero_upper(&mut self) {
        self.list(|| "vzeroupper".to_string());
        self.bytes.extend_from_slice(&[0xC5, 0xF8, 0x77]);
    }
}
