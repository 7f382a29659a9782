//! The sheets of a sample.

use std::collections::BTreeMap;

use super::Shape;
use super::costs::{BYTES_PER_US, MATRIX_PER_US, VECTOR_PER_US, cost};
use super::model::Op;
use deuteron_report::*;

pub fn op(id: usize, op: &Op) -> OpSheet {
    OpSheet {
        id,
        name: op.name.clone(),
        label: op.label.clone(),
        kind: op.kind.into(),
        result: format!("bf16[{},{}]", op.rows, op.cols),
        reads: op.reads.clone(),
        before: op.before,
        after: op.after,
        intensity: op.inner as f64 / 2.0 + 2.25,
    }
}

/// Kernels of a plan, equal ones once; `launch` says which launch computes an operation.
pub fn kernels(ops: &[Op], shape: Shape, launch: impl Fn(&Op) -> usize) -> Vec<KernelSheet> {
    let mut launches: BTreeMap<usize, Vec<(usize, &Op)>> = BTreeMap::new();
    for (id, op) in ops.iter().enumerate() {
        launches.entry(launch(op)).or_default().push((id, op));
    }
    let mut sheets: Vec<KernelSheet> = Vec::new();
    let mut places: BTreeMap<(String, String), usize> = BTreeMap::new();
    for (launch, parts) in launches {
        let name = parts.iter().map(|(_, op)| op.name.as_str()).collect::<Vec<_>>().join(" + ");
        let op = parts[0].1;
        let variant = (op.layer % shape.variants) * 64;
        let size = if op.inner > 1 {
            format!("{} x {} x {}", op.rows, op.cols, op.inner + variant)
        } else {
            format!("{} x {}", op.rows, op.cols + variant)
        };
        if let Some(&place) = places.get(&(name.clone(), size.clone())) {
            sheets[place].launches.push(launch);
            continue;
        }
        places.insert((name.clone(), size.clone()), sheets.len());
        let cost = cost(&parts, ops);
        let attention = parts.iter().any(|(_, op)| op.name.contains("softmax")) && parts.len() > 1;
        let error = 1.0 + 0.12 * (sheets.len() as f64 * 2.3).sin();
        sheets.push(KernelSheet {
            kind: if attention { "attention" } else { op.kind }.into(),
            launches: vec![launch],
            primitives: 4 * parts.len(),
            tensors: tensors(op),
            source: source(&name, &size, &parts, shape.lines),
            gain_us: None,
            realizable: true,
            variant: if op.inner > 1 { "tiles of 128 x 192, two warpgroups in turn, 4 stages" } else { "" }.into(),
            tiles: (op.inner > 1).then(|| tiles(op, shape.measured)),
            measured_us: shape.measured.then_some(cost.us * error),
            measured_registers: shape.measured.then_some(cost.registers + 6),
            counters: shape.measured.then(|| counters(&cost)),
            name,
            size,
            cost,
        });
    }
    sheets
}

fn counters(cost: &CostSheet) -> CounterSheet {
    CounterSheet {
        us: Some(cost.us * 1.1),
        read: Some(cost.read as f64 * 1.02),
        written: Some(cost.written as f64 * 0.98),
        cache_hits: Some(0.42),
        occupancy: Some(cost.occupancy * 0.9),
        registers: Some(f64::from(cost.registers)),
        tensor: (cost.matrix_flops > 0).then_some(0.71),
        issue: Some(0.33),
        ..CounterSheet::default()
    }
}

fn tensors(op: &Op) -> Vec<TensorSheet> {
    let of = |name: String, written| TensorSheet { name, tensor: format!("bf16[{},{}]", op.rows, op.cols), written };
    let read = op.reads.iter().map(|read| of(format!("%{read}"), false));
    read.chain([of(format!("{}.out", op.name), true)]).collect()
}

fn tiles(op: &Op, compiled: bool) -> TileSheet {
    let walked = (op.rows.div_ceil(128) * op.cols.div_ceil(192)) as u64;
    let waves = walked as f64 / 132.0;
    TileSheet {
        by: "wgmma".into(),
        rows: 128,
        columns: 192,
        stages: Some(4),
        cluster: 1,
        blocks: walked.min(132),
        walked: Some(walked),
        threads: 384,
        shared: 227 << 10,
        registers: 168,
        registers_from: if compiled { "compiled" } else { "bound" }.into(),
        occupancy: 0.1875,
        waves,
        wave_efficiency: waves / waves.ceil(),
    }
}

