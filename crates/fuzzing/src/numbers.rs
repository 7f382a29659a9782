//! Replaces numbers in a text: a graph with other sizes is still a graph, unlike one with random bytes.

use deuteron_reference::Generator;

/// None, one, around powers of two, more than 31, 32 and 63 bits hold.
const NUMBERS: [&str; 16] = [
    "0",
    "1",
    "2",
    "3",
    "7",
    "16",
    "33",
    "129",
    "1024",
    "4097",
    "65537",
    "2147483647",
    "2147483648",
    "4294967297",
    "9223372036854775807",
    "18446744073709551615",
];

/// The text with one of its whole numbers replaced by another, wherever it stands alone.
pub fn with_another_number(text: &str, random: &mut Generator) -> String {
    let found = numbers(text);
    if found.is_empty() {
        return text.to_string();
    }
    let chosen = &found[random.below(found.len())];
    let chosen = text[chosen.clone()].to_string();
    let other = NUMBERS[random.below(NUMBERS.len())];
    let mut changed = String::with_capacity(text.len());
    let mut from = 0;
    for place in found.iter().filter(|place| text[(*place).clone()] == chosen) {
        changed.push_str(&text[from..place.start]);
        changed.push_str(other);
        from = place.end;
    }
    changed.push_str(&text[from..]);
    changed
}

/// Where whole numbers stand that are no part of a name or of a fraction.
fn numbers(text: &str) -> Vec<std::ops::Range<usize>> {
    let bytes = text.as_bytes();
    let within = |byte: Option<&u8>| byte.is_some_and(|&byte| byte.is_ascii_alphanumeric() || b"_.%-".contains(&byte));
    let mut found = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        let length = bytes[at..].iter().take_while(|byte| byte.is_ascii_digit()).count();
        let before = at.checked_sub(1).and_then(|before| bytes.get(before));
        if length > 0 && !within(before) && !within(bytes.get(at + length)) {
            found.push(at..at + length);
        }
        at += length.max(1);
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_in_names_and_fractions_stay() {
        let text = "x2 = input f32[4,17] ; y = reshape x2 [17,4] ; z = add y 0.25 ; %3 = neg z";
        let found: Vec<&str> = numbers(text).into_iter().map(|place| &text[place]).collect();
        assert_eq!(found, ["4", "17", "17", "4"]);
    }

    #[test]
    fn a_number_changes_wherever_it_stands() {
        let text = "x = input f32[4,17] ; y = reshape x [17,4] ; out y";
        for seed in 0..50 {
            let changed = with_another_number(text, &mut Generator::new(seed));
            let kept = numbers(&changed).iter().map(|place| &changed[place.clone()]).collect::<Vec<_>>().join(" ");
            let pairs: Vec<&str> = kept.split(' ').collect();
            assert!(pairs[0] == pairs[3] && pairs[1] == pairs[2], "{changed}");
        }
        assert_eq!(with_another_number("no number", &mut Generator::new(1)), "no number");
    }
}
