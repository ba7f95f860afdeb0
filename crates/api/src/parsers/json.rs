//! The one streaming JSON reader under every tool-call format.
//!
//! [`JsonScanner`] is a pushdown automaton for one JSON value, a character at a time: it accepts
//! exactly JSON (RFC 8259), but for raw control characters inside strings, which models write and
//! [`escape_control`] repairs. It keeps no text.
//! [`CallObject`] sits on it and reads one call, `{"name": ..., "arguments": {...}}`, giving the arguments
//! out as they come.

/// Deepest nesting of a call's arguments; axum and serde stop at 128 too.
const DEPTH_MAX: usize = 128;
/// Longest function name, in bytes (OpenAI allows 64).
pub(super) const NAME_LEN_MAX: usize = 256;
/// Longest top-level key of a call object.
const KEY_LEN_MAX: usize = 64;

/// What a character is in the value around it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Part {
    /// White space between tokens.
    Space,
    /// `{` or `[`; its depth is that outside the bracket.
    Open,
    /// `}` or `]`; its depth is that outside the bracket.
    Close,
    /// `,`
    Comma,
    /// `:`
    Colon,
    /// A character of an object's key, quotes included.
    Key,
    /// A character of a string (quotes included), a number or a word.
    Scalar,
}

/// The text is not JSON from here on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NotJson;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A value must come.
    Value,
    /// After `[`: a value or `]`.
    FirstItem,
    /// After `{`: a key or `}`.
    FirstKey,
    /// After `,` in an object: a key.
    Key,
    /// After a key: `:`.
    Colon,
    /// After a value inside a container: `,` or the bracket.
    AfterValue,
    /// Inside a string; `is_key` tells which part it is.
    Text {
        is_key: bool,
    },
    /// After a backslash.
    Escape {
        is_key: bool,
    },
    /// Inside `\uXXXX`.
    Unicode {
        is_key: bool,
        left: u8,
    },
    Number(Number),
    /// Inside `true`, `false`, `null`: what must still come.
    Word(&'static str),
    /// The value is complete.
    Done,
}

/// Where in a number: which characters may follow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Number {
    Minus,
    Zero,
    Integer,
    Point,
    Fraction,
    Exponent,
    ExponentSign,
    ExponentDigits,
}

impl Number {
    fn next(self, c: char) -> Option<Self> {
        match (self, c) {
            (Self::Minus, '0') => Some(Self::Zero),
            (Self::Minus, '1'..='9') | (Self::Integer, '0'..='9') => Some(Self::Integer),
            (Self::Zero | Self::Integer, '.') => Some(Self::Point),
            (Self::Point | Self::Fraction, '0'..='9') => Some(Self::Fraction),
            (Self::Zero | Self::Integer | Self::Fraction, 'e' | 'E') => Some(Self::Exponent),
            (Self::Exponent, '+' | '-') => Some(Self::ExponentSign),
            (Self::Exponent | Self::ExponentSign | Self::ExponentDigits, '0'..='9') => {
                Some(Self::ExponentDigits)
            }
            _ => None,
        }
    }

    fn is_complete(self) -> bool {
        matches!(self, Self::Zero | Self::Integer | Self::Fraction | Self::ExponentDigits)
    }
}

/// Reads one JSON value, a character at a time.
#[derive(Debug)]
pub(super) struct JsonScanner {
    state: State,
    /// Closing brackets that must still come.
    closers: Vec<char>,
}

impl JsonScanner {
    pub(super) fn new() -> Self {
        Self { state: State::Value, closers: Vec::new() }
    }

    /// The value is complete. A number at the top level never is: it ends only where the text does.
    pub(super) fn is_done(&self) -> bool {
        self.state == State::Done
    }

    /// Containers around the next character.
    pub(super) fn depth(&self) -> usize {
        self.closers.len()
    }

