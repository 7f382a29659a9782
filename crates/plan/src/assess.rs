//! Everything `analyze` says about a graph: the plans side by side, every fusion with its score, its reason, and what it
//! is worth.

mod describe;
mod fusions;

pub use describe::AtomSheet;
pub use fusions::{Fusion, FusionKind};

use deuteron_graph::{Graph, NodeId};

use crate::catalog::{Catalog, Conceivable};
use crate::grouping::Grouping;
use crate::plan::{Plan, PlanError, Strategy, Target, check_and_place, plan, plan_pinned, plan_solved};
use crate::search::{Pin, Solver, pins, solver};

/// What to assess.
#[derive(Clone, Copy)]
pub struct Question<'a> {
    /// the graph
    pub graph: &'a Graph,
    /// the graph that the baselines run: the same, or the one before values were recomputed
    pub baseline: &'a Graph,
    /// machine and code generation the chosen plan is for
    pub target: Target<'a>,
    /// what can be generated here; `None` if nothing can be for this machine
    pub realizable: Option<&'a dyn Catalog>,
    /// fusions forced and forbidden
    pub pins: &'a [Pin],
}

/// A pin and what it costs.
#[derive(Debug, Clone, PartialEq)]
pub struct PinPrice {
    /// as the user gave it
    pub pin: Pin,
    /// places of the graph it applies to
    pub places: usize,
    /// seconds over the best plan without it
    pub extra: f64,
}

/// The answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Assessment {
    /// operations as the search sees them
    pub atoms: Vec<AtomSheet>,
    /// a kernel a primitive
    pub naive: Plan,
    /// a kernel a composite, attention in parts
    pub eager: Plan,
    /// a kernel a call
    pub unfused: Plan,
    /// neighbours merged in order
    pub greedy: Plan,
    /// the unfused plan of the graph that is planned: the atoms' kernels before fusing
    pub apart: Plan,
    /// the cheapest
    pub chosen: Plan,
    /// the cheapest if every skeleton existed, where that is another one
    pub conceivable: Option<Plan>,
    /// every fusion considered
    pub fusions: Vec<Fusion>,
    /// what each pin costs
    pub pins: Vec<PinPrice>,
}

/// Plans a graph every way and assesses every fusion.
pub fn assess(question: &Question) -> Result<Assessment, PlanError> {
    let Question { graph, target, .. } = *question;
    let planned = |strategy| plan(question.baseline, target, strategy, &[]);
    let apart = plan(graph, target, Strategy::Unfused, &[])?;
    let placement = check_and_place(graph, &[])?;
    let mut grouping = Grouping::new(graph, &placement, target);
    grouping.merge_for(Strategy::Fused);
    let mut solver = solver(&grouping, target);
    let free = solver.solve();
    let chosen = plan_solved(grouping, &mut solver, question.pins)?;
    let conceivable = conceivable(question, &chosen)?;
    let atoms = describe::atoms(&mut solver.problem, &apart, &chosen);
    let fusions = fusions::fusions(&mut solver, question, &apart, &chosen);
    let pins = pin_prices(&mut solver, question.pins, free.search.seconds)?;
    Ok(Assessment {
        atoms,
        naive: planned(Strategy::Naive)?,
        eager: planned(Strategy::Eager)?,
        greedy: planned(Strategy::Greedy)?,
        unfused: planned(Strategy::Unfused)?,
        apart,
        chosen,
        conceivable,
        fusions,
        pins,
    })
}

/// The operations of a graph as the search sees them: nodes of each, operands before users.
pub fn atoms(graph: &Graph, target: Target) -> Result<Vec<Vec<NodeId>>, PlanError> {
    let placement = check_and_place(graph, &[])?;
    let mut grouping = Grouping::new(graph, &placement, target);
    grouping.merge_for(Strategy::Fused);
    Ok(grouping.topological().into_iter().map(|group| grouping.groups[group].clone()).collect())
}

/// The plan with every skeleton, if it beats what can be generated.
fn conceivable(question: &Question, chosen: &Plan) -> Result<Option<Plan>, PlanError> {
    let Question { graph, target, .. } = *question;
    if target.catalog.offers_everything() {
        return Ok(None);
    }
    let all = Conceivable(target.catalog);
    let best =
        plan_pinned(graph, Target { machine: target.machine, catalog: &all }, Strategy::Fused, &[], question.pins)?;
    let differs = best.groups.iter().map(|group| &group.nodes).ne(chosen.groups.iter().map(|group| &group.nodes));
    Ok((differs && best.time() < chosen.time()).then_some(best))
}

/// The price of each pin alone.
fn pin_prices(solver: &mut Solver, all: &[Pin], free: f64) -> Result<Vec<PinPrice>, PlanError> {
    let mut prices = Vec::new();
    for pin in all {
        let restriction = pins::restriction(&solver.problem, std::slice::from_ref(pin))?;
        let places = restriction.together.len() + restriction.apart.len();
        let solution = solver.solve_with(&restriction);
        let solution = solution.ok_or_else(|| pins::impossible(solver, &restriction))?;
        prices.push(PinPrice { pin: pin.clone(), places, extra: (solution.search.seconds - free).max(0.0) });
    }
    Ok(prices)
}
