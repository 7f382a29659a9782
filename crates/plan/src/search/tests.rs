//! The search against every partition of small graphs.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use deuteron_graph::{Dtype, Gelu, Graph, NodeId, UnaryOp};

use crate::bits::words_seen;
use crate::catalog::{Catalog, Primitives};
use crate::chain::Structure;
use crate::draft::Draft;
use crate::grouping::Grouping;
use crate::machine::Machine;
use crate::order::steps_taken;
use crate::plan::{check_and_place, plan};
use crate::search::problem::{Atom, Problem};
use crate::search::{Pin, Restriction, Solver, solver};
use crate::strategy::Strategy;
use crate::target::Target;
use crate::work::Work;

/// Steps of a fixed sequence of numbers (Knuth's MMIX constants).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % limit
    }
}

/// A graph of at most nine operations over a few rows or many, so that fusing is sometimes legal and sometimes pays.
fn small_graph(seed: u64) -> Graph {
    let mut numbers = Numbers(seed);
    let rows = [4, 64, 4096][numbers.below(3)];
    let mut graph = Graph::new("small");
    let w = graph.weight("w", Dtype::F32, [64, 64]).unwrap();
    let g = graph.weight("g", Dtype::F32, [64]).unwrap();
    let mut values: Vec<NodeId> =
        (0..2).map(|index| graph.input(&format!("x{index}"), Dtype::F32, [rows, 64]).unwrap()).collect();
    let steps = 3 + numbers.below(6);
    for _ in 0..steps {
        let pick =
            |numbers: &mut Numbers, values: &[NodeId]| values[values.len() - 1 - numbers.below(values.len().min(3))];
        let (a, b) = (pick(&mut numbers, &values), pick(&mut numbers, &values));
        let made = match numbers.below(9) {
            0 => graph.relu(a),
            1 => graph.gelu(a, Gelu::Erf),
            2 | 3 => graph.add(a, b),
            4 => graph.layer_norm(a, g, g, 1e-5).map(|norm| norm.y),
            5 => graph.softmax(a),
            6 => graph.matmul(a, w),
            7 => graph.column_sum(a).and_then(|sum| graph.add(a, sum)),
            _ => graph.transpose(a, &[1, 0]).and_then(|t| graph.transpose(t, &[1, 0])).and_then(|t| graph.mul(t, b)),
        };
        values.push(made.unwrap());
    }
    for (index, &value) in values.iter().enumerate().skip(2) {
        // Some values are handed out, the last one always.
        if index + 1 == values.len() || numbers.below(4) == 0 {
            graph.output(&format!("out{index}"), value).unwrap();
        }
    }
    graph
}

/// The cheapest of all partitions into connected groups that are legal and can run, by trying them all.
struct Brute<'p, 'a> {
    problem: &'p mut Problem<'a>,
    prices: HashMap<Vec<Atom>, Option<f64>>,
    best: f64,
}

impl Brute<'_, '_> {
    fn price(&mut self, set: &[Atom]) -> Option<f64> {
        if let Some(&known) = self.prices.get(set) {
            return known;
        }
        let connected = set.len() == 1 || is_connected(self.problem, set);
        let price = connected.then(|| self.problem.price(set).ok().map(|price| price.seconds())).flatten();
        self.prices.insert(set.to_vec(), price);
        price
    }

    fn try_all(&mut self, atom: Atom, groups: &mut Vec<Vec<Atom>>) {
        if atom == self.problem.atoms.len() {
            let mut total = 0.0;
            for group in groups.clone() {
                match self.price(&group) {
                    Some(seconds) => total += seconds,
                    None => return,
                }
            }
            if total < self.best && can_run(self.problem, groups) {
                self.best = total;
            }
            return;
        }
        for index in 0..groups.len() {
            groups[index].push(atom);
            self.try_all(atom + 1, groups);
            groups[index].pop();
        }
        groups.push(vec![atom]);
        self.try_all(atom + 1, groups);
        groups.pop();
    }
}

