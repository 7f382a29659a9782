//! The sheet of a fusion, the plan and the pins agree, whatever the graph.

use deuteron_graph::Graph;
use deuteron_plan::{
    Assessment, Fusion, FusionKind, Machine, Pin, Plan, Question, Reason, Scoring, Seconds, Strategy, Target, assess,
    plan_pinned,
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
            assert!(fusion.kind != FusionKind::View || !fusion.forceable, "{at}");
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
fn forcing_and_forbidding_work_exactly_where_the_sheet_says_so() {
    let (mut works, mut fails, mut longer) = (0, 0, 0);
    for (graph, machine) in cases() {
        let assessment = assessed(&graph, &machine, &[]);
        let planned = |pin: Pin| plan_pinned(&graph, Target::conceivable(&machine), Strategy::Fused, &[], &[pin]);
        for fusion in &assessment.fusions {
            let at = format!("{:?} of {graph}", fusion.ops);
            let same: Vec<&Fusion> = assessment.fusions.iter().filter(|other| other.ops == fusion.ops).collect();
            let is_view = fusion.kind == FusionKind::View;
            if is_view && same.iter().any(|other| other.kind != FusionKind::View) {
                continue;
            }
            let forced = planned(Pin::Force(fusion.ops.clone()));
            assert_eq!(forced.is_ok(), fusion.forceable, "{at}: {:?}", forced.err());
            let forbidden = planned(Pin::Forbid(fusion.ops.clone()));
            assert_eq!(forbidden.is_ok(), !is_view, "{at}: {:?}", forbidden.err());
            // Every row of these names is obeyed.
            for one in same.iter().filter(|one| one.kind != FusionKind::View) {
                let shares =
                    |plan: &Plan| plan.groups.iter().any(|group| one.nodes.iter().all(|id| group.nodes.contains(id)));
                assert!(forced.as_ref().is_ok_and(shares) == fusion.forceable, "{at} is not forced");
                assert!(!forbidden.as_ref().is_ok_and(shares), "{at} is not forbidden");
            }
            // A name stands for every place: only a row that is one place states the price of the name.
            if let (Ok(plan), Some(worth), false, [_]) = (&forced, fusion.worth, fusion.chosen, same.as_slice())
                && fusion.count == 1
            {
                let extra = plan.time().0 - assessment.chosen.time().0;
                assert!((extra + worth.0).abs() < 1e-9 + 1e-6 * extra.abs(), "{at}: {extra} and {worth}");
            }
            longer += usize::from(fusion.kind == FusionKind::Template && fusion.forceable);
            *if forced.is_ok() { &mut works } else { &mut fails } += 1;
        }
    }
    assert!(works > 30 && fails > 10 && longer > 1, "{works} can be forced, {longer} of them long; {fails} cannot");
}

#[test]
fn the_greedy_plan_keeps_the_pins_or_is_left_out() {
    let (mut kept, mut left_out) = (0, 0);
    for (graph, machine) in cases().into_iter().step_by(5) {
        let free = assessed(&graph, &machine, &[]);
        for fusion in free.fusions.iter().filter(|fusion| fusion.kind == FusionKind::Pair && fusion.forceable) {
            for pin in [Pin::Force(fusion.ops.clone()), Pin::Forbid(fusion.ops.clone())] {
                let is_forced = matches!(pin, Pin::Force(_));
                let pinned = assessed(&graph, &machine, &[pin]);
                let Some(greedy) = &pinned.greedy else {
                    left_out += 1;
                    continue;
                };
                kept += 1;
                let shares = greedy.groups.iter().any(|group| fusion.nodes.iter().all(|id| group.nodes.contains(id)));
                assert_eq!(shares, is_forced, "{:?} of {graph}", fusion.ops);
                let optimal = pinned.chosen.search.as_ref().is_some_and(|search| search.optimal);
                let (greedy, chosen) = (greedy.time().0, pinned.chosen.time().0);
                assert!(
                    !optimal || greedy >= chosen * (1.0 - 1e-9),
                    "{:?}: {greedy} below {chosen} of {graph}",
                    fusion.ops
                );
            }
        }
    }
    assert!(kept > 10, "{kept} kept, {left_out} left out");
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
