//! Products with what follows them: which chains are one call of a library, and how they are launched.

use deuteron_codegen::cuda::{Arch, CudaTarget};
use deuteron_codegen::{Execution, Family, Kernel, Launch, LibraryCall, LibraryEpilogue, MatmulShape, Source};
use deuteron_graph::{Dtype, Graph};
use deuteron_matmul::library::{LibraryFamily, fit};
use deuteron_plan::{Catalog, Draft, Machine, Plan, Strategy, Structure, Target, Work, plan, primitive_work};

/// Row kernels, and products as a library has them.
struct LibraryProducts;

impl Catalog for LibraryProducts {
    fn offers_structure(&self, structure: &Structure) -> bool {
        matches!(structure, Structure::Row | Structure::Copy | Structure::ScatterAdd) || structure.is_matmul()
    }

    fn offers(&self, draft: &Draft) -> bool {
        !draft.structure.is_matmul() && self.offers_structure(draft.structure) || fit(draft).is_some()
    }

    fn offers_everything(&self) -> bool {
        false
    }

    fn work(&self, draft: &Draft) -> Work {
        primitive_work(draft)
    }
}

fn planned(text: &str, strategy: Strategy) -> (Graph, Plan) {
    let graph: Graph = text.parse().unwrap_or_else(|error| panic!("{error}\n{text}"));
    let machine = Machine::profile("h200").unwrap();
    let plan = plan(&graph, Target { machine: &machine, catalog: &LibraryProducts }, strategy, &[]).unwrap();
    (graph, plan)
}

/// The kernel of a group that the library has, whether it is predicted to be faster than others or not.
fn library(group: Draft) -> Kernel {
    let target = CudaTarget::new(Arch::Sm90a, 132);
    LibraryFamily.offer(group.into(), &target).expect("a product of the library").kernel()
}

/// Kernels of a plan, and the products among them.
fn kernels(text: &str, strategy: Strategy) -> (usize, Vec<(LibraryCall, Launch)>) {
    let (graph, plan) = planned(text, strategy);
    let products = plan.groups.iter().filter(|group| group.structure.is_matmul()).map(|group| {
        let kernel = library(group.draft(&graph, &plan.placement));
        let Source::Library(call) = kernel.source else { panic!("{kernel:?}") };
        (call, kernel.launch)
    });
    (plan.groups.len(), products.collect())
}

/// In every storage type and under every strategy that merges calls, a graph is one product with this epilogue.
#[track_caller]
fn is_one(text: &str, expected: LibraryEpilogue) {
    is_one_in(&[("f32", Dtype::F32), ("f16", Dtype::F16), ("bf16", Dtype::Bf16)], text, expected);
}

#[track_caller]
fn is_one_in(types: &[(&str, Dtype)], text: &str, expected: LibraryEpilogue) {
    for &(word, dtype) in types {
        for strategy in [Strategy::Greedy, Strategy::Fused] {
            let text = text.replace("T[", &format!("{word}["));
            let (count, products) = kernels(&text, strategy);
            let found: Vec<LibraryCall> = products.iter().map(|(kernel, _)| *kernel).collect();
            assert_eq!((count, found), (1, vec![LibraryCall { dtype, epilogue: expected }]), "{strategy}: {text}");
        }
    }
}

/// In no storage type is a graph one kernel.
#[track_caller]
fn is_several(text: &str) {
    for word in ["f32", "f16", "bf16"] {
        for strategy in [Strategy::Unfused, Strategy::Greedy, Strategy::Fused] {
            let text = text.replace("T[", &format!("{word}["));
            assert!(kernels(&text, strategy).0 > 1, "{strategy}: {text}");
        }
    }
}

const OPERANDS: &str = "x = input T[64,32] ; w = weight T[32,48] ; b = weight T[48] ; r = input T[64,48] ;";

#[test]
fn a_product_alone() {
    is_one(&format!("{OPERANDS} y = matmul x w ; out y"), LibraryEpilogue::None);
}

#[test]
fn a_bias_along_the_columns() {
    is_one(&format!("{OPERANDS} y = linear x w b ; out y"), LibraryEpilogue::Bias);
    is_one(&format!("{OPERANDS} p = matmul x w ; y = add b p ; out y"), LibraryEpilogue::Bias);
    is_one(
        "x = input T[4,16,32] ; w = weight T[32,48] ; b = weight T[48] ; y = linear x w b ; out y",
        LibraryEpilogue::Bias,
    );
}

#[test]
fn a_linear_layer_is_one_kernel_a_call() {
    for word in ["f32", "bf16"] {
        let text = format!("{OPERANDS} y = linear x w b ; z = gelu y ; out z").replace("T[", &format!("{word}["));
        for strategy in [Strategy::Eager, Strategy::Unfused] {
            let (count, products) = kernels(&text, strategy);
            assert_eq!((count, products[0].0.epilogue), (2, LibraryEpilogue::Bias), "{strategy} {word}");
        }
    }
}

#[test]
fn gelu_in_its_tanh_form_where_the_librarys_is_good_enough() {
    let bf16 = [("bf16", Dtype::Bf16)];
    is_one_in(&bf16, &format!("{OPERANDS} y = linear x w b ; z = gelu y ; out z"), LibraryEpilogue::BiasGelu);
    is_one_in(&bf16, &format!("{OPERANDS} y = matmul x w ; z = gelu y ; out z"), LibraryEpilogue::Gelu);
    for word in ["f32", "f16"] {
        let text = format!("{OPERANDS} y = linear x w b ; z = gelu y ; out z").replace("T[", &format!("{word}["));
        let (count, products) = kernels(&text, Strategy::Greedy);
        assert_eq!((count, products[0].0.epilogue), (2, LibraryEpilogue::Bias), "{word}");
    }
}

