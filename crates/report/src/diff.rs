//! Two analyses side by side: what changed, and by how much.
//!
//! Kernels are the same if name and size are; candidates if operations and kind are, the first with the first, the
//! second with the second. The time that planning took is never a change: it differs from run to run.

mod show;

use std::collections::BTreeMap;

use serde::Serialize;

use crate::units::percent_change;
use crate::{Analysis, Candidate, KernelSheet, PlanSheet};

/// What changed between two analyses. Its `Display` form is for people.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct Diff {
    /// words that changed: the graph's name, the device, whether the plan is optimal
    pub texts: Vec<TextChange>,
    /// plans that changed
    pub plans: Vec<PlanChange>,
    /// kernels of the chosen plan that were added, removed or changed
    pub kernels: Vec<KernelChange>,
    /// candidates whose verdict, choice, score or reason changed, and those that were added or removed
    pub candidates: Vec<CandidateChange>,
    /// numbers of the machine that changed
    pub machine: Vec<NumberChange>,
    /// measured times and speed-up that changed
    pub measured: Vec<NumberChange>,
}

impl Diff {
    /// Whether nothing changed.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// A number before and after.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Change {
    /// what it was
    pub old: f64,
    /// what it is
    pub new: f64,
    /// by how much it changed; none where it was zero
    pub percent: Option<f64>,
}

/// Words that changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TextChange {
    /// what they are: `device`
    pub what: String,
    /// what they were
    pub old: String,
    /// what they are now
    pub new: String,
}

/// A plan that changed; unchanged fields are none.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanChange {
    /// naive, eager, unfused, greedy, chosen, conceivable
    pub plan: String,
    /// launches
    pub kernels: Option<Change>,
    /// bytes
    pub bytes: Option<Change>,
    /// predicted microseconds
    pub us: Option<Change>,
    /// most bytes alive at once
    pub peak_bytes: Option<Change>,
}

/// What happened to a kernel or a candidate.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub enum Event {
    /// it is only in the new analysis
    Appeared,
    /// it is only in the old analysis
    Disappeared,
    /// it is in both, with other numbers
    Changed,
}

/// A kernel of the chosen plan that was added, removed or changed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct KernelChange {
    /// its name
    pub name: String,
    /// its size
    pub size: String,
    /// what happened to it
    pub event: Event,
    /// launches; 0 in a plan without it
    pub launches: Option<Change>,
    /// bytes of a launch
    pub bytes: Option<Change>,
    /// predicted microseconds of a launch
    pub us: Option<Change>,
    /// whether its source differs
    pub source: bool,
}

/// A candidate that changed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CandidateChange {
    /// names of its operations
    pub ops: Vec<String>,
    /// `pair`, `template` or `view`
    pub kind: String,
    /// which of the candidates with these operations, from 0
    pub occurrence: usize,
    /// whether it was added, removed or changed
    pub event: Event,
    /// what changed in words: verdict, chosen, code
    pub texts: Vec<TextChange>,
    /// score
    pub score: Option<Change>,
    /// how often it occurs
    pub count: Option<Change>,
}

/// A named number that changed.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct NumberChange {
    /// its name
    pub name: String,
    /// the old value; none if it is new
    pub old: Option<f64>,
    /// the new value; none if it was removed
    pub new: Option<f64>,
    /// by how much it changed
    pub percent: Option<f64>,
}

/// Compares two analyses. Equal ones give an empty difference.
pub fn diff(old: &Analysis, new: &Analysis) -> Diff {
    Diff {
        texts: texts(old, new),
        plans: plans(old, new),
        kernels: kernels(&old.after, &new.after),
        candidates: candidates(&old.candidates, &new.candidates),
        machine: numbers(&machine_numbers(old), &machine_numbers(new)),
        measured: numbers(&measured_numbers(old), &measured_numbers(new)),
    }
}

