//! Fuzz bodies of the readers of files that people write: machines, analyses, expectations.

use deuteron_plan::Machine;
use deuteron_report::{Analysis, diff, expect, html, parse, roofline_svg};

/// Whatever the bytes, a machine file is read or refused; what is read prints to what reads the same.
pub fn machine(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let Ok(machine) = Machine::parse(&text) else { return false };
    let printed = machine.to_string();
    let again = Machine::parse(&printed).unwrap_or_else(|error| panic!("printed text is refused: {error}\n{printed}"));
    assert_eq!(again, machine, "printing and parsing are inverse\n{printed}");
    true
}

/// Whatever the bytes, an analysis is read or refused; what is read can be shown and compared.
pub fn analysis(data: &[u8]) -> bool {
    let text = String::from_utf8_lossy(data);
    let Ok(analysis) = parse(&text) else { return false };
    let page = html(&analysis);
    assert!(page.ends_with("</html>\n") || page.trim_end().ends_with("</html>"), "the page is whole");
    assert!(roofline_svg(&analysis).contains("</svg>"), "the picture is whole");
    let _ = diff(&analysis, &analysis).to_string();
    true
}

/// Whatever the bytes, expectations are answered or refused.
pub fn expectations(data: &[u8], against: &Analysis) -> bool {
    let text = String::from_utf8_lossy(data);
    let Ok(violations) = expect(against, &text) else { return false };
    violations.iter().for_each(|violation| drop(violation.to_string()));
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Mutations of seeds that are refused would all be refused for the same reason. After a change of the form, write them anew:
    /// `deuteron analyze GRAPH --json`, of a small graph on the CPU and of `gpt2-block --seq 16 --device h200 --flip`.
    #[test]
    fn seeds_of_analyses_are_accepted() {
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../../fuzz/seeds/analysis");
        let seeds: Vec<_> = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
        assert!(!seeds.is_empty());
        for seed in seeds {
            assert!(analysis(&std::fs::read(&seed).unwrap()), "{}", seed.display());
        }
    }
}