    /// Takes the next character. After an error, or once done, the scanner is of no further use.
    pub(super) fn push(&mut self, c: char) -> Result<Part, NotJson> {
        match self.state {
            State::Text { is_key } => {
                match c {
                    '"' => self.state = if is_key { State::Colon } else { self.after_value() },
                    '\\' => self.state = State::Escape { is_key },
                    _ => {}
                }
                Ok(string_part(is_key))
            }
            State::Escape { is_key } => {
                self.state = match c {
                    'u' => State::Unicode { is_key, left: 4 },
                    '"' | '\\' | '/' | 'b' | 'f' | 'n' | 'r' | 't' => State::Text { is_key },
                    _ => return Err(NotJson),
                };
                Ok(string_part(is_key))
            }
            State::Unicode { is_key, left } => {
                if !c.is_ascii_hexdigit() {
                    return Err(NotJson);
                }
                self.state = if left == 1 {
                    State::Text { is_key }
                } else {
                    State::Unicode { is_key, left: left - 1 }
                };
                Ok(string_part(is_key))
            }
            State::Number(number) => match number.next(c) {
                Some(next) => {
                    self.state = State::Number(next);
                    Ok(Part::Scalar)
                }
                None if number.is_complete() => {
                    self.state = self.after_value();
                    self.structure(c)
                }
                None => Err(NotJson),
            },
            State::Word(rest) => {
                let rest = rest.strip_prefix(c).ok_or(NotJson)?;
                self.state = if rest.is_empty() { self.after_value() } else { State::Word(rest) };
                Ok(Part::Scalar)
            }
            _ => self.structure(c),
        }
    }

    fn after_value(&self) -> State {
        if self.closers.is_empty() { State::Done } else { State::AfterValue }
    }

    fn structure(&mut self, c: char) -> Result<Part, NotJson> {
        let is_value = matches!(self.state, State::Value | State::FirstItem);
        let is_key = matches!(self.state, State::Key | State::FirstKey);
        let may_close = matches!(self.state, State::AfterValue | State::FirstItem | State::FirstKey);
        let (state, part) = match c {
            ' ' | '\t' | '\n' | '\r' if self.state != State::Done => return Ok(Part::Space),
            '"' if is_key || is_value => (State::Text { is_key }, string_part(is_key)),
            '{' | '[' if is_value && self.closers.len() < DEPTH_MAX => {
                self.closers.push(if c == '{' { '}' } else { ']' });
                (if c == '{' { State::FirstKey } else { State::FirstItem }, Part::Open)
            }
            '}' | ']' if may_close && self.closers.last() == Some(&c) => {
                self.closers.pop();
                (self.after_value(), Part::Close)
            }
            ',' if self.state == State::AfterValue => {
                let in_object = self.closers.last() == Some(&'}');
                (if in_object { State::Key } else { State::Value }, Part::Comma)
            }
            ':' if self.state == State::Colon => (State::Value, Part::Colon),
            '-' if is_value => (State::Number(Number::Minus), Part::Scalar),
            '0' if is_value => (State::Number(Number::Zero), Part::Scalar),
            '1'..='9' if is_value => (State::Number(Number::Integer), Part::Scalar),
            't' if is_value => (State::Word("rue"), Part::Scalar),
            'f' if is_value => (State::Word("alse"), Part::Scalar),
            'n' if is_value => (State::Word("ull"), Part::Scalar),
            _ => return Err(NotJson),
        };
        self.state = state;
        Ok(part)
    }
}

fn string_part(is_key: bool) -> Part {
    if is_key { Part::Key } else { Part::Scalar }
}

/// Writes `c` as it must stand in a JSON text: raw control characters inside strings escaped.
pub(super) fn escape_control(c: char, in_string: bool, out: &mut String) {
    match c {
        _ if !in_string || u32::from(c) >= 0x20 => out.push(c),
        '\n' => out.push_str("\\n"),
        '\r' => out.push_str("\\r"),
        '\t' => out.push_str("\\t"),
        _ => out.push_str(&format!("\\u{:04x}", u32::from(c))),
    }
}

/// What [`CallObject::push`] found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum CallStep {
    /// Nothing to tell yet.
    More,
    /// The name is known and arguments follow: the call is one.
    Start(String),
    /// The call object is complete. `Some`: it was only now known to be a call, with its arguments.
    End(Option<(String, String)>),
    /// This is not a call (or no longer JSON, after a start).
    Fail,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Field {
    Name,
    Arguments,
    /// `type`, `id`, `function`-less extras that formats add.
    Other,
}

/// Reads one call object. Accepted top-level keys: `name`; `arguments` or `parameters`; `id`, `type`,
/// `index`. Any other key means that this is data, not a call.
#[derive(Debug)]
pub(super) struct CallObject {
    scanner: JsonScanner,
    key: String,
    field: Field,
    /// Raw text of the scalar that is being read, at the object's own level.
    value: String,
    name: Option<String>,
    /// Arguments that came before the name, or as a JSON text inside a string.
    held: Option<String>,
    has_arguments: bool,
    started: bool,
    /// A bare object must have arguments to count as a call.
    needs_arguments: bool,
}

