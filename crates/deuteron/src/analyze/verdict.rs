//! The headline of an analysis: what the chosen plan does, and what that gains over which baseline.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use deuteron_plan::{Assessment, Plan, Seconds};
use deuteron_report::change_of_bytes;

/// The share of time by which the eager plan must be better than the unfused one to be named beside it.
const BETTER: f64 = 0.005;

/// The plan in a few sentences. The gain is relative to the kernels that fusing starts from; that of recomputing is stated separately.
pub(super) fn verdict(assessment: &Assessment, recomputes: bool) -> String {
    let (before, after) = (&assessment.apart, &assessment.chosen);
    let recomputed = match recomputes {
        true => {
            let (stored, again) = (assessment.unfused.time(), before.time());
            format!(
                " Before that, recomputing values in the backward pass instead of storing them changes {stored} to {again}."
            )
        }
        false => String::new(),
    };
    let regrouped = Regrouped::of(assessment);
    let Some(what) = regrouped.text(assessment) else {
        let to = after.groups.len();
        let kernels = if to == 1 { "1 kernel".to_string() } else { format!("{to} kernels") };
        return format!("Nothing to fuse: {kernels}, {}, no fusion makes it faster.{recomputed}", after.time());
    };
    format!(
        "{what}: {} become {} ({:.2}x), {}.{}{}{recomputed}",
        before.time(),
        after.time(),
        ratio(before, after),
        change_of_bytes(before.bytes().0, after.bytes().0),
        regrouped.most_is_won_by(assessment),
        over_eager(assessment)
    )
}

fn ratio(before: &Plan, after: &Plan) -> f64 {
    before.time().0 / after.time().0.max(1e-12)
}

/// The gain over the eager plan, where that is the better baseline.
fn over_eager(assessment: &Assessment) -> String {
    let Assessment { eager, apart, chosen, .. } = assessment;
    if eager.time().0 >= (1.0 - BETTER) * apart.time().0 {
        return String::new();
    }
    format!(
        " Compared with the eager plan (attention in parts, nothing fused), which takes {}, the gain is {:.2}x.",
        eager.time(),
        ratio(eager, chosen)
    )
}

/// How the kernels of the chosen plan differ from those that fusing starts from.
struct Regrouped {
    /// kernels of the chosen plan that hold work of several
    fused: usize,
    /// kernels whose work the chosen plan distributes over several
    split: Vec<usize>,
    /// for each kernel of the chosen plan, the split kernel that it holds a part of
    part_of: HashMap<usize, usize>,
}

impl Regrouped {
    fn of(assessment: &Assessment) -> Regrouped {
        let (mut into, mut from): (BTreeMap<usize, BTreeSet<usize>>, BTreeMap<usize, BTreeSet<usize>>) =
            Default::default();
        for atom in &assessment.atoms {
            into.entry(atom.before).or_default().insert(atom.after);
            from.entry(atom.after).or_default().insert(atom.before);
        }
        let split: Vec<usize> = into.iter().filter(|(_, parts)| parts.len() > 1).map(|(&kernel, _)| kernel).collect();
        let parts = split.iter().flat_map(|kernel| into[kernel].iter().map(|&part| (part, *kernel)));
        Regrouped { fused: from.values().filter(|kernels| kernels.len() > 1).count(), part_of: parts.collect(), split }
    }

    /// What the plan does, with the number of kernels before and after; none if it runs the same kernels.
    fn text(&self, assessment: &Assessment) -> Option<String> {
        let (from, to) = (assessment.apart.groups.len(), assessment.chosen.groups.len());
        let became = match from == to {
            true => format!("{to} kernels as before"),
            false => format!("{from} kernels become {to}"),
        };
        match (self.split.is_empty(), self.fused) {
            (true, 0) => None,
            (true, _) => Some(format!("Fuse {from} kernels into {to}")),
            (false, _) if to < from => {
                Some(format!("Fuse {from} kernels into {to}, with {} in parts", self.names(assessment)))
            }
            (false, 0) => Some(format!("Run {} in parts, {became}", self.names(assessment))),
            (false, _) => Some(format!("Run {} in parts and fuse neighbours, {became}", self.names(assessment))),
        }
    }

    /// The kernels that are split: `12 kernels of attention`.
    fn names(&self, assessment: &Assessment) -> String {
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for &kernel in &self.split {
            *counts.entry(assessment.apart.groups[kernel].name.as_str()).or_default() += 1;
        }
        let each = counts.into_iter().map(|(name, count)| match count {
            1 => name.to_string(),
            count => format!("{count} kernels of {name}"),
        });
        each.collect::<Vec<_>>().join(", ")
    }

    /// The kernels of one name that save the most, and their share of the plan's saving. Parts of a split kernel count together.
    fn most_is_won_by(&self, assessment: &Assessment) -> String {
        let mut sums: HashMap<String, (usize, f64)> = HashMap::new();
        for (index, (group, gain)) in assessment.chosen.groups.iter().zip(&assessment.gains).enumerate() {
            let name = match self.part_of.get(&index) {
                Some(&kernel) => format!("{} in parts", assessment.apart.groups[kernel].name),
                None => group.name.clone(),
            };
            let (count, sum) = sums.entry(name).or_default();
            *count += 1;
            *sum += gain.0;
        }
        let all = assessment.apart.time() - assessment.chosen.time();
        let best = sums.into_iter().max_by(|a, b| a.1.1.total_cmp(&b.1.1).then_with(|| b.0.cmp(&a.0)));
        match best {
            Some((name, (count, sum))) if sum > 0.0 && all.0 > 0.0 => {
                let kernels = if count > 1 { format!("{count} kernels, ") } else { String::new() };
                format!(" Largest gain: {name}, {kernels}{} of the {all} saved.", Seconds(sum))
            }
            _ => String::new(),
        }
    }
}
