//! The dialect of Jinja in which chat templates are written: that of the transformers library, with the methods and
//! filters of Python and Jinja2 that `minijinja` lacks. What is still missing is an error that names it.

use std::borrow::Cow;
use std::fmt::Write;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use jiff::Zoned;
use minijinja::formatting::{FormatStyle, format as formatted};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Object, Rest, Tuple, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value};
use minijinja_contrib::{globals, pycompat};

/// The largest number of instructions that a template may execute for one conversation.
const FUEL: u64 = 2_000_000;
/// How many bytes that a method creates cost one instruction, as in `minijinja`.
const BYTES_PER_FUEL: usize = 64;
/// The deepest lists and objects that `tojson` writes.
const MAX_JSON_DEPTH: usize = 64;

/// An environment with the settings, filters and functions of the transformers library.
pub fn environment() -> Result<Environment<'static>, Error> {
    let mut environment = Environment::new();
    environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
    environment.set_fuel(Some(FUEL));
    environment.set_unknown_method_callback(method);
    environment
        .add_function("raise_exception", |message: String| -> Result<Value, Error> { Err(invalid(message)) });
    environment.add_function("joiner", globals::joiner);
    environment.add_function("cycler", |items: Rest<Value>| match items.0 {
        items if items.is_empty() => Err(invalid("cycler has no items")),
        items => Ok(Value::from_object(Cycler { items, position: AtomicUsize::new(0) })),
    });
    environment.add_filter("tojson", tojson);
    environment.add_filter("truncate", truncate);
    environment.add_filter("wordcount", wordcount);
    environment.add_filter("center", |state: &State, text: &str, width: Option<usize>| {
        padded(state, text, width.unwrap_or(80), " ", Side::Both)
    });
    // In `minijinja` None is iterable, and templates ask `tools is iterable and tools | length > 0`.
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    // In Jinja2 whatever has a length and items is a sequence.
    environment
        .add_test("sequence", |value: &Value| value.len().is_some() && value.kind() != ValueKind::Undefined);
    Ok(environment)
}

/// The template as `minijinja` needs it to render what Jinja2 renders. Line breaks are made the same. `{% generation %}`
/// blocks, which mark the model's own texts in training data, become blocks that do nothing. A line break behind
/// `{% raw %}` is doubled, because `minijinja` drops one there.
pub fn adapted(template: &str) -> String {
    let template = template.replace("\r\n", "\n").replace('\r', "\n");
    let (mut text, mut rest, mut is_raw) = (String::with_capacity(template.len()), &*template, false);
    while let Some(start) = rest.find('{') {
        let (before, tag) = rest.split_at(start);
        text.push_str(before);
        let end = match tag.as_bytes().get(1) {
            Some(b'%') => end_of_tag(tag, "%}"),
            Some(b'{') if !is_raw => end_of_tag(tag, "}}"),
            Some(b'#') if !is_raw => tag.find("#}").map(|end| end + 2),
            _ => Some(1),
        };
        let (tag, after) = tag.split_at(end.unwrap_or(tag.len()));
        let name = tag.trim_start_matches(['{', '%', '-', '+']).trim_end_matches(['}', '%', '-', '+']).trim();
        match name {
            _ if !tag.starts_with("{%") => text.push_str(tag),
            "endraw" => {
                is_raw = false;
                text.push_str(tag);
            }
            _ if is_raw => text.push_str(tag),
            "raw" => {
                is_raw = true;
                text.push_str(tag);
                if after.starts_with('\n') && !tag.ends_with("-%}") {
                    text.push('\n');
                }
            }
            "generation" => text.push_str(&tag.replacen(name, "with", 1)),
            "endgeneration" => text.push_str(&tag.replacen(name, "endwith", 1)),
            _ => text.push_str(tag),
        }
        rest = after;
    }
    text.push_str(rest);
    text
}

/// The first string in a template that Python's operator `%` would format. `minijinja` refuses that only when it is
/// rendered. Does not find texts in variables.
pub fn percent_formatted(template: &str) -> Option<&str> {
    let mut rest = template;
    while let Some(start) = rest.find('{') {
        let tag = &rest[start..];
        let end = match tag.as_bytes().get(1) {
            Some(b'%') => end_of_tag(tag, "%}"),
            Some(b'{') => end_of_tag(tag, "}}"),
            Some(b'#') => {
                rest = &tag[tag.find("#}").unwrap_or(tag.len())..];
                continue;
            }
            _ => {
                rest = &tag[1..];
                continue;
            }
        };
        let (tag, after) = tag.split_at(end.unwrap_or(tag.len()));
        let formatted = strings(tag).find(|string| {
            let after = tag[string.end..].trim_start();
            after.starts_with('%') && !after.starts_with("%}")
        });
        if let Some(string) = formatted {
            return Some(&tag[string]);
        }
        rest = after;
    }
    None
}

