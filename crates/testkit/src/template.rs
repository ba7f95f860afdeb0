//! Chat templates of the chain models.
//!
//! Prompts end with `<|im_start|>assistant\n`, whose newline picks the script ` hello there`.

/// ChatML without a beginning-of-text token.
pub const PLAIN: &str = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n\
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// ChatML that writes the beginning-of-text token itself.
pub const BOS: &str = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n\
{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";

/// ChatML with tools in Hermes' form. A prompt that offers tools and does not end with a result ends in
/// `J`, which picks the script that calls `weather`.
pub const TOOLS: &str = "{% if tools %}{% for t in tools %}{{ t | tojson }}\n{% endfor %}{% endif %}\
{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}\
{% for c in m.tool_calls or [] %}\n<tool_call>\n{{ c.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n\
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n\
{% if tools and messages[-1]['role'] != 'tool' %}J{% endif %}{% endif %}";

/// A second template of a named list, which no plain chat request may pick.
pub const TOOL_USE: &str = "TOOLS {% for m in messages %}{{ m['content'] }}{% endfor %}Z";

/// Uses what a plain jinja engine lacks: `raise_exception`, `strftime_now`, keyword arguments of
/// `tojson`, string methods and the `generation` tag.
pub const HARD: &str = "\
{%- set ns = namespace(n=0) -%}\
{%- for m in messages -%}\
{%- if m.role not in ['system','user','assistant','tool'] -%}\
{{ raise_exception('bad role ' + m.role) }}\
{%- endif -%}\
{%- set ns.n = ns.n + 1 -%}\
<|im_start|>{{ m.role }}\n\
{%- if m.content is string -%}{{ m.content | trim }}\
{%- else -%}{%- for c in m.content or [] -%}{{ c.text }}{%- endfor -%}{%- endif -%}\
{%- if m.tool_calls -%}{%- for t in m.tool_calls -%}\
{{ t.function.name }}:{{ t.function.arguments if t.function.arguments is string \
else t.function.arguments | tojson(ensure_ascii=False) }}\
{%- endfor -%}{%- endif -%}\
<|im_end|>\n\
{%- endfor -%}\
{%- if tools is defined and tools -%}{{ tools | tojson(indent=2) }}{%- endif -%}\
{{ strftime_now('%Y-%m-%d') }}|{{ ns.n }}|\
{{ messages[0].content.split('a')[-1] if messages[0].content is string else '' }}\
{%- generation -%}{%- endgeneration -%}\
{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}";
