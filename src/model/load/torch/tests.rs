//! Archives and pickles, good and hostile, byte by byte. Those that PyTorch itself wrote are in `tests/fixtures`.

use proptest::prelude::*;
use safetensors::Dtype;

use super::*;

/// An archive with these entries, each aligned to 64 bytes as PyTorch does it. With `is_wide`, the directory has its
/// numbers in fields of 64 bits.
fn zip(entries: &[(&str, &[u8])], is_wide: bool) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in entries {
        let (header, size) = (file.len() as u64, data.len() as u64);
        let before_padding = file.len() + 30 + name.len();
        let padding = before_padding.next_multiple_of(64) - before_padding;
        let short = |number: usize| (number as u16).to_le_bytes();
        let narrow = |number: u64| if is_wide { [0xff; 4] } else { (number as u32).to_le_bytes() };
        file.extend(b"PK\x03\x04\0\0\x08\x08\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        file.extend([short(name.len()), short(padding)].concat());
        file.extend([name.as_bytes(), &vec![0; padding], data].concat());
        let wide = [b"\x01\0\x18\0", &[size, size, header].map(u64::to_le_bytes).concat()[..]].concat();
        let extra = if is_wide { &wide[..] } else { &[] };
        directory.extend(b"PK\x01\x02\0\0\0\0\x08\x08\0\0\0\0\0\0\0\0\0\0");
        directory.extend([narrow(size), narrow(size)].concat());
        directory.extend([short(name.len()), short(extra.len())].concat());
        directory.extend([0; 10]);
        directory.extend(narrow(header));
        directory.extend([name.as_bytes(), extra].concat());
    }
    let (start, size, count) = (file.len() as u64, directory.len() as u64, entries.len() as u64);
    file.extend(directory);
    if is_wide {
        file.extend(b"PK\x06\x06\x2c\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0");
        file.extend([count, count, size, start].map(u64::to_le_bytes).concat());
        file.extend([b"PK\x06\x07\0\0\0\0", &(start + size).to_le_bytes()[..], b"\x01\0\0\0"].concat());
    }
    file.extend(b"PK\x05\x06\0\0\0\0");
    file.extend([(count as u16).to_le_bytes(); 2].concat());
    file.extend([(size as u32).to_le_bytes(), (start as u32).to_le_bytes()].concat());
    file.extend([0; 2]);
    file
}

/// A tensor as a test describes it.
#[derive(Clone, Debug)]
struct Described {
    name: String,
    class: &'static str,
    key: String,
    stored: u64,
    offset: u64,
    shape: Vec<u64>,
    strides: Vec<u64>,
    is_parameter: bool,
}

impl Described {
    /// Numbers in a storage of their own, in the order of the shape.
    fn new(name: &str, class: &'static str, shape: &[u64]) -> Self {
        let mut strides = vec![1; shape.len()];
        for dimension in (1..shape.len()).rev() {
            strides[dimension - 1] = strides[dimension] * shape[dimension];
        }
        let (name, key, shape) = (name.to_owned(), "0".to_owned(), shape.to_vec());
        let stored = shape.iter().product();
        Self { name, class, key, stored, offset: 0, shape, strides, is_parameter: false }
    }

    fn pickled(&self) -> Vec<u8> {
        let storage = tuple(&[
            text("storage"),
            global("torch", self.class),
            text(&self.key),
            text("cpu"),
            number(self.stored),
        ]);
        let sizes = |sizes: &[u64]| tuple(&sizes.iter().map(|size| number(*size)).collect::<Vec<_>>());
        let storage = [storage, b"Q".to_vec()].concat();
        let hooks = [global("collections", "OrderedDict"), b")R".to_vec()].concat();
        let arguments = [
            storage,
            number(self.offset),
            sizes(&self.shape),
            sizes(&self.strides),
            b"\x89".to_vec(),
            hooks.clone(),
        ];
        let tensor =
            [global("torch._utils", "_rebuild_tensor_v2"), tuple(&arguments), b"R".to_vec()].concat();
        if !self.is_parameter {
            return tensor;
        }
        let arguments = [tensor, b"\x88".to_vec(), hooks];
        [global("torch._utils", "_rebuild_parameter"), tuple(&arguments), b"R".to_vec()].concat()
    }
}

fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

fn global(module: &str, name: &str) -> Vec<u8> {
    format!("c{module}\n{name}\n").into_bytes()
}

/// The shortest opcode for a number, as `pickle` chooses it.
fn number(number: u64) -> Vec<u8> {
    match number {
        0..=0xff => vec![b'K', number as u8],
        0x100..=0xffff => [b"M", &(number as u16).to_le_bytes()[..]].concat(),
        0x1_0000..=0x7fff_ffff => [b"J", &(number as u32).to_le_bytes()[..]].concat(),
        _ => [b"\x8a\x08", &number.to_le_bytes()[..]].concat(),
    }
}

fn tuple(values: &[Vec<u8>]) -> Vec<u8> {
    [b"(", &values.concat()[..], b"t"].concat()
}

fn pickle_of(tensors: &[Described]) -> Vec<u8> {
    let items: Vec<u8> = tensors.iter().flat_map(|it| [text(&it.name), it.pickled()].concat()).collect();
    [b"\x80\x02}(", &items[..], b"u."].concat()
}

/// The file of a pickle and storages.
fn file_of(pickle: &[u8], storages: &[(&str, &[u8])]) -> Vec<u8> {
    let names: Vec<String> = storages.iter().map(|(key, _)| format!("m/data/{key}")).collect();
    let data = names.iter().zip(storages).map(|(name, (_, data))| (&**name, *data));
    let entries = [("m/data.pkl", pickle), ("m/byteorder", b"little".as_slice())];
    zip(&entries.into_iter().chain(data).collect::<Vec<_>>(), false)
}

fn error(file: &[u8]) -> String {
    match tensors(file) {
        Ok(tensors) => panic!("read: {tensors:?}"),
        Err(error) => error,
    }
}

/// The error for a pickle beside a storage of six f32 numbers.
fn pickle_error(pickle: &[u8]) -> String {
    error(&file_of(pickle, &[("0", &[0; 24])]))
}

fn tensor_error(change: impl Fn(&mut Described)) -> String {
    let mut tensor = Described::new("a.weight", "FloatStorage", &[2, 3]);
    change(&mut tensor);
    pickle_error(&pickle_of(&[tensor]))
}

#[test]
fn the_numbers_of_a_tensor_are_where_its_storage_and_offset_say() {
    let data: Vec<u8> = (0..24).collect();
    let whole = Described::new("a", "FloatStorage", &[2, 3]);
    let part = Described { name: "b".into(), offset: 2, shape: vec![3], strides: vec![1], ..whole.clone() };
    let tied = Described { name: "c".into(), is_parameter: true, ..whole.clone() };
    let scalar = Described { name: "d".into(), offset: 5, shape: vec![], strides: vec![], ..whole.clone() };
    // The stride of a dimension of length 1 means nothing.
    let column = Described { name: "e".into(), shape: vec![6, 1], strides: vec![1, 77], ..whole.clone() };
    let file = file_of(&pickle_of(&[whole, part, tied, scalar, column]), &[("0", &data)]);
    let tensors = tensors(&file).unwrap();
    let bytes = |name: &str| &file[tensors[name].data_offsets.0..tensors[name].data_offsets.1];
    assert_eq!(tensors.len(), 5);
    assert_eq!((&*tensors["a"].shape, tensors["a"].dtype), (&[2, 3][..], Dtype::F32));
    assert_eq!(tensors["a"].data_offsets.0 % 64, 0);
    assert_eq!([bytes("a"), bytes("c"), bytes("e")], [&data[..]; 3]);
    assert_eq!((bytes("b"), bytes("d")), (&data[8..20], &data[20..]));
}