/// Where the strings of a tag are, with their quotes.
fn strings(tag: &str) -> impl Iterator<Item = Range<usize>> {
    let (mut open, mut is_escaped) = (None, false);
    tag.bytes().enumerate().filter_map(move |(at, byte)| {
        match open {
            Some(_) if is_escaped => is_escaped = false,
            Some(_) if byte == b'\\' => is_escaped = true,
            Some((quote, start)) if byte == quote => {
                open = None;
                return Some(start..at + 1);
            }
            None if byte == b'"' || byte == b'\'' => open = Some((byte, at)),
            _ => {}
        }
        None
    })
}

/// The length of a tag, whose strings may contain what ends it.
fn end_of_tag(tag: &str, end: &str) -> Option<usize> {
    let (mut quote, mut is_escaped) = (None, false);
    for (at, byte) in tag.bytes().enumerate().skip(2) {
        match quote {
            Some(_) if is_escaped => is_escaped = false,
            Some(_) if byte == b'\\' => is_escaped = true,
            Some(open) if byte == open => quote = None,
            Some(_) => {}
            None if byte == b'"' || byte == b'\'' => quote = Some(byte),
            None if tag.as_bytes()[at..].starts_with(end.as_bytes()) => return Some(at + end.len()),
            None => {}
        }
    }
    None
}

/// The function `strftime_now` of templates: formats `now` as Python's `strftime` does.
pub fn strftime(now: &Zoned) -> Value {
    let now = now.clone();
    Value::from_function(move |format: &str| {
        jiff::fmt::strtime::format(format, &now)
            .map_err(|error| invalid(format!("strftime_now({format:?}): {error}")))
    })
}

fn invalid(message: impl Into<Cow<'static, str>>) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

/// Pays for the bytes of a text before it is made.
fn pay(state: &State, bytes: usize) -> Result<(), Error> {
    state.consume_fuel((bytes / BYTES_PER_FUEL) as u64)
}

/// The arguments of a filter or method, each of which Python takes by its position or its name.
struct Arguments<'a> {
    positional: &'a [Value],
    named: Kwargs,
}

impl<'a> Arguments<'a> {
    fn new(args: &'a [Value]) -> Result<Self, Error> {
        let positional = args.iter().take_while(|argument| !argument.is_kwargs()).count();
        let (positional, named) = args.split_at(positional);
        Ok(Self { positional, named: from_args::<(Kwargs,)>(named)?.0 })
    }

    /// The next argument. None if it is not given or Python's None.
    fn take(&mut self, name: &str) -> Result<Option<Value>, Error> {
        let value = match self.positional.split_first() {
            Some((first, rest)) => {
                self.positional = rest;
                Some(first.clone())
            }
            None => self.named.get::<Option<Value>>(name)?,
        };
        Ok(value.filter(|value| !value.is_none()))
    }

    /// As [`take`](Self::take), for a value of one type.
    fn typed<T: TryFrom<Value, Error = Error>>(&mut self, name: &str) -> Result<Option<T>, Error> {
        self.take(name)?.map(T::try_from).transpose()
    }

    /// As [`take`](Self::take), for a string.
    fn text(&mut self, name: &str) -> Result<Option<String>, Error> {
        self.take(name)?
            .map(|value| {
                let text = value.as_str().map(str::to_owned);
                text.ok_or_else(|| invalid(format!("{name} must be a string, not {value:?}")))
            })
            .transpose()
    }

    fn end(self) -> Result<(), Error> {
        match self.positional {
            [] => self.named.assert_all_used(),
            [first, ..] => Err(invalid(format!("one argument too many: {first:?}"))),
        }
    }
}

/// Jinja2's `cycler`. That of `minijinja_contrib` has another `current`.
#[derive(Debug)]
struct Cycler {
    items: Vec<Value>,
    position: AtomicUsize,
}