fn is_connected(problem: &Problem, set: &[Atom]) -> bool {
    let mut reached = vec![set[0]];
    let mut next = 0;
    while next < reached.len() {
        let more: Vec<Atom> =
            problem.neighbours[reached[next]].iter().copied().filter(|atom| set.contains(atom)).collect();
        more.into_iter().for_each(|atom| {
            if !reached.contains(&atom) {
                reached.push(atom)
            }
        });
        next += 1;
    }
    reached.len() == set.len()
}

fn can_run(problem: &Problem, groups: &[Vec<Atom>]) -> bool {
    let mut done: Vec<bool> = vec![false; problem.atoms.len()];
    let mut left: Vec<&Vec<Atom>> = groups.iter().collect();
    loop {
        let before = left.len();
        left.retain(|group| {
            let needs = group.iter().flat_map(|&atom| problem.producers[atom].iter());
            let ready = needs.into_iter().all(|producer| done[*producer] || group.contains(producer));
            if ready {
                group.iter().for_each(|&atom| done[atom] = true);
            }
            !ready
        });
        if left.is_empty() || left.len() == before {
            return left.is_empty();
        }
    }
}

fn with_solver<R>(graph: &Graph, machine: &Machine, look: impl FnOnce(&mut Solver) -> R) -> R {
    let target = Target::conceivable(machine);
    let placement = check_and_place(graph, target, &[]).unwrap();
    let mut grouping = Grouping::new(graph, &placement, target);
    grouping.merge_for(Strategy::Fused);
    look(&mut solver(&grouping, target))
}

#[test]
fn no_partition_of_a_small_graph_is_cheaper_than_the_plan() {
    let machines = [Machine::profile("h200").unwrap(), Machine::cpu()];
    let (mut graphs, mut fused, mut largest) = (0, 0, 0);
    for seed in 0.. {
        if graphs == 500 {
            break;
        }
        let graph = small_graph(seed);
        with_solver(&graph, &machines[seed as usize % 2], |solver| {
            let atoms = solver.problem.atoms.len();
            if atoms > 9 {
                return;
            }
            let solution = solver.settle(Restriction::default()).unwrap();
            assert!(solution.search.optimal, "seed {seed}");
            let mut brute = Brute { problem: &mut solver.problem, prices: HashMap::new(), best: f64::INFINITY };
            brute.try_all(0, &mut Vec::new());
            let (best, found) = (brute.best, solution.search.seconds);
            assert!((found - best).abs() <= 1e-9 * best, "seed {seed}: found {found}, best {best}\n{graph}");
            graphs += 1;
            fused += solution.groups.iter().any(|group| group.len() > 1) as usize;
            largest = largest.max(atoms);
        });
    }
    assert!(fused > 250 && largest == 9, "{fused} of 500 graphs have a fusion, the largest has {largest} operations");
}

#[test]
fn the_lower_bound_is_below_the_plan() {
    let machine = Machine::profile("h200").unwrap();
    for seed in 0..100 {
        with_solver(&small_graph(seed), &machine, |solver| {
            let search = solver.settle(Restriction::default()).unwrap().search;
            assert!(search.lower_bound <= search.seconds * (1.0 + 1e-9), "seed {seed}");
        });
    }
}

#[test]
fn a_price_of_a_restriction_is_that_of_a_search_under_it() {
    let machine = Machine::profile("h200").unwrap();
    let mut compared = 0;
    for seed in 0..120 {
        with_solver(&small_graph(seed), &machine, |solver| {
            let free = solver.settle(Restriction::default()).unwrap().search.seconds;
            let sets: Vec<Vec<Atom>> =
                solver.candidates.groups.iter().take(6).map(|group| group.atoms.clone()).collect();
            for set in sets {
                for restriction in [
                    Restriction { together: vec![set.clone()], ..Restriction::default() },
                    Restriction { apart: vec![set.clone()], ..Restriction::default() },
                ] {
                    let whole = solver.solve_with(&restriction).map(|solution| solution.search.seconds - free);
                    let part = solver.extra(&restriction, &set);
                    match (whole, part) {
                        (Some(whole), Some(part)) => {
                            assert!((whole - part).abs() < 1e-12, "seed {seed}: {whole} {part}")
                        }
                        (whole, part) => assert_eq!(whole.is_some(), part.is_some(), "seed {seed}"),
                    }
                    compared += 1;
                }
            }
        });
    }
    assert!(compared > 200, "{compared}");
}

