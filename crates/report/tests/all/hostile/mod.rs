//! Analyses that nobody should write and somebody will.

use crate::sample;
use deuteron_report::*;

/// Text that wants to be markup.
pub const ATTACK: &str = "</script><img src=x onerror=alert(1)><!--attack-->\u{2028}\u{2029}&\"'";

/// Every string field of an analysis, as `attacked` marks it.
pub const FIELDS: [&str; 41] = [
    "graph",
    "device",
    "verdict",
    "search.text",
    "op.name",
    "op.label",
    "op.kind",
    "op.result",
    "kernel.name",
    "kernel.kind",
    "kernel.size",
    "kernel.variant",
    "tiles.by",
    "tiles.registers_from",
    "cost.bound",
    "line.text",
    "line.op",
    "candidate.ops",
    "candidate.kind",
    "candidate.verdict",
    "reason.code",
    "reason.text",
    "reason.hint",
    "disagreement.text",
    "pin.kind",
    "pin.ops",
    "pin.text",
    "flip.what",
    "flip.from",
    "flip.to",
    "flip.text",
    "again.name",
    "recompute.text",
    "machine.name",
    "machine.kind",
    "number.name",
    "number.origin",
    "class.class",
    "notes",
    "before.name",
    "after.name",
];

/// The attack in every string, behind the name of its field.
pub fn attacked() -> Analysis {
    let bad = |field: &str| format!("{field}:{ATTACK}");
    let mut analysis = sample::small();
    analysis.recompute = sample::large().recompute;
    analysis.graph = bad("graph");
    analysis.device = bad("device");
    analysis.verdict = bad("verdict");
    analysis.search.text = bad("search.text");
    for op in &mut analysis.ops {
        (op.name, op.label, op.kind, op.result) = (bad("op.name"), bad("op.label"), bad("op.kind"), bad("op.result"));
    }
    for sheet in analysis.before.iter_mut().chain(&mut analysis.after) {
        (sheet.name, sheet.kind, sheet.size) = (bad("kernel.name"), bad("kernel.kind"), bad("kernel.size"));
        (sheet.cost.bound, sheet.variant) = (bad("cost.bound"), bad("kernel.variant"));
        if let Some(tiles) = &mut sheet.tiles {
            (tiles.by, tiles.registers_from) = (bad("tiles.by"), bad("tiles.registers_from"));
        }
        for line in &mut sheet.source {
            (line.text, line.op) = (bad("line.text"), bad("line.op"));
        }
    }
    analysis.before[0].name = bad("before.name");
    analysis.after[0].name = bad("after.name");
    for sheet in &mut analysis.candidates {
        sheet.ops = vec![bad("candidate.ops"); 2];
        (sheet.kind, sheet.verdict) = (bad("candidate.kind"), bad("candidate.verdict"));
        let reason = (bad("reason.code"), bad("reason.text"), bad("reason.hint"));
        (sheet.reason.code, sheet.reason.text, sheet.reason.hint) = reason;
    }
    analysis.disagreements.iter_mut().for_each(|entry| entry.text = bad("disagreement.text"));
    for pin in &mut analysis.pins {
        (pin.kind, pin.ops, pin.text) = (bad("pin.kind"), vec![bad("pin.ops")], bad("pin.text"));
    }
    for flip in &mut analysis.flips {
        (flip.what, flip.from, flip.to, flip.text) =
            (bad("flip.what"), bad("flip.from"), bad("flip.to"), bad("flip.text"));
    }
    if let Some(sheet) = &mut analysis.recompute {
        sheet.again = vec![(bad("again.name"), 1)];
        sheet.text = bad("recompute.text");
    }
    (analysis.machine.name, analysis.machine.kind) = (bad("machine.name"), bad("machine.kind"));
    for number in &mut analysis.machine.numbers {
        (number.name, number.origin) = (bad("number.name"), bad("number.origin"));
    }
    if let Some(measured) = &mut analysis.measured {
        measured.classes.iter_mut().for_each(|class| class.class = bad("class.class"));
    }
    analysis.notes = vec![bad("notes")];
    analysis
}

/// Analyses with figures that are no numbers, nothing in them, or references that point nowhere.
pub fn malformed() -> Vec<Analysis> {
    let mut all = vec![empty(sample::small())];
    for value in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY, 0.0, -1.0, f64::MAX, f64::MIN_POSITIVE, 1e-300] {
        all.push(with_number(sample::small(), value));
        all.push(with_number(empty(sample::small()), value));
    }
    for index in [0, 7, usize::MAX] {
        all.push(with_index(sample::small(), index));
    }
    all
}

fn empty(mut analysis: Analysis) -> Analysis {
    analysis.ops.clear();
    analysis.before.clear();
    analysis.after.clear();
    analysis.candidates.clear();
    analysis.disagreements.clear();
    analysis.pins.clear();
    analysis.flips.clear();
    analysis.notes.clear();
    analysis.machine.numbers.clear();
    analysis.measured = None;
    analysis.plans.conceivable = None;
    analysis.plans.unfused = PlanSheet { kernels: 0, bytes: 0, us: 0.0, peak_bytes: 0 };
    analysis
}

fn with_number(mut analysis: Analysis, value: f64) -> Analysis {
    analysis.planning_ms = value;
    analysis.search.gap = value;
    analysis.optimal = false;
    analysis.plans.chosen.us = value;
    analysis.plans.unfused.us = value;
    analysis.ops.iter_mut().for_each(|op| op.intensity = value);
    for sheet in analysis.before.iter_mut().chain(&mut analysis.after) {
        sheet.cost.us = value;
        sheet.cost.intensity = value;
        sheet.measured_us = Some(value);
        if let Some(tiles) = &mut sheet.tiles {
            (tiles.occupancy, tiles.waves, tiles.wave_efficiency) = (value, value, value);
        }
        sheet.cost.matrix_flops = u64::MAX;
        sheet.cost.vector_flops = u64::MAX;
        (sheet.cost.read, sheet.cost.written) = (u64::MAX, u64::MAX);
    }
    for sheet in &mut analysis.candidates {
        sheet.score = value;
        sheet.worth_us = Some(value);
        sheet.values.us_apart = value;
    }
    let machine = &mut analysis.machine;
    (machine.bytes_per_us, machine.vector_flops_per_us, machine.matrix_flops_per_us) = (value, value, value);
    machine.numbers.iter_mut().for_each(|number| number.value = value);
    if let Some(measured) = &mut analysis.measured {
        (measured.unfused_us, measured.chosen_us, measured.speedup) = (value, value, value);
        measured.worst_ratio = value;
    }
    analysis
}

fn with_index(mut analysis: Analysis, index: usize) -> Analysis {
    for op in &mut analysis.ops {
        (op.id, op.before, op.after) = (index, index, index);
        op.reads = vec![index; 3];
    }
    for sheet in analysis.before.iter_mut().chain(&mut analysis.after) {
        sheet.launches = vec![index; 2];
    }
    for sheet in &mut analysis.candidates {
        (sheet.at, sheet.count) = (vec![index; 4], index);
    }
    analysis.disagreements.iter_mut().for_each(|entry| entry.candidate = index);
    analysis.flips.iter_mut().for_each(|flip| flip.candidate = index);
    analysis.plans.chosen.kernels = index;
    analysis
}
