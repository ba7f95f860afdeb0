//! GBNF, llama.cpp's form of EBNF that vLLM's and SGLang's grammars share, rewritten in Lark's form.
//!
//! `root ::= "a" rest* | [0-9]{2,4}` becomes `start: "a" g1 * | /[\x{30}-\x{39}]/ {2,4}`. Everything of GBNF
//! has a counterpart but references to tokens (`<think>`), which Lark's form writes itself.

use serde_json::Value;
use std::collections::HashMap;
use std::fmt::Write;

/// The rule that GBNF begins with, and Lark's.
const ROOT: &str = "root";
const START: &str = "start";

/// A piece of a grammar.
#[derive(Clone, Debug, PartialEq)]
enum Token {
    Name(String),
    /// `::=`
    Define,
    /// Written the same way in Lark's form: a literal, a class, a repetition, a parenthesis, `|`.
    Text(String),
}

/// The same grammar in Lark's form; the error says what is wrong with it, as the end of a sentence.
pub(super) fn to_lark(text: &str) -> Result<String, String> {
    let tokens = tokens(text)?;
    let is_head = |at: usize| matches!(tokens.get(at..at + 2), Some([Token::Name(_), Token::Define]));
    let mut names = HashMap::new();
    for (at, token) in tokens.iter().enumerate() {
        if let (Token::Name(name), true) = (token, is_head(at)) {
            let lark = if name == ROOT { START.into() } else { format!("g{}", names.len()) };
            if names.insert(name.as_str(), lark).is_some() {
                return Err(format!("it defines the rule {name} twice"));
            }
        }
    }
    if !names.contains_key(ROOT) {
        return Err(format!("it has no rule {ROOT}"));
    }
    let mut lark = String::new();
    for (at, token) in tokens.iter().enumerate() {
        let piece = match token {
            Token::Name(name) => {
                names.get(name.as_str()).ok_or_else(|| format!("it does not define the rule {name}"))?
            }
            Token::Define => ":",
            Token::Text(text) => text,
        };
        if at == 0 && !is_head(at) {
            return Err("it does not begin with a rule".into());
        }
        if *token == Token::Define && !is_head(at - 1) {
            return Err("a ::= has no rule's name before it".into());
        }
        let gap = if is_head(at) && at > 0 { "\n" } else { " " };
        write!(lark, "{gap}{piece}").expect("invariant: writing to a string does not fail");
    }
    Ok(lark.trim_start().to_owned() + "\n")
}

/// A grammar's characters, looked at from the left.
struct Reader<'a> {
    rest: &'a str,
}

fn tokens(text: &str) -> Result<Vec<Token>, String> {
    let mut reader = Reader { rest: text };
    let mut tokens = Vec::new();
    while let Some(c) = reader.rest.chars().next() {
        let token = match c {
            c if c.is_whitespace() => {
                reader.rest = reader.rest.trim_start();
                continue;
            }
            '#' => {
                reader.take_while(|c| c != '\n');
                continue;
            }
            '"' => Token::Text(reader.literal()?),
            '[' => Token::Text(reader.class()?),
            '{' => Token::Text(reader.repetition()?),
            '.' => reader.one("/(?s:.)/"),
            '(' | ')' | '|' | '*' | '+' | '?' => reader.one(&c.to_string()),
            _ if reader.rest.starts_with("::=") => {
                reader.rest = &reader.rest[3..];
                Token::Define
            }
            c if is_name_char(c) => Token::Name(reader.take_while(is_name_char).to_owned()),
            other => return Err(format!("{other:?} has no meaning in it")),
        };
        tokens.push(token);
    }
    Ok(tokens)
}

fn is_name_char(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | '-')
}