#[test]
fn a_wide_graph_is_cut_by_the_caps_and_says_so() {
    // Twenty-four readers of one value, all of which read each other's results pairwise: far more groups than the cap.
    let mut graph = Graph::new("wide");
    let x = graph.input("x", Dtype::F32, [256, 64]).unwrap();
    let firsts: Vec<NodeId> = (0..24).map(|_| graph.relu(x).unwrap()).collect();
    for (index, pair) in firsts.windows(2).enumerate() {
        let sum = graph.add(pair[0], pair[1]).unwrap();
        graph.output(&format!("o{index}"), sum).unwrap();
    }
    let machine = Machine::profile("h200").unwrap();
    let plans = [Strategy::Unfused, Strategy::Greedy, Strategy::Fused]
        .map(|strategy| plan(&graph, Target::conceivable(&machine), strategy, &[]).unwrap());
    let search = plans[2].search.clone().unwrap();
    assert!(!search.optimal, "{}", search.text());
    assert!(search.text().contains("beam"), "{}", search.text());
    assert!(plans[2].time().0 <= plans[1].time().0 && plans[2].time().0 <= plans[0].time().0);
}

#[test]
fn pins_are_kept_and_an_impossible_one_says_why() {
    // On an A100, no launch makes whole rows of its left operand.
    let machine = Machine::profile("a100").unwrap();
    let target = Target::conceivable(&machine);
    let text = "x = input bf16[8192,768] ; w = weight bf16[768,768] ; g = weight bf16[768]
n, mean, rstd = layer_norm x g g ; a = gelu n ; y = matmul a w ; out y";
    let graph: Graph = text.parse().unwrap();
    let names = |a: &str, b: &str| vec![a.to_string(), b.to_string()];
    let kernels =
        |pins: &[Pin]| crate::plan::plan_pinned(&graph, target, Strategy::Fused, &[], pins).map(|p| p.groups.len());
    assert_eq!(kernels(&[]), Ok(2), "norm and gelu share a kernel");
    assert_eq!(kernels(&[Pin::Forbid(names("layer_norm", "gelu"))]), Ok(3));
    let refused = kernels(&[Pin::Force(vec!["layer_norm".into(), "gelu".into(), "matmul".into()])]).unwrap_err();
    assert!(refused.to_string().contains("E-PLAN-004"), "{refused}");
    let unknown = kernels(&[Pin::Force(names("gelu", "softmax"))]).unwrap_err();
    assert!(unknown.to_string().contains("the graph has gelu, layer_norm, matmul"), "{unknown}");
    let both = [Pin::Force(names("layer_norm", "gelu")), Pin::Forbid(names("layer_norm", "gelu"))];
    assert!(kernels(&both).unwrap_err().to_string().contains("no plan satisfies all"));
    // On an H200 there is one; it is taken where it is asked for.
    let hopper = Machine::profile("h200").unwrap();
    let all = Pin::Force(vec!["layer_norm".into(), "gelu".into(), "matmul".into()]);
    let kernels = |pins: &[Pin]| {
        let plan = crate::plan::plan_pinned(&graph, Target::conceivable(&hopper), Strategy::Fused, &[], pins);
        plan.map(|plan| plan.groups.len())
    };
    assert_eq!((kernels(&[]), kernels(&[all])), (Ok(2), Ok(1)));
}

