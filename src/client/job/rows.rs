//! Makes tasks from lines, and output lines from replies. Decides which lines share a task, and how its reply is
//! divided among them. Does no I/O.

use crate::protocol::Message;
use crate::protocol::batch_line::{self, BatchRequest, InvalidLine, RequestBody};
use crate::protocol::requests::{self, ReplyShare, ShareableRequest, count_inputs};

/// Maximum bytes of request bodies that share a task.
const MAX_SHARED_BYTES: usize = 1 << 20;

/// A line that is answered by a task.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Row {
    /// Its number in the output, from 0.
    pub(super) number: u64,
    pub(super) custom_id: String,
    /// Its number in the input, from 1.
    pub(super) line: usize,
    /// How many inputs it has, and the form of its reply if it shares a task.
    pub(super) share: ReplyShare,
    /// Its own request, which is sent alone if another row makes the shared task fail; none if it has a task of its
    /// own.
    body: Option<RequestBody>,
}

/// A task with the rows that it answers.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct PackedTask {
    pub(super) rows: Vec<Row>,
    pub(super) url: String,
    pub(super) body: RequestBody,
}

/// A row that waits for others to share its task.
struct OpenRow {
    row: Row,
    request: ShareableRequest,
}

/// Maximum number of rows of a task, and of the inputs of all its rows.
#[derive(Clone, Copy)]
pub(super) struct TaskLimits {
    pub(super) rows: usize,
    /// The pool's `max_inputs`.
    pub(super) inputs: usize,
}

/// Gathers rows that share a task.
pub(super) struct Packer {
    limits: TaskLimits,
    url: String,
    open: Vec<OpenRow>,
    /// Inputs and bytes of the open rows.
    inputs: usize,
    bytes: usize,
}

impl Packer {
    pub(super) fn new(limits: TaskLimits) -> Self {
        Self { limits, url: String::new(), open: Vec::new(), inputs: 0, bytes: 0 }
    }

    /// Adds the request of the next row. `number` is the row's number in the output, `line` its number in the input.
    /// Returns the tasks that are now complete.
    pub(super) fn add(&mut self, number: u64, line: usize, request: BatchRequest) -> Vec<PackedTask> {
        let BatchRequest { custom_id, url, body } = request;
        let alone = |inputs| ReplyShare { inputs, is_unwrapped: false };
        let row = Row { number, custom_id, line, share: alone(1), body: None };
        let request = if self.limits.rows > 1 { ShareableRequest::from_request(&url, &body) } else { None };
        let Some(request) = request else {
            let row = Row { share: alone(count_inputs(&body)), ..row };
            return self.flush().into_iter().chain([PackedTask { rows: vec![row], url, body }]).collect();
        };
        let inputs = request.inputs.len();
        let has_room =
            self.inputs + inputs <= self.limits.inputs && self.bytes + body.len() <= MAX_SHARED_BYTES;
        let can_join = |first: &OpenRow| self.url == url && first.request.is_like(&request) && has_room;
        let mut complete = Vec::new();
        if !self.open.first().is_none_or(can_join) {
            complete.extend(self.flush());
        }
        self.url = url;
        self.inputs += inputs;
        self.bytes += body.len();
        let share = ReplyShare { inputs, is_unwrapped: request.is_unwrapped };
        let row = Row { share, body: Some(body), ..row };
        self.open.push(OpenRow { row, request });
        if self.open.len() == self.limits.rows {
            complete.extend(self.flush());
        }
        complete
    }

    /// Completes the task of the rows gathered so far.
    pub(super) fn flush(&mut self) -> Option<PackedTask> {
        let open = std::mem::take(&mut self.open);
        let url = std::mem::take(&mut self.url);
        (self.inputs, self.bytes) = (0, 0);
        let inputs = open.iter().flat_map(|row| &row.request.inputs).map(|input| &**input);
        let body = open.first()?.request.body_for(inputs);
        let rows = open.into_iter().map(|row| row.row).collect();
        Some(PackedTask { rows, url, body: body.into() })
    }
}

impl PackedTask {
    /// Splits the task into one task for each row.
    pub(super) fn split(self) -> Vec<Self> {
        let Self { rows, url, body } = self;
        let alone = |mut row: Row| {
            let body = row.body.take().unwrap_or_else(|| body.clone());
            Self { rows: vec![row], url: url.clone(), body }
        };
        rows.into_iter().map(alone).collect()
    }
}

