//! Escaping of untrusted text in markup and in the data block of the page.

/// Text for an element or a quoted attribute, in HTML and in XML. Characters that XML does not allow become U+FFFD.
pub(crate) fn markup(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            '\u{2028}' => out.push_str("&#x2028;"),
            '\u{2029}' => out.push_str("&#x2029;"),
            '\t' | '\n' | '\r' => out.push(character),
            '\0'..='\x1f' | '\x7f' | '\u{fffe}' | '\u{ffff}' => out.push('\u{fffd}'),
            _ => out.push(character),
        }
    }
    out
}

/// A sentence as markup: what stands between backticks is code.
pub(crate) fn prose(text: &str) -> String {
    let parts: Vec<&str> = text.split('`').collect();
    // A backtick without a second one is itself.
    if parts.len().is_multiple_of(2) {
        return markup(text);
    }
    let part = |(index, part): (usize, &&str)| match index % 2 {
        0 => markup(part),
        _ => format!("<code>{}</code>", markup(part)),
    };
    parts.iter().enumerate().map(part).collect()
}

/// JSON that may stand in a `<script>` element: no character in it can end the element or open a comment.
///
/// In JSON these characters occur only inside strings, so escaping them does not change the parsed value.
pub(crate) fn script_json(json: &str) -> String {
    let mut out = String::with_capacity(json.len() + json.len() / 50);
    for character in json.chars() {
        match character {
            '<' => out.push_str("\\u003c"),
            '>' => out.push_str("\\u003e"),
            '&' => out.push_str("\\u0026"),
            '\u{2028}' => out.push_str("\\u2028"),
            '\u{2029}' => out.push_str("\\u2029"),
            _ => out.push(character),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markup_has_no_special_characters_left() {
        assert_eq!(markup("a<b>&\"'\u{0}"), "a&lt;b&gt;&amp;&quot;&#39;\u{fffd}");
    }

    #[test]
    fn what_is_between_backticks_is_code() {
        assert_eq!(prose("see `a<b>` and `c`."), "see <code>a&lt;b&gt;</code> and <code>c</code>.");
        assert_eq!(prose("one ` alone"), "one ` alone");
        assert_eq!(prose("<p>"), "&lt;p&gt;");
    }

    #[test]
    fn script_json_reads_back_the_same() {
        let text = "</script><!-- & \u{2028}\u{2029}";
        let escaped = script_json(&serde_json::to_string(text).unwrap());
        assert!(!escaped.contains(['<', '>', '&', '\u{2028}', '\u{2029}']));
        assert_eq!(serde_json::from_str::<String>(&escaped).unwrap(), text);
    }
}
