//! Sound: from the bytes of a recording to what models of speech take. Decodes files to 16 kHz, computes log-mel
//! features, and cuts recordings into pieces at silences. Works block by block, so that hours of sound need no more
//! memory than minutes. Knows no requests, and never opens a device.

pub mod decode;
pub mod features;

/// Samples in a second of all sound here. Whisper and silero-vad were trained on this rate.
pub const RATE: u32 = 16_000;
