//! Reads requests to transcribe or translate a recording, and writes the replies in OpenAI's formats. Pure: sound is
//! not decoded here.

mod reply;
mod request;

pub use reply::{Segment, Transcript, Word, delta, text_of};
pub use request::KEYS;
pub use request::{Format, Sound, SpeechTask, TranscriptionRequest, VoiceDetection};
