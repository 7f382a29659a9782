//! The instructions of vectors.

use super::operands::{Operand, Size};

/// Which lanes a result is written to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Masked {
    All,
    /// The other lanes stay.
    Merge(u8),
    /// The other lanes become 0.
    Zero(u8),
}

/// The encoding of operands, in the order of the listing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shape {
    /// register, second register, operand
    Three,
    /// register, operand
    Two,
    /// operand, register: a store
    Store,
    /// operand, second register, register: a store of some lanes
    StoreSome,
    /// second register, operand; the register's field is part of the opcode
    Shift(u8),
    /// mask register, second register, operand
    Compare,
}

/// An instruction of vectors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Instruction {
    pub name: &'static str,
    /// 0: none, 1: 66, 2: F3, 3: F2
    pub(super) prefix: u8,
    /// 1: 0F, 2: 0F38, 3: 0F3A
    pub(super) map: u8,
    pub(super) opcode: u8,
    pub(super) wide: bool,
    pub shape: Shape,
    /// The operand has `1 / 2^narrow` of the vector's bytes; [`SCALAR`]: 4 bytes.
    pub(super) narrow: u8,
}

pub(super) const SCALAR: u8 = 9;

impl Instruction {
    pub(super) const fn new(name: &'static str, prefix: u8, map: u8, opcode: u8, shape: Shape) -> Instruction {
        Instruction { name, prefix, map, opcode, wide: false, shape, narrow: 0 }
    }

    const fn wide(self) -> Instruction {
        Instruction { wide: true, ..self }
    }

    const fn narrow(self, narrow: u8) -> Instruction {
        Instruction { narrow, ..self }
    }
}

macro_rules! instructions {
    ($($constant:ident = $name:literal $prefix:literal $map:literal $opcode:literal $shape:expr $(, $more:ident($($argument:expr)?))*;)*) => {
        $(pub const $constant: Instruction = Instruction::new($name, $prefix, $map, $opcode, $shape)$(.$more($($argument)?))*;)*
        /// All of them.
        #[cfg(test)]
        pub const ALL: &[Instruction] = &[$($constant),*];
    };
}

use Shape::{Compare, Shift, Store, StoreSome, Three, Two};