#[test]
fn attention_is_found_although_its_halves_are_not_legal() {
    let machine = Machine::profile("h200").unwrap();
    let text = "q = input bf16[8,12,1024,64] ; r = input bf16[8,12,1024,64]
a = attention q q q mask=causal ; y = add a r ; out y";
    let graph: Graph = text.parse().unwrap();
    let plan = plan(&graph, Target::conceivable(&machine), Strategy::Fused, &[]).unwrap();
    assert_eq!(plan.groups.len(), 1, "attention takes the residual in: {plan}");
    assert_eq!(plan.groups[0].structure.name(), "attention with residual");
}

/// What a group of one atom needs, and what those need, is all that comes before it, however the graph is cut into parts.
#[test]
fn needs_are_the_nearest_and_the_rest_follows() {
    let machine = Machine::cpu();
    for seed in 0..100 {
        let (graph, target) = (small_graph(seed), Target::conceivable(&machine));
        let placement = check_and_place(&graph, target, &[]).unwrap();
        let mut grouping = Grouping::new(&graph, &placement, target);
        grouping.merge_for(Strategy::Fused);
        let problem = Problem::new(&grouping, target);
        let count = problem.atoms.len();
        let mut before: Vec<Vec<bool>> = Vec::new();
        for atom in 0..count {
            let own = &problem.producers[atom];
            let needs = |other: usize| own.iter().any(|&producer| producer == other || before[producer][other]);
            let row = (0..count).map(|other| other < atom && needs(other)).collect();
            before.push(row);
        }
        for part in [(0..count).collect::<Vec<Atom>>(), (0..count).step_by(2).collect()] {
            for &atom in &part {
                let nearest = problem.needs(&[atom], &part);
                let follows = |other: Atom| nearest.iter().any(|&need| need == other || before[need][other]);
                for &other in &part {
                    assert_eq!(follows(other), before[atom][other], "seed {seed}: {other} before {atom}");
                }
                let spare = |&need: &Atom| nearest.iter().any(|&other| before[other][need]);
                assert!(!nearest.iter().any(spare), "seed {seed}: {nearest:?} of {atom}");
            }
        }
    }
}

/// A chain of operations of two kinds.
fn chain(links: usize) -> Graph {
    let mut graph = Graph::new("chain");
    let mut value = graph.input("x", Dtype::F32, [128, 64]).unwrap();
    for link in 0..links {
        value =
            if link % 2 == 0 { graph.unary(UnaryOp::Exp, value) } else { graph.unary(UnaryOp::Tanh, value) }.unwrap();
    }
    graph.output("y", value).unwrap();
    graph
}

/// What planning a chain takes: words of sets, steps between groups, and nodes of the kernels that the catalogue was asked about.
fn planning_work(links: usize) -> usize {
    let (graph, machine) = (chain(links), Machine::cpu());
    let catalog = Counting(AtomicUsize::new(0));
    let before = words_seen() + steps_taken();
    let target = Target { machine: &machine, catalog: &catalog };
    let planned = plan(&graph, target, Strategy::Fused, &[]).unwrap();
    assert_eq!(planned.groups.iter().map(|group| group.nodes.len()).sum::<usize>(), links);
    words_seen() + steps_taken() - before + catalog.0.into_inner()
}

/// Every structure; counts the nodes it is asked about.
struct Counting(AtomicUsize);

impl Catalog for Counting {
    fn offers_structure(&self, structure: &Structure) -> bool {
        Primitives.offers_structure(structure)
    }

    fn offers(&self, draft: &Draft) -> bool {
        self.0.fetch_add(draft.nodes.len(), Ordering::Relaxed);
        Primitives.offers(draft)
    }

    fn offers_everything(&self) -> bool {
        true
    }

    fn work(&self, draft: &Draft) -> Work {
        self.0.fetch_add(draft.nodes.len(), Ordering::Relaxed);
        Primitives.work(draft)
    }
}

#[test]
fn planning_a_chain_grows_with_its_length() {
    let (short, long) = (planning_work(1_000), planning_work(4_000));
    // Four times the links are four times the work, and the end of a chain that fills no kernel is a share of it.
    assert!(long < 5 * short, "{short} steps for 1,000 links, {long} for 4,000");
}
