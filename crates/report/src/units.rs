//! Formatted numbers: three digits and a prefix. `page/format.js` does the same for numbers that the page computes.

const PREFIXES: [(f64, &str); 9] =
    [(1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""), (1e-3, "m"), (1e-6, "µ"), (1e-9, "n")];

/// Shown in place of a missing number.
pub(crate) const NOTHING: &str = "–";

/// Three significant digits, no exponent for what fits without one.
pub(crate) fn digits(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        NOTHING.into()
    } else if size >= 1e6 || (size > 0.0 && size < 1e-3) {
        format!("{value:.1e}")
    } else if size >= 99.95 {
        format!("{value:.0}")
    } else if size >= 9.995 {
        format!("{value:.1}")
    } else if size >= 0.1 || size == 0.0 {
        format!("{value:.2}")
    } else {
        format!("{value:.4}")
    }
}

fn prefixed(value: f64, unit: &str, smallest: f64) -> String {
    if !value.is_finite() {
        return NOTHING.into();
    }
    if value == 0.0 {
        return format!("0 {unit}");
    }
    let (scale, prefix) = PREFIXES
        .into_iter()
        .find(|(scale, _)| value.abs() >= scale * 0.9995 && *scale >= smallest)
        .unwrap_or_else(|| PREFIXES.into_iter().rfind(|(scale, _)| *scale >= smallest).unwrap_or((1.0, "")));
    let scaled = value / scale;
    if scale == 1.0 && scaled.fract() == 0.0 && scaled.abs() < 1e6 {
        return format!("{scaled} {prefix}{unit}");
    }
    format!("{} {prefix}{unit}", digits(scaled))
}

/// `6.30 MB`
pub(crate) fn bytes(value: u64) -> String {
    prefixed(value as f64, "B", 1.0)
}

/// `1.72 ms`, from microseconds
pub(crate) fn time(us: f64) -> String {
    prefixed(us * 1e-6, "s", 1e-9)
}

/// `60.0 TFLOP/s`, from flops per microsecond
pub(crate) fn flop_rate(flops_per_us: f64) -> String {
    prefixed(flops_per_us * 1e6, "FLOP/s", 1.0)
}

/// `4.15 TB/s`, from bytes per microsecond
pub(crate) fn byte_rate(bytes_per_us: f64) -> String {
    prefixed(bytes_per_us * 1e6, "B/s", 1.0)
}

/// A change such as `-27.1 %`; empty if the share is undefined
pub(crate) fn percent_change(old: f64, new: f64) -> Option<f64> {
    let share = (new - old) / old * 100.0;
    share.is_finite().then_some(share)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_and_a_prefix() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(512), "512 B");
        assert_eq!(bytes(6_297_600), "6.30 MB");
        assert_eq!(bytes(999_900), "1.00 MB");
        assert_eq!(bytes(u64::MAX), "18447 PB");
        assert_eq!(time(1720.0), "1.72 ms");
        assert_eq!(time(0.25), "250 ns");
        assert_eq!(time(1e-9), "1.0e-6 ns");
        assert_eq!(time(f64::NAN), NOTHING);
        assert_eq!(flop_rate(60e6), "60.0 TFLOP/s");
        assert_eq!(byte_rate(4.15e6), "4.15 TB/s");
        assert_eq!(digits(-0.04), "-0.0400");
        assert_eq!(percent_change(0.0, 1.0), None);
    }
}