fn source(name: &str, size: &str, parts: &[(usize, &Op)], lines: usize) -> Vec<SourceLine> {
    let line = |text: String, op: &str| SourceLine { text, op: op.into() };
    let symbol: String = name.chars().map(|letter| if letter.is_alphanumeric() { letter } else { '_' }).collect();
    let mut source = vec![
        line(format!("// {name}, {size}"), ""),
        line(format!("extern \"C\" __global__ void {symbol}(const bf16* g_x, const float* g_w, bf16* g_y) {{"), ""),
        line("    const int row = blockIdx.x * ROWS_PER_BLOCK + threadIdx.y;".into(), ""),
    ];
    let body = lines.saturating_sub(4).max(parts.len());
    for at in 0..body {
        let (id, op) = parts[at * parts.len() / body];
        let text = match at % 4 {
            0 => format!("    float r_{}_{at} = load(g_x + row * COLS + {at} * 32 + lane); // {}", id % 97, op.name),
            1 => format!("    r_sum_{at} = fmaf(r_{}_{at}, r_scale, r_sum_{});", op.rows % 89, at / 2),
            2 => format!("    if (lane == 0 && r_sum_{at} < {at}.0f) s_partial[{}] = warp_sum(r_sum_{at});", at % 32),
            _ => format!("    g_y[row * COLS + {at}] = to_bf16(r_{at} * s_partial[{}]);", at % 32),
        };
        source.push(line(text, &op.name));
    }
    source.push(line("}".into(), ""));
    source
}

pub fn plan(kernels: &[KernelSheet]) -> PlanSheet {
    let count = |sheet: &KernelSheet| sheet.launches.len();
    PlanSheet {
        kernels: kernels.iter().map(count).sum(),
        bytes: kernels.iter().map(|sheet| (sheet.cost.read + sheet.cost.written) * count(sheet) as u64).sum(),
        us: kernels.iter().map(|sheet| sheet.cost.us * count(sheet) as f64).sum(),
        peak_bytes: 2_300_000_000,
    }
}

pub fn plans(unfused: &PlanSheet, chosen: &PlanSheet) -> Plans {
    let scaled = |base: &PlanSheet, kernels: f64, bytes: f64, us: f64| PlanSheet {
        kernels: (base.kernels as f64 * kernels) as usize,
        bytes: (base.bytes as f64 * bytes) as u64,
        us: base.us * us,
        peak_bytes: (base.peak_bytes as f64 * bytes) as u64,
    };
    Plans {
        naive: scaled(unfused, 5.4, 2.9, 2.4),
        eager: scaled(unfused, 1.3, 1.4, 1.25),
        unfused: unfused.clone(),
        recomputed: None,
        greedy: Some(scaled(chosen, 1.06, 1.05, 1.04)),
        chosen: chosen.clone(),
        conceivable: Some(scaled(chosen, 0.84, 0.88, 0.93)),
    }
}

pub fn candidates(ops: &[Op], wanted: usize) -> Vec<Candidate> {
    // Distinct pairs with their number where there are enough of them, else every pair on its own.
    let mut seen: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    let mut every = Vec::new();
    let mut first = Vec::new();
    for (reader, op) in ops.iter().enumerate() {
        for &producer in &op.reads {
            let count = seen.entry((&ops[producer].name, &op.name)).or_insert(0);
            *count += 1;
            if *count == 1 {
                first.push((producer, reader));
            }
            every.push((producer, reader));
        }
    }
    let distinct = wanted <= first.len();
    let pairs = if distinct { first } else { every };
    let sheets = pairs.into_iter().take(wanted).enumerate().map(|(index, (producer, reader))| {
        let count = if distinct { seen[&(ops[producer].name.as_str(), ops[reader].name.as_str())] } else { 1 };
        candidate(index, [&ops[producer], &ops[reader]], [producer, reader], count)
    });
    sheets.collect()
}

