//! Sound: turns the bytes of a recording into the input of speech models. Decodes files to 16 kHz, finds where there is
//! speech, and computes log-mel features. Works block by block, so that hours of sound need no more memory than
//! minutes. Does not know requests, and never opens a device.

pub mod decode;
pub mod features;
pub mod synthesis;
pub mod voice;

/// The sample rate of all decoded sound, in Hz. Whisper and silero-vad were trained at this rate.
pub const RATE: u32 = 16_000;
