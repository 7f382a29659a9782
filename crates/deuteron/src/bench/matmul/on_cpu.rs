//! The ladder of a matmul on a CPU: `gelu(x w)` in f32, from three loops to the shipped kernel, which has GELU as its epilogue.

use std::sync::Arc;

use deuteron_codegen::Kernel;
use deuteron_codegen::cpu::simd::Isa;
use deuteron_device::Cpu;
use deuteron_graph::{Dtype, Graph};
use deuteron_kernels::ladder::cpu::{Step, scalar};
use deuteron_kernels::render;
use deuteron_plan::{Draft, Quantity, Strategy, Structure, plan};

use super::super::ladder::{Check, RungText, text_of, worst_of};
use super::super::microseconds;
use super::super::turns::in_turn;
use super::ladder::{CHECKED_WEIGHTS, MatmulRung, MatmulRungCheck};
use super::{CHECKED_ROWS, MatmulCase, MatmulEpilogue, tflops};
use crate::engine::Engine;
use crate::error::Error;
use crate::seed;
use crate::session::{Session, SessionOptions};

/// A rung: its threads, and what is not generated.
struct Rung {
    name: &'static str,
    about: String,
    engine: Engine,
    strategy: Strategy,
    /// a matmul in place of the generated one
    matmul: Option<Step>,
    /// whether GELU is computed one element at a time
    scalar_gelu: bool,
}

/// The rungs, from three loops to the shipped kernel.
fn rungs(engine: &Engine) -> [Rung; 6] {
    let isa = Isa::detect();
    let rung = |name, about: &str, engine: &Engine, matmul| Rung {
        name,
        about: about.to_string(),
        engine: engine.clone(),
        strategy: Strategy::Unfused,
        matmul,
        scalar_gelu: false,
    };
    let alone = Engine::on(Arc::new(Cpu::with(1, isa)));
    let scalar = "three loops, then GELU, one element at a time, one thread";
    let tiled = "blocks of the weight that stay in the L1 cache, 4 x 4 sums in registers; GELU by vectors";
    let vectors = format!("the same blocks with vectors of {}", isa.name());
    let packed = "the weight packed in the order in which it is read, more sums in registers";
    let fused = "one kernel: GELU on blocks of sums that are still in the cache (shipped)";
    [
        Rung { scalar_gelu: true, ..rung("l1_scalar", scalar, &alone, Some(Step::Scalar)) },
        rung("l2_tiled", tiled, &alone, Some(Step::Tiled)),
        rung("l3_vectors", &vectors, &alone, Some(Step::Vectors)),
        rung("l4_packed", packed, &alone, None),
        rung("l5_threads", "parts of the result on all threads", engine, None),
        Rung { strategy: Strategy::Greedy, ..rung("l6_fused", fused, engine, None) },
    ]
}

impl Rung {
    fn session(&self, graph: &Graph) -> Result<Session, Error> {
        let device = self.engine.device();
        let plan = plan(graph, device.target(), self.strategy, &[])?;
        let kernel = |draft: Draft<'_>| -> Result<Kernel, Error> {
            let own = match (draft.structure, self.matmul) {
                (Structure::Row, _) => {
                    if self.scalar_gelu {
                        scalar(&draft)
                    } else {
                        None
                    }
                }
                (_, Some(step)) => step.kernel(&draft),
                (_, None) => None,
            };
            match own {
                Some(kernel) => Ok(kernel),
                None => Ok(render(draft, device.backend())?),
            }
        };
        let kernels = plan.groups.iter().map(|group| kernel(group.draft(graph, &plan.placement)));
        let kernels = kernels.collect::<Result<Vec<_>, _>>()?;
        Session::new(&self.engine, graph, SessionOptions::from(self.strategy).kernels(kernels))
    }

    /// How many kernels and threads it has.
    fn variant(&self, session: &Session) -> String {
        let many = |count: usize, what: &str| format!("{count} {what}{}", if count == 1 { "" } else { "s" });
        let threads = self.engine.device().machine().count(Quantity::Processors);
        format!("{}, {}", many(session.plan().groups.len(), "kernel"), many(threads, "thread"))
    }
}

/// The graph of a case, if there is a ladder of it.
fn graph(case: &MatmulCase) -> Result<Graph, Error> {
    let &MatmulCase { rows, inner, columns, transposed, epilogue, dtype } = case;
    let got = match (transposed, epilogue, dtype) {
        (true, ..) => "weights that lie transposed".to_string(),
        (false, MatmulEpilogue::None, Dtype::F32) => {
            let matmul = format!("x = input f32[{rows},{inner}] ; y = linear x w:f32[{inner},{columns}]");
            return Ok(format!("{matmul} ; z = gelu y ; out z").parse()?);
        }
        (false, MatmulEpilogue::None, dtype) => dtype.to_string(),
        (false, epilogue, _) => format!("the epilogue {}", epilogue.name()),
    };
    Err(Error::NoMatmulLadder { got })
}

/// Checks every rung at few rows and at odd sizes, and times it in turn with the others.
pub(super) fn ladder(engine: &Engine, case: &MatmulCase) -> Result<Vec<MatmulRung>, Error> {
    let large = graph(case)?;
    let (inner, columns) = CHECKED_WEIGHTS;
    let few = MatmulCase { rows: CHECKED_ROWS, ..*case };
    let checks = [Check::of(graph(&few)?)?, Check::of(graph(&MatmulCase { inner, columns, ..few })?)?];
    let rungs = rungs(engine);
    let (mut ratios, mut sessions) = (Vec::new(), Vec::new());
    for rung in &rungs {
        ratios.push(worst_of(&checks, |graph| rung.session(graph))?);
        sessions.push(rung.session(&large)?);
    }
    let turns = in_turn(engine, &mut sessions, &seed::inputs(&large, 1)?)?;
    let times: Vec<f64> = turns.times.into_iter().map(microseconds).collect();
    let row = |index: usize| MatmulRung {
        rows: case.rows,
        inner: case.inner,
        columns: case.columns,
        dtype: case.dtype.to_string(),
        device: engine.device().describe(),
        rung: rungs[index].name.to_string(),
        about: rungs[index].about.clone(),
        variant: rungs[index].variant(&sessions[index]),
        chosen: index + 1 == rungs.len(),
        verified: ratios[index] <= 1.0,
        worst_ratio: ratios[index],
        us: times[index],
        tflops: tflops(case, times[index]),
        speedup: times[0] / times[index].max(1e-6),
        over_library: None,
        registers: None,
    };
    Ok((0..rungs.len()).map(row).collect())
}

/// Runs every rung once, at the requested sizes.
pub(super) fn check(engine: &Engine, case: &MatmulCase) -> Result<Vec<MatmulRungCheck>, Error> {
    let check = Check::of(graph(case)?)?;
    let run = |rung: &Rung| {
        let worst_ratio = check.worst_ratio(rung.session(&check.graph)?)?;
        Ok(MatmulRungCheck { rung: rung.name.to_string(), verified: worst_ratio <= 1.0, worst_ratio })
    };
    rungs(engine).iter().map(run).collect()
}

/// The kernels of every rung of a matmul on a CPU as text, without a run.
pub fn matmul_texts(engine: &Engine, case: &MatmulCase) -> Result<Vec<RungText>, Error> {
    let graph = graph(case)?;
    let text = |rung: &Rung| Ok(text_of(rung.name.to_string(), rung.about.clone(), &rung.session(&graph)?));
    rungs(engine).iter().map(text).collect()
}
