//! The graph that the user names.

use std::path::Path;

use anyhow::{Context, Result, bail};
use clap::Args;
use deuteron::analyze::{Knob, Variants};
use deuteron::onnx::TensorData;
use deuteron::presets::{Family, Preset, PresetSizes};
use deuteron::report::distance;
use deuteron::{Dtype, Engine, ExpertSizes, FusedOp, Graph, Heads, Tensor};
use deuteron_gpt2::{Checkpoint, Config, Options, Weights, upload};

use crate::onnx_file::OnnxFile;
use crate::stored_file::text_of;

/// Default tokens per sequence of an attention op, and of a GPT-2 with at least as many positions.
pub const GPT2_SEQUENCE: usize = 1024;

/// Which graph, and how large.
#[derive(Args)]
pub struct GraphArguments {
    /// gpt2, gpt2-medium, gpt2-large, gpt2-xl, box (the trained model in this command), bert, bert-large, vit, vit-large, t5-small, t5, t5-large, each also with -block; an op of the catalogue, with attributes in quotes: "moe
    /// weighted=true"; matmul, of [rows, cols] by [cols, 4 cols]; a text file; an .onnx file
    graph: String,
    /// Sequences per batch of a model [default: 1]; for an ONNX file, the batch size that it leaves open
    #[arg(long)]
    batch: Option<usize>,
    /// Tokens per sequence, of a model or an attention op [default: 1024; 512 for BERT and T5, 256 for box]; for an ONNX file, the sequence length that it leaves open [default: 128]
    #[arg(long)]
    seq: Option<usize>,
    /// Rows of an op of the catalogue [default: 1024]
    #[arg(long)]
    rows: Option<usize>,
    /// Columns of an op of the catalogue [default: 768]
    #[arg(long)]
    cols: Option<usize>,
    /// Number of experts of a routed op [default: 8]
    #[arg(long)]
    experts: Option<usize>,
    /// Experts per row, for ops with weighted results [default: 2]
    #[arg(long)]
    choices: Option<usize>,
    /// f32, f16 or bf16; int8 stores the weights of a GPT-2 as bytes [default: f32]; an ONNX file is converted [default: its own dtypes]
    #[arg(long)]
    dtype: Option<String>,
    /// Compute gradients too: for all weights of a model, or all operands of an op
    #[arg(long)]
    pub backward: bool,
    /// Size of a dimension that an ONNX file leaves open: name=value; may be repeated
    #[arg(long = "dim", value_name = "NAME=VALUE")]
    dims: Vec<String>,
}

/// Experts of routed ops of the catalogue.
#[derive(Args)]
pub struct ExpertArguments {
    /// Number of experts of routed ops
    #[arg(long, default_value_t = ExpertSizes::default().count)]
    experts: usize,
    /// Experts per row, where their results are weighted
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

/// A graph, with the notes of its import.
pub struct Loaded {
    pub graph: Graph,
    pub notes: Vec<String>,
    /// The file, if it is one of ONNX.
    pub onnx: Option<OnnxFile>,
}

/// What a user named.
enum Source {
    /// a file of another format
    Onnx,
    /// a file in text form
    Text,
    /// a GPT-2, or a block of one
    Model,
    /// another published model, or a block of one
    Preset(Preset),
    /// an op of the catalogue
    Op(FusedOp),
    /// a matrix product
    Matmul,
    /// unknown
    Unknown,
}

/// The graph of a matrix product, whose ladder has this name.
const MATMUL: &str = "matmul";

/// Flags that change the operands of an op.
fn flags_of(op: &FusedOp) -> Vec<&'static str> {
    let usual = deuteron::Sizes::new(64, 64, Dtype::F32);
    let types = |sizes: deuteron::Sizes| op.operand_types_of(&sizes);
    let changes = |sizes: deuteron::Sizes| types(sizes) != types(usual);
    let heads = Heads { positions: 16, ..usual.heads };
    let experts = [
        ExpertSizes { count: usual.experts.count + 1, ..usual.experts },
        ExpertSizes { choices: usual.experts.choices + 1, ..usual.experts },
    ];
    let mut flags = vec!["rows", "cols", "dtype"];
    if changes(deuteron::Sizes { heads, ..usual }) {
        flags.push("seq");
    }
    for (flag, experts) in ["experts", "choices"].into_iter().zip(experts) {
        if changes(deuteron::Sizes { experts, ..usual }) {
            flags.push(flag);
        }
    }
    flags
}

