//! The texts of a model's chat templates, by name, before they are compiled.

use std::collections::BTreeMap;

/// The name of the template that serves every request without a reason for another.
pub(crate) const DEFAULT: &str = "default";
/// The template for requests with tools.
pub(crate) const TOOL_USE: &str = "tool_use";
/// The template for requests with documents.
pub(crate) const RAG: &str = "rag";

/// A model's templates: one called [`DEFAULT`], and whatever else the model names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct TemplateSources {
    named: BTreeMap<String, String>,
}

impl TemplateSources {
    /// A model with one template.
    pub(crate) fn single(text: impl Into<String>) -> Self {
        Self { named: BTreeMap::from([(DEFAULT.to_owned(), text.into())]) }
    }

    /// Adds a template, or replaces the one of that name.
    pub(crate) fn insert(&mut self, name: impl Into<String>, text: impl Into<String>) {
        self.named.insert(name.into(), text.into());
    }

    /// All texts, the default first and then `tool_use`: what parsers of answers are chosen by.
    pub(crate) fn joined(&self) -> Option<String> {
        let rank = |name: &str| [DEFAULT, TOOL_USE].iter().position(|n| *n == name).unwrap_or(2);
        let mut named: Vec<_> = self.named.iter().collect();
        named.sort_by_key(|(name, _)| rank(name));
        let texts: Vec<&str> = named.into_iter().map(|(_, text)| text.as_str()).collect();
        (!texts.is_empty()).then(|| texts.join("\n"))
    }

    /// The templates by name, with a [`DEFAULT`] among them: a model that has only one template means
    /// it for everything, whatever its name. `None` when no template can be the default.
    pub(super) fn with_default(mut self) -> Option<BTreeMap<String, String>> {
        if !self.named.contains_key(DEFAULT) {
            let stand_in = match self.named.len() {
                1 => self.named.values().next(),
                _ => self.named.get(TOOL_USE),
            };
            let text = stand_in?.clone();
            self.named.insert(DEFAULT.into(), text);
        }
        Some(self.named)
    }
}
