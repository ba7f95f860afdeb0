//! The one tag of Hugging Face's template dialect that minijinja does not know.

/// Rewrites `{% generation %} … {% endgeneration %}` (a marker for training masks, without output) into
/// `{% if true %} … {% endif %}`, which keeps the whitespace control of both tags exactly.
///
/// Comments are left alone; string literals cannot contain a tag in Jinja.
pub(super) fn rewrite_generation_tags(template: &str) -> String {
    let mut out = String::with_capacity(template.len());
    let mut rest = template;
    while let Some(at) = rest.find("{%").into_iter().chain(rest.find("{#")).min() {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let close = if rest.starts_with("{#") { "#}" } else { "%}" };
        let end = rest.find(close).map_or(rest.len(), |e| e + close.len());
        let tag = &rest[..end];
        out.push_str(&rewrite_tag(tag).unwrap_or_else(|| tag.to_owned()));
        rest = &rest[end..];
    }
    out + rest
}

/// The replacement of a `generation` or `endgeneration` tag; `None` for any other.
fn rewrite_tag(tag: &str) -> Option<String> {
    let body = tag.strip_prefix("{%")?.strip_suffix("%}")?;
    let is_control = |c: char| matches!(c, '-' | '+');
    let open = body.chars().next().filter(|c| is_control(*c));
    let close = body.chars().next_back().filter(|c| is_control(*c));
    let name = body.trim_matches(|c: char| is_control(c) || c.is_whitespace());
    let replacement = match name {
        "generation" => "if true",
        "endgeneration" => "endif",
        _ => return None,
    };
    let text = |c: Option<char>| c.map(String::from).unwrap_or_default();
    Some(format!("{{%{} {replacement} {}%}}", text(open), text(close)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_keep_their_whitespace_control() {
        assert_eq!(
            rewrite_generation_tags("a{%- generation -%}b{% endgeneration %}c{% if generation %}"),
            "a{%- if true -%}b{% endif %}c{% if generation %}"
        );
        assert_eq!(rewrite_generation_tags("{# {% generation %} #}x"), "{# {% generation %} #}x");
        assert_eq!(rewrite_generation_tags("{% generation"), "{% generation");
        assert_eq!(rewrite_generation_tags("plain {{ x }}"), "plain {{ x }}");
    }
}
