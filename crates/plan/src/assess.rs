//! The result of `analyze` for a graph: the plans side by side, every fusion with its score, its reason and its
//! gain.

mod describe;
mod fusions;
mod question;

pub use describe::AtomSheet;
pub use fusions::{Fusion, FusionKind, Within};
pub use question::Question;

use deuteron_graph::{Graph, NodeId};

use crate::catalog::Conceivable;
use crate::error::PlanError;
use crate::grouping::Grouping;
use crate::plan::{Plan, check_and_place, plan, plan_pinned, plan_solved};
use crate::search::{Pin, Restriction, Solver, pins, solver};
use crate::strategy::Strategy;
use crate::target::Target;
use crate::units::Seconds;

/// A pin and its price.
#[derive(Debug, Clone, PartialEq)]
pub struct PinPrice {
    /// as the user gave it
    pub pin: Pin,
    /// places of the graph it applies to
    pub places: usize,
    /// seconds over the best plan without it
    pub extra: f64,
}

/// The assessment.
#[derive(Debug, Clone, PartialEq)]
pub struct Assessment {
    /// operations as the search sees them
    pub atoms: Vec<AtomSheet>,
    /// one kernel per primitive
    pub naive: Plan,
    /// one kernel per composite, attention in parts
    pub eager: Plan,
    /// one kernel per call
    pub unfused: Plan,
    /// neighbours merged in order, under the pins; `None` if that does not lead to a plan that keeps them
    pub greedy: Option<Plan>,
    /// the unfused plan of the graph that is planned: the atoms' kernels before fusing
    pub apart: Plan,
    /// the cheapest
    pub chosen: Plan,
    /// for each kernel of `chosen`, its saving over the kernels of `apart` that it replaces; the savings add up to the difference of the two plans
    pub gains: Vec<Seconds>,
    /// the cheapest plan with every structure, if it differs
    pub conceivable: Option<Plan>,
    /// every fusion considered
    pub fusions: Vec<Fusion>,
    /// the price of each pin
    pub pins: Vec<PinPrice>,
}

/// Plans a graph every way and assesses every fusion.
pub fn assess(question: &Question) -> Result<Assessment, PlanError> {
    let Question { graph, target, .. } = *question;
    let planned = |strategy| plan(question.baseline, target, strategy, &[]);
    let apart = plan(graph, target, Strategy::Unfused, &[])?;
    let placement = check_and_place(graph, target, &[])?;
    let mut grouping = Grouping::new(graph, &placement, target);
    grouping.merge_for(Strategy::Fused);
    let mut solver = solver(&grouping, target);
    let chosen = plan_solved(grouping, &mut solver, question.pins)?;
    let conceivable = conceivable(question, &chosen)?;
    let atoms = describe::atoms(&mut solver.problem, &apart, &chosen);
    let gains = gains(&mut solver, &apart, &chosen);
    let fusions = fusions::fusions(&mut solver, question, &chosen, &gains);
    let pins = pin_prices(&mut solver, question.pins)?;
    Ok(Assessment {
        atoms,
        naive: planned(Strategy::Naive)?,
        eager: planned(Strategy::Eager)?,
        greedy: greedy(question)?,
        unfused: planned(Strategy::Unfused)?,
        apart,
        chosen,
        gains,
        conceivable,
        fusions,
        pins,
    })
}

/// The saving of each kernel of the chosen plan. The time of a separate kernel is divided among its atoms in proportion to their own times, so that
/// the savings add up even where one such kernel is split among several.
fn gains(solver: &mut Solver, apart: &Plan, chosen: &Plan) -> Vec<Seconds> {
    let [before, after] = [apart, chosen].map(|plan| describe::group_of(&solver.problem, plan));
    let alone: Vec<f64> = (0..before.len())
        .map(|atom| solver.problem.price(&[atom]).map_or(0.0, |price| price.seconds()).max(1e-12))
        .collect();
    let mut sums = vec![0.0; apart.groups.len()];
    before.iter().zip(&alone).for_each(|(&kernel, seconds)| sums[kernel] += seconds);
    let mut gains: Vec<Seconds> = chosen.groups.iter().map(|group| group.cost.total * -1.0).collect();
    for (atom, &kernel) in before.iter().enumerate() {
        let share = alone[atom] / sums[kernel];
        gains[after[atom]] = gains[after[atom]] + apart.groups[kernel].cost.total * share;
    }
    gains
}

/// The operations of a graph as the search sees them: nodes of each, operands before users.
pub fn atoms(graph: &Graph, target: Target) -> Result<Vec<Vec<NodeId>>, PlanError> {
    let placement = check_and_place(graph, target, &[])?;
    let mut grouping = Grouping::new(graph, &placement, target);
    grouping.merge_for(Strategy::Fused);
    Ok(grouping.topological().into_iter().map(|group| grouping.groups[group].clone()).collect())
}

/// The plan with every structure, if it is faster than the plan that can be generated.
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

/// Neighbours merged in order, under the pins.
fn greedy(question: &Question) -> Result<Option<Plan>, PlanError> {
    match plan_pinned(question.baseline, question.target, Strategy::Greedy, &[], question.pins) {
        Ok(plan) => Ok(Some(plan)),
        Err(PlanError::Pin { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The price of each pin alone.
fn pin_prices(solver: &mut Solver, all: &[Pin]) -> Result<Vec<PinPrice>, PlanError> {
    let mut prices = Vec::new();
    for pin in all {
        let free = solver.solve_with(&Restriction::default()).map_or(0.0, |solution| solution.search.seconds);
        let restriction = pins::restriction(solver, std::slice::from_ref(pin))?;
        let places = restriction.together.len() + restriction.apart.len();
        let solution = solver.solve_with(&restriction);
        let solution = solution.ok_or_else(|| pins::impossible(solver, &restriction))?;
        prices.push(PinPrice { pin: pin.clone(), places, extra: (solution.search.seconds - free).max(0.0) });
    }
    Ok(prices)
}
