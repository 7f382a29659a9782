//! Registers, memory operands, sizes of vectors.

use std::fmt;

/// A general register by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct General(pub u8);

pub const RAX: General = General(0);
pub const RCX: General = General(1);
pub const RDX: General = General(2);
pub const RBX: General = General(3);
pub const RSP: General = General(4);
pub const RBP: General = General(5);
pub const RSI: General = General(6);
pub const RDI: General = General(7);
pub const R8: General = General(8);
pub const R9: General = General(9);
pub const R10: General = General(10);
pub const R11: General = General(11);
pub const R12: General = General(12);
pub const R13: General = General(13);
pub const R14: General = General(14);
pub const R15: General = General(15);

impl fmt::Display for General {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMES: [&str; 8] = ["rax", "rcx", "rdx", "rbx", "rsp", "rbp", "rsi", "rdi"];
        match NAMES.get(usize::from(self.0)) {
            Some(name) => f.write_str(name),
            None => write!(f, "r{}", self.0),
        }
    }
}

/// The base of an address.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Base {
    Register(General),
    /// The constants after the code.
    Constants,
}

/// A place in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Memory {
    pub base: Base,
    /// A register and the power of two that it is multiplied by.
    pub index: Option<(General, u8)>,
    pub displacement: i32,
}

impl Memory {
    pub fn at(base: General, displacement: i32) -> Memory {
        Memory { base: Base::Register(base), index: None, displacement }
    }

    pub fn constant(offset: usize) -> Memory {
        Memory { base: Base::Constants, index: None, displacement: offset as i32 }
    }

    /// With `index << shift` added.
    pub fn indexed(self, index: General, shift: u8) -> Memory {
        Memory { index: Some((index, shift)), ..self }
    }
}

impl fmt::Display for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.base {
            Base::Register(base) => write!(f, "[{base}")?,
            Base::Constants => f.write_str("[constants")?,
        }
        if let Some((index, shift)) = self.index {
            write!(f, "+{index}*{}", 1 << shift)?;
        }
        match self.displacement {
            0 => f.write_str("]"),
            displacement => write!(f, "{displacement:+}]"),
        }
    }
}

/// An operand that may be in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Operand {
    Register(u8),
    Memory(Memory),
    /// One element of 32 bits for every lane; EVEX only.
    Broadcast(Memory),
}

/// Bytes of a vector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Size {
    Xmm,
    Ymm,
    Zmm,
}

impl Size {
    pub(super) fn bytes(self) -> i32 {
        16 << self.code()
    }

    pub(super) fn code(self) -> u8 {
        self as u8
    }

    /// The size with half as many bytes, 16 at least.
    pub fn half(self) -> Size {
        match self {
            Size::Zmm => Size::Ymm,
            Size::Ymm | Size::Xmm => Size::Xmm,
        }
    }

    pub(super) fn letter(self) -> char {
        ['x', 'y', 'z'][usize::from(self.code())]
    }
}
