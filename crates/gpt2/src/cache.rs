//! Keys and values of the tokens so far, so that the next token costs no more than itself.

use deuteron::{Dtype, Error, Tensor};

use crate::config::Config;

/// For each layer and sequence: keys and values by head and position, up to a capacity.
pub(crate) struct Cache {
    config: Config,
    dtype: Dtype,
    capacity: usize,
    /// tokens of each sequence
    lengths: Vec<usize>,
    /// `[batch, heads, capacity, head]`, keys and values
    layers: Vec<[Tensor; 2]>,
}

/// A layer's projection: queries, keys and values side by side, `[batch, sequence, 3 * hidden]`.
pub(crate) struct Projection<'a> {
    pub bytes: &'a [u8],
    pub sequence: usize,
}

impl Cache {
    /// Room for so many tokens of each sequence.
    pub fn new(config: &Config, dtype: Dtype, batch: usize, capacity: usize) -> Result<Cache, Error> {
        let empty = || Tensor::filled(dtype, [batch, config.heads, capacity, config.head()], 0.0);
        let layers = (0..config.layers).map(|_| Ok([empty()?, empty()?])).collect::<Result<_, Error>>()?;
        Ok(Cache { config: *config, dtype, capacity, lengths: vec![0; batch], layers })
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens of each sequence: the position of the next one.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// Keys and values, layer by layer.
    pub fn tensors(&self) -> impl Iterator<Item = &Tensor> {
        self.layers.iter().flatten()
    }

    /// 0 where a sequence has a token, `-inf` behind it: `[batch, 1, 1, capacity]`.
    pub fn mask(&self) -> Result<Tensor, Error> {
        let of = |&length: &usize| (0..self.capacity).map(move |at| if at < length { 0.0 } else { f32::NEG_INFINITY });
        let values: Vec<f32> = self.lengths.iter().flat_map(of).collect();
        Tensor::from_f32(Dtype::F32, [self.lengths.len(), 1, 1, self.capacity], &values)
    }

    /// Writes the first `counts` tokens of each sequence of a layer's projection behind those that are there. The lengths
    /// change with [`Cache::advance`], when all layers are written.
    pub fn write(&mut self, layer: usize, projection: &Projection, counts: &[usize]) {
        let Config { heads, hidden, .. } = self.config;
        let (head, size) = (self.config.head() * self.dtype.bytes(), self.dtype.bytes());
        for (which, tensor) in self.layers[layer].iter_mut().enumerate() {
            // Nobody else has these tensors: sessions borrow them for a run.
            let Some(to) = tensor.bytes_mut() else { continue };
            for (sequence, (&length, &count)) in self.lengths.iter().zip(counts).enumerate() {
                for token in 0..count {
                    let row = (sequence * projection.sequence + token) * 3 + 1 + which;
                    let from = &projection.bytes[row * hidden * size..][..hidden * size];
                    for (at, from) in from.chunks_exact(head).enumerate() {
                        let place = (sequence * heads + at) * self.capacity + length + token;
                        to[place * head..][..head].copy_from_slice(from);
                    }
                }
            }
        }
    }

    /// Counts tokens that were written.
    pub fn advance(&mut self, counts: &[usize]) {
        self.lengths.iter_mut().zip(counts).for_each(|(length, count)| *length += count);
    }

    /// The sequences `kept` alone, in that order, with room for so many tokens.
    pub fn reshaped(&self, kept: &[usize], capacity: usize) -> Result<Cache, Error> {
        let mut other = Cache::new(&self.config, self.dtype, kept.len(), capacity)?;
        let (heads, head) = (self.config.heads, self.config.head() * self.dtype.bytes());
        for (from, to) in self.layers.iter().flatten().zip(other.layers.iter_mut().flatten()) {
            let from = from.to_bytes()?;
            let Some(to) = to.bytes_mut() else { continue };
            for (new, &old) in kept.iter().enumerate() {
                let length = self.lengths[old].min(capacity) * head;
                for at in 0..heads {
                    let source = &from[(old * heads + at) * self.capacity * head..][..length];
                    to[(new * heads + at) * capacity * head..][..length].copy_from_slice(source);
                }
            }
        }
        other.lengths = kept.iter().map(|&old| self.lengths[old]).collect();
        Ok(other)
    }
}
