//! Differences between two analyses.

use crate::sample;
use deuteron_report::{Event, NumberSheet, diff};

#[test]
fn equal_analyses_have_none() {
    let mut later = sample::small();
    // Planning takes another time in every run.
    later.planning_ms *= 3.0;
    let found = diff(&sample::small(), &later);
    assert!(found.is_empty());
    assert_eq!(found.to_string(), "no difference\n");
}

#[test]
fn figures_that_are_no_numbers_equal_themselves() {
    let mut analysis = sample::small();
    analysis.plans.chosen.us = f64::NAN;
    analysis.candidates[0].score = f64::INFINITY;
    assert!(diff(&analysis, &analysis).is_empty());
    assert!(!diff(&analysis, &sample::small()).is_empty());
}

#[test]
fn everything_that_changed_is_told_with_how_much() {
    let old = sample::small();
    let mut new = old.clone();
    new.device = "NVIDIA B200".into();
    new.optimal = false;
    new.search.gap = 0.02;
    new.plans.chosen.kernels -= 9;
    new.plans.chosen.us *= 0.9;
    let gone = new.after.remove(0);
    new.after[0].cost.us *= 2.0;
    new.after[0].source[3].text.push(' ');
    let mut came = gone.clone();
    came.name = "embedding + add".into();
    new.after.push(came);
    new.candidates[0].chosen = true;
    new.candidates[0].verdict = "DO NOT FUSE".into();
    new.candidates[1].score += 0.1;
    new.machine.numbers[0].value = 8000.0;
    new.machine.numbers.push(NumberSheet { name: "clusters".into(), value: 8.0, origin: "driver".into() });
    if let Some(measured) = &mut new.measured {
        measured.verified = false;
    }

    let found = diff(&old, &new);
    let words: Vec<&str> = found.texts.iter().map(|change| change.what.as_str()).collect();
    assert_eq!(words, ["device", "optimality", "results"]);
    assert_eq!(found.plans.len(), 1);
    assert_eq!(found.plans[0].kernels.unwrap().new, 90.0);
    assert!((found.plans[0].us.unwrap().percent.unwrap() + 10.0).abs() < 1e-9);
    assert!(found.plans[0].bytes.is_none());
    let events: Vec<(&str, Event)> = found.kernels.iter().map(|kernel| (kernel.name.as_str(), kernel.event)).collect();
    assert_eq!(
        events,
        [("add + layer_norm", Event::Changed), ("embedding", Event::Disappeared), ("embedding + add", Event::Appeared)]
    );
    assert!(found.kernels[0].source);
    assert_eq!(found.candidates.len(), 2);
    assert_eq!(found.machine.len(), 2);

    let text = found.to_string();
    for line in [
        "device: NVIDIA H200 -> NVIDIA B200\n",
        "optimality: optimal -> gap 2.00 %\n",
        "results: verified -> not verified\n",
        "chosen: kernels 99 -> 90 (-9.1 %), time ",
        "  + embedding + add [8192 x 1600]: launches 0 -> 1",
        "  - embedding [8192 x 1600]: launches 1 -> 0 (-100.0 %)",
        "verdict: FUSE -> DO NOT FUSE, plan: apart -> fused",
        "score 0.77 -> 0.87",
        "  ~ dram_gbps: 4150 -> 8000 (+92.8 %)",
        "  + clusters: 8.00",
    ] {
        assert!(text.contains(line), "{line:?} is not in\n{text}");
    }
    // The difference is data, too.
    assert!(serde_json::to_string(&found).unwrap().contains("\"event\":\"Appeared\""));
}

#[test]
fn equal_names_are_matched_in_order() {
    let mut old = sample::small();
    let twin = old.candidates[0].clone();
    old.candidates.push(twin);
    let mut new = old.clone();
    new.candidates.last_mut().unwrap().score = 0.11;
    let found = diff(&old, &new);
    assert_eq!(found.candidates.len(), 1);
    assert_eq!(found.candidates[0].occurrence, 1);
    assert!(found.to_string().contains("embedding + add (pair 2): score 0.60 -> 0.11"), "{found}");
}
