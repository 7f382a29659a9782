//! A logarithmic axis.

/// Maps decades to pixels.
#[derive(Debug, Clone, Copy)]
pub(super) struct Axis {
    low: f64,
    high: f64,
    start: f64,
    end: f64,
}

/// The widest axis, in decades; values beyond it are drawn on its edge. This limits axes of extreme input.
const WIDEST: f64 = 15.0;

impl Axis {
    /// An axis that holds all values with a margin, drawn from `start` to `end`.
    pub(super) fn around(values: impl Iterator<Item = f64>, start: f64, end: f64) -> Self {
        let (mut low, mut high) = (f64::INFINITY, f64::NEG_INFINITY);
        for value in values.filter(|value| value.is_finite() && *value > 0.0) {
            low = low.min(value.log10());
            high = high.max(value.log10());
        }
        if low > high {
            (low, high) = (0.0, 1.0);
        }
        low -= 0.3;
        high += 0.3;
        if high - low < 2.0 {
            let middle = (high + low) / 2.0;
            (low, high) = (middle - 1.0, middle + 1.0);
        }
        Self { low: low.max(high - WIDEST), high, start, end }
    }

    /// Where a value lies.
    pub(super) fn at(&self, value: f64) -> f64 {
        let decade = value.log10().clamp(self.low, self.high);
        self.start + (decade - self.low) / (self.high - self.low) * (self.end - self.start)
    }

    /// The smallest value on the axis.
    pub(super) fn first(&self) -> f64 {
        10_f64.powf(self.low)
    }

    /// The largest value on the axis.
    pub(super) fn last(&self) -> f64 {
        10_f64.powf(self.high)
    }

    /// Every power of ten on the axis.
    pub(super) fn decades(&self) -> impl Iterator<Item = f64> {
        (self.low.ceil() as i32..=self.high.floor() as i32).map(|decade| 10_f64.powi(decade))
    }
}