impl Cycler {
    fn current(&self) -> Value {
        self.items[self.position.load(Ordering::Relaxed) % self.items.len()].clone()
    }
}

impl Object for Cycler {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        (key.as_str() == Some("current")).then(|| self.current())
    }

    fn call_method(self: &Arc<Self>, _: &mut State, method: &str, args: &[Value]) -> Result<Value, Error> {
        let () = from_args(args)?;
        let current = self.current();
        match method {
            "next" => _ = self.position.fetch_add(1, Ordering::Relaxed),
            "reset" => self.position.store(0, Ordering::Relaxed),
            _ => return Err(Error::from(ErrorKind::UnknownMethod)),
        }
        Ok(current)
    }
}

/// Calls a method of Python's strings, lists or dictionaries.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let result = match value.as_str() {
        Some(text) => string_method(state, text, name, args)?,
        None => collection_method(value, name, args)?,
    };
    match result {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// The methods of strings that `minijinja_contrib` lacks or has otherwise. None for any other method.
fn string_method(state: &State, text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    let tuple = |parts: [&str; 3]| Ok(Some(Value::from(Tuple::from(parts.map(Value::from)))));
    match name {
        "removeprefix" => {
            let (prefix,): (&str,) = from_args(args)?;
            Ok(Some(text.strip_prefix(prefix).unwrap_or(text).into()))
        }
        "removesuffix" => {
            let (suffix,): (&str,) = from_args(args)?;
            Ok(Some(text.strip_suffix(suffix).unwrap_or(text).into()))
        }
        "partition" => {
            let (separator,): (&str,) = from_args(args)?;
            let found = text.split_once(nonempty(separator)?);
            tuple(found.map_or([text, "", ""], |(before, after)| [before, separator, after]))
        }
        "rpartition" => {
            let (separator,): (&str,) = from_args(args)?;
            let found = text.rsplit_once(nonempty(separator)?);
            tuple(found.map_or(["", "", text], |(before, after)| [before, separator, after]))
        }
        "split" | "rsplit" => {
            let mut arguments = Arguments::new(args)?;
            let separator = arguments.text("sep")?;
            let max = arguments.typed::<i64>("maxsplit")?.and_then(|max| usize::try_from(max).ok());
            arguments.end()?;
            let separator = separator.as_deref().map(nonempty).transpose()?;
            // One part more than splits. None and a negative number of splits mean all.
            let parts = max.map_or(usize::MAX, |max| max.saturating_add(1));
            let parts = match (separator, name) {
                (Some(separator), "split") => text.splitn(parts, separator).collect(),
                (Some(separator), _) => reversed(text.rsplitn(parts, separator).collect()),
                (None, "split") => words(text, parts),
                (None, _) => reversed(words_from_right(text, parts)),
            };
            Ok(Some(parts.into_iter().collect::<Value>()))
        }
        "ljust" | "rjust" | "center" | "zfill" => {
            let (width, fill): (usize, Option<&str>) = from_args(args)?;
            let fill = fill.unwrap_or(if name == "zfill" { "0" } else { " " });
            let side = match name {
                "ljust" => Side::Right,
                "center" => Side::Both,
                _ => Side::Left,
            };
            match text.strip_prefix(['-', '+']).filter(|_| name == "zfill") {
                Some(digits) => {
                    let digits = padded(state, digits, width.saturating_sub(1), fill, side)?;
                    Ok(Some(format!("{}{digits}", &text[..1]).into()))
                }
                None => Ok(Some(padded(state, text, width, fill, side)?.into())),
            }
        }
        "index" | "rindex" => {
            let (what,): (&str,) = from_args(args)?;
            let at = if name == "index" { text.find(what) } else { text.rfind(what) };
            let at = at.ok_or_else(|| invalid(format!("{name}: {what:?} is not in the string")))?;
            Ok(Some(text[..at].chars().count().into()))
        }
        _ => Ok(None),
    }
}

/// The methods of lists and dictionaries that `minijinja_contrib` lacks. None for any other method.
fn collection_method(value: &Value, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
    match (value.kind(), name) {
        (ValueKind::Seq, "index") => {
            let (what,): (&Value,) = from_args(args)?;
            let at = value.try_iter()?.position(|item| item == *what);
            Ok(Some(at.ok_or_else(|| invalid(format!("index: {what:?} is not in the list")))?.into()))
        }
        (ValueKind::Seq | ValueKind::Map, "copy") => Ok(Some(value.clone())),
        (
            ValueKind::Seq,
            "append" | "insert" | "extend" | "pop" | "remove" | "clear" | "sort" | "reverse",
        )
        | (ValueKind::Map, "update" | "pop" | "popitem" | "setdefault" | "clear") => {
            Err(invalid(format!("a template may not change a value in place ({name})")))
        }
        _ => Ok(None),
    }
}

fn nonempty(separator: &str) -> Result<&str, Error> {
    if separator.is_empty() { Err(invalid("the separator is empty")) } else { Ok(separator) }
}

fn reversed(mut parts: Vec<&str>) -> Vec<&str> {
    parts.reverse();
    parts
}

/// At most so many parts of a text, separated by white space.
fn words(text: &str, parts: usize) -> Vec<&str> {
    let (mut rest, mut words) = (text.trim_start(), Vec::new());
    while !rest.is_empty() {
        let word = match rest.split_once(char::is_whitespace).filter(|_| words.len() + 1 < parts) {
            Some((word, after)) => {
                rest = after.trim_start();
                word
            }
            None => std::mem::take(&mut rest),
        };
        words.push(word);
    }
    words
}

/// As [`words`], counted from the end of the text, the last part first.
fn words_from_right(text: &str, parts: usize) -> Vec<&str> {
    let (mut rest, mut words) = (text.trim_end(), Vec::new());
    while !rest.is_empty() {
        let word = match rest.rfind(char::is_whitespace).filter(|_| words.len() + 1 < parts) {
            Some(space) => {
                let (before, after) = rest.split_at(space);
                rest = before.trim_end();
                after.trim_start()
            }
            None => std::mem::take(&mut rest),
        };
        words.push(word);
    }
    words
}

enum Side {
    Left,
    Right,
    Both,
}

/// A text made as wide as `width` characters by `fill` at the left, the right or both sides.
fn padded(state: &State, text: &str, width: usize, fill: &str, side: Side) -> Result<String, Error> {
    let missing = width.saturating_sub(text.chars().count());
    let (left, right) = match side {
        Side::Left => (missing, 0),
        Side::Right => (0, missing),
        // As in Python, where the rounding depends on both widths.
        Side::Both => {
            let left = missing / 2 + (missing & width & 1);
            (left, missing - left)
        }
    };
    pay(state, missing.saturating_mul(fill.len()))?;
    Ok(format!("{}{text}{}", fill.repeat(left), fill.repeat(right)))
}

/// Shortens a text to `length` characters, if it is longer by more than `leeway`.
fn truncate(text: &str, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = args.into_values();
    let mut arguments = Arguments::new(&args)?;
    let length = arguments.typed::<usize>("length")?.unwrap_or(255);
    let kill_words = arguments.typed::<bool>("killwords")?.unwrap_or(false);
    let end = arguments.text("end")?.unwrap_or_else(|| "...".to_owned());
    let leeway = arguments.typed::<usize>("leeway")?.unwrap_or(5);
    arguments.end()?;
    if text.chars().count() <= length.saturating_add(leeway) {
        return Ok(text.to_owned());
    }
    let kept = length.checked_sub(end.chars().count());
    let kept =
        kept.ok_or_else(|| invalid(format!("truncate: {length} characters have no room for {end:?}")))?;
    let kept: String = text.chars().take(kept).collect();
    let kept = match kept.rsplit_once(' ') {
        Some((words, _)) if !kill_words => words,
        _ => &kept,
    };
    Ok(format!("{kept}{end}"))
}

/// The number of words, which are runs of letters, digits and underscores.
fn wordcount(text: &str) -> usize {
    let is_between = |letter: char| !letter.is_alphanumeric() && letter != '_';
    text.split(is_between).filter(|word| !word.is_empty()).count()
}

/// Writes a value as JSON as the transformers library does: with Python's `json.dumps`, and without the escapes of
/// HTML that Jinja2 adds.
fn tojson(state: &State, value: &Value, args: Rest<ValueOrKwargs>) -> Result<String, Error> {
    let args = args.into_values();
    let mut arguments = Arguments::new(&args)?;
    let ascii = arguments.take("ensure_ascii")?.is_some_and(|ascii| ascii.is_true());
    let indent = match arguments.take("indent")? {
        Some(indent) if indent.as_str().is_some() => Some(indent.to_string()),
        Some(indent) => {
            let width = usize::try_from(i64::try_from(indent)?).unwrap_or(0);
            pay(state, width)?;
            Some(" ".repeat(width))
        }
        None => None,
    };
    let separators = match arguments.take("separators")? {
        Some(pair) => {
            let pair: Vec<String> = pair.try_iter()?.map(|item| item.to_string()).collect();
            <[String; 2]>::try_from(pair).map_err(|_| invalid("tojson: separators are two strings"))?
        }
        None if indent.is_some() => [",".to_owned(), ": ".to_owned()],
        None => [", ".to_owned(), ": ".to_owned()],
    };
    let sorted = arguments.take("sort_keys")?.is_some_and(|sort| sort.is_true());
    arguments.end()?;
    let mut json = Json { state, ascii, sorted, indent, separators, text: String::new() };
    json.write(value, 0)?;
    Ok(json.text)
}

struct Json<'a> {
    state: &'a State<'a, 'a>,
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    /// Between items, and between a key and its value.
    separators: [String; 2],
    text: String,
}

