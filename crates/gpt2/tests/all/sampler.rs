//! Choosing tokens: which may come, how often, and what is refused.

use deuteron_gpt2::{Sampler, Sampling, SamplingError};

const WARM: Sampling = Sampling { temperature: 1.0, top_k: None, top_p: None, seed: 1 };

/// How often each token comes in `draws` draws.
fn counts(sampling: Sampling, logits: &[f32], draws: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(sampling).unwrap();
    let mut counts = vec![0; logits.len()];
    for _ in 0..draws {
        counts[sampler.next(logits).unwrap() as usize] += 1;
    }
    counts
}

/// Logits of these probabilities.
fn logits(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

#[test]
fn greedy_takes_the_largest_and_the_lowest_of_equals() {
    let mut greedy = Sampler::new(Sampling::GREEDY).unwrap();
    assert_eq!(greedy.next(&[1.0, 3.0, 2.0]), Ok(1));
    assert_eq!(greedy.next(&[1.0, 3.0, 3.0]), Ok(1));
    assert_eq!(greedy.next(&[-0.0, 0.0]), Ok(0));
    assert_eq!(greedy.next(&[f32::NEG_INFINITY, f32::MIN]), Ok(1));
}

/// Counts of n draws differ from n p by some roots of n p (1 - p); five of them come once in a million.
#[test]
fn draws_follow_the_probabilities() {
    let shares = [0.5, 0.05, 0.25, 0.2];
    let draws = 100_000;
    for temperature in [0.5f32, 1.0, 2.0] {
        let powers: Vec<f64> = shares.iter().map(|&p| f64::from(p).powf(1.0 / f64::from(temperature))).collect();
        let total: f64 = powers.iter().sum();
        let counts = counts(Sampling { temperature, ..WARM }, &logits(&shares), draws);
        for (count, power) in counts.iter().zip(powers) {
            let p = power / total;
            let deviation = (draws as f64 * p * (1.0 - p)).sqrt();
            assert!((*count as f64 - draws as f64 * p).abs() < 5.0 * deviation, "{temperature}: {counts:?}");
        }
    }
}

fn possible(sampling: Sampling, logits: &[f32]) -> Vec<usize> {
    let counts = counts(sampling, logits, 2000);
    (0..logits.len()).filter(|&id| counts[id] > 0).collect()
}

#[test]
fn top_k_keeps_the_largest_and_the_lowest_of_equals() {
    let logits = [0.0, 1.0, 1.0, 1.0, 0.5];
    assert_eq!(possible(Sampling { top_k: Some(2), ..WARM }, &logits), [1, 2]);
    assert_eq!(possible(Sampling { top_k: Some(1), ..WARM }, &logits), [1]);
    assert_eq!(possible(Sampling { top_k: Some(9), ..WARM }, &logits), [0, 1, 2, 3, 4]);
    // So hot that all weights are 1: the order is still that of the logits.
    assert_eq!(possible(Sampling { temperature: 1e30, top_k: Some(3), ..WARM }, &logits), [1, 2, 3]);
}

#[test]
fn top_p_keeps_the_fewest_that_reach_it() {
    let logits = logits(&[0.1, 0.5, 0.15, 0.25]);
    let kept = |top_p, top_k| possible(Sampling { top_p: Some(top_p), top_k, ..WARM }, &logits);
    assert_eq!(kept(0.49, None), [1]);
    assert_eq!(kept(0.51, None), [1, 3]);
    assert_eq!(kept(0.8, None), [1, 2, 3]);
    assert_eq!(kept(1.0, None), [0, 1, 2, 3]);
    assert_eq!(kept(1e-9, None), [1]);
    // Probabilities are those after top-k: two thirds and one third.
    assert_eq!(kept(0.65, Some(2)), [1]);
    assert_eq!(kept(0.68, Some(2)), [1, 3]);
}

/// Temperature comes before top-p: a cold model needs fewer tokens.
#[test]
fn temperature_is_first() {
    let logits = logits(&[0.4, 0.35, 0.25]);
    assert_eq!(possible(Sampling { top_p: Some(0.7), ..WARM }, &logits), [0, 1]);
    assert_eq!(possible(Sampling { temperature: 0.05, top_p: Some(0.7), ..WARM }, &logits), [0]);
}

/// More candidates than are looked at first.
#[test]
fn top_p_of_a_flat_vocabulary() {
    let logits = vec![0.25; 5000];
    let mut sampler = Sampler::new(Sampling { top_p: Some(0.5), ..WARM }).unwrap();
    let ids: Vec<u32> = (0..2000).map(|_| sampler.next(&logits).unwrap()).collect();
    let largest = ids.iter().copied().max().unwrap();
    assert!((2400..2501).contains(&largest), "of equals the lower half is kept, came up to {largest}");
}

/// Written down, so that a seed gives the same text in every version.
#[test]
fn a_seed_gives_the_same_tokens() {
    let logits: Vec<f32> = (0..1000).map(|id| ((id * 37) % 101) as f32 / 20.0).collect();
    let draw = |seed, top_k, top_p| {
        let mut sampler = Sampler::new(Sampling { temperature: 0.8, top_k, top_p, seed }).unwrap();
        (0..6).map(|_| sampler.next(&logits).unwrap()).collect::<Vec<u32>>()
    };
    assert_eq!(draw(1, None, None), draw(1, None, None));
    assert_ne!(draw(1, None, None), draw(2, None, None));
    assert_eq!(draw(1, Some(40), Some(0.9)), EXPECTED);
}

const EXPECTED: [u32; 6] = [524, 737, 969, 423, 423, 737];

#[test]
fn nonsense_is_refused() {
    let new = |sampling| Sampler::new(sampling).err();
    assert_eq!(new(Sampling { temperature: -1.0, ..WARM }), Some(SamplingError::Temperature(-1.0)));
    assert!(matches!(new(Sampling { temperature: f32::NAN, ..WARM }), Some(SamplingError::Temperature(_))));
    assert!(matches!(new(Sampling { temperature: f32::INFINITY, ..WARM }), Some(SamplingError::Temperature(_))));
    assert_eq!(new(Sampling { top_k: Some(0), ..WARM }), Some(SamplingError::TopK));
    for p in [0.0, -0.5, 1.5] {
        assert_eq!(new(Sampling { top_p: Some(p), ..WARM }), Some(SamplingError::TopP(p)));
    }
    assert!(matches!(new(Sampling { top_p: Some(f32::NAN), ..WARM }), Some(SamplingError::TopP(_))));
    for sampling in [Sampling::GREEDY, WARM] {
        let mut sampler = Sampler::new(sampling).unwrap();
        assert!(matches!(sampler.next(&[0.0, f32::NAN]), Err(SamplingError::NotFinite { id: 1, .. })));
        let infinite = SamplingError::NotFinite { id: 0, value: f32::INFINITY };
        assert_eq!(sampler.next(&[f32::INFINITY, 0.0]), Err(infinite));
        assert_eq!(sampler.next(&[]), Err(SamplingError::Nothing(0)));
        assert_eq!(sampler.next(&[f32::NEG_INFINITY; 3]), Err(SamplingError::Nothing(3)));
        assert_eq!(sampler.next(&[f32::NEG_INFINITY, 0.5]), Ok(1), "the sampler is good after an error");
    }
}
