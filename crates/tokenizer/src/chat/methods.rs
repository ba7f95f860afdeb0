//! Methods of Python's strings that templates call and minijinja-contrib's `pycompat` does not have.

use minijinja::value::from_args;
use minijinja::{Error, ErrorKind, State, Value};

/// The callback for methods that a value does not have: Python's, or an error.
pub(super) fn unknown_method(
    state: &mut State<'_, '_>,
    value: &Value,
    method: &str,
    args: &[Value],
) -> Result<Value, Error> {
    if let Some(text) = value.as_str()
        && let Some(result) = string_method(text, method, args)
    {
        return result;
    }
    minijinja_contrib::pycompat::unknown_method_callback(state, value, method, args)
}

/// `None` for a method that is not here.
fn string_method(text: &str, method: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    let result = match method {
        "removeprefix" => {
            one_text(args).map(|prefix| text.strip_prefix(prefix.as_str()).unwrap_or(text).into())
        }
        "removesuffix" => {
            one_text(args).map(|suffix| text.strip_suffix(suffix.as_str()).unwrap_or(text).into())
        }
        "partition" => separator(args).map(|by| match text.split_once(by.as_str()) {
            Some((head, tail)) => triple(head, &by, tail),
            None => triple(text, "", ""),
        }),
        "rpartition" => separator(args).map(|by| match text.rsplit_once(by.as_str()) {
            Some((head, tail)) => triple(head, &by, tail),
            None => triple("", "", text),
        }),
        "rsplit" => rsplit(text, args),
        "index" => one_text(args).and_then(|wanted| {
            let at = text.find(wanted.as_str()).ok_or_else(|| invalid("substring not found"))?;
            Ok(text[..at].chars().count().into())
        }),
        "casefold" => no_arguments(args).map(|()| text.to_lowercase().into()),
        "zfill" => from_args::<(usize,)>(args).map(|(width,)| zero_filled(text, width).into()),
        _ => return None,
    };
    Some(result)
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn no_arguments(args: &[Value]) -> Result<(), Error> {
    from_args::<()>(args)
}

fn one_text(args: &[Value]) -> Result<String, Error> {
    from_args::<(String,)>(args).map(|(text,)| text)
}

fn separator(args: &[Value]) -> Result<String, Error> {
    one_text(args).and_then(|by| if by.is_empty() { Err(invalid("empty separator")) } else { Ok(by) })
}

fn triple(a: &str, b: &str, c: &str) -> Value {
    [a, b, c].into_iter().map(Value::from).collect()
}

/// `str.rsplit(sep, maxsplit)`; without a separator, at runs of white space.
fn rsplit(text: &str, args: &[Value]) -> Result<Value, Error> {
    let (by, count_max): (Option<Value>, Option<i64>) = from_args(args)?;
    let splits = count_max.and_then(|n| usize::try_from(n).ok()).unwrap_or(usize::MAX);
    let mut parts: Vec<&str> = match by.as_ref().and_then(Value::as_str) {
        Some("") => return Err(invalid("empty separator")),
        Some(by) => text.rsplitn(splits.saturating_add(1), by).collect(),
        None => rsplit_spaces(text, splits),
    };
    parts.reverse();
    Ok(parts.into_iter().map(Value::from).collect())
}

/// The words of `text` from its end; after `splits` of them the rest in one piece.
fn rsplit_spaces(text: &str, splits: usize) -> Vec<&str> {
    let mut words = Vec::new();
    let mut rest = text.trim_end();
    while !rest.is_empty() {
        if words.len() == splits {
            words.push(rest);
            break;
        }
        let at = rest.rfind(char::is_whitespace);
        let (head, word) = at.map_or(("", rest), |at| {
            let space = rest[at..].chars().next().map_or(0, char::len_utf8);
            (&rest[..at], &rest[at + space..])
        });
        words.push(word);
        rest = head.trim_end();
    }
    words
}

/// Padded with zeros after a sign, to at most a width that no template means to exceed.
fn zero_filled(text: &str, width: usize) -> String {
    let zeros = width.min(256).saturating_sub(text.chars().count());
    let sign = usize::from(text.starts_with(['+', '-']));
    format!("{}{}{}", &text[..sign], "0".repeat(zeros), &text[sign..])
}
