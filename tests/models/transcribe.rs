//! Speech recognition through the public interface of a model, held against what transformers computes with the same
//! weights (`scripts/make-whisper-fixtures.py`), and against itself: a window's numbers are the same to the bit in any
//! company.

use std::collections::BTreeMap;
use std::io::Cursor;
use std::path::{Path, PathBuf};

use sconce::model::sound::RATE;
use sconce::model::sound::decode::{Channels, Limits, Recording};
use sconce::model::tasks::transcribe::{self, TranscribeProcessor, Transcriber, WindowInput, WindowText};
use sconce::model::{
    Advance, Device, Dtype, Feed, Generate, LoadSpec, Processor, Row, SizedInput, Slot, TaskError,
};
use sconce::protocol::{Headers, Message, Properties, TaskErrorKind};
use serde_json::{Value, json};

const RANDOM: &str = "tests/fixtures/whisper-random";
const TINY_EN: &str = "models/whisper-tiny.en";
const READING: &str = "tests/fixtures/sound/reading.flac";
/// A temperature so small that the likeliest tokens are chosen, and with which a text is written only once.
const GREEDY: f64 = 1e-5;
/// The most difference of numbers from those of transformers.
const TOLERANCE: f32 = 1e-3;

fn path(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn bytes(name: &str) -> Vec<u8> {
    let hint = "run scripts/fetch-whisper and scripts/fetch-recordings";
    std::fs::read(path(name)).unwrap_or_else(|error| panic!("{name}: {error}; {hint}"))
}

fn spec(model: &str, options: &[(&str, Value)]) -> LoadSpec {
    assert!(path(model).join("model.safetensors").is_file(), "{model} is missing: run scripts/fetch-whisper");
    let options = options.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
    LoadSpec { max_inputs: 64, options, ..LoadSpec::new(path(model).to_str().expect("a path in UTF-8")) }
}

fn load(model: &str, options: &[(&str, Value)]) -> (TranscribeProcessor, Transcriber) {
    transcribe::load(&spec(model, options), &Device::Cpu).unwrap_or_else(|error| panic!("{error}"))
}

fn recording(name: &str) -> String {
    format!("models/recordings/librivox-{name}.wav")
}

/// The fixtures of a model.
fn expected(model: &str, name: &str) -> Vec<u8> {
    let folder = Path::new(model).file_name().and_then(|it| it.to_str()).expect("a folder");
    bytes(&format!("tests/fixtures/{folder}/{name}"))
}

fn expected_json(model: &str) -> BTreeMap<String, Value> {
    serde_json::from_slice(&expected(model, "expected.json")).expect("JSON")
}

fn samples(name: &str) -> Vec<f32> {
    let file = Cursor::new(bytes(name));
    let mut recording = Recording::open(file, Limits::of_seconds(60.0), Channels::Mix).expect("sound");
    let mut samples = Vec::new();
    while let Some(block) = recording.next_block().expect("sound") {
        samples.extend_from_slice(&block[0]);
    }
    samples
}

fn wav(samples: &[f32]) -> Vec<u8> {
    wav_of(&[samples])
}

/// A WAV file with these channels, of which the shorter ones end with silence.
fn wav_of(channels: &[&[f32]]) -> Vec<u8> {
    let frames = channels.iter().map(|it| it.len()).max().unwrap_or(0);
    let frame_bytes = 2 * channels.len() as u32;
    let size = frame_bytes * frames as u32;
    let mut file = b"RIFF".to_vec();
    file.extend((size + 36).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0");
    file.extend((channels.len() as u16).to_le_bytes());
    file.extend(RATE.to_le_bytes());
    file.extend((frame_bytes * RATE).to_le_bytes());
    file.extend((frame_bytes as u16).to_le_bytes());
    file.extend(b"\x10\0data");
    file.extend(size.to_le_bytes());
    for frame in 0..frames {
        for channel in channels {
            let sample = channel.get(frame).copied().unwrap_or(0.0);
            file.extend(((sample * 32_768.0) as i16).to_le_bytes());
        }
    }
    file
}

/// A request with these parameters, by default for all of the sound.
fn message(file: Vec<u8>, parameters: &Value) -> Message {
    let Value::Object(mut parameters) = parameters.clone() else { panic!("parameters are an object") };
    parameters.entry("vad").or_insert(false.into());
    let header = |(name, value): (&String, &Value)| {
        let text = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        (name.clone(), text.into())
    };
    let headers: Headers = parameters.iter().map(header).collect();
    let (content_type, message_id) = (Some("audio/wav".to_owned()), Some("task-1".to_owned()));
    Message {
        properties: Properties { headers, content_type, message_id, ..Properties::default() },
        body: file.into(),
    }
}

type Prepared = (<TranscribeProcessor as Processor>::Context, Vec<SizedInput<WindowInput>>);

fn preprocess(processor: &TranscribeProcessor, message: &Message) -> Result<Prepared, TaskError> {
    let (context, inputs) = processor.preprocess(message)?;
    Ok((context, inputs.all()?))
}

/// What is left of a sequence's prompt; none if its window is not encoded yet.
type Left = BTreeMap<usize, Option<usize>>;

/// Transcribes all windows, in slots beside each other. Prompts are fed in chunks, and sequence i begins in step
/// i·`apart`.
fn run(
    network: &mut Transcriber,
    windows: &[SizedInput<WindowInput>],
    chunk: usize,
    apart: usize,
) -> Vec<WindowText> {
    let (mut texts, mut left): (Vec<Option<WindowText>>, Left) = (vec![None; windows.len()], Left::new());
    let mut next = 0;
    for step in 0.. {
        while next < windows.len() && next * apart <= step {
            network.open(Slot(next), &windows[next].input).unwrap_or_else(|error| panic!("{error}"));
            left.insert(next, None);
            next += 1;
        }
        if left.is_empty() && next == windows.len() {
            break;
        }
        let row = |index: &usize, feed| Row { slot: Slot(*index), feed };
        let new: Vec<Row> =
            left.iter().filter(|(_, it)| it.is_none()).map(|(index, _)| row(index, Feed::Encode)).collect();
        for (row, advance) in new.iter().zip(network.step(&new).unwrap_or_else(|error| panic!("{error}"))) {
            assert_eq!(advance, Ok(Advance::Fed));
            left.insert(row.slot.0, Some(windows[row.slot.0].tokens));
        }
        let take = |it: &Option<usize>| it.unwrap_or(0).clamp(1, chunk);
        let rows: Vec<Row> = left.iter().map(|(index, it)| row(index, Feed::Tokens(take(it)))).collect();
        for (row, advance) in rows.iter().zip(network.step(&rows).unwrap_or_else(|error| panic!("{error}"))) {
            let index = row.slot.0;
            let rest = left[&index].unwrap_or(0).saturating_sub(row.feed.tokens());
            left.insert(index, Some(rest));
            match advance.unwrap_or_else(|error| panic!("{error}")) {
                Advance::Fed => assert!(rest > 0),
                Advance::Waits => panic!("nothing is waited for"),
                Advance::More(()) => assert_eq!(rest, 0),
                Advance::Again => _ = left.insert(index, None),
                Advance::Done(_, output) => {
                    texts[index] = Some(output);
                    left.remove(&index);
                    network.close(row.slot);
                }
            }
        }
    }
    texts.into_iter().flatten().collect()
}

/// The reply to a request, as JSON.
fn reply((processor, network): &mut (TranscribeProcessor, Transcriber), message: &Message) -> Value {
    serde_json::from_str(&reply_text(processor, network, message)).expect("JSON")
}

fn reply_text(processor: &TranscribeProcessor, network: &mut Transcriber, message: &Message) -> String {
    let (context, windows) = preprocess(processor, message).unwrap_or_else(|error| panic!("{error}"));
    let texts = run(network, &windows, usize::MAX, 0);
    let body = processor.finish(context, texts).unwrap_or_else(|error| panic!("{error}"));
    String::from_utf8(body.bytes.to_vec()).expect("UTF-8")
}

#[test]
fn a_model_of_several_languages_follows_language_task_and_prompt() {
    let (processor, mut network) = load(RANDOM, &[("sequences", 16.into())]);
    let (mut windows, mut right) = (Vec::new(), Vec::new());
    let mut add = |sound: &str, case: &Value, language: Option<&str>| {
        let mut parameters = json!({"task": case["task"], "prompt": case["prompt"], "temperature": GREEDY});
        if let Some(language) = language {
            parameters["language"] = language.into();
        }
        let message = message(bytes(sound), &parameters);
        windows.extend(preprocess(&processor, &message).unwrap_or_else(|error| panic!("{error}")).1);
        right.push(case.clone());
    };
    for (sound, it) in expected_json(RANDOM) {
        for (index, case) in it["cases"].as_array().expect("a list").iter().enumerate() {
            // The first case has the language that is detected.
            add(&sound, case, case["language"].as_str().filter(|_| index > 0));
        }
    }
    for (chunk, apart) in [(usize::MAX, 0), (2, 0), (5, 3)] {
        for (text, case) in run(&mut network, &windows, chunk, apart).iter().zip(&right) {
            assert_eq!(json!(text.tokens), case["tokens"], "{case}");
            let logprob = case["avg_logprob"].as_f64().expect("a number") as f32;
            assert!((text.avg_logprob - logprob).abs() < TOLERANCE, "{} {logprob}", text.avg_logprob);
            let no_speech = case["no_speech_prob"].as_f64().expect("a number") as f32;
            assert!((text.no_speech - no_speech).abs() < TOLERANCE, "{} {no_speech}", text.no_speech);
        }
    }
}

#[test]
fn a_detected_language_is_in_the_reply() {
    let mut model = load(RANDOM, &[]);
    let message = message(
        bytes(READING),
        &json!({"response_format": "verbose_json", "temperature": GREEDY, "task": "translate"}),
    );
    let reply = reply(&mut model, &message);
    assert_eq!([&reply["language"], &reply["task"]], [&json!("de"), &json!("translate")]);
}

#[test]
fn real_recordings_have_transformers_transcripts_alone_and_together() {
    let (processor, mut network) = load(TINY_EN, &[("sequences", 16.into())]);
    let expected = expected_json(TINY_EN);
    assert_eq!(expected.len(), 11);
    let window = |sound: &String| {
        // With the times of words, so that these are the same to the bit, too.
        let message = message(bytes(sound), &words_asked());
        let (_, mut windows) = preprocess(&processor, &message).unwrap_or_else(|error| panic!("{error}"));
        assert_eq!(windows.len(), 1, "{sound}");
        windows.remove(0)
    };
    let windows: Vec<SizedInput<WindowInput>> = expected.keys().map(window).collect();
    let together = run(&mut network, &windows, usize::MAX, 2);
    for (((sound, right), window), text) in expected.iter().zip(windows).zip(together) {
        let case = &right["cases"][0];
        assert_eq!(json!(text.tokens), case["tokens"], "{sound}");
        let logprob = case["avg_logprob"].as_f64().expect("a number") as f32;
        assert!((text.avg_logprob - logprob).abs() < TOLERANCE, "{sound}: {} {logprob}", text.avg_logprob);
        let no_speech = case["no_speech_prob"].as_f64().expect("a number") as f32;
        assert!((text.no_speech - no_speech).abs() < TOLERANCE, "{sound}: {} {no_speech}", text.no_speech);
        assert_eq!(run(&mut network, &[window], 1, 0), [text], "{sound} alone, to the bit");
    }
}

#[test]
fn weights_with_fewer_bits_write_nearly_the_same_words() {
    let expected = expected_json(TINY_EN);
    for dtype in [Dtype::Bf16, Dtype::Int8] {
        let spec = LoadSpec { dtype, is_dtype_auto: true, ..spec(TINY_EN, &[("sequences", 16.into())]) };
        let mut model = transcribe::load(&spec, &Device::Cpu).unwrap_or_else(|error| panic!("{error}"));
        let (mut all, mut wrong) = (0, 0);
        for (sound, right) in &expected {
            let right = words(right["cases"][0]["text"].as_str().expect("a text"));
            let found = reply(&mut model, &message(bytes(sound), &json!({})));
            all += right.len();
            wrong += edits(&right, &words(found["text"].as_str().expect("a text")));
        }
        assert!(all > 100 && wrong * 50 < all, "{dtype:?}: {wrong} of {all} words differ");
    }
}

fn words_asked() -> Value {
    json!({"response_format": "verbose_json", "timestamp_granularities": ["word"]})
}

/// The words of a text, in lower case and without punctuation.
fn words(text: &str) -> Vec<String> {
    let text: String =
        text.to_lowercase().chars().map(|it| if it.is_alphanumeric() { it } else { ' ' }).collect();
    text.split_whitespace().map(str::to_owned).collect()
}

/// The edits from one list of words to another.
fn edits(from: &[String], to: &[String]) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (at, word) in from.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], at + 1);
        for (column, other) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(word != other);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(diagonal + 1).min(row[column] + 1);
        }
    }
    row[to.len()]
}

