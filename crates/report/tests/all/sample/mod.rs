//! Analyses to test with: GPT-2 of any depth on an H200, with plausible numbers.

mod costs;
mod model;
mod sheets;

use deuteron_report::*;

/// What to make.
#[derive(Clone, Copy)]
pub struct Shape {
    /// transformer layers
    pub layers: usize,
    /// whether gradients are there
    pub backward: bool,
    /// lines of source a kernel
    pub lines: usize,
    /// whether it was measured
    pub measured: bool,
    /// how many kernels that would be equal are told apart, to have many of them
    pub variants: usize,
    /// candidates in all
    pub candidates: usize,
}

/// GPT-2 124M, forward, measured.
pub fn small() -> Analysis {
    analysis(Shape { layers: 12, backward: false, lines: 24, measured: true, variants: 1, candidates: 10 })
}

/// About the size of GPT-2 XL with gradients: 3,000 operations, 60 kernels a plan of 100 lines each, 300 candidates.
pub fn large() -> Analysis {
    analysis(Shape { layers: 88, backward: true, lines: 100, measured: false, variants: 3, candidates: 300 })
}

/// An analysis of that shape.
pub fn analysis(shape: Shape) -> Analysis {
    let ops = model::ops(shape.layers, shape.backward);
    let machine = sheets::machine();
    let before = sheets::kernels(&ops, shape, |op| op.before);
    let after = sheets::kernels(&ops, shape, |op| op.after);
    let (unfused, chosen) = (sheets::plan(&before), sheets::plan(&after));
    let candidates = sheets::candidates(&ops, shape.candidates);
    let saved = 100.0 * (1.0 - chosen.bytes as f64 / unfused.bytes as f64);
    Analysis {
        schema: VERSION,
        graph: if shape.backward { "gpt2-xl, training" } else { "gpt2" }.into(),
        device: "NVIDIA H200".into(),
        verdict: format!(
            "Fuse: {} kernels become {}, {saved:.0} % fewer bytes move, and the step is predicted {:.2} times as fast.",
            unfused.kernels,
            chosen.kernels,
            unfused.us / chosen.us
        ),
        optimal: !shape.backward,
        search: SearchSheet {
            groups: 42,
            states: 97,
            parts: shape.layers + 2,
            distinct_parts: 3,
            gap: if shape.backward { 0.012 } else { 0.0 },
            text: if shape.backward {
                "beam search over 318 groups; a bound puts the best plan at most 1.2 % below".into()
            } else {
                "optimal among 42 groups, 97 states".into()
            },
        },
        planning_ms: 38.4,
        plans: sheets::plans(&unfused, &chosen),
        scoring: sheets::scoring(),
        disagreements: sheets::disagreements(&candidates),
        pins: vec![PinSheet {
            kind: "forbid".into(),
            ops: vec!["matmul".into(), "gelu".into()],
            places: shape.layers,
            price_us: 34.2,
            text: "forbidding matmul + gelu costs 34.2 us, 2.1 % of the plan".into(),
        }],
        flips: sheets::flips(),
        recompute: shape.backward.then(sheets::recompute),
        measured: shape.measured.then(|| sheets::measured(&before, &after)),
        memory: Some(sheets::memory(&before, &after)),
        profiled: shape.measured.then(sheets::profiled),
        notes: vec![
            "attention.mask is a constant and was folded into the scores".into(),
            "the import holds 2 dropout calls with probability 0; they were left out".into(),
        ],
        ops: ops.iter().enumerate().map(|(id, op)| sheets::op(id, op)).collect(),
        before,
        after,
        candidates,
        machine,
    }
}