impl<'a> Reader<'a> {
    fn take_while(&mut self, is_part: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|c| !is_part(c)).unwrap_or(self.rest.len());
        let (taken, rest) = self.rest.split_at(end);
        self.rest = rest;
        taken
    }

    /// The one character that comes next, as `lark`.
    fn one(&mut self, lark: &str) -> Token {
        self.rest = &self.rest[1..];
        Token::Text(lark.into())
    }

    fn next(&mut self, within: &str) -> Result<char, String> {
        let c = self.rest.chars().next().ok_or_else(|| format!("a {within} does not end"))?;
        self.rest = &self.rest[c.len_utf8()..];
        Ok(c)
    }

    /// A character of a literal or class, escapes resolved.
    fn character(&mut self, within: &str) -> Result<char, String> {
        let c = self.next(within)?;
        if c != '\\' {
            return Ok(c);
        }
        let digits = match self.next(within)? {
            'n' => return Ok('\n'),
            'r' => return Ok('\r'),
            't' => return Ok('\t'),
            'x' => 2,
            'u' => 4,
            'U' => 8,
            c @ ('\\' | '"' | '[' | ']' | '-' | '^' | '/') => return Ok(c),
            other => return Err(format!("the escape \\{other} has no meaning in it")),
        };
        let bad = || format!("an escape needs {digits} hexadecimal digits of a character");
        let (code, rest) = self.rest.split_at_checked(digits).ok_or_else(bad)?;
        let c = u32::from_str_radix(code, 16).ok().and_then(char::from_u32).ok_or_else(bad)?;
        self.rest = rest;
        Ok(c)
    }

    fn literal(&mut self) -> Result<String, String> {
        self.next("literal")?;
        let mut text = String::new();
        while !self.rest.starts_with('"') {
            text.push(self.character("literal")?);
        }
        self.next("literal")?;
        // Lark's strings are spelled like JSON's.
        Ok(Value::from(text).to_string())
    }

    /// A class, as a regular expression.
    fn class(&mut self) -> Result<String, String> {
        const CLASS: &str = "class";
        self.next(CLASS)?;
        let is_negated = self.rest.starts_with('^');
        if is_negated {
            self.next(CLASS)?;
        }
        let mut class = String::new();
        while !self.rest.starts_with(']') {
            let first = self.character(CLASS)?;
            let is_range = self.rest.starts_with('-') && !self.rest.starts_with("-]");
            let mut last = first;
            if is_range {
                self.next(CLASS)?;
                last = self.character(CLASS)?;
            }
            if last < first {
                return Err(format!("the range {first}-{last} is empty"));
            }
            write!(class, "\\x{{{:x}}}-\\x{{{:x}}}", u32::from(first), u32::from(last))
                .expect("invariant: writing to a string does not fail");
        }
        self.next(CLASS)?;
        if class.is_empty() {
            return Err("a class is empty".into());
        }
        Ok(format!("/[{}{class}]/", if is_negated { "^" } else { "" }))
    }

    fn repetition(&mut self) -> Result<String, String> {
        let bounds = self.take_while(|c| c != '}');
        self.next("repetition")?;
        let inner: String = bounds[1..].chars().filter(|c| !c.is_whitespace()).collect();
        let is_number =
            |text: &str| !text.is_empty() && text.len() < 7 && text.bytes().all(|b| b.is_ascii_digit());
        let is_good = match inner.split_once(',') {
            None => is_number(&inner),
            Some((least, most)) => is_number(least) && (most.is_empty() || is_number(most)),
        };
        if is_good { Ok(format!("{{{inner}}}")) } else { Err(format!("{{{inner}}} is no repetition")) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::forced::tests::accepts;

    #[test]
    fn every_part_of_gbnf_has_its_counterpart() {
        let lark = to_lark(
            "# a comment\nroot ::= item (\",\" ws item)*  # another\n  | \"\\\"\\x41\\u00e9/\"\n\
             item ::= [a-c\\-]{2,3} | num-ber? \"!\" | [^a-z\\n]\nnum-ber ::= [0-9] + \".\" [0-9]{2} .\nws ::= \" \"*",
        )
        .unwrap();
        for good in ["ab", "a-c, ab", "ab,   ab", "1.23x!", "!", "\"A\u{e9}/", "?", "12.34\n!"] {
            assert!(accepts(&lark, good), "{good:?} in {lark}");
        }
        for bad in ["a", "abcd", "ab,", "1.2x!", "x", "\n", "\"A"] {
            assert!(!accepts(&lark, bad), "{bad:?} in {lark}");
        }
    }

    #[test]
    fn what_is_no_gbnf_is_refused_in_words() {
        for (text, word) in [
            ("x ::= \"a\"", "no rule root"),
            ("root ::= other", "does not define the rule other"),
            ("root ::= \"a\"\nroot ::= \"b\"", "twice"),
            ("\"a\" root ::= \"b\"", "begin with a rule"),
            ("root ::= \"a", "literal does not end"),
            ("root ::= [a", "class does not end"),
            ("root ::= []", "empty"),
            ("root ::= [z-a]", "z-a"),
            ("root ::= \"a\"{x}", "{x}"),
            ("root ::= \"\\q\"", "\\q"),
            ("root ::= \"\\x4\"", "hexadecimal"),
            ("root ::= <think>", "'<'"),
            ("root ::= ::= \"a\"", "no rule's name"),
        ] {
            let why = to_lark(text).expect_err(text);
            assert!(why.contains(word), "{text}: {why}");
        }
    }
}
