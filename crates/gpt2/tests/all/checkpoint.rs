//! Checkpoints that the transformers library wrote: sizes, layouts on disk, and the logits that come of them.

use crate::support::{Case, Expected, Scratch, Tensor, fixture, safetensors};
use deuteron::{Dtype, Shape};
use deuteron_gpt2::{Activation, Checkpoint, Config, Weight};
use half::{bf16, f16};

const MODELS: [(&str, Dtype); 4] =
    [("gelu", Dtype::F32), ("shards", Dtype::F32), ("bf16", Dtype::Bf16), ("f16", Dtype::F16)];

#[test]
fn every_weight_is_there() {
    for (name, dtype) in MODELS {
        let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
        for (weight, shape) in checkpoint.config().weights() {
            let found = checkpoint.weight(&weight).unwrap();
            assert_eq!((found.dtype, found.shape), (dtype, &shape), "{weight} of {name}");
            assert_eq!(found.bytes.len(), shape.elements() * dtype.bytes());
        }
        assert_eq!(checkpoint.weight("lm_head.weight").is_some(), !checkpoint.config().tied);
        assert_eq!(checkpoint.weight("transformer.wte.weight"), None);
    }
}

#[test]
fn sizes_are_read() {
    let config = *Checkpoint::open(&fixture("shards")).unwrap().config();
    let expected = Config {
        name: Config::OTHER,
        layers: 3,
        heads: 3,
        hidden: 48,
        vocabulary: 257,
        context: 97,
        inner: Some(112),
        activation: Activation::GeluErf,
        epsilon: 1e-3,
        scaled: true,
        tied: false,
    };
    assert_eq!(config, expected);
}

/// The library's logits again, in f64 and in plain loops: names, layouts and settings mean what we think they mean.
/// The library computed in f32 and stored f32, so its error is some roundings of a sum of `inner` terms.
#[test]
fn the_weights_give_the_logits_of_the_library() {
    for (name, _) in MODELS {
        let checkpoint = Checkpoint::open(&fixture(name)).unwrap();
        let model = Model { checkpoint: &checkpoint, config: *checkpoint.config() };
        let expected = Expected::read(&fixture(name));
        for (case, logits) in expected.cases.iter().zip(&expected.logits) {
            let got = model.logits(&case.prompt);
            let largest = logits.iter().fold(0.0, |largest: f64, logit| largest.max(f64::from(logit.abs())));
            let bound = 8.0 * Dtype::F32.epsilon() * (model.config.inner() as f64).sqrt() * largest;
            let error = got.iter().zip(logits).fold(0.0, |most: f64, (a, b)| most.max((a - f64::from(*b)).abs()));
            assert!(error < bound, "{name}: off by {error:e}, bound {bound:e}");
            assert!(expected.margin > 20.0 * bound, "{name}: greedy tokens are not safe from rounding");
        }
    }
}

#[test]
fn greedy_tokens_are_those_of_the_library() {
    let checkpoint = Checkpoint::open(&fixture("f16")).unwrap();
    let model = Model { checkpoint: &checkpoint, config: *checkpoint.config() };
    for Case { prompt, greedy } in Expected::read(&fixture("f16")).cases {
        let mut tokens = prompt.clone();
        for expected in greedy {
            let logits = model.logits(&tokens);
            let last = &logits[logits.len() - model.config.vocabulary..];
            let best = (0..last.len()).max_by(|&a, &b| last[a].total_cmp(&last[b])).unwrap();
            assert_eq!(best, expected);
            tokens.push(best);
        }
    }
}

/// Published checkpoints store masks; a tied head may be stored twice; names may have a prefix.
#[test]
fn masks_and_a_copied_head_are_passed_over() {
    let plain = Checkpoint::open(&fixture("gelu")).unwrap();
    let mut tensors = vec![
        Tensor::zeros("transformer.h.0.attn.bias", "BOOL", 1, &[1, 1, 96, 96]),
        Tensor::zeros("transformer.h.1.attn.bias", "U8", 1, &[1, 1, 96, 96]),
        Tensor::zeros("transformer.h.0.attn.masked_bias", "F32", 4, &[]),
    ];
    for (name, shape) in plain.config().weights() {
        let bytes = plain.weight(&name).unwrap().bytes.to_vec();
        tensors.push(Tensor { name: format!("transformer.{name}"), dtype: "F32", shape: shape.dims().to_vec(), bytes });
    }
    let head = plain.weight("wte.weight").unwrap().bytes.to_vec();
    tensors.push(Tensor { name: "lm_head.weight".to_string(), dtype: "F32", shape: vec![320, 32], bytes: head });
    let scratch = Scratch::copy_of("gelu");
    scratch.write("model.safetensors", safetensors(&tensors));
    let checkpoint = Checkpoint::open(&scratch.0).unwrap();
    for (name, _) in plain.config().weights() {
        assert_eq!(checkpoint.weight(&name), plain.weight(&name));
    }
    assert_eq!(checkpoint.weight("lm_head.weight"), None);
    assert_eq!(checkpoint.weight("h.0.attn.bias"), None);
}

