//! Drills: tests that repeat something a few times by default, and as often as `cargo xtask drill` requests.

/// Set by `cargo xtask drill`: how often.
const TIMES: &str = "DEUTERON_DRILL";

/// How often a test tries something: `few` times, or as often as the drill asks for.
///
/// # Panics
/// If the drill asks for something that is no number.
pub fn times(few: usize) -> usize {
    let asked = std::env::var(TIMES).ok();
    asked.map_or(few, |asked| asked.parse().unwrap_or_else(|_| panic!("{TIMES}: expected a number, got `{asked}`")))
}

/// Whether this is a drill.
pub fn is_drill() -> bool {
    std::env::var_os(TIMES).is_some()
}

/// Says how often something was tried. The drill adds these up.
pub fn tried(count: usize, what: &str) {
    println!("drilled: {count} {what}");
}
