//! Python literals as JSON: strings, numbers, True/False/None, lists, tuples and dicts.

use super::json::JsonScanner;

const DEPTH_MAX: usize = 64;

/// Follows brackets and strings to the bracket that closes a call.
#[derive(Debug)]
pub(super) struct Brackets {
    depth: usize,
    quote: Option<char>,
    is_escaped: bool,
}

impl Brackets {
    pub(super) fn new() -> Self {
        Self { depth: 0, quote: None, is_escaped: false }
    }

    /// Takes the next character: is it the bracket that closes the call?
    pub(super) fn closes(&mut self, c: char) -> bool {
        if let Some(quote) = self.quote {
            match c {
                _ if self.is_escaped => self.is_escaped = false,
                '\\' => self.is_escaped = true,
                c if c == quote => self.quote = None,
                _ => {}
            }
            return false;
        }
        match c {
            '"' | '\'' => self.quote = Some(c),
            '(' | '[' | '{' => self.depth += 1,
            ')' if self.depth == 0 => return true,
            ')' | ']' | '}' => self.depth = self.depth.saturating_sub(1),
            _ => {}
        }
        false
    }
}

/// `city="Bern", days=2` as the JSON text of an object. `None`: it is anything but keywords with literals.
pub(super) fn keyword_arguments(text: &str) -> Option<String> {
    let mut reader = Reader { rest: text, out: String::from("{"), depth: 0 };
    reader.skip_spaces();
    let mut count = 0;
    while !reader.rest.is_empty() {
        let len = reader.rest.find(|c: char| !(c.is_alphanumeric() || c == '_'))?;
        let (name, rest) = reader.rest.split_at(len);
        if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
            return None;
        }
        if count > 0 {
            reader.out.push_str(", ");
        }
        reader.out.push_str(&format!("{}: ", serde_json::Value::from(name)));
        reader.rest = rest;
        reader.skip_spaces();
        reader.take('=')?;
        reader.value()?;
        count += 1;
        reader.skip_spaces();
        if !reader.rest.is_empty() {
            reader.take(',')?;
            reader.skip_spaces();
        }
    }
    reader.out.push('}');
    Some(reader.out)
}

/// One literal as JSON text. `None`: it is none.
pub(super) fn literal(text: &str) -> Option<String> {
    let mut reader = Reader { rest: text, out: String::new(), depth: 0 };
    reader.value()?;
    reader.rest.trim().is_empty().then_some(reader.out)
}

struct Reader<'a> {
    rest: &'a str,
    out: String,
    depth: usize,
}

impl Reader<'_> {
    fn skip_spaces(&mut self) {
        self.rest = self.rest.trim_start();
    }

    fn peek(&self) -> Option<char> {
        self.rest.chars().next()
    }

    fn take(&mut self, wanted: char) -> Option<()> {
        self.rest = self.rest.strip_prefix(wanted)?;
        Some(())
    }

    fn value(&mut self) -> Option<()> {
        self.skip_spaces();
        match self.peek()? {
            quote @ ('"' | '\'') => {
                let text = self.string(quote)?;
                self.out.push_str(&serde_json::Value::from(text).to_string());
            }
            '[' => self.items('[', ']')?,
            '(' => self.items('(', ')')?,
            '{' => self.dict()?,
            _ => self.word()?,
        }
        Some(())
    }

    fn string(&mut self, quote: char) -> Option<String> {
        self.take(quote)?;
        let mut text = String::new();
        let mut chars = self.rest.char_indices();
        loop {
            let (at, c) = chars.next()?;
            match c {
                c if c == quote => {
                    self.rest = &self.rest[at + c.len_utf8()..];
                    return Some(text);
                }
                '\\' => match chars.next()?.1 {
                    'n' => text.push('\n'),
                    't' => text.push('\t'),
                    'r' => text.push('\r'),
                    'u' => {
                        let digits: String = (0..4).filter_map(|_| chars.next().map(|(_, d)| d)).collect();
                        text.push(u32::from_str_radix(&digits, 16).ok().and_then(char::from_u32)?);
                    }
                    c @ ('\\' | '\'' | '"') => text.push(c),
                    // Python keeps the backslash of an escape that it does not know.
                    other => text.extend(['\\', other]),
                },
                c => text.push(c),
            }
        }
    }

    fn items(&mut self, open: char, close: char) -> Option<()> {
        self.enter(open)?;
        self.out.push('[');
        let mut count = 0;
        while self.take(close).is_none() {
            if count > 0 {
                self.take(',')?;
                self.skip_spaces();
                if self.take(close).is_some() {
                    break;
                }
                self.out.push_str(", ");
            }
            self.value()?;
            self.skip_spaces();
            count += 1;
        }
        self.out.push(']');
        self.depth -= 1;
        Some(())
    }

    fn dict(&mut self) -> Option<()> {
        self.enter('{')?;
        self.out.push('{');
        let mut count = 0;
        while self.take('}').is_none() {
            if count > 0 {
                self.take(',')?;
                self.skip_spaces();
                if self.take('}').is_some() {
                    break;
                }
                self.out.push_str(", ");
            }
            let quote = self.peek().filter(|c| matches!(c, '"' | '\''))?;
            let key = self.string(quote)?;
            self.out.push_str(&format!("{}: ", serde_json::Value::from(key)));
            self.skip_spaces();
            self.take(':')?;
            self.value()?;
            self.skip_spaces();
            count += 1;
        }
        self.out.push('}');
        self.depth -= 1;
        Some(())
    }

    fn enter(&mut self, open: char) -> Option<()> {
        self.take(open)?;
        self.skip_spaces();
        self.depth += 1;
        (self.depth <= DEPTH_MAX).then_some(())
    }

    /// A number, or a word of either language.
    fn word(&mut self) -> Option<()> {
        let len = self.rest.find([',', ')', ']', '}', ' ', '\n', ':']).unwrap_or(self.rest.len());
        let (word, rest) = self.rest.split_at(len);
        let json = match word {
            "True" | "true" => "true",
            "False" | "false" => "false",
            "None" | "null" => "null",
            number if is_json_number(number) => number,
            _ => return None,
        };
        self.out.push_str(json);
        self.rest = rest;
        Some(())
    }
}

fn is_json_number(text: &str) -> bool {
    let mut scanner = JsonScanner::new();
    // A list around it, for a number ends only where something follows.
    let mut chars = std::iter::once('[').chain(text.chars()).chain(std::iter::once(']'));
    text.starts_with(|c: char| c.is_ascii_digit() || c == '-')
        && chars.all(|c| scanner.push(c).is_ok())
        && scanner.is_done()
}
