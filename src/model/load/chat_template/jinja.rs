//! The dialect of Jinja in which chat templates are written: that of the transformers library, with the methods and
//! filters of Python and Jinja2 that `minijinja` lacks. What is still missing is an error that names it.

use std::borrow::Cow;
use std::fmt::Write;

use jiff::Zoned;
use minijinja::formatting::{FormatStyle, format as formatted};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Rest, Tuple, ValueKind, ValueOrKwargs, from_args};
use minijinja::{Environment, Error, ErrorKind, State, Value, filters};
use minijinja_contrib::pycompat;

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
    environment.add_filter("tojson", tojson);
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

/// Calls a method of Python's strings, lists or dictionaries.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    let result = match value.as_str() {
        Some(text) => string_method(text, name, args)?,
        None => collection_method(value, name, args)?,
    };
    match result {
        Some(result) => Ok(result),
        None => pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// The methods of strings that `minijinja_contrib` lacks or has otherwise. None for any other method.
fn string_method(text: &str, name: &str, args: &[Value]) -> Result<Option<Value>, Error> {
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
            let maxsplit = arguments.take("maxsplit")?.map(i64::try_from).transpose()?;
            // A negative number of splits means all, as None does.
            let max = maxsplit.and_then(|max| usize::try_from(max).ok());
            arguments.end()?;
            let separator = separator.as_deref().map(nonempty).transpose()?;
            match (separator, max) {
                (Some(separator), Some(max)) if name == "rsplit" => {
                    let mut parts: Vec<&str> = text.rsplitn(max.saturating_add(1), separator).collect();
                    parts.reverse();
                    Ok(Some(parts.into_iter().collect::<Value>()))
                }
                (None, Some(_)) if name == "rsplit" => {
                    Err(invalid("rsplit with maxsplit is supported with a separator only"))
                }
                (separator, _) => {
                    filters::split(&Value::from(text), separator.map(Into::into), maxsplit).map(Some)
                }
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
