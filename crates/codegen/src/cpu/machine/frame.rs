//! The layout that generated code uses: the context it is called with, its general registers, its stack frame.

use std::mem::offset_of;

use deuteron_graph::Dtype;

use super::encode::{self as x86, Arithmetic, Assembler, Condition, General, Memory};

/// The argument of a program's code: some rows.
#[derive(Debug)]
#[repr(C)]
pub struct Context {
    /// Rows in flight, 1 at least.
    pub count: u64,
    /// Addresses of each argument's row, for each row in flight; then the same for the next rows, for prefetches.
    pub addresses: *const *mut u8,
    /// Scalars: a block of 16 for each, a lane for each row in flight.
    pub lanes: *mut f32,
    /// Kept rows of the first row in flight.
    pub kept: *mut f32,
    /// Column sums.
    pub partials: *mut f32,
    /// Columns from here ...
    pub begin: u64,
    /// ... to here are processed.
    pub end: u64,
    /// The first row.
    pub row: u64,
    /// An offset of column numbers.
    pub origin: u64,
    /// Pairs of a divisor and a modulus.
    pub axes: *const u64,
}

/// The field of a context at this offset.
pub fn field(offset: usize) -> Memory {
    Memory::at(CONTEXT, offset as i32)
}

/// The context.
pub const CONTEXT: General = x86::RBX;
/// Scalars of this row: lane 0 of their blocks is that of the row.
pub const SCALARS: General = x86::RBP;
/// Rows still to do.
pub const ROWS_LEFT: General = x86::R12;
/// Addresses of this row's arguments.
pub const ADDRESSES: General = x86::R13;
/// The column of the loop's first vector.
pub const COLUMN: General = x86::R14;
/// The last column that a whole body of the loop can start at.
pub const LIMIT: General = x86::R15;
/// Registers for the addresses that the loop of a pass uses most.
const POINTERS: [General; 6] = [x86::RSI, x86::RDI, x86::R8, x86::R9, x86::R10, x86::R11];

/// Bytes of a block of scalars.
const BLOCK_BYTES: i32 = 64;

/// A slot of the stack frame, by its offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Slot(i32);

impl Slot {
    pub fn memory(self) -> Memory {
        Memory::at(x86::RSP, self.0)
    }

    pub fn after(self, bytes: i32) -> Slot {
        Slot(self.0 + bytes)
    }
}

/// The stack pointer of the caller.
pub const CALLER: Slot = Slot(0);
/// Kept rows of this row.
pub const KEPT: Slot = Slot(8);
/// Lanes of a tail's vector.
pub const TAIL_COUNT: Slot = Slot(16);
/// Columns of a tail.
pub const TAIL_LEFT: Slot = Slot(128);
const SAVED_COLUMN: Slot = Slot(24);
/// The number of the row's first element modulo 4, and of the block of random words that comes next.
pub const ELEMENT: Slot = Slot(32);
pub const BLOCK: Slot = Slot(40);
/// Bits of two groups of random words, while they are made.
pub const BITS: Slot = Slot(144);
/// Columns of a head.
pub const HEAD: Slot = Slot(56);
const BUFFER: Slot = Slot(64);
/// For each set of random numbers, bits of the eight vectors at hand, 8 bytes for each group, then those of the group behind them.
const KEEPS: Slot = Slot(160);
/// Sets of random numbers of a pass, at most.
pub const MOST_KEEPS: usize = 8;
const GATHERED: i32 = 448;

/// The contents of an address register.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pointer {
    Argument(u16),
    Kept,
    Partials,
}

