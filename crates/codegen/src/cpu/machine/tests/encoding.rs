//! Every instruction with low and high registers, in registers and memory: text and bytes are those of `encoding.txt`, which GNU
//! `as` 2.40 was seen to agree with.

use std::fmt::Write as _;

use crate::cpu::machine::encode::{
    self as x86, Arithmetic, Assembler, Condition, Instruction, Masked, Memory, Operand, Shape, Size,
};

/// Names of instructions that only one of the two prefixes has.
const EVEX_ONLY: [&str; 17] = [
    "vpermb",
    "vpternlogd",
    "vfixupimmps",
    "vpcmpud",
    "vscalefps",
    "vrcp14ps",
    "vreduceps",
    "vrndscaleps",
    "vpandd",
    "vpord",
    "vpxord",
    "vpcmpd",
    "vblendmps",
    "vshuff32x4",
    "vpmovdw",
    "vpmovdb",
    "vmovdqu16",
];
const VEX_ONLY: [&str; 17] = [
    "vroundps",
    "vpand",
    "vpor",
    "vpxor",
    "vpcmpgtd",
    "vpcmpeqd",
    "vblendvps",
    "vblendps",
    "vperm2f128",
    "vextracti128",
    "vpackusdw",
    "vpackuswb",
    "vmaskmovps",
    "vmovdqu",
    "vpbroadcastd",
    "vcmpps",
    "vmovq",
];
const NUMBERED: [&str; 14] = [
    "vpternlogd",
    "vfixupimmps",
    "vpcmpud",
    "vreduceps",
    "vrndscaleps",
    "vroundps",
    "vcmpps",
    "vpcmpd",
    "vblendvps",
    "vblendps",
    "vpshufd",
    "vpermilps",
    "vshuff32x4",
    "vperm2f128",
];
const ALSO_NUMBERED: [&str; 6] = ["vextracti128", "vcvtps2ph", "vpslld", "vpsrld", "vpsrad", "vpsrlq"];

fn is_in(what: Instruction, evex: bool) -> bool {
    let compares_masks = what == x86::VCMPPS;
    match evex {
        true => compares_masks || what.name == "vmovdqu8" || !VEX_ONLY.contains(&what.name),
        false => !compares_masks && what.name != "vmovdqu8" && !EVEX_ONLY.contains(&what.name),
    }
}

fn number(what: Instruction) -> Option<u8> {
    (NUMBERED.contains(&what.name) || ALSO_NUMBERED.contains(&what.name)).then_some(0x10)
}

fn size(what: Instruction, evex: bool) -> Size {
    let is_short = ["vaddss", "vmovss", "vmovq"].contains(&what.name);
    match (is_short, evex) {
        (true, _) => Size::Xmm,
        (_, true) => Size::Zmm,
        (_, false) => Size::Ymm,
    }
}

/// The forms that an instruction is used in.
fn vectors(assembler: &mut Assembler, what: Instruction) {
    let evex = assembler.evex;
    let (size, number) = (size(what, evex), number(what));
    let high = if evex { 27 } else { 13 };
    let mask = if what.shape == Shape::Compare { 3 } else { high };
    let far = Memory::at(x86::R13, 0x1234).indexed(x86::R14, 2);
    let near = Memory::at(x86::RSP, 128);
    let (three, only_memory) = (matches!(what.shape, Shape::Three | Shape::Compare), what.name.starts_with("vmaskmov"));
    // Moves of registers are other instructions.
    let only_memory = only_memory || (what.name.starts_with("vmov") && what != x86::VMOVAPS);
    let three = three || what.shape == Shape::StoreSome;
    let second = |register: u8| if three || matches!(what.shape, Shape::Shift(_)) { register } else { 0 };
    if !only_memory {
        assembler.vector(what, size, Masked::All, (mask, second(2), Operand::Register(high - 1)), number);
        assembler.vector(what, size, Masked::All, (1, second(high), Operand::Register(5)), number);
    }
    let is_scalar = size == Size::Xmm;
    if !matches!(what.shape, Shape::Shift(_)) {
        assembler.vector(what, size, Masked::All, (mask, second(9), Operand::Memory(far)), number);
        assembler.vector(what, size, Masked::All, (1, second(1), Operand::Memory(near)), number);
    }
    if evex && !is_scalar && !only_memory && what.shape != Shape::Store {
        assembler.vector(what, size, Masked::Merge(5), (mask, second(9), Operand::Register(7)), number);
        const BROADCAST: [&str; 9] = [
            "vaddps",
            "vfmadd213ps",
            "vpaddd",
            "vpcmpd",
            "vpcmpud",
            "vblendmps",
            "vcmpps",
            "vpternlogd",
            "vfixupimmps",
        ];
        let broadcasts = BROADCAST.contains(&what.name);
        if broadcasts {
            let element = Memory::at(x86::RBP, -8);
            assembler.vector(what, size, Masked::All, (mask, second(30), Operand::Broadcast(element)), number);
        }
        if !matches!(what.shape, Shape::Shift(_) | Shape::Compare) {
            assembler.vector(what, size, Masked::Zero(2), (mask, second(9), Operand::Memory(near)), number);
        }
    }
    if evex && what.shape == Shape::Store && !is_scalar && !only_memory {
        assembler.vector(what, size, Masked::Merge(1), (mask, 0, Operand::Memory(far)), number);
    }
}

