//! What the user named: a graph.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;
use deuteron::analyze::{Knob, Variants};
use deuteron::onnx::TensorData;
use deuteron::{Dtype, ExpertSizes, FusedOp, Graph};
use deuteron_gpt2::{Config, Options, Weights};

use crate::onnx_file::OnnxFile;
use crate::stored_file::text_of;

/// Which graph, and how large.
#[derive(Args)]
pub struct GraphArguments {
    /// gpt2, gpt2-medium, gpt2-large, gpt2-xl, each also with -block; an op of the catalogue, with attributes in quotes: "moe
    /// weighted=true"; a text file; an .onnx file
    graph: String,
    /// Sequences [default: 1]; of an ONNX file its batch
    #[arg(long)]
    batch: Option<usize>,
    /// Tokens per sequence [default: 1024]; of an ONNX file its open sequence [default: 128]
    #[arg(long)]
    seq: Option<usize>,
    /// Rows of an op of the catalogue
    #[arg(long, default_value_t = 1024)]
    rows: usize,
    /// Columns of an op of the catalogue
    #[arg(long, default_value_t = 768)]
    cols: usize,
    #[command(flatten)]
    experts: ExpertArguments,
    /// f32, f16 or bf16; of a model also int8, its weights as bytes [default: f32]; an ONNX file is converted [default: its own]
    #[arg(long)]
    dtype: Option<String>,
    /// Gradients too: of all weights of a model, of all operands of an op
    #[arg(long)]
    pub backward: bool,
    /// Size of a dimension that an ONNX file leaves open: name=value; again for more
    #[arg(long = "dim", value_name = "NAME=VALUE")]
    dims: Vec<String>,
}

/// Experts that ops of the catalogue route rows to.
#[derive(Args)]
pub struct ExpertArguments {
    /// Experts of ops that route rows to them
    #[arg(long, default_value_t = ExpertSizes::default().count)]
    experts: usize,
    /// Experts of each row, where their results are weighted
    #[arg(long, default_value_t = ExpertSizes::default().choices)]
    choices: usize,
}

impl ExpertArguments {
    /// As sizes of operands.
    pub fn sizes(&self) -> Result<ExpertSizes> {
        let &ExpertArguments { experts: count, choices } = self;
        if count == 0 || choices == 0 {
            bail!("expected --experts and --choices from 1; got {count} and {choices}");
        }
        Ok(ExpertSizes { count, choices, columns: None })
    }
}

/// A graph, and what its import had to say.
pub struct Loaded {
    pub graph: Graph,
    pub notes: Vec<String>,
    /// The file, if it is one of ONNX.
    pub onnx: Option<OnnxFile>,
}

/// Sizes that a graph is built for.
#[derive(Clone, Copy)]
struct Sizes {
    batch: usize,
    sequence: usize,
    hidden: Option<usize>,
    rows: usize,
    cols: usize,
}

impl GraphArguments {
    /// The graph the user named.
    pub fn graph(&self) -> Result<Graph> {
        Ok(self.load()?.graph)
    }

    /// The graph the user named, with the notes of its import.
    pub fn load(&self) -> Result<Loaded> {
        self.load_with(Vec::new())
    }

    /// The same, with values of inputs if it is an ONNX file.
    pub fn load_with(&self, inputs: Vec<(String, TensorData)>) -> Result<Loaded> {
        if self.batch == Some(0) {
            bail!("--batch must be at least 1");
        }
        let is_onnx = self.is_onnx();
        if !is_onnx && !self.dims.is_empty() {
            bail!("--dim is for .onnx files; `{}` is none", self.graph);
        }
        if is_onnx {
            return self.onnx(inputs);
        }
        if Path::new(&self.graph).is_file() {
            return Ok(Loaded { graph: self.file()?, notes: Vec::new(), onnx: None });
        }
        Ok(Loaded { graph: self.built(self.sizes())?, notes: Vec::new(), onnx: None })
    }

    /// The model, if a whole one was named to be run forward: with its sequences, their tokens and how weights are kept.
    pub fn model(&self) -> Result<Option<(Config, usize, usize, Weights)>> {
        match Config::find(&self.graph) {
            Ok(config) if !self.backward && !Path::new(&self.graph).is_file() => {
                Ok(Some((config, self.sizes().batch, self.sizes().sequence, self.dtype().parse()?)))
            }
            _ => Ok(None),
        }
    }

    fn sizes(&self) -> Sizes {
        let (batch, sequence) = (self.batch.unwrap_or(1), self.seq.unwrap_or(1024));
        Sizes { batch, sequence, hidden: None, rows: self.rows, cols: self.cols }
    }

    fn dtype(&self) -> &str {
        self.dtype.as_deref().unwrap_or("f32")
    }

    /// Whether an ONNX file was named.
    pub fn is_onnx(&self) -> bool {
        self.graph.ends_with(".onnx")
    }

