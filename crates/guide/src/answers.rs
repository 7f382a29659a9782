//! Checkers of numbers and graphs.

use deuteron::cuda::{Arch, CudaCatalog};
use deuteron::reference::{Array, Rounding, interpret};
use deuteron::{
    Dtype, Engine, Error, FusedOp, Graph, Heads, Machine, NodeId, Plan, Sizes, Strategy, Target, Tensor, plan, seed,
};
use deuteron_gpt2::{Config, Options, Weights};
use half::f16;

use crate::Verdict;

/// Sizes of attention in the guide: eight sequences of 1024 positions, 12 heads of 64.
const SEQUENCES: usize = 8;
const POSITIONS: usize = 1024;
const HEADS: usize = 12;
const WIDTH: usize = 64;

pub fn fused_bytes() -> Result<Right, Error> {
    let plan = cpu_plan(&op("add_act", 2000, Dtype::Bf16)?, Strategy::Greedy)?;
    Ok(Right::new(plan.bytes().0, "the kernel reads x and r and writes y, once each; an element of bf16 has 2 bytes"))
}

pub fn unfused_bytes() -> Result<Right, Error> {
    let plan = cpu_plan(&op("add_act", 2000, Dtype::Bf16)?, Strategy::Unfused)?;
    Ok(Right::new(plan.bytes().0, "one kernel writes the sum and the next reads it: two more tensors"))
}

pub fn three_inputs(answer: &str) -> Result<Verdict, Error> {
    let model: Graph = "x = input f32[256,768] ; r = input f32[256,768] ; s = input f32[256,768]
        a = add x r ; b = add a s ; y = gelu b ; out y"
        .parse()?;
    let graph = match same_values(answer, &model)? {
        Ok(graph) => graph,
        Err(verdict) => return Ok(verdict),
    };
    let kernels = cpu_plan(&graph, Strategy::Fused)?.groups.len();
    Ok(one_kernel(kernels))
}

pub fn eager_attention_bytes() -> Result<Right, Error> {
    let bytes = h200_plan(&attention("attention")?, Strategy::Eager)?.bytes().0;
    Ok(Right::new(
        bytes,
        "`deuteron analyze attention --device h200 --rows 8192 --dtype bf16 --json` has it as plans.eager.bytes",
    ))
}

pub fn attention_flops() -> Result<Right, Error> {
    let pairs = SEQUENCES * HEADS * POSITIONS * (POSITIONS + 1) / 2;
    let hint = "query i sees i + 1 keys; each pair of query and key costs 64 multiplications and 64 additions for its score, and as many for its share of the values";
    Ok(Right::new((pairs * 4 * WIDTH) as u64, hint))
}

pub fn f16_overflow() -> Result<Right, Error> {
    let overflows = |c: &u32| f16::from_f32((WIDTH as u32 * c * c) as f32).is_infinite();
    let smallest = (1..).find(overflows).unwrap_or(u32::MAX);
    Ok(Right::new(smallest.into(), "the largest finite f16 is 65504"))
}

pub fn one_launch_bytes() -> Result<Right, Error> {
    let plan = h200_plan(&attention("attention_add_norm")?, Strategy::Greedy)?;
    let hint =
        "the kernel reads q, k, v, the residual and two vectors of weights, and writes the sum and the normalised rows";
    Ok(Right::new(plan.bytes().0, hint))
}

pub fn matmul_epilogue(answer: &str) -> Result<Verdict, Error> {
    // The values are compared at few rows: the f64 reference of the whole product takes long.
    let model: Graph = "x = input bf16[16,768] ; w = weight bf16[768,3072] ; b = weight bf16[3072]
        h = linear x w b ; y = gelu h ; out y"
        .parse()?;
    let whole: Graph = match answer.parse() {
        Ok(graph) => graph,
        Err(error) => return Ok(Verdict::wrong(format!("the graph cannot be read: {error}"))),
    };
    let rows = |id: &NodeId| {
        let node = whole.node(*id);
        node.dtype == Dtype::Bf16 && node.shape[..] == [8192, 768]
    };
    if !whole.inputs().iter().any(rows) {
        return Ok(Verdict::wrong("the left operand must be an input bf16[8192,768]"));
    }
    // As it is printed: without comments, and with sizes written in one way.
    let small = whole.to_string().replace("[8192,", "[16,");
    if let Err(verdict) = same_values(&small, &model)? {
        return Ok(verdict);
    }
    let plan = h200_plan(&whole, Strategy::Fused)?;
    Ok(one_kernel(plan.groups.len()))
}

pub fn gpt2_kernels() -> Result<Right, Error> {
    let options = Options { batch: SEQUENCES, sequence: POSITIONS, weights: Weights::Bf16, backward: false };
    let graph = deuteron_gpt2::model(&Config::SMALL, &options)?;
    let kernels = h200_plan(&graph, Strategy::Fused)?.groups.len();
    Ok(Right::new(
        kernels as u64,
        "the first line of `deuteron analyze gpt2 --device h200 --batch 8 --dtype bf16` has the number",
    ))
}