#[test]
fn a_long_recording_is_cut_at_pauses_and_its_segments_follow_each_other() {
    let mut model = load(TINY_EN, &[("sequences", 16.into())]);
    let reading = samples(READING);
    let sound: Vec<f32> = [&reading[..], &reading, &reading].concat();
    let seconds = sound.len() as f64 / f64::from(RATE);
    let verbose = message(wav(&sound), &json!({"response_format": "verbose_json"}));
    let (_, windows) = preprocess(&model.0, &verbose).expect("windows");
    let places: Vec<_> = windows.iter().map(|window| window.input.place.clone()).collect();
    assert!((3..=4).contains(&places.len()), "{places:?}");
    for pair in places.windows(2) {
        assert!((pair[0].start() + pair[0].seconds - pair[1].start()).abs() < 1e-9, "{pair:?}");
        assert!((22.0..=30.0).contains(&pair[0].seconds), "{pair:?}");
    }
    let reply = reply(&mut model, &verbose);
    assert!((reply["duration"].as_f64().expect("a number") - seconds).abs() < 1e-3);
    let mut last = 0.0;
    for segment in reply["segments"].as_array().expect("a list") {
        let [start, end] = ["start", "end"].map(|name| segment[name].as_f64().expect("a number"));
        assert!(last <= start && start <= end && end <= seconds + 1e-3, "{segment}");
        last = end;
    }
    let said = ["0870", "0880", "0890", "0920", "0930"].map(|name| {
        String::from_utf8(bytes(&format!("models/recordings/librivox-{name}.txt"))).expect("UTF-8")
    });
    let said = words(&said.join(" ").repeat(3));
    let wrong = edits(&said, &words(reply["text"].as_str().expect("a text")));
    assert!(wrong * 20 < said.len(), "{wrong} of {} words are wrong: {}", said.len(), reply["text"]);
}