/// The layout of one pass.
#[derive(Debug, Clone)]
pub struct Frame {
    /// Vectors that hold the lanes of a reduction: vector `v` of a body goes to number `v % vectors`.
    pub vectors: usize,
    /// Vectors of a loop's body, a multiple of these.
    pub body: usize,
    /// Of each argument.
    pub dtypes: Vec<Dtype>,
    /// Whether an argument is written with streaming stores.
    pub streams: Vec<bool>,
    /// Whether the lines of an argument are prefetched before they are written.
    pub fetches: Vec<bool>,
    /// Whether all rows of an argument are one.
    pub repeats: Vec<bool>,
    /// Bytes of one kept row, and of all those of a row.
    pub kept_row: usize,
    pub kept_rows: usize,
    /// What the address registers hold, in their order.
    pub pointers: Vec<Pointer>,
    /// Reductions whose lanes may be on the stack.
    pub reductions: usize,
    /// Lanes of a vector of random words.
    pub width: usize,
    /// Bytes from a row's addresses to those of the row that comes next in its place.
    pub next_rows: i32,
    /// Bytes of the stack frame so far.
    pub bytes: i32,
}

impl Frame {
    pub fn start_of_spills(&self) -> i32 {
        GATHERED + (self.reductions * self.vectors) as i32 * BLOCK_BYTES
    }

    /// The slot of a spilled value.
    pub fn spill(&mut self, number: usize) -> Slot {
        let slot = self.start_of_spills() + number as i32 * BLOCK_BYTES;
        self.bytes = self.bytes.max(slot + BLOCK_BYTES);
        Slot(slot)
    }

    /// Lanes of a reduction.
    pub fn gathered(&mut self, reduction: u16, vector: usize) -> Slot {
        self.bytes = self.bytes.max(self.start_of_spills());
        let lanes = usize::from(reduction) * self.vectors + vector % self.vectors;
        Slot(GATHERED + lanes as i32 * BLOCK_BYTES)
    }

    /// A scalar of this row.
    pub fn scalar(&self, scalar: u16) -> Memory {
        Memory::at(SCALARS, i32::from(scalar) * BLOCK_BYTES)
    }

    /// A scalar of all rows in flight. Row work runs while [`SCALARS`] is that of the first row.
    pub fn lanes(&self, scalar: u16, vector: usize) -> Memory {
        Memory::at(SCALARS, i32::from(scalar) * BLOCK_BYTES + (vector * 4 * self.width) as i32)
    }

    /// Loads the addresses that stay in registers for a row.
    pub fn load_pointers(&self, assembler: &mut Assembler) {
        for (&pointer, register) in self.pointers.iter().zip(POINTERS) {
            self.load_pointer(assembler, pointer, register);
        }
    }

    fn load_pointer(&self, assembler: &mut Assembler, pointer: Pointer, to: General) {
        let from = match pointer {
            Pointer::Argument(arg) => Memory::at(ADDRESSES, i32::from(arg) * 8),
            Pointer::Kept => KEPT.memory(),
            Pointer::Partials => field(offset_of!(Context, partials)),
        };
        assembler.load(to, from);
    }

    /// A register that holds an address: one of its own, or `rax`.
    pub fn pointer(&self, assembler: &mut Assembler, pointer: Pointer) -> General {
        let own = self.pointers.iter().position(|&known| known == pointer);
        own.and_then(|position| POINTERS.get(position).copied()).unwrap_or_else(|| {
            self.load_pointer(assembler, pointer, x86::RAX);
            x86::RAX
        })
    }

    /// Elements of an argument, `first` behind the loop's column.
    pub fn argument(&self, assembler: &mut Assembler, arg: u16, first: usize) -> Memory {
        let bytes = self.dtypes[usize::from(arg)].bytes();
        let base = self.pointer(assembler, Pointer::Argument(arg));
        Memory::at(base, (first * bytes) as i32).indexed(COLUMN, bytes.trailing_zeros() as u8)
    }

    /// The memory operand at this many bytes after the element of an argument at the loop's column.
    pub fn argument_behind(&self, assembler: &mut Assembler, arg: u16, bytes: usize) -> Memory {
        let at = self.argument(assembler, arg, 0);
        Memory { displacement: bytes as i32, ..at }
    }

    /// The same of the row that comes next.
    pub fn next_argument(&self, assembler: &mut Assembler, arg: u16, bytes_behind: usize) -> Memory {
        let bytes = self.dtypes[usize::from(arg)].bytes();
        assembler.load(x86::RAX, Memory::at(ADDRESSES, self.next_rows + i32::from(arg) * 8));
        Memory::at(x86::RAX, bytes_behind as i32).indexed(COLUMN, bytes.trailing_zeros() as u8)
    }