fn general(assembler: &mut Assembler) {
    let (memory, far) = (Memory::at(x86::RBX, 8), Memory::at(x86::R12, -300).indexed(x86::R9, 3));
    assembler.load(x86::RAX, memory);
    assembler.load(x86::R10, far);
    assembler.load(x86::R10, Memory::at(x86::R13, 0));
    assembler.store(memory, x86::R15);
    assembler.store_word(far, x86::RDX);
    assembler.load_byte(x86::R14, far);
    assembler.store_byte(Memory::at(x86::RAX, -1).indexed(x86::RCX, 0), x86::R14);
    assembler.address(x86::RDX, far);
    assembler.copy(x86::RBP, x86::R11);
    assembler.number(x86::RAX, 0xFFFF);
    assembler.number(x86::R9, 1);
    assembler.number(x86::RDX, 0x1111_1111_1111_1111);
    for what in
        [Arithmetic::Add, Arithmetic::Or, Arithmetic::And, Arithmetic::Sub, Arithmetic::Xor, Arithmetic::Compare]
    {
        assembler.compute(what, x86::R8, x86::RDX);
        assembler.compute_memory(what, x86::RAX, memory);
        assembler.compute_number(what, x86::R12, -64);
        assembler.compute_number(what, x86::RDI, 1000);
    }
    assembler.shift_right(x86::RAX, 3);
    assembler.shift_left(x86::R9, 32);
    assembler.shift_right_by_count(x86::RAX);
    assembler.shift_right_double(x86::RAX, x86::RDX);
    assembler.multiply(x86::RAX, memory);
    assembler.divide(Memory::at(x86::RCX, 24));
    assembler.prefetch(1, far);
    assembler.prefetch(2, memory);
    assembler.prefetch_to_write(far);
    assembler.push(x86::R15);
    assembler.pop(x86::RBP);
    assembler.bzhi(x86::RAX, x86::RDX, x86::R9);
    assembler.pdep(x86::R8, x86::RAX, x86::RDX);
    assembler.mask_from(1, x86::RAX);
    assembler.mask_to(x86::R9, 5);
    assembler.load_mask(3, Memory::at(x86::RSP, 146));
    assembler.signs(x86::RAX, 12);
    assembler.zero_upper();
    assembler.leave();
}

/// Lines of text and bytes.
fn lines(assembler: Assembler) -> String {
    let mut text = String::new();
    for (line, bytes) in assembler.instructions() {
        let bytes: String = bytes.iter().fold(String::new(), |mut all, byte| {
            let _ = write!(all, "{byte:02x}");
            all
        });
        let _ = writeln!(text, "{bytes:24} {line}");
    }
    text
}

#[test]
fn instructions_have_the_bytes_of_the_gnu_assembler() {
    let mut text = String::new();
    for evex in [true, false] {
        let mut assembler = Assembler::new(evex, true);
        for &what in x86::ALL.iter().filter(|&&what| is_in(what, evex)) {
            vectors(&mut assembler, what);
        }
        if evex {
            assembler.broadcast_general(19, x86::R9);
        } else {
            general(&mut assembler);
        }
        text += &lines(assembler);
    }
    let expected = include_str!("encoding.txt");
    for (got, expected) in text.lines().zip(expected.lines()) {
        assert_eq!(got, expected);
    }
    assert_eq!(text.lines().count(), expected.lines().count(), "{text}");
}

#[test]
fn jumps_and_constants_are_counted_from_the_end_of_their_instructions() {
    let mut assembler = Assembler::new(true, false);
    let (back, ahead) = (assembler.label(), assembler.label());
    assembler.place(back);
    assembler.jump_if(Condition::NotEqual, ahead);
    assembler.jump(back);
    assembler.place(ahead);
    let first = assembler.constant(&1.0f32.to_le_bytes());
    let second = assembler.constant(&2.0f32.to_le_bytes());
    assert_eq!(assembler.constant(&1.0f32.to_le_bytes()), first, "equal constants are one");
    let from = Operand::Broadcast(Memory::constant(second));
    assembler.vector(x86::VADDPS, Size::Zmm, Masked::All, (1, 2, from), None);
    assembler.vector(x86::VCMPPS, Size::Zmm, Masked::All, (1, 2, from), Some(1));
    let (bytes, _) = assembler.finish();
    // jne over the jump behind it; jmp to the start
    assert_eq!(bytes[..11], [0x0F, 0x85, 5, 0, 0, 0, 0xE9, 0xF5, 0xFF, 0xFF, 0xFF]);
    let distance = |at: usize| i32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes")) as usize;
    assert_eq!(bytes.len(), 72);
    assert_eq!(21 + distance(17), 64 + second, "counted from byte 21, where the addition ends");
    assert_eq!(32 + distance(27), 64 + second, "a number follows the displacement");
    assert_eq!(bytes[64..], [1.0f32.to_le_bytes(), 2.0f32.to_le_bytes()].concat());
}
