//! Plans and fusions as the sheets of the report.

use std::collections::HashMap;

use deuteron_graph::{Callee, CompositeKind, Dtype, Graph, NodeId, Op};
use deuteron_plan::{
    Assessment, Bytes, CRITERIA, Cost, Fusion, FusionKind, Group, Machine, MachineKind, Pin, Plan, Quantity, Reason,
    Scoring, Search, Seconds, matmul_size, matrix_rate, node_space, ridge_points,
};
use deuteron_report::{
    Analysis, Candidate, CostSheet, Criteria, CriteriaValues, CriterionSheet, Disagreement, KernelSheet, MachineSheet,
    MemorySheet, NumberSheet, OpSheet, Passes, PinSheet, PlanSheet, Plans, ReasonSheet, RecomputeSheet, ScoringSheet,
    SearchSheet, TensorSheet, VERSION, change_of_bytes, score_text,
};

use crate::analyze::{AnalyzeOptions, Kernels, generated, tiles, verdict};
use crate::listing;

pub(super) fn analysis(
    graph: &Graph,
    options: &AnalyzeOptions,
    assessment: &Assessment,
    planning_ms: f64,
    recompute: Option<RecomputeSheet>,
) -> Analysis {
    let recomputes = recompute.as_ref().is_some_and(|sheet| !sheet.again.is_empty());
    let candidates: Vec<Candidate> =
        assessment.fusions.iter().map(|fusion| candidate(graph, fusion, &options.machine)).collect();
    let search = assessment.chosen.search.clone();
    let after = kernels(graph, &assessment.chosen, options, Some(&assessment.gains));
    Analysis {
        schema: VERSION,
        graph: graph.name().to_string(),
        device: options.machine.name.clone(),
        verdict: verdict::verdict(assessment, recomputes),
        optimal: search.as_ref().is_some_and(|search| search.optimal),
        search: search.as_ref().map_or_else(empty_search, search_sheet),
        planning_ms,
        plans: plans(assessment, recomputes),
        scoring: scoring(&options.scoring),
        ops: ops(assessment),
        before: kernels(graph, &assessment.apart, options, None),
        notes: notes(graph, options, &after),
        after,
        disagreements: disagreements(assessment, options.scoring.fuse_from),
        candidates,
        pins: assessment.pins.iter().map(pin_sheet).collect(),
        flips: Vec::new(),
        recompute,
        machine: machine_sheet(graph, &options.machine),
        memory: Some(MemorySheet { before: alive(&assessment.apart), after: alive(&assessment.chosen) }),
        measured: None,
        profiled: None,
    }
}

fn scoring(scoring: &Scoring) -> ScoringSheet {
    let numbers = scoring.weights.list().into_iter().zip(scoring.thresholds());
    let criteria = CRITERIA.into_iter().zip(numbers).zip(scoring.asks());
    let criteria = criteria.map(|((name, (weight, threshold)), asks)| CriterionSheet {
        name: name.to_string(),
        weight,
        threshold,
        asks,
    });
    ScoringSheet { fuse_from: scoring.fuse_from, criteria: criteria.collect() }
}

fn plans(assessment: &Assessment, recomputes: bool) -> Plans {
    Plans {
        naive: plan_sheet(&assessment.naive),
        eager: plan_sheet(&assessment.eager),
        unfused: plan_sheet(&assessment.unfused),
        recomputed: recomputes.then(|| plan_sheet(&assessment.apart)),
        greedy: assessment.greedy.as_ref().map(plan_sheet),
        chosen: plan_sheet(&assessment.chosen),
        conceivable: assessment.conceivable.as_ref().map(plan_sheet),
    }
}

fn plan_sheet(plan: &Plan) -> PlanSheet {
    PlanSheet {
        kernels: plan.groups.len(),
        bytes: plan.bytes().0,
        us: plan.time().us(),
        peak_bytes: plan.arena.bytes as u64,
    }
}

fn search_sheet(search: &Search) -> SearchSheet {
    SearchSheet {
        groups: search.groups,
        states: search.states,
        parts: search.parts,
        distinct_parts: search.distinct_parts,
        gap: search.gap(),
        text: search.text(),
    }
}