fn values(weight: Weight<'_>) -> Vec<f64> {
    let halves = || weight.bytes.as_chunks::<2>().0.iter();
    match weight.dtype {
        Dtype::F16 => halves().map(|&bytes| f16::from_le_bytes(bytes).to_f64()).collect(),
        Dtype::Bf16 => halves().map(|&bytes| bf16::from_le_bytes(bytes).to_f64()).collect(),
        _ => weight.bytes.as_chunks().0.iter().map(|&bytes| f64::from(f32::from_le_bytes(bytes))).collect(),
    }
}

/// GPT-2 from its definition, a row at a time.
struct Model<'a> {
    checkpoint: &'a Checkpoint,
    config: Config,
}

impl Model<'_> {
    fn weight(&self, name: &str) -> (Vec<f64>, Shape) {
        let weight = self.checkpoint.weight(name).unwrap();
        (values(weight), weight.shape.clone())
    }

    fn logits(&self, tokens: &[usize]) -> Vec<f64> {
        let hidden = self.config.hidden;
        let ((wte, _), (wpe, _)) = (self.weight("wte.weight"), self.weight("wpe.weight"));
        let row = |table: &[f64], index: usize| table[index * hidden..(index + 1) * hidden].to_vec();
        let mut x: Vec<Vec<f64>> =
            tokens.iter().enumerate().map(|(at, &token)| add(&row(&wte, token), &row(&wpe, at))).collect();
        for layer in 0..self.config.layers {
            let normed = self.norm(&x, &format!("h.{layer}.ln_1"));
            let qkv = self.linear(&normed, &format!("h.{layer}.attn.c_attn"));
            let mixed = self.linear(&self.attention(&qkv), &format!("h.{layer}.attn.c_proj"));
            x = x.iter().zip(&mixed).map(|(a, b)| add(a, b)).collect();
            let mut wide = self.linear(&self.norm(&x, &format!("h.{layer}.ln_2")), &format!("h.{layer}.mlp.c_fc"));
            wide.iter_mut().flatten().for_each(|value| *value = self.activate(*value));
            let narrow = self.linear(&wide, &format!("h.{layer}.mlp.c_proj"));
            x = x.iter().zip(&narrow).map(|(a, b)| add(a, b)).collect();
        }
        let head = if self.config.tied { wte } else { self.weight("lm_head.weight").0 };
        let rows = self.norm(&x, "ln_f");
        rows.iter().flat_map(|x| head.chunks(hidden).map(|w| dot(x, w)).collect::<Vec<f64>>()).collect()
    }

    fn norm(&self, rows: &[Vec<f64>], name: &str) -> Vec<Vec<f64>> {
        let (w, b) = (self.weight(&format!("{name}.weight")).0, self.weight(&format!("{name}.bias")).0);
        let one = |x: &Vec<f64>| {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            let variance = x.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (variance + self.config.epsilon).sqrt();
            x.iter().zip(w.iter().zip(&b)).map(|(v, (w, b))| (v - mean) * scale * w + b).collect()
        };
        rows.iter().map(one).collect()
    }

    fn linear(&self, rows: &[Vec<f64>], name: &str) -> Vec<Vec<f64>> {
        let ((w, shape), (b, _)) = (self.weight(&format!("{name}.weight")), self.weight(&format!("{name}.bias")));
        let one = |x: &Vec<f64>| {
            let mut y = b.clone();
            for (value, row) in x.iter().zip(w.chunks(shape.cols())) {
                y.iter_mut().zip(row).for_each(|(y, w)| *y += value * w);
            }
            y
        };
        rows.iter().map(one).collect()
    }

    fn attention(&self, qkv: &[Vec<f64>]) -> Vec<Vec<f64>> {
        let Config { hidden, heads, .. } = self.config;
        let head = self.config.head();
        let scale = if self.config.scaled { 1.0 / (head as f64).sqrt() } else { 1.0 };
        let part = |row: usize, part: usize, h: usize| &qkv[row][part * hidden + h * head..][..head];
        let mut out = vec![vec![0.0; hidden]; qkv.len()];
        for (row, out) in out.iter_mut().enumerate() {
            for h in 0..heads {
                let scores: Vec<f64> = (0..=row).map(|key| scale * dot(part(row, 0, h), part(key, 1, h))).collect();
                let most = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
                let powers: Vec<f64> = scores.iter().map(|score| (score - most).exp()).collect();
                let total: f64 = powers.iter().sum();
                for (key, power) in powers.iter().enumerate() {
                    let out = &mut out[h * head..][..head];
                    out.iter_mut().zip(part(key, 2, h)).for_each(|(out, v)| *out += power / total * v);
                }
            }
        }
        out
    }

    fn activate(&self, x: f64) -> f64 {
        let inner = (2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3));
        match self.config.activation {
            Activation::GeluTanh => 0.5 * x * (1.0 + inner.tanh()),
            Activation::GeluErf => 0.5 * x * (1.0 + libm::erf(x / 2f64.sqrt())),
            Activation::Relu => x.max(0.0),
            Activation::Silu => x / (1.0 + (-x).exp()),
        }
    }
}

fn add(a: &[f64], b: &[f64]) -> Vec<f64> {
    a.iter().zip(b).map(|(a, b)| a + b).collect()
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}