#[test]
fn every_type_of_numbers_is_read_and_others_are_refused_by_name() {
    let classes = [
        ("FloatStorage", Dtype::F32, 4),
        ("HalfStorage", Dtype::F16, 2),
        ("BFloat16Storage", Dtype::BF16, 2),
        ("DoubleStorage", Dtype::F64, 8),
        ("LongStorage", Dtype::I64, 8),
        ("IntStorage", Dtype::I32, 4),
        ("ShortStorage", Dtype::I16, 2),
        ("CharStorage", Dtype::I8, 1),
        ("ByteStorage", Dtype::U8, 1),
        ("BoolStorage", Dtype::BOOL, 1),
    ];
    for (class, dtype, bytes) in classes {
        let file = file_of(&pickle_of(&[Described::new("a", class, &[3])]), &[("0", &vec![0; 3 * bytes])]);
        assert_eq!(tensors(&file).unwrap()["a"].dtype, dtype);
    }
    for class in ["ComplexFloatStorage", "QInt8Storage", "storage.UntypedStorage"] {
        let error = pickle_error(&pickle_of(&[Described::new("a", class, &[3])]));
        assert!(error.contains(&format!("torch.{class} is refused")), "{error}");
    }
}

#[test]
fn a_pickle_that_calls_anything_else_is_refused_by_that_name() {
    let call = |module: &str, name: &str| {
        [b"\x80\x02", &global(module, name)[..], &tuple(&[text("touch /tmp/owned")]), b"R."].concat()
    };
    for name in
        ["os.system", "posix.system", "builtins.eval", "torch._utils._rebuild_tensor_v3", "torch.load"]
    {
        let (module, function) = name.rsplit_once('.').unwrap();
        let error = pickle_error(&call(module, function));
        assert!(error.contains("at byte 2") && error.contains(&format!("{name} is refused")), "{error}");
    }
    let error = pickle_error(&call("collections", "OrderedDict"));
    assert!(error.contains("OrderedDict has arguments"), "{error}");
}

#[test]
fn an_opcode_that_weights_do_not_need_is_refused_by_its_name() {
    for (opcodes, name) in [
        (&b"\x80\x02(S'touch x'\nios\nsystem\n."[..], "STRING"),
        (b"\x80\x02ios\nsystem\n.", "INST"),
        (b"\x80\x02)\x81.", "NEWOBJ"),
        (b"\x80\x02\x8c\x02os\x8c\x06system\x93.", "SHORT_BINUNICODE"),
        (b"\x80\x02\x93.", "STACK_GLOBAL"),
        (b"\x80\x02}2.", "DUP"),
        (b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "BINBYTES8"),
        (b"\x80\x02].", "EMPTY_LIST"),
        (b"\x80\x02\xff.", "0xff"),
    ] {
        let error = pickle_error(opcodes);
        assert!(error.contains(&format!("the opcode {name} is not read")), "{error}");
    }
    assert!(pickle_error(b"\x80\x04}.").contains("pickle protocol 4"));
}

#[test]
fn depth_and_width_of_a_pickle_are_bounded() {
    let of = |parts: &[&[u8]]| pickle_error(&[b"\x80\x02", &parts.concat()[..], b"."].concat());
    // Tuples in tuples: nothing recurses, whatever becomes of them.
    let error = of(&[b")", &b"\x85".repeat(500_000)]);
    assert!(error.contains("is not a dictionary of tensors"), "{error}");
    let error = of(&[b")", &b"\x85".repeat(600_000)]);
    assert!(error.contains("more than 1048576 values"), "{error}");
    let error = of(&[&b"}".repeat(4_097)]);
    assert!(error.contains("more than 4096 values are on its stack"), "{error}");
    let error = of(&[&b"(".repeat(17)]);
    assert!(error.contains("more than 16 values are open"), "{error}");
    let error = of(&[&b"}0".repeat(pickle::MAX_BYTES)]);
    assert!(error.contains("at most 4194304 are read"), "{error}");
    // A value outside of an open tuple is not an argument within.
    let error = of(&[&global("collections", "OrderedDict"), b")(R"]);
    assert!(error.contains("a value is missing"), "{error}");
}