fn empty_search() -> SearchSheet {
    SearchSheet { groups: 0, states: 0, parts: 0, distinct_parts: 0, gap: 0.0, text: String::new() }
}

fn ops(assessment: &Assessment) -> Vec<OpSheet> {
    let sheet = |(id, atom): (usize, &deuteron_plan::AtomSheet)| OpSheet {
        id,
        name: atom.name.clone(),
        label: atom.label.clone(),
        kind: atom.kind.to_string(),
        result: atom.result.clone(),
        reads: atom.reads.clone(),
        before: atom.before,
        after: atom.after,
        intensity: atom.intensity,
    };
    assessment.atoms.iter().enumerate().map(sheet).collect()
}

/// Kernels of a plan, equal ones listed once.
fn kernels(graph: &Graph, plan: &Plan, options: &AnalyzeOptions, gains: Option<&[Seconds]>) -> Vec<KernelSheet> {
    let mut known: HashMap<String, usize> = HashMap::new();
    let mut sheets: Vec<KernelSheet> = Vec::new();
    for (launch, group) in plan.groups.iter().enumerate() {
        let size = size(graph, &group.nodes);
        // Of the last bits of a difference no reader learns anything.
        let gain = gains.map(|gains| (gains[launch].us() * 1e6).round() / 1e6 + 0.0);
        let key = format!("{} {size} {} {} {gain:?}", group.name, group.cost.total.0, group.traffic.total());
        let at = *known.entry(key).or_insert_with(|| {
            let realizable =
                generated(options).offers(&group.draft(graph, &plan.placement)) && !listing::holds_opaque(graph, group);
            let kernel =
                realizable.then(|| listing::cuda_kernel(graph, plan, group, options.backend.as_ref())).flatten();
            sheets.push(KernelSheet {
                name: group.name.clone(),
                kind: group.kind.to_string(),
                launches: Vec::new(),
                primitives: group.nodes.len(),
                size,
                tensors: tensors(graph, group),
                cost: cost_sheet(&group.cost),
                gain_us: gain,
                realizable,
                variant: kernel.as_ref().map_or(String::new(), |kernel| tiles::variant(&kernel.source, &kernel.launch)),
                tiles: kernel.as_ref().and_then(|kernel| tiles::sheet(&kernel.launch, &options.machine)),
                source: match &options.backend {
                    Some(backend) if options.sources && realizable => {
                        listing::tagged_source(graph, plan, group, backend)
                    }
                    _ => Vec::new(),
                },
                measured_us: None,
                measured_registers: None,
                counters: None,
            });
            sheets.len() - 1
        });
        sheets[at].launches.push(launch);
    }
    sheets
}

/// What a group reads and writes.
fn tensors(graph: &Graph, group: &Group) -> Vec<TensorSheet> {
    let read = group.inputs.iter().map(|&id| listing::tensor(graph, id, false));
    read.chain(group.outputs.iter().map(|&id| listing::tensor(graph, id, true))).collect()
}

/// Bytes of intermediates while each group of a plan runs.
fn alive(plan: &Plan) -> Vec<u64> {
    let mut changes = vec![0i64; plan.groups.len() + 1];
    for slot in &plan.arena.slots {
        changes[slot.first] += slot.bytes as i64;
        changes[slot.last + 1] -= slot.bytes as i64;
    }
    let mut now = 0;
    let sums = changes.iter().take(plan.groups.len()).map(|change| {
        now += change;
        now.unsigned_abs()
    });
    sums.collect()
}

