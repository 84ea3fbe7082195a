//! The tensors that a pickle of `torch.save` describes. Decides which opcodes and which globals are read: those that a
//! dictionary of tensors needs. Executes nothing and does not recurse: the values of the pickle are kept in lists of
//! bounded length, and refer to each other by their indices. Does not read the numbers of tensors.

use std::collections::BTreeMap;

use safetensors::Dtype;

use super::shown::shown;

/// The most bytes of a pickle: 256 for each tensor.
pub(super) const MAX_BYTES: usize = MAX_TENSORS << 8;
/// The most tensors of a file. Models with more are published in several files.
const MAX_TENSORS: usize = 1 << 14;
/// The most values that are kept at once in tuples, dictionaries and the memo: 64 for each tensor. Files of PyTorch
/// have about 30 for each.
const MAX_VALUES: usize = MAX_TENSORS << 6;
/// The most values on the stack. `pickle` writes a dictionary in parts of 1,000 keys and values.
const MAX_STACK: usize = 1 << 12;
/// The most tuples and parts of dictionaries that are open at once, one in the other. Files of PyTorch have three.
const MAX_OPEN: usize = 16;
/// The most dimensions of a tensor.
const MAX_DIMENSIONS: usize = 8;

/// The error for a value that is taken from an empty stack.
const EMPTY: &str = "a value is missing";
/// The error for more than [`MAX_TENSORS`] tensors.
const TOO_MANY: &str = "it has more than 16,384 tensors";

type Parsed<T> = Result<T, String>;

/// The opcodes that are read, by their names in Python's `pickletools`.
mod opcode {
    pub(super) const BINGET: u8 = b'h';
    pub(super) const BININT: u8 = b'J';
    pub(super) const BININT1: u8 = b'K';
    pub(super) const BININT2: u8 = b'M';
    pub(super) const BINPERSID: u8 = b'Q';
    pub(super) const BINPUT: u8 = b'q';
    pub(super) const BINUNICODE: u8 = b'X';
    pub(super) const BUILD: u8 = b'b';
    pub(super) const EMPTY_DICT: u8 = b'}';
    pub(super) const EMPTY_TUPLE: u8 = b')';
    pub(super) const GLOBAL: u8 = b'c';
    pub(super) const LONG1: u8 = 0x8a;
    pub(super) const LONG_BINGET: u8 = b'j';
    pub(super) const LONG_BINPUT: u8 = b'r';
    pub(super) const MARK: u8 = b'(';
    pub(super) const NEWFALSE: u8 = 0x89;
    pub(super) const NEWTRUE: u8 = 0x88;
    pub(super) const NONE: u8 = b'N';
    pub(super) const PROTO: u8 = 0x80;
    pub(super) const REDUCE: u8 = b'R';
    pub(super) const SETITEM: u8 = b's';
    pub(super) const SETITEMS: u8 = b'u';
    pub(super) const STOP: u8 = b'.';
    pub(super) const TUPLE: u8 = b't';
    pub(super) const TUPLE1: u8 = 0x85;
    pub(super) const TUPLE3: u8 = 0x87;
}

/// A tensor as the pickle describes it. Its offset, shape and strides have not been compared with the storage.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Pickled<'a> {
    pub(super) storage: Storage<'a>,
    /// The index of the first number in the storage.
    pub(super) offset: usize,
    pub(super) shape: Vec<usize>,
    pub(super) strides: Vec<usize>,
}

/// A list of numbers, which is an entry of the archive.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Storage<'a> {
    /// The name of its entry.
    pub(super) key: &'a str,
    pub(super) dtype: Dtype,
    /// How many numbers it has.
    pub(super) count: usize,
}

/// The classes and functions that a pickle may name.
#[derive(Clone, Copy)]
enum Global {
    OrderedDict,
    RebuildTensor,
    RebuildParameter,
    Storage(Dtype),
}

