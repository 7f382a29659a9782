//! Every fusion that was considered: pairs of neighbours, templates, and views that are read in place.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use deuteron_graph::{NodeId, Op, View, named};

use crate::assess::describe::group_of;
use crate::assess::question::Question;
use crate::chain::{Chain, Link, Reach, Side, Structure};
use crate::cost::{Bound, Cost, Resources};
use crate::kind::GroupKind;
use crate::machine::Quantity;
use crate::plan::Plan;
use crate::reason::Reason;
use crate::score::{Evidence, Score, score};
use crate::search::Solver;
use crate::search::kernels::{Kernels, kernel_name, names_of, part_names};
use crate::search::pins::places;
use crate::search::problem::{Atom, Price};
use crate::traffic::Traffic;
use crate::units::{Bytes, Seconds};

named! {
    /// What kind of fusion.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub enum FusionKind {
        /// a producer and a consumer
        Pair = "pair",
        /// several kernels covered by one template, or fused by the chosen plan
        Template = "template",
        /// a split or a transpose and its reader
        View = "view",
    }
}

/// One fusion, which stands for all equal ones.
#[derive(Debug, Clone, PartialEq)]
pub struct Fusion {
    /// what kind
    pub kind: FusionKind,
    /// names of the kernels that would become one, in order
    pub ops: Vec<String>,
    /// atoms of the first of the equal fusions
    pub atoms: Vec<usize>,
    /// number of equal fusions
    pub count: usize,
    /// the score sheet
    pub score: Score,
    /// why the plan keeps them apart; `None` if it fuses them
    pub reason: Option<Reason>,
    /// the structure of the kernel, if it is legal
    pub structure: Option<Structure>,
    /// whether the chosen plan has it
    pub chosen: bool,
    /// whether a plan exists in which everything of these names is fused: the user can force it. A view is read in place and is nothing to
    /// force or to forbid
    pub forceable: bool,
    /// the kernel that contains them, if they are not a kernel by themselves
    pub within: Option<Within>,
    /// whether code for it can be generated here
    pub realizable: bool,
    /// the cost of each separate kernel
    pub apart: Vec<Cost>,
    /// the cost of one kernel of exactly these, if there is one
    pub together: Option<Cost>,
    /// the estimated time of one kernel that is refused for a reason that depends on cost: its blocks would compute whole rows, or separate
    /// kernels were measured to be faster
    pub estimate: Option<Seconds>,
    /// primitives that the fusion computes
    pub nodes: Vec<NodeId>,
    /// bytes of one kernel
    pub bytes_together: Bytes,
    /// primitives of one kernel
    pub primitives: usize,
    /// time of the best plan without it minus that of the best plan with it, for one of the `count`: negative if the plan
    /// keeps them apart, unless the user forced that. `None` if no plan has it, or the search is too large to be repeated.
    pub worth: Option<Seconds>,
    /// if it is a whole kernel of the chosen plan, its saving over the kernels it replaces
    pub gain: Option<Seconds>,
}

/// A larger kernel that contains a fusion.
#[derive(Debug, Clone, PartialEq)]
pub struct Within {
    /// its operations, in order
    pub ops: Vec<String>,
    /// why a kernel needs the others too
    pub alone: Reason,
}

pub(super) fn fusions(solver: &mut Solver, question: &Question, chosen: &Plan, gains: &[Seconds]) -> Vec<Fusion> {
    let after = group_of(&solver.problem, chosen);
    let kernels = Kernels::of(&solver.problem);
    let mut sizes = vec![0; chosen.groups.len()];
    after.iter().for_each(|&group| sizes[group] += 1);
    let (known, found) = (HashMap::new(), Vec::new());
    let mut finder = Finder { solver, question, after: &after, sizes: &sizes, gains, known, found };
    for pair in kernels.pairs(&finder.solver.problem) {
        let parts: Vec<Vec<Atom>> = pair.iter().map(|&kernel| kernels.atoms[kernel].clone()).collect();
        finder.consider(FusionKind::Pair, &parts);
    }
    for set in templates(finder.solver, &after) {
        // Attention alone is one kernel of the unfused plan: what it fuses are its parts.
        let parts = kernels.parts(&set);
        if parts.len() > 2 {
            finder.consider(FusionKind::Template, &parts);
        }
    }
    finder.hold_to_pins(&kernels);
    finder.views();
    finder.found
}

