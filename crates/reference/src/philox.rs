//! Philox4x32-10 (Salmon and others, 2011): random bits as a function of key and counter, so nothing is stored.

const MULTIPLIERS: [u32; 2] = [0xd251_1f53, 0xcd9e_8d57];
const KEY_STEPS: [u32; 2] = [0x9e37_79b9, 0xbb67_ae85];
const ROUNDS: usize = 10;

/// The four words of a counter under a key.
pub(crate) fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let even = MULTIPLIERS[0] as u64 * counter[0] as u64;
        let odd = MULTIPLIERS[1] as u64 * counter[2] as u64;
        counter = [
            (odd >> 32) as u32 ^ counter[1] ^ key[0],
            odd as u32,
            (even >> 32) as u32 ^ counter[3] ^ key[1],
            even as u32,
        ];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

/// 1 where the element at a row-major index is kept, else 0: its word is at least `floor(drop * 2^32)`.
pub(crate) fn kept(index: u64, seed: u32, offset: u32, drop: f64) -> f64 {
    let threshold = (drop * f64::powi(2.0, 32)).floor() as u32;
    let block = index / 4;
    let words = philox([block as u32, (block >> 32) as u32, 0, 0], [seed, offset]);
    (words[(index % 4) as usize] >= threshold) as u8 as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The published test vectors of the algorithm.
    #[test]
    fn known_answers() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8]);
        assert_eq!(philox([u32::MAX; 4], [u32::MAX; 2]), [0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd]);
        let counter = [0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344];
        let expected = [0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1];
        assert_eq!(philox(counter, [0xa4093822, 0x299f31d0]), expected);
    }

    #[test]
    fn the_share_of_dropped_elements_is_the_probability() {
        let (count, drop) = (100_000, 0.3);
        let dropped = (0..count).filter(|&i| kept(i, 5, 9, drop) == 0.0).count() as f64;
        let deviation = (count as f64 * drop * (1.0 - drop)).sqrt();
        assert!((dropped - count as f64 * drop).abs() < 5.0 * deviation, "{dropped}");
        assert!((0..1000).all(|i| kept(i, 5, 9, 0.0) == 1.0));
    }
}
