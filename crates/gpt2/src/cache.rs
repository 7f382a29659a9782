//! Keys and values of the tokens so far, so that the next token costs no more than itself.
//!
//! Capacities are powers of two; each layer has one tensor on the device. One graph serves prompts and steps: each layer *appends* its keys
//! and values, a view of the fused projection, to its cache, and attends to what the cache holds up to each query's own position
//! (`Mask::Cached`). With int8 weights the cache is bf16. By its meaning an append gives a new cache; the session declares the cache a
//! *state*, so the append writes the new rows of the caller's memory and nothing else, and a step costs the length of the context,
//! not the capacity.

use deuteron::memory::{caught, zeros};
use deuteron::{Dtype, Engine, Error, Tensor};

use crate::config::Config;

/// For each layer and sequence: keys and values by head and position, up to a capacity. It lives where the engine's kernels
/// write, and they write it in place.
pub(crate) struct Cache {
    config: Config,
    dtype: Dtype,
    capacity: usize,
    /// tokens of each sequence
    lengths: Vec<usize>,
    /// `[2, batch, heads, capacity, head]`: keys, then values
    layers: Vec<Tensor>,
}

impl Cache {
    /// Room for so many tokens of each sequence.
    pub fn new(engine: &Engine, config: &Config, dtype: Dtype, batch: usize, capacity: usize) -> Result<Cache, Error> {
        let shape = [2, batch, config.heads, capacity, config.head()];
        let empty: Vec<u8> = caught(|| zeros(shape.iter().product::<usize>() * dtype.bytes()))?;
        let layers = (0..config.layers).map(|_| Tensor::upload(engine, dtype, shape, &empty));
        let layers = layers.collect::<Result<_, Error>>()?;
        Ok(Cache { config: *config, dtype, capacity, lengths: vec![0; batch], layers })
    }

    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Tokens of each sequence: the position of the next one.
    pub fn lengths(&self) -> &[usize] {
        &self.lengths
    }

    /// What a session writes, layer by layer.
    pub fn layers(&mut self) -> &mut [Tensor] {
        &mut self.layers
    }

    /// Counts tokens that were written.
    pub fn advance(&mut self, counts: impl Iterator<Item = usize>) {
        self.lengths.iter_mut().zip(counts).for_each(|(length, count)| *length += count);
    }

    /// The sequences `kept` alone, in that order, with room for so many tokens. Through the host: it is done when a sequence
    /// ends or the length doubles.
    pub fn reshaped(&self, engine: &Engine, kept: &[usize], capacity: usize) -> Result<Cache, Error> {
        let (heads, head) = (self.config.heads, self.config.head() * self.dtype.bytes());
        let shape = [2, kept.len(), heads, capacity, self.config.head()];
        let mut bytes: Vec<u8> = caught(|| zeros(shape.iter().product::<usize>() * self.dtype.bytes()))?;
        let layers = self.layers.iter().map(|layer| {
            let from = layer.to_bytes()?;
            bytes.fill(0);
            for (which, (new, &old)) in (0..2).flat_map(|which| kept.iter().enumerate().map(move |pair| (which, pair)))
            {
                let length = self.lengths[old].min(capacity) * head;
                for at in 0..heads {
                    let source = ((which * self.lengths.len() + old) * heads + at) * self.capacity * head;
                    let to = ((which * kept.len() + new) * heads + at) * capacity * head;
                    bytes[to..][..length].copy_from_slice(&from[source..][..length]);
                }
            }
            Tensor::upload(engine, self.dtype, shape, &bytes)
        });
        let layers = layers.collect::<Result<_, Error>>()?;
        let lengths = kept.iter().map(|&old| self.lengths[old]).collect();
        Ok(Cache { config: self.config, dtype: self.dtype, capacity, lengths, layers })
    }
}
