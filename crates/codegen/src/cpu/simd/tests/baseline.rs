//! Arrays of four lanes against SSE2, method by method: neither has a fused multiply-add, so all bits are the same.
//!
//! Arrays serve architectures that the tests seldom run on. Everything above the lanes is written once, and tested on other machines.

use super::{mixed, scramble};
use crate::cpu::simd::lanes::{Kernel, Simd};
use crate::cpu::simd::{plain::Plain, sse2::Sse2};

/// All methods of a machine of four lanes on these numbers and bits; 32 bits a result, every NaN as one.
struct Methods {
    floats: [[f32; 4]; 3],
    ints: [[i32; 4]; 2],
}

impl Kernel for Methods {
    type Output = Vec<u32>;

    fn run<S: Simd>(self, simd: S) -> Vec<u32> {
        assert_eq!(S::WIDTH, 4);
        let mut out = Vec::new();
        // SAFETY: arrays of four lanes are read and written.
        let [a, b, c] = self.floats.map(|lanes| unsafe { simd.load(lanes.as_ptr()) });
        let lanes = |x: S::Float| {
            let mut lanes = [0.0f32; 4];
            // SAFETY: as above.
            unsafe { simd.store(lanes.as_mut_ptr(), x) };
            lanes
        };
        let bits = |lane: f32| if lane.is_nan() { f32::NAN.to_bits() } else { lane.to_bits() };
        let mut floats = |all: &[S::Float]| all.iter().for_each(|&x| out.extend(lanes(x).map(bits)));
        floats(&[simd.add(a, b), simd.sub(a, b), simd.mul(a, b), simd.div(a, b), simd.sqrt(a)]);
        floats(&[simd.mul_add(a, b, c), simd.neg_mul_add(a, b, c), simd.lesser(a, b), simd.greater(a, b)]);
        floats(&[simd.round(a), simd.floor(a), simd.max(a, b), simd.min(a, b), simd.abs(a), simd.neg(a)]);
        floats(&[simd.less(a, b), simd.less_or_equal(a, b), simd.equal(a, b)].map(|mask| simd.select(mask, b, c)));
        (0..=4).for_each(|count| floats(&[simd.select(simd.first(count), a, b)]));
        let small = simd.lesser(simd.splat(2e6), simd.greater(simd.splat(-2e6), simd.select(simd.equal(a, a), a, b)));
        let small = simd.select(simd.equal(small, small), small, simd.splat(2.5));
        floats(&[simd.to_float(simd.to_int(small))]);
        for count in 0..4 {
            let mut lanes = [7.0; 4];
            // SAFETY: as above; fewer than four are read and written.
            unsafe {
                simd.store_partial(lanes.as_mut_ptr(), a, count);
                floats(&[simd.load(lanes.as_ptr())]);
                floats(&[simd.load_partial(self.floats[1].as_ptr(), count)]);
            }
        }
        let mut interleaved = [0.0; 16];
        // SAFETY: sixteen are written.
        unsafe { simd.store_interleaved(interleaved.as_mut_ptr(), [a, b, c, a]) };
        // SAFETY: four of them are read.
        interleaved.chunks_exact(4).for_each(|lanes| floats(&[unsafe { simd.load(lanes.as_ptr()) }]));
        floats(&[simd.widen_f16(simd.narrow_f16(a))]);

        // SAFETY: arrays of four lanes are read.
        let [i, j] = self.ints.map(|lanes| simd.bits(unsafe { simd.load(lanes.as_ptr().cast()) }));
        let word = |x: S::Int| lanes(simd.reinterpret(x)).map(f32::to_bits);
        let mut ints = |all: &[S::Int]| all.iter().for_each(|&x| out.extend(word(x)));
        ints(&[simd.add_int(i, j), simd.sub_int(i, j), simd.and(i, j), simd.or(i, j), simd.xor(i, j)]);
        ints(&[simd.shift_left::<0>(i), simd.shift_left::<5>(i), simd.shift_left::<31>(i)]);
        ints(&[simd.shift_right::<0>(i), simd.shift_right::<5>(i), simd.shift_right::<31>(i)]);
        ints(&[simd.shift_right_signed::<5>(i), simd.shift_right_signed::<31>(i)]);
        ints(&[simd.less_int(i, j), simd.equal_int(i, j)].map(|mask| simd.select_int(mask, i, j)));
        let (even, odd) = (simd.mul_even(i, j), simd.mul_even(simd.odd_to_even(i), simd.odd_to_even(j)));
        ints(&[even, odd, simd.alternate(i, j), simd.splat_int(-3), simd.count_up()]);
        let unsigned = simd.less_unsigned(i, j);
        ints(&[simd.select_int(unsigned, i, j)]);
        ints(&[simd.zero_extend(simd.truncate(i)), simd.sign_extend(simd.truncate_to_byte(i))]);
        out.extend(lanes(simd.to_float(i)).map(f32::to_bits));

        #[repr(align(16))]
        struct Aligned([u8; 32]);
        let mut bytes = Aligned([0; 32]);
        let to = bytes.0.as_mut_ptr();
        // SAFETY: 4, 8 and 16 bytes at multiples of that, of 32.
        unsafe {
            simd.store_byte(to.add(1), simd.truncate_to_byte(i));
            simd.stream_byte(to.add(8), simd.load_byte(to.add(1)));
            simd.stream_half(to.cast::<u16>().add(8), simd.truncate(j));
            simd.store_half(to.cast::<u16>().add(12), simd.load_half(to.cast::<u16>().add(8)));
        }
        simd.fence();
        out.extend(bytes.0.map(u32::from));
        // SAFETY: 16 bytes at a multiple of that.
        unsafe { simd.stream(to.cast(), a) };
        simd.fence();
        out.extend(bytes.0.map(u32::from));
        out
    }
}

#[test]
fn arrays_are_as_sse2_to_the_bit() {
    let numbers = |seed| mixed(4000, seed).chunks_exact(4).map(|x| [x[0], x[1], x[2], x[3]]).collect::<Vec<_>>();
    let all = [1, 2, 3].map(numbers);
    for at in 0..1000 {
        let floats = || all.each_ref().map(|numbers| numbers[at]);
        let bits = |seed: u32| [0, 1, 2, 3].map(|lane| scramble(seed + 4 * at as u32 + lane) as i32);
        let ints = || [bits(0), if at % 3 == 0 { bits(0) } else { bits(90_000) }];
        let arrays = Plain.enter(Methods { floats: floats(), ints: ints() });
        let vectors = Sse2.enter(Methods { floats: floats(), ints: ints() });
        let differ = arrays.iter().zip(&vectors).position(|(a, b)| a != b);
        assert_eq!(differ, None, "{:?}, {:?}", floats(), ints());
    }
}