#[test]
fn what_is_no_speech_is_left_out_and_times_are_those_of_the_recording() {
    let mut model = load(TINY_EN, &[]);
    let (first, second) = (samples(&recording("0880")), samples(&recording("0930")));
    // Quiet noise, in which the model would hear something.
    let mut state = 1_u32;
    let mut noise = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / 8_388_608.0 * 0.01 - 0.01
    };
    let noise: Vec<f32> = (0..40 * RATE).map(|_| noise()).collect();
    let sound = [&noise[..], &first, &noise, &second, &noise].concat();
    let request = json!({"response_format": "verbose_json", "vad": true});
    let verbose = message(wav(&sound), &request);
    let (_, windows) = preprocess(&model.0, &verbose).expect("windows");
    assert_eq!(windows.len(), 1, "two minutes of noise, and seven seconds of speech");
    let reply = reply(&mut model, &verbose);
    let said = ["0880", "0930"].map(|name| {
        String::from_utf8(bytes(&format!("models/recordings/librivox-{name}.txt"))).expect("UTF-8")
    });
    let wrong = edits(&words(&said.join(" ")), &words(reply["text"].as_str().expect("a text")));
    assert!(wrong <= 2, "{wrong} of 16 words are wrong: {}", reply["text"]);
    assert_eq!(reply["duration"].as_f64().map(f64::round), Some((sound.len() as f64 / 16_000.0).round()));
    let segments = reply["segments"].as_array().expect("a list");
    let of = |segment: &Value| ["start", "end"].map(|name| segment[name].as_f64().expect("a number"));
    let begins = 80.0 + first.len() as f64 / f64::from(RATE);
    let [start, end] = of(&segments[0]);
    assert!((39.0..41.0).contains(&start) && end < begins - 39.0, "{segments:?}");
    let [start, end] = of(segments.last().expect("a segment"));
    assert!((begins - 1.0..begins + 2.0).contains(&start) && end < begins + 5.0, "{segments:?}");
    let nothing = message(wav(&noise), &request);
    assert!(preprocess(&model.0, &nothing).expect("no window").1.is_empty());
}

