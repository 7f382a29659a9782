//! A score and a difference of bytes as text: rounding never hides a difference or invents one.

/// A score with two digits, or with as many as show on which side of the verdict's threshold it is.
pub fn score_text(score: f64, fuse_from: f64) -> String {
    let says = |text: &String| text.parse::<f64>().is_ok_and(|shown| (shown >= fuse_from) == (score >= fuse_from));
    let mut texts = (2..=6).map(|digits| format!("{score:.digits$}"));
    texts.clone().find(says).or_else(|| texts.next_back()).unwrap_or_default()
}

/// `34 % fewer bytes`; a share below one per cent has a digit more, so that a difference is never printed as none.
pub fn change_of_bytes(before: u64, after: u64) -> String {
    if before == after {
        return "as many bytes".to_string();
    }
    let share = 100.0 * (1.0 - after as f64 / before.max(1) as f64);
    let digits = match share.abs() {
        share if share >= 0.95 => format!("{share:.0}"),
        share if share >= 0.05 => format!("{share:.1}"),
        _ => "less than 0.1".to_string(),
    };
    format!("{digits} % {} bytes", if share > 0.0 { "fewer" } else { "more" })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_score_below_the_threshold_is_not_printed_as_the_threshold() {
        assert_eq!(score_text(0.8512, 0.6), "0.85");
        assert_eq!(score_text(0.5962, 0.6), "0.596");
        assert_eq!(score_text(0.6, 0.6), "0.60");
        assert_eq!(score_text(0.59999, 0.6), "0.59999");
        assert_eq!(score_text(f64::NAN, 0.6), "NaN");
    }

    #[test]
    fn a_difference_of_bytes_is_never_printed_as_none() {
        assert_eq!(change_of_bytes(1000, 660), "34 % fewer bytes");
        assert_eq!(change_of_bytes(1000, 1302), "30 % more bytes");
        assert_eq!(change_of_bytes(1000, 997), "0.3 % fewer bytes");
        assert_eq!(change_of_bytes(1_000_000, 999_999), "less than 0.1 % fewer bytes");
        assert_eq!(change_of_bytes(7, 7), "as many bytes");
    }
}