/// A value on the stack or in another value. Tuples, dictionaries and tensors are indices in the lists of the
/// [`Reader`].
#[derive(Clone, Copy)]
enum Value<'a> {
    None,
    Bool,
    Int(i64),
    Text(&'a str),
    Global(Global),
    Tuple(usize),
    Dict(usize),
    Storage(Storage<'a>),
    Tensor(usize),
}

impl Value<'_> {
    fn kind(&self) -> &'static str {
        match self {
            Self::None => "None",
            Self::Bool => "a bool",
            Self::Int(_) => "a number",
            Self::Text(_) => "a text",
            Self::Global(_) => "a class",
            Self::Tuple(_) => "a tuple",
            Self::Dict(_) => "a dictionary",
            Self::Storage(_) => "a storage",
            Self::Tensor(_) => "a tensor",
        }
    }
}

/// Reads a pickle: the tensors of its dictionary by their names.
///
/// # Errors
/// What is wrong with the pickle, or what in it is refused, with its name.
pub(super) fn read(pickle: &[u8]) -> Parsed<BTreeMap<&str, Pickled<'_>>> {
    let mut reader = Reader { rest: pickle, ..Reader::default() };
    while reader.rest.first() != Some(&opcode::STOP) {
        let at = pickle.len() - reader.rest.len();
        reader.step().map_err(|reason| format!("its pickle, at byte {at}: {reason}"))?;
    }
    if reader.rest.len() > 1 {
        return Err(format!("its pickle has {} bytes after its end", reader.rest.len() - 1));
    }
    let ([Value::Dict(root)], []) = (&*reader.stack, &*reader.marks) else {
        return Err("its pickle is not a dictionary of tensors".to_owned());
    };
    // Several names may have the same tensor.
    if reader.dicts[*root].len() > MAX_TENSORS {
        return Err(TOO_MANY.to_owned());
    }
    let mut tensors = BTreeMap::new();
    for (name, value) in &reader.dicts[*root] {
        let Value::Text(name) = name else {
            return Err(format!("its dictionary has {} as a name", name.kind()));
        };
        let Value::Tensor(tensor) = value else {
            return Err(format!("{} is {}, not a tensor", shown(name), value.kind()));
        };
        if tensors.insert(*name, reader.tensors[*tensor].clone()).is_some() {
            return Err(format!("its dictionary has the name {} twice", shown(name)));
        }
    }
    Ok(tensors)
}

/// A pickle that is being read.
#[derive(Default)]
struct Reader<'a> {
    /// The opcodes that have not been read.
    rest: &'a [u8],
    stack: Vec<Value<'a>>,
    /// The heights of the stack at which open tuples and parts of dictionaries begin.
    marks: Vec<usize>,
    memo: Vec<Value<'a>>,
    tuples: Vec<Vec<Value<'a>>>,
    dicts: Vec<Vec<(Value<'a>, Value<'a>)>>,
    tensors: Vec<Pickled<'a>>,
    /// Values kept in these lists, [`MAX_VALUES`] at most.
    kept: usize,
}

