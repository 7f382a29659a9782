//! AMX: eight tile registers of 16 rows of 64 bytes, and dot products between them.
//!
//! - [`Amx`] is a proof that CPU and kernel grant the tiles to this process; [`Tiles`] that this thread has configured
//!   them. There is none on other architectures and systems: [`Amx::detect`] gives `None`.
//! - `C[m][n] += sum of A[m][i] * B[i][n]`. A row of `A` is 32 bf16 or 64 bytes along `k`. `B` holds groups of `k` side by
//!   side: row `r` of a tile is `B[2 r + j][n]` at element `2 n + j` for bf16, `B[4 r + j][n]` at `4 n + j` for bytes.
//! - Sums are `f32` (products of bf16 are exact, denormals count as 0) or wrapping `i32`.

pub use machine::{Amx, Tiles};

/// Rows of a tile.
pub const ROWS: usize = 16;
/// Bytes of a row of a tile.
pub const ROW_BYTES: usize = 64;

/// The form of one tile. A tile of no rows is not used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TileShape {
    /// At most [`ROWS`].
    pub rows: u8,
    /// At most [`ROW_BYTES`], a multiple of 4.
    pub row_bytes: u16,
}

impl TileShape {
    /// All of a tile.
    pub const FULL: TileShape = TileShape { rows: ROWS as u8, row_bytes: ROW_BYTES as u16 };

    /// Whether the CPU supports it.
    fn is_valid(self) -> bool {
        let used = (self.rows == 0) == (self.row_bytes == 0);
        used && self.rows <= 16 && self.row_bytes <= 64 && self.row_bytes.is_multiple_of(4)
    }
}

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
mod machine {
    use std::arch::asm;
    use std::arch::x86_64::__cpuid_count;
    use std::marker::PhantomData;
    use std::sync::OnceLock;

    use super::TileShape;

    /// Proof that this process may use tiles. Only [`Amx::detect`] makes one.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub struct Amx(());

    impl Amx {
        /// Queries CPU and kernel, once per process.
        pub fn detect() -> Option<Amx> {
            static GRANTED: OnceLock<bool> = OnceLock::new();
            GRANTED.get_or_init(|| cpu_has_tiles() && kernel_grants_tiles()).then_some(Amx(()))
        }

        /// Configures the tiles of this thread and sets them to zero. Costs about 100 ns with the release at the end.
        ///
        /// # Panics
        /// If a form is invalid.
        pub fn configure(self, forms: &[TileShape; 8]) -> Tiles {
            assert!(forms.iter().all(|form| form.is_valid()), "forms of tiles: {forms:?}");
            let mut config = Config([0; 64]);
            config.0[0] = 1; // the palette of eight tiles
            for (tile, form) in forms.iter().enumerate() {
                config.0[16 + 2 * tile..18 + 2 * tile].copy_from_slice(&form.row_bytes.to_le_bytes());
                config.0[48 + tile] = form.rows;
            }
            // SAFETY: `self` proves that the instruction is there and granted; `config` is 64 bytes in a valid form.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &raw const config, options(nostack, preserves_flags, readonly)) };
            Tiles(PhantomData)
        }
    }

    #[repr(C, align(64))]
    struct Config([u8; 64]);

    /// Tiles, bf16 and byte products.
    fn cpu_has_tiles() -> bool {
        const WANTED: u32 = 1 << 22 | 1 << 24 | 1 << 25;
        __cpuid_count(0, 0).eax >= 7 && __cpuid_count(7, 0).edx & WANTED == WANTED
    }

    /// A kernel gives the 8 KiB of tile state only to processes that ask.
    fn kernel_grants_tiles() -> bool {
        const ARCH_PRCTL: i64 = 158;
        const ARCH_REQ_XCOMP_PERM: i64 = 0x1023;
        const XFEATURE_XTILEDATA: i64 = 18;
        let status: i64;
        // SAFETY: a system call that takes two integers and touches no memory of ours; it overwrites rcx and r11.
        unsafe {
            asm!(
                "syscall",
                inlateout("rax") ARCH_PRCTL => status,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA,
                lateout("rcx") _,
                lateout("r11") _,
                options(nostack),
            );
        }
        status == 0
    }