#[test]
fn the_memo_of_a_pickle_is_bounded() {
    let of = |parts: &[&[u8]]| pickle_error(&[b"\x80\x02", &parts.concat()[..], b"."].concat());
    // Each tuple holds the one before twice, so that written out the last would hold 2^200 values.
    let doubled = (0..200).map(|index: u8| [b'h', index, b'h', index, b'\x86', b'q', index + 1]);
    let error = of(&[b")q\0", &doubled.flatten().collect::<Vec<_>>(), b"h\xc8"]);
    assert!(error.contains("is not a dictionary of tensors"), "{error}");
    let error = of(&[b"}r\xff\xff\xff\xff"]);
    assert!(error.contains("its memo of 0 values is written at 4294967295"), "{error}");
    let error = of(&[b"}q\0h\x01"]);
    assert!(error.contains("its memo of 1 values is read at 1"), "{error}");
}

#[test]
fn the_number_of_tensors_and_their_bytes_together_are_bounded() {
    let tensor = Described::new("a", "FloatStorage", &[2, 3]).pickled();
    let mut pickle = [b"\x80\x02}", &tensor[..], b"q\0(X\x01\0\0\0xNu."].concat();
    // The tensor is on the stack, but belongs to no dictionary.
    assert!(pickle_error(&pickle).contains("a tensor gets 2 keys and values"));
    pickle = [b"\x80\x02}X\x01\0\0\0x", &tensor[..], b"q\0s"].concat();
    for part in 0..17 {
        let names = (0..1_000).flat_map(|index| [text(&format!("{part} {index}")), b"h\0".to_vec()].concat());
        pickle.extend([b"(", &names.collect::<Vec<u8>>()[..], b"u"].concat());
    }
    assert!(pickle_error(&[&pickle[..], b"."].concat()).contains("more than 16,384 tensors"));

    let of = |count: usize| {
        let tensor = |index| Described::new(&format!("{index}"), "FloatStorage", &[64, 1_024]);
        file_of(&pickle_of(&(0..count).map(tensor).collect::<Vec<_>>()), &[("0", &[0; 64 * 4_096])])
    };
    assert_eq!(tensors(&of(8)).unwrap().len(), 8);
    assert!(error(&of(20)).contains("more than 8 times the file's"));
}

#[test]
fn a_tensor_that_does_not_fit_its_storage_is_refused_by_its_name() {
    for (change, words) in [
        (|it| it.shape = vec![3, 3], "exceeds its storage of 6 numbers"),
        (|it| it.offset = 1, "exceeds its storage of 6 numbers"),
        (|it| it.offset = i64::MAX as u64, "exceeds its storage of 6 numbers"),
        (|it| it.stored = 5, "its storage of 5 F32 has 24 bytes"),
        (|it| it.stored = 1 << 62, "its storage of 4611686018427387904 F32 has 24 bytes"),
        (|it| it.class = "DoubleStorage", "its storage of 6 F64 has 24 bytes"),
        (|it| it.key = "1".into(), "its storage 1 is missing"),
        (|it| it.key = "../data.pkl".into(), "its storage ../data.pkl is missing"),
        (|it| it.strides = vec![1, 2], "not in the order of its shape [2, 3] (strides [1, 2])"),
        (|it| it.strides = vec![0, 0], "not in the order of its shape [2, 3] (strides [0, 0])"),
        (|it| it.strides = vec![1], "not in the order of its shape [2, 3] (strides [1])"),
    ] as [(fn(&mut Described), &str); 11]
    {
        let error = tensor_error(change);
        assert!(error.starts_with("tensor a.weight: ") && error.contains(words), "{error}");
    }
    let error = tensor_error(|it| (it.shape, it.strides) = (vec![1 << 40, 1 << 40, 0], vec![0, 0, 1]));
    assert!(error.contains("exceeds its storage"), "{error}");
    assert!(tensor_error(|it| it.shape = vec![1; 9]).contains("a tensor has 9 dimensions"));
    assert!(tensor_error(|it| it.offset = u64::MAX).contains("a size is -1"));
    let twice = Described::new("a", "FloatStorage", &[2, 3]);
    assert!(pickle_error(&pickle_of(&[twice.clone(), twice])).contains("has the name a twice"));
    assert!(pickle_error(b"\x80\x02}(X\x01\0\0\0aK\x01u.").contains("a is a number, not a tensor"));
}

