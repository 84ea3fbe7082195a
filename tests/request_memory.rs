//! What a request costs in memory until it is inputs, counted by an allocator: a body of the largest size
//! (`max_body`, 8 MiB) that is made to be multiplied. The models are those of the tests; none of them computes.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::Arc;

use sconce::model::tasks::{embed, generate, labels, pairs, sparse, token_labels};
use sconce::model::{Device, Inputs, LoadSpec, Processor};
use sconce::protocol::{Headers, Message, Properties, TaskError, TaskErrorKind};

/// Counts the bytes that each thread holds, and the most that it held.
struct Counting;

thread_local! {
    static HELD: Cell<isize> = const { Cell::new(0) };
    static MOST: Cell<isize> = const { Cell::new(0) };
}

fn count(bytes: isize) {
    // A thread that ends has no counts any more.
    let _ = HELD.try_with(|held| {
        held.set(held.get() + bytes);
        let _ = MOST.try_with(|most| most.set(most.get().max(held.get())));
    });
}

#[expect(unsafe_code, reason = "an allocator is unsafe to write; this one calls the system's and counts")]
// SAFETY: every call is passed on as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as isize);
        // SAFETY: as above.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.dealloc(place, layout) }
    }

    unsafe fn realloc(&self, place: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // Both may exist while the bytes are copied.
        count(size as isize);
        count(-(layout.size() as isize));
        // SAFETY: as above.
        unsafe { System.realloc(place, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// The setting `max_body`, and the most inputs of a task.
const BODY: usize = 8 << 20;
const INPUTS: usize = 2_048;

/// What a request was refused with, and the most bytes that it held while it was prepared, beside its body.
struct Cost {
    refusal: Option<TaskError>,
    bytes: isize,
}

fn cost<P: Processor>(processor: &P, url: &str, body: String) -> Cost {
    assert!(body.len() <= BODY, "{} bytes", body.len());
    let headers = Headers::from([("url".into(), url.into())]);
    let properties = Properties { headers, ..Properties::default() };
    let message = Message { properties, body: body.into() };
    let before = HELD.get();
    MOST.set(before);
    // A worker holds a few slices of inputs that are made on demand.
    let prepared = processor.preprocess(&message).and_then(|(context, inputs)| match inputs {
        inputs @ (Inputs::All(_) | Inputs::Later(_)) => Ok((context, inputs.all()?)),
        Inputs::Slices(mut slices) => {
            slices.try_for_each(|slice| slice.map(drop)).map(|()| (context, Vec::new()))
        }
    });
    let bytes = MOST.get() - before;
    Cost { refusal: prepared.err(), bytes }
}

fn spec(name: &str) -> LoadSpec {
    let path = format!("{}/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR"));
    LoadSpec { max_inputs: INPUTS, ..LoadSpec::new(path) }
}

/// So many `items` after each other as fit into a body beside `rest`.
fn many(item: &str, rest: usize) -> String {
    item.repeat((BODY - rest) / item.len())
}

/// Checks that a request holds at most `factor` times the largest body.
fn check<P: Processor>(processor: &P, url: &str, cases: Vec<(&str, String)>, factor: isize) {
    let mut over = Vec::new();
    for (name, body) in cases {
        let Cost { refusal, bytes } = cost(processor, url, body);
        let end = refusal.map_or_else(|| "taken".to_owned(), |error| error.message);
        assert!(end.len() < 1_000, "{end}");
        if bytes > factor * BODY as isize {
            over.push(format!("{name} ({end}): {} MiB", bytes >> 20));
        }
    }
    assert!(over.is_empty(), "{url}: these hold more than {factor} times the body: {over:#?}");
}

/// Bodies that have nothing to do with the field of a request.
fn of_any(field: &str) -> Vec<(&'static str, String)> {
    vec![
        ("a long key", format!(r#"{{"{}":1}}"#, many("k", 6))),
        ("many keys", format!(r#"{{{}"z":1}}"#, many(r#""tempatures":1,"#, 10))),
        ("a long model", format!(r#"{{"{field}":"a","model":"{}"}}"#, many("m", 100))),
        ("many texts", format!(r#"{{"{field}":[{}""]}}"#, many(r#""","#, 100))),
        ("many numbers", format!(r#"{{"{field}":[{}-1]}}"#, many("0,", 100))),
        ("many lists", format!(r#"{{"{field}":[{}[0]]}}"#, many("[0],", 100))),
    ]
}

#[test]
fn a_request_for_text_holds_no_multiple_of_its_body() {
    let (processor, _) = generate::load(&spec("generate-llama"), &Device::Cpu).expect("a model of the tests");
    let stop = format!("\"{}\"", "s".repeat(1_024));
    let prompts = |count: usize, prompt: &str| vec![prompt; count].join(",");
    let mut cases = of_any("prompt");
    cases.extend([
        (
            "stops and owners",
            format!(
                r#"{{"prompt":[{}],"n":4,"stop":[{stop},{stop},{stop},{stop}],"user":"{}"}}"#,
                prompts(512, "\"a\""),
                "u".repeat(256)
            ),
        ),
        ("a long stop", format!(r#"{{"prompt":[{}],"stop":"{}"}}"#, prompts(512, "\"a\""), many("s", 9_000))),
        (
            "long prompts",
            format!(r#"{{"prompt":[{}],"n":8}}"#, prompts(256, &format!("\"{}\"", "a b ".repeat(100)))),
        ),
        (
            "echoes",
            format!(
                r#"{{"prompt":[{}],"n":8,"echo":true}}"#,
                prompts(256, &format!("[{}1]", "300,".repeat(100)))
            ),
        ),
        ("probabilities", format!(r#"{{"prompt":[{}],"n":8,"logprobs":5}}"#, prompts(256, "\"a\""))),
        (
            "a schema",
            format!(
                r#"{{"prompt":"a","response_format":{{"type":"json_schema","json_schema":{{"schema":{{"enum":[{}0]}}}}}}}}"#,
                many("0,", 200)
            ),
        ),
    ]);
    check(&processor, "/v1/completions", cases, 4);
    let parts = many(r#"{"type":"text","text":""},"#, 200);
    let messages = many(r#"{"role":"user","content":""},"#, 100);
    let fewer = r#"{"role":"user","content":""},"#.repeat(16_000);
    check(
        &processor,
        "/v1/chat/completions",
        vec![
            ("many messages", format!(r#"{{"messages":[{messages}0]}}"#)),
            ("16,000 messages", format!(r#"{{"messages":[{}]}}"#, fewer.trim_end_matches(','))),
            ("many parts", format!(r#"{{"messages":[{{"role":"user","content":[{parts}0]}}]}}"#)),
        ],
        4,
    );
}

#[test]
fn more_probabilities_than_a_reply_holds_are_refused() {
    let (processor, _) = generate::load(&spec("generate-llama"), &Device::Cpu).expect("a model of the tests");
    let ask = |max_tokens: usize| {
        let prompts = vec!["\"a\""; 256].join(",");
        let body = format!(r#"{{"prompt":[{prompts}],"n":8,"logprobs":5,"max_tokens":{max_tokens}}}"#);
        cost(&processor, "/v1/completions", body).refusal
    };
    // 2,048 answers, with 6 tokens listed for each of theirs.
    assert!(ask(42).is_none());
    let error = ask(43).expect("528,384 are too many");
    assert_eq!((error.kind, error.param.as_deref()), (TaskErrorKind::TooLarge, Some("logprobs")));
    assert!(error.message.contains("528384"), "{}", error.message);
}

#[test]
fn what_answers_have_in_common_they_share() {
    let (processor, _) = generate::load(&spec("generate-llama"), &Device::Cpu).expect("a model of the tests");
    let body = r#"{"prompt":["a","b"],"n":8,"stop":["x","y"],"user":"u","cache_salt":"s"}"#;
    let message = Message { body: body.into(), ..Message::default() };
    let headers = Headers::from([("url".into(), "/v1/completions".into())]);
    let message = Message { properties: Properties { headers, ..Properties::default() }, ..message };
    let Ok((_, inputs)) = processor.preprocess(&message) else { panic!("it is refused") };
    let inputs = inputs.all().expect("prompts");
    assert_eq!(inputs.len(), 16);
    let first = &inputs[0].input;
    for (index, sized) in inputs.iter().enumerate() {
        assert!(Arc::ptr_eq(&sized.input.stop, &first.stop));
        assert_eq!(Arc::ptr_eq(&sized.input.ids, &first.ids), index < 8);
    }
}

#[test]
fn a_request_for_vectors_or_labels_holds_no_multiple_of_its_body() {
    for name in ["tiny-bert-cls", "tiny-modernbert", "tiny-xlm-roberta"] {
        let (processor, _) = embed::load(&spec(name), &Device::Cpu).expect("a model of the tests");
        check(&processor, "/v1/embeddings", of_any("input"), 4);
    }
    let (processor, _) = labels::load(&spec("score-roberta"), &Device::Cpu).expect("a model of the tests");
    check(&processor, "/classify", of_any("input"), 4);
    let (processor, _) = sparse::load(&spec("sparse-bert"), &Device::Cpu).expect("a model of the tests");
    check(&processor, "/embed_sparse", of_any("inputs"), 4);
    // The sentences of labels, and pairs of a long text with each of them.
    let (processor, _) = labels::load(&spec("score-nli-bert"), &Device::Cpu).expect("a model of the tests");
    let template = format!("{{}}{}", "t".repeat(998));
    let labels = (0..1_000).map(|label| format!("\"{label}\"")).collect::<Vec<_>>().join(",");
    let zero_shot = |texts: String| {
        format!(r#"{{"input":[{texts}],"hypothesis_template":"{template}","labels":[{labels}],"top_k":1}}"#)
    };
    let cases = vec![
        ("long sentences", zero_shot("\"a\",\"b\"".to_owned())),
        ("a long text", zero_shot(format!("\"{}\"", many("a ", 20_000)))),
        ("many labels", format!(r#"{{"input":"a","labels":[{}""]}}"#, many(r#""a","#, 100))),
        ("many texts", zero_shot(format!(r#"{}"""#, many(r#""","#, 20_000)))),
    ];
    check(&processor, "/classify", cases, 4);
    let (processor, _) = token_labels::load(&spec("token-bert"), &Device::Cpu).expect("a model of the tests");
    let texts = format!("[{}]", vec![format!("\"{}\"", "a b ".repeat(1_000)); INPUTS - 100].join(","));
    let window = format!("\"{}\"", "a b ".repeat(60_000));
    let mut cases = of_any("input");
    cases.extend([
        ("many labels", format!(r#"{{"input":"a","ignore_labels":[{}""]}}"#, many(r#""","#, 100))),
        ("long texts", format!(r#"{{"input":{texts}}}"#)),
        ("texts in windows", format!(r#"{{"input":{texts},"stride":1}}"#)),
        ("long texts in windows", format!(r#"{{"input":[{window}],"stride":20}}"#)),
        ("labels beside windows", format!(r#"{{"input":{window},"stride":1,"ignore_labels":[]}}"#)),
    ]);
    // The library keeps 200 bytes of each byte of a text of 256 KiB at most.
    check(&processor, "/token-classification", cases, 10);
    let (processor, _) = pairs::load(&spec("score-bert"), &Device::Cpu).expect("a model of the tests");
    let documents = vec!["\"a b c\""; INPUTS].join(",");
    let cases = vec![
        ("a long query", format!(r#"{{"query":"{}","documents":[{documents}]}}"#, many("a ", 40_000))),
        ("many documents", format!(r#"{{"query":"a","documents":[{}""]}}"#, many(r#""","#, 100))),
        (
            "long documents",
            format!(
                r#"{{"query":"a","return_documents":true,"documents":[{}]}}"#,
                vec![format!("\"{}\"", "a b ".repeat(1_000)); INPUTS - 100].join(",")
            ),
        ),
    ];
    check(&processor, "/v1/rerank", cases, 4);
}

#[test]
fn of_a_long_text_no_more_is_tokenised_than_a_model_takes() {
    let texts = || {
        vec![
            ("one word", format!(r#"{{"prompt":"{0}"}}"#, many("a", 100))),
            ("letters", format!(r#"{{"prompt":"{0}"}}"#, many("a ", 100))),
            ("words", format!(r#"{{"prompt":"{0}"}}"#, many("the quick brown fox ", 100))),
            ("spaces", format!(r#"{{"prompt":"{0}"}}"#, many(" ", 100))),
        ]
    };
    let (processor, _) = generate::load(&spec("generate-llama"), &Device::Cpu).expect("a model of the tests");
    check(&processor, "/v1/completions", texts(), 3);
    for name in ["tiny-bert-cls", "tiny-modernbert", "tiny-xlm-roberta"] {
        let (processor, _) = embed::load(&spec(name), &Device::Cpu).expect("a model of the tests");
        let texts = texts().into_iter().map(|(name, body)| (name, body.replacen("prompt", "input", 1)));
        check(&processor, "/v1/embeddings", texts.collect(), 3);
    }
}
