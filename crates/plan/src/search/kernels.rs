//! The kernels that fusing starts from, and the names of what becomes one kernel: sheets print these names, and pins accept them.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use deuteron_graph::{Callee, Composite};

use crate::grouping::Grouping;
use crate::search::problem::{Atom, Problem};
use crate::search::solver::Solver;
use crate::strategy::Strategy;

/// The kernels of the unfused plan, in the order they run.
pub(crate) struct Kernels {
    /// atoms of each kernel
    pub atoms: Vec<Vec<Atom>>,
    /// for each atom, its kernel
    pub of: Vec<usize>,
}

impl Kernels {
    /// The kernels of the unfused plan.
    pub fn of(problem: &Problem) -> Kernels {
        let mut unfused = Grouping::new(problem.rules.graph, problem.rules.placement, problem.target);
        unfused.merge_for(Strategy::Unfused);
        let order = unfused.topological();
        let mut of = vec![0; problem.atoms.len()];
        for (index, &group) in order.iter().enumerate() {
            let atoms = unfused.groups[group].iter().filter_map(|id| problem.atom_of[id.index()]);
            atoms.for_each(|atom| of[atom] = index);
        }
        let mut atoms = vec![Vec::new(); order.len()];
        of.iter().enumerate().for_each(|(atom, &kernel)| atoms[kernel].push(atom));
        Kernels { atoms, of }
    }

    /// Kernels one of which reads a result of the other.
    pub fn pairs(&self, problem: &Problem) -> Vec<[usize; 2]> {
        let mut pairs: BTreeSet<[usize; 2]> = BTreeSet::new();
        for (atom, producers) in problem.producers.iter().enumerate() {
            pairs.extend(producers.iter().map(|&producer| [self.of[producer], self.of[atom]]));
        }
        pairs.into_iter().filter(|[a, b]| a != b).collect()
    }

    /// A set of atoms by the kernels they are taken from. What is within one kernel, such as attention, is listed operation by operation.
    pub fn parts(&self, set: &[Atom]) -> Vec<Vec<Atom>> {
        let mut parts: BTreeMap<usize, Vec<Atom>> = BTreeMap::new();
        set.iter().for_each(|&atom| parts.entry(self.of[atom]).or_default().push(atom));
        match parts.len() {
            1 => set.iter().map(|&atom| vec![atom]).collect(),
            _ => parts.into_values().collect(),
        }
    }

    /// What a sheet may list: pairs of kernels, and legal groups of three kernels or more, by the words of their names.
    pub fn listed(&self, solver: &Solver) -> Listed {
        let problem = &solver.problem;
        let pairs = self.pairs(problem).into_iter().map(|pair| pair.map(|kernel| self.atoms[kernel].clone()).to_vec());
        let groups = solver.candidates.groups.iter().map(|group| self.parts(&group.atoms));
        let mut listed = Listed::default();
        for parts in pairs.chain(groups.filter(|parts| parts.len() > 2)) {
            let mut set = parts.concat();
            set.sort_unstable();
            listed.sets.entry(words(&part_names(problem, &parts))).or_default().push(set);
        }
        listed
    }
}

/// Sets of atoms by their names in a sheet.
#[derive(Default)]
pub(crate) struct Listed {
    sets: HashMap<Vec<String>, Vec<Vec<Atom>>>,
}

impl Listed {
    /// The sets of these names.
    pub fn of(&self, names: &[String]) -> &[Vec<Atom>] {
        self.sets.get(&words(names)).map_or(&[], Vec::as_slice)
    }
}

/// A kernel of several calls, `a+b`, is a word for each.
fn words(names: &[String]) -> Vec<String> {
    names.iter().flat_map(|name| name.split('+')).map(|word| word.trim().to_string()).collect()
}

/// The user's name of an atom: that of its call.
pub(crate) fn atom_name(problem: &Problem, atom: Atom) -> String {
    let graph = problem.rules.graph;
    graph.call_name(graph.node(problem.atoms[atom][0]).call).to_string()
}

/// The calls of some atoms, in order.
pub(crate) fn names_of(problem: &Problem, atoms: &[Atom]) -> Vec<String> {
    let mut names: Vec<String> = atoms.iter().map(|&atom| atom_name(problem, atom)).collect();
    names.dedup();
    names
}

/// The calls of a kernel: `linear`, `attention`.
pub(crate) fn kernel_name(problem: &Problem, atoms: &[Atom]) -> String {
    names_of(problem, atoms).join("+")
}

/// The names of kernels that would become one: their calls, or parts of the call if all are of one.
pub(crate) fn part_names(problem: &Problem, parts: &[Vec<Atom>]) -> Vec<String> {
    let call = |part: &Vec<Atom>| problem.rules.graph.node(problem.atoms[part[0]][0]).call;
    let one_call = parts.iter().all(|part| part.len() == 1 && call(part) == call(&parts[0]));
    match one_call {
        true => parts.iter().map(|part| part_name(problem, part[0])).collect(),
        false => parts.iter().map(|part| kernel_name(problem, part)).collect(),
    }
}

/// The name of a part of a call.
fn part_name(problem: &Problem, atom: Atom) -> String {
    let graph = problem.rules.graph;
    let node = graph.node(problem.atoms[atom][0]);
    let is_attention = matches!(
        graph.calls()[node.call.index()].callee,
        Callee::Composite(Composite::Attention { .. } | Composite::AttentionScores { .. })
    );
    match (is_attention, node.part) {
        (true, 0) => "scores".to_string(),
        (true, 1) => "mask".to_string(),
        (true, 2) => "softmax".to_string(),
        (true, 3) => "dropout".to_string(),
        (true, _) => "product".to_string(),
        (false, _) => atom_name(problem, atom),
    }
}
