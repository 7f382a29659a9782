//! Operations to instructions.

use super::super::encode::{self as x86, Masked, Memory, Operand, Size};
use super::super::values::{One, Op, Question, Three, Two, Value};
use super::{ODD, Owner, TAIL, TAIL_VECTOR, Target, Walk};

impl Walk<'_> {
    pub(super) fn instruction(&mut self, what: x86::Instruction, operands: (u8, u8, Operand), number: Option<u8>) {
        self.assembler.vector(what, self.target.size(), Masked::All, operands, number);
    }

    pub(super) fn plain(&mut self, what: x86::Instruction, operands: (u8, u8, Operand)) {
        self.instruction(what, operands, None);
    }

    pub(super) fn op(&mut self, op: Op, value: Value) {
        match op {
            Op::Const(_) | Op::CountUp | Op::Bytes(_) | Op::Scalar(_) => {}
            Op::Gathered(reduction) | Op::GatheredFrom(reduction, _) => {
                if self.held(value).is_none() {
                    let vector =
                        if let Op::GatheredFrom(_, vector) = op { vector.into() } else { self.vector_at_hand() };
                    let from = Operand::Memory(self.frame.gathered(reduction, vector).memory());
                    let to = self.result(op, value);
                    self.plain(x86::VMOVUPS, (to, 0, from));
                }
            }
            Op::Lanes(scalar) => {
                let from = Operand::Memory(self.frame.lanes(scalar, self.vector_at_hand()));
                let to = self.result(op, value);
                self.plain(x86::VMOVUPS, (to, 0, from));
            }
            Op::Kept(_) | Op::Partial(_) | Op::Load(_) => self.load(op, value),
            Op::Column => {
                let first = (self.vector_at_hand() * self.target.width()) as i32;
                self.frame.column(self.assembler, first);
                let to = self.result(op, value);
                self.assembler.broadcast_general(to, x86::RAX);
            }
            Op::Block(half) => {
                self.frame.block(self.assembler, half, self.vector_at_hand());
                let to = self.result(op, value);
                self.assembler.broadcast_general(to, x86::RAX);
            }
            Op::Keep(keep) => self.keep(keep, value),
            Op::IsKept(keep) => self.is_kept(keep, value),
            Op::Two(what, a, b) => self.two(what, a, b, value),
            Op::One(what, a) => self.one(what, a, value),
            Op::MulAdd(a, b, c) => self.mul_add((x86::VFMADD213PS, x86::VFMADD231PS), [a, b, c], value),
            Op::NegMulAdd(a, b, c) => self.mul_add((x86::VFNMADD213PS, x86::VFNMADD231PS), [a, b, c], value),
            Op::Compare(what, a, b) => self.compare(what, a, b, value),
            Op::Select(mask, yes, no) => self.select(mask, yes, no, value),
            Op::SelectTwo(what, all) => self.select_two(what, all, value),
            Op::KeepNan(a, nan) => self.keep_nan(a, nan, value),
            Op::Three(what, a, b, c) => self.three(what, [a, b, c], value),
            Op::Store(..) | Op::Keeping(..) | Op::AddColumn(..) => self.store(op),
            Op::Gather(reduction, a) => self.gather(reduction, a),
            Op::SetLanes(scalar, a) => {
                let (from, to) = (self.vector(a), self.frame.lanes(scalar, self.vector_at_hand()));
                self.plain(x86::VMOVUPS_STORE, (from, 0, Operand::Memory(to)));
            }
            Op::SetScalar(scalar, a) => {
                let (from, to) = (self.vector(a), self.frame.scalar(scalar));
                let operands = (from, 0, Operand::Memory(to));
                self.assembler.vector(x86::VMOVSS_STORE, Size::Xmm, Masked::All, operands, None);
            }
            Op::Dropped(word, a) => {
                let from = self.vector_or_mask(a);
                match self.target {
                    Target::Avx512 { .. } => self.assembler.mask_to(x86::RAX, from),
                    Target::Avx2 => self.assembler.signs(x86::RAX, from),
                }
                self.frame.dropped(self.assembler, word, self.vector_at_hand());
            }
        }
        if op.is_effect() {
            self.release(op);
        }
    }

    fn vector_or_mask(&mut self, value: Value) -> u8 {
        match self.is_mask(value) {
            true => self.registers[value.index()].expect("a mask is read while it is in its register"),
            false => self.vector(value),
        }
    }

    fn two(&mut self, what: Two, a: Value, b: Value, value: Value) {
        let swapped = what.commutes() && !self.is_at_hand(a) && self.is_at_hand(b);
        let (a, b) = if swapped { (b, a) } else { (a, b) };
        let first = self.vector(a);
        let second = match what {
            // An element that is broadcast would have 64 bits, or 8.
            Two::MulEven | Two::PickBytes => Operand::Register(self.vector(b)),
            _ => self.operand(b),
        };
        let to = self.result(Op::Two(what, a, b), value);
        let operands = (to, first, second);
        match what {
            Two::EvenOdd if self.target.is_avx512() => {
                self.assembler.vector(x86::VBLENDMPS, Size::Zmm, Masked::Merge(ODD), operands, None);
            }
            Two::EvenOdd => self.instruction(x86::VBLENDPS, operands, Some(0xAA)),
            _ => self.plain(self.instruction_of(what), operands),
        }
    }

    fn instruction_of(&self, what: Two) -> x86::Instruction {
        let evex = self.target.is_avx512();
        match what {
            Two::Add => x86::VADDPS,
            Two::Sub => x86::VSUBPS,
            Two::Mul => x86::VMULPS,
            Two::Div => x86::VDIVPS,
            Two::Lesser => x86::VMINPS,
            Two::Greater => x86::VMAXPS,
            Two::GreaterInt => x86::VPMAXSD,
            Two::Scale => x86::VSCALEFPS,
            Two::AddInt => x86::VPADDD,
            Two::SubInt => x86::VPSUBD,
            Two::And if evex => x86::VPANDD,
            Two::And => x86::VPAND,
            Two::Or if evex => x86::VPORD,
            Two::Or => x86::VPOR,
            Two::Xor if evex => x86::VPXORD,
            Two::Xor => x86::VPXOR,
            Two::MulEven => x86::VPMULUDQ,
            Two::EvenOdd if evex => x86::VBLENDMPS,
            Two::EvenOdd => x86::VBLENDPS,
            Two::PickBytes => x86::VPERMB,
        }
    }

    /// Lanes that the mask does not name stay those of `no`.
    fn select_two(&mut self, what: Two, all: [Value; 4], value: Value) {
        let op = Op::SelectTwo(what, all);
        let [mask, a, b, no] = all;
        let question = self.registers[mask.index()].expect("a mask is read while it is in its register");
        let swapped = what.commutes() && !self.is_at_hand(a) && self.is_at_hand(b);
        let (a, b) = if swapped { (b, a) } else { (a, b) };
        let (first, second) = (self.vector(a), self.operand(b));
        let instruction = self.instruction_of(what);
        if self.ops[no.index()] == Op::Const(0) {
            let to = self.result(op, value);
            return self.assembler.vector(instruction, Size::Zmm, Masked::Zero(question), (to, first, second), None);
        }
        // A step of a reduction works on its lanes, unless some of these must stay.
        let lanes = self.gathers(value).filter(|&lanes| !self.variant.tail && self.register(no) == Some(lanes));
        let to = lanes.unwrap_or_else(|| self.overwritten(no, &all));
        self.assembler.vector(instruction, Size::Zmm, Masked::Merge(question), (to, first, second), None);
        self.rename(op, value, to);
    }

    fn keep_nan(&mut self, a: Value, nan: Value, value: Value) {
        // For NaN of both kinds the answer is the quiet NaN of the second operand, for all else the first one.
        const ANSWERS: u32 = 0x22;
        let answers = Memory::constant(self.assembler.constant(&ANSWERS.to_le_bytes()));
        let second = self.vector(nan);
        let to = self.overwritten(a, &[a, nan]);
        self.instruction(x86::VFIXUPIMMPS, (to, second, Operand::Broadcast(answers)), Some(0));
        self.rename(Op::KeepNan(a, nan), value, to);
    }

    fn three(&mut self, what: Three, all: [Value; 3], value: Value) {
        // The first one is overwritten, the last one may be in memory.
        let mut order = [0, 1, 2];
        let dies = (0..3).find(|&operand| self.dies(all[operand], &all));
        order.swap(0, dies.unwrap_or(0));
        if !self.is_at_hand(all[order[1]]) {
            order.swap(1, 2);
        }
        let [a, b, c] = order.map(|operand| all[operand]);
        let (second, third) = (self.vector(b), self.operand(c));
        let to = self.overwritten(a, &all);
        // Bit i of the number is the result for the three bits of i, of which the first operand has the highest.
        let result = |bits: usize| {
            let mut of = [false; 3];
            order.iter().enumerate().for_each(|(place, &operand)| of[operand] = bits >> (2 - place) & 1 == 1);
            match what {
                Three::Xor => of[0] ^ of[1] ^ of[2],
                Three::OrAnd => of[0] | of[1] & of[2],
            }
        };
        let number = (0..8).map(|bits| u8::from(result(bits)) << bits).sum();
        self.instruction(x86::VPTERNLOGD, (to, second, third), Some(number));
        self.rename(Op::Three(what, a, b, c), value, to);
    }

    /// A register with a value that the instruction may overwrite: its own if nothing else reads it, or a copy.
    fn overwritten(&mut self, value: Value, all: &[Value]) -> u8 {
        if self.dies(value, all) {
            return self.vector(value);
        }
        let to = self.temporary();
        match (self.register(value), self.slots[value.index()]) {
            (Some(register), _) => self.plain(x86::VMOVAPS, (to, 0, Operand::Register(register))),
            (None, Some(slot)) => self.plain(x86::VMOVUPS, (to, 0, Operand::Memory(slot.memory()))),
            (None, None) => self.leaf(self.ops[value.index()], to),
        }
        to
    }

    fn one(&mut self, what: One, a: Value, value: Value) {
        if matches!(what, One::Truncate | One::TruncateByte) && !self.target.is_avx512() {
            return self.pack(what, a, value);
        }
        let from = Operand::Register(self.vector(a));
        let to = self.result(Op::One(what, a), value);
        let evex = self.target.is_avx512();
        let Operand::Register(register) = from else { unreachable!("read from a register") };
        let rounding = if evex { x86::VRNDSCALEPS } else { x86::VROUNDPS };
        match what {
            One::Sqrt => self.plain(x86::VSQRTPS, (to, 0, from)),
            One::Round => self.instruction(rounding, (to, 0, from), Some(8)),
            One::Floor => self.instruction(rounding, (to, 0, from), Some(9)),
            One::Fraction => self.instruction(x86::VREDUCEPS, (to, 0, from), Some(9)),
            One::Estimate => self.plain(x86::VRCP14PS, (to, 0, from)),
            One::ToInt => self.plain(x86::VCVTPS2DQ, (to, 0, from)),
            One::ToFloat => self.plain(x86::VCVTDQ2PS, (to, 0, from)),
            One::ShiftLeft(count) => self.instruction(x86::VPSLLD, (0, to, from), Some(count)),
            One::ShiftRight(count) => self.instruction(x86::VPSRLD, (0, to, from), Some(count)),
            One::ShiftRightSigned(count) => self.instruction(x86::VPSRAD, (0, to, from), Some(count)),
            One::OddToEven => self.instruction(x86::VPSRLQ, (0, to, from), Some(32)),
            One::EvenToOdd => self.instruction(x86::VPSHUFD, (to, 0, from), Some(0b10_10_00_00)),
            One::Upper(8) => self.instruction(x86::VSHUFF32X4, (to, register, from), Some(0b11_10_11_10)),
            One::Upper(4) if evex => self.instruction(x86::VSHUFF32X4, (to, register, from), Some(0b01_01_01_01)),
            One::Upper(4) => self.instruction(x86::VPERM2F128, (to, register, from), Some(0x11)),
            One::Upper(2) => self.instruction(x86::VPERMILPS, (to, 0, from), Some(0b11_10_11_10)),
            One::Upper(_) => self.instruction(x86::VPERMILPS, (to, 0, from), Some(0b01_01_01_01)),
            One::ZeroExtend => self.plain(x86::VPMOVZXWD, (to, 0, from)),
            One::SignExtend => self.plain(x86::VPMOVSXBD, (to, 0, from)),
            One::WidenHalf => self.plain(x86::VCVTPH2PS, (to, 0, from)),
            One::NarrowHalf => self.instruction(x86::VCVTPS2PH, (register, 0, Operand::Register(to)), Some(0)),
            One::Truncate => self.plain(x86::VPMOVDW, (register, 0, Operand::Register(to))),
            One::TruncateByte => self.plain(x86::VPMOVDB, (register, 0, Operand::Register(to))),
        }
    }

    /// The low bits of lanes, packed, where AVX2 has no instruction for it.
    fn pack(&mut self, what: One, a: Value, value: Value) {
        let from = self.vector(a);
        let (low, high) = (self.temporary(), self.temporary());
        let bits = if what == One::Truncate { 0xffff } else { 0xff };
        let mask = Operand::Memory(self.repeated(bits));
        self.plain(x86::VPAND, (low, from, mask));
        self.instruction(x86::VEXTRACTI128, (low, 0, Operand::Register(high)), Some(1));
        let to = self.result(Op::One(what, a), value);
        self.assembler.vector(x86::VPACKUSDW, Size::Xmm, Masked::All, (to, low, Operand::Register(high)), None);
        if what == One::TruncateByte {
            self.assembler.vector(x86::VPACKUSWB, Size::Xmm, Masked::All, (to, to, Operand::Register(to)), None);
        }
    }

    /// Whether this operation is the last reader of a value in a register of its own, which may be written then.
    fn dies(&self, value: Value, of: &[Value]) -> bool {
        let own = self.registers[value.index()].is_some() && !self.is_held_register(value);
        own && self.next_use(value).is_none() && of.iter().filter(|&&operand| operand == value).count() == 1
    }

    fn is_held_register(&self, value: Value) -> bool {
        let register = self.registers[value.index()];
        register.is_some_and(|register| self.owners[usize::from(register)] == Owner::Held)
    }

    fn mul_add(&mut self, (by_sum, in_sum): (x86::Instruction, x86::Instruction), [a, b, c]: [Value; 3], value: Value) {
        let all = [a, b, c];
        let op = Op::MulAdd(a, b, c);
        let (a, b) = if !self.is_at_hand(a) && self.is_at_hand(b) { (b, a) } else { (a, b) };
        // The sum is overwritten: by itself where it is not read again, or the lanes of a reduction.
        let gathers = self.gathers(value).filter(|_| !self.variant.tail);
        let sum_register = self.register(c);
        if self.dies(c, &all) || (gathers.is_some() && gathers == sum_register) {
            let sum = self.vector(c);
            let (first, second) = (self.vector(a), self.operand(b));
            self.plain(in_sum, (sum, first, second));
            return self.rename(op, value, sum);
        }
        // A factor that is not read again.
        let (factor, other) = if self.dies(a, &all) { (a, b) } else { (b, a) };
        if self.dies(factor, &all) {
            let to = self.vector(factor);
            let (other, sum) = (self.vector(other), self.operand(c));
            self.plain(by_sum, (to, other, sum));
            return self.rename(op, value, to);
        }
        // A copy of a factor, which may be a constant.
        let (factor, other) = if self.is_at_hand(b) { (a, b) } else { (b, a) };
        let other = self.vector(other);
        let sum = self.operand(c);
        let to = self.overwritten(factor, &all);
        self.plain(by_sum, (to, other, sum));
        self.release(op);
        self.own(value, to);
    }

    /// The result is where one of the operands was.
    fn rename(&mut self, op: Op, value: Value, register: u8) {
        let held = self.owners[usize::from(register)] == Owner::Held;
        self.release(op);
        match held {
            true => self.registers[value.index()] = Some(register),
            false => self.own(value, register),
        }
    }

    fn compare(&mut self, what: Question, a: Value, b: Value, value: Value) {
        let op = Op::Compare(what, a, b);
        if self.target.is_avx512() {
            // With the sides swapped, the question is the other way round.
            let swapped = !self.is_at_hand(a) && self.is_at_hand(b);
            let (first, second) = match swapped {
                true => (self.vector(b), self.operand(a)),
                false => (self.vector(a), self.operand(b)),
            };
            self.release(op);
            let to = self.mask(value);
            let (instruction, number) = match (what, swapped) {
                (Question::Less, false) => (x86::VCMPPS, 0x11),
                (Question::Less, true) => (x86::VCMPPS, 0x1E),
                (Question::NotLess, false) => (x86::VCMPPS, 0x15),
                (Question::NotLess, true) => (x86::VCMPPS, 0x1A),
                (Question::LessOrEqual, false) => (x86::VCMPPS, 0x12),
                (Question::LessOrEqual, true) => (x86::VCMPPS, 0x1D),
                (Question::Equal, _) => (x86::VCMPPS, 0x00),
                (Question::LessInt, false) => (x86::VPCMPD, 1),
                (Question::LessInt, true) => (x86::VPCMPD, 6),
                (Question::LessUnsigned, false) => (x86::VPCMPUD, 1),
                (Question::LessUnsigned, true) => (x86::VPCMPUD, 6),
                (Question::EqualInt, _) => (x86::VPCMPD, 0),
            };
            return self.instruction(instruction, (to, first, second), Some(number));
        }
        let (a, b) = if what == Question::LessInt { (b, a) } else { (a, b) };
        let (first, second) = (self.vector(a), self.operand(b));
        let to = self.result(op, value);
        let operands = (to, first, second);
        match what {
            Question::Less => self.instruction(x86::VCMPPS_VECTOR, operands, Some(0x11)),
            Question::LessOrEqual => self.instruction(x86::VCMPPS_VECTOR, operands, Some(0x12)),
            Question::Equal => self.instruction(x86::VCMPPS_VECTOR, operands, Some(0x00)),
            Question::LessInt => self.plain(x86::VPCMPGTD, operands),
            Question::NotLess | Question::LessUnsigned => unreachable!("recorded for AVX-512 only"),
            Question::EqualInt => self.plain(x86::VPCMPEQD, operands),
        }
    }

    fn select(&mut self, mask: Value, yes: Value, no: Value, value: Value) {
        let op = Op::Select(mask, yes, no);
        let question = self.vector_or_mask(mask);
        if self.target.is_avx512() && self.ops[no.index()] == Op::Const(0) && !self.is_at_hand(no) {
            let yes = self.operand(yes);
            let to = self.result(op, value);
            let instruction = if matches!(yes, Operand::Register(_)) { x86::VMOVAPS } else { x86::VBROADCASTSS };
            let (instruction, yes) = match yes {
                Operand::Broadcast(memory) => (instruction, Operand::Memory(memory)),
                Operand::Memory(_) => (x86::VMOVUPS, yes),
                Operand::Register(_) => (instruction, yes),
            };
            return self.assembler.vector(instruction, Size::Zmm, Masked::Zero(question), (to, 0, yes), None);
        }
        let (no, yes) = (self.vector(no), self.operand(yes));
        let to = self.result(op, value);
        match self.target {
            Target::Avx512 { .. } => {
                self.assembler.vector(x86::VBLENDMPS, Size::Zmm, Masked::Merge(question), (to, no, yes), None);
            }
            Target::Avx2 => self.instruction(x86::VBLENDVPS, (to, no, yes), Some(question << 4)),
        }
    }

    fn keep(&mut self, keep: u16, value: Value) {
        let vector = self.vector_at_hand();
        let bits = self.frame.keep(keep, vector / 4 % 2);
        let to = self.result(Op::Keep(keep), value);
        let vector = (vector % 4) as i32;
        match self.target {
            Target::Avx512 { .. } => {
                let mask = self.mask(value);
                self.masks[usize::from(mask)] = None;
                self.registers[value.index()] = Some(to);
                self.assembler.load_mask(mask, bits.after(2 * vector).memory());
                let one = self.assembler.constant(&1.0f32.to_le_bytes());
                let one = Operand::Memory(Memory::constant(one));
                self.assembler.vector(x86::VBROADCASTSS, Size::Zmm, Masked::Zero(mask), (to, 0, one), None);
            }
            Target::Avx2 => {
                self.assembler.load_byte(x86::RAX, bits.after(vector).memory());
                self.assembler.broadcast_general(to, x86::RAX);
                let lanes: Vec<u8> = (0..8).flat_map(|lane| (1u32 << lane).to_le_bytes()).collect();
                let lanes = Operand::Memory(Memory::constant(self.assembler.constant(&lanes)));
                let one = Operand::Memory(self.repeated(1.0f32.to_bits()));
                self.plain(x86::VPAND, (to, to, lanes));
                self.plain(x86::VPCMPEQD, (to, to, lanes));
                self.plain(x86::VPAND, (to, to, one));
            }
        }
    }

    fn is_kept(&mut self, keep: u16, value: Value) {
        let vector = self.vector_at_hand();
        let bits = self.frame.keep(keep, vector / 4 % 2).after(2 * (vector % 4) as i32);
        let mask = self.mask(value);
        self.assembler.load_mask(mask, bits.memory());
    }

    fn gather(&mut self, reduction: u16, a: Value) {
        let from = self.vector(a);
        let tail = self.variant.tail;
        let size = self.target.size();
        match self.gathered(reduction, self.vector_at_hand()) {
            Some(to) => match (tail, self.target) {
                (false, _) if to == from => {}
                (false, _) => self.plain(x86::VMOVAPS, (to, 0, Operand::Register(from))),
                (true, Target::Avx512 { .. }) => {
                    let operands = (to, 0, Operand::Register(from));
                    self.assembler.vector(x86::VMOVAPS, size, Masked::Merge(TAIL), operands, None);
                }
                (true, Target::Avx2) => {
                    let operands = (to, to, Operand::Register(from));
                    self.instruction(x86::VBLENDVPS, operands, Some(TAIL_VECTOR << 4));
                }
            },
            None => {
                let to = Operand::Memory(self.frame.gathered(reduction, self.vector_at_hand()).memory());
                match (tail, self.target) {
                    (false, _) => self.plain(x86::VMOVUPS_STORE, (from, 0, to)),
                    (true, Target::Avx512 { .. }) => {
                        self.assembler.vector(x86::VMOVUPS_STORE, size, Masked::Merge(TAIL), (from, 0, to), None);
                    }
                    (true, Target::Avx2) => self.plain(x86::VMASKMOVPS_STORE, (from, TAIL_VECTOR, to)),
                }
            }
        }
    }
}
