//! The analysis as the page's data block: the same facts, with every string stored once and operations in columns.
//!
//! It is smaller than the JSON form by half. GPT-2 XL with gradients stays under 2 MB that way, and a browser reads
//! columns of numbers faster than thousands of objects.

use std::collections::HashMap;

use serde::Serialize;

use crate::{
    Analysis, Candidate, CostSheet, CounterSheet, Disagreement, Flip, KernelSheet, MachineSheet, MeasuredSheet,
    MemorySheet, PinSheet, Plans, ProfiledSheet, RecomputeSheet, ScoringSheet, SourceLine, TensorSheet, TileSheet,
};

/// The data block as JSON. `page/data.js` reads it.
pub(crate) fn to_json(analysis: &Analysis) -> String {
    let mut strings = Strings::default();
    let mut sources = Sources::default();
    let ops = OpColumns::of(analysis, &mut strings);
    let before = kernels(&analysis.before, &mut strings, &mut sources);
    let after = kernels(&analysis.after, &mut strings, &mut sources);
    let data = PageData {
        strings: strings.list,
        sources: sources.list,
        ops,
        before,
        after,
        plans: &analysis.plans,
        scoring: &analysis.scoring,
        candidates: &analysis.candidates,
        disagreements: &analysis.disagreements,
        pins: &analysis.pins,
        flips: &analysis.flips,
        recompute: analysis.recompute.as_ref(),
        machine: &analysis.machine,
        memory: analysis.memory.as_ref(),
        measured: analysis.measured.as_ref(),
        profiled: analysis.profiled.as_ref(),
        notes: &analysis.notes,
    };
    // Only maps with keys that are not strings can fail, and there are none. The page says so if its data is missing.
    serde_json::to_string(&data).unwrap_or_else(|_| "null".into())
}

#[derive(Serialize)]
struct PageData<'a> {
    strings: Vec<&'a str>,
    sources: Vec<SourceColumns>,
    ops: OpColumns<'a>,
    before: Vec<KernelData<'a>>,
    after: Vec<KernelData<'a>>,
    plans: &'a Plans,
    scoring: &'a ScoringSheet,
    candidates: &'a [Candidate],
    disagreements: &'a [Disagreement],
    pins: &'a [PinSheet],
    flips: &'a [Flip],
    recompute: Option<&'a RecomputeSheet>,
    machine: &'a MachineSheet,
    memory: Option<&'a MemorySheet>,
    measured: Option<&'a MeasuredSheet>,
    profiled: Option<&'a ProfiledSheet>,
    notes: &'a [String],
}

/// Operations by column; strings as positions in the table of strings.
#[derive(Serialize)]
struct OpColumns<'a> {
    name: Vec<usize>,
    label: Vec<usize>,
    kind: Vec<usize>,
    result: Vec<usize>,
    reads: Vec<&'a [usize]>,
    before: Vec<usize>,
    after: Vec<usize>,
    intensity: Vec<f64>,
}

impl<'a> OpColumns<'a> {
    fn of(analysis: &'a Analysis, strings: &mut Strings<'a>) -> Self {
        let ops = &analysis.ops;
        Self {
            name: ops.iter().map(|op| strings.place(&op.name)).collect(),
            label: ops.iter().map(|op| strings.place(&op.label)).collect(),
            kind: ops.iter().map(|op| strings.place(&op.kind)).collect(),
            result: ops.iter().map(|op| strings.place(&op.result)).collect(),
            reads: ops.iter().map(|op| op.reads.as_slice()).collect(),
            before: ops.iter().map(|op| op.before).collect(),
            after: ops.iter().map(|op| op.after).collect(),
            intensity: ops.iter().map(|op| op.intensity).collect(),
        }
    }
}

#[derive(Serialize)]
struct KernelData<'a> {
    name: &'a str,
    kind: &'a str,
    launches: &'a [usize],
    primitives: usize,
    size: &'a str,
    tensors: &'a [TensorSheet],
    cost: &'a CostSheet,
    gain_us: Option<f64>,
    realizable: bool,
    variant: &'a str,
    tiles: Option<&'a TileSheet>,
    /// position in `sources`
    source: Option<usize>,
    measured_us: Option<f64>,
    measured_registers: Option<u32>,
    counters: Option<&'a CounterSheet>,
}

fn kernels<'a>(sheets: &'a [KernelSheet], strings: &mut Strings<'a>, sources: &mut Sources) -> Vec<KernelData<'a>> {
    sheets
        .iter()
        .map(|sheet| KernelData {
            name: &sheet.name,
            kind: &sheet.kind,
            launches: &sheet.launches,
            primitives: sheet.primitives,
            size: &sheet.size,
            tensors: &sheet.tensors,
            cost: &sheet.cost,
            gain_us: sheet.gain_us,
            realizable: sheet.realizable,
            variant: &sheet.variant,
            tiles: sheet.tiles.as_ref(),
            source: sources.place(&sheet.source, strings),
            measured_us: sheet.measured_us,
            measured_registers: sheet.measured_registers,
            counters: sheet.counters.as_ref(),
        })
        .collect()
}

/// A table of distinct strings.
#[derive(Default)]
struct Strings<'a> {
    list: Vec<&'a str>,
    places: HashMap<&'a str, usize>,
}

impl<'a> Strings<'a> {
    fn place(&mut self, text: &'a str) -> usize {
        *self.places.entry(text).or_insert_with(|| {
            self.list.push(text);
            self.list.len() - 1
        })
    }
}

/// Lines of a kernel and the operations they came from, both as positions in the table of strings.
#[derive(Serialize, Clone, PartialEq, Eq, Hash)]
struct SourceColumns {
    lines: Vec<usize>,
    ops: Vec<usize>,
}

/// Distinct sources: a kernel that fusion did not change is in both plans.
#[derive(Default)]
struct Sources {
    list: Vec<SourceColumns>,
    places: HashMap<SourceColumns, usize>,
}

impl Sources {
    fn place<'a>(&mut self, source: &'a [SourceLine], strings: &mut Strings<'a>) -> Option<usize> {
        if source.is_empty() {
            return None;
        }
        let columns = SourceColumns {
            lines: source.iter().map(|line| strings.place(&line.text)).collect(),
            ops: source.iter().map(|line| strings.place(&line.op)).collect(),
        };
        let list = &mut self.list;
        Some(*self.places.entry(columns).or_insert_with_key(|columns| {
            list.push(columns.clone());
            list.len() - 1
        }))
    }
}
