//! Grammars of requesters, in the processes that build them and compute their masks: which are refused, what they cost the
//! worker, and what happens when such a process ends.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sconce::model::sequences::grammar;
use sconce::model::tasks::generate::{self, GenerateProcessor, TextGenerator};
use sconce::model::{
    Device, Feed, Generate, LoadSpec, Processor, Row, SizedInput, Slot, TaskError, TaskErrorKind,
};
use sconce::protocol::{Headers, Message, Properties};
use serde_json::{Value, json};

/// What a builder may hold by its budget is 64 MiB; beside it stand the vocabulary and the program itself.
const MOST_MIB: u64 = 64 + 80;

/// One test at a time: each looks at the processes that this one has started.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

fn model() -> (GenerateProcessor, TextGenerator) {
    grammar::set_program(env!("CARGO_BIN_EXE_sconce"));
    let file = "models/smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf";
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(file);
    let spec = LoadSpec { max_inputs: 64, ..LoadSpec::new(path.to_str().expect("UTF-8")) };
    generate::load(&spec, &Device::Cpu).unwrap_or_else(|error| panic!("{error}"))
}

fn message(format: &Value, n: usize) -> Message {
    let headers = Headers::from([("url".into(), "/v1/completions".into())]);
    let body = json!({"prompt": "x", "max_tokens": 64, "n": n, "temperature": 1, "seed": 1,
                      "response_format": format});
    let properties = Properties { headers, ..Properties::default() };
    Message { properties, body: body.to_string().into() }
}

fn schema(schema: Value) -> Value {
    json!({"type": "json_schema", "json_schema": {"name": "x", "schema": schema}})
}

/// An object with so many optional texts.
fn object_of(count: usize) -> Value {
    let fields = (0..count).map(|k| (format!("field_{k}"), json!({"type": "string"})));
    json!({"type": "object", "properties": fields.collect::<serde_json::Map<_, _>>()})
}

fn regex(regex: impl Into<String>) -> Value {
    json!({"type": "regex", "regex": regex.into()})
}

fn inputs(
    processor: &GenerateProcessor,
    message: &Message,
) -> Result<Vec<SizedInput<generate::Prompt>>, TaskError> {
    processor.preprocess(message)?.1.all()
}

/// The error of a request, wherever it comes: when it is preprocessed, or at one of the first tokens.
fn error(model: &mut (GenerateProcessor, TextGenerator), format: &Value) -> Option<TaskError> {
    let (processor, generator) = model;
    let inputs = match inputs(processor, &message(format, 1)) {
        Ok(inputs) => inputs,
        Err(error) => return Some(error),
    };
    let slot = Slot(0);
    let begun = generator.open(slot, &inputs[0].input);
    let mut take = inputs[0].tokens;
    let mut error = begun.err();
    for _ in 0..24 {
        if error.is_some() {
            break;
        }
        let result =
            generator.step(&[Row { slot, feed: Feed::Tokens(take) }]).expect("the device works").remove(0);
        take = 1;
        error = result.err();
    }
    generator.close(slot);
    error
}

/// Processes whose parent is this one: the grammar servers; and theirs.
fn children_of(parent: u32) -> Vec<u32> {
    let stat = |entry: fs::DirEntry| {
        let pid: u32 = entry.file_name().to_str()?.parse().ok()?;
        let stat = fs::read_to_string(entry.path().join("stat")).ok()?;
        let (_, after) = stat.rsplit_once(')')?;
        (after.split_whitespace().nth(1)?.parse() == Ok(parent)).then_some(pid)
    };
    fs::read_dir("/proc").expect("/proc").filter_map(|entry| stat(entry.ok()?)).collect()
}

/// The most memory that a process held, in MiB.
fn peak(pid: u32) -> Option<u64> {
    let status = fs::read_to_string(Path::new("/proc").join(pid.to_string()).join("status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.split_whitespace().next()?.parse::<u64>().ok().map(|kib| kib >> 10)
}

/// Keeps the largest peak of this program's grammar processes while `work` runs.
fn watched<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let (done, most) = (std::sync::atomic::AtomicBool::new(false), std::sync::atomic::AtomicU64::new(0));
    use std::sync::atomic::Ordering::SeqCst;
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(SeqCst) {
                let mut processes = children_of(std::process::id());
                let mut at = 0;
                while at < processes.len() {
                    most.fetch_max(peak(processes[at]).unwrap_or_default(), SeqCst);
                    processes.extend(children_of(processes[at]));
                    at += 1;
                }
                std::thread::sleep(std::time::Duration::from_millis(2));
            }
        });
        let result = work();
        done.store(true, SeqCst);
        (result, most.load(SeqCst))
    })
}