    /// What the user named.
    pub fn name(&self) -> &str {
        &self.graph
    }

    /// A model of ours or an op of the catalogue.
    fn built(&self, sizes: Sizes) -> Result<Graph> {
        let options = || -> Result<Options> {
            let weights: Weights = self.dtype().parse()?;
            Ok(Options { batch: sizes.batch, sequence: sizes.sequence, weights, backward: self.backward })
        };
        let resized = |config: Config| match sizes.hidden {
            // Heads keep their 64 features.
            Some(hidden) => Config { hidden, heads: (hidden / config.head()).max(1), ..config },
            None => config,
        };
        if let Some(size) = self.graph.strip_suffix("-block") {
            return Ok(deuteron_gpt2::block(&resized(Config::find(size)?), &options()?)?);
        }
        if let Ok(config) = Config::find(&self.graph) {
            return Ok(deuteron_gpt2::model(&resized(config), &options()?)?);
        }
        match self.graph.parse::<FusedOp>() {
            Ok(op) => {
                let usual = deuteron::Sizes::new(sizes.rows, sizes.cols, float(self.dtype())?);
                let types = op.operand_types_of(&deuteron::Sizes { experts: self.experts.sizes()?, ..usual });
                Ok(if self.backward { op.backward_graph(&types)? } else { op.graph(&types)? })
            }
            Err(error) => bail!(
                "`{}` is no file and no graph we know; models: gpt2, gpt2-medium, gpt2-large, gpt2-xl, each also with \
                 -block; {error}",
                self.graph
            ),
        }
    }

    fn onnx(&self, inputs: Vec<(String, TensorData)>) -> Result<Loaded> {
        let dtype = self.dtype.as_deref().map(float).transpose()?;
        let mut options =
            deuteron::onnx::Options { batch: self.batch, sequence: self.seq, dtype, ..Default::default() };
        for dim in &self.dims {
            let parsed = dim.split_once('=').and_then(|(name, value)| Some((name, value.parse::<usize>().ok()?)));
            let Some((name, value)) = parsed else {
                bail!("--dim: expected NAME=VALUE with a whole number, got `{dim}`");
            };
            options = options.with_dim(name, value);
        }
        let file = OnnxFile::load(Path::new(&self.graph), options, inputs)?;
        let mut graph = self.with_gradients(file.imported.graph.clone())?;
        if graph.name().is_empty() {
            graph.set_name(&self.stem());
        }
        Ok(Loaded { graph, notes: file.notes(), onnx: Some(file) })
    }

    fn file(&self) -> Result<Graph> {
        let text = text_file(Path::new(&self.graph))?;
        let mut graph: Graph = text.parse().with_context(|| self.graph.clone())?;
        if graph.name().is_empty() {
            graph.set_name(&self.stem());
        }
        self.with_gradients(graph)
    }

    fn stem(&self) -> String {
        Path::new(&self.graph).file_stem().unwrap_or_default().to_string_lossy().into_owned()
    }

    fn with_gradients(&self, graph: Graph) -> Result<Graph> {
        if !self.backward {
            return Ok(graph);
        }
        let wrt: Vec<_> = graph.inputs().iter().filter(|&&id| graph.node(id).dtype.is_float()).copied().collect();
        Ok(deuteron::differentiate(&graph, &wrt)?.graph)
    }
}

/// Bytes of the longest text file that is read: a graph of a million nodes has some ten million.
const LONGEST_TEXT: u64 = 1 << 28;

/// A text file that the user names.
pub fn text_file(path: &Path) -> Result<String> {
    text_of(path, LONGEST_TEXT).with_context(|| format!("cannot read {}", path.display()))
}

/// What `--flip` turns.
impl Variants for GraphArguments {
    fn knobs(&self) -> Vec<Knob> {
        if Path::new(&self.graph).is_file() {
            return Vec::new();
        }
        let config = Config::find(self.graph.strip_suffix("-block").unwrap_or(&self.graph));
        match config {
            Ok(config) => vec![
                Knob::doubling("batch", self.sizes().batch, 256),
                Knob::doubling("sequence", self.sizes().sequence, config.context),
                Knob {
                    name: "hidden",
                    now: config.hidden,
                    values: [64, 128, 256, 512, 1024, 2048, 4096, 8192]
                        .into_iter()
                        .filter(|&h| h != config.hidden)
                        .collect(),
                },
            ],
            Err(_) => vec![Knob::doubling("rows", self.rows, 1 << 20), Knob::doubling("cols", self.cols, 1 << 16)],
        }
    }

    fn at(&self, knob: &str, value: usize) -> Option<Graph> {
        let mut sizes = self.sizes();
        match knob {
            "batch" => sizes.batch = value,
            "sequence" => sizes.sequence = value,
            "hidden" => sizes.hidden = Some(value),
            "rows" => sizes.rows = value,
            "cols" => sizes.cols = value,
            _ => return None,
        }
        self.built(sizes).ok()
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