#[test]
fn a_reply_has_the_requested_format() {
    let (processor, mut network) = load(TINY_EN, &[]);
    let mut text = |format: &str| {
        let message =
            message(bytes("models/recordings/librivox-0930.wav"), &json!({"response_format": format}));
        reply_text(&processor, &mut network, &message)
    };
    let said = "He might even have been made amiable himself.";
    assert_eq!(text("text"), format!("{said}\n"));
    let json: Value = serde_json::from_str(&text("json")).expect("JSON");
    assert_eq!(json, json!({"text": said, "usage": {"type": "duration", "seconds": 4}}));
    let srt = text("srt");
    assert!(
        srt.starts_with("1\n00:00:00,000 --> 00:00:0") && srt.ends_with(&format!("\n{said}\n\n")),
        "{srt}"
    );
    let vtt = text("vtt");
    assert!(vtt.starts_with("WEBVTT\n\n00:00:00.000 --> 00:00:0"), "{vtt}");
}

#[test]
fn silence_has_no_text_and_is_not_computed() {
    let mut model = load(TINY_EN, &[]);
    for (seconds, samples) in [(5, vec![0.0005; 5 * RATE as usize]), (0, Vec::new())] {
        let silent = message(wav(&samples), &json!({}));
        assert!(preprocess(&model.0, &silent).expect("no window").1.is_empty());
        let expected = json!({"text": "", "usage": {"type": "duration", "seconds": seconds}});
        assert_eq!(reply(&mut model, &silent), expected);
    }
    let verbose = message(wav(&[0.0; 1_600]), &json!({"response_format": "verbose_json"}));
    let reply = reply(&mut model, &verbose);
    assert_eq!([&reply["language"], &reply["duration"]], [&json!("en"), &json!(0.1)]);
}