/// A file with one tensor.
fn good_file(is_wide: bool) -> Vec<u8> {
    let pickle = pickle_of(&[Described::new("a", "FloatStorage", &[2, 3])]);
    zip(&[("m/data.pkl", &pickle), ("m/data/0", &[1; 24]), ("m/version", b"3\n")], is_wide)
}

#[test]
fn a_file_that_is_cut_off_is_refused_at_every_length() {
    for is_wide in [false, true] {
        let file = good_file(is_wide);
        assert_eq!(tensors(&file).unwrap().len(), 1);
        for length in 0..file.len() {
            error(&file[..length]);
        }
        error(&[&file[..], b"x"].concat());
    }
    let pickle =
        pickle_of(&[Described { is_parameter: true, ..Described::new("a", "FloatStorage", &[2, 3]) }]);
    for length in 0..pickle.len() {
        pickle_error(&pickle[..length]);
    }
    assert!(pickle_error(&[&pickle[..], b"."].concat()).contains("has 1 bytes after its end"));
}

/// Bytes that are put at a place of a file.
type Change = (usize, &'static [u8]);

#[test]
fn an_archive_that_contradicts_itself_is_refused() {
    let file = good_file(false);
    let find = |bytes: &[u8], from: usize| {
        from + file[from..].windows(bytes.len()).position(|it| it == bytes).expect("these bytes")
    };
    let first = find(b"PK\x01\x02", 0);
    let storage = find(b"PK\x01\x02", first + 1);
    let end = find(b"PK\x05\x06", 0);
    let changed = |changes: &[Change]| {
        let mut file = file.clone();
        changes.iter().for_each(|(at, bytes)| file[*at..*at + bytes.len()].copy_from_slice(bytes));
        error(&file)
    };
    let unread = "its zip directory cannot be read: ";
    let cases: [(&[Change], &str); 11] = [
        (&[(storage + 10, b"\x08")], unread),
        (&[(storage + 8, b"\x09")], unread),
        (&[(storage + 24, b"\xff\xff\0\0")], "m/data/0 is stored, but takes 24 bytes for 65535"),
        (&[(storage + 20, b"\xff\xff\0\0\xff\xff\0\0")], unread),
        (&[(storage + 20, b"\x14\0\0\0\x14\0\0\0")], "its storage of 6 F32 has 20 bytes"),
        // Up to the header of the entry after it.
        (&[(storage + 20, b"\x32\0\0\0\x32\0\0\0")], "overlapping entries"),
        (&[(storage + 42, b"\x01")], unread),
        (&[(storage + 46, b"m/data/1")], "filename mismatch"),
        (&[(storage + 28, b"\xff\xff")], unread),
        // Fewer and more entries than the directory has.
        (&[(end + 10, b"\x02")], unread),
        (&[(end + 10, b"\xff\xff")], unread),
    ];
    for (changes, words) in cases {
        let error = changed(changes);
        assert!(error.contains(words), "{error}, not {words}");
    }
    let twice = zip(&[("m/data.pkl", b"."), ("m/data/0", b""), ("m/data/0", b"")], true);
    assert!(error(&twice).contains("duplicate file names"));
    let mut long = good_file(true);
    let wide = long.len() - 98;
    long[wide + 32..wide + 40].copy_from_slice(&(1_u64 << 40).to_le_bytes());
    assert!(error(&long).contains("has 1099511627776 entries, and at most 32768 are read"));
}

#[test]
fn other_files_are_refused_by_their_kind() {
    assert!(error(b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.").contains("before version 1.6"));
    let mut tar = vec![0; 512];
    tar[257..262].copy_from_slice(b"ustar");
    assert!(error(&tar).contains("a tar archive"));
    assert!(error(b"").contains("no zip archive"));
    assert!(error(&zip(&[("m/a", b"")], true)).contains("has no data.pkl"));
    assert!(
        error(&zip(&[("m/data.pkl", b""), ("n/data.pkl", b"")], true)).contains("more than one data.pkl")
    );
    let big = zip(&[("m/data.pkl", b"\x80\x02}."), ("m/byteorder", b"big")], false);
    assert!(error(&big).contains("its byteorder is big"));
}

/// Tensors that lie one after the other in one storage, or in one for each.
fn described() -> impl Strategy<Value = (Vec<Described>, Vec<(String, Vec<u8>)>)> {
    let shape = prop::collection::vec(0_u64..5, 0..4);
    let class = prop::sample::select(vec![("FloatStorage", 4), ("HalfStorage", 2), ("LongStorage", 8)]);
    let tensors = prop::collection::vec((shape, any::<bool>()), 1..6);
    (tensors, class, any::<bool>()).prop_map(|(tensors, (class, bytes), is_shared)| {
        let of = |(index, (shape, is_parameter)): (usize, &(Vec<u64>, bool))| Described {
            is_parameter: *is_parameter,
            key: index.to_string(),
            ..Described::new(&format!("tensor.{index}"), class, shape)
        };
        let mut described: Vec<Described> = tensors.iter().enumerate().map(of).collect();
        let mut storages: Vec<(String, Vec<u8>)> = Vec::new();
        if is_shared {
            let total: u64 = described.iter().map(|it| it.stored).sum();
            let mut offset = 0;
            for tensor in &mut described {
                (tensor.key, tensor.offset) = ("0".into(), offset);
                offset += tensor.stored;
                tensor.stored = total;
            }
            storages.push(("0".into(), vec![0; total as usize * bytes]));
        } else {
            storages.extend(described.iter().map(|it| (it.key.clone(), vec![0; it.stored as usize * bytes])));
        }
        let mut number = 0_usize;
        storages.iter_mut().flat_map(|(_, data)| data).for_each(|byte| {
            *byte = number as u8;
            number += 1;
        });
        (described, storages)
    })
}

fn file_of_described((described, storages): &(Vec<Described>, Vec<(String, Vec<u8>)>)) -> Vec<u8> {
    let storages: Vec<(&str, &[u8])> = storages.iter().map(|(key, data)| (&**key, &**data)).collect();
    file_of(&pickle_of(described), &storages)
}

proptest! {
    #[test]
    fn what_is_written_is_read(case in described()) {
        let file = file_of_described(&case);
        let read = tensors(&file).unwrap();
        prop_assert_eq!(read.len(), case.0.len());
        for tensor in &case.0 {
            let info = &read[&tensor.name];
            let shape: Vec<u64> = info.shape.iter().map(|length| *length as u64).collect();
            prop_assert_eq!(&shape, &tensor.shape);
            let (_, storage) = case.1.iter().find(|(key, _)| *key == tensor.key).unwrap();
            let number_bytes = info.dtype.bitsize() / 8;
            let start = tensor.offset as usize * number_bytes;
            let bytes = shape.iter().product::<u64>() as usize * number_bytes;
            let (from, to) = info.data_offsets;
            prop_assert_eq!(&file[from..to], &storage[start..start + bytes]);
        }
    }

    #[test]
    fn a_damaged_file_is_refused_or_its_tensors_lie_within_it(
        case in described(),
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
    ) {
        let mut file = file_of_described(&case);
        for (at, byte) in changes {
            let at = at.index(file.len());
            file[at] = byte;
        }
        for info in tensors(&file).unwrap_or_default().values() {
            let (start, end) = info.data_offsets;
            let bytes = info.shape.iter().product::<usize>() * (info.dtype.bitsize() / 8);
            prop_assert!(start <= end && end <= file.len() && end - start == bytes);
        }
    }
}
