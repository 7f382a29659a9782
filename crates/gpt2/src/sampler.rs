//! The next token, from logits.

use std::cmp::Ordering;

use deuteron::reference::Generator;

/// How tokens are chosen. The order is that of the transformers library: temperature, top-k, top-p, then one draw.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// logits are divided by it; 0 takes the largest logit and ignores the other settings
    pub temperature: f32,
    /// only this many of the largest
    pub top_k: Option<usize>,
    /// the smallest set of largest ones whose probabilities, after top-k, add up to it
    pub top_p: Option<f32>,
    /// seed of sampling; the same seed gives the same tokens on every machine
    pub seed: u64,
}

/// Why no token was chosen.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum SamplingError {
    /// Negative, infinite or NaN.
    #[error("the temperature must be 0 or a positive number, got {0}")]
    Temperature(f32),
    /// Top-k is 0.
    #[error("top-k must be at least 1, got 0")]
    TopK,
    /// Top-p is not a probability.
    #[error("top-p must be above 0 and at most 1, got {0}")]
    TopP(f32),
    /// A logit is NaN or plus infinity.
    #[error("the logit of token {id} is {value}; the weights are damaged, or the dtype is too small for them")]
    NotFinite {
        /// the token
        id: usize,
        /// NaN or plus infinity
        value: f32,
    },
    /// No logits, or all are minus infinity.
    #[error("no token can be chosen among {0} logits")]
    Nothing(usize),
}

impl Sampling {
    /// Always the likeliest token.
    pub const GREEDY: Sampling = Sampling { temperature: 0.0, top_k: None, top_p: None, seed: 0 };
}

/// Chooses tokens, one after the other.
#[derive(Debug, Clone)]
pub struct Sampler {
    sampling: Sampling,
    generator: Generator,
    candidates: Vec<Candidate>,
}

#[derive(Debug, Clone, Copy)]
struct Candidate {
    id: u32,
    logit: f32,
    /// not normalised
    weight: f64,
}

impl Sampler {
    /// A sampler of checked settings.
    pub fn new(sampling: Sampling) -> Result<Sampler, SamplingError> {
        if !(sampling.temperature >= 0.0 && sampling.temperature.is_finite()) {
            return Err(SamplingError::Temperature(sampling.temperature));
        }
        if sampling.top_k == Some(0) {
            return Err(SamplingError::TopK);
        }
        if let Some(p) = sampling.top_p.filter(|&p| !(p > 0.0 && p <= 1.0)) {
            return Err(SamplingError::TopP(p));
        }
        Ok(Sampler { sampling, generator: Generator::new(sampling.seed), candidates: Vec::new() })
    }

    /// The next token. Ties go to the lower id. A logit of minus infinity is never chosen.
    pub fn next(&mut self, logits: &[f32]) -> Result<u32, SamplingError> {
        let wrong = |value: &f32| value.is_nan() || *value == f32::INFINITY;
        if let Some(id) = logits.iter().position(wrong) {
            return Err(SamplingError::NotFinite { id, value: logits[id] });
        }
        let likeliest = likeliest(logits).ok_or(SamplingError::Nothing(logits.len()))?;
        if self.sampling.temperature == 0.0 {
            return Ok(likeliest);
        }
        self.fill(logits);
        self.weigh(logits[likeliest as usize]);
        self.keep_top_p();
        Ok(self.draw())
    }

    /// Every token, or the requested number of the largest, in order of their ids. Few are examined twice: most logits are
    /// below the threshold.
    fn fill(&mut self, logits: &[f32]) {
        let k = self.sampling.top_k.unwrap_or(logits.len());
        let mut least = f32::NEG_INFINITY;
        self.candidates.clear();
        for (id, &logit) in (0..).zip(logits) {
            if logit > least {
                self.candidates.push(Candidate { id, logit, weight: 0.0 });
                if self.candidates.len() >= k.saturating_mul(2) {
                    least = self.keep_largest(k);
                }
            }
        }
        if self.candidates.len() > k {
            self.keep_largest(k);
        }
        if k < logits.len() {
            self.order();
        }
    }

    /// Keeps this many of the largest; returns the smallest one kept.
    fn keep_largest(&mut self, k: usize) -> f32 {
        let (_, &mut Candidate { logit, .. }, _) = self.candidates.select_nth_unstable_by(k - 1, larger_first);
        self.candidates.truncate(k);
        logit
    }

    /// `exp((logit - largest) / temperature)`. The largest has 1, so the sum is never 0.
    fn weigh(&mut self, largest: f32) {
        let (largest, temperature) = (f64::from(largest), f64::from(self.sampling.temperature));
        let weight = |logit: f32| libm::exp((f64::from(logit) - largest) / temperature);
        self.candidates.iter_mut().for_each(|candidate| candidate.weight = weight(candidate.logit));
        self.candidates.retain(|candidate| candidate.weight > 0.0);
    }

    /// Sorts only a few of the largest first: sorting a whole vocabulary takes longer than a small model's layer.
    fn keep_top_p(&mut self) {
        let Some(p) = self.sampling.top_p else { return };
        let total: f64 = self.sum();
        let mut looked = 64;
        loop {
            let count = looked.min(self.candidates.len());
            if count < self.candidates.len() {
                self.candidates.select_nth_unstable_by(count, larger_first);
            }
            self.candidates[..count].sort_unstable_by(larger_first);
            let mut reached = 0.0;
            for (index, candidate) in self.candidates[..count].iter().enumerate() {
                reached += candidate.weight;
                if reached >= f64::from(p) * total {
                    self.candidates.truncate(index + 1);
                    return self.order();
                }
            }
            if count == self.candidates.len() {
                return self.order();
            }
            looked *= 8;
        }
    }

    /// Sorts by id, so that sums and samples depend only on the set.
    fn order(&mut self) {
        self.candidates.sort_unstable_by_key(|candidate| candidate.id);
    }

    fn draw(&mut self) -> u32 {
        let mut rest = self.generator.unit() * self.sum();
        for candidate in &self.candidates {
            rest -= candidate.weight;
            if rest < 0.0 {
                return candidate.id;
            }
        }
        // Rounding may leave a crumb above 0.
        self.candidates.last().map_or(0, |candidate| candidate.id)
    }

    fn sum(&self) -> f64 {
        self.candidates.iter().map(|candidate| candidate.weight).sum()
    }
}

/// The lowest id of the largest logit.
fn likeliest(logits: &[f32]) -> Option<u32> {
    let mut best: Option<(u32, f32)> = None;
    for (id, &logit) in (0..).zip(logits) {
        if logit > best.map_or(f32::NEG_INFINITY, |(_, largest)| largest) {
            best = Some((id, logit));
        }
    }
    best.map(|(id, _)| id)
}

fn larger_first(a: &Candidate, b: &Candidate) -> Ordering {
    b.logit.total_cmp(&a.logit).then(a.id.cmp(&b.id))
}
