//! Where the gradient of attention is stored: side by side in the order of positions, it has the bits of three gradients in buffers of their own.

use std::collections::HashMap;
use std::path::Path;

use deuteron_codegen::Kernel;
use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_emulator::{Lanes, Schedule, Toolchain};
use deuteron_graph::{Dtype, Graph, NodeId, attention_interior, differentiate, recompute};
use deuteron_kernels::{Backend, CudaCatalog, render};
use deuteron_plan::{Link, Machine, Plan, StoredGradient, Strategy, Target, plan};

use super::compiler;

/// Heads of queries and of keys of a sequence, which are parts of one value of positions.
struct Case {
    dtype: Dtype,
    heads: usize,
    key_heads: usize,
    positions: usize,
    width: usize,
    arch: Arch,
}

const SEQUENCES: usize = 2;

impl Case {
    fn text(&self) -> String {
        let Case { dtype, heads, key_heads, positions, width, .. } = *self;
        let [of_queries, of_keys] = [heads * width, key_heads * width];
        let group = heads / key_heads;
        let part = |name: &str, start: usize, length: usize, group: usize, all: &str| {
            format!(
                "{name}s = slice x axis=2 start={start} length={length}
                 {name}h = reshape {name}s [{SEQUENCES},{positions},{key_heads},{group},{width}]
                 {all} = transpose {name}h [0,2,3,1,4]\n"
            )
        };
        let shared = format!("[{SEQUENCES},{key_heads},{group},{positions},{width}]");
        let [q, k, v] = [
            part("q", 0, of_queries, group, "q"),
            part("k", of_queries, of_keys, 1, "kt") + &format!("k = broadcast kt {shared}\n"),
            part("v", of_queries + of_keys, of_keys, 1, "vt") + &format!("v = broadcast vt {shared}\n"),
        ];
        let columns = of_queries + 2 * of_keys;
        format!(
            "x = input {dtype}[{SEQUENCES},{positions},{columns}]\n{q}{k}{v}a = attention q k v mask=causal scale=0.2\nout a"
        )
    }

    fn graph(&self) -> Graph {
        let graph: Graph = self.text().parse().unwrap_or_else(|error| panic!("{error}\n{}", self.text()));
        let joint = differentiate(&graph, graph.inputs()).unwrap();
        let scores = attention_interior(&joint.graph, joint.first_backward);
        recompute(&joint.graph, joint.first_backward, &scores).unwrap().graph
    }

    /// The kernel of the gradient in a plan, and where it stores what.
    fn gradient(&self, graph: &Graph, strategy: Strategy) -> (Plan, Kernel, [StoredGradient; 3]) {
        let machine = Machine::profile("h200").unwrap();
        let target = Target { machine: &machine, catalog: CudaCatalog::of(self.arch) };
        let plan = plan(graph, target, strategy, &[]).unwrap();
        let found = plan.groups.iter().find(|group| group.structure.is_attention_gradient());
        let found = found.unwrap_or_else(|| panic!("{plan}"));
        let chain = found.structure.chain().unwrap();
        let [Link::AttentionGradient(Some(link))] = chain.links[..] else { panic!("{plan}") };
        let backend = Backend::Cuda(CudaTarget::new(self.arch, 2));
        let kernel = render(found.draft(graph, &plan.placement), &backend).unwrap();
        (plan, kernel, link.gradients)
    }

    /// The element of one gradient's buffer that is this one of all side by side.
    fn element(&self, at: usize) -> (usize, usize) {
        let Case { heads, key_heads, positions, width, .. } = *self;
        let columns = (heads + 2 * key_heads) * width;
        let (row, column) = (at / columns, at % columns);
        let (sequence, position) = (row / positions, row % positions);
        let (which, head, all) = match column / width {
            head if head < heads => (0, head, heads),
            head if head < heads + key_heads => (1, head - heads, key_heads),
            head => (2, head - heads - key_heads, key_heads),
        };
        (which, ((sequence * all + head) * positions + position) * width + column % width)
    }
}

/// What a kernel leaves in the memory of the nodes that it writes.
fn ran(toolchain: &Toolchain, name: &str, graph: &Graph, kernel: &Kernel) -> HashMap<NodeId, Vec<u8>> {
    let schedule = Schedule { resident: 4, lanes: Lanes::Together, seeds: 1..2 };
    let arguments = kernel.launch.arguments();
    let bytes: Vec<Vec<u8>> = arguments
        .iter()
        .map(|argument| {
            let (node, seed) = (graph.node(argument.base), argument.base.index());
            let bytes = node.bytes();
            if argument.written {
                return vec![0xff; bytes];
            }
            // Floats of either width that are about 1 or below, different everywhere; of both signs.
            let byte = |at: usize| match (at + 1) % node.dtype.bytes() {
                0 => [0x3f, 0xbf, 0x3e][(at / 2 * 7 + seed) % 3],
                _ => ((at * 37 + seed * 101) % 251) as u8,
            };
            (0..bytes).map(byte).collect()
        })
        .collect();
    let given: Vec<&[u8]> = bytes.iter().map(Vec::as_slice).collect();
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("emulated").join(name);
    let done = deuteron_emulator::run(toolchain, &folder, kernel, &given, &schedule).unwrap();
    let results = arguments.iter().zip(done.results).filter(|(argument, _)| argument.written);
    results.map(|(argument, bytes)| (argument.base, bytes)).collect()
}

#[test]
fn gradients_side_by_side_have_the_bits_of_gradients_apart() {
    let Some(toolchain) = compiler() else { return };
    let hopper = Case { dtype: Dtype::Bf16, heads: 3, key_heads: 3, positions: 67, width: 64, arch: Arch::Sm90a };
    let cases = [
        ("grouped", Case { dtype: Dtype::F16, heads: 4, key_heads: 2, width: 128, ..hopper }),
        // No warpgroups: rows that are no multiples of 16 bytes.
        ("plain", Case { dtype: Dtype::F32, width: 18, positions: 33, ..hopper }),
        ("wide", Case { heads: 2, key_heads: 2, width: 160, ..hopper }),
        ("hopper", hopper),
    ];
    for (name, case) in cases {
        let graph = case.graph();
        let stored = graph.outputs()[1].node;
        let (plan, together, places) = case.gradient(&graph, Strategy::Greedy);
        assert_eq!(places.map(|gradient| gradient.buffer()), [stored; 3], "{plan}");
        let group = case.heads / case.key_heads;
        let unfused = if group > 1 { None } else { Some(case.gradient(&graph, Strategy::Unfused)) };
        let folder = |kind: &str| format!("gradient_places_{name}_{kind}");
        let one = ran(toolchain, &folder("together"), &graph, &together);
        let all = &one[&stored];
        let bytes = case.dtype.bytes();
        assert_eq!(all.len(), graph.node(stored).bytes());
        let Some((_, apart, of)) = unfused else {
            // Sums over heads are of the kernel by warpgroups alone: every element is written, none twice with other bits.
            assert!(all.chunks(bytes).all(|element| element.iter().any(|&byte| byte != 0xff)), "{name}");
            continue;
        };
        assert!(of.iter().all(|gradient| gradient.joined.is_none() && gradient.copy.is_none()), "{of:?}");
        let others = ran(toolchain, &folder("apart"), &graph, &apart);
        for (at, element) in all.chunks(bytes).enumerate() {
            let (which, place) = case.element(at);
            let other = &others[&of[which].buffer()][place * bytes..][..bytes];
            assert_eq!(element, other, "{name}: element {at}, of gradient {which}");
        }
    }
}
