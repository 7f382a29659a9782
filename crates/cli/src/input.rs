//! What the user named: a device, a graph.

use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use clap::Args;
use deuteron::{Cpu, Dtype, Engine, FusedOp, Graph, Isa};
use deuteron_gpt2::{Config, Options};

/// Where to run.
#[derive(Args)]
pub struct DeviceArguments {
    /// auto or cpu
    #[arg(long, default_value = "auto")]
    device: String,
    /// Threads to use on the CPU [default: all cores]
    #[arg(long)]
    threads: Option<usize>,
}

impl DeviceArguments {
    pub fn engine(&self) -> Result<Engine> {
        match self.device.as_str() {
            "auto" | "cpu" => {}
            "cuda" => bail!("device `cuda`: this version runs on the CPU; use --device auto or --device cpu"),
            other => bail!("unknown device `{other}`; expected auto or cpu"),
        }
        let all = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = self.threads.unwrap_or(all);
        if threads == 0 || threads > 1024 {
            bail!("--threads must be from 1 to 1024, got {threads}");
        }
        Ok(Engine::on(Arc::new(Cpu::with(threads, Isa::detect()))))
    }
}

/// Which graph, and how large.
#[derive(Args)]
pub struct GraphArguments {
    /// gpt2, gpt2-medium, gpt2-large, gpt2-xl, gpt2-block, an op of the catalogue, or a text file
    graph: String,
    /// Sequences
    #[arg(long, default_value_t = 1)]
    batch: usize,
    /// Tokens a sequence
    #[arg(long, default_value_t = 1024)]
    seq: usize,
    /// Rows of an op of the catalogue
    #[arg(long, default_value_t = 1024)]
    rows: usize,
    /// Columns of an op of the catalogue
    #[arg(long, default_value_t = 768)]
    cols: usize,
    /// f32, f16 or bf16
    #[arg(long, default_value = "f32")]
    dtype: String,
    /// Gradients too: of all weights of a model, of all operands of an op
    #[arg(long)]
    pub backward: bool,
}

impl GraphArguments {
    pub fn graph(&self) -> Result<Graph> {
        let options =
            Options { batch: self.batch, sequence: self.seq, dtype: float(&self.dtype)?, backward: self.backward };
        if self.batch == 0 {
            bail!("--batch must be at least 1");
        }
        if let Some(size) = self.graph.strip_suffix("-block") {
            return Ok(deuteron_gpt2::block(&Config::find(size)?, &options)?);
        }
        if let Ok(config) = Config::find(&self.graph) {
            return Ok(deuteron_gpt2::model(&config, &options)?);
        }
        if self.graph.ends_with(".onnx") {
            bail!("{}: ONNX files are not read by this version; write the graph in text form", self.graph);
        }
        if Path::new(&self.graph).is_file() {
            return self.file();
        }
        match FusedOp::find(&self.graph) {
            Ok(op) => self.op(&op, options.dtype),
            Err(error) => bail!(
                "`{}` is no file and no graph we know; models: gpt2, gpt2-medium, gpt2-large, gpt2-xl, each also with \
                 -block; {error}",
                self.graph
            ),
        }
    }

    fn op(&self, op: &FusedOp, dtype: Dtype) -> Result<Graph> {
        let types = op.operand_types(self.rows, self.cols, dtype);
        Ok(if self.backward { op.backward_graph(&types)? } else { op.graph(&types)? })
    }

    fn file(&self) -> Result<Graph> {
        let text = std::fs::read_to_string(&self.graph).with_context(|| format!("cannot read {}", self.graph))?;
        let mut graph: Graph = text.parse().with_context(|| self.graph.clone())?;
        if graph.name().is_empty() {
            let stem = Path::new(&self.graph).file_stem().unwrap_or_default().to_string_lossy();
            graph.set_name(&stem);
        }
        if !self.backward {
            return Ok(graph);
        }
        let wrt: Vec<_> = graph.inputs().iter().filter(|&&id| graph.node(id).dtype.is_float()).copied().collect();
        Ok(deuteron::differentiate(&graph, &wrt)?.graph)
    }
}

/// A dtype that arithmetic works on.
pub fn float(name: &str) -> Result<Dtype> {
    let dtype: Dtype = name.parse()?;
    if !dtype.is_float() {
        bail!("--dtype must be f32, f16 or bf16, got {dtype}");
    }
    Ok(dtype)
}
