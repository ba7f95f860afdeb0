//! `tojson` as Hugging Face's templates expect it: Python's `json.dumps`, without HTML escaping.
//!
//! Follows transformers utils/chat_template_utils.py (`tojson`): keyword arguments `ensure_ascii`
//! (default false), `indent`, `separators`, `sort_keys`; keys keep their order.

use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Error, ErrorKind, Value};
use std::fmt::Write;

/// The text that Python's `json.dumps(value, ensure_ascii=False)` prints.
pub(super) fn dumps(value: &serde_json::Value) -> String {
    let style = Style {
        ensure_ascii: false,
        indent: None,
        item_separator: ", ".into(),
        key_separator: ": ".into(),
        sort_keys: false,
    };
    let mut out = String::new();
    let value = Value::from(minijinja::value::Serde(value));
    // Values that came from JSON are JSON; only nesting beyond what the parser allows could fail.
    match write_value(&mut out, &value, &style, 0) {
        Ok(()) => out,
        Err(_) => value.to_string(),
    }
}

struct Style {
    ensure_ascii: bool,
    /// One level of indentation; `None` puts everything on one line.
    indent: Option<String>,
    item_separator: String,
    key_separator: String,
    sort_keys: bool,
}

/// The filter. Errors for values that JSON does not have (undefined, functions).
pub(super) fn tojson(value: &Value, ensure_ascii: Option<bool>, args: Kwargs) -> Result<String, Error> {
    let indent = match args.get::<Option<Value>>("indent")? {
        None => None,
        Some(v) if v.is_none() => None,
        Some(v) => match v.as_str() {
            Some(text) => Some(text.to_owned()),
            None => Some(" ".repeat(usize::try_from(v)?.min(INDENT_MAX))),
        },
    };
    let (mut item_separator, mut key_separator) =
        (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned());
    if let Some(pair) = args.get::<Option<Value>>("separators")?.filter(|v| !v.is_none()) {
        item_separator = pair.get_item_by_index(0)?.to_string();
        key_separator = pair.get_item_by_index(1)?.to_string();
    }
    let style = Style {
        ensure_ascii: args.get::<Option<bool>>("ensure_ascii")?.or(ensure_ascii).unwrap_or(false),
        indent,
        item_separator,
        key_separator,
        sort_keys: args.get::<Option<bool>>("sort_keys")?.unwrap_or(false),
    };
    args.assert_all_used()?;
    let mut out = String::new();
    write_value(&mut out, value, &style, 0)?;
    Ok(out)
}

/// Deepest nesting that is written; minijinja's own parser allows less in literals.
const DEPTH_MAX: usize = 200;
const INDENT_MAX: usize = 64;

fn write_value(out: &mut String, value: &Value, style: &Style, depth: usize) -> Result<(), Error> {
    if depth > DEPTH_MAX {
        return Err(Error::new(
            ErrorKind::InvalidOperation,
            format!("tojson: nested deeper than {DEPTH_MAX} levels"),
        ));
    }
    match value.kind() {
        ValueKind::None => out.push_str("null"),
        ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
        ValueKind::Number => write_number(out, value)?,
        ValueKind::String => write_string(out, value.as_str().unwrap_or_default(), style.ensure_ascii),
        ValueKind::Seq | ValueKind::Iterable => {
            let items: Vec<Value> = value.try_iter()?.collect();
            write_items(out, ('[', ']'), &items, style, depth, |out, item| {
                write_value(out, item, style, depth + 1)
            })?;
        }
        ValueKind::Map => {
            let mut keys: Vec<Value> = value.try_iter()?.collect();
            if style.sort_keys {
                keys.sort_by_key(Value::to_string);
            }
            write_items(out, ('{', '}'), &keys, style, depth, |out, key| {
                write_key(out, key, style)?;
                out.push_str(&style.key_separator);
                write_value(out, &value.get_item(key)?, style, depth + 1)
            })?;
        }
        other => {
            return Err(Error::new(
                ErrorKind::InvalidOperation,
                format!("tojson: a value of kind {other} is not JSON"),
            ));
        }
    }
    Ok(())
}

fn write_items(
    out: &mut String,
    (open, close): (char, char),
    items: &[Value],
    style: &Style,
    depth: usize,
    mut write_item: impl FnMut(&mut String, &Value) -> Result<(), Error>,
) -> Result<(), Error> {
    out.push(open);
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push_str(&style.item_separator);
        }
        new_line(out, style, depth + 1);
        write_item(out, item)?;
    }
    if !items.is_empty() {
        new_line(out, style, depth);
    }
    out.push(close);
    Ok(())
}

fn new_line(out: &mut String, style: &Style, depth: usize) {
    if let Some(indent) = &style.indent {
        out.push('\n');
        out.extend(std::iter::repeat_n(indent.as_str(), depth));
    }
}

/// Python turns number, bool and None keys into strings.
fn write_key(out: &mut String, key: &Value, style: &Style) -> Result<(), Error> {
    match key.as_str() {
        Some(text) => write_string(out, text, style.ensure_ascii),
        None => {
            out.push('"');
            write_value(out, key, style, DEPTH_MAX)?;
            out.push('"');
        }
    }
    Ok(())
}

fn write_number(out: &mut String, value: &Value) -> Result<(), Error> {
    if value.is_integer() {
        let _ = write!(out, "{value}");
        return Ok(());
    }
    let number = f64::try_from(value.clone())?;
    out.push_str(&python_float(number));
    Ok(())
}

/// A float as Python prints it; `None` for any other value.
pub(super) fn float_text(value: &Value) -> Option<String> {
    let is_float = value.kind() == ValueKind::Number && !value.is_integer();
    if is_float { f64::try_from(value.clone()).ok().map(python_float) } else { None }
}

/// `repr(float)`: the shortest digits that read back, with an exponent below 1e-4 and from 1e16.
fn python_float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "Infinity" } else { "-Infinity" }.into();
    }
    let magnitude = number.abs();
    if magnitude != 0.0 && !(1e-4..1e16).contains(&magnitude) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').expect("invariant: LowerExp writes an exponent");
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |e| ('-', e));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = number.to_string();
    if text.contains('.') { text } else { text + ".0" }
}

fn write_string(out: &mut String, text: &str, ensure_ascii: bool) {
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            c if (c as u32) < 0x20 || (ensure_ascii && !c.is_ascii()) => {
                for unit in c.encode_utf16(&mut [0; 2]) {
                    let _ = write!(out, "\\u{unit:04x}");
                }
            }
            c => out.push(c),
        }
    }
    out.push('"');
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Expected texts are what CPython 3.11's `repr` prints.
    #[test]
    fn floats_are_spelt_like_python() {
        for (number, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-0.0, "-0.0"),
            (1e16, "1e+16"),
            (1.5e-7, "1.5e-07"),
            (123456789.125, "123456789.125"),
            (0.0001, "0.0001"),
            (1e15, "1000000000000000.0"),
            (1e300, "1e+300"),
        ] {
            assert_eq!(python_float(number), text);
        }
    }
}