fn candidate(index: usize, pair: [&Op; 2], at: [usize; 2], count: usize) -> Candidate {
    let chosen = pair[0].after == pair[1].after;
    let matrix = pair.iter().any(|op| op.kind == "matmul");
    let bandwidth = if chosen { 0.62 } else { 0.2 + 0.09 * (index % 7) as f64 };
    let criteria = Criteria {
        bandwidth,
        launch: 1.0,
        registers: 0.8,
        complexity: if matrix { 0.5 } else { 0.9 },
        maintainability: 0.7,
    };
    let score = 0.4 * bandwidth + 0.2 + 0.16 + 0.1 * criteria.complexity + 0.07;
    let bytes = 2 * (pair[0].rows * pair[0].cols + pair[1].rows * pair[1].cols) as u64;
    let reason = if chosen {
        ReasonSheet { code: "OK".into(), text: "one row space; the row stays in registers".into(), hint: String::new() }
    } else if matrix {
        ReasonSheet {
            code: "E-PLAN-004".into(),
            text: format!(
                "{} needs the whole row of {} columns, a tile of the product holds 128",
                pair[1].name, pair[1].cols
            ),
            hint: "a product with split rows would allow it; see `deuteron ops`".into(),
        }
    } else {
        ReasonSheet {
            code: "E-PLAN-007".into(),
            text: format!("{} is read by a third kernel that must run in between", pair[0].name),
            hint: "pin `force` if the order may change".into(),
        }
    };
    Candidate {
        ops: pair.iter().map(|op| op.name.clone()).collect(),
        at: at.to_vec(),
        count,
        kind: if index % 11 == 5 { "template" } else { "pair" }.into(),
        size: "8192x768".into(),
        score,
        verdict: if score > 0.6 { "FUSE" } else { "DO NOT FUSE" }.into(),
        chosen,
        forceable: chosen || !matrix,
        within: None,
        realizable: chosen || !matrix,
        reason,
        criteria,
        passes: Passes {
            bandwidth: bandwidth > 0.5,
            launch: true,
            registers: false,
            complexity: true,
            maintainability: true,
        },
        values: CriteriaValues {
            bytes_apart: bytes * 2,
            bytes_together: bytes * 2 - bytes / 3,
            bandwidth_saving: bandwidth / 2.0,
            dram_saving: bandwidth / 2.2,
            launches_apart: 2,
            launch_saving: 0.5,
            registers: 72,
            occupancy_ratio: 0.94,
            primitives: 14,
            us_apart: 23.5,
            us_together: chosen.then_some(15.25),
        },
        worth_us: if chosen { Some(8.25 + index as f64) } else { (!matrix).then_some(-1.5) },
        gain_us: chosen.then_some(6.5),
    }
}

pub fn disagreements(candidates: &[Candidate]) -> Vec<Disagreement> {
    let differs = |sheet: &Candidate| (sheet.verdict == "FUSE") != sheet.chosen;
    let all = candidates.iter().enumerate().filter(|(_, sheet)| differs(sheet)).take(4);
    all.map(|(candidate, sheet)| Disagreement {
        candidate,
        text: format!("the score of {:.2} counts bytes that the last-level cache already saves", sheet.score),
    })
    .collect()
}

pub fn flips() -> Vec<Flip> {
    let flip = |candidate, what: &str, from: &str, to: &str, text: &str| Flip {
        candidate,
        what: what.into(),
        from: from.into(),
        to: to.into(),
        text: text.into(),
    };
    vec![
        flip(2, "batch", "8", "2", "below 2048 rows the launch outweighs the bytes, and the verdict turns"),
        flip(4, "device", "NVIDIA H200", "Xeon, 2 cores", "on a CPU the row stays in L1 and fusing pays"),
    ]
}

pub fn recompute() -> RecomputeSheet {
    RecomputeSheet {
        kept_bytes_before: 41_300_000_000,
        kept_bytes: 23_900_000_000,
        peak_bytes_before: 48_100_000_000,
        peak_bytes: 30_600_000_000,
        us_before: 412_000.0,
        us: 405_300.0,
        again: vec![("gelu".into(), 48), ("layer_norm".into(), 97), ("softmax".into(), 48)],
        text: "computing 193 values again keeps 17.4 GB less and is 1.6 % faster".into(),
    }
}

