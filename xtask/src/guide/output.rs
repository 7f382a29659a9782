//! Whether a command printed what the book says.

/// How lines are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Compare {
    /// character by character
    Exactly,
    /// any number stands for any other, with any unit of time and any width of a column; so does any instruction set of a CPU
    ButNumbers,
}

/// The first line of the book that the output does not have where it should, if there is one. A line `...` stands for any lines; no line at all for any output.
pub fn missing(expected: &str, output: &str, compare: Compare) -> Option<String> {
    places(expected, output, compare).err()
}

/// What the book should say, if the output differs from it in numbers alone: its lines, each as it is printed now.
pub fn renewed(expected: &str, output: &str) -> Option<String> {
    let places = places(expected, output, Compare::ButNumbers).ok()?;
    let printed: Vec<&str> = output.trim_end().lines().collect();
    let lines = expected.trim_end().lines().zip(places);
    let renewed: Vec<&str> = lines.map(|(line, place)| place.map_or(line, |place| printed[place].trim_end())).collect();
    Some(renewed.into_iter().flat_map(|line| [line, "\n"]).collect())
}

/// For each line of the book the line of the output that it stands for, none for `...`; or the first line that is missing.
fn places(expected: &str, output: &str, compare: Compare) -> Result<Vec<Option<usize>>, String> {
    let line = |line: &str| match compare {
        Compare::Exactly => line.trim_end().to_string(),
        Compare::ButNumbers => without_numbers(line),
    };
    if expected.trim().is_empty() {
        return Ok(Vec::new());
    }
    let found: Vec<String> = output.trim_end().lines().map(line).collect();
    let expected: Vec<&str> = expected.trim_end().lines().collect();
    let (mut at, mut anywhere, mut places) = (0, false, Vec::new());
    let mut segments = expected.split(|line| *line == "...").peekable();
    while let Some(segment) = segments.next() {
        let wanted: Vec<String> = segment.iter().map(|text| line(text)).collect();
        let is_last = segments.peek().is_none();
        let fits = |start: usize| {
            found[start..].starts_with(&wanted)
                && (!is_last || wanted.is_empty() || start + wanted.len() == found.len())
        };
        let start = if anywhere {
            (at..=found.len()).find(|&start| fits(start))
        } else {
            Some(at).filter(|&start| fits(start))
        };
        let Some(start) = start else { return Err(first_missing(segment, &wanted, &found[at..])) };
        at = start + wanted.len();
        places.extend((start..at).map(Some));
        places.extend((!is_last).then_some(None));
        anywhere = true;
    }
    Ok(places)
}

/// The line to show for a segment that is not there: the first that stands nowhere in the output, else its first.
fn first_missing(segment: &[&str], wanted: &[String], found: &[String]) -> String {
    let absent = wanted.iter().position(|line| !found.contains(line)).unwrap_or_default();
    segment.get(absent).map(ToString::to_string).unwrap_or_default()
}

/// Instruction sets of CPUs, of which any stands for any other where numbers do.
const SETS: [&str; 4] = ["avx512", "avx2", "sse2", "neon"];

/// A line in which every number is `#`, every unit of time `s` and every run of spaces or of lines of a table one character.
fn without_numbers(line: &str) -> String {
    let mut out: Vec<String> = Vec::new();
    for word in line.split_whitespace() {
        let word = if SETS.contains(&word.trim_end_matches(',')) { "a set".into() } else { masked(word) };
        let is_unit = ["ns", "us", "ms"].contains(&word.as_str()) && out.last().is_some_and(|last| last.ends_with('#'));
        out.push(if is_unit { "s".into() } else { word });
    }
    out.join(" ")
}

fn masked(word: &str) -> String {
    let mut out = String::new();
    let mut rest = word.chars().peekable();
    let mut before = None;
    while let Some(c) = rest.next() {
        if c.is_ascii_digit() {
            out.push('#');
            while rest.next_if(|&next| next.is_ascii_digit() || next == '.' || next == ',').is_some() {}
            // The exponent of a number such as 7.16e-9.
            if rest.peek() == Some(&'e') {
                let mut ahead = rest.clone();
                ahead.next();
                ahead.next_if(|&next| next == '-' || next == '+');
                if ahead.peek().is_some_and(char::is_ascii_digit) {
                    while ahead.next_if(char::is_ascii_digit).is_some() {}
                    rest = ahead;
                }
            }
        } else if !(matches!(c, '─' | '═' | '-') && before == Some(c)) {
            out.push(c);
        }
        before = Some(c);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fits(expected: &str, output: &str) -> bool {
        missing(expected, output, Compare::Exactly).is_none()
    }

    #[test]
    fn all_lines_must_be_there_in_order() {
        assert!(fits("a\nb\n", "a\nb\n") && fits("", "anything") && fits("a  \n", "a"));
        assert!(
            !fits("a\n", "a\nb\n") && !fits("b\n", "a\nb\n") && !fits("a\nc\n", "a\nb\n") && !fits("a\nb\nc", "a\nb")
        );
    }

    #[test]
    fn three_dots_stand_for_any_lines() {
        let output = "a\nb\nc\nd\n";
        assert!(
            fits("...\nb\n...\n", output)
                && fits("a\n...\nd", output)
                && fits("...\nc\nd", output)
                && fits("a\nb\n...\nc\nd", output)
        );
        assert!(
            !fits("...\nb\n...\na\n...", output)
                && !fits("...\nc\n", output)
                && !fits("b\n...", output)
                && !fits("...\nb\nd\n...", output)
        );
        assert_eq!(missing("a\n...\nx\n...\n", output, Compare::Exactly).unwrap(), "x");
    }

    #[test]
    fn numbers_are_renewed_and_words_are_not() {
        let book = "a 1 us\n...\n│ b ┆  1.5 us │\n...\nend 2\n";
        let printed = "a 13 us  \nx\n│ b ┆ 12.5 us │\ny\nend 3\n";
        assert_eq!(renewed(book, printed).unwrap(), "a 13 us\n...\n│ b ┆ 12.5 us │\n...\nend 3\n");
        assert_eq!(renewed("a 1\n...\n", "a 2\nb\n").unwrap(), "a 2\n...\n");
        assert!(renewed("a 1\n", "b 1\n").is_none() && renewed("a 1\nb\n", "a 1\n").is_none());
    }

    #[test]
    fn numbers_may_differ_where_the_book_says_so() {
        let same = |a: &str, b: &str| missing(a, b, Compare::ButNumbers).is_none();
        assert!(same("fused  1  73.9 us ┆ 1.20x", "fused 12 1.05 ms ┆ 0.9x") && same("error 7.16e-9", "error 12"));
        assert!(same("├──────┤", "├───┤") && same("cpu, 2 threads, avx512", "cpu, 16 threads, neon"));
        assert!(
            !same("fused 1", "unfused 1")
                && !same("x 1 us", "x 1 KB")
                && !missing("1", "2", Compare::Exactly).unwrap().is_empty()
        );
    }
}