impl<'a> Reader<'a> {
    /// Reads one opcode, and does what it means.
    fn step(&mut self) -> Parsed<()> {
        let code = self.number(1)? as u8;
        match code {
            opcode::PROTO => match self.number(1)? {
                2 => Ok(()),
                version => Err(format!("pickle protocol {version} is not read; torch.save writes 2")),
            },
            opcode::GLOBAL => {
                let (module, name) = (self.line()?, self.line()?);
                self.push(Value::Global(global(module, name)?))
            }
            opcode::MARK if self.marks.len() == MAX_OPEN => {
                Err(format!("more than {MAX_OPEN} values are open"))
            }
            opcode::MARK => {
                self.marks.push(self.stack.len());
                Ok(())
            }
            opcode::NONE => self.push(Value::None),
            opcode::NEWTRUE | opcode::NEWFALSE => self.push(Value::Bool),
            opcode::BININT1 => self.number(1).and_then(|number| self.push(Value::Int(number))),
            opcode::BININT2 => self.number(2).and_then(|number| self.push(Value::Int(number))),
            opcode::BININT => self.signed(4).and_then(|number| self.push(Value::Int(number))),
            opcode::LONG1 => {
                let bytes = self.number(1)?;
                let number = self.signed(bytes as usize)?;
                self.push(Value::Int(number))
            }
            opcode::BINUNICODE => {
                let bytes = self.number(4)?;
                let text = self.take(bytes as usize)?;
                self.push(Value::Text(str::from_utf8(text).map_err(|_| "a text is not UTF-8")?))
            }
            opcode::EMPTY_DICT => self.push_dict(),
            opcode::EMPTY_TUPLE => self.push_tuple(self.stack.len()),
            opcode::TUPLE1..=opcode::TUPLE3 => {
                self.last(code - opcode::TUPLE1 + 1).and_then(|start| self.push_tuple(start))
            }
            opcode::TUPLE => self.mark().and_then(|start| self.push_tuple(start)),
            opcode::SETITEM => self.last(2).and_then(|start| self.set_items(start)),
            opcode::SETITEMS => self.mark().and_then(|start| self.set_items(start)),
            opcode::BINPUT => self.number(1).and_then(|index| self.remember(index as usize)),
            opcode::LONG_BINPUT => self.number(4).and_then(|index| self.remember(index as usize)),
            opcode::BINGET => self.number(1).and_then(|index| self.recall(index as usize)),
            opcode::LONG_BINGET => self.number(4).and_then(|index| self.recall(index as usize)),
            opcode::BINPERSID => self.push_storage(),
            opcode::REDUCE => self.reduce(),
            // The attribute `_metadata` of the dictionary, which weights do not need.
            opcode::BUILD => match (self.pop()?, self.top()?) {
                (Value::Dict(_), Value::Dict(_)) => Ok(()),
                (state, object) => Err(format!("{} gets {} as its state", object.kind(), state.kind())),
            },
            other => Err(format!("the opcode {} is not read in weights", opcode_name(other))),
        }
    }

