//! Weights of PyTorch: the bytes as a file, and as the pickle in a good archive.
#![no_main]

use libfuzzer_sys::fuzz_target;
use sconce::model::load::torch::tensors;
use sconce_fuzz::LONGEST_ERROR;

fuzz_target!(|data: &[u8]| {
    check(data);
    check(&archive(&[("m/data.pkl", data), ("m/data/0", &[0; 64]), ("m/data/1", &[0; 48])]));
});

/// Tensors lie within the file and have the bytes of their shapes. Errors are short.
fn check(file: &[u8]) {
    match tensors(file) {
        Ok(tensors) => {
            for (name, info) in tensors {
                let (start, end) = info.data_offsets;
                let bytes = info.shape.iter().product::<usize>() * (info.dtype.bitsize() / 8);
                assert!(start <= end && end <= file.len() && end - start == bytes, "{name}: {info:?}");
            }
        }
        Err(error) => assert!(!error.is_empty() && error.len() <= LONGEST_ERROR, "{error}"),
    }
}

/// A zip archive whose entries are stored.
fn archive(entries: &[(&str, &[u8])]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, data) in entries {
        let (header, size, name_size) = (file.len() as u32, data.len() as u32, name.len() as u16);
        let sizes = [size.to_le_bytes(), size.to_le_bytes()].concat();
        file.extend([&b"PK\x03\x04"[..], &[0; 14], &sizes, &name_size.to_le_bytes(), &[0; 2]].concat());
        file.extend([name.as_bytes(), data].concat());
        directory.extend([&b"PK\x01\x02"[..], &[0; 16], &sizes, &name_size.to_le_bytes(), &[0; 12]].concat());
        directory.extend([&header.to_le_bytes(), name.as_bytes()].concat());
    }
    let (start, size) = (file.len() as u32, directory.len() as u32);
    file.extend(directory);
    let count = (entries.len() as u16).to_le_bytes();
    file.extend([&b"PK\x05\x06\0\0\0\0"[..], &count, &count].concat());
    file.extend([&size.to_le_bytes()[..], &start.to_le_bytes(), &[0; 2]].concat());
    file
}