/// Rows and columns, or the sizes of a matmul.
pub(crate) fn size(graph: &Graph, nodes: &[NodeId]) -> String {
    if let Some((m, n, k)) = size_of_loss(graph, nodes) {
        return format!("{m}x{n}x{k}");
    }
    let product = nodes.iter().find_map(|&id| match graph.node(id).op {
        Op::Matmul { transpose_a, .. } => Some(matmul_size(graph, id, transpose_a)),
        _ => None,
    });
    match product {
        Some((m, n, k, 1)) => format!("{m}x{n}x{k}"),
        Some((m, n, k, batch)) => format!("{batch} of {m}x{n}x{k}"),
        None => {
            let spaces = nodes.iter().map(|&id| node_space(graph, id));
            spaces.max_by_key(|space| space.rows * space.cols).map_or(String::new(), |space| space.to_string())
        }
    }
}

/// Rows, classes and features of a loss without logits, if a kernel computes all of its chunks.
fn size_of_loss(graph: &Graph, nodes: &[NodeId]) -> Option<(usize, usize, usize)> {
    let is_matmul = |id: &NodeId| matches!(graph.node(*id).op, Op::Matmul { .. });
    let first = nodes.iter().find(|id| is_matmul(id))?;
    let call = &graph.calls()[graph.node(*first).call.index()];
    let Callee::Composite(composite) = &call.callee else { return None };
    let kinds = [CompositeKind::LinearCrossEntropy, CompositeKind::LinearCrossEntropyGradient];
    let holds_all = || {
        let all = (call.start..call.end).filter_map(|index| graph.id(index)).filter(is_matmul);
        all.count() == nodes.iter().filter(|id| is_matmul(id)).count()
    };
    if !kinds.contains(&composite.kind()) || !holds_all() {
        return None;
    }
    let (rows, weight) = (&graph.node(call.inputs[0]).shape, &graph.node(call.inputs[1]).shape);
    Some((rows.rows(), weight.elements() / rows.cols().max(1), rows.cols()))
}

fn cost_sheet(cost: &Cost) -> CostSheet {
    CostSheet {
        read: cost.traffic.read.0,
        written: cost.traffic.written.0,
        cached: cost.cached.0,
        reread: cost.reread.0,
        matrix_flops: cost.matrix_flops as u64,
        vector_flops: cost.vector_flops as u64,
        intensity: cost.intensity(),
        registers: cost.resources.registers,
        shared: cost.resources.shared.0,
        occupancy: cost.resources.occupancy,
        waves: cost.resources.waves,
        wave_efficiency: cost.resources.wave_efficiency,
        launch_us: cost.launch.us(),
        memory_us: cost.memory.us(),
        cache_us: cost.cache.us(),
        matrix_us: cost.matrix.us(),
        vector_us: cost.vector.us(),
        us: cost.total.us(),
        bound: cost.bound.name().to_string(),
    }
}

fn candidate(graph: &Graph, fusion: &Fusion, machine: &Machine) -> Candidate {
    let score = &fusion.score;
    let apart: Seconds = fusion.apart.iter().map(|cost| cost.total).sum();
    let bytes_apart: Bytes = fusion.apart.iter().map(|cost| cost.traffic.total()).sum();
    Candidate {
        ops: fusion.ops.clone(),
        at: fusion.atoms.clone(),
        count: fusion.count,
        kind: fusion.kind.name().to_string(),
        size: size(graph, &fusion.nodes),
        score: score.total,
        verdict: if score.fuse { "FUSE" } else { "DO NOT FUSE" }.to_string(),
        chosen: fusion.chosen,
        forceable: fusion.forceable,
        within: fusion.within.as_ref().map(|within| within.ops.clone()),
        realizable: fusion.realizable,
        reason: reason(fusion, bytes_apart, apart),
        criteria: Criteria {
            bandwidth: score.bandwidth.score,
            launch: score.launch.score,
            registers: score.registers.score,
            complexity: score.complexity.score,
            maintainability: score.maintainability.score,
        },
        passes: Passes {
            bandwidth: score.bandwidth.passes,
            launch: score.launch.passes,
            registers: score.registers.passes,
            complexity: score.complexity.passes,
            maintainability: score.maintainability.passes,
        },
        values: CriteriaValues {
            bytes_apart: bytes_apart.0,
            bytes_together: fusion.bytes_together.0,
            bandwidth_saving: score.bandwidth_saving,
            dram_saving: dram_saving(fusion, machine),
            launches_apart: fusion.apart.len(),
            launch_saving: score.launch_saving,
            registers: fusion.together.as_ref().map_or(0, |cost| cost.resources.registers),
            occupancy_ratio: score.occupancy_ratio,
            primitives: fusion.primitives,
            us_apart: apart.us(),
            us_together: fusion.together.as_ref().map(|cost| cost.total.us()),
        },
        worth_us: fusion.worth.map(Seconds::us),
        gain_us: fusion.gain.map(Seconds::us),
    }
}