    fn take(&mut self, bytes: usize) -> Parsed<&'a [u8]> {
        let (taken, rest) = self.rest.split_at_checked(bytes).ok_or("it is cut off")?;
        self.rest = rest;
        Ok(taken)
    }

    /// A little-endian number without a sign.
    fn number(&mut self, bytes: usize) -> Parsed<i64> {
        let mut number = [0; 8];
        let taken = self.take(bytes)?;
        number.get_mut(..bytes).ok_or("a number has more than 8 bytes")?.copy_from_slice(taken);
        Ok(i64::from_le_bytes(number))
    }

    /// As [`number`](Self::number), in two's complement.
    fn signed(&mut self, bytes: usize) -> Parsed<i64> {
        let number = self.number(bytes)?;
        let unused = 64 - 8 * bytes.max(1);
        Ok(number << unused >> unused)
    }

    fn line(&mut self) -> Parsed<&'a str> {
        let end = self.rest.iter().position(|byte| *byte == b'\n').ok_or("it is cut off")?;
        let line = self.take(end + 1)?;
        str::from_utf8(&line[..end]).map_err(|_| "a name is not UTF-8".to_owned())
    }

    fn push(&mut self, value: Value<'a>) -> Parsed<()> {
        if self.stack.len() == MAX_STACK {
            return Err(format!("more than {MAX_STACK} values are on its stack"));
        }
        self.stack.push(value);
        Ok(())
    }

    fn push_dict(&mut self) -> Parsed<()> {
        self.keep(1)?;
        self.dicts.push(Vec::new());
        self.push(Value::Dict(self.dicts.len() - 1))
    }

    /// Moves the values from this height of the stack on into a tuple.
    fn push_tuple(&mut self, start: usize) -> Parsed<()> {
        self.keep(1 + self.stack.len() - start)?;
        self.tuples.push(self.stack.split_off(start));
        self.push(Value::Tuple(self.tuples.len() - 1))
    }

    /// Moves the keys and values from this height of the stack on into the dictionary below them.
    fn set_items(&mut self, start: usize) -> Parsed<()> {
        let count = self.stack.len() - start;
        self.keep(count)?;
        let items = self.stack.split_off(start);
        let (Value::Dict(dict), true) = (self.top()?, count.is_multiple_of(2)) else {
            return Err(format!("{} gets {count} keys and values", self.top()?.kind()));
        };
        self.dicts[dict].extend(items.as_chunks::<2>().0.iter().map(|[key, value]| (*key, *value)));
        Ok(())
    }

    /// The values above the last mark. Those below it cannot be taken.
    fn above_mark(&self) -> &[Value<'a>] {
        &self.stack[self.marks.last().copied().unwrap_or(0)..]
    }

    /// The height of the stack below its last `count` values.
    fn last(&self, count: u8) -> Parsed<usize> {
        let are_there = self.above_mark().len() >= count.into();
        are_there.then(|| self.stack.len() - usize::from(count)).ok_or_else(|| EMPTY.to_owned())
    }

    fn mark(&mut self) -> Parsed<usize> {
        self.marks.pop().ok_or_else(|| "no value is open".to_owned())
    }

    fn top(&self) -> Parsed<Value<'a>> {
        self.above_mark().last().copied().ok_or_else(|| EMPTY.to_owned())
    }

    fn pop(&mut self) -> Parsed<Value<'a>> {
        let top = self.top()?;
        self.stack.pop();
        Ok(top)
    }

    /// The index of a tuple.
    fn pop_tuple(&mut self) -> Parsed<usize> {
        match self.pop()? {
            Value::Tuple(index) => Ok(index),
            other => Err(format!("{} is where a tuple belongs", other.kind())),
        }
    }

    /// Counts values before they are kept.
    fn keep(&mut self, count: usize) -> Parsed<()> {
        self.kept += count;
        (self.kept <= MAX_VALUES).then_some(()).ok_or_else(|| format!("it has more than {MAX_VALUES} values"))
    }

    fn remember(&mut self, index: usize) -> Parsed<()> {
        if index != self.memo.len() {
            return Err(format!("its memo of {} values is written at {index}", self.memo.len()));
        }
        self.keep(1)?;
        self.memo.push(self.top()?);
        Ok(())
    }

    fn recall(&mut self, index: usize) -> Parsed<()> {
        let value = self.memo.get(index).copied();
        self.push(value.ok_or_else(|| format!("its memo of {} values is read at {index}", self.memo.len()))?)
    }

    fn push_storage(&mut self) -> Parsed<()> {
        let id = self.pop_tuple()?;
        // The fourth is the device on which the storage was.
        let &[
            Value::Text("storage"),
            Value::Global(Global::Storage(dtype)),
            Value::Text(key),
            Value::Text(_),
            Value::Int(count),
        ] = &*self.tuples[id]
        else {
            return Err("a persistent id is not that of a storage".to_owned());
        };
        self.push(Value::Storage(Storage { key, dtype, count: size(count)? }))
    }

    /// Does what the call of a global means.
    fn reduce(&mut self) -> Parsed<()> {
        let (arguments, callee) = (self.pop_tuple()?, self.pop()?);
        match (callee, &*self.tuples[arguments]) {
            (Value::Global(Global::OrderedDict), []) => self.push_dict(),
            (Value::Global(Global::OrderedDict), _) => Err("OrderedDict has arguments".to_owned()),
            // The last ones are requires_grad and backward hooks.
            (
                Value::Global(Global::RebuildTensor),
                &[
                    Value::Storage(storage),
                    Value::Int(offset),
                    Value::Tuple(shape),
                    Value::Tuple(strides),
                    Value::Bool,
                    Value::Dict(_),
                ],
            ) => {
                if self.tensors.len() == MAX_TENSORS {
                    return Err(TOO_MANY.to_owned());
                }
                let (shape, strides) = (self.sizes(shape)?, self.sizes(strides)?);
                self.tensors.push(Pickled { storage, offset: size(offset)?, shape, strides });
                self.push(Value::Tensor(self.tensors.len() - 1))
            }
            (
                Value::Global(Global::RebuildParameter),
                &[tensor @ Value::Tensor(_), Value::Bool, Value::Dict(_)],
            ) => self.push(tensor),
            (Value::Global(_), _) => {
                Err("a tensor is rebuilt from other values than torch.save writes".to_owned())
            }
            (other, _) => Err(format!("{} is called", other.kind())),
        }
    }

    fn sizes(&self, tuple: usize) -> Parsed<Vec<usize>> {
        let values = &self.tuples[tuple];
        if values.len() > MAX_DIMENSIONS {
            return Err(format!("a tensor has {} dimensions", values.len()));
        }
        let number = |value: &Value| match value {
            Value::Int(number) => size(*number),
            other => Err(format!("{} is where a size belongs", other.kind())),
        };
        values.iter().map(number).collect()
    }
}

