//! What templates render, and what is refused of them.

use serde_json::Value as Json;

use super::*;

/// A template that lists its roles, as those of Qwen do, and keeps a system message only at the beginning.
const LISTED: &str = "{% for m in messages %}{% if m.role == 'user' or m.role == 'assistant' or \
                      (m.role == 'system' and loop.first) %}[{{ m.role }}]{{ m.content }}{% endif %}{% endfor %}";

fn messages(conversation: &[(&str, &str)]) -> Vec<ChatMessage> {
    let message = |(role, content): &(&str, &str)| ChatMessage {
        role: (*role).to_owned(),
        content: (*content).to_owned(),
        name: None,
    };
    conversation.iter().map(message).collect()
}

fn template(text: &str) -> ChatTemplate {
    let special_tokens = vec![("bos_token", "<s>".into()), ("eos_token", "</s>".into())];
    ChatTemplate::new(text, special_tokens).unwrap()
}

fn rendered(text: &str, conversation: &[(&str, &str)]) -> Result<String, TaskError> {
    template(text).render(&messages(conversation), &"2026-11-28T12:00[UTC]".parse().unwrap())
}

/// `expected.json` holds what the transformers library makes of each template; `scripts/compare-chat-templates` writes
/// it, and sets the variable for a file with further cases.
#[test]
fn templates_render_as_in_the_transformers_library() {
    let further = std::env::var("SCONCE_CHAT_TEMPLATES").ok();
    let mut count = 0;
    for path in [Some("tests/fixtures/chat_templates.json".to_owned()), further].into_iter().flatten() {
        let cases: Vec<Json> = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
        for case in &cases {
            let of_model = case["file"].as_str().map(|name| {
                std::fs::read_to_string(format!("tests/fixtures/chat_templates/{name}")).unwrap()
            });
            let text = of_model.as_deref().or(case["template"].as_str()).unwrap();
            let conversation: Vec<(&str, &str)> = case["messages"]
                .as_array()
                .unwrap()
                .iter()
                .map(|message| {
                    let content = &message["content"];
                    let text = content.as_str().or(content[0]["text"].as_str());
                    (message["role"].as_str().unwrap(), text.unwrap())
                })
                .collect();
            let has_parts = case["messages"][0]["content"].is_array();
            // Messages are given as they are, also those of roles that a template drops.
            let now = "2026-11-28T12:00[UTC]".parse().unwrap();
            let messages = messages(&conversation);
            let shown: Vec<_> = messages
                .iter()
                .map(|it| {
                    let content = match has_parts {
                        true => Content::Parts([Part { r#type: "text", text: &it.content }]),
                        false => Content::Text(&it.content),
                    };
                    Shown { role: &it.role, content, name: None }
                })
                .collect();
            let result =
                ChatTemplate::new(text, vec![("bos_token", "<s>".into()), ("eos_token", "</s>".into())])
                    .and_then(|template| {
                        template.render_for_answer(&shown, &now).map_err(|error| format!("{error:#}"))
                    });
            match &case["expected"] {
                Json::String(expected) => assert_eq!(result.as_ref(), Ok(expected), "{text}"),
                _ => assert!(result.is_err(), "{text}: {result:?}"),
            }
            count += 1;
        }
    }
    assert!(count > 100, "{count}");
}

#[test]
fn a_developer_message_counts_as_system_where_the_template_does_not_know_it() {
    let conversation = [("developer", "Be brief."), ("user", "hi")];
    assert_eq!(rendered(LISTED, &conversation).unwrap(), "[system]Be brief.[user]hi");
    let any = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    assert_eq!(rendered(any, &conversation).unwrap(), "[developer]Be brief.[user]hi");
    let strict = "{% for m in messages %}{% if m.role not in ['system', 'user', 'assistant'] %}\
                  {{ raise_exception('unknown role') }}{% endif %}[{{ m.role }}]{{ m.content }}{% endfor %}";
    assert_eq!(rendered(strict, &conversation).unwrap(), "[system]Be brief.[user]hi");
}

#[test]
fn a_message_that_the_template_drops_is_refused() {
    let later = [("user", "a"), ("assistant", "b"), ("developer", "c"), ("user", "d")];
    let error = rendered(LISTED, &later).unwrap_err();
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::BadInput, Some("messages[2].role")));
    assert!(error.message.contains(r#"drops "developer" messages behind the first"#), "{}", error.message);
    let no_system = "{% for m in messages %}{% if m.role in ['user', 'assistant'] %}{{ m.content }}{% endif %}{% endfor %}";
    let error = rendered(no_system, &[("system", "a"), ("user", "b")]).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("messages[0].role"));
    assert_eq!(rendered(no_system, &[("user", "b"), ("assistant", "c")]).unwrap(), "bc");
    let last = "{{ messages[-1].content }}";
    assert!(rendered(last, &[("user", "b"), ("assistant", "c")]).is_err());
}

#[test]
fn a_template_that_takes_lists_of_parts_gets_them() {
    let parts = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{% if part.type == 'text' %}\
                 {{ part.text }}{% endif %}{% endfor %}{% endfor %}";
    assert_eq!(rendered(parts, &[("system", "a"), ("user", "b")]).unwrap(), "[system]a[user]b");
}

#[test]
fn a_template_may_refuse_messages_and_cannot_loop_forever() {
    let conversation = [("user", "hello")];
    let error = rendered("{{ raise_exception('roles must alternate') }}", &conversation).unwrap_err();
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::BadInput, Some("messages")));
    assert!(error.message.ends_with("roles must alternate"), "{}", error.message);
    for endless in [
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}",
        "{{ messages | tojson(indent=99999999999) }}",
        "{% set n = namespace(x=[]) %}{% for a in range(9999) %}{% set n.x = [n.x] %}{% endfor %}{{ n.x | tojson }}",
        "{% include 'file' %}",
    ] {
        assert!(rendered(endless, &conversation).is_err(), "{endless}");
    }
}

