//! Instructions of general registers, and jumps.

use super::{Assembler, General, Label, Memory, Operand, RSP};

/// Conditions of a jump: the low four bits of its opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Condition {
    NotEqual = 5,
    Equal = 4,
    /// unsigned
    Above = 7,
    /// signed
    LessOrEqual = 14,
    /// signed
    Greater = 15,
}

impl Condition {
    fn name(self) -> &'static str {
        match self {
            Condition::NotEqual => "jne",
            Condition::Equal => "je",
            Condition::Above => "ja",
            Condition::LessOrEqual => "jle",
            Condition::Greater => "jg",
        }
    }
}

/// Operations of two general registers, or a register and a number: number of the group, opcode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Arithmetic {
    Add = 0,
    Or = 1,
    And = 4,
    Sub = 5,
    Xor = 6,
    Compare = 7,
}

impl Arithmetic {
    fn name(self) -> &'static str {
        match self {
            Arithmetic::Add => "add",
            Arithmetic::Or => "or",
            Arithmetic::And => "and",
            Arithmetic::Sub => "sub",
            Arithmetic::Xor => "xor",
            Arithmetic::Compare => "cmp",
        }
    }
}

/// Instructions of general registers, all of 64 bits unless they say otherwise.
impl Assembler {
    fn general(&mut self, opcodes: &[u8], wide: bool, register: u8, operand: Operand, after: usize) {
        let (base, index) = Self::high_bits(operand);
        let rex = 0x40 | u8::from(wide) << 3 | (register >> 3) << 2 | index << 1 | base;
        if rex != 0x40 {
            self.byte(rex);
        }
        self.bytes.extend_from_slice(opcodes);
        self.operand(register, operand, 1, after);
    }

    pub fn load(&mut self, to: General, from: Memory) {
        self.list(|| format!("mov {to}, {from}"));
        self.general(&[0x8B], true, to.0, Operand::Memory(from), 0);
    }

    pub fn store(&mut self, to: Memory, from: General) {
        self.list(|| format!("mov {to}, {from}"));
        self.general(&[0x89], true, from.0, Operand::Memory(to), 0);
    }

    /// 32 bits.
    pub fn store_word(&mut self, to: Memory, from: General) {
        self.list(|| format!("mov dword {to}, {from}"));
        self.general(&[0x89], false, from.0, Operand::Memory(to), 0);
    }

    pub fn load_byte(&mut self, to: General, from: Memory) {
        self.list(|| format!("movzx {to}, byte {from}"));
        self.general(&[0x0F, 0xB6], true, to.0, Operand::Memory(from), 0);
    }

    /// The low byte of a register, which is none of 4 to 7.
    pub fn store_byte(&mut self, to: Memory, from: General) {
        debug_assert!(!(4..8).contains(&from.0), "these need a prefix");
        self.list(|| format!("mov byte {to}, {from}"));
        self.general(&[0x88], false, from.0, Operand::Memory(to), 0);
    }

    pub fn address(&mut self, to: General, of: Memory) {
        self.list(|| format!("lea {to}, {of}"));
        self.general(&[0x8D], true, to.0, Operand::Memory(of), 0);
    }

    pub fn copy(&mut self, to: General, from: General) {
        self.list(|| format!("mov {to}, {from}"));
        self.general(&[0x89], true, from.0, Operand::Register(to.0), 0);
    }

    pub fn number(&mut self, to: General, value: u64) {
        self.list(|| format!("mov {to}, {value:#x}"));
        match u32::try_from(value) {
            Ok(value) => {
                if to.0 >= 8 {
                    self.byte(0x41);
                }
                self.byte(0xB8 | (to.0 & 7));
                self.bytes.extend_from_slice(&value.to_le_bytes());
            }
            Err(_) => {
                self.byte(0x48 | to.0 >> 3);
                self.byte(0xB8 | (to.0 & 7));
                self.bytes.extend_from_slice(&value.to_le_bytes());
            }
        }
    }

    pub fn compute(&mut self, what: Arithmetic, to: General, from: General) {
        self.list(|| format!("{} {to}, {from}", what.name()));
        self.general(&[(what as u8) << 3 | 1], true, from.0, Operand::Register(to.0), 0);
    }

    pub fn compute_memory(&mut self, what: Arithmetic, to: General, from: Memory) {
        self.list(|| format!("{} {to}, {from}", what.name()));
        self.general(&[(what as u8) << 3 | 3], true, to.0, Operand::Memory(from), 0);
    }