/// The names of all models.
fn models() -> impl Iterator<Item = &'static str> {
    let gpt2 = Config::ALL.iter().map(|config| config.name);
    gpt2.chain(Preset::ALL.iter().map(|preset| preset.name))
}

/// The graph whose name is nearest to a word.
fn nearest(word: &str) -> String {
    let blocks = models().flat_map(|name| [name.to_string(), format!("{name}-block")]);
    let ops = FusedOp::catalog().into_iter().map(|op| op.name().to_string());
    let all = blocks.chain(ops).chain([MATMUL.to_string()]);
    all.min_by_key(|name| distance(&word.to_ascii_lowercase(), name)).unwrap_or_default()
}

/// A dtype by our name or by that of other libraries.
pub fn dtype_word(word: &str) -> String {
    match word.to_ascii_lowercase().as_str() {
        "fp32" | "float32" | "float" => "f32".to_string(),
        "fp16" | "float16" | "half" => "f16".to_string(),
        "bfloat16" => "bf16".to_string(),
        other => other.to_string(),
    }
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
        self.refuse_zeros()?;
        let graph = match self.source() {
            Source::Onnx => {
                self.refuse_others("the ONNX file", &["dim", "batch", "seq", "dtype"])?;
                return self.onnx(inputs);
            }
            Source::Text => {
                self.refuse_others("a graph in text form, which says its own sizes:", &[])?;
                self.file()?
            }
            Source::Model => {
                self.refuse_others("the model", &["batch", "seq", "dtype"])?;
                self.built(self.sizes())?
            }
            Source::Preset(preset) => {
                let takes: &[&str] = match preset.family {
                    Family::Vit => &["batch", "dtype"],
                    Family::Bert | Family::T5 => &["batch", "seq", "dtype"],
                };
                self.refuse_others("the model", takes)?;
                self.built(self.sizes())?
            }
            Source::Op(op) => {
                self.refuse_others("the op", &flags_of(&op))?;
                if self.seq == Some(0) {
                    bail!("--seq must be at least 1, got 0");
                }
                self.built(self.sizes())?
            }
            Source::Matmul => {
                self.refuse_others("the matrix product", &["rows", "cols", "dtype"])?;
                self.built(self.sizes())?
            }
            Source::Unknown => self.built(self.sizes())?,
        };
        Ok(Loaded { graph, notes: Vec::new(), onnx: None })
    }

    /// Whether an op of the catalogue was named, or a matrix product.
    pub fn is_op(&self) -> bool {
        matches!(self.source(), Source::Op(_) | Source::Matmul)
    }

    /// As wide as the first matrix product of a feed-forward layer.
    fn matmul(&self, Sizes { rows, cols, .. }: Sizes) -> Result<Graph> {
        let (dtype, Some(columns)) = (float(&self.dtype())?, cols.checked_mul(4)) else {
            bail!("--cols: four times {cols} columns are more than there can be");
        };
        let text = format!(
            "graph {MATMUL} ; x = input {dtype}[{rows},{cols}] ; y = linear x w:{dtype}[{cols},{columns}] ; out y"
        );
        self.with_gradients(text.parse()?)
    }

    /// What the name stands for.
    fn source(&self) -> Source {
        if self.graph.to_ascii_lowercase().ends_with(".onnx") {
            return Source::Onnx;
        }
        if Path::new(&self.graph).is_file() {
            return Source::Text;
        }
        if let Some(preset) = self.preset() {
            return Source::Preset(preset);
        }
        match (self.gpt2(), self.graph.parse()) {
            (Some(_), _) => Source::Model,
            (None, Ok(op)) => Source::Op(op),
            (None, Err(_)) if self.graph == MATMUL => Source::Matmul,
            (None, Err(_)) => Source::Unknown,
        }
    }

    /// The GPT-2, or the one of which a block was named.
    fn gpt2(&self) -> Option<Config> {
        Config::find(self.graph.strip_suffix("-block").unwrap_or(&self.graph)).ok()
    }

    /// The preset model (not a GPT-2) that this name or its `-block` form stands for.
    fn preset(&self) -> Option<Preset> {
        Preset::find(self.graph.strip_suffix("-block").unwrap_or(&self.graph))
    }

    /// Flags that not every graph takes, and whether they were given.
    fn flags(&self) -> [(&'static str, bool); 8] {
        [
            ("batch", self.batch.is_some()),
            ("seq", self.seq.is_some()),
            ("rows", self.rows.is_some()),
            ("cols", self.cols.is_some()),
            ("experts", self.experts.is_some()),
            ("choices", self.choices.is_some()),
            ("dtype", self.dtype.is_some()),
            ("dim", !self.dims.is_empty()),
        ]
    }

    /// A flag that would do nothing is an error.
    fn refuse_others(&self, what: &str, takes: &[&str]) -> Result<()> {
        let Some((flag, _)) = self.flags().into_iter().find(|(flag, given)| *given && !takes.contains(flag)) else {
            return Ok(());
        };
        let all: Vec<String> = takes.iter().map(|flag| format!("--{flag}")).collect();
        let all = if all.is_empty() { "none of these flags".to_string() } else { all.join(", ") };
        bail!("--{flag} does nothing for {what} `{}`; it takes {all}", self.graph)
    }

    /// Sizes must be at least 1.
    fn refuse_zeros(&self) -> Result<()> {
        let sizes = [
            ("batch", self.batch),
            ("rows", self.rows),
            ("cols", self.cols),
            ("experts", self.experts),
            ("choices", self.choices),
        ];
        match sizes.into_iter().find(|(_, value)| *value == Some(0)) {
            Some((flag, _)) => bail!("--{flag} must be at least 1, got 0"),
            None => Ok(()),
        }
    }

    /// The trained weights of the graph, if it is the built-in model: its inputs after the tokens, in memory that the engine's kernels can read.
    pub fn trained(&self, engine: &Engine) -> Result<Vec<Tensor>> {
        match self.source() {
            Source::Model if self.graph == Config::BOX.name => {
                Ok(upload(engine, &Checkpoint::in_the_box()?, self.dtype().parse()?)?)
            }
            _ => Ok(Vec::new()),
        }
    }

    /// The model, if a whole one is to run forward: with its sequences, their tokens and the form of its weights.
    pub fn model(&self) -> Result<Option<(Config, usize, usize, Weights)>> {
        match Config::find(&self.graph) {
            Ok(config) if !self.backward && !Path::new(&self.graph).is_file() => {
                let sizes = self.sizes();
                Ok(Some((config, sizes.batch, sizes.sequence, self.dtype().parse()?)))
            }
            _ => Ok(None),
        }
    }

    fn sizes(&self) -> Sizes {
        Sizes {
            batch: self.batch.unwrap_or(1),
            sequence: self.seq.unwrap_or_else(|| self.usual_sequence()),
            hidden: None,
            rows: self.rows.unwrap_or(1024),
            cols: self.cols.unwrap_or(768),
        }
    }

    fn usual_sequence(&self) -> usize {
        match self.gpt2() {
            _ if self.preset().is_some() => Preset::USUAL_SEQUENCE,
            Some(config) => config.context.min(GPT2_SEQUENCE),
            None => GPT2_SEQUENCE,
        }
    }

    fn dtype(&self) -> String {
        dtype_word(self.dtype.as_deref().unwrap_or("f32"))
    }

    /// The types of an op's operands.
    fn operand_sizes(&self, sizes: Sizes) -> Result<deuteron::Sizes> {
        let usual = deuteron::Sizes::new(sizes.rows, sizes.cols, float(&self.dtype())?);
        let (count, choices) =
            (self.experts.unwrap_or(usual.experts.count), self.choices.unwrap_or(usual.experts.choices));
        Ok(deuteron::Sizes {
            heads: Heads { positions: sizes.sequence, ..usual.heads },
            experts: ExpertSizes { count, choices, columns: None },
            ..usual
        })
    }

    /// Whether an ONNX file was named.
    pub fn is_onnx(&self) -> bool {
        matches!(self.source(), Source::Onnx)
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
        if let Some(preset) = self.preset() {
            let sizes = PresetSizes { batch: sizes.batch, sequence: sizes.sequence, dtype: float(&self.dtype())? };
            let is_block = self.graph.ends_with("-block");
            return self.with_gradients(if is_block { preset.block(&sizes)? } else { preset.model(&sizes)? });
        }
        if let Some(size) = self.graph.strip_suffix("-block").filter(|size| Config::find(size).is_ok()) {
            return Ok(deuteron_gpt2::block(&resized(Config::find(size)?), &options()?)?);
        }
        if let Ok(config) = Config::find(&self.graph) {
            return Ok(deuteron_gpt2::model(&resized(config), &options()?)?);
        }
        if matches!(self.source(), Source::Matmul) {
            return self.matmul(sizes);
        }
        match self.graph.parse::<FusedOp>() {
            Ok(op) => {
                let types = op.operand_types_of(&self.operand_sizes(sizes)?);
                Ok(if self.backward { op.backward_graph(&types)? } else { op.graph(&types)? })
            }
            // A known op with an attribute that is not one.
            Err(error) if self.graph.split_whitespace().next().is_some_and(|name| FusedOp::find(name).is_ok()) => {
                Err(error.into())
            }
            Err(_) => bail!(
                "`{}` is neither a file nor a known graph; did you mean `{}`? Models: {}, each also with -block; `deuteron ops` lists the \
                 ops",
                self.graph,
                nearest(&self.graph),
                models().collect::<Vec<_>>().join(", ")
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

/// The sizes that `--flip` varies.
impl Variants for GraphArguments {
    fn knobs(&self) -> Vec<Knob> {
        if Path::new(&self.graph).is_file() {
            return Vec::new();
        }
        let sizes = self.sizes();
        if let Some(preset) = self.preset() {
            let batch = Knob::doubling("batch", sizes.batch, 256);
            let longest = preset.longest().unwrap_or(4096);
            return match preset.family {
                Family::Vit => vec![batch],
                Family::Bert | Family::T5 => vec![batch, Knob::doubling("sequence", sizes.sequence, longest)],
            };
        }
        match self.gpt2() {
            Some(config) => vec![
                Knob::doubling("batch", sizes.batch, 256),
                Knob::doubling("sequence", sizes.sequence, config.context),
                Knob {
                    name: "hidden",
                    now: config.hidden,
                    values: [64, 128, 256, 512, 1024, 2048, 4096, 8192]
                        .into_iter()
                        .filter(|&h| h != config.hidden)
                        .collect(),
                },
            ],
            None => vec![Knob::doubling("rows", sizes.rows, 1 << 20), Knob::doubling("cols", sizes.cols, 1 << 16)],
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
    let dtype: Dtype = dtype_word(name).parse()?;
    if !dtype.is_float() {
        bail!("--dtype must be f32, f16 or bf16, got {dtype}");
    }
    Ok(dtype)
}
