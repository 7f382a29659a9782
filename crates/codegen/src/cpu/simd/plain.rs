//! Any CPU except x86-64, which has `sse2.rs`: 4 lanes in arrays, which LLVM vectorises if the target's baseline has vectors.
//!
//! There is no fused multiply-add: without the instruction `f32::mul_add` is a library call of some 50 cycles.

use super::lanes::{Arithmetic, Kernel, Simd, methods};

/// Needs nothing of the CPU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Plain;

const WIDTH: usize = 4;

/// A loop rather than `array::map`, so that nothing stands between the lanes and the optimiser.
macro_rules! each {
    ($lane:ident => $value:expr) => {{
        let mut result = [Default::default(); WIDTH];
        for $lane in 0..WIDTH {
            result[$lane] = $value;
        }
        result
    }};
}

impl Arithmetic for Plain {
    const WIDTH: usize = WIDTH;
    type Float = [f32; WIDTH];
    type Int = [i32; WIDTH];
    /// All bits of a true lane are set: arithmetic on bits becomes vectors, arrays of `bool` do not.
    type Mask = [u32; WIDTH];
    type Half = [u16; WIDTH];
    type Byte = [u8; WIDTH];

    methods! { each =>
        fn upper(self, a: Self::Float, half: usize) -> Self::Float { i => a[(i + half) % WIDTH] }
        fn add(self, a: Self::Float, b: Self::Float) -> Self::Float { i => a[i] + b[i] }
        fn sub(self, a: Self::Float, b: Self::Float) -> Self::Float { i => a[i] - b[i] }
        fn mul(self, a: Self::Float, b: Self::Float) -> Self::Float { i => a[i] * b[i] }
        fn div(self, a: Self::Float, b: Self::Float) -> Self::Float { i => a[i] / b[i] }
        fn sqrt(self, a: Self::Float) -> Self::Float { i => a[i].sqrt() }
        fn mul_add(self, a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float { i => a[i] * b[i] + c[i] }
        fn neg_mul_add(self, a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float { i => c[i] - a[i] * b[i] }
        fn lesser(self, a: Self::Float, b: Self::Float) -> Self::Float { i => if a[i] < b[i] { a[i] } else { b[i] } }
        fn greater(self, a: Self::Float, b: Self::Float) -> Self::Float { i => if a[i] > b[i] { a[i] } else { b[i] } }

        fn less(self, a: Self::Float, b: Self::Float) -> Self::Mask { i => lane_mask(a[i] < b[i]) }
        fn less_or_equal(self, a: Self::Float, b: Self::Float) -> Self::Mask { i => lane_mask(a[i] <= b[i]) }
        fn equal(self, a: Self::Float, b: Self::Float) -> Self::Mask { i => lane_mask(a[i] == b[i]) }
        fn select(self, mask: Self::Mask, yes: Self::Float, no: Self::Float) -> Self::Float {
            i => f32::from_bits((mask[i] & yes[i].to_bits()) | (!mask[i] & no[i].to_bits()))
        }
        fn count_up(self) -> Self::Int { i => i as i32 }
        fn bits(self, a: Self::Float) -> Self::Int { i => a[i].to_bits() as i32 }
        fn reinterpret(self, a: Self::Int) -> Self::Float { i => f32::from_bits(a[i] as u32) }
        fn add_int(self, a: Self::Int, b: Self::Int) -> Self::Int { i => a[i].wrapping_add(b[i]) }
        fn sub_int(self, a: Self::Int, b: Self::Int) -> Self::Int { i => a[i].wrapping_sub(b[i]) }
        fn and(self, a: Self::Int, b: Self::Int) -> Self::Int { i => a[i] & b[i] }
        fn or(self, a: Self::Int, b: Self::Int) -> Self::Int { i => a[i] | b[i] }
        fn xor(self, a: Self::Int, b: Self::Int) -> Self::Int { i => a[i] ^ b[i] }
        fn shift_left<const N: u32>(self, a: Self::Int) -> Self::Int { i => a[i] << N }
        fn shift_right<const N: u32>(self, a: Self::Int) -> Self::Int { i => (a[i] as u32 >> N) as i32 }
        fn shift_right_signed<const N: u32>(self, a: Self::Int) -> Self::Int { i => a[i] >> N }
        fn less_int(self, a: Self::Int, b: Self::Int) -> Self::Mask { i => lane_mask(a[i] < b[i]) }
        fn equal_int(self, a: Self::Int, b: Self::Int) -> Self::Mask { i => lane_mask(a[i] == b[i]) }
        fn to_float(self, a: Self::Int) -> Self::Float { i => a[i] as f32 }

        fn zero_extend(self, a: Self::Half) -> Self::Int { i => i32::from(a[i]) }
        fn truncate(self, a: Self::Int) -> Self::Half { i => a[i] as u16 }
        fn sign_extend(self, a: Self::Byte) -> Self::Int { i => i32::from(a[i] as i8) }
        fn truncate_to_byte(self, a: Self::Int) -> Self::Byte { i => a[i] as u8 }
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::Float {
        [x; WIDTH]
    }
    #[inline(always)]
    fn round(self, a: Self::Float) -> Self::Float {
        // From 2^23 on every float is whole; below, adding 2^23 with the sign of `a` leaves no fraction bits.
        each!(i => {
            const WHOLE: f32 = 8_388_608.0;
            let magic = WHOLE.copysign(a[i]);
            if a[i].abs() < WHOLE { ((a[i] + magic) - magic).copysign(a[i]) } else { a[i] }
        })
    }
    #[inline(always)]
    fn floor(self, a: Self::Float) -> Self::Float {
        let nearest = self.round(a);
        each!(i => if nearest[i] > a[i] { nearest[i] - 1.0 } else { nearest[i] })
    }

    #[inline(always)]
    fn splat_int(self, x: i32) -> Self::Int {
        [x; WIDTH]
    }
    #[inline(always)]
    fn mul_even(self, a: Self::Int, b: Self::Int) -> Self::Int {
        let product = |i: usize| u64::from(a[i] as u32) * u64::from(b[i] as u32);
        each!(i => (product(i / 2 * 2) >> (32 * (i % 2))) as i32)
    }
    #[inline(always)]
    fn odd_to_even(self, a: Self::Int) -> Self::Int {
        each!(i => a[i | 1])
    }
    #[inline(always)]
    fn alternate(self, even: Self::Int, odd: Self::Int) -> Self::Int {
        each!(i => if i % 2 == 0 { even[i] } else { odd[i - 1] })
    }
    #[inline(always)]
    fn to_int(self, a: Self::Float) -> Self::Int {
        // Adding 1.5 * 2^23 leaves the whole number in the low bits.
        const MAGIC: f32 = 12_582_912.0;
        each!(i => (a[i] + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()) as i32)
    }
}

impl Simd for Plain {
    const REGISTERS: usize = 16;

    #[inline(never)]
    fn enter<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn first_lane(self, a: Self::Float) -> f32 {
        a[0]
    }

    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::Float {
        // SAFETY: the caller lets us read 4 elements, and `read_unaligned` takes any alignment.
        unsafe { from.cast::<Self::Float>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, a: Self::Float) {
        // SAFETY: the caller lets us write 4 elements, and `write_unaligned` takes any alignment.
        unsafe { to.cast::<Self::Float>().write_unaligned(a) }
    }
    #[inline(always)]
    unsafe fn load_half(self, from: *const u16) -> Self::Half {
        // SAFETY: the caller lets us read 4 elements, and `read_unaligned` takes any alignment.
        unsafe { from.cast::<Self::Half>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store_half(self, to: *mut u16, a: Self::Half) {
        // SAFETY: the caller lets us write 4 elements, and `write_unaligned` takes any alignment.
        unsafe { to.cast::<Self::Half>().write_unaligned(a) }
    }
    #[inline(always)]
    unsafe fn load_byte(self, from: *const u8) -> Self::Byte {
        // SAFETY: the caller lets us read 4 elements, and bytes have no alignment.
        unsafe { from.cast::<Self::Byte>().read() }
    }
    #[inline(always)]
    unsafe fn store_byte(self, to: *mut u8, a: Self::Byte) {
        // SAFETY: the caller lets us write 4 elements, and bytes have no alignment.
        unsafe { to.cast::<Self::Byte>().write(a) }
    }
    #[inline(always)]
    unsafe fn store_interleaved(self, to: *mut f32, a: [Self::Float; 4]) {
        let lanes: [[f32; 4]; WIDTH] = each!(i => [a[0][i], a[1][i], a[2][i], a[3][i]]);
        // SAFETY: the caller lets us write 16 elements, and `write_unaligned` takes any alignment.
        unsafe { to.cast::<[[f32; 4]; WIDTH]>().write_unaligned(lanes) }
    }
}

#[inline(always)]
fn lane_mask(holds: bool) -> u32 {
    u32::from(holds).wrapping_neg()
}