fn size(number: i64) -> Parsed<usize> {
    usize::try_from(number).map_err(|_| format!("a size is {number}"))
}

fn global(module: &str, name: &str) -> Parsed<Global> {
    Ok(match (module, name) {
        ("collections", "OrderedDict") => Global::OrderedDict,
        ("torch._utils", "_rebuild_tensor_v2") => Global::RebuildTensor,
        ("torch._utils", "_rebuild_parameter") => Global::RebuildParameter,
        ("torch", "FloatStorage") => Global::Storage(Dtype::F32),
        ("torch", "HalfStorage") => Global::Storage(Dtype::F16),
        ("torch", "BFloat16Storage") => Global::Storage(Dtype::BF16),
        ("torch", "DoubleStorage") => Global::Storage(Dtype::F64),
        ("torch", "LongStorage") => Global::Storage(Dtype::I64),
        ("torch", "IntStorage") => Global::Storage(Dtype::I32),
        ("torch", "ShortStorage") => Global::Storage(Dtype::I16),
        ("torch", "CharStorage") => Global::Storage(Dtype::I8),
        ("torch", "ByteStorage") => Global::Storage(Dtype::U8),
        ("torch", "BoolStorage") => Global::Storage(Dtype::BOOL),
        _ => {
            let name = shown(&format!("{module}.{name}"));
            return Err(format!(
                "{name} is refused: tensors of floating-point or whole numbers do not need it"
            ));
        }
    })
}

/// The opcodes that are not read: their numbers in hexadecimal, and their names in Python's `pickletools`.
const OTHER_OPCODES: &str = "30:POP 31:POP_MARK 32:DUP 42:BINBYTES 43:SHORT_BINBYTES 46:FLOAT 47:BINFLOAT 49:INT 4c:LONG \
    50:PERSID 53:STRING 54:BINSTRING 55:SHORT_BINSTRING 56:UNICODE 5d:EMPTY_LIST 61:APPEND 64:DICT 65:APPENDS 67:GET \
    69:INST 6c:LIST 6f:OBJ 70:PUT 81:NEWOBJ 82:EXT1 83:EXT2 84:EXT4 8b:LONG4 8c:SHORT_BINUNICODE 8d:BINUNICODE8 \
    8e:BINBYTES8 8f:EMPTY_SET 90:ADDITEMS 91:FROZENSET 92:NEWOBJ_EX 93:STACK_GLOBAL 94:MEMOIZE 95:FRAME \
    96:BYTEARRAY8 97:NEXT_BUFFER 98:READONLY_BUFFER";

/// The name of an opcode that is not read.
fn opcode_name(opcode: u8) -> String {
    let number = format!("{opcode:02x}:");
    let name = OTHER_OPCODES.split(' ').find_map(|name| name.strip_prefix(&*number));
    name.map_or_else(|| format!("{opcode:#04x}"), str::to_owned)
}