pub fn cache_bytes() -> Result<Right, Error> {
    let Config { layers, hidden, .. } = Config::SMALL;
    let bytes = 2 * layers * hidden * POSITIONS * Dtype::Bf16.bytes();
    Ok(Right::new(bytes as u64, "a key and a value of 768 features per token and layer, 2 bytes each, 12 layers"))
}

/// The right number, and how to derive it.
pub struct Right {
    value: u64,
    hint: &'static str,
}

impl Right {
    fn new(value: u64, hint: &'static str) -> Right {
        Right { value, hint }
    }

    /// Compares an answer with it.
    pub fn compare(&self, answer: &str) -> Verdict {
        let Right { value, hint } = self;
        let digits: String = answer.trim().chars().filter(|c| !matches!(c, '_' | ',' | ' ')).collect();
        match digits.parse::<f64>() {
            Ok(given) if given == *value as f64 => Verdict::right(format!("{hint}.")),
            Ok(given) if !given.is_finite() => {
                Verdict::wrong(format!("expected a finite number, got `{}`", answer.trim()))
            }
            Ok(given) => {
                let ratio = given / *value as f64;
                let distance = match (ratio - 1.0).abs() < 5e-4 {
                    true => "close to the right number, but not equal".to_string(),
                    false => format!("{ratio:.3} times the right number"),
                };
                Verdict::wrong(format!("{given} is {distance}. {}.", capital(hint)))
            }
            Err(_) => Verdict::wrong(format!("expected a number, got `{}`", answer.trim())),
        }
    }
}

fn capital(text: &str) -> String {
    let mut rest = text.chars();
    rest.next().map_or(String::new(), |first| first.to_uppercase().chain(rest).collect())
}

fn one_kernel(kernels: usize) -> Verdict {
    match kernels {
        1 => Verdict::right("the values are right, and it is one kernel."),
        more => {
            Verdict::wrong(format!("the values are right, but the plan has {more} kernels; the exercise asks for one"))
        }
    }
}

/// The graph of an answer, if it has the inputs of the model answer and computes its values in f64.
fn same_values(answer: &str, model: &Graph) -> Result<Result<Graph, Verdict>, Error> {
    let graph: Graph = match answer.parse() {
        Ok(graph) => graph,
        Err(error) => return Ok(Err(Verdict::wrong(format!("the graph cannot be read: {error}")))),
    };
    let types = |graph: &Graph| -> Vec<String> {
        let mut types: Vec<String> =
            graph.inputs().iter().map(|&id| format!("{}{}", graph.node(id).dtype, graph.node(id).shape)).collect();
        types.sort();
        types
    };
    if types(&graph) != types(model) || graph.outputs().len() != model.outputs().len() {
        let (expected, got) = (types(model).join(", "), types(&graph).join(", "));
        let outputs = model.outputs().len();
        return Ok(Err(Verdict::wrong(format!("expected inputs {expected} and {outputs} output, got {got}"))));
    }
    let tensors = seed::inputs(model, 1)?;
    let arrays = tensors.iter().map(Tensor::to_array).collect::<Result<Vec<Array>, _>>()?;
    let by_type = |graph: &Graph| -> Vec<Array> {
        let mut left: Vec<(String, &Array)> = model
            .inputs()
            .iter()
            .zip(&arrays)
            .map(|(&id, array)| (format!("{}{}", model.node(id).dtype, model.node(id).shape), array))
            .collect();
        let wanted = graph.inputs().iter().map(|&id| format!("{}{}", graph.node(id).dtype, graph.node(id).shape));
        wanted
            .filter_map(|name| left.iter().position(|(other, _)| *other == name).map(|at| left.remove(at).1.clone()))
            .collect()
    };
    let values = |graph: &Graph| interpret(graph, &by_type(graph), Rounding::Exact).map(|run| run.outputs);
    let (got, expected) = (values(&graph)?, values(model)?);
    let near = |a: &Array, b: &Array| {
        a.shape == b.shape && a.values.iter().zip(&b.values).all(|(a, b)| (a - b).abs() <= 1e-9 * b.abs().max(1.0))
    };
    match got.iter().zip(&expected).all(|(got, expected)| near(got, expected)) {
        true => Ok(Ok(graph)),
        false => Ok(Err(Verdict::wrong("the graph computes other values than those the exercise asks for"))),
    }
}

fn op(name: &str, rows: usize, dtype: Dtype) -> Result<Graph, Error> {
    let op = FusedOp::find(name)?;
    op.graph(&op.operand_types(rows, 768, dtype))
}

fn attention(name: &str) -> Result<Graph, Error> {
    let op = FusedOp::find(name)?;
    let heads = Heads { positions: POSITIONS, width: WIDTH };
    let sizes = Sizes { heads, ..Sizes::new(SEQUENCES * POSITIONS, HEADS * WIDTH, Dtype::Bf16) };
    op.graph(&op.operand_types_of(&sizes))
}

fn cpu_plan(graph: &Graph, strategy: Strategy) -> Result<Plan, Error> {
    Ok(plan(graph, Engine::cpu().device().target(), strategy, &[])?)
}

fn h200_plan(graph: &Graph, strategy: Strategy) -> Result<Plan, Error> {
    let machine = Machine::profile("h200")?;
    Ok(plan(graph, Target { machine: &machine, catalog: CudaCatalog::of(Arch::Sm90a) }, strategy, &[])?)
}
