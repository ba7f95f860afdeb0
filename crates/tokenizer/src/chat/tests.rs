use super::*;
use serde_json::json;

fn compile(template: &str) -> ChatTemplate {
    let sources = TemplateSources::single(template);
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
    let mut sources = TemplateSources::single("default {{ enable_thinking }}");
    sources.insert("tool_use", "tools {{ tools[0].function.name }} {{ add_generation_prompt }}");
    sources.insert("rag", "rag {{ documents[0].title }}");
    let template = ChatTemplate::compile(sources, BTreeMap::new(), || 0).unwrap();
    let mut request = chat(user("x"));
    request.template_kwargs_json = Some(r#"{"enable_thinking": false}"#.into());
    assert_eq!(template.render(&request).unwrap(), "default False");
    request.tools_json = Some("[]".into());
    assert_eq!(template.render(&request).unwrap(), "default False");
    request.tools_json = Some(r#"[{"type": "function", "function": {"name": "f"}}]"#.into());
    request.add_generation_prompt = false;
    assert_eq!(template.render(&request).unwrap(), "tools f False");
    request.template_kwargs_json = Some(r#"{"documents": [{"title": "t"}]}"#.into());
    assert_eq!(template.render(&request).unwrap(), "tools f False");
    request.tools_json = None;
    assert_eq!(template.render(&request).unwrap(), "rag t");
    request.template_kwargs_json = Some(r#"{"chat_template": "default", "enable_thinking": 1}"#.into());
    assert_eq!(template.render(&request).unwrap(), "default 1");
    for (kwargs, param) in [
        (r#"{"chat_template": "{{ evil }}"}"#, "chat_template"),
        (r#"{"continue_final_message": 3}"#, "continue_final_message"),
        (r#"{"messages": []}"#, "messages"),
    ] {
        request.template_kwargs_json = Some(kwargs.into());
        assert_eq!(template.render(&request).unwrap_err().param.as_deref(), Some(param));
    }
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

/// Each would take gigabytes or forever; each is a sentence within seconds.
#[test]
fn template_bombs_are_refused() {
    let doubled =
        "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
    let captured = "{% set ns = namespace(s='ab') %}{% for i in range(60) %}{% set s %}{{ ns.s }}{{ ns.s }}{% endset %}\
                    {% set ns.s = s %}{% endfor %}";
    let replaced = "{% set ns = namespace(s='aa') %}{% for i in range(60) %}{% set ns.s = ns.s | replace('a', 'aaa') %}\
                    {% endfor %}";
    for (bomb, limit) in [
        (doubled, "instructions"),
        (captured, "instructions"),
        (replaced, "instructions"),
        ("{{ 'a' * 99999999999 }}", "instructions"),
        ("{% for i in range(9999) %}{{ 'a' * 9999 }}{% endfor %}", "a prompt of more than 32 MiB"),
        ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", "fails on these messages"),
    ] {
        let begun = std::time::Instant::now();
        let refusal = render(bomb, user("x")).unwrap_err();
        assert!(refusal.status == 400 && refusal.message.contains(limit), "{bomb}: {}", refusal.message);
        assert!(begun.elapsed().as_secs() < 20, "{bomb}: {:?}", begun.elapsed());
    }
    // Nested deeper than any parser should follow: refused when it is compiled.
    for (open, close) in
        [("{% if true %}", "{% endif %}"), ("{{ (", ") }}"), ("{{ [", "] }}"), ("{{ not ", " }}")]
    {
        let deep = open.repeat(20_000) + &close.repeat(20_000);
        let compiled = ChatTemplate::compile(TemplateSources::single(&deep), BTreeMap::new(), || 0);
        assert!(compiled.is_err_and(|error| error.contains("cannot be parsed")), "{open}");
    }
}

#[test]
fn a_template_that_cannot_be_parsed_says_where_and_what_to_do() {
    let sources = TemplateSources::single("ok\n{% if %}");
    let error = ChatTemplate::compile(sources, BTreeMap::new(), || 0).unwrap_err();
    assert!(error.contains("line 2") && error.contains("--chat-template"), "{error}");
}

#[test]
fn a_last_message_is_continued_where_it_ends() {
    let chatml = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}\
                  {% if add_generation_prompt %}<assistant>{% endif %}";
    let trimming = chatml.replace("m.content", "m.content | trim");
    let dropping = "{{ messages[0].content }}";
    let messages = json!([{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is "}]);
    let mut request = chat(messages);
    request.template_kwargs_json = Some(r#"{"continue_final_message": true}"#.into());
    assert_eq!(compile(chatml).render(&request).unwrap(), "<user>q</><assistant>It is ");
    assert_eq!(compile(&trimming).render(&request).unwrap(), "<user>q</><assistant>It is");
    let refusal = compile(dropping).render(&request).unwrap_err();
    assert_eq!((refusal.status, refusal.param.as_deref()), (400, Some("continue_final_message")));
    request.template_kwargs_json = Some(r#"{"continue_final_message": "thinking"}"#.into());
    assert!(compile(chatml).render(&request).is_err(), "no such field");
}

/// Each template shows a tool call in one form only; the probes must find which.
#[test]
fn a_template_gets_messages_in_the_form_it_reads() {
    let call =
        json!({"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{\"a\": 1}"}});
    let messages = json!([
        {"role": "developer", "content": "d"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "r"},
    ]);
    let calls = "{% for m in messages if m.tool_calls %}{% for c in m.tool_calls %}";
    let end = "{% endfor %}{% endfor %}";
    for (body, expected) in [
        ("{{ c.function.name + c.function.arguments }}", r#"f{"a": 1}"#),
        ("{{ c.function.name }}{{ c.function.arguments | tojson }}", r#"f{"a": 1}"#),
        (
            "{% if m.content is none %}{{ c.function.name }}{{ c.function.arguments | tojson }}{% endif %}",
            r#"f{"a": 1}"#,
        ),
        (
            "{% for k, v in c.function.arguments.items() %}{{ c.function.name }} {{ k }} {{ v }}{% endfor %}",
            "f a 1",
        ),
    ] {
        assert_eq!(render(&format!("{calls}{body}{end}"), messages.clone()).unwrap(), expected, "{body}");
    }
    // Mistral's rule for ids: a call and its result keep the same one.
    let ids = "{% for m in messages %}{% for c in m.tool_calls or [] %}\
               {% if c.id | length != 9 %}{{ raise_exception('ids') }}{% endif %}\
               {{ c.function.name }}{{ c.function.arguments | tojson }}{{ c.id }}{% endfor %}{{ m.tool_call_id }}{% endfor %}";
    let text = render(ids, messages.clone()).unwrap();
    let (id, result_id) = (&text[9..18], &text[18..]);
    assert_eq!(id, result_id, "{text}");
    assert_eq!(render("{{ messages[0].role }}", messages.clone()).unwrap(), "system");
    assert_eq!(render("{# developer #}{{ messages[0].role }}", messages).unwrap(), "developer");
    let parts = "{% for m in messages %}{{ m.content[0]['text'] }}{% endfor %}";
    assert_eq!(render(parts, user("x")).unwrap(), "x");
}