    pub fn compute_number(&mut self, what: Arithmetic, to: General, number: i32) {
        self.list(|| format!("{} {to}, {number}", what.name()));
        match i8::try_from(number) {
            Ok(short) => {
                self.general(&[0x83], true, what as u8, Operand::Register(to.0), 1);
                self.byte(short as u8);
            }
            Err(_) => {
                self.general(&[0x81], true, what as u8, Operand::Register(to.0), 4);
                self.bytes.extend_from_slice(&number.to_le_bytes());
            }
        }
    }

    /// Zeros come in.
    pub fn shift_right(&mut self, register: General, count: u8) {
        self.list(|| format!("shr {register}, {count}"));
        self.general(&[0xC1], true, 5, Operand::Register(register.0), 1);
        self.byte(count);
    }

    pub fn shift_left(&mut self, register: General, count: u8) {
        self.list(|| format!("shl {register}, {count}"));
        self.general(&[0xC1], true, 4, Operand::Register(register.0), 1);
        self.byte(count);
    }

    /// `to >>= rcx & 63`, zeros come in.
    pub fn shift_right_by_count(&mut self, to: General) {
        self.list(|| format!("shr {to}, cl"));
        self.general(&[0xD3], true, 5, Operand::Register(to.0), 0);
    }

    /// `to = (from : to) >> (rcx & 63)`
    pub fn shift_right_double(&mut self, to: General, from: General) {
        self.list(|| format!("shrd {to}, {from}, cl"));
        self.general(&[0x0F, 0xAD], true, from.0, Operand::Register(to.0), 0);
    }

    pub fn multiply(&mut self, to: General, by: Memory) {
        self.list(|| format!("imul {to}, {by}"));
        self.general(&[0x0F, 0xAF], true, to.0, Operand::Memory(by), 0);
    }

    /// `rax = (rdx : rax) / by`, `rdx` the remainder.
    pub fn divide(&mut self, by: Memory) {
        self.list(|| format!("div {by}"));
        self.general(&[0xF7], true, 6, Operand::Memory(by), 0);
    }

    /// Reserves stack memory, whose size [`Assembler::patch_stack`] sets later; returns the position of the number.
    pub fn take_stack(&mut self) -> usize {
        self.list(|| "sub rsp, frame".to_string());
        self.general(&[0x81], true, Arithmetic::Sub as u8, Operand::Register(RSP.0), 4);
        self.bytes.extend_from_slice(&[0; 4]);
        self.bytes.len() - 4
    }

    /// Sets the size of the reserved stack memory.
    pub fn patch_stack(&mut self, at: usize, bytes: usize) {
        self.bytes[at..at + 4].copy_from_slice(&(bytes as u32).to_le_bytes());
    }

    /// Prefetches a line into the cache of this level: 1 or 2.
    pub fn prefetch(&mut self, level: u8, at: Memory) {
        self.list(|| format!("prefetcht{} {at}", level - 1));
        self.general(&[0x0F, 0x18], false, level, Operand::Memory(at), 0);
    }

    /// Prefetches a line that will be written.
    pub fn prefetch_to_write(&mut self, at: Memory) {
        self.list(|| format!("prefetchw {at}"));
        self.general(&[0x0F, 0x0D], false, 1, Operand::Memory(at), 0);
    }

    pub fn push(&mut self, register: General) {
        self.list(|| format!("push {register}"));
        if register.0 >= 8 {
            self.byte(0x41);
        }
        self.byte(0x50 | (register.0 & 7));
    }

    pub fn pop(&mut self, register: General) {
        self.list(|| format!("pop {register}"));
        if register.0 >= 8 {
            self.byte(0x41);
        }
        self.byte(0x58 | (register.0 & 7));
    }

    pub fn jump_if(&mut self, condition: Condition, to: Label) {
        self.list(|| format!("{} L{}", condition.name(), to.0));
        self.bytes.extend_from_slice(&[0x0F, 0x80 | condition as u8]);
        self.distance(to);
    }

    pub fn jump(&mut self, to: Label) {
        self.list(|| format!("jmp L{}", to.0));
        self.byte(0xE9);
        self.distance(to);
    }

    fn distance(&mut self, to: Label) {
        self.jumps.push((self.bytes.len(), to));
        self.bytes.extend_from_slice(&[0; 4]);
    }

    pub fn leave(&mut self) {
        self.list(|| "ret".to_string());
        self.byte(0xC3);
    }
}
