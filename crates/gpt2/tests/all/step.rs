//! One token of GPT-2 on a Hopper GPU that need not be there: which grids it is, and that each may start before the one before
//! it has ended.

use deuteron::{Backend, Machine, Strategy, Structure, Target, plan, render};
use deuteron_codegen::cuda::{Arch, CudaSource, CudaTarget, Grid, Word};
use deuteron_codegen::{InPlace, Kernel, Request, Source};
use deuteron_gpt2::{Config, Piece, Start, Weights, next_logits};
use deuteron_kernels::CudaCatalog;

/// A kernel of the step, its grids, and the positions of its arguments that are inputs of the graph.
struct Launched {
    source: CudaSource,
    grids: Vec<Grid>,
    inputs: Vec<usize>,
}

/// The kernels of one token behind 128 others.
fn step(arch: Arch) -> Vec<Launched> {
    let piece = Piece { batch: 1, sequence: 1, capacity: 129, start: Start::Anywhere };
    let graph = next_logits(&Config::SMALL, &piece, Weights::Bf16).unwrap();
    let machine = Machine::profile("h200").unwrap();
    let plan =
        plan(&graph, Target { machine: &machine, catalog: CudaCatalog::of(arch) }, Strategy::Fused, &[]).unwrap();
    let target = CudaTarget::new(arch, 132);
    let launched = plan.groups.iter().map(|group| {
        // As in a session whose caches are states.
        let appends = group.nodes.iter().filter(|_| group.structure == Structure::Append);
        let in_place: Vec<InPlace> =
            appends.map(|&result| InPlace { operand: graph.node(result).inputs[0], result }).collect();
        let request = Request { group: group.draft(&graph, &plan.placement), in_place: &in_place };
        let Kernel { source, launch } = render(request, &Backend::Cuda(target.clone())).unwrap();
        let Source::Cuda(source) = source else { panic!("a kernel of a library") };
        let args = launch.arguments();
        let given = |&position: &usize| graph.inputs().contains(&args[position].base);
        let inputs = (0..args.len()).filter(given).collect();
        Launched { grids: launch.grids().expect("grids").list.clone(), source, inputs }
    });
    launched.collect()
}

/// The text of a kernel's function.
fn function<'a>(source: &'a CudaSource, entry: &str) -> &'a str {
    let start = source.text.find(&format!(" {entry}(const __grid_constant__")).unwrap();
    let text = &source.text[start..];
    &text[..text.find("\n}").unwrap()]
}

#[test]
fn every_grid_of_a_token_may_start_early() {
    let all = step(Arch::Sm90a);
    let entries = |entry: &str| all.iter().flat_map(|one| &one.grids).filter(|grid| grid.entry == entry).count();
    // The embedding and the last token's row, four products per layer and the head.
    assert_eq!(["row", "append_rows", "attention_decode", "skinny"].map(entries), [2, 12, 12, 49]);
    assert_eq!(all.iter().map(|one| one.grids.len()).sum::<usize>(), 75, "nothing else, as a second grid of attention");
    for Launched { source, grids, .. } in &all {
        for grid in grids {
            assert!(grid.waits, "{} {}", source.name, grid.entry);
            let text = function(source, grid.entry);
            // A wait that no condition leaves out, and no way past it.
            let wait = text.lines().position(|line| line.trim() == "wait_for_previous();");
            let wait = wait.unwrap_or_else(|| panic!("`{}` does not wait", grid.entry));
            assert!(!text.lines().take(wait).any(|line| line.contains("return;")), "`{}` ends before", grid.entry);
        }
    }
}

#[test]
fn older_gpus_start_one_grid_after_another() {
    let all = step(Arch::Sm80);
    assert!(all.iter().flat_map(|one| &one.grids).all(|grid| !grid.waits && grid.cluster == 1));
}

#[test]
fn weights_are_asked_for_early() {
    for Launched { source, grids, inputs } in step(Arch::Sm90a) {
        // Those that a device finds to be written by a kernel are left out: all that are no inputs.
        let given = |word: &Word| matches!(word, Word::Unwritten { position, .. } if inputs.contains(position));
        let early = grids.iter().flat_map(|grid| &grid.words).filter(|word| given(word)).count();
        let expected = match source.name.as_str() {
            // Weights and bias; with a norm what it scales by and adds; of the head no bias.
            "skinny" => 2..=4,
            // Positions.
            "attention_decode" => 1..=1,
            _ => 0..=0,
        };
        assert!(expected.contains(&early), "{}: {early} of {inputs:?}", source.name);
    }
}
