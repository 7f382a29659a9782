//! The KV cache: keys and values of earlier tokens, so that the next token computes only its own.
//!
//! Capacities are powers of two; each layer has one tensor on the device. One graph serves prompts and steps: each layer *appends* its keys
//! and values, a view of the fused projection, to its cache, and attends to the cache up to each query's own position
//! (`Mask::Cached`). With int8 weights the cache is bf16. Formally an append returns a new cache; the session declares the cache a
//! *state*, so the append writes only the new rows, in the caller's memory, and the cost of a step grows with the length of the context,
//! not with the capacity.

use deuteron::memory::{caught, zeros};
use deuteron::{Dtype, Engine, Error, Tensor};

use crate::config::Config;

/// Keys and values per layer, sequence, head and position, up to a capacity. It is in memory where the engine's kernels
/// write it in place.
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
    /// A cache with room for `capacity` tokens per sequence.
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

    /// The tensors that a session writes, layer by layer.
    pub fn layers(&mut self) -> &mut [Tensor] {
        &mut self.layers
    }

    /// Counts tokens that were written.
    pub fn advance(&mut self, counts: impl Iterator<Item = usize>) {
        self.lengths.iter_mut().zip(counts).for_each(|(length, count)| *length += count);
    }

    /// Only the sequences `kept`, in that order, with room for `capacity` tokens. Copies through the host, once per sequence that
    /// ends or doubling of the length.
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
