//! Sizes with their unit in the type.

use std::fmt;
use std::iter::Sum;
use std::ops::{Add, AddAssign, Div, Mul, Sub};

/// A number of bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Bytes(pub u64);

impl Add for Bytes {
    type Output = Bytes;
    fn add(self, other: Bytes) -> Bytes {
        Bytes(self.0 + other.0)
    }
}

impl AddAssign for Bytes {
    fn add_assign(&mut self, other: Bytes) {
        self.0 += other.0;
    }
}

impl Sub for Bytes {
    type Output = Bytes;
    /// Never below zero.
    fn sub(self, other: Bytes) -> Bytes {
        Bytes(self.0.saturating_sub(other.0))
    }
}

impl Sum for Bytes {
    fn sum<I: Iterator<Item = Bytes>>(all: I) -> Bytes {
        all.fold(Bytes(0), Add::add)
    }
}

impl fmt::Display for Bytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.0 as f64;
        match self.0 {
            0..=9_999 => write!(f, "{} B", self.0),
            10_000..=9_999_999 => write!(f, "{:.1} KB", bytes / 1e3),
            10_000_000..=9_999_999_999 => write!(f, "{:.1} MB", bytes / 1e6),
            _ => write!(f, "{:.2} GB", bytes / 1e9),
        }
    }
}

/// Bytes or operations per second.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub struct Rate {
    /// a second
    pub per_second: f64,
}

/// A time.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd, Default)]
pub struct Seconds(pub f64);

impl Seconds {
    /// From microseconds.
    pub fn from_us(us: f64) -> Seconds {
        Seconds(us * 1e-6)
    }

    /// In microseconds.
    pub fn us(self) -> f64 {
        self.0 * 1e6
    }

    /// The longer of two times.
    pub fn max(self, other: Seconds) -> Seconds {
        Seconds(self.0.max(other.0))
    }

    /// The shorter of two times.
    pub fn min(self, other: Seconds) -> Seconds {
        Seconds(self.0.min(other.0))
    }
}

impl Div<Rate> for Bytes {
    type Output = Seconds;
    fn div(self, rate: Rate) -> Seconds {
        Seconds(self.0 as f64 / rate.per_second)
    }
}

impl Add for Seconds {
    type Output = Seconds;
    fn add(self, other: Seconds) -> Seconds {
        Seconds(self.0 + other.0)
    }
}

impl Sub for Seconds {
    type Output = Seconds;
    fn sub(self, other: Seconds) -> Seconds {
        Seconds(self.0 - other.0)
    }
}

impl Mul<f64> for Seconds {
    type Output = Seconds;
    fn mul(self, factor: f64) -> Seconds {
        Seconds(self.0 * factor)
    }
}

impl Sum for Seconds {
    fn sum<I: Iterator<Item = Seconds>>(all: I) -> Seconds {
        all.fold(Seconds(0.0), Add::add)
    }
}

impl fmt::Display for Seconds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.us().abs() {
            us if us < 0.05 => write!(f, "0.0 us"),
            us if us < 1000.0 => write!(f, "{:.1} us", self.us()),
            us if us < 1e6 => write!(f, "{:.2} ms", self.us() / 1e3),
            _ => write!(f, "{:.2} s", self.0),
        }
    }
}
