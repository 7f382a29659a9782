//! The sheet of a fusion, the plan and the pins agree, whatever the graph.

use deuteron_graph::Graph;
use deuteron_plan::{
    Assessment, FusionKind, Machine, Pin, Question, Reason, Scoring, Seconds, Strategy, Target, assess, plan_pinned,
};
use deuteron_reference::random_case;

fn assessed(graph: &Graph, machine: &Machine, pins: &[Pin]) -> Assessment {
    let target = Target::conceivable(machine);
    let scoring = Scoring::default();
    assess(&Question { graph, baseline: graph, target, realizable: None, pins, scoring }).unwrap()
}

/// Random graphs, a block of a model among them, each with a machine.
fn cases() -> Vec<(Graph, Machine)> {
    let machines = [Machine::profile("h200").unwrap(), Machine::cpu()];
    let random = (0..60u64).map(|seed| (random_case(seed).graph, machines[seed as usize % 2].clone()));
    random.chain(machines.iter().map(|machine| (ATTENTION.parse().unwrap(), machine.clone()))).collect()
}

/// Attention whose heads are put together before a projection: no kernel holds the copy and the projection alone.
const ATTENTION: &str = "q = input bf16[2,12,256,64] ; k = input bf16[2,12,256,64] ; v = input bf16[2,12,256,64]
    w = weight bf16[768,768] ; r = input bf16[2,256,768]
    a = attention q k v mask=causal ; t = transpose a [0,2,1,3] ; h = reshape t [2,256,768]
    y = matmul h w ; s = add y r ; out s";

#[test]
fn a_refused_pair_is_in_no_kernel_and_a_chosen_one_is_not_refused() {
    let (mut within, mut refused, mut fused) = (0, 0, 0);
    for (graph, machine) in cases() {
        let assessment = assessed(&graph, &machine, &[]);
        for fusion in &assessment.fusions {
            let at = format!("{:?} of {graph}", fusion.ops);
            assert_eq!(fusion.chosen, fusion.reason.is_none(), "{at}");
            assert!(!fusion.chosen || fusion.forceable, "{at}");
            if fusion.chosen && fusion.together.is_none() {
                let holder = fusion.within.as_ref().unwrap_or_else(|| panic!("no kernel explains {at}"));
                assert!(holder.ops.len() > fusion.ops.len() || holder.ops.len() > 2, "{at}: {holder:?}");
            }
            within += fusion.within.is_some() as usize;
            fused += fusion.chosen as usize;
            refused += !fusion.chosen as usize;
        }
    }
    assert!(within > 0 && fused > 50 && refused > 50, "{within} within, {fused} fused, {refused} refused");
}

#[test]
fn forcing_works_exactly_where_the_sheet_says_so() {
    let (mut works, mut fails) = (0, 0);
    for (graph, machine) in cases() {
        let assessment = assessed(&graph, &machine, &[]);
        for fusion in assessment.fusions.iter().filter(|fusion| fusion.kind == FusionKind::Pair) {
            let names = fusion.ops.clone();
            // A name stands for every place: only a pair that is one place is what the sheet speaks of.
            if fusion.atoms.len() != 2 || places(&assessment, &names) != 1 {
                continue;
            }
            let target = Target::conceivable(&machine);
            let forced = plan_pinned(&graph, target, Strategy::Fused, &[], &[Pin::Force(names)]);
            assert_eq!(forced.is_ok(), fusion.forceable, "{:?}: {:?} of {graph}", fusion.ops, forced.err());
            if let (Ok(plan), Some(worth), false) = (&forced, fusion.worth, fusion.chosen) {
                let extra = plan.time().0 - assessment.chosen.time().0;
                assert!((extra + worth.0).abs() < 1e-9 + 1e-6 * extra.abs(), "{:?}: {extra} and {worth}", fusion.ops);
            }
            *if forced.is_ok() { &mut works } else { &mut fails } += 1;
        }
    }
    assert!(works > 30 && fails > 10, "{works} can be forced, {fails} cannot");
}

/// Places of a graph where operations of these names follow each other.
fn places(assessment: &Assessment, names: &[String]) -> usize {
    let atoms = &assessment.atoms;
    let is = |atom: usize, name: &String| atoms[atom].name == *name || atoms[atom].label == *name;
    let follows = |second: usize| atoms[second].reads.iter().filter(|&&first| is(first, &names[0])).count();
    (0..atoms.len()).filter(|&atom| is(atom, &names[1])).map(follows).sum()
}

#[test]
fn savings_of_the_kernels_add_up_to_what_the_plan_saves() {
    for (graph, machine) in cases() {
        let assessment = assessed(&graph, &machine, &[]);
        let sum: Seconds = assessment.gains.iter().copied().sum();
        let saved = assessment.apart.time() - assessment.chosen.time();
        assert!((sum.0 - saved.0).abs() < 1e-12 + 1e-9 * saved.0.abs(), "{sum} and {saved} of {graph}");
        for fusion in &assessment.fusions {
            let worth = fusion.worth.unwrap_or_default().0;
            assert!(if fusion.chosen { worth >= 0.0 } else { worth <= 1e-12 }, "{:?}: {worth}", fusion.ops);
        }
    }
}

#[test]
fn what_the_user_forbids_is_said_to_be_forbidden() {
    let graph: Graph = "x = input f32[1024,768] ; w = weight f32[768] ; b = weight f32[768]
        y, mean, rstd = layer_norm x w b ; z = gelu y ; out z"
        .parse()
        .unwrap();
    let machine = Machine::cpu();
    let names = ["layer_norm", "gelu"].map(String::from).to_vec();
    let free = assessed(&graph, &machine, &[]);
    let pinned = assessed(&graph, &machine, &[Pin::Forbid(names)]);
    let fusion = &pinned.fusions[0];
    assert_eq!((fusion.chosen, fusion.forceable, &fusion.reason), (false, false, &Some(Reason::Forbidden)));
    let price = pinned.chosen.time() - free.chosen.time();
    assert!(price.0 > 0.0 && (fusion.worth.unwrap().0 - price.0).abs() < 1e-12, "without the pin: {:?}", fusion.worth);
}

#[test]
fn a_pin_that_cannot_be_says_what_was_asked() {
    let graph: Graph = "x = input f32[8,8] ; y = relu x ; z = gelu y ; out z".parse().unwrap();
    let machine = Machine::cpu();
    let message = |pin: Pin| {
        plan_pinned(&graph, Target::conceivable(&machine), Strategy::Fused, &[], &[pin]).unwrap_err().to_string()
    };
    let names = ["relu", "silu"].map(String::from).to_vec();
    assert!(message(Pin::Force(names.clone())).starts_with("cannot force relu + silu: "));
    assert!(message(Pin::Forbid(names)).starts_with("cannot forbid relu + silu: "));
}

#[test]
fn a_constant_that_an_opaque_operation_reads_is_no_launch() {
    let graph: Graph =
        "x = input f32[64,64] ; c = const 3 f32 ; y = opaque x c f32[64,64] name=Clip flops=1 bytes=32768
        z = relu y ; out z"
            .parse()
            .unwrap();
    let assessment = assessed(&graph, &Machine::cpu(), &[]);
    let names: Vec<&str> = assessment.atoms.iter().map(|atom| atom.name.as_str()).collect();
    assert_eq!(names, ["Clip", "relu"]);
}