#[test]
fn a_template_of_any_characters_is_read_or_refused() {
    for text in [
        "{{ é }}",
        "{% é %}",
        "{{ 'é' }",
        "{% generation é",
        "{# é",
        "{é}",
        "{{ é",
        "{% raw %}{{ é }}{% endraw",
    ] {
        let _ = ChatTemplate::new(text, Vec::new());
    }
    assert_eq!(
        jinja::adapted("é{{ 'é %}' }}{% generation %}\r\né{% endgeneration %}"),
        "é{{ 'é %}' }}{% with %}\né{% endwith %}"
    );
}

#[test]
fn what_a_template_may_not_do_is_named() {
    let conversation = [("user", "hello")];
    for (text, reason) in [
        ("{{ messages.append(1) }}", "a template may not change a value in place (append)"),
        ("{{ '%s' % 'a' }}", "tried to use % operator on unsupported types string and string"),
        ("{{ strftime_now('%!') }}", "strftime_now(\"%!\")"),
        ("{{ 'a'.encode() }}", "string has no method named encode"),
        ("{{ 'a' | truncate(1) }}", "filter truncate is unknown"),
    ] {
        let error = rendered(text, &conversation).unwrap_err();
        assert!(error.message.contains(reason), "{}", error.message);
    }
}

#[test]
fn templates_have_names_and_one_that_is_broken_refuses_its_own_chats() {
    let files = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| std::fs::write(files.path().join(name), text).unwrap();
    write("config.json", "{}");
    let read = |configured: &str| {
        let model = ModelFiles::locate(files.path().to_str().unwrap()).unwrap();
        let configured = serde_json::from_str(configured).unwrap();
        ChatTemplates::from_files(&model, configured, &Vec::new()).unwrap()
    };
    let prompt = |templates: &ChatTemplates, name| {
        templates.find(name)?.render(&messages(&[("user", "hi")]), &Zoned::default())
    };
    assert!(read("null").is_none());
    let text = "{{ messages[0].content }}";
    let named = format!(
        r#"[{{"name": "rag", "template": "rag {text}"}}, {{"name": "default", "template": "{text}"}}]"#
    );
    let templates = read(&named).unwrap();
    assert_eq!(prompt(&templates, None).unwrap(), "hi");
    assert_eq!(prompt(&templates, Some("rag")).unwrap(), "rag hi");
    let error = prompt(&templates, Some("tool")).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("chat_template_name"));
    assert!(error.message.ends_with("no chat template \"tool\"; it has default, rag"), "{}", error.message);
    let templates = read(&format!(r#"{{"rag": "{text}"}}"#)).unwrap();
    assert!(prompt(&templates, None).unwrap_err().message.contains("chat_template_name is missing"));
    // Files replace what is configured.
    write("chat_template.jinja", "file {{ messages[0].content }}");
    std::fs::create_dir(files.path().join(FOLDER)).unwrap();
    write("additional_chat_templates/tool.jinja", "{% if %}");
    let templates = read(&named).unwrap();
    assert_eq!(prompt(&templates, None).unwrap(), "file hi");
    assert!(prompt(&templates, Some("rag")).is_err());
    let error = prompt(&templates, Some("tool")).unwrap_err();
    assert_eq!(error.param.as_deref(), Some("messages"));
    assert!(error.message.contains("cannot be read: syntax error"), "{}", error.message);
    std::fs::remove_file(files.path().join("chat_template.jinja")).unwrap();
    std::fs::remove_dir_all(files.path().join(FOLDER)).unwrap();
    let templates = read("7").unwrap();
    assert!(prompt(&templates, None).unwrap_err().message.contains("neither a text nor a list"));
}

#[test]
fn special_tokens_are_texts_and_lists_of_texts() {
    let tokens =
        vec![("sep_token", "[SEP]".into()), ("additional_special_tokens", vec!["<a>", "<b>"].into())];
    let text = "{{ sep_token }}{% for token in additional_special_tokens %}{{ token }}{% endfor %}\
                {{ additional_special_tokens[-1] }}{{ cls_token is defined }}{{ messages[0].content }}";
    let template = ChatTemplate::new(text, tokens).unwrap();
    let rendered = template.render(&messages(&[("user", "hi")]), &Zoned::default()).unwrap();
    assert_eq!(rendered, "[SEP]<a><b><b>Falsehi");
}