#[test]
fn parts_of_a_reply_join_to_its_text() {
    let (processor, mut network) = load(TINY_EN, &[]);
    let message = message(bytes("tests/fixtures/sound/short.flac"), &json!({"stream": true}));
    let (mut context, windows) = preprocess(&processor, &message).expect("windows");
    let texts = run(&mut network, &windows, usize::MAX, 0);
    let mut joined = String::new();
    for (index, text) in texts.iter().enumerate() {
        for part in processor.output_parts(&mut context, index, text) {
            let part: Value = serde_json::from_slice(&part.bytes).expect("JSON");
            assert_eq!(part["type"], "transcript.text.delta");
            joined.push_str(part["delta"].as_str().expect("a text"));
        }
    }
    let body = processor.finish(context, texts).expect("a reply");
    let reply: Value = serde_json::from_slice(&body.bytes).expect("JSON");
    assert_eq!(reply["text"], joined.trim());
}

#[test]
fn a_doubtful_text_is_written_again_the_same_way_each_time() {
    let (processor, mut network) = load(RANDOM, &[]);
    let message = message(bytes(READING), &json!({"language": "en"}));
    let (_, windows) = preprocess(&processor, &message).expect("windows");
    let first = run(&mut network, &windows, usize::MAX, 0);
    // No text of random weights is likely.
    assert_eq!(first[0].temperature, 1.0);
    assert_eq!(run(&mut network, &windows, 2, 0), first);
}

