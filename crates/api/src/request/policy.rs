//! The field policy of the design: unknown fields are accepted, counted and logged once (or
//! refused with `--strict-api`); fields that are known elsewhere but not supported here are
//! refused unless null or at the value that changes nothing.

use crate::openapi::fields::{Behaviour, FieldTable, Neutral};
use lockstep_core::Refusal;
use serde_json::{Map, Value};
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

/// Different unknown names that are logged; later ones are only counted.
const NAMES_LOGGED_MAX: usize = 64;
/// Characters of a client's own text that are repeated in messages and logs.
const QUOTED_CHARS_MAX: usize = 64;

/// Counts unknown fields over the life of the server.
#[derive(Debug, Default)]
pub(crate) struct FieldPolicy {
    unknown: AtomicU64,
    logged: Mutex<BTreeSet<String>>,
}

impl FieldPolicy {
    /// Checks the names of a request, and the values of unsupported fields.
    pub(crate) fn check(
        &self,
        table: &FieldTable,
        body: &Map<String, Value>,
        strict: bool,
    ) -> Result<(), Refusal> {
        for (name, value) in body {
            match table.find(name).map(|field| field.behaviour) {
                // Null is absent, whatever the name.
                None if value.is_null() => {}
                None => self.unknown_field(name, strict)?,
                Some(Behaviour::Unsupported(neutral)) if !value.is_null() => {
                    check_neutral(name, value, neutral)?
                }
                Some(_) => {}
            }
        }
        Ok(())
    }

    fn unknown_field(&self, name: &str, strict: bool) -> Result<(), Refusal> {
        let shown = shorten(name);
        if strict {
            let message = format!("{shown:?} is not a field of this request; leave it out (--strict-api)");
            return Err(Refusal::invalid_param(shown, message).with_code("unknown_field"));
        }
        self.unknown.fetch_add(1, Ordering::Relaxed);
        let mut logged = self.logged.lock().expect("invariant: nothing panics while holding it");
        if logged.len() < NAMES_LOGGED_MAX && !logged.contains(&shown) {
            tracing::warn!(field = shown, "unknown request field ignored; logged once");
            logged.insert(shown);
        }
        Ok(())
    }

    /// Unknown fields seen so far.
    pub(crate) fn unknown(&self) -> u64 {
        self.unknown.load(Ordering::Relaxed)
    }
}

fn check_neutral(name: &str, value: &Value, neutral: Neutral) -> Result<(), Refusal> {
    if neutral.accepts(value) {
        return Ok(());
    }
    let message = format!("{name} is not supported by this server; {}", neutral.advice());
    Err(Refusal::invalid_param(name, message).with_code("unsupported_field"))
}

/// A client's own text, short enough for a message.
pub(crate) fn shorten(text: &str) -> String {
    match text.char_indices().nth(QUOTED_CHARS_MAX) {
        Some((end, _)) => format!("{}...", &text[..end]),
        None => text.into(),
    }
}