pub fn scoring() -> ScoringSheet {
    let criterion = |name: &str, weight: f64, threshold: f64, asks: &str| CriterionSheet {
        name: name.into(),
        weight,
        threshold,
        asks: asks.into(),
    };
    ScoringSheet {
        fuse_from: 0.6,
        criteria: vec![
            criterion("bandwidth", 0.4, 0.3, "more than 30 % of the bytes saved"),
            criterion("launch", 0.2, 0.1, "launches are more than 10 % of the time of all kernels but the longest"),
            criterion("registers", 0.2, 50.0, "fewer than 50 registers"),
            criterion("complexity", 0.1, 32.0, "fewer than 32 primitives"),
            criterion("maintainability", 0.1, 0.5, "generated, not written by hand"),
        ],
    }
}

pub fn machine() -> MachineSheet {
    let number = |name: &str, value: f64, origin: &str| NumberSheet { name: name.into(), value, origin: origin.into() };
    MachineSheet {
        name: "NVIDIA H200".into(),
        kind: "gpu".into(),
        basis: "given".into(),
        numbers: vec![
            number("dram_gbps", 4150.0, "measured: copy of 4 GB, median of 50"),
            number("matrix_tflops_bf16", 800.0, "measured: product of 8192 x 8192 x 8192"),
            number("vector_tflops_f32", 60.0, "data sheet, times 0.9"),
            number("l2_bytes", 52_428_800.0, "driver attribute"),
            number("launch_us", 2.2, "measured: empty kernel in a graph"),
            number("multiprocessors", 132.0, "driver attribute"),
        ],
        bytes_per_us: BYTES_PER_US,
        vector_flops_per_us: VECTOR_PER_US,
        matrix_flops_per_us: MATRIX_PER_US,
        vector_ridge: VECTOR_PER_US / BYTES_PER_US,
        matrix_ridge: MATRIX_PER_US / BYTES_PER_US,
    }
}

pub fn measured(before: &[KernelSheet], after: &[KernelSheet]) -> MeasuredSheet {
    let total = |sheets: &[KernelSheet]| -> f64 {
        sheets.iter().map(|sheet| sheet.measured_us.unwrap_or(0.0) * sheet.launches.len() as f64).sum()
    };
    let class = |class: &str| {
        let of: Vec<&KernelSheet> = before.iter().chain(after).filter(|sheet| sheet.kind == class).collect();
        ClassError {
            class: class.into(),
            kernels: of.len(),
            predicted_us: of.iter().map(|sheet| sheet.cost.us).sum(),
            measured_us: of.iter().filter_map(|sheet| sheet.measured_us).sum(),
            median_error: 0.074,
        }
    };
    MeasuredSheet {
        eager_us: 1.4 * total(before),
        unfused_us: total(before),
        chosen_us: total(after),
        speedup: total(before) / total(after),
        verified: true,
        worst_ratio: 0.41,
        classes: vec![class("row"), class("matmul"), class("attention"), class("copy")],
    }
}

pub fn profiled() -> ProfiledSheet {
    ProfiledSheet {
        by: "ncu".into(),
        text: "Counted by Nsight Compute.".into(),
        before_us: 912.0,
        after_us: 640.0,
        notes: vec!["this GPU does not count one thing".into()],
    }
}

/// What each launch writes is alive while it and the next one run.
pub fn memory(before: &[KernelSheet], after: &[KernelSheet]) -> MemorySheet {
    let of = |sheets: &[KernelSheet]| {
        let launches =
            sheets.iter().flat_map(|sheet| sheet.launches.iter().map(|&launch| (launch, sheet.cost.written)));
        let written: BTreeMap<usize, u64> = launches.collect();
        written
            .iter()
            .map(|(launch, bytes)| bytes + launch.checked_sub(1).and_then(|last| written.get(&last)).unwrap_or(&0))
            .collect()
    };
    MemorySheet { before: of(before), after: of(after) }
}
