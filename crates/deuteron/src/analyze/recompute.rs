//! Store or recompute: which values the forward pass stores for the backward pass, decided before planning.

use std::collections::BTreeMap;

use deuteron_graph::{Graph, NodeId, attention_interior, first_backward, recompute};
use deuteron_plan::{Bytes, Plan, Saving, Strategy, Structure, plan, store_or_recompute, stored_when_fused};
use deuteron_report::RecomputeSheet;

use crate::analyze::{AnalyzeOptions, target_of};
use crate::error::Error;

/// The graph to plan, and the decision. A graph without gradients is unchanged.
pub(super) fn decide(graph: &Graph, options: &AnalyzeOptions) -> Result<(Graph, Option<RecomputeSheet>), Error> {
    let Some(first) = first_backward(graph).filter(|_| !options.keep_all) else { return Ok((graph.clone(), None)) };
    let target = target_of(options);
    let stored = stored_when_fused(graph, first);
    let decision = store_or_recompute(graph, first, &|id| stored[id.index()], Saving::Traffic);
    let mut again = decision.again.clone();
    if target.catalog.offers_structure(&Structure::attention_gradient()) {
        again.extend(attention_interior(graph, first));
    }
    again.sort_unstable();
    again.dedup();
    let before = plan(graph, target, Strategy::Fused, &[])?;
    let rewritten = recompute(graph, first, &again)?.graph;
    let after = plan(&rewritten, target, Strategy::Fused, &[])?;
    let faster = after.time().0 < before.time().0;
    let stored = stored_when_fused(&rewritten, first);
    let kept = store_or_recompute(&rewritten, first, &|id| stored[id.index()], Saving::Traffic).before.memory;
    let kept_before = decision.before.memory;
    let (kept, chosen) = if faster { (kept, &after) } else { (kept_before, &before) };
    let sheet = sheet(graph, &again, [kept_before, kept], [&before, chosen], faster);
    Ok((if faster { rewritten } else { graph.clone() }, Some(sheet)))
}

fn sheet(graph: &Graph, again: &[NodeId], kept: [Bytes; 2], plans: [&Plan; 2], faster: bool) -> RecomputeSheet {
    let mut names: BTreeMap<String, usize> = BTreeMap::new();
    let mut calls: Vec<_> = again.iter().map(|&id| graph.node(id).call).collect();
    calls.sort_unstable();
    calls.dedup();
    calls.iter().for_each(|&call| *names.entry(graph.call_name(call).to_string()).or_default() += 1);
    let text = match faster {
        false => format!("Everything is stored: recomputing values is not faster here ({} stored).", kept[0]),
        true => format!(
            "The backward pass recomputes values of {} instead of storing them: {} are stored instead of {}, and the plan takes {} instead of {}.",
            names.iter().map(|(name, count)| format!("{count} {name}")).collect::<Vec<_>>().join(", "),
            kept[1],
            kept[0],
            plans[1].time(),
            plans[0].time(),
        ),
    };
    RecomputeSheet {
        kept_bytes_before: kept[0].0,
        kept_bytes: kept[1].0,
        peak_bytes_before: plans[0].arena.bytes as u64,
        peak_bytes: plans[1].arena.bytes as u64,
        us_before: plans[0].time().us(),
        us: plans[1].time().us(),
        again: if faster { names.into_iter().collect() } else { Vec::new() },
        text,
    }
}
