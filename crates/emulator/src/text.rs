//! Prepares a CUDA text for the emulator.

use deuteron_codegen::tile::Part;

use crate::EmulatorError;

/// What is replaced in a text, and by what.
// A kernel with less patience releases slots more often, and sooner where few blocks run.
const REPLACED: (&str, &str) = ("constexpr int PATIENCE = 100;", "constexpr int PATIENCE = 5;");

/// Whether the emulator implements a part of the device-side library in `machine/tile/`; others are plain C++.
pub fn is_emulated(part: Part) -> bool {
    !matches!(part, Part::Words | Part::Philox | Part::Warp)
}

/// The function that stands for `printf`.
const PRINT: &str = "emulator::print";

/// A text whose kernels call [`PRINT`] where they call `printf`.
fn printing(text: &str) -> String {
    let mut parts = text.split("printf(");
    let mut out = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let of_longer_name = out.ends_with(|before: char| before.is_alphanumeric() || "_:\"".contains(before));
        out += if of_longer_name { "printf" } else { PRINT };
        out += "(";
        out += part;
    }
    out
}

/// The text without the parts that the emulator implements, its variables in shared memory and its `printf` the emulator's.
pub fn emulated(text: &str) -> Result<String, EmulatorError> {
    let mut text = printing(&text.replace(REPLACED.0, REPLACED.1));
    for part in Part::ALL.into_iter().filter(|&part| is_emulated(part)) {
        text = text.replace(part.text(), "");
    }
    const EXTERN: &str = "extern __shared__ ";
    const SHARED: &str = "__shared__ ";
    while let Some(start) = text.find(EXTERN) {
        let (end, declaration) = declared(&text, start, EXTERN)?;
        let name = declaration.strip_suffix("[]").and_then(|rest| rest.rsplit_once(' '));
        let (element, name) = name.ok_or_else(|| EmulatorError::Declaration(declaration.into()))?;
        let pointer = format!("{element}* const {name} = ({element}*)shared_memory()");
        text.replace_range(start..end, &pointer);
    }
    // Variables start at multiples of 16 anyway.
    let mut number = 0;
    text = text.replace("__shared__ __align__(16) ", SHARED);
    while let Some(start) = text.find(SHARED) {
        let (end, declaration) = declared(&text, start, SHARED)?;
        let (of, names) = declaration.split_once(' ').ok_or_else(|| EmulatorError::Declaration(declaration.into()))?;
        let variable = |name: &str| {
            number += 1;
            let (name, sizes) = name.split_at(name.find('[').unwrap_or(name.len()));
            format!("{of} (&{name}){sizes} = shared_variable<{number}, {of}{sizes}>()")
        };
        let variables: Vec<String> = names.split(", ").map(variable).collect();
        text.replace_range(start..end, &variables.join("; "));
    }
    Ok(text)
}

/// Where a declaration ends, and what is declared there, without the semicolon.
fn declared<'a>(text: &'a str, start: usize, words: &str) -> Result<(usize, &'a str), EmulatorError> {
    let line = || text[start..].lines().next().unwrap_or_default().to_string();
    let end = start + text[start..].find(';').ok_or_else(|| EmulatorError::Declaration(line()))?;
    Ok((end, &text[start + words.len()..end]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn variables_in_shared_memory_are_the_emulators() {
        let text = emulated("extern __shared__ char s_all[];\n__shared__ float s_a[2][3], s_b;\n").unwrap();
        assert!(text.contains("char* const s_all = (char*)shared_memory();"), "{text}");
        let aligned = emulated("__shared__ __align__(16) short s_c[8];").unwrap();
        assert_eq!(aligned, "short (&s_c)[8] = shared_variable<1, short[8]>();");
        assert!(text.contains("float (&s_a)[2][3] = shared_variable<1, float[2][3]>(); float (&s_b) = "), "{text}");
    }

    #[test]
    fn kernels_print_by_the_emulator() {
        let text = emulated("if (!i) printf(\"%f\\n\", x); snprintf(s, 4, \"printf(\"); std::printf(s);").unwrap();
        assert_eq!(text, "if (!i) emulator::print(\"%f\\n\", x); snprintf(s, 4, \"printf(\"); std::printf(s);");
    }

    #[test]
    fn a_declaration_that_is_cut_off_is_an_error() {
        for text in ["__shared__ float x", "extern __shared__ char s[4];", "__shared__ x;"] {
            assert!(matches!(emulated(text), Err(EmulatorError::Declaration(_))), "{text}");
        }
    }
}
