//! Weights as PyTorch writes them: the file `pytorch_model.bin`, a zip archive of a pickle and of the numbers of each
//! tensor. Decides where in the file the numbers of each tensor are. The pickle is read as data: nothing in it is
//! executed, and what weights do not need is refused by name. Owns nothing, and copies no numbers.

mod archive;
mod pickle;
mod shown;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;

use safetensors::tensor::TensorInfo;

use self::pickle::Pickled;
use self::shown::shown;

/// The tensors may have at most this many times the bytes of the file together. They may have more than the file
/// because tensors may share their numbers: T5 names one matrix four times.
const MAX_SHARED: usize = 8;

/// The tensors of a file by their names, with their types, their shapes, and where their numbers are in the file.
///
/// # Errors
/// What is wrong with the file, or what in it is refused, with its name.
pub fn tensors(file: &[u8]) -> Result<BTreeMap<String, TensorInfo>, String> {
    if !file.starts_with(b"PK\x03\x04") {
        return Err(other_format(file).to_owned());
    }
    let entries = archive::read(file)?;
    let mut folders = entries.keys().filter_map(|name| name.strip_suffix("/data.pkl"));
    let folder = match (folders.next(), folders.next()) {
        (Some(folder), None) => folder,
        (None, _) => return Err("the zip archive has no data.pkl, so torch.save did not write it".to_owned()),
        (Some(_), Some(_)) => return Err("the zip archive has more than one data.pkl".to_owned()),
    };
    let entry = |name: &str| entries.get(&format!("{folder}/{name}")).cloned();
    if let Some(order) = entry("byteorder").map(|range| &file[range]).filter(|order| *order != b"little") {
        let order = String::from_utf8_lossy(&order[..order.len().min(20)]);
        return Err(format!("its byteorder is {}; only little is read", shown(&order)));
    }
    let pickle = &file[entry("data.pkl").unwrap_or_default()];
    if pickle.len() > pickle::MAX_BYTES {
        let (bytes, most) = (pickle.len(), pickle::MAX_BYTES);
        return Err(format!("its data.pkl has {bytes} bytes, and at most {most} are read"));
    }
    let mut tensors = BTreeMap::new();
    let mut total = 0_usize;
    for (name, pickled) in pickle::read(pickle)? {
        let fault = |reason: String| format!("tensor {}: {reason}", shown(name));
        let Pickled { storage, offset, shape, strides } = pickled;
        let entry = entry(&format!("data/{}", storage.key));
        let entry = entry.ok_or_else(|| fault(format!("its storage {} is missing", shown(storage.key))))?;
        let number_bytes = storage.dtype.bitsize() / 8;
        if storage.count.checked_mul(number_bytes) != Some(entry.len()) {
            let (count, bytes) = (storage.count, entry.len());
            return Err(fault(format!("its storage of {count} {:?} has {bytes} bytes", storage.dtype)));
        }
        if !is_contiguous(&shape, &strides) {
            return Err(fault(format!(
                "its numbers are not in the order of its shape {shape:?} (strides {strides:?}); save it again with \
                 .contiguous()"
            )));
        }
        let numbers = shape.iter().try_fold(1, |count: usize, length| count.checked_mul(*length));
        let end = numbers.and_then(|numbers| numbers.checked_add(offset));
        let (Some(numbers), true) = (numbers, end.is_some_and(|end| end <= storage.count)) else {
            let stored = storage.count;
            return Err(fault(format!(
                "its shape {shape:?} from {offset} on exceeds its storage of {stored} numbers"
            )));
        };
        let start = entry.start + offset * number_bytes;
        let data_offsets = (start, start + numbers * number_bytes);
        total = total.saturating_add(numbers * number_bytes);
        tensors.insert(name.to_owned(), TensorInfo { dtype: storage.dtype, shape, data_offsets });
    }
    if total > file.len().saturating_mul(MAX_SHARED) {
        let bytes = file.len();
        return Err(format!(
            "its tensors have {total} bytes together, more than {MAX_SHARED} times the file's {bytes}"
        ));
    }
    Ok(tensors)
}

/// The reason for which a file that is not a zip archive is refused.
fn other_format(file: &[u8]) -> &'static str {
    if file.starts_with(b"\x80") {
        "it is a bare pickle, as PyTorch wrote it before version 1.6, which is not read; docs/models.md (Weights) shows \
         how to convert it"
    } else if file.get(257..).is_some_and(|it| it.starts_with(b"ustar")) {
        "it is a tar archive, as the first versions of PyTorch wrote it, which is not read; docs/models.md (Weights) \
         shows how to convert it"
    } else {
        "it is no zip archive, and PyTorch writes one"
    }
}

/// Whether numbers with these strides are in the order of the shape. The stride of a dimension of length 1 means
/// nothing.
fn is_contiguous(shape: &[usize], strides: &[usize]) -> bool {
    let mut expected = 1_usize;
    let dimensions = shape.iter().zip(strides).rev();
    let mut in_order = dimensions.map(|(length, stride)| {
        let is_in_order = *length == 1 || *stride == expected;
        expected = expected.saturating_mul(*length);
        is_in_order
    });
    shape.len() == strides.len() && (shape.contains(&0) || in_order.all(|it| it))
}
