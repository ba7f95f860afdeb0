use super::*;
use serde_json::json;

fn compile(template: &str) -> ChatTemplate {
    let sources = TemplateSources { default: Some(template.into()), tool_use: None };
    let tokens = BTreeMap::from([("bos_token".to_owned(), "<s>".to_owned())]);
    // 26 July 2024.
    ChatTemplate::compile(sources, tokens, || 1_721_995_506).unwrap()
}

fn chat(messages: Json) -> ChatMessages {
    ChatMessages {
        messages_json: messages.to_string(),
        tools_json: None,
        template_kwargs_json: None,
        add_generation_prompt: true,
    }
}

fn render(template: &str, messages: Json) -> Result<String, Refusal> {
    compile(template).render(&chat(messages))
}

fn user(content: &str) -> Json {
    json!([{"role": "user", "content": content}])
}

/// Template of case C11: everything that a plain Jinja engine lacks.
const HARD: &str = "{%- set ns = namespace(n=0) -%}{%- for m in messages -%}\
    {%- if m.role not in ['system','user','assistant','tool'] -%}{{ raise_exception('bad role ' + m.role) }}{%- endif -%}\
    {%- set ns.n = ns.n + 1 -%}<|im_start|>{{ m.role }}\n\
    {%- if m.content is string -%}{{ m.content | trim }}{%- else -%}{%- for c in m.content or [] -%}{{ c.text }}{%- endfor -%}{%- endif -%}\
    {%- if m.tool_calls -%}{%- for t in m.tool_calls -%}{{ t.function.name }}:{{ t.function.arguments if t.function.arguments is string else t.function.arguments | tojson(ensure_ascii=False) }}{%- endfor -%}{%- endif -%}\
    <|im_end|>\n{%- endfor -%}{%- if tools is defined and tools -%}{{ tools | tojson(indent=2) }}{%- endif -%}\
    {{ strftime_now('%Y-%m-%d') }}|{{ ns.n }}|{{ messages[0].content.split('a')[-1] if messages[0].content is string else '' }}\
    {%- generation -%}{%- endgeneration -%}{%- if add_generation_prompt -%}<|im_start|>assistant\n{% endif -%}";

#[test]
fn the_hard_template_renders_as_hugging_face_does() {
    assert_eq!(
        render(HARD, user("ab")).unwrap(),
        "<|im_start|>userab<|im_end|>2024-07-26|1|b<|im_start|>assistant\n"
    );
    let refusal = render(HARD, json!([{"role": "alien", "content": "x"}])).unwrap_err();
    assert_eq!(refusal.status, 400);
    assert!(refusal.message.ends_with("bad role alien"), "{}", refusal.message);
}

