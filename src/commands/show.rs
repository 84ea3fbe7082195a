//! For `run-batch --show` and `publish --stream`: writes the text of each answer while it is generated, in the order of
//! the lines. Owns the text that has arrived while an earlier line is still being written.

use std::collections::BTreeMap;
use std::io::{self, Write};

use serde_json::Value as Json;

use crate::protocol::requests::text_of;
use crate::protocol::{Message, Value};

/// Writes the texts of answers to `out`.
pub(super) struct Show<W> {
    out: W,
    /// The line that is being written.
    current: Option<u64>,
    /// The text of that line that has been written so far.
    written: String,
    /// The lines under way, by number. Bound: the caller's window of lines that are under way.
    pending: BTreeMap<u64, PendingLine>,
}

/// A line whose answer is not written in full yet.
#[derive(Default)]
struct PendingLine {
    custom_id: String,
    /// The text that has arrived and is not written yet.
    text: String,
}

impl<W: Write> Show<W> {
    pub(super) fn new(out: W) -> Self {
        Self { out, current: None, written: String::new(), pending: BTreeMap::new() }
    }

    /// Registers a line that is about to be published.
    pub(super) fn begun(&mut self, number: u64, custom_id: &str) {
        self.pending.insert(number, PendingLine { custom_id: custom_id.to_owned(), text: String::new() });
    }

    /// Adds a part of an answer.
    pub(super) fn part(&mut self, number: u64, part: &Message) -> io::Result<()> {
        if let (Some(text), Some(line)) = (text_of(part), self.pending.get_mut(&number)) {
            line.text.push_str(&text);
        }
        self.write_arrived()
    }

    /// Writes the rest of an answer. The caller passes answers in line order, so all earlier answers are written.
    pub(super) fn answered(&mut self, number: u64, reply: &Message) -> io::Result<()> {
        self.write_arrived()?;
        if self.pending.remove(&number).is_some() {
            let full_text =
                text_of(reply).or_else(|| error_of(reply)).unwrap_or_else(|| description_of(reply));
            // Parts may be lost, but the reply has the full text. The parts of a transcript begin with a space, and the
            // reply does not. Subtitles differ from the text of their parts.
            match full_text.trim_start().strip_prefix(self.written.trim_start()) {
                Some(rest) => writeln!(self.out, "{rest}\n")?,
                None => writeln!(self.out, "\n{full_text}\n")?,
            }
        }
        self.current = None;
        self.write_arrived()
    }

    /// Writes the text that has arrived for the first line under way.
    fn write_arrived(&mut self) -> io::Result<()> {
        let Some(mut first) = self.pending.first_entry() else { return Ok(()) };
        if self.current != Some(*first.key()) {
            self.current = Some(*first.key());
            self.written.clear();
            if !first.get().custom_id.is_empty() {
                writeln!(self.out, "> {}", first.get().custom_id)?;
            }
        }
        let text = std::mem::take(&mut first.get_mut().text);
        self.written.push_str(&text);
        self.out.write_all(text.as_bytes()).and_then(|()| self.out.flush())
    }
}

/// The status and message of a reply that is an error; none for any other reply.
fn error_of(reply: &Message) -> Option<String> {
    let status = reply.properties.headers.get("status_code").and_then(Value::as_i64)?;
    let body: Json = serde_json::from_slice(&reply.body).ok()?;
    let message = body.get("error")?.get("message")?.as_str()?;
    Some(format!("error {status}: {message}"))
}

/// What is shown of a reply without text.
fn description_of(reply: &Message) -> String {
    let media_type = reply.media_type().unwrap_or_else(|| crate::protocol::JSON.to_owned());
    format!("({} bytes of {media_type}, which is not shown)", reply.body.len())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::protocol::Properties;

    fn message(body: impl ToString) -> Message {
        Message { body: body.to_string().into(), ..Message::default() }
    }

    fn part(text: &str) -> Message {
        message(json!({"choices": [{"index": 0, "delta": {"content": text}}]}))
    }

    #[test]
    fn plain_text_replies_are_shown_and_of_audio_only_the_size() {
        let of = |content_type: &str, body: &str| {
            let properties = Properties { content_type: Some(content_type.into()), ..Properties::default() };
            Message { properties, ..message(body) }
        };
        let mut show = Show::new(Vec::new());
        show.begun(0, "a");
        show.begun(1, "b");
        show.part(0, &of("text/plain", "one ")).unwrap();
        show.answered(0, &of("text/plain", "one two")).unwrap();
        show.part(1, &of("audio/wav", "RIFF")).unwrap();
        show.answered(1, &of("audio/wav", "RIFFRIFF")).unwrap();
        assert_eq!(
            String::from_utf8(show.out).unwrap(),
            "> a\none two\n\n> b\n(8 bytes of audio/wav, which is not shown)\n\n"
        );
    }

    #[test]
    fn a_transcript_is_shown_once_and_subtitles_after_their_text() {
        let delta = |text: &str| message(json!({"type": "transcript.text.delta", "delta": text}));
        let plain = Properties { content_type: Some("text/plain".into()), ..Properties::default() };
        let mut show = Show::new(Vec::new());
        show.begun(0, "");
        show.part(0, &delta(" one")).unwrap();
        show.part(0, &delta(" two.")).unwrap();
        show.answered(0, &message(json!({"text": "one two."}))).unwrap();
        show.begun(1, "");
        show.part(1, &delta(" one")).unwrap();
        let subtitles = Message { body: "1\n00:00".into(), properties: plain };
        show.answered(1, &subtitles).unwrap();
        assert_eq!(String::from_utf8(show.out).unwrap(), " one two.\n\n one\n1\n00:00\n\n");
    }

    #[test]
    fn an_error_is_shown_in_the_place_of_its_text() {
        let headers = crate::protocol::Headers::from([("status_code".to_owned(), 400_i64.into())]);
        let mut reply = message(json!({"error": {"message": "prompt is missing"}}));
        reply.properties.headers = headers;
        let mut show = Show::new(Vec::new());
        show.begun(0, "a");
        show.answered(0, &reply).unwrap();
        assert_eq!(String::from_utf8(show.out).unwrap(), "> a\nerror 400: prompt is missing\n\n");
    }

    #[test]
    fn a_text_without_an_id_has_no_heading() {
        let mut show = Show::new(Vec::new());
        show.begun(0, "");
        show.part(0, &part("one ")).unwrap();
        show.answered(0, &message(json!({"choices": [{"index": 0, "text": "one two"}]}))).unwrap();
        assert_eq!(show.out, b"one two\n\n");
    }

    #[test]
    fn texts_are_shown_in_line_order_and_whole_even_if_parts_are_lost() {
        let mut show = Show::new(Vec::new());
        show.begun(0, "a");
        show.begun(1, "b");
        show.part(0, &part("one ")).unwrap();
        show.part(1, &part("three")).unwrap();
        assert_eq!(show.out, b"> a\none ");
        let whole = json!({"choices": [{"index": 0, "message": {"content": "one two"}}]});
        show.answered(0, &message(whole)).unwrap();
        assert_eq!(show.out, b"> a\none two\n\n> b\nthree");
        show.answered(1, &message(json!({"choices": [{"index": 0, "text": "three"}]}))).unwrap();
        assert_eq!(show.out, b"> a\none two\n\n> b\nthree\n\n");
        show.part(1, &part("late")).unwrap();
        show.answered(9, &message("not JSON")).unwrap();
        assert!(show.out.ends_with(b"three\n\n"));
    }
}
