//! SHA-256 of bytes in pieces, and in base64, as a Content-Security-Policy names the one script and the one style sheet that it
//! allows.
//!
//! So the page needs no `unsafe-inline`: even markup that escaped escaping could not run a script.

/// `sha256-...`, as a policy spells it, without quotes.
pub(crate) fn source_hash(text: &str) -> String {
    let mut digest = Sha256::new();
    digest.update(text.as_bytes());
    format!("sha256-{}", base64(&digest.finish()))
}

/// An incremental SHA-256.
#[derive(Debug, Clone)]
pub struct Sha256 {
    state: [u32; 8],
    /// bytes that do not fill a block yet
    rest: Vec<u8>,
    bytes: u64,
}

impl Default for Sha256 {
    fn default() -> Sha256 {
        Sha256::new()
    }
}

impl Sha256 {
    /// A digest of no bytes.
    pub fn new() -> Sha256 {
        Sha256 { state: START, rest: Vec::with_capacity(BLOCK), bytes: 0 }
    }

    /// Adds bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.bytes += bytes.len() as u64;
        if !self.rest.is_empty() {
            let (first, after) = bytes.split_at(bytes.len().min(BLOCK - self.rest.len()));
            self.rest.extend_from_slice(first);
            bytes = after;
            if self.rest.len() < BLOCK {
                return;
            }
            compress(&mut self.state, &self.rest);
            self.rest.clear();
        }
        let blocks = bytes.chunks_exact(BLOCK);
        self.rest.extend_from_slice(blocks.remainder());
        blocks.for_each(|block| compress(&mut self.state, block));
    }

    /// The digest of all bytes.
    pub fn finish(mut self) -> [u8; 32] {
        let bits = self.bytes * 8;
        let zeros = (2 * BLOCK - 9 - self.rest.len()) % BLOCK;
        let padding = [&[0x80][..], &vec![0; zeros], &bits.to_be_bytes()].concat();
        self.update(&padding);
        let mut digest = [0; 32];
        for (bytes, word) in digest.chunks_exact_mut(4).zip(self.state) {
            bytes.copy_from_slice(&word.to_be_bytes());
        }
        digest
    }
}

/// Bytes of a block.
const BLOCK: usize = 64;

fn compress(state: &mut [u32; 8], block: &[u8]) {
    let mut schedule = [0_u32; 64];
    for (word, bytes) in schedule.iter_mut().zip(block.chunks_exact(4)) {
        *word = bytes.iter().fold(0, |word, &byte| word << 8 | u32::from(byte));
    }
    for at in 16..64 {
        let (early, late) = (schedule[at - 15], schedule[at - 2]);
        let first = early.rotate_right(7) ^ early.rotate_right(18) ^ (early >> 3);
        let second = late.rotate_right(17) ^ late.rotate_right(19) ^ (late >> 10);
        schedule[at] = schedule[at - 16].wrapping_add(first).wrapping_add(schedule[at - 7]).wrapping_add(second);
    }
    let [mut a, mut b, mut c, mut d, mut e, mut f, mut g, mut h] = *state;
    for (constant, word) in ROUNDS.into_iter().zip(schedule) {
        let choice = (e & f) ^ (!e & g);
        let majority = (a & b) ^ (a & c) ^ (b & c);
        let first = h
            .wrapping_add(e.rotate_right(6) ^ e.rotate_right(11) ^ e.rotate_right(25))
            .wrapping_add(choice)
            .wrapping_add(constant)
            .wrapping_add(word);
        let second = (a.rotate_right(2) ^ a.rotate_right(13) ^ a.rotate_right(22)).wrapping_add(majority);
        (h, g, f, e) = (g, f, e, d.wrapping_add(first));
        (d, c, b, a) = (c, b, a, first.wrapping_add(second));
    }
    for (word, mixed) in state.iter_mut().zip([a, b, c, d, e, f, g, h]) {
        *word = word.wrapping_add(mixed);
    }
}

fn base64(bytes: &[u8]) -> String {
    const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut out = String::new();
    for chunk in bytes.chunks(3) {
        let triple = chunk.iter().fold(0_u32, |triple, &byte| triple << 8 | u32::from(byte)) << (8 * (3 - chunk.len()));
        for place in 0..4 {
            let letter = LETTERS[(triple >> (18 - 6 * place)) as usize & 63];
            out.push(if place <= chunk.len() { char::from(letter) } else { '=' });
        }
    }
    out
}

const START: [u32; 8] =
    [0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19];

#[rustfmt::skip]
const ROUNDS: [u32; 64] = [
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_vectors() {
        assert_eq!(source_hash(""), "sha256-47DEQpj8HBSa+/TImW+5JCeuQeRkm5NMpJWZG3hSuFU=");
        assert_eq!(source_hash("abc"), "sha256-ungWv48Bz+pBQUDeXa4iI7ADYaOWF3qctBD/YfIAFa0=");
        let two_blocks = "abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq";
        assert_eq!(source_hash(two_blocks), "sha256-JI1qYdIGOLjlwCaTDD5gOaM85Flk/yFn9uzt1BnbBsE=");
    }
    #[test]
    fn pieces_make_the_digest_of_the_whole() {
        let bytes: Vec<u8> = (0..300_u32).map(|at| (at * 7) as u8).collect();
        for length in [0, 1, 55, 56, 63, 64, 65, 119, 120, 128, 300] {
            let mut whole = Sha256::new();
            whole.update(&bytes[..length]);
            let whole = whole.finish();
            for piece in [1, 3, 63, 64, 65, 200] {
                let mut pieces = Sha256::new();
                bytes[..length].chunks(piece).for_each(|piece| pieces.update(piece));
                assert_eq!(pieces.finish(), whole, "{length} bytes in pieces of {piece}");
            }
        }
    }
}
