//! Every kind of request through the public interface of its model, held against what other programs compute with the
//! same weights. Most weights are the tiny ones of `tests/fixtures`; the real ones are fetched by `scripts/fetch-*`.

mod captions;
mod embeddings;
mod generate;
mod image_generation;
mod images;
mod scores;
mod sound;
mod sparse;
mod speech;
mod text_image;
mod token_labels;
mod transcribe;
mod whisper;
