//! What a reader of an analysis can do next, the most useful first.

use crate::units::{digits, time};
use crate::{Analysis, Candidate, KernelSheet};

/// Maximum number of suggestions.
const MOST: usize = 6;

/// Maximum number of refused fusions listed.
const REFUSALS: usize = 2;

/// A kind of kernel whose predictions are off by more than this is worth a calibration.
const POOR: f64 = 0.3;

/// Suggestions for what to do next.
pub fn next_steps(analysis: &Analysis) -> Vec<String> {
    let mut steps: Vec<String> = Vec::new();
    if analysis.machine.basis == "guessed" {
        steps.push(
            "The numbers of this machine are estimated from another one: `deuteron doctor --calibrate` measures them."
                .into(),
        );
    }
    steps.extend(poorly_predicted(analysis));
    if analysis.measured.is_none() && analysis.profiled.is_none() {
        steps.push(
            "Nothing has run yet: `deuteron fuse` with the same graph verifies and times this plan on the current \
             machine."
                .into(),
        );
    }
    steps.extend(longest(analysis));
    steps.extend(refused(analysis));
    if let Some(plan) = &analysis.plans.conceivable
        && plan.us < analysis.plans.chosen.us
    {
        let less = time(analysis.plans.chosen.us - plan.us);
        steps.push(format!("Kernels that this version cannot generate would save {less}: see `--conceivable`."));
    }
    steps.truncate(MOST);
    steps
}

fn poorly_predicted(analysis: &Analysis) -> Option<String> {
    let classes = &analysis.measured.as_ref()?.classes;
    let worst = classes.iter().max_by(|a, b| a.median_error.total_cmp(&b.median_error))?;
    (worst.median_error > POOR).then(|| {
        format!(
            "Predictions of {} kernels are off by {} %: `deuteron doctor --calibrate` fits them to this machine.",
            worst.class,
            digits(100.0 * worst.median_error)
        )
    })
}

/// The kernel that takes the most time, and what would make it faster.
fn longest(analysis: &Analysis) -> Option<String> {
    let all = |sheet: &KernelSheet| sheet.measured_us.unwrap_or(sheet.cost.us) * sheet.launches.len() as f64;
    let total: f64 = analysis.after.iter().map(all).filter(|us| us.is_finite()).sum();
    let kernel =
        analysis.after.iter().filter(|sheet| all(sheet).is_finite()).max_by(|a, b| all(a).total_cmp(&all(b)))?;
    let share = 100.0 * all(kernel) / total;
    let (limit, help) = match kernel.cost.bound.as_str() {
        "memory" => ("memory bandwidth", "only fewer bytes help: a narrower dtype, or a neighbour in the same kernel"),
        "cache" => ("cache bandwidth", "fewer passes over the cache help: larger tiles, or a narrower dtype"),
        "matrix" => ("its matrix units", "a narrower dtype or fewer flops help"),
        "vector" => ("its vector units", "fewer or cheaper operations per element help"),
        "launch" => ("launch overhead", "a larger batch or one CUDA graph for all launches helps"),
        _ => return None,
    };
    share
        .is_finite()
        .then(|| format!("{} takes {} % of the time and is limited by {limit}; {help}.", kernel.name, digits(share)))
}

/// The refused fusions, those of the longest kernels first: of each code the first, or all.
pub fn refusals(analysis: &Analysis, all: bool) -> Vec<&Candidate> {
    let weight = |one: &Candidate| one.values.us_apart * one.count as f64;
    let mut list: Vec<&Candidate> = analysis.candidates.iter().filter(|one| one.reason.code != "OK").collect();
    list.sort_by(|a, b| weight(b).total_cmp(&weight(a)));
    let mut codes: Vec<&str> = Vec::new();
    list.retain(|one| {
        let new = !codes.contains(&one.reason.code.as_str());
        codes.push(&one.reason.code);
        all || new
    });
    list
}

/// Refused fusions that the user can do something about.
fn refused(analysis: &Analysis) -> Vec<String> {
    // Some reasons can only be accepted, and their hint says so.
    let can_be_helped = |one: &&Candidate| {
        let hint = &one.reason.hint;
        !one.chosen && one.score > 0.0 && !hint.is_empty() && !hint.starts_with("none")
    };
    let list: Vec<&Candidate> = refusals(analysis, false).into_iter().filter(can_be_helped).collect();
    let say = |one: &&Candidate| {
        let (ops, code, hint) = (one.ops.join(" + "), &one.reason.code, one.reason.hint.trim_end_matches('.'));
        format!("{ops} stays apart ({code}): {hint}.")
    };
    list.iter().take(REFUSALS).map(say).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The schema's own example would be longer than the code: an analysis is read from JSON with little in it.
    fn analysis(change: impl FnOnce(&mut serde_json::Value)) -> Analysis {
        let plan = serde_json::json!({"kernels": 1, "bytes": 1, "us": 10.0, "peak_bytes": 0});
        let mut value = serde_json::json!({
            "schema": 2, "graph": "g", "device": "d", "verdict": "", "optimal": true, "planning_ms": 0.0,
            "search": {"groups": 1, "states": 1, "parts": 1, "distinct_parts": 1, "gap": 0.0, "text": ""},
            "plans": {"naive": plan, "eager": plan, "unfused": plan, "greedy": plan, "chosen": plan},
            "ops": [], "before": [], "after": [], "scoring": {"fuse_from": 0.6, "criteria": []}, "candidates": [],
            "disagreements": [], "pins": [], "flips": [], "notes": [],
            "machine": {"name": "d", "kind": "cpu", "basis": "given", "numbers": [], "bytes_per_us": 1.0,
                "vector_flops_per_us": 1.0, "matrix_flops_per_us": 1.0, "vector_ridge": 1.0, "matrix_ridge": 1.0},
        });
        change(&mut value);
        crate::parse(&value.to_string()).unwrap()
    }

    #[test]
    fn what_was_guessed_is_to_be_measured_and_what_has_not_run_is_to_be_run() {
        let steps = next_steps(&analysis(|value| value["machine"]["basis"] = "guessed".into()));
        assert_eq!(steps.len(), 2, "{steps:?}");
        assert!(steps[0].contains("doctor --calibrate") && steps[1].contains("deuteron fuse"), "{steps:?}");
        assert!(!next_steps(&analysis(|_| {}))[0].contains("guessed"));
    }

    #[test]
    fn a_plan_that_could_be_better_says_by_how_much() {
        let steps = next_steps(&analysis(|value| {
            value["plans"]["conceivable"] = value["plans"]["chosen"].clone();
            value["plans"]["conceivable"]["us"] = 7.0.into();
        }));
        assert!(steps.iter().any(|step| step.contains("would save 3.00 µs")), "{steps:?}");
    }

    #[test]
    fn poor_predictions_are_to_be_calibrated() {
        let steps = next_steps(&analysis(|value| {
            value["measured"] = serde_json::json!({"eager_us": 1.0, "unfused_us": 1.0, "chosen_us": 1.0, "speedup": 1.0,
                "verified": true, "worst_ratio": 0.1, "classes": [{"class": "row", "kernels": 2, "predicted_us": 1.0,
                "measured_us": 2.0, "median_error": 0.5}]});
        }));
        assert_eq!(steps.len(), 1, "{steps:?}");
        assert!(steps[0].starts_with("Predictions of row kernels are off by 50.0 %"), "{steps:?}");
    }
}