impl CallObject {
    /// `needs_arguments`: a lone name is data, not a call (for formats without markers).
    pub(super) fn new(needs_arguments: bool) -> Self {
        Self {
            scanner: JsonScanner::new(),
            key: String::new(),
            field: Field::Other,
            value: String::new(),
            name: None,
            held: None,
            has_arguments: false,
            started: false,
            needs_arguments,
        }
    }

    /// Takes the next character; text of arguments goes to `arguments` once the call has started.
    pub(super) fn push(&mut self, c: char, arguments: &mut String) -> CallStep {
        let depth = self.scanner.depth();
        let Ok(part) = self.scanner.push(c) else { return CallStep::Fail };
        // A number ends at the character after it, so the depth is that before the push.
        match (depth, part) {
            (0, Part::Space) => CallStep::More,
            (0, Part::Open) if c == '{' => CallStep::More,
            (0, _) => CallStep::Fail,
            (1, Part::Space) => CallStep::More,
            (1, Part::Key) => {
                self.key.push(c);
                if self.key.len() > KEY_LEN_MAX { CallStep::Fail } else { CallStep::More }
            }
            (1, Part::Colon) => self.key_ended(),
            (1, Part::Comma) => {
                if self.value_ended() {
                    CallStep::More
                } else {
                    CallStep::Fail
                }
            }
            (1, Part::Close) => self.object_ended(),
            (1, Part::Open) if self.field == Field::Arguments && c == '{' => {
                self.has_arguments = true;
                let step = match self.name.take() {
                    Some(name) => {
                        self.started = true;
                        CallStep::Start(name)
                    }
                    None => {
                        self.held = Some(String::new());
                        CallStep::More
                    }
                };
                self.argument_char(c, false, arguments);
                step
            }
            (1, Part::Open) if self.field != Field::Other => CallStep::Fail,
            (1, Part::Scalar) => {
                self.value.push(c);
                let is_long = self.field == Field::Name && self.value.len() > NAME_LEN_MAX;
                if is_long { CallStep::Fail } else { CallStep::More }
            }
            (_, part) => {
                if self.field == Field::Arguments {
                    let in_string = matches!(part, Part::Key | Part::Scalar);
                    self.argument_char(c, in_string, arguments);
                }
                CallStep::More
            }
        }
    }

    fn argument_char(&mut self, c: char, in_string: bool, arguments: &mut String) {
        let out = if self.started { arguments } else { self.held.get_or_insert_default() };
        escape_control(c, in_string, out);
    }

    fn key_ended(&mut self) -> CallStep {
        let key = std::mem::take(&mut self.key);
        self.field = match key.as_str() {
            "\"name\"" if self.name.is_none() && !self.started => Field::Name,
            "\"arguments\"" | "\"parameters\"" if !self.has_arguments => Field::Arguments,
            "\"id\"" | "\"type\"" | "\"index\"" => Field::Other,
            _ => return CallStep::Fail,
        };
        CallStep::More
    }

    /// A top-level value is complete. False when it has the wrong type.
    fn value_ended(&mut self) -> bool {
        let mut value = String::new();
        std::mem::take(&mut self.value).chars().for_each(|c| escape_control(c, true, &mut value));
        match self.field {
            Field::Name => {
                self.name = serde_json::from_str::<String>(&value).ok().filter(|name| !name.is_empty());
                self.name.is_some()
            }
            // An object leaves no scalar behind; null means no arguments; a string holds the JSON text.
            Field::Arguments if value.is_empty() => true,
            Field::Arguments => {
                self.has_arguments = true;
                self.held = match serde_json::from_str::<serde_json::Value>(&value) {
                    Ok(serde_json::Value::Null) => Some("{}".into()),
                    Ok(serde_json::Value::String(text)) => Some(text),
                    _ => None,
                };
                self.held.is_some()
            }
            Field::Other => true,
        }
    }

    fn object_ended(&mut self) -> CallStep {
        if !self.value_ended() {
            return CallStep::Fail;
        }
        if self.started {
            return CallStep::End(None);
        }
        match (self.name.take(), self.held.take()) {
            (Some(name), Some(held)) => CallStep::End(Some((name, held))),
            (Some(name), None) if !self.needs_arguments => CallStep::End(Some((name, "{}".into()))),
            _ => CallStep::Fail,
        }
    }
}