/// Main memory traffic saved; reads of separate kernels that hit the cache are not counted.
fn dram_saving(fusion: &Fusion, machine: &Machine) -> f64 {
    let dram = |cost: &Cost| (cost.traffic.total() - cost.cached).0 as f64;
    // A CPU's model knows one footprint a kernel, not what an earlier kernel left behind.
    if machine.kind == MachineKind::Cpu {
        return fusion.score.bandwidth_saving;
    }
    let apart: f64 = fusion.apart.iter().map(dram).sum();
    let together = fusion.together.as_ref().map_or(fusion.bytes_together.0 as f64, dram);
    if apart > 0.0 { 1.0 - together / apart } else { 0.0 }
}

/// One sentence with numbers.
fn reason(fusion: &Fusion, bytes_apart: Bytes, apart: Seconds) -> ReasonSheet {
    let within = fusion.within.as_ref().map_or(String::new(), |within| {
        let (ops, alone) = (within.ops.join(" + "), &within.alone);
        format!("; they share a kernel only as part of {ops}, not alone ({} {alone})", alone.code())
    });
    if let Some(reason) = &fusion.reason {
        let mut text = format!("{reason}{within}");
        if let (Reason::Forbidden, Some(worth)) = (reason, fusion.worth.filter(|worth| worth.us() >= 0.05)) {
            text += &format!("; without this the plan is {worth} faster");
        }
        match (reason, fusion.estimate) {
            (Reason::Drawback { .. }, Some(one)) => {
                text += &format!("; without that, one kernel is predicted at {one} and separate ones at {apart}");
            }
            (_, Some(one)) if !fusion.forceable => {
                text += &format!(
                    "; such a kernel is estimated at {one} instead of {apart} and does not exist, so --force cannot choose it"
                );
            }
            _ => {}
        }
        let mut hint = reason.hint();
        if let (Reason::Slower { .. }, false) = (reason, fusion.forceable) {
            text += "; --force cannot choose it, as it stands for every place with these names";
            hint = "";
        }
        return ReasonSheet { code: reason.code().to_string(), text, hint: hint.to_string() };
    }
    let saved = Bytes(bytes_apart.0.abs_diff(fusion.bytes_together.0));
    let launches = fusion.apart.len();
    let change = change_of_bytes(bytes_apart.0, fusion.bytes_together.0);
    let text = match (fusion.kind, &fusion.together) {
        (FusionKind::View, _) => format!(
            "the consumer reads through the strides: saves {saved} of copies and one launch ({} saved)",
            fusion.apart[0].total
        ),
        (FusionKind::Pair | FusionKind::Template, Some(one)) => {
            format!("{change} ({saved}), {launches} launches become 1, {apart} become {}", one.total)
        }
        (FusionKind::Pair | FusionKind::Template, None) => format!("{change} ({saved}){within}"),
    };
    ReasonSheet { code: "OK".into(), text, hint: String::new() }
}

fn disagreements(assessment: &Assessment, fuse_from: f64) -> Vec<Disagreement> {
    let mut all = Vec::new();
    for (candidate, fusion) in assessment.fusions.iter().enumerate() {
        let pinned = fusion.reason == Some(Reason::Forbidden);
        let is_possible = fusion.chosen || fusion.forceable || fusion.worth.is_some();
        if pinned || !is_possible || fusion.score.fuse == fusion.chosen {
            continue;
        }
        let names = fusion.ops.join(" + ");
        let score = score_text(fusion.score.total, fuse_from);
        let difference = match fusion.worth.map(|worth| Seconds(worth.0.abs())) {
            Some(worth) if worth.us() >= 0.05 => format!("{worth} slower"),
            Some(_) => "no faster".to_string(),
            None => "slower by the sum of its kernels' times".to_string(),
        };
        let text = match fusion.chosen {
            true => {
                format!("{names}: the score is {score}, yet the plan fuses them: without it the plan is {difference}")
            }
            false => {
                format!(
                    "{names}: the score is {score}, yet the plan keeps them apart: with it the plan is {difference}"
                )
            }
        };
        all.push(Disagreement { candidate, text });
    }
    all
}