instructions! {
    VADDPS = "vaddps" 0 1 0x58 Three;
    VMULPS = "vmulps" 0 1 0x59 Three;
    VSUBPS = "vsubps" 0 1 0x5C Three;
    VMINPS = "vminps" 0 1 0x5D Three;
    VDIVPS = "vdivps" 0 1 0x5E Three;
    VMAXPS = "vmaxps" 0 1 0x5F Three;
    VSQRTPS = "vsqrtps" 0 1 0x51 Two;
    VADDSS = "vaddss" 2 1 0x58 Three, narrow(SCALAR);
    VFMADD213PS = "vfmadd213ps" 1 2 0xA8 Three;
    VFMADD231PS = "vfmadd231ps" 1 2 0xB8 Three;
    VFNMADD213PS = "vfnmadd213ps" 1 2 0xAC Three;
    VFNMADD231PS = "vfnmadd231ps" 1 2 0xBC Three;
    VSCALEFPS = "vscalefps" 1 2 0x2C Three;
    VRCP14PS = "vrcp14ps" 1 2 0x4C Two;
    VREDUCEPS = "vreduceps" 1 3 0x56 Two;
    VRNDSCALEPS = "vrndscaleps" 1 3 0x08 Two;
    VROUNDPS = "vroundps" 1 3 0x08 Two;
    VCVTPS2DQ = "vcvtps2dq" 1 1 0x5B Two;
    VCVTDQ2PS = "vcvtdq2ps" 0 1 0x5B Two;
    VPMAXSD = "vpmaxsd" 1 2 0x3D Three;
    VPERMB = "vpermb" 1 2 0x8D Three;
    VPADDD = "vpaddd" 1 1 0xFE Three;
    VPSUBD = "vpsubd" 1 1 0xFA Three;
    VPMULUDQ = "vpmuludq" 1 1 0xF4 Three, wide();
    VPANDD = "vpandd" 1 1 0xDB Three;
    VPORD = "vpord" 1 1 0xEB Three;
    VPXORD = "vpxord" 1 1 0xEF Three;
    VPAND = "vpand" 1 1 0xDB Three;
    VPOR = "vpor" 1 1 0xEB Three;
    VPXOR = "vpxor" 1 1 0xEF Three;
    VPTERNLOGD = "vpternlogd" 1 3 0x25 Three;
    VFIXUPIMMPS = "vfixupimmps" 1 3 0x54 Three;
    VPSLLD = "vpslld" 1 1 0x72 Shift(6);
    VPSRLD = "vpsrld" 1 1 0x72 Shift(2);
    VPSRAD = "vpsrad" 1 1 0x72 Shift(4);
    VPSRLQ = "vpsrlq" 1 1 0x73 Shift(2), wide();
    VCMPPS = "vcmpps" 0 1 0xC2 Compare;
    VCMPPS_VECTOR = "vcmpps" 0 1 0xC2 Three;
    VPCMPD = "vpcmpd" 1 3 0x1F Compare;
    VPCMPUD = "vpcmpud" 1 3 0x1E Compare;
    VPCMPGTD = "vpcmpgtd" 1 1 0x66 Three;
    VPCMPEQD = "vpcmpeqd" 1 1 0x76 Three;
    VBLENDMPS = "vblendmps" 1 2 0x65 Three;
    VBLENDVPS = "vblendvps" 1 3 0x4A Three;
    VBLENDPS = "vblendps" 1 3 0x0C Three;
    VPSHUFD = "vpshufd" 1 1 0x70 Two;
    VPERMILPS = "vpermilps" 1 3 0x04 Two;
    VSHUFF32X4 = "vshuff32x4" 1 3 0x23 Three;
    VPERM2F128 = "vperm2f128" 1 3 0x06 Three;
    VEXTRACTI128 = "vextracti128" 1 3 0x39 Store, narrow(1);
    VPACKUSDW = "vpackusdw" 1 2 0x2B Three;
    VPACKUSWB = "vpackuswb" 1 1 0x67 Three;
    VPMOVZXWD = "vpmovzxwd" 1 2 0x33 Two, narrow(1);
    VPMOVSXBD = "vpmovsxbd" 1 2 0x21 Two, narrow(2);
    VPMOVDW = "vpmovdw" 2 2 0x33 Store, narrow(1);
    VPMOVDB = "vpmovdb" 2 2 0x31 Store, narrow(2);
    VCVTPH2PS = "vcvtph2ps" 1 2 0x13 Two, narrow(1);
    VCVTPS2PH = "vcvtps2ph" 1 3 0x1D Store, narrow(1);
    VBROADCASTSS = "vbroadcastss" 1 2 0x18 Two, narrow(SCALAR);
    VPBROADCASTD = "vpbroadcastd" 1 2 0x58 Two, narrow(SCALAR);
    VMOVAPS = "vmovaps" 0 1 0x28 Two;
    VMOVUPS = "vmovups" 0 1 0x10 Two;
    VMOVUPS_STORE = "vmovups" 0 1 0x11 Store;
    VMOVNTPS = "vmovntps" 0 1 0x2B Store;
    VMOVNTDQ = "vmovntdq" 1 1 0xE7 Store;
    VMOVDQU = "vmovdqu" 2 1 0x6F Two;
    VMOVDQU_STORE = "vmovdqu" 2 1 0x7F Store;
    VMOVDQU16 = "vmovdqu16" 3 1 0x6F Two, wide();
    VMOVDQU16_STORE = "vmovdqu16" 3 1 0x7F Store, wide();
    VMOVDQU8 = "vmovdqu8" 3 1 0x6F Two;
    VMOVDQU8_STORE = "vmovdqu8" 3 1 0x7F Store;
    VMOVQ_STORE = "vmovq" 1 1 0xD6 Store, narrow(1);
    VMOVQ = "vmovq" 2 1 0x7E Two, narrow(1);
    VMOVSS = "vmovss" 2 1 0x10 Two, narrow(SCALAR);
    VMOVSS_STORE = "vmovss" 2 1 0x11 Store, narrow(SCALAR);
    VMASKMOVPS = "vmaskmovps" 1 2 0x2C Three;
    VMASKMOVPS_STORE = "vmaskmovps" 1 2 0x2E StoreSome;
}

/// The line of an instruction of vectors.
pub(super) fn listed(
    what: Instruction,
    size: Size,
    masked: Masked,
    operands: (u8, u8, Operand),
    number: Option<u8>,
) -> String {
    let (register, second, operand) = operands;
    let vector = |number: u8| format!("{}mm{number}", size.letter());
    let narrow = match what.narrow {
        SCALAR => Size::Xmm,
        narrow => (0..narrow).fold(size, |size, _| size.half()),
    };
    let operand = match operand {
        Operand::Register(number) => format!("{}mm{number}", narrow.letter()),
        Operand::Memory(memory) => memory.to_string(),
        Operand::Broadcast(memory) => format!("{memory}{{1to{}}}", size.bytes() / 4),
    };
    let mask = match masked {
        Masked::All => String::new(),
        Masked::Merge(mask) => format!("{{k{mask}}}"),
        Masked::Zero(mask) => format!("{{k{mask}}}{{z}}"),
    };
    let name = what.name;
    let number = number.map_or(String::new(), |number| format!(", {number}"));
    match what.shape {
        Three => format!("{name} {}{mask}, {}, {operand}{number}", vector(register), vector(second)),
        Two => format!("{name} {}{mask}, {operand}{number}", vector(register)),
        Store => format!("{name} {operand}{mask}, {}{number}", vector(register)),
        StoreSome => format!("{name} {operand}{mask}, {}, {}{number}", vector(second), vector(register)),
        Shift(_) => format!("{name} {}{mask}, {operand}{number}", vector(second)),
        Compare => format!("{name} k{register}{mask}, {}, {operand}{number}", vector(second)),
    }
}