impl Json<'_> {
    fn write(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_JSON_DEPTH {
            return Err(invalid(format!("tojson: a value is nested deeper than {MAX_JSON_DEPTH} levels")));
        }
        let before = self.text.len();
        match value.kind() {
            ValueKind::None => self.text.push_str("null"),
            ValueKind::Bool => self.text.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value)?,
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.items('[', &items, depth, |json, item| json.write(item, depth + 1))?;
                self.text.push(']');
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sorted {
                    keys.sort();
                }
                self.items('{', &keys, depth, |json, key| {
                    json.key(key)?;
                    json.text.push_str(&json.separators[1].clone());
                    json.write(&value.get_item(key)?, depth + 1)
                })?;
                self.text.push('}');
            }
            kind => return Err(invalid(format!("tojson: {kind} cannot be written as JSON"))),
        }
        pay(self.state, self.text.len() - before)
    }

    /// Writes the items of a list or object, and what opens it.
    fn items(
        &mut self,
        open: char,
        items: &[Value],
        depth: usize,
        mut write: impl FnMut(&mut Self, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.text.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                self.text.push_str(&self.separators[0].clone());
            }
            self.line(depth + 1);
            write(self, item)?;
        }
        if !items.is_empty() {
            self.line(depth);
        }
        Ok(())
    }

    /// Begins a line, if the value is written over several.
    fn line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.text.push('\n');
            self.text.extend(std::iter::repeat_n(indent.as_str(), depth));
        }
    }

    fn number(&mut self, value: &Value) -> Result<(), Error> {
        match value.to_string().as_str() {
            "nan" => self.text.push_str("NaN"),
            "inf" => self.text.push_str("Infinity"),
            "-inf" => self.text.push_str("-Infinity"),
            number if value.is_integer() => self.text.push_str(number),
            // In Python's notation, which for large and small numbers is not that of Display.
            _ => self.text.push_str(&formatted(FormatStyle::Printf, "%s", std::slice::from_ref(value))?),
        }
        Ok(())
    }

    fn key(&mut self, key: &Value) -> Result<(), Error> {
        let text = match key.kind() {
            ValueKind::String => key.as_str().unwrap_or_default().to_owned(),
            ValueKind::None => "null".to_owned(),
            ValueKind::Bool => key.is_true().to_string(),
            ValueKind::Number => key.to_string(),
            kind => return Err(invalid(format!("tojson: {kind} cannot be a key"))),
        };
        self.string(&text);
        Ok(())
    }

    fn string(&mut self, text: &str) {
        self.text.push('"');
        for letter in text.chars() {
            match letter {
                '"' => self.text.push_str("\\\""),
                '\\' => self.text.push_str("\\\\"),
                '\n' => self.text.push_str("\\n"),
                '\r' => self.text.push_str("\\r"),
                '\t' => self.text.push_str("\\t"),
                '\u{8}' => self.text.push_str("\\b"),
                '\u{c}' => self.text.push_str("\\f"),
                letter if letter < ' ' || (self.ascii && letter > '~') => {
                    for unit in letter.encode_utf16(&mut [0; 2]) {
                        let _ = write!(self.text, "\\u{unit:04x}");
                    }
                }
                letter => self.text.push(letter),
            }
        }
        self.text.push('"');
    }
}
