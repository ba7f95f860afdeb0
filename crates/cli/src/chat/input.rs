//! From lines to messages: a trailing backslash joins the next line, `"""` opens and closes a longer text.

/// Opens and closes a text of several lines.
const QUOTES: &str = "\"\"\"";

/// Whether more lines belong to `text`, the lines so far.
pub fn is_open(text: &str) -> bool {
    match text.trim_start().strip_prefix(QUOTES) {
        Some(inner) => !inner.trim_end().ends_with(QUOTES),
        None => text.ends_with('\\'),
    }
}

/// The message that the lines of an input spell.
pub fn message(text: &str) -> String {
    let quoted = text.trim().strip_prefix(QUOTES).and_then(|inner| inner.strip_suffix(QUOTES));
    match quoted {
        Some(inner) => inner.trim_matches('\n').to_owned(),
        None => text.replace("\\\n", "\n"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backslashes_join_lines() {
        assert!(is_open("one\\") && is_open("one\\\ntwo\\"));
        assert!(!is_open("one\\\ntwo") && !is_open("one"));
        assert_eq!(message("one\\\ntwo"), "one\ntwo");
        assert_eq!(message("C:\\dir"), "C:\\dir");
    }

    #[test]
    fn quotes_hold_lines_as_they_are() {
        assert!(is_open("\"\"\"") && is_open("  \"\"\"a\nb\\") && is_open("\"\"\"a\n\nb"));
        assert!(!is_open("\"\"\"a\nb\"\"\"") && !is_open("\"\"\"\na\\\n\"\"\" "));
        assert_eq!(message("\"\"\"\na\\\n  b\n\"\"\""), "a\\\n  b");
        assert_eq!(message("\"\"\"a\"\"\""), "a");
        // Quotes elsewhere are text.
        assert!(!is_open("say \"\"\"x"));
        assert_eq!(message("say \"\"\"x"), "say \"\"\"x");
    }
}