/// Groups of attention, and groups of the chosen plan.
fn templates(solver: &Solver, after: &[usize]) -> Vec<Vec<Atom>> {
    let mut sets: BTreeSet<Vec<Atom>> = BTreeSet::new();
    for candidate in &solver.candidates.groups {
        if candidate.price.kind == GroupKind::Attention {
            sets.insert(candidate.atoms.clone());
        }
    }
    let mut groups: BTreeMap<usize, Vec<Atom>> = BTreeMap::new();
    after.iter().enumerate().for_each(|(atom, &group)| groups.entry(group).or_default().push(atom));
    sets.extend(groups.into_values().filter(|atoms| atoms.len() > 2));
    sets.into_iter().collect()
}

/// What the search found about a fusion.
struct Decision {
    reason: Option<Reason>,
    worth: Option<Seconds>,
    forceable: bool,
}

struct Finder<'s, 'a, 'q> {
    solver: &'s mut Solver<'a>,
    question: &'q Question<'q>,
    /// for each atom, its kernel in the chosen plan
    after: &'q [usize],
    /// atoms of each kernel of the chosen plan
    sizes: &'q [usize],
    /// the saving of each kernel of the chosen plan
    gains: &'q [Seconds],
    /// Fusions with the same description, and the position of the first.
    known: HashMap<String, usize>,
    found: Vec<Fusion>,
}