    /// The configured tiles of this thread, released when dropped; it cannot leave the thread.
    ///
    /// All methods: `C`, `A`, `B`, `T` are below 8 and name tiles that are used, no other `Tiles` of this thread was made
    /// or dropped since this one was made. Otherwise the process may be stopped, or tiles hold other values.
    #[derive(Debug)]
    pub struct Tiles(PhantomData<*const ()>);

    impl Drop for Tiles {
        fn drop(&mut self) {
            // SAFETY: `self` was made by `Amx::configure`, so the instruction is there.
            unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
        }
    }

    impl Tiles {
        /// Tile `T` = 0.
        ///
        /// # Safety
        /// As for all methods.
        #[inline(always)]
        pub unsafe fn zero<const T: u8>(&self) {
            // SAFETY: the tile is used.
            unsafe { asm!("tilezero tmm{}", const T, options(nomem, nostack, preserves_flags)) };
        }

        /// Reads tile `T`; its row `r` lies `r * stride` bytes after `from`.
        ///
        /// # Safety
        /// As for all methods, and the rows of the tile's form can be read. Any alignment; 64 is fastest.
        #[inline(always)]
        pub unsafe fn load<const T: u8>(&self, from: *const u8, stride: usize) {
            // SAFETY: the tile is used, and the caller lets us read its rows.
            unsafe {
                asm!("tileloadd tmm{}, [{} + {}]", const T, in(reg) from, in(reg) stride,
                     options(nostack, preserves_flags, readonly));
            }
        }

        /// Writes tile `T`; its row `r` goes `r * stride` bytes after `to`.
        ///
        /// # Safety
        /// As for all methods, and the rows of the tile's form can be written.
        #[inline(always)]
        pub unsafe fn store<const T: u8>(&self, to: *mut u8, stride: usize) {
            // SAFETY: the tile is used, and the caller lets us write its rows.
            unsafe {
                asm!("tilestored [{} + {}], tmm{}", in(reg) to, in(reg) stride, const T,
                     options(nostack, preserves_flags));
            }
        }

        /// `C += A B`, bf16 to `f32`.
        ///
        /// # Safety
        /// As for all methods, three different tiles. `C` has the rows of `A` and the row bytes of `B`, and `A` as many
        /// groups of 4 bytes in a row as `B` has rows.
        #[inline(always)]
        pub unsafe fn dot_bf16<const C: u8, const A: u8, const B: u8>(&self) {
            // SAFETY: tiles and forms are as the caller promises.
            unsafe {
                asm!("tdpbf16ps tmm{}, tmm{}, tmm{}", const C, const A, const B,
                     options(nomem, nostack, preserves_flags));
            }
        }

        /// `C += A B`, signed bytes to `i32`.
        ///
        /// # Safety
        /// As for [`Tiles::dot_bf16`].
        #[inline(always)]
        pub unsafe fn dot_signed<const C: u8, const A: u8, const B: u8>(&self) {
            // SAFETY: tiles and forms are as the caller promises.
            unsafe {
                asm!("tdpbssd tmm{}, tmm{}, tmm{}", const C, const A, const B,
                     options(nomem, nostack, preserves_flags));
            }
        }

        /// `C += A B`, unsigned bytes of `A` and signed ones of `B` to `i32`.
        ///
        /// # Safety
        /// As for [`Tiles::dot_bf16`].
        #[inline(always)]
        pub unsafe fn dot_unsigned<const C: u8, const A: u8, const B: u8>(&self) {
            // SAFETY: tiles and forms are as the caller promises.
            unsafe {
                asm!("tdpbusd tmm{}, tmm{}, tmm{}", const C, const A, const B,
                     options(nomem, nostack, preserves_flags));
            }
        }
    }
}

/// A machine without tiles: no value of these types exists.
#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
#[allow(missing_docs, clippy::missing_safety_doc)] // as above
mod machine {
    use super::TileShape;

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Amx {}