/// Expected texts are what `json.dumps` of CPython prints for the same arguments.
#[test]
fn tojson_is_python_json_dumps() {
    let value = json!([{"role": "user", "content": "x", "v": {"b": [1, 2.0, 1e-7, true, null], "a": "<é\"\n\u{7f}'&>", "e": {}, "l": []}}]);
    let cases = [
        ("tojson", r#"{"b": [1, 2.0, 1e-07, true, null], "a": "<é\"\n'&>", "e": {}, "l": []}"#),
        (
            "tojson(ensure_ascii=true, sort_keys=true)",
            r#"{"a": "<\u00e9\"\n'&>", "b": [1, 2.0, 1e-07, true, null], "e": {}, "l": []}"#,
        ),
        ("tojson(separators=(',', ':'))", r#"{"b":[1,2.0,1e-07,true,null],"a":"<é\"\n'&>","e":{},"l":[]}"#),
        (
            "tojson(indent=1)",
            "{\n \"b\": [\n  1,\n  2.0,\n  1e-07,\n  true,\n  null\n ],\n \"a\": \"<é\\\"\\n\u{7f}'&>\",\n \"e\": {},\n \"l\": []\n}",
        ),
    ];
    for (filter, expected) in cases {
        let got = render(&format!("{{{{ messages[0].v | {filter} }}}}"), value.clone()).unwrap();
        assert_eq!(got.replace('\u{7f}', ""), expected.replace('\u{7f}', ""), "{filter}");
    }
    assert_eq!(render("{{ '😀' | tojson(ensure_ascii=true) }}", user("x")).unwrap(), r#""\ud83d\ude00""#);
    assert!(render("{{ nothing | tojson }}", user("x")).is_err());
}

#[test]
fn whitespace_control_is_that_of_transformers() {
    let template =
        "{% for m in messages %}\n  {% if true %}\n{{ m.content }}\n  {% endif %}\n{% endfor %}\nend";
    assert_eq!(render(template, user("x")).unwrap(), "x\nend");
    let template = "a\n{% generation %}\n{{ messages[0].content }}\n{% endgeneration %}\nb";
    assert_eq!(render(template, user("x")).unwrap(), "a\nx\nb");
}

#[test]
fn python_methods_loop_controls_and_variables() {
    let template = "{{ bos_token }}{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}\
                    {{ m['content'].strip().upper() }}{{ m.get('name', '-') }}{% endfor %}\
                    {% if tools is none %}no tools{% endif %}{{ eos_token }}{{ 'y' if add_generation_prompt }}";
    let messages = json!([{"role": "user", "content": " hi "}, {"role": "user", "content": "no"}]);
    assert_eq!(render(template, messages).unwrap(), "<s>HI-no toolsy");
}

#[test]
fn template_kwargs_and_tools_reach_the_template() {
    let sources = TemplateSources {
        default: Some("default {{ enable_thinking }}".into()),
        tool_use: Some("tools {{ tools[0].function.name }} {{ add_generation_prompt }}".into()),
    };
    let template = ChatTemplate::compile(sources, BTreeMap::new(), || 0).unwrap();
    let mut request = chat(user("x"));
    request.template_kwargs_json = Some(r#"{"enable_thinking": false}"#.into());
    assert_eq!(template.render(&request).unwrap(), "default False");
    request.tools_json = Some("[]".into());
    assert_eq!(template.render(&request).unwrap(), "default False");
    request.tools_json = Some(r#"[{"type": "function", "function": {"name": "f"}}]"#.into());
    request.add_generation_prompt = false;
    assert_eq!(template.render(&request).unwrap(), "tools f False");
}

#[test]
fn null_content_and_text_arguments_are_normalised() {
    let call =
        json!({"type": "function", "function": {"name": "f", "arguments": "{\"b\": 1, \"a\": \"é\"}"}});
    let messages =
        json!([{"role": "assistant", "content": null, "tool_calls": [call]}, {"role": "assistant"}]);
    let template = "{% for m in messages %}[{{ m.content }}]{% for c in m.tool_calls %}\
                    {{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";
    assert_eq!(render(template, messages).unwrap(), "[]{\"b\": 1, \"a\": \"é\"}[]");
    let kept = json!([{"role": "assistant", "content": "", "tool_calls": [{"function": {"arguments": "not json"}}]}]);
    assert_eq!(render("{{ messages[0].tool_calls[0].function.arguments }}", kept).unwrap(), "not json");
}

#[test]
fn bad_messages_are_400() {
    for messages in [json!([]), json!({}), json!(["text"])] {
        assert_eq!(render("x", messages.clone()).unwrap_err().status, 400, "{messages}");
    }
    let mut request = chat(user("x"));
    request.messages_json = "[{".into();
    assert_eq!(compile("x").render(&request).unwrap_err().param.as_deref(), Some("messages"));
    // A message without a role: the template's own arithmetic fails.
    let refusal = render("{{ 'a' + messages[0].role }}", json!([{"content": "x"}])).unwrap_err();
    assert_eq!(refusal.status, 400);
}

#[test]
fn endless_templates_are_stopped() {
    let nested = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";
    let refusal = render(nested, user("x")).unwrap_err();
    assert_eq!(refusal.status, 400);
    assert!(refusal.message.contains("instructions"), "{}", refusal.message);
    let recursive = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}";
    assert_eq!(render(recursive, user("x")).unwrap_err().status, 400);
}

#[test]
fn a_template_that_cannot_be_parsed_says_where_and_what_to_do() {
    let sources = TemplateSources { default: Some("ok\n{% if %}".into()), tool_use: None };
    let error = ChatTemplate::compile(sources, BTreeMap::new(), || 0).unwrap_err();
    assert!(error.contains("line 2") && error.contains("--chat-template"), "{error}");
}
