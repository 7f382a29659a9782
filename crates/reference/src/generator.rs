//! A small deterministic generator (splitmix64): the same seed gives the same numbers on every machine.

/// A stream of pseudo-random numbers. Not for statistics, not for secrets: for test inputs.
#[derive(Debug, Clone)]
pub struct Generator {
    state: u64,
}

impl Generator {
    /// The stream of a seed.
    pub fn new(seed: u64) -> Self {
        Generator { state: seed }
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.state = self.state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.state;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// Uniform in `[0, 1)`.
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * f64::powi(2.0, -53)
    }

    /// Uniform in `[low, high)`.
    pub fn uniform(&mut self, low: f64, high: f64) -> f64 {
        low + (high - low) * self.unit()
    }

    /// Normal, mean 0 and deviation 1 (Box and Muller).
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * (1.0 - self.unit()).ln()).sqrt();
        radius * (2.0 * std::f64::consts::PI * self.unit()).cos()
    }

    /// Uniform in `0..count`. `count` must not be 0.
    pub fn below(&mut self, count: usize) -> usize {
        // The bias of the remainder is below count / 2^64.
        (self.bits() % count as u64) as usize
    }

    /// True with this probability.
    pub fn chance(&mut self, probability: f64) -> bool {
        self.unit() < probability
    }

    /// One of the choices, which must not be empty.
    pub fn pick<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bits_are_those_of_the_published_generator() {
        let mut generator = Generator::new(1234567);
        assert_eq!(generator.bits(), 6457827717110365317);
        assert_eq!(generator.bits(), 3203168211198807973);
    }

    #[test]
    fn normals_have_mean_0_and_deviation_1() {
        let mut generator = Generator::new(7);
        let count = 100_000;
        let values: Vec<f64> = (0..count).map(|_| generator.normal()).collect();
        let mean = values.iter().sum::<f64>() / count as f64;
        let variance = values.iter().map(|x| x * x).sum::<f64>() / count as f64;
        // Five standard errors of the mean, and of the variance, which is sqrt(2) times as wide.
        let error = 5.0 / (count as f64).sqrt();
        assert!(mean.abs() < error, "{mean}");
        assert!((variance - 1.0).abs() < error * 2f64.sqrt(), "{variance}");
    }
}