/// The change of a number; none if it is equal up to rounding. Two NaNs are equal.
fn change(old: f64, new: f64) -> Option<Change> {
    let same = old == new || (old.is_nan() && new.is_nan()) || (old - new).abs() <= 1e-9 * old.abs().max(new.abs());
    // An infinite bound would make every number the same as infinity.
    let same = same && (old.is_finite() == new.is_finite());
    (!same).then(|| Change { old, new, percent: percent_change(old, new) })
}

fn count_change(old: usize, new: usize) -> Option<Change> {
    change(old as f64, new as f64)
}

fn text_change(what: &str, old: impl ToString, new: impl ToString) -> Option<TextChange> {
    let (old, new) = (old.to_string(), new.to_string());
    (old != new).then(|| TextChange { what: what.into(), old, new })
}

fn texts(old: &Analysis, new: &Analysis) -> Vec<TextChange> {
    let optimality = |analysis: &Analysis| {
        if analysis.optimal { "optimal".into() } else { format!("gap {:.2} %", analysis.search.gap * 100.0) }
    };
    let verified = |analysis: &Analysis| match &analysis.measured {
        Some(measured) if measured.verified => "verified",
        Some(_) => "not verified",
        None => "not measured",
    };
    [
        text_change("graph", &old.graph, &new.graph),
        text_change("device", &old.device, &new.device),
        text_change("verdict", &old.verdict, &new.verdict),
        text_change("optimality", optimality(old), optimality(new)),
        text_change("results", verified(old), verified(new)),
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn plans(old: &Analysis, new: &Analysis) -> Vec<PlanChange> {
    let (old, new) = (&old.plans, &new.plans);
    let none = PlanSheet { kernels: 0, bytes: 0, us: 0.0, peak_bytes: 0 };
    let or_none = |old, new| (Option::unwrap_or(old, &none), Option::unwrap_or(new, &none));
    let greedy = or_none(old.greedy.as_ref(), new.greedy.as_ref());
    let conceivable = or_none(old.conceivable.as_ref(), new.conceivable.as_ref());
    [
        ("naive", &old.naive, &new.naive),
        ("eager", &old.eager, &new.eager),
        ("unfused", &old.unfused, &new.unfused),
        ("greedy", greedy.0, greedy.1),
        ("chosen", &old.chosen, &new.chosen),
        ("conceivable", conceivable.0, conceivable.1),
    ]
    .into_iter()
    .filter_map(|(plan, old, new)| {
        let change = PlanChange {
            plan: plan.into(),
            kernels: count_change(old.kernels, new.kernels),
            bytes: change(old.bytes as f64, new.bytes as f64),
            us: change(old.us, new.us),
            peak_bytes: change(old.peak_bytes as f64, new.peak_bytes as f64),
        };
        let changed = [change.kernels, change.bytes, change.us, change.peak_bytes].iter().any(Option::is_some);
        changed.then_some(change)
    })
    .collect()
}

fn kernels(old: &[KernelSheet], new: &[KernelSheet]) -> Vec<KernelChange> {
    pairs(old, new, |sheet| (sheet.name.clone(), sheet.size.clone()))
        .into_iter()
        .filter_map(|((name, size), _, old, new)| {
            let bytes = |sheet: Option<&KernelSheet>| {
                sheet.map_or(0.0, |sheet| sheet.cost.read as f64 + sheet.cost.written as f64)
            };
            let us = |sheet: Option<&KernelSheet>| sheet.map_or(0.0, |sheet| sheet.cost.us);
            let launches = |sheet: Option<&KernelSheet>| sheet.map_or(0, |sheet| sheet.launches.len());
            let found = KernelChange {
                event: event(&old, &new)?,
                launches: count_change(launches(old), launches(new)),
                bytes: change(bytes(old), bytes(new)),
                us: change(us(old), us(new)),
                source: matches!((old, new), (Some(old), Some(new)) if old.source != new.source),
                name,
                size,
            };
            let changed = found.launches.is_some() || found.bytes.is_some() || found.us.is_some() || found.source;
            (changed || found.event != Event::Changed).then_some(found)
        })
        .collect()
}

fn candidates(old: &[Candidate], new: &[Candidate]) -> Vec<CandidateChange> {
    pairs(old, new, |sheet| (sheet.ops.clone(), sheet.kind.clone()))
        .into_iter()
        .filter_map(|((ops, kind), occurrence, old, new)| {
            let event = event(&old, &new)?;
            let mut found =
                CandidateChange { ops, kind, occurrence, event, texts: Vec::new(), score: None, count: None };
            if let (Some(old), Some(new)) = (old, new) {
                let word = |chosen: bool| if chosen { "fused" } else { "apart" };
                found.texts = [
                    text_change("verdict", &old.verdict, &new.verdict),
                    text_change("plan", word(old.chosen), word(new.chosen)),
                    text_change("code", &old.reason.code, &new.reason.code),
                    text_change("realizable", old.realizable, new.realizable),
                ]
                .into_iter()
                .flatten()
                .collect();
                found.score = change(old.score, new.score);
                found.count = count_change(old.count, new.count);
                let changed = !found.texts.is_empty() || found.score.is_some() || found.count.is_some();
                return changed.then_some(found);
            }
            Some(found)
        })
        .collect()
}

fn event<T>(old: &Option<T>, new: &Option<T>) -> Option<Event> {
    match (old, new) {
        (Some(_), Some(_)) => Some(Event::Changed),
        (Some(_), None) => Some(Event::Disappeared),
        (None, Some(_)) => Some(Event::Appeared),
        (None, None) => None,
    }
}

/// Items of both lists paired by key and by position among the items of that key, in order of key.
fn pairs<'a, T, K: Ord + Clone>(
    old: &'a [T],
    new: &'a [T],
    key: impl Fn(&T) -> K,
) -> Vec<(K, usize, Option<&'a T>, Option<&'a T>)> {
    let mut lists: BTreeMap<K, (Vec<&'a T>, Vec<&'a T>)> = BTreeMap::new();
    for item in old {
        lists.entry(key(item)).or_default().0.push(item);
    }
    for item in new {
        lists.entry(key(item)).or_default().1.push(item);
    }
    let mut pairs = Vec::new();
    for (key, (old, new)) in lists {
        for occurrence in 0..old.len().max(new.len()) {
            pairs.push((key.clone(), occurrence, old.get(occurrence).copied(), new.get(occurrence).copied()));
        }
    }
    pairs
}

fn machine_numbers(analysis: &Analysis) -> Vec<(String, f64)> {
    let machine = &analysis.machine;
    let rates = [
        ("memory, bytes/us", machine.bytes_per_us),
        ("vector, flops/us", machine.vector_flops_per_us),
        ("matrix, flops/us", machine.matrix_flops_per_us),
    ];
    let rates = rates.into_iter().map(|(name, value)| (name.to_string(), value));
    machine.numbers.iter().map(|number| (number.name.clone(), number.value)).chain(rates).collect()
}

fn measured_numbers(analysis: &Analysis) -> Vec<(String, f64)> {
    let Some(measured) = &analysis.measured else { return Vec::new() };
    [("unfused us", measured.unfused_us), ("chosen us", measured.chosen_us), ("speed-up", measured.speedup)]
        .into_iter()
        .map(|(name, value)| (name.to_string(), value))
        .collect()
}

fn numbers(old: &[(String, f64)], new: &[(String, f64)]) -> Vec<NumberChange> {
    pairs(old, new, |(name, _)| name.clone())
        .into_iter()
        .filter_map(|(name, _, old, new)| {
            let (old, new) = (old.map(|(_, value)| *value), new.map(|(_, value)| *value));
            let percent = match (old, new) {
                (Some(old), Some(new)) => change(old, new)?.percent,
                _ => None,
            };
            Some(NumberChange { name, old, new, percent })
        })
        .collect()
}