impl Finder<'_, '_, '_> {
    fn consider(&mut self, kind: FusionKind, parts: &[Vec<Atom>]) {
        let mut set: Vec<Atom> = parts.iter().flatten().copied().collect();
        set.sort_unstable();
        let chosen = set.iter().all(|&atom| self.after[atom] == self.after[set[0]]);
        let priced = self.solver.problem.price(&set);
        let ops = part_names(&self.solver.problem, parts);
        let apart: Vec<Cost> =
            parts.iter().filter_map(|part| self.solver.problem.price(part).ok()).map(|price| price.cost).collect();
        let apart_seconds: f64 = apart.iter().map(|cost| cost.total.0).sum();
        let seen = match &priced {
            Ok(price) => format!("{}", price.seconds()),
            Err(reason) => format!("{} {}", reason.code(), self.solver.holders(&set).next().is_some()),
        };
        let forbidden = !self.solver.restriction().forbids(&set).is_empty();
        let key = format!("{kind:?} {ops:?} {chosen} {forbidden} {seen} {apart_seconds}");
        if let Some(&at) = self.known.get(&key) {
            self.found[at].count += 1;
            return;
        }
        self.known.insert(key, self.found.len());
        let fusion = self.assess(kind, set, ops, apart, chosen, priced);
        self.found.push(fusion);
    }

    fn assess(
        &mut self,
        kind: FusionKind,
        set: Vec<Atom>,
        ops: Vec<String>,
        apart: Vec<Cost>,
        chosen: bool,
        priced: Result<Price, Reason>,
    ) -> Fusion {
        let nodes = self.solver.problem.nodes(&set);
        // Bytes do not depend on the structure.
        let any = self.solver.problem.cost_as(&set, &nodes, &Structure::Opaque);
        let holder = self.holder(&set, chosen, &priced);
        let Decision { reason, worth, forceable } = self.decision(&set, chosen, &priced, &apart);
        let held = holder.as_deref().and_then(|holder| {
            let price = self.solver.problem.price(holder).ok()?;
            let structure = self.solver.problem.structure(holder, &self.solver.problem.nodes(holder)).ok()?;
            Some((price, structure))
        });
        let evidence = Evidence {
            machine: self.question.target.machine.kind,
            apart: apart.iter().collect(),
            together: held.as_ref().map(|(price, _)| &price.cost),
            kind: held.as_ref().map(|(price, _)| price.kind),
            bytes_together: any.traffic.total(),
            primitives: holder.as_deref().map_or(nodes.len(), |holder| self.solver.problem.nodes(holder).len()),
        };
        let score = score(&evidence, &self.question.scoring);
        let realizable = match (&holder, &held) {
            (Some(holder), Some((_, structure))) => self.is_offered(holder, structure),
            _ => false,
        };
        let estimate = priced.as_ref().err().and_then(|reason| self.estimate(&set, &nodes, reason));
        let within = match (&priced, &holder) {
            (Err(alone), Some(holder)) => {
                Some(Within { ops: names_of(&self.solver.problem, holder), alone: alone.clone() })
            }
            _ => None,
        };
        let group = self.after[set[0]];
        Fusion {
            kind,
            ops,
            count: 1,
            score,
            reason,
            structure: held.map(|(_, structure)| structure),
            chosen,
            forceable,
            within,
            realizable,
            apart,
            together: priced.ok().map(|price| price.cost),
            estimate: estimate.map(|cost| cost.total),
            bytes_together: any.traffic.total(),
            primitives: nodes.len(),
            nodes,
            worth,
            gain: (chosen && self.sizes[group] == set.len()).then(|| self.gains[group]),
            atoms: set,
        }
    }

    /// The kernel that would contain a set: the set itself, its kernel in the chosen plan, or the smallest legal kernel that includes it.
    fn holder(&self, set: &[Atom], chosen: bool, priced: &Result<Price, Reason>) -> Option<Vec<Atom>> {
        match (priced, chosen) {
            (Ok(_), _) => Some(set.to_vec()),
            (Err(_), true) => {
                Some((0..self.after.len()).filter(|&atom| self.after[atom] == self.after[set[0]]).collect())
            }
            (Err(_), false) => {
                self.solver.holders(set).min_by_key(|group| group.atoms.len()).map(|group| group.atoms.clone())
            }
        }
    }

    /// Why a set is not fused, the gain of fusing it, and whether a plan can fuse it. One search answers all three: the one that `--force` and
    /// `--forbid` run.
    fn decision(&mut self, set: &[Atom], chosen: bool, priced: &Result<Price, Reason>, apart: &[Cost]) -> Decision {
        // As `--force` does: the limits of the search may have left it out.
        self.solver.consider(set);
        let pinned = self.solver.restriction().clone();
        let forbidden = pinned.forbids(set);
        let is_held = self.solver.holders(set).next().is_some() || (chosen && priced.is_ok());
        if self.solver.is_large(set) {
            return self.decision_by_itself(chosen, is_held && forbidden.is_empty(), priced, apart);
        }
        if chosen {
            let worth = self.solver.extra(&pinned.with_apart(set), set);
            return Decision { reason: None, worth: worth.map(|extra| Seconds(extra.max(0.0))), forceable: true };
        }
        // What the user forbids is asked about without the pins that forbid it.
        let mut changed: Vec<Atom> = forbidden.iter().flatten().chain(set).copied().collect();
        changed.sort_unstable();
        changed.dedup();
        let mut asked = pinned.clone();
        asked.apart.retain(|pin| !forbidden.contains(pin));
        let extra = if is_held { self.solver.extra(&asked.with_together(set), &changed) } else { None };
        let worth = extra.map(|extra| Seconds(-extra));
        let reason = match (extra, priced) {
            (Some(_), _) if !forbidden.is_empty() => Reason::Forbidden,
            (Some(extra), _) => Reason::Slower { extra: Seconds(extra.max(0.0)) },
            (None, Err(reason)) if !is_held => reason.clone(),
            (None, _) => Reason::Forbidden,
        };
        Decision { reason: Some(reason), worth, forceable: extra.is_some() && forbidden.is_empty() }
    }

    /// The same where another search would take too long: by the times of these kernels only.
    fn decision_by_itself(&self, chosen: bool, held: bool, priced: &Result<Price, Reason>, apart: &[Cost]) -> Decision {
        let separate: f64 = apart.iter().map(|cost| cost.total.0).sum();
        let reason = match priced {
            _ if chosen => None,
            Ok(price) => Some(Reason::Slower { extra: Seconds((price.seconds() - separate).max(0.0)) }),
            Err(_) if held => Some(Reason::Slower { extra: Seconds(0.0) }),
            Err(reason) => Some(reason.clone()),
        };
        Decision { reason, worth: None, forceable: chosen || held }
    }

    fn is_offered(&self, set: &[Atom], structure: &Structure) -> bool {
        let nodes = self.solver.problem.nodes(set);
        let outputs = self.solver.problem.outputs(set, &nodes);
        let draft = self.solver.problem.draft(&nodes, &outputs, structure);
        self.question.realizable.is_some_and(|catalog| catalog.offers(&draft))
    }

    /// The cost of a fusion whose refusal depends on cost: one block computes whole rows, or the cost model leaves out what makes it slow.
    fn estimate(&self, set: &[Atom], nodes: &[NodeId], reason: &Reason) -> Option<Cost> {
        if let Reason::Drawback { .. } = reason {
            let structure = self.solver.problem.structure(set, nodes).ok()?;
            return Some(self.solver.problem.cost_as(set, nodes, &structure));
        }
        let Reason::WholeRows { .. } = reason else { return None };
        let graph = self.solver.problem.rules.graph;
        let is_matmul = |id: &NodeId| matches!(graph.node(*id).op, Op::Matmul { .. });
        let (matmuls, rows): (Vec<NodeId>, Vec<NodeId>) = nodes.iter().partition(|id| is_matmul(id));
        let epilogue = Side { nodes: rows, reach: Reach::Rows, crossing: matmuls.clone() };
        let chain = Chain { prologue: Side::NONE, links: vec![Link::Matmul { nodes: matmuls }], epilogue };
        Some(self.solver.problem.cost_as(set, nodes, &Structure::Chain(chain)))
    }

    /// A name stands for every place, so a fusion can be forced only where all of its name can. Where a search takes too long, each
    /// place counts for itself.
    fn hold_to_pins(&mut self, kernels: &Kernels) {
        let listed = kernels.listed(self.solver);
        let mut known: HashMap<Vec<String>, bool> = HashMap::new();
        for at in 0..self.found.len() {
            if !self.found[at].forceable {
                continue;
            }
            let ops = self.found[at].ops.clone();
            let all = match known.get(&ops) {
                Some(&all) => all,
                None => self.can_force(&places(&self.solver.problem, &listed, &ops)),
            };
            self.found[at].forceable = all;
            known.insert(ops, all);
        }
    }

    /// Whether a plan under the user's pins fuses all of these sets, as far as a search can tell in time.
    fn can_force(&mut self, sets: &[Vec<Atom>]) -> bool {
        if self.solver.is_large(&sets.concat()) {
            return true;
        }
        sets.iter().for_each(|set| self.solver.consider(set));
        let pinned = self.solver.restriction().clone();
        let asked = sets.iter().fold(pinned, |asked, set| asked.with_together(set));
        self.solver.solve_with(&asked).is_some()
    }

    /// Slices and transposes that their readers access by strides, without a kernel or a copy.
    fn views(&mut self) {
        let (graph, placement) = (self.solver.problem.rules.graph, self.solver.problem.rules.placement);
        // (reading call, views)
        let mut readers: BTreeMap<usize, BTreeSet<NodeId>> = BTreeMap::new();
        for &id in self.solver.problem.atoms.iter().flatten() {
            placement.for_reads(graph, id, &mut |value| {
                let moved = graph.node(value).op != Op::StopGradient && placement.base(value) != Some(value);
                if moved
                    && chain(graph, value).iter().any(|view| matches!(view, View::Slice { .. } | View::Transpose(_)))
                {
                    readers.entry(graph.node(id).call.index()).or_default().insert(value);
                }
            });
        }
        for (call, views) in readers {
            self.view(call, &views);
        }
    }

    fn view(&mut self, call: usize, views: &BTreeSet<NodeId>) {
        let (graph, placement) = (self.solver.problem.rules.graph, self.solver.problem.rules.placement);
        let call = &graph.calls()[call];
        let mut atoms: Vec<Atom> =
            (call.start..call.end).filter_map(|index| self.solver.problem.atom_of[index]).collect();
        atoms.sort_unstable();
        atoms.dedup();
        let whole = self.solver.problem.price(&atoms).map(|price| (price, atoms.as_slice()));
        let priced = whole.or_else(|_| self.solver.problem.price(&atoms[..1]).map(|price| (price, &atoms[..1])));
        let Ok((reader, set)) = priced else { return };
        let structure = self.solver.problem.structure(set, &self.solver.problem.nodes(set)).ok();
        let bases: BTreeSet<NodeId> = views.iter().filter_map(|&view| placement.base(view)).collect();
        let slices = views.iter().any(|&view| chain(graph, view).iter().any(|view| matches!(view, View::Slice { .. })));
        let name = if slices && bases.len() < views.len() {
            "split"
        } else if slices {
            "slice"
        } else {
            "transpose"
        };
        let copied: u64 = views.iter().map(|&view| 2 * graph.node(view).bytes() as u64).sum();
        let copy = self.copy_cost(Bytes(copied));
        let ops = vec![name.to_string(), kernel_name(&self.solver.problem, &atoms)];
        let key = format!("view {ops:?} {copied} {}", reader.seconds());
        if let Some(&at) = self.known.get(&key) {
            self.found[at].count += 1;
            return;
        }
        self.known.insert(key, self.found.len());
        let worth = copy.total;
        let apart = vec![copy, reader.cost.clone()];
        let evidence = Evidence {
            machine: self.question.target.machine.kind,
            apart: apart.iter().collect(),
            together: Some(&reader.cost),
            kind: Some(reader.kind),
            bytes_together: reader.cost.traffic.total(),
            primitives: 0,
        };
        self.found.push(Fusion {
            kind: FusionKind::View,
            ops,
            score: score(&evidence, &self.question.scoring),
            count: 1,
            reason: None,
            structure,
            chosen: true,
            forceable: false,
            within: None,
            estimate: None,
            nodes: self.solver.problem.nodes(&atoms),
            gain: None,
            realizable: self.question.realizable.is_some(),
            bytes_together: reader.cost.traffic.total(),
            together: Some(reader.cost),
            apart,
            primitives: 0,
            worth: Some(worth),
            atoms,
        });
    }

    /// A copy kernel that need not be launched.
    fn copy_cost(&self, bytes: Bytes) -> Cost {
        let machine = self.question.target.machine;
        let memory = bytes / machine.gbps(Quantity::DramGbps);
        let launch = Seconds::from_us(machine.get(Quantity::LaunchUs));
        Cost {
            traffic: Traffic { read: Bytes(bytes.0 / 2), written: Bytes(bytes.0 - bytes.0 / 2) },
            cached: Bytes(0),
            reread: Bytes(0),
            matrix_flops: 0.0,
            vector_flops: 0.0,
            resources: Resources::NONE,
            launch,
            memory,
            cache: Seconds(0.0),
            matrix: Seconds(0.0),
            vector: Seconds(0.0),
            total: launch + memory,
            bound: Bound::Memory,
            drawback: None,
        }
    }
}

/// The views between a value and its buffer, the last one first.
fn chain(graph: &deuteron_graph::Graph, id: NodeId) -> Vec<&View> {
    let mut views = Vec::new();
    let mut at = id;
    while let Op::View(view) = &graph.node(at).op {
        views.push(view);
        at = graph.node(at).inputs[0];
    }
    views
}