#[test]
fn grammars_that_explode_are_refused_within_their_budget() {
    let _turn = turn();
    let mut model = model();
    let hard = |letter: &str| format!("^(x|(a|b)*{letter}(a|b){{24}})$");
    let overlapping = |n: u32| {
        let branches: Vec<String> =
            (0..n).map(|k| format!("[a{}]{k}", char::from_u32(0x100 + k).expect("a letter"))).collect();
        format!("^z({})$", branches.join("|"))
    };
    let refused = [
        schema(json!({"type": "integer", "multipleOf": 4_000_037})),
        schema(json!({"type": "integer", "multipleOf": 200_000_033})),
        schema(json!({"type": "number", "multipleOf": 0.000_400_003_7})),
        regex("a?".repeat(20_000)),
        regex("(a?)".repeat(2_000)),
        schema(
            json!({"items": {"anyOf": [{"type": "string", "pattern": "a?".repeat(5_000)}]}, "type": "array"}),
        ),
        schema(object_of(4_000)),
        regex("(("),
        regex(r"[^\s\S]"),
        schema(json!({"type": "nothing"})),
    ];
    // What llguidance makes of these is its business, within the budget.
    let bounded = [
        schema(json!({"type": "string", "allOf": [{"pattern": hard("a")}, {"pattern": hard("b")}]})),
        schema(
            json!({"type": "string", "allOf": [{"pattern": overlapping(150)}, {"pattern": overlapping(151)},
                                                  {"pattern": overlapping(152)}, {"pattern": overlapping(153)}]}),
        ),
    ];
    let must_be_refused = refused.iter().map(|format| (format, true));
    for (format, must) in must_be_refused.chain(bounded.iter().map(|format| (format, false))) {
        let (error, peak) = watched(|| error(&mut model, format));
        let shown: String = format.to_string().chars().take(100).collect();
        assert!(peak < MOST_MIB, "{peak} MiB for {shown}");
        let Some(error) = error else {
            assert!(!must, "{shown} is taken");
            continue;
        };
        assert_eq!(error.kind, TaskErrorKind::BadInput, "{shown}: {error}");
        assert_eq!(error.param.as_deref(), Some("response_format"), "{shown}: {error}");
        for own in ["state", "start:", "non-verbose", "NoExtension"] {
            assert!(!error.message.contains(own), "{own} is of the library: {error}");
        }
    }
}

#[test]
fn usual_grammars_stay_far_below_their_budget() {
    let _turn = turn();
    let mut model = model();
    let mut some = object_of(150);
    some["required"] = json!(["field_3"]);
    let names: Vec<String> = (0..2_000).map(|k| format!("name {k}")).collect();
    let grammars = [
        json!({"type": "json_object"}),
        schema(some),
        schema(object_of(490)),
        schema(json!({"enum": names})),
        schema(json!({"type": "integer", "multipleOf": 5, "minimum": 0, "maximum": 100_000})),
        schema(json!({"type": "number", "multipleOf": 0.01})),
        schema(json!({"type": "string", "pattern": r"^[\w.+-]+@[\w-]+\.[\w.]{2,20}$", "maxLength": 80})),
        schema(json!({"type": "string", "format": "date-time"})),
        schema(json!({"type": "array", "items": {"$ref": "#/$defs/node"},
                      "$defs": {"node": {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}, "v": {"type": "number"}}}}})),
        regex(r"\d{4}-\d{2}-\d{2}( \p{L}{1,40}){0,20}"),
    ];
    for format in &grammars {
        assert_eq!(error(&mut model, format), None, "{format}");
    }
}

#[test]
fn sequences_share_a_grammar_and_its_process_ends_with_the_last() {
    let _turn = turn();
    let (processor, mut generator) = model();
    let inputs = inputs(&processor, &message(&regex("(yes|no), [a-z]{3}"), 8)).expect("a grammar");
    let servers = children_of(std::process::id());
    let [server] = servers[..] else { panic!("one server: {servers:?}") };
    let builders = children_of(server);
    let [builder] = builders[..] else { panic!("one builder: {builders:?}") };
    for (slot, input) in inputs.iter().enumerate() {
        generator.open(Slot(slot), &input.input).expect("a sequence");
    }
    let rows: Vec<Row> = inputs
        .iter()
        .enumerate()
        .map(|(slot, it)| Row { slot: Slot(slot), feed: Feed::Tokens(it.tokens) })
        .collect();
    generator.step(&rows).expect("a step");
    assert_eq!(children_of(builder).len(), 8, "a matcher for each sequence");
    (0..8).for_each(|slot| generator.close(Slot(slot)));
    drop((inputs, processor));
    while children_of(std::process::id()).contains(&server) {
        std::thread::yield_now();
    }
}

#[test]
fn a_grammar_process_that_is_killed_costs_one_attempt() {
    let _turn = turn();
    let (processor, mut generator) = model();
    let format = regex("(yes|no), [a-z]{3}");
    let inputs = inputs(&processor, &message(&format, 1)).expect("a grammar");
    let [server] = children_of(std::process::id())[..] else { panic!("one server") };
    let [builder] = children_of(server)[..] else { panic!("one builder") };
    kill(Pid::from_raw(builder as i32), Signal::SIGKILL).expect("a kill");
    while children_of(server).contains(&builder) {
        std::thread::yield_now();
    }
    let failure = generator.open(Slot(0), &inputs[0].input).expect_err("its process is gone");
    assert_eq!(failure.kind, TaskErrorKind::Fault, "the task is tried again: {failure}");
    drop(inputs);
    let mut model = (processor, generator);
    assert_eq!(error(&mut model, &format), None, "the grammar is built again");
    kill(Pid::from_raw(server as i32), Signal::SIGKILL).expect("a kill");
    assert_eq!(error(&mut model, &regex("[0-9]{2}")), None, "another server is started");
}