    pub fn kept(&self, assembler: &mut Assembler, row: u16, first: usize) -> Memory {
        let base = self.pointer(assembler, Pointer::Kept);
        Memory::at(base, (usize::from(row) * self.kept_row + 4 * first) as i32).indexed(COLUMN, 2)
    }

    /// Lanes of a column sum whose elements start `at` behind the first.
    pub fn partial(&self, assembler: &mut Assembler, at: u32, first: usize) -> Memory {
        let base = self.pointer(assembler, Pointer::Partials);
        Memory::at(base, (4 * (at as usize + first)) as i32).indexed(COLUMN, 2)
    }

    /// `rax` becomes the number of the column `first` behind the loop's.
    pub fn column(&self, assembler: &mut Assembler, first: i32) {
        assembler.address(x86::RAX, Memory::at(COLUMN, first));
        assembler.compute_memory(Arithmetic::Add, x86::RAX, field(offset_of!(Context, origin)));
    }

    /// `rax` becomes the number of this row.
    pub fn row_number(&self, assembler: &mut Assembler) {
        assembler.load(x86::RAX, field(offset_of!(Context, row)));
        assembler.compute_memory(Arithmetic::Add, x86::RAX, field(offset_of!(Context, count)));
        assembler.compute(Arithmetic::Sub, x86::RAX, ROWS_LEFT);
    }

    /// `rax` becomes a half of the number of the next block of random words, or of the first one so many groups behind it.
    pub fn block(&self, assembler: &mut Assembler, half: u8, groups_behind: usize) {
        assembler.load(x86::RAX, BLOCK.memory());
        if groups_behind > 0 {
            assembler.compute_number(Arithmetic::Add, x86::RAX, (groups_behind * self.width) as i32);
        }
        if half == 1 {
            assembler.shift_right(x86::RAX, 32);
        }
    }

    /// Bits of a set of random numbers: of group 0 or 1 of the vectors at hand, or of the one behind them, 2.
    pub fn keep(&self, keep: u16, group: usize) -> Slot {
        KEEPS.after(32 * i32::from(keep) + 8 * group as i32)
    }

    /// Adds the bits in `rax`, one for the same word of each block, to the bits of the elements of a group that is made.
    pub fn dropped(&self, assembler: &mut Assembler, word: u8, group: usize) {
        let bits = BITS.after(8 * group as i32).memory();
        assembler.number(x86::RDX, 0x1111_1111_1111_1111 << word);
        assembler.pdep(x86::RAX, x86::RAX, x86::RDX);
        if word > 0 {
            assembler.compute_memory(Arithmetic::Or, x86::RAX, bits);
        }
        assembler.store(bits, x86::RAX);
    }

    /// A vector's memory, for tails.
    pub fn buffer(&self) -> Slot {
        BUFFER
    }

    /// Copies the elements of a tail's vector, 1 at least.
    pub fn copy_tail(&self, assembler: &mut Assembler, to: Memory, from: Memory, bytes: usize) {
        // One of the two may be based on `rax`, and both may count from the column.
        let (source, target, count, byte) = (x86::RDX, x86::RAX, x86::RCX, COLUMN);
        assembler.address(source, from);
        assembler.address(target, to);
        assembler.store(SAVED_COLUMN.memory(), COLUMN);
        assembler.load(count, TAIL_COUNT.memory());
        if bytes == 2 {
            assembler.shift_left(count, 1);
        }
        let again = assembler.label();
        assembler.place(again);
        assembler.load_byte(byte, Memory::at(source, -1).indexed(count, 0));
        assembler.store_byte(Memory::at(target, -1).indexed(count, 0), byte);
        assembler.compute_number(Arithmetic::Sub, count, 1);
        assembler.jump_if(Condition::NotEqual, again);
        assembler.load(COLUMN, SAVED_COLUMN.memory());
    }
}
