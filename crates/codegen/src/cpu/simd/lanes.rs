//! The vector machine: the minimal interface of an instruction set.
//!
//! A value of a type that implements [`Simd`] proves that the CPU has the instructions, so register-to-register methods
//! are safe. They are `#[inline(always)]` and meant to be called only below [`Simd::enter`], which turns the
//! instruction set on: outside of it they would be correct, but each a function call.

/// Methods of a [`Simd`] whose bodies are all wrapped by one macro, and all `#[inline(always)]`; either all or none are unsafe.
macro_rules! methods {
    ($wrap:ident => $(
        $(#[$about:meta])*
        fn $name:ident $(<const $n:ident: u32>)? ($self:ident $(, $operand:ident: $kind:ty)*) $(-> $result:ty)? {
            $($body:tt)*
        }
    )*) => {$(
        $(#[$about])*
        #[inline(always)]
        fn $name $(<const $n: u32>)? ($self $(, $operand: $kind)*) $(-> $result)? {
            $wrap!($($body)*)
        }
    )*};
    ($wrap:ident => $(
        unsafe fn $name:ident ($self:ident $(, $operand:ident: $kind:ty)*) $(-> $result:ty)? { $($body:tt)* }
    )*) => {$(
        #[inline(always)]
        unsafe fn $name($self $(, $operand: $kind)*) $(-> $result)? {
            $wrap!($($body)*)
        }
    )*};
}

/// A vector's elements, read or written at an address.
#[cfg(target_arch = "x86_64")]
macro_rules! elements {
    ($($call:tt)*) => {
        // SAFETY: the caller lets us read or write `WIDTH` elements, which is what the instruction does. Loads and stores take any
        // alignment; a stream's address is a multiple of the vector's bytes, which the caller promises too.
        unsafe { $($call)* }
    };
}
#[cfg(target_arch = "x86_64")]
pub(super) use elements;
pub(super) use methods;

/// A loop that runs with the instruction set turned on.
pub trait Kernel {
    /// Its result.
    type Output;
    /// Must be `#[inline(always)]` in every implementation, and so must all that it calls on lanes.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

/// `WIDTH` lanes of 32 bits. Float operations follow IEEE 754 with rounding to nearest even unless they say otherwise.
/// Work within registers, on `WIDTH` lanes of 32 bits. Functions written only in terms of it are executed by a [`Simd`], and recorded for a code
/// generator by [`Recorder`](crate::cpu::machine).
pub trait Arithmetic: Copy {
    /// Lanes of a vector: a divisor of 16.
    const WIDTH: usize;
    /// `f32` lanes.
    type Float: Copy;
    /// `i32` lanes, also seen as `u32` and as bits.
    type Int: Copy;
    /// One truth value a lane.
    type Mask: Copy;
    /// `WIDTH` lanes of 16 bits.
    type Half: Copy;
    /// `WIDTH` lanes of 8 bits.
    type Byte: Copy;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::Float;
    /// `a + b`.
    fn add(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a - b`.
    fn sub(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a * b`.
    fn mul(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// `a / b`.
    fn div(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// The square root.
    fn sqrt(self, a: Self::Float) -> Self::Float;
    /// `a * b + c`, rounded once if the machine has the instruction.
    fn mul_add(self, a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// `c - a * b`, rounded once if the machine has the instruction.
    fn neg_mul_add(self, a: Self::Float, b: Self::Float, c: Self::Float) -> Self::Float;
    /// The smaller one; NaN if `b` is NaN. The result for a NaN in `a` depends on the machine.
    fn lesser(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// The larger one; NaN if `b` is NaN. The result for a NaN in `a` depends on the machine.
    fn greater(self, a: Self::Float, b: Self::Float) -> Self::Float;
    /// To the nearest integer, ties to even.
    fn round(self, a: Self::Float) -> Self::Float;
    /// To the next integer below.
    fn floor(self, a: Self::Float) -> Self::Float;

    /// Where `a < b`.
    fn less(self, a: Self::Float, b: Self::Float) -> Self::Mask;
    /// Where `a <= b`.
    fn less_or_equal(self, a: Self::Float, b: Self::Float) -> Self::Mask;
    /// Where `a == b`.
    fn equal(self, a: Self::Float, b: Self::Float) -> Self::Mask;
    /// `yes` where the mask is set, else `no`.
    fn select(self, mask: Self::Mask, yes: Self::Float, no: Self::Float) -> Self::Float;

    /// Lane `i + half` at lane `i`, for every `i < half`; the other lanes are any of `a`. `half` is a power of two below `WIDTH`.
    fn upper(self, a: Self::Float, half: usize) -> Self::Float;

    /// All lanes `x`.
    fn splat_int(self, x: i32) -> Self::Int;
    /// 0, 1, 2, ...
    fn count_up(self) -> Self::Int;
    /// The bits of floats.
    fn bits(self, a: Self::Float) -> Self::Int;
    /// The inverse of `bits`.
    fn reinterpret(self, a: Self::Int) -> Self::Float;
    /// `a + b`, wrapping.
    fn add_int(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// `a - b`, wrapping.
    fn sub_int(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// `a & b`.
    fn and(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// `a | b`.
    fn or(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// `a ^ b`.
    fn xor(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// `a << N`.
    fn shift_left<const N: u32>(self, a: Self::Int) -> Self::Int;
    /// Zeros come in.
    fn shift_right<const N: u32>(self, a: Self::Int) -> Self::Int;
    /// The sign comes in.
    fn shift_right_signed<const N: u32>(self, a: Self::Int) -> Self::Int;
    /// Where `a < b`, signed.
    fn less_int(self, a: Self::Int, b: Self::Int) -> Self::Mask;
    /// Where `a == b`.
    fn equal_int(self, a: Self::Int, b: Self::Int) -> Self::Mask;
    /// 64-bit products of even lanes as `u32`: the low halves in even lanes, the high ones in the odd lanes behind them.
    fn mul_even(self, a: Self::Int, b: Self::Int) -> Self::Int;
    /// Each odd lane in the even one before it; the odd lanes are anything.
    fn odd_to_even(self, a: Self::Int) -> Self::Int;
    /// The even lanes of `even`, and behind each the one of `odd` at its place.
    fn alternate(self, even: Self::Int, odd: Self::Int) -> Self::Int;
    /// To the nearest integer, ties to even, for `|a| <= 2^21`; any value beyond and for NaN.
    fn to_int(self, a: Self::Float) -> Self::Int;
    /// Integers as floats.
    fn to_float(self, a: Self::Int) -> Self::Float;

    /// `u16` to `i32`.
    fn zero_extend(self, a: Self::Half) -> Self::Int;
    /// The low 16 bits.
    fn truncate(self, a: Self::Int) -> Self::Half;
    /// `i8` to `i32`.
    fn sign_extend(self, a: Self::Byte) -> Self::Int;
    /// The low 8 bits.
    fn truncate_to_byte(self, a: Self::Int) -> Self::Byte;

    /// Where `a < b`, unsigned.
    #[inline(always)]
    fn less_unsigned(self, a: Self::Int, b: Self::Int) -> Self::Mask {
        let flip = self.splat_int(i32::MIN);
        self.less_int(self.xor(a, flip), self.xor(b, flip))
    }

    /// The larger one; NaN if either is NaN.
    #[inline(always)]
    fn max(self, a: Self::Float, b: Self::Float) -> Self::Float {
        self.select(self.equal(a, a), self.greater(a, b), a)
    }

    /// The larger one of two numbers without sign; NaN if either is NaN.
    #[inline(always)]
    fn max_of_sizes(self, a: Self::Float, b: Self::Float) -> Self::Float {
        self.max(a, b)
    }

    /// The smaller one; NaN if either is NaN.
    #[inline(always)]
    fn min(self, a: Self::Float, b: Self::Float) -> Self::Float {
        self.select(self.equal(a, a), self.lesser(a, b), a)
    }

    /// `yes` where the mask is set, else `no`.
    #[inline(always)]
    fn select_int(self, mask: Self::Mask, yes: Self::Int, no: Self::Int) -> Self::Int {
        self.bits(self.select(mask, self.reinterpret(yes), self.reinterpret(no)))
    }

    /// `bits`, or `a` as a quiet NaN where it is a NaN.
    #[inline(always)]
    fn or_quiet_nan(self, bits: Self::Int, a: Self::Float) -> Self::Int {
        let quiet = self.or(self.bits(a), self.splat_int(0x0040_0000));
        self.select_int(self.equal(a, a), bits, quiet)
    }

    /// Without the sign.
    #[inline(always)]
    fn abs(self, a: Self::Float) -> Self::Float {
        self.reinterpret(self.and(self.bits(a), self.splat_int(i32::MAX)))
    }

    /// With the other sign.
    #[inline(always)]
    fn neg(self, a: Self::Float) -> Self::Float {
        self.reinterpret(self.xor(self.bits(a), self.splat_int(i32::MIN)))
    }

    /// `1 / d` for `1 <= d <= inf`, within 1 ulp where the result is normal.
    #[inline(always)]
    fn reciprocal_from_one(self, d: Self::Float) -> Self::Float {
        self.div(self.splat(1.0), d)
    }

    /// `p * 2^n` for a whole `n` in `[-252, 252]` and `p` near 1; over- and underflow come out as in IEEE 754.
    #[inline(always)]
    fn scale(self, p: Self::Float, n: Self::Float) -> Self::Float {
        // Two factors, because 2^n alone is out of range where p * 2^n is still finite, or still a denormal.
        let n = self.to_int(n);
        let half = self.shift_right_signed::<1>(n);
        let rest = self.sub_int(n, half);
        self.mul(self.mul(p, power_of_two(self, half)), power_of_two(self, rest))
    }

    /// Brings `y` into the range that [`Arithmetic::fraction`] and [`Arithmetic::scale_by_floor`] need; NaN stays NaN.
    #[inline(always)]
    fn clamp_exponent(self, y: Self::Float) -> Self::Float {
        self.lesser(self.splat(128.0), self.greater(self.splat(-127.0), y))
    }

    /// `y - floor(y)`
    #[inline(always)]
    fn fraction(self, y: Self::Float) -> Self::Float {
        self.sub(y, self.floor(y))
    }

    /// `p * 2^floor(y)` for `p` in `[1, 2]`: infinite from `y = 128` on, and 0 (or a denormal) below -126.
    #[inline(always)]
    fn scale_by_floor(self, p: Self::Float, y: Self::Float) -> Self::Float {
        // The exponent field of 128 is that of infinity, and the one of -127 is that of 0.
        self.mul(p, power_of_two(self, self.to_int(self.floor(y))))
    }

    /// IEEE half floats to `f32`.
    #[inline(always)]
    fn widen_f16(self, a: Self::Half) -> Self::Float {
        super::format::widen_f16_bits(self, self.zero_extend(a))
    }

    /// `f32` to IEEE half floats, nearest even; NaN stays NaN.
    #[inline(always)]
    fn narrow_f16(self, a: Self::Float) -> Self::Half {
        self.truncate(super::format::narrow_f16_bits(self, a))
    }
}

/// The vector machine: registers, and memory.
pub trait Simd: Arithmetic {
    /// Vectors that stay out of memory.
    const REGISTERS: usize;

    /// Runs a kernel with the instruction set turned on.
    fn enter<K: Kernel>(self, kernel: K) -> K::Output;
    /// The first `count` lanes; `count <= WIDTH`.
    #[inline(always)]
    fn first(self, count: usize) -> Self::Mask {
        self.less_int(self.count_up(), self.splat_int(count as i32))
    }
    /// Lane 0.
    fn first_lane(self, a: Self::Float) -> f32;

    /// # Safety
    /// `WIDTH` elements at `from` can be read. Any alignment.
    unsafe fn load(self, from: *const f32) -> Self::Float;
    /// # Safety
    /// `WIDTH` elements at `to` can be written. Any alignment.
    unsafe fn store(self, to: *mut f32, a: Self::Float);
    /// # Safety
    /// As `store`, and `to` is a multiple of the vector's bytes. The store bypasses the caches where the machine supports it,
    /// and other threads see it only after [`Simd::fence`].
    #[inline(always)]
    unsafe fn stream(self, to: *mut f32, a: Self::Float) {
        // SAFETY: the caller's promise is more than `store` needs.
        unsafe { self.store(to, a) }
    }
    /// # Safety
    /// As `load`.
    unsafe fn load_half(self, from: *const u16) -> Self::Half;
    /// # Safety
    /// As `store`.
    unsafe fn store_half(self, to: *mut u16, a: Self::Half);
    /// # Safety
    /// As `stream`.
    #[inline(always)]
    unsafe fn stream_half(self, to: *mut u16, a: Self::Half) {
        // SAFETY: the caller's promise is more than `store_half` needs.
        unsafe { self.store_half(to, a) }
    }
    /// # Safety
    /// As `load`.
    unsafe fn load_byte(self, from: *const u8) -> Self::Byte;
    /// # Safety
    /// As `store`.
    unsafe fn store_byte(self, to: *mut u8, a: Self::Byte);
    /// # Safety
    /// As `stream`.
    #[inline(always)]
    unsafe fn stream_byte(self, to: *mut u8, a: Self::Byte) {
        // SAFETY: the caller's promise is more than `store_byte` needs.
        unsafe { self.store_byte(to, a) }
    }
    /// Element `4 i + k` is lane `i` of `a[k]`.
    /// # Safety
    /// `4 * WIDTH` elements at `to` can be written.
    unsafe fn store_interleaved(self, to: *mut f32, a: [Self::Float; 4]);
    /// Orders earlier `stream`s before later stores, for other threads.
    #[inline(always)]
    fn fence(self) {}
    /// Prefetches the cache line at `address`, which need not be readable.
    #[inline(always)]
    fn prefetch(self, _address: *const u8) {}
    /// As `prefetch`, for a line that will be written.
    #[inline(always)]
    fn prefetch_to_write(self, _address: *const u8) {}

    /// Lanes from `count` on are 0.
    /// # Safety
    /// `count < WIDTH` elements at `from` can be read.
    #[inline(always)]
    unsafe fn load_partial(self, from: *const f32, count: usize) -> Self::Float {
        let mut lanes = [0.0f32; 16];
        // SAFETY: the caller lets us read `count` elements; `count < WIDTH <= 16`, the length of `lanes`.
        unsafe {
            std::ptr::copy_nonoverlapping(from.cast::<u8>(), lanes.as_mut_ptr().cast::<u8>(), 4 * count);
            self.load(lanes.as_ptr())
        }
    }

    /// # Safety
    /// `count < WIDTH` elements at `to` can be written.
    #[inline(always)]
    unsafe fn store_partial(self, to: *mut f32, a: Self::Float, count: usize) {
        let mut lanes = [0.0f32; 16];
        // SAFETY: `lanes` holds a vector; the caller lets us write `count < WIDTH` elements.
        unsafe {
            self.store(lanes.as_mut_ptr(), a);
            std::ptr::copy_nonoverlapping(lanes.as_ptr().cast::<u8>(), to.cast::<u8>(), 4 * count);
        }
    }
}

/// `2^n` for `n` in `[-127, 128]`, where the ends give 0 and infinity.
#[inline(always)]
fn power_of_two<S: Arithmetic>(simd: S, n: S::Int) -> S::Float {
    let field = simd.add_int(n, simd.splat_int(127));
    simd.reinterpret(simd.shift_left::<23>(field))
}