#[test]
fn bad_input_is_refused_with_the_field_and_the_value() {
    let (english, _) = load(TINY_EN, &[("max_seconds", 2.into())]);
    let (several, _) = load(RANDOM, &[]);
    let short = || bytes("tests/fixtures/sound/short.flac");
    let refusal = |processor: &TranscribeProcessor, file: Vec<u8>, parameters: Value| {
        let error = preprocess(processor, &message(file, &parameters)).map(drop).expect_err("it is refused");
        (error.kind, error.param.unwrap_or_default(), error.message)
    };
    for (file, parameters, param, text) in [
        (b"no sound at all".to_vec(), json!({}), "", "no known sound format"),
        (bytes("tests/fixtures/sound/short.opus"), json!({}), "", "Opus"),
        (short()[..9_000].to_vec(), json!({}), "", "cut off or broken"),
        (short(), json!({"language": "tlh"}), "language", "language is \"tlh\"; this model knows de, en, ja"),
        (short(), json!({"prompt": "a <|endoftext|> b"}), "prompt", "prompt holds a special token"),
        (short(), json!({"model": "whisper-1"}), "model", "this pool serves the model \"whisper-random\""),
    ] {
        let (_, found, message) = refusal(&several, file, parameters);
        assert_eq!(found, param, "{message}");
        assert!(message.contains(text), "{message}");
    }
    let (kind, _, message) = refusal(&english, short(), json!({}));
    assert_eq!(kind, TaskErrorKind::TooLarge);
    assert_eq!(message, "the recording declares 5.3 s of sound; at most 2 s are taken (max_seconds)");
    let (_, param, message) = refusal(&english, short(), json!({"task": "translate"}));
    assert_eq!(param, "task");
    assert!(message.contains("knows English only"), "{message}");
    let (_, _, message) = refusal(&english, short(), json!({"language": "de"}));
    assert!(message.contains("language is \"de\"; this model knows English only (\"en\")"), "{message}");
    let routes = |processor: &TranscribeProcessor| processor.routes().len();
    assert_eq!((routes(&english), routes(&several)), (1, 2), "a model of English does not translate");
}

#[test]
fn words_begin_where_openais_program_finds_them() {
    let mut model = load(TINY_EN, &[]);
    let expected: BTreeMap<String, Vec<(String, f64, f64)>> =
        serde_json::from_slice(&expected(TINY_EN, "words.json")).expect("JSON");
    let (mut off, mut other_texts) = (Vec::new(), 0);
    for (sound, right) in &expected {
        let reply = reply(&mut model, &message(bytes(sound), &words_asked()));
        let words = reply["words"].as_array().expect("words");
        let texts: Vec<&str> = words.iter().map(|it| it["word"].as_str().expect("a word")).collect();
        // A hyphen begins a word.
        let whole = reply["text"].as_str().expect("a text");
        assert_eq!(texts.concat(), whole.replace(' ', ""), "{sound}");
        let times: Vec<(f64, f64)> = words
            .iter()
            .map(|it| (it["start"].as_f64().expect("seconds"), it["end"].as_f64().expect("seconds")))
            .collect();
        let duration = reply["duration"].as_f64().expect("seconds");
        assert!(
            times.iter().all(|(start, end)| 0.0 <= *start && start <= end && *end <= duration),
            "{sound}: {times:?}"
        );
        assert!(times.windows(2).all(|pair| pair[0].0 <= pair[1].0), "{sound}: {times:?}");
        // "cold-hearted" and "coldhearted" are nearly a tie.
        if texts != right.iter().map(|it| it.0.as_str()).collect::<Vec<_>>() {
            other_texts += 1;
            continue;
        }
        off.extend(times.iter().zip(right).map(|((start, _), (_, right, _))| (start - right).abs()));
    }
    // OpenAI's program computes the text once more without times between its words, and then aligns it.
    off.sort_by(f64::total_cmp);
    let (median, ninety, most) = (off[off.len() / 2], off[off.len() * 9 / 10], off[off.len() - 1]);
    assert!(off.len() > 40 && other_texts <= 1, "{} {other_texts}", off.len());
    assert!(median <= 0.04 && ninety <= 0.1 && most <= 0.5, "{median} {ninety} {most}");
}