fn pin_sheet(price: &deuteron_plan::PinPrice) -> PinSheet {
    let (kind, ops) = match &price.pin {
        Pin::Force(ops) => ("force", ops),
        Pin::Forbid(ops) => ("forbid", ops),
    };
    let extra = Seconds(price.extra);
    let what = if kind == "force" { "forcing" } else { "forbidding" };
    let places = if price.places == 1 { "1 place".to_string() } else { format!("{} places", price.places) };
    let text = format!("{what} {} in {places} costs {extra}", ops.join(" + "));
    PinSheet { kind: kind.to_string(), ops: ops.clone(), places: price.places, price_us: extra.us(), text }
}

fn machine_sheet(graph: &Graph, machine: &Machine) -> MachineSheet {
    let bits = 8 * main_dtype(graph).bytes() as u32;
    let (matrix_ridge, vector_ridge) = ridge_points(machine, bits);
    MachineSheet {
        name: machine.name.clone(),
        kind: machine.kind.name().to_string(),
        basis: machine.basis().name().to_string(),
        numbers: machine
            .numbers()
            .map(|(quantity, number)| NumberSheet {
                name: quantity.name().to_string(),
                value: number.value,
                origin: number.origin.clone(),
            })
            .collect(),
        bytes_per_us: machine.gbps(Quantity::DramGbps).per_second / 1e6,
        vector_flops_per_us: machine.tflops(Quantity::VectorTflops).per_second / 1e6,
        matrix_flops_per_us: matrix_rate(machine, bits).per_second / 1e6,
        vector_ridge,
        matrix_ridge,
    }
}

/// The dtype of most of the graph's input bytes.
fn main_dtype(graph: &Graph) -> Dtype {
    let mut bytes = [(Dtype::F32, 0usize), (Dtype::F16, 0), (Dtype::Bf16, 0)];
    for &id in graph.inputs() {
        let node = graph.node(id);
        if let Some(entry) = bytes.iter_mut().find(|(dtype, _)| *dtype == node.dtype) {
            entry.1 += node.bytes();
        }
    }
    bytes.iter().max_by_key(|(_, bytes)| *bytes).map_or(Dtype::F32, |(dtype, _)| *dtype)
}

/// Notes on a plan: kernels that cannot be generated, and operations that are modelled by their cost only.
fn notes(graph: &Graph, options: &AnalyzeOptions, kernels: &[KernelSheet]) -> Vec<String> {
    let mut notes = Vec::new();
    if options.kernels == Kernels::Conceivable {
        let mut missing: Vec<&str> =
            kernels.iter().filter(|kernel| !kernel.realizable).map(|kernel| kernel.name.as_str()).collect();
        missing.sort_unstable();
        missing.dedup();
        let exceptions = if missing.is_empty() { String::new() } else { format!(" but: {}", missing.join("; ")) };
        notes.push(format!(
            "The chosen plan may use every skeleton that the planner knows (--conceivable). This version generates all of its kernels{exceptions}."
        ));
    }
    let mut opaque: Vec<&str> = graph
        .nodes()
        .iter()
        .filter_map(|node| match &node.op {
            Op::Opaque(opaque) => Some(opaque.name.as_str()),
            _ => None,
        })
        .collect();
    opaque.sort_unstable();
    opaque.dedup();
    if !opaque.is_empty() {
        notes.push(format!("Modelled by their cost only, and fused only if elementwise: {}.", opaque.join(", ")));
    }
    notes
}