    impl Amx {
        pub fn detect() -> Option<Amx> {
            None
        }
        pub fn configure(self, forms: &[TileShape; 8]) -> Tiles {
            debug_assert!(forms.iter().all(|form| form.is_valid()));
            match self {}
        }
    }

    #[derive(Debug)]
    pub enum Tiles {}

    impl Tiles {
        pub unsafe fn zero<const T: u8>(&self) {
            match *self {}
        }
        pub unsafe fn load<const T: u8>(&self, _from: *const u8, _stride: usize) {
            match *self {}
        }
        pub unsafe fn store<const T: u8>(&self, _to: *mut u8, _stride: usize) {
            match *self {}
        }
        pub unsafe fn dot_bf16<const C: u8, const A: u8, const B: u8>(&self) {
            match *self {}
        }
        pub unsafe fn dot_signed<const C: u8, const A: u8, const B: u8>(&self) {
            match *self {}
        }
        pub unsafe fn dot_unsigned<const C: u8, const A: u8, const B: u8>(&self) {
            match *self {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Small whole numbers, so that sums are exact in any order.
    fn number(i: usize) -> i32 {
        (i * 7 % 13) as i32 - 6
    }

    #[test]
    fn products_of_tiles_are_exact_on_small_numbers() {
        let Some(amx) = Amx::detect() else { return };
        // C is 5 by 7, the inner size 12 (bf16) or 24 (bytes): six rows of B.
        let (rows, columns, groups) = (5, 7, 6);
        let mut forms = [TileShape::default(); 8];
        forms[0] = TileShape { rows: rows as u8, row_bytes: 4 * columns as u16 };
        forms[1] = TileShape { rows: rows as u8, row_bytes: 4 * groups as u16 };
        forms[2] = TileShape { rows: groups as u8, row_bytes: 4 * columns as u16 };
        for (width, signed) in [(2, true), (4, true), (4, false)] {
            let inner = groups * width;
            let a = |m: usize, i: usize| number(m * inner + i) + if signed { 0 } else { 6 };
            let b = |i: usize, n: usize| number(3 * i + 5 * n);
            let encode = |x: i32, to: &mut [u8]| match to.len() {
                2 => to.copy_from_slice(&half::bf16::from_f32(x as f32).to_bits().to_le_bytes()),
                _ => to[0] = x as u8,
            };
            let bytes = 4 / width;
            let mut left = vec![0u8; rows * inner * bytes];
            for (at, to) in left.chunks_mut(bytes).enumerate() {
                encode(a(at / inner, at % inner), to);
            }
            let mut right = vec![0u8; inner * columns * bytes];
            for (at, to) in right.chunks_mut(bytes).enumerate() {
                let (row, rest) = (at / (columns * width), at % (columns * width));
                encode(b(width * row + rest % width, rest / width), to);
            }
            let mut sums = vec![0xA5A5_A5A5u32; rows * columns];
            let tiles = amx.configure(&forms);
            // SAFETY: the forms fit each other, and the buffers hold exactly their rows.
            unsafe {
                tiles.zero::<0>();
                tiles.load::<1>(left.as_ptr(), inner * bytes);
                tiles.load::<2>(right.as_ptr(), 4 * columns);
                match (width, signed) {
                    (2, _) => tiles.dot_bf16::<0, 1, 2>(),
                    (_, true) => tiles.dot_signed::<0, 1, 2>(),
                    (_, false) => tiles.dot_unsigned::<0, 1, 2>(),
                }
                tiles.store::<0>(sums.as_mut_ptr().cast(), 4 * columns);
            }
            drop(tiles);
            for (at, &sum) in sums.iter().enumerate() {
                let expected: i32 = (0..inner).map(|i| a(at / columns, i) * b(i, at % columns)).sum();
                let got = if width == 2 { f32::from_bits(sum) as i32 } else { sum as i32 };
                assert_eq!(got, expected, "element {at}, {width} to a group, signed {signed}");
            }
        }
    }
}