#[test]
fn channels_are_transcribed_as_if_alone_and_their_segments_are_in_order() {
    let mut model = load(TINY_EN, &[]);
    let voices = ["0930", "0880"].map(|name| samples(&recording(name)));
    let verbose = json!({"response_format": "verbose_json"});
    let alone = voices.each_ref().map(|it| reply(&mut model, &message(wav(it), &verbose)));
    let both = wav_of(&[&voices[0], &voices[1]]);
    let split = json!({"response_format": "verbose_json", "channels": "split"});
    let together = reply(&mut model, &message(both.clone(), &split));
    let segments = together["segments"].as_array().expect("segments");
    for (channel, alone) in alone.iter().enumerate() {
        let own = segments.iter().filter(|it| it["channel"] == channel);
        let text: String = own.map(|it| it["text"].as_str().expect("a text")).collect();
        assert_eq!(text.trim(), alone["text"], "channel {channel}");
    }
    let starts: Vec<f64> = segments.iter().map(|it| it["start"].as_f64().expect("seconds")).collect();
    assert!(starts.is_sorted(), "{starts:?}");
    assert!(alone[0]["segments"][0].get("channel").is_none());
    // A limit between the length and twice the length.
    let seconds = together["duration"].as_f64().expect("seconds");
    let (short, _) = load(TINY_EN, &[("max_seconds", (seconds as u64 + 1).into())]);
    assert!(preprocess(&short, &message(both.clone(), &json!({}))).is_ok());
    let error = preprocess(&short, &message(both, &split)).err().expect("too long");
    assert_eq!(error.kind, TaskErrorKind::TooLarge);
    assert!(error.message.contains("s of sound in each of 2 channels; at most"), "{error}");
}

#[test]
fn keywords_stand_before_the_prompt_and_leave_it_half_of_the_room() {
    let (processor, mut network) = load(RANDOM, &[]);
    let mut previous = |parameters: Value| {
        let (_, windows) = preprocess(&processor, &message(bytes(READING), &parameters)).expect("windows");
        let texts = run(&mut network, &windows, usize::MAX, 0);
        (windows[0].input.previous.to_vec(), texts[0].tokens.clone())
    };
    let (prompt, _) = previous(json!({"prompt": "a message queue", "temperature": GREEDY}));
    let (keywords, text) =
        previous(json!({"keywords": ["Dashwood", " ", "Norland Park"], "temperature": GREEDY}));
    let (both, _) = previous(
        json!({"keywords": ["Dashwood", "Norland Park"], "prompt": "a message queue", "temperature": GREEDY}),
    );
    assert_eq!(both, [&keywords[..], &prompt[1..]].concat());
    let (_, without) = previous(json!({"temperature": GREEDY}));
    assert_ne!(text, without, "the model reads them");
    let (long, _) = previous(json!({"keywords": vec!["Dashwood"; 100], "prompt": "a message queue"}));
    assert_eq!(long[long.len() - (prompt.len() - 1)..], prompt[1..], "the prompt has room");
    let error = preprocess(&processor, &message(bytes(READING), &json!({"keywords": ["<|translate|>"]})));
    assert_eq!(error.err().expect("a special token").param.as_deref(), Some("keywords"));
}