#[test]
fn a_residual_of_the_same_shape() {
    is_one(&format!("{OPERANDS} p = matmul x w ; y = add r p ; out y"), LibraryEpilogue::Residual);
    is_one(&format!("{OPERANDS} p = linear x w b ; y = add p r ; out y"), LibraryEpilogue::BiasResidual);
    // The first operand itself may be what is added.
    is_one(
        "x = input T[64,32] ; w = weight T[32,32] ; p = matmul x w ; y = add x p ; out y",
        LibraryEpilogue::Residual,
    );
}

#[test]
fn batches_have_epilogues_too() {
    let batch = "q = input T[2,3,16,8] ; k = input T[2,3,8,24] ; r = input T[2,3,16,24] ; b = weight T[24] ;";
    is_one(&format!("{batch} p = matmul q k ; y = add p b ; z = add y r ; out z"), LibraryEpilogue::BiasResidual);
}

#[test]
fn near_misses_stay_apart() {
    // Another GELU, another activation, a residual after GELU, two residuals, GELU twice.
    is_several(&format!("{OPERANDS} y = linear x w b ; z = gelu y kind=erf ; out z"));
    is_several(&format!("{OPERANDS} y = linear x w b ; z = silu y ; out z"));
    is_several(&format!("{OPERANDS} y = linear x w b ; z = gelu y ; v = add z r ; out v"));
    is_several(&format!("{OPERANDS} y = linear x w b ; z = add y r ; v = gelu z ; out v"));
    is_several(&format!("{OPERANDS} y = matmul x w ; z = add y r ; s = input T[64,48] ; v = add z s ; out v"));
    // Values that leave, or are used twice.
    is_several(&format!("{OPERANDS} y = linear x w b ; z = gelu y ; out y z"));
    is_several(&format!("{OPERANDS} p = matmul x w ; y = add p p ; out y"));
    is_several(&format!("{OPERANDS} p = matmul x w ; y = sub p r ; out y"));
    is_several(&format!("{OPERANDS} p = matmul x w ; y = mul p b ; out y"));
    // A number per row, one number, a residual that repeats or lies in another order.
    is_several(&format!("{OPERANDS} c = input T[64,1] ; p = matmul x w ; y = add p c ; out y"));
    is_several(&format!("{OPERANDS} c = input T[1] ; p = matmul x w ; y = add p c ; out y"));
    let batch = "q = input T[2,16,8] ; k = input T[2,8,16] ;";
    is_several(&format!("{batch} r = input T[16,16] ; p = matmul q k ; y = add p r ; out y"));
    is_several(&format!(
        "{batch} r = input T[16,2,16] ; t = transpose r [1,0,2] ; p = matmul q k ; y = add p t ; out y"
    ));
}

#[test]
fn another_type_is_another_kernel() {
    // The sum in f32 is stored in f32; a bias of f32 is no bias of a bf16 product.
    is_apart(
        "x = input bf16[64,32] ; w = weight bf16[32,48] ; p = matmul x w ; f = cast p f32 ; r = input f32[64,48]
y = add f r ; out y",
    );
    is_apart(
        "x = input bf16[64,32] ; w = weight bf16[32,48] ; p = matmul x w ; f = cast p f32 ; b = weight f32[48]
y = add f b ; z = cast y bf16 ; out z",
    );
}

#[track_caller]
fn is_apart(text: &str) {
    assert!(kernels(text, Strategy::Greedy).0 > 1, "{text}");
}

#[test]
fn arguments_stand_in_the_order_of_the_operands() {
    let text =
        "x = input bf16[2,16,32] ; w = weight bf16[32,48] ; h = input bf16[96] ; b = slice h axis=0 start=48 length=48
r = input bf16[2,16,48] ; p = linear x w b ; y = add r p ; out y";
    let (graph, plan) = planned(text, Strategy::Fused);
    assert_eq!(plan.groups.len(), 1, "{plan}");
    let launch = library(plan.groups[0].draft(&graph, &plan.placement)).launch;
    let Execution::Library(library) = launch.execution() else { panic!("{launch:?}") };
    let inputs: Vec<usize> = graph.inputs().iter().map(|id| id.index()).collect();
    assert_eq!(launch.arguments().len(), library.offsets.len());
    let args = launch.arguments().iter().zip(&library.offsets);
    let args: Vec<(usize, usize, bool)> = args.map(|(arg, &offset)| (arg.base.index(), offset, arg.written)).collect();
    let result = graph.outputs()[0].node.index();
    let [x, w, h, r] = inputs[..] else { panic!("{inputs:?}") };
    assert_eq!(args, [(x, 0, false), (w, 0, false), (h, 48, false), (r, 0, false), (result, 0, true)]);
    let shape = MatmulShape { m: 32, n: 48, k: 32, batch: vec![], a: (32, 1), b: (48, 1), c: (48, 1) };
    assert_eq!(library.shape, shape);
}

#[test]
fn the_source_says_what_follows_the_product() {
    let name = |epilogue| Source::Library(LibraryCall { dtype: Dtype::Bf16, epilogue }).to_string();
    assert_eq!(name(LibraryEpilogue::None), "matrix product, bf16 in and out, f32 sums (library kernel)\n");
    assert_eq!(
        name(LibraryEpilogue::BiasGelu),
        "matrix product + bias + gelu, bf16 in and out, f32 sums (library kernel)\n"
    );
}
