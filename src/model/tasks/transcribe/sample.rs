//! Generates recordings for the probe and for measurements: sounds whose pitch follows a text. They are not speech, but
//! cost as much to process.

use std::f64::consts::TAU;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::json;

use crate::model::family::Sample;
use crate::model::sound::RATE;
use crate::protocol::endpoints::TRANSCRIPTIONS_URL;

/// Samples of the probe: 100 ms.
const PROBE: usize = RATE as usize / 10;
/// Samples of the sound for a text: 24.6 s.
const SOUND: usize = 246 * RATE as usize / 10;
/// Samples of the silence after it: 0.4 s. A recording is cut into windows there.
const PAUSE: usize = 4 * RATE as usize / 10;
/// Samples of the tone for a byte of a text: 60 ms.
const TONE: usize = 6 * RATE as usize / 100;

/// A recording with a tone.
pub fn probe() -> Vec<u8> {
    wav(&sound("a")[..PROBE])
}

/// A task with a recording that has a window for each text.
pub fn recordings(texts: &[String]) -> Sample {
    let samples: Vec<u8> = texts.iter().flat_map(|text| sound(text)).collect();
    let url = format!("data:audio/wav;base64,{}", STANDARD.encode(wav(&samples)));
    // At a temperature other than 0 each text is written only once. Voice detection would drop the tones.
    Sample::json(
        TRANSCRIPTIONS_URL,
        &json!({"file_url": url, "temperature": 1e-5, "vad": false}),
        texts.len(),
    )
}

/// The sound for a text, in 8 bits.
fn sound(text: &str) -> Vec<u8> {
    let bytes = if text.is_empty() { b" " } else { text.as_bytes() };
    let sample = |index: usize| {
        let hertz = 100.0 + 4.0 * f64::from(bytes[index / TONE % bytes.len()]);
        let wave = (TAU * hertz * index as f64 / f64::from(RATE)).sin();
        (f64::from(SILENT) + 60.0 * wave) as u8
    };
    (0..SOUND).map(sample).chain(std::iter::repeat_n(SILENT, PAUSE)).collect()
}

/// The middle of the range of samples in 8 bits.
const SILENT: u8 = 128;

/// A WAV file of samples in 8 bits, with one channel.
fn wav(samples: &[u8]) -> Vec<u8> {
    let length = samples.len() as u32;
    let mut file = b"RIFF".to_vec();
    file.extend((length + 36).to_le_bytes());
    file.extend(b"WAVEfmt \x10\0\0\0\x01\0\x01\0");
    file.extend(RATE.to_le_bytes());
    file.extend(RATE.to_le_bytes());
    file.extend(b"\x01\0\x08\0data");
    file.extend(length.to_le_bytes());
    file.extend(samples);
    file
}