/// The output line of a row that has a task of its own, from the reply to it.
pub(super) fn line_of(row: &Row, status: u16, reply: &Message) -> Vec<u8> {
    let notes = batch_line::notes_of(reply);
    batch_line::response_line(&row.custom_id, status, id_of(reply), &notes, &batch_line::body_value(reply))
}

/// The output lines of rows that share a task, in their order, from the reply to it. None: the reply cannot be
/// divided among them, because it is not JSON, or does not have one item for each input.
pub(super) fn shared_lines(rows: &[Row], status: u16, reply: &Message) -> Option<Vec<Vec<u8>>> {
    let shares: Vec<ReplyShare> = rows.iter().map(|row| row.share).collect();
    let bodies = requests::divide_reply(reply, &shares).ok()?;
    let line = |(index, (row, body)): (usize, (&Row, Box<_>))| {
        let id = format!("{}_{index}", id_of(reply));
        // The notes of the task concern one row or another.
        batch_line::response_line(&row.custom_id, status, &id, &batch_line::Notes::new(), &body)
    };
    Some(rows.iter().zip(bodies).enumerate().map(line).collect())
}

fn id_of(reply: &Message) -> &str {
    reply.properties.message_id.as_deref().unwrap_or_default()
}

/// The error line of a row for which there is no reply to write.
pub(super) fn failed_line(row: &Row, code: &'static str, problem: String) -> Vec<u8> {
    let failed = InvalidLine { custom_id: Some(row.custom_id.clone()), problem };
    batch_line::failed_line(row.line, code, &failed)
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn request(id: &str, url: &str, body: &Value) -> BatchRequest {
        BatchRequest { custom_id: id.into(), url: url.into(), body: body.to_string().into() }
    }

    fn packed(max_rows: usize, lines: &[(&str, Value)]) -> Vec<PackedTask> {
        let mut packer = Packer::new(TaskLimits { rows: max_rows, inputs: 5 });
        let mut tasks = Vec::new();
        for (index, (url, body)) in lines.iter().enumerate() {
            tasks.extend(packer.add(index as u64, index + 1, request(&index.to_string(), url, body)));
        }
        tasks.extend(packer.flush());
        tasks
    }

    fn shown(tasks: &[PackedTask]) -> Vec<(Vec<u64>, Value)> {
        let shown = |task: &PackedTask| {
            let numbers = task.rows.iter().map(|row| row.number).collect();
            (numbers, serde_json::from_slice(&task.body).unwrap())
        };
        tasks.iter().map(shown).collect()
    }

    const EMBED: &str = "/v1/embeddings";

    #[test]
    fn rows_share_a_task_if_they_differ_only_in_their_inputs_and_fit() {
        let lines = [
            (EMBED, json!({"input": "a", "model": "m"})),
            (EMBED, json!({"model": "m", "input": ["b", "c"]})),
            (EMBED, json!({"input": "d", "model": "m"})),
            (EMBED, json!({"input": "e", "model": "other"})),
            (EMBED, json!({"input": [1, 2]})),
            ("/v1/rerank", json!({"query": "q", "documents": ["f"]})),
            (EMBED, json!({"input": "g"})),
            (EMBED, json!({"input": "h"})),
            ("/classify", json!({"input": "i"})),
        ];
        let expected = [
            (vec![0, 1], json!({"input": ["a", "b", "c"], "model": "m"})),
            (vec![2], json!({"input": ["d"], "model": "m"})),
            (vec![3], json!({"input": ["e"], "model": "other"})),
            (vec![4], json!({"input": [1, 2]})),
            (vec![5], json!({"query": "q", "documents": ["f"]})),
            (vec![6, 7], json!({"input": ["g", "h"]})),
            (vec![8], json!({"input": ["i"]})),
        ];
        assert_eq!(shown(&packed(2, &lines)), expected);
        let long = "x".repeat(MAX_SHARED_BYTES / 2);
        let large: Vec<_> = (0..3).map(|_| (EMBED, json!({"input": long}))).collect();
        assert_eq!(packed(9, &large).len(), 3, "two of them are over the bytes of a task");
        let many: Vec<_> = (0..3).map(|_| (EMBED, json!({"input": ["a", "b"]}))).collect();
        assert_eq!(packed(9, &many).iter().map(|task| task.rows.len()).collect::<Vec<_>>(), [2, 1]);
        let alone = packed(1, &lines);
        assert_eq!(alone.len(), lines.len());
        for (task, (_, body)) in alone.iter().zip(&lines) {
            assert_eq!(task.body, body.to_string().into(), "byte for byte");
        }
    }

    #[test]
    fn each_row_gets_its_renumbered_part_and_the_first_row_the_usage() {
        let lines = [(EMBED, json!({"input": "a"})), (EMBED, json!({"input": ["b", "c"]}))];
        let [task] = &packed(9, &lines)[..] else { panic!() };
        let item = |index: usize| json!({"object": "embedding", "index": index, "embedding": [index, 0.5]});
        let body = json!({
            "object": "list", "model": "m", "data": [item(0), item(1), item(2)],
            "usage": {"prompt_tokens": 9, "total_tokens": 9},
        });
        let reply = |body: &Value| Message { body: body.to_string().into(), ..Message::default() };
        let lines = shared_lines(&task.rows, 200, &reply(&body)).unwrap();
        let lines: Vec<Value> = lines.iter().map(|line| serde_json::from_slice(line).unwrap()).collect();
        let body_of = |row: usize| &lines[row]["response"]["body"];
        assert_eq!(lines[1]["custom_id"], "1");
        assert_eq!(body_of(0)["data"], json!([item(0)]));
        let embedding =
            |index: usize, x: usize| json!({"object": "embedding", "index": index, "embedding": [x, 0.5]});
        assert_eq!(body_of(1)["data"], json!([embedding(0, 1), embedding(1, 2)]));
        assert_eq!(body_of(0)["usage"]["total_tokens"], 9);
        assert_eq!(body_of(1)["usage"], json!({"prompt_tokens": 0, "total_tokens": 0}));
        assert_ne!(lines[0]["id"], lines[1]["id"]);
        assert_eq!(
            shared_lines(&task.rows, 200, &reply(&json!({"data": [item(0)]}))),
            None,
            "of three inputs"
        );
        let mut sound = reply(&body);
        sound.properties.content_type = Some("audio/wav".into());
        assert_eq!(shared_lines(&task.rows, 200, &sound), None, "whatever its bytes look like");
        let line: Value = serde_json::from_slice(&line_of(&task.rows[0], 200, &sound)).unwrap();
        assert_eq!(line["response"]["body"]["content_type"], "audio/wav");
    }

    #[test]
    fn a_reply_that_is_a_list_is_divided_as_each_request_alone_is_answered() {
        let reply = |body: &Value| Message { body: body.to_string().into(), ..Message::default() };
        let bodies = |lines: &[(&str, Value)], items: &Value| -> Vec<Value> {
            let [task] = &packed(9, lines)[..] else { panic!("they share a task") };
            let lines = shared_lines(&task.rows, 200, &reply(items)).unwrap();
            let line = |line: &Vec<u8>| serde_json::from_slice::<Value>(line).unwrap();
            lines.iter().map(|it| line(it)["response"]["body"].clone()).collect()
        };
        let texts = [json!("a"), json!(["b"]), json!(["c", "d"])];
        let items = json!([[1], [], [2, 3], [4]]);
        let sparse = texts.each_ref().map(|text| ("/embed_sparse", json!({"inputs": text, "top_k": 2})));
        assert_eq!(bodies(&sparse, &items), [json!([[1]]), json!([[]]), json!([[2, 3], [4]])]);
        let labels = texts.each_ref().map(|text| ("/token-classification", json!({ "input": text })));
        assert_eq!(bodies(&labels, &items), [json!([1]), json!([[]]), json!([[2, 3], [4]])]);
        let both = ("/embed_sparse", json!({"input": "a", "inputs": "b"}));
        assert_eq!(packed(9, &[both.clone(), both]).len(), 2, "the pool refuses each");
    }

    #[test]
    fn a_split_task_sends_each_row_as_its_line_had_it() {
        let lines = [(EMBED, json!({"input": "a"})), (EMBED, json!({"input": ["b"]}))];
        let task = packed(9, &lines).remove(0);
        let split = task.split();
        assert_eq!(shown(&split), [(vec![0], json!({"input": "a"})), (vec![1], json!({"input": ["b"]}))]);
    }

    #[test]
    fn a_row_without_a_reply_gets_a_line_that_says_why() {
        let share = ReplyShare { inputs: 1, is_unwrapped: false };
        let row = Row { number: 4, custom_id: "x".into(), line: 7, share, body: None };
        let line: Value =
            serde_json::from_slice(&failed_line(&row, "no_reply", "it was published 3 times".into()))
                .unwrap();
        assert_eq!((&line["custom_id"], &line["error"]["code"]), (&"x".into(), &"no_reply".into()));
        assert_eq!(line["error"]["message"], "line 7: it was published 3 times");
    }
}
