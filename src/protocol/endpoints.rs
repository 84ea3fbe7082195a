//! The table of the built-in endpoints: what clients know of their requests and replies without a model. The bodies
//! themselves are read and written beside the models, in `model::tasks`.

/// The URL of requests for vectors of texts or images.
pub const EMBEDDINGS_URL: &str = "/v1/embeddings";
/// The URL of requests for sparse vectors.
pub const SPARSE_URL: &str = "/embed_sparse";
/// The URL of requests to classify texts or images.
pub const CLASSIFY_URL: &str = "/classify";
/// The URL of requests for the entities in texts.
pub const TOKEN_LABELS_URL: &str = "/token-classification";
/// The URL of requests to sort documents.
pub const RERANK_URL: &str = "/v1/rerank";
/// The URL of requests to score pairs.
pub const SCORE_URL: &str = "/v1/score";
/// The URL of requests to continue texts.
pub const COMPLETIONS_URL: &str = "/v1/completions";
/// The URL of requests to continue a conversation.
pub const CHAT_URL: &str = "/v1/chat/completions";
/// The URL of requests for captions of images.
pub const CAPTIONS_URL: &str = "/image-to-text";
/// The URL of requests for images of a text.
pub const IMAGE_GENERATION_URL: &str = "/v1/images/generations";
/// The URL of requests for the sound of a text.
pub const SPEECH_URL: &str = "/v1/audio/speech";
/// The URL of requests for a text in the language of a recording.
pub const TRANSCRIPTIONS_URL: &str = "/v1/audio/transcriptions";
/// The URL of requests for a text in English of a recording.
pub const TRANSLATIONS_URL: &str = "/v1/audio/translations";

named_enum! {
    /// The format of a file with a result.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum FileFormat as ending {
        /// A text.
        Text => "txt",
        /// Subtitles in SubRip's format.
        Srt => "srt",
        /// Subtitles in WebVTT's format.
        Vtt => "vtt",
        /// The body of the reply, in JSON.
        Json => "json",
        /// Sound.
        Wav => "wav",
        /// Compressed sound.
        Flac => "flac",
        /// The samples of sound alone.
        Pcm => "pcm",
        /// An image.
        Png => "png",
    }
}

/// What clients know of an endpoint.
pub(super) struct Endpoint {
    pub(super) url: &'static str,
    /// The fields of a request that may hold its inputs. The first can hold a text.
    pub(super) inputs: &'static [&'static str],
    /// Whether several requests can share a task.
    pub(super) sharing: Option<Sharing>,
    /// The formats of files that replies can have.
    pub(super) results: &'static [FileFormat],
}

/// Requests can share a task if one of the fields for inputs holds a text or a list of texts, and they have none of the
/// fields `unless`. A reply is a list with an item for each text, or has one as its field `data`.
pub(super) struct Sharing {
    pub(super) unless: &'static [&'static str],
    /// Whether the reply to one text that is in no list is its item.
    pub(super) unwraps: bool,
}

/// All endpoints.
pub(super) static ENDPOINTS: [Endpoint; 13] = {
    use FileFormat::{Flac, Json, Pcm, Png, Srt, Text, Vtt, Wav};
    const TRANSCRIPTS: &[FileFormat] = &[Text, Srt, Vtt, Json];
    const fn shared(unless: &'static [&'static str], unwraps: bool) -> Option<Sharing> {
        Some(Sharing { unless, unwraps })
    }
    const fn endpoint(
        url: &'static str,
        inputs: &'static [&'static str],
        sharing: Option<Sharing>,
        results: &'static [FileFormat],
    ) -> Endpoint {
        Endpoint { url, inputs, sharing, results }
    }
    [
        endpoint(EMBEDDINGS_URL, &["input"], shared(&[], false), &[Json]),
        endpoint(SPARSE_URL, &["inputs", "input"], shared(&[], false), &[Json]),
        // `inputs` and `image_url` hold images.
        endpoint(
            CLASSIFY_URL,
            &["input", "inputs", "image_url"],
            shared(&["inputs", "image_url", "labels", "parameters"], false),
            &[Json],
        ),
        endpoint(TOKEN_LABELS_URL, &["input", "inputs"], shared(&[], true), &[Json]),
        endpoint(RERANK_URL, &["documents", "texts"], None, &[Json]),
        endpoint(SCORE_URL, &["text_2"], None, &[Json]),
        endpoint(COMPLETIONS_URL, &["prompt"], None, &[Text, Json]),
        endpoint(CHAT_URL, &[], None, &[Text, Json]),
        endpoint(CAPTIONS_URL, &["input", "inputs", "image_url"], None, &[Text, Json]),
        endpoint(IMAGE_GENERATION_URL, &["prompt"], None, &[Png, Json]),
        endpoint(SPEECH_URL, &["input", "phonemes"], None, &[Wav, Flac, Pcm]),
        endpoint(TRANSCRIPTIONS_URL, &[], None, TRANSCRIPTS),
        endpoint(TRANSLATIONS_URL, &[], None, TRANSCRIPTS),
    ]
};

impl Endpoint {
    /// The endpoint with this URL; none if no built-in one has it.
    pub(super) fn of(url: &str) -> Option<&'static Self> {
        ENDPOINTS.iter().find(|endpoint| endpoint.url == url)
    }
}
