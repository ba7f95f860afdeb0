//! What a client calls the fields of its request, where that is not OpenAI's name: validation speaks of the
//! translated request, refusals must speak of the one that was sent.

use lockstep_core::Refusal;

/// OpenAI's names of fields and theirs, the first that fits counts. `[]` stands for any index, as in
/// `("tools[].function.parameters", "tools[].input_schema")`; whatever follows a name stays.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Names(pub(crate) &'static [(&'static str, &'static str)]);

impl Names {
    /// The name that the client knows `name` by.
    fn theirs(self, name: &str) -> Option<String> {
        self.0.iter().find_map(|(ours, theirs)| match ours.split_once("[]") {
            None => rest_of(name, ours).map(|rest| format!("{theirs}{rest}")),
            Some((list, field)) => {
                let (index, rest) = name.strip_prefix(list)?.strip_prefix('[')?.split_once(']')?;
                let rest = rest_of(rest, field)?;
                Some(theirs.replacen("[]", &format!("[{index}]"), 1) + rest)
            }
        })
    }

    /// The same refusal about the request as it was sent.
    pub(crate) fn in_their_terms(self, mut refusal: Refusal) -> Refusal {
        let Some(param) = &mut refusal.param else { return refusal };
        let Some(theirs) = self.theirs(param) else { return refusal };
        if let Some(rest) = rest_of(&refusal.message, param) {
            refusal.message = format!("{theirs}{rest}");
        }
        *param = theirs;
        refusal
    }
}

/// What follows `name` in `text`, if `text` begins with it and not with a longer name.
fn rest_of<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let goes_on = |rest: &str| rest.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_');
    text.strip_prefix(name).filter(|rest| !goes_on(rest))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusals_name_what_was_sent() {
        let names = Names(&[
            ("tools[].function.parameters", "tools[].input_schema"),
            ("tools[].function", "tools[]"),
            ("stop", "stop_sequences"),
        ]);
        for (ours, theirs) in [
            ("stop", "stop_sequences"),
            ("stop[3]", "stop_sequences[3]"),
            ("stop_token_ids", "stop_token_ids"),
            ("tools[12].function.parameters.type", "tools[12].input_schema.type"),
            ("tools[0].function.name", "tools[0].name"),
            ("tools[0]", "tools[0]"),
            ("tools", "tools"),
        ] {
            let refusal = names.in_their_terms(Refusal::invalid_param(ours, format!("{ours} is bad")));
            assert_eq!(refusal.param.as_deref(), Some(theirs));
            assert_eq!(refusal.message, format!("{theirs} is bad"));
        }
        let other = Refusal::invalid_param("stop", "the stop is bad");
        assert_eq!(names.in_their_terms(other).message, "the stop is bad");
    }
}
