//! A score as text.

/// A score with two digits, or with as many as show on which side of the verdict's threshold it is.
pub fn score_text(score: f64, fuse_from: f64) -> String {
    let says = |text: &String| text.parse::<f64>().is_ok_and(|shown| (shown >= fuse_from) == (score >= fuse_from));
    let texts = (2..=6).map(|digits| format!("{score:.digits$}"));
    texts.clone().find(says).or_else(|| texts.last()).unwrap_or_default()
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
}
