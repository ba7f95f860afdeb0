//! Whether any text satisfies a grammar.
//!
//! The library compiles grammars that no answer can complete: a rule or a schema that needs itself, bounds that
//! exclude each other. Some of them allow no first token; the others would have an answer go on until it is cut off.
//! Both are found here before the engine hears of the request.
//!
//! A symbol is *productive* if it derives some finite text (Hopcroft and Ullman, "Introduction to Automata Theory",
//! section 4.4, useless symbols): a lexeme is, and so is a rule of which one alternative has productive symbols only.
//! The conditions of parametric rules are taken to hold, so what is refused here is certain.

use crate::GrammarError;
use llguidance::earley::{CGrammar, CSymIdx};
use llguidance::{Matcher, TokenParser};
use std::collections::{BTreeMap, BTreeSet};

/// Refuses a compiled grammar that no text satisfies.
pub(crate) fn check(parser: TokenParser) -> Result<(), GrammarError> {
    let grammar = parser.parser.grammar();
    let symbols = Symbols::of(grammar);
    if !symbols.productive.contains(&grammar.start().as_index()) {
        let name = symbols.endless(grammar);
        return Err(GrammarError(format!(
            "no answer could ever be complete, since {name} always needs itself; give it an alternative that ends"
        )));
    }
    match Matcher::new(Ok(parser)).compute_mask_or_eos() {
        Ok(_) => Ok(()),
        Err(_) => Err(GrammarError(
            "no answer satisfies it: not even a first character is possible; relax it".into(),
        )),
    }
}

/// The symbols that the start symbol leads to.
#[derive(Default)]
struct Symbols {
    productive: BTreeSet<usize>,
}

/// An alternative of a rule.
struct Alternative {
    symbol: usize,
    /// Symbols in it that are not known to be productive.
    open: usize,
}

impl Symbols {
    fn of(grammar: &CGrammar) -> Self {
        let mut alternatives: Vec<Alternative> = Vec::new();
        // By symbol: the alternatives that hold it, once per occurrence.
        let mut holders: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        let (mut seen, mut found) = (BTreeSet::from([grammar.start().as_index()]), vec![grammar.start()]);
        let mut ready = Vec::new();
        while let Some(symbol) = found.pop() {
            let data = grammar.sym_data(symbol);
            let is_terminal = data.is_terminal || data.lexeme.is_some();
            if is_terminal || data.is_nullable || !data.cond_nullable.is_empty() {
                ready.push(symbol.as_index());
            }
            for &rule in grammar.rules_of(symbol) {
                let (parts, _, _) = grammar.rule_rhs(rule);
                let at = alternatives.len();
                alternatives.push(Alternative { symbol: symbol.as_index(), open: parts.len() });
                for part in parts {
                    holders.entry(part.as_index()).or_default().push(at);
                    if seen.insert(part.as_index()) {
                        found.push(*part);
                    }
                }
            }
        }
        let mut productive = BTreeSet::new();
        while let Some(symbol) = ready.pop() {
            if !productive.insert(symbol) {
                continue;
            }
            for &at in holders.get(&symbol).into_iter().flatten() {
                alternatives[at].open -= 1;
                if alternatives[at].open == 0 {
                    ready.push(alternatives[at].symbol);
                }
            }
        }
        Self { productive }
    }

    /// What to call a symbol that is not productive and leads to itself.
    fn endless(&self, grammar: &CGrammar) -> String {
        let is_open = |symbol: &&CSymIdx| !self.productive.contains(&symbol.as_index());
        let (mut symbol, mut passed) = (grammar.start(), BTreeSet::new());
        while passed.insert(symbol.as_index()) {
            let rules = grammar.rules_of(symbol).iter();
            let next = rules.flat_map(|&rule| grammar.rule_rhs(rule).0).find(is_open);
            match next {
                Some(next) => symbol = *next,
                None => break,
            }
        }
        // The library numbers what it makes of a rule, and everything in a JSON schema.
        match grammar.sym_name(symbol).split('#').next() {
            None | Some("") => "a part of it".into(),
            Some(rule) => format!("rule {rule:?}"),
        }
    }
}
