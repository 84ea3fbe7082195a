//! The table of the architectures of decoders: what distinguishes each from Llama, as data. Another one is added here, if
//! its properties are in the description of a decoder (`config`).

use crate::model::nets::joined;
use crate::model::ops::Activation;

/// An architecture.
#[derive(Debug, PartialEq)]
pub struct Architecture {
    /// Its name in `model_type` of `config.json`.
    pub name: &'static str,
    /// Its name in GGUF files. Empty if they have the name of another architecture.
    pub gguf: &'static str,
    /// The values that published files of the architecture may leave out, by their names in `config.json`. In JSON.
    pub defaults: &'static str,
    /// Which layers have an attention window.
    pub windows: Windows,
    /// Where the norms of a layer are.
    pub norms: Norms,
    /// The norms of queries and keys.
    pub head_norms: HeadNorms,
    /// Whether the projections to queries, keys and values have biases that no property turns off.
    pub has_qkv_biases: bool,
    /// Whether queries, keys and values are one matrix in the files, and the gate and the up projection another.
    pub is_fused: bool,
    /// Added to the weights of norms that are read from safetensors files: Gemma's files have w - 1. GGUF files have w.
    pub norm_offset: f32,
    /// Whether token embeddings are multiplied by the square root of their width.
    pub scales_embeddings: bool,
    /// Whether `attn_logit_softcapping` bounds the scores of attention. Gemma 3's files may have it too, and its networks
    /// in transformers and llama.cpp do not use it.
    pub caps_scores: bool,
    /// The function that `config.json` calls `gelu`.
    pub gelu: Activation,
    /// Whether the two numbers of a rotated pair are adjacent in GGUF files. Otherwise they are half a head apart.
    pub gguf_has_adjacent_pairs: bool,
    /// One size of the family divides its scores by √(hidden / heads) in the place of √head_dim. Its GGUF files do not say so,
    /// so that it is known by its number of layers. None if there is no such size.
    pub gguf_layers_with_width_scale: Option<usize>,
}

/// Which layers have an attention window, where the file has no `layer_types`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    /// None. `use_sliding_window` is refused.
    Never,
    /// All, if the file has a `sliding_window`.
    Always,
    /// Those from `max_window_layers` on, if `use_sliding_window` is true.
    IfUsed,
    /// All but every n-th, where n is `sliding_window_pattern`.
    Alternating,
}

/// Where a layer's norms are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Norms {
    /// Before attention, and before the feed-forward sublayer.
    Before,
    /// After each of them.
    After,
    /// Before and after each of them.
    Both,
}

/// The norms of queries and keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadNorms {
    /// There are none.
    None,
    /// Each head is normalised by itself.
    Each,
    /// All heads are normalised together.
    All,
}

const LLAMA: Architecture = Architecture {
    name: "llama",
    gguf: "llama",
    defaults: "{}",
    windows: Windows::Never,
    norms: Norms::Before,
    head_norms: HeadNorms::None,
    has_qkv_biases: false,
    is_fused: false,
    norm_offset: 0.0,
    scales_embeddings: false,
    caps_scores: false,
    gelu: Activation::Gelu,
    gguf_has_adjacent_pairs: true,
    gguf_layers_with_width_scale: None,
};

const QWEN2: Architecture = Architecture {
    name: "qwen2",
    gguf: "qwen2",
    defaults: r#"{"max_window_layers": 28}"#,
    windows: Windows::IfUsed,
    has_qkv_biases: true,
    gguf_has_adjacent_pairs: false,
    ..LLAMA
};

const QWEN3: Architecture = Architecture {
    name: "qwen3",
    gguf: "qwen3",
    defaults: r#"{"head_dim": 128, "max_window_layers": 28}"#,
    head_norms: HeadNorms::Each,
    has_qkv_biases: false,
    ..QWEN2
};

const GEMMA: Architecture = Architecture {
    name: "gemma",
    gguf: "gemma",
    defaults: r#"{"head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "hidden_act": "gelu"}"#,
    norm_offset: 1.0,
    scales_embeddings: true,
    gelu: Activation::GeluTanh,
    gguf_has_adjacent_pairs: false,
    ..LLAMA
};

const GEMMA2: Architecture = Architecture {
    name: "gemma2",
    gguf: "gemma2",
    defaults: r#"{
        "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "hidden_act": "gelu",
        "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 8192,
        "query_pre_attn_scalar": 256, "sliding_window": 4096, "sliding_window_pattern": 2,
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0
    }"#,
    windows: Windows::Alternating,
    norms: Norms::Both,
    caps_scores: true,
    // Gemma 2 27B.
    gguf_layers_with_width_scale: Some(46),
    ..GEMMA
};

const OLMO2: Architecture = Architecture {
    name: "olmo2",
    gguf: "olmo2",
    norms: Norms::After,
    head_norms: HeadNorms::All,
    gguf_has_adjacent_pairs: false,
    ..LLAMA
};

/// The architectures, by the names that are in files most often.
const ALL: &[Architecture] = &[
    LLAMA,
    Architecture {
        name: "mistral",
        gguf: "",
        defaults: r#"{"sliding_window": 4096}"#,
        windows: Windows::Always,
        ..LLAMA
    },
    Architecture { name: "ministral3", gguf: "mistral3", windows: Windows::Always, ..LLAMA },
    QWEN2,
    QWEN3,
    Architecture { name: "qwen3_moe", gguf: "qwen3moe", defaults: "{}", windows: Windows::Never, ..QWEN3 },
    GEMMA,
    GEMMA2,
    Architecture {
        name: "gemma3_text",
        gguf: "gemma3",
        defaults: r#"{
            "head_dim": 256, "rms_norm_eps": 1e-6, "tie_word_embeddings": true, "hidden_act": "gelu",
            "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072,
            "vocab_size": 262208, "query_pre_attn_scalar": 256, "sliding_window": 4096,
            "sliding_window_pattern": 6, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0
        }"#,
        head_norms: HeadNorms::Each,
        caps_scores: false,
        // Gemma 3 27B.
        gguf_layers_with_width_scale: Some(62),
        ..GEMMA2
    },
    Architecture {
        name: "phi3",
        gguf: "phi3",
        windows: Windows::Always,
        is_fused: true,
        gguf_has_adjacent_pairs: false,
        ..LLAMA
    },
    Architecture {
        name: "smollm3",
        gguf: "smollm3",
        defaults: r#"{"tie_word_embeddings": true, "no_rope_layer_interval": 4, "rope_theta": 2000000.0}"#,
        ..LLAMA
    },
    Architecture { name: "granite", gguf: "granite", defaults: r#"{"attention_multiplier": 1.0}"#, ..LLAMA },
    OLMO2,
    Architecture {
        name: "olmo3",
        gguf: "",
        defaults: r#"{"sliding_window": 4096, "sliding_window_pattern": 4, "rope_local_base_freq": 500000.0}"#,
        windows: Windows::Alternating,
        ..OLMO2
    },
];

/// The names in `model_type` of models of images and text, whose text part is a decoder.
pub const WITH_TEXT_PART: [&str; 2] = ["gemma3", "mistral3"];

/// The names of all architectures in `model_type`, those with a text part included.
pub const CONFIG_ARCHITECTURES: [&str; 16] = joined(&listed::<14>(false), &WITH_TEXT_PART);

/// The names of architectures in GGUF files.
pub const GGUF_ARCHITECTURES: [&str; 12] = listed(true);

/// The names of the table in `model_type` or in GGUF files, without those that are empty. Does not compile if there are
/// not `N` of them.
const fn listed<const N: usize>(in_gguf: bool) -> [&'static str; N] {
    let (mut names, mut count, mut index) = ([""; N], 0, 0);
    while index < ALL.len() {
        let name = if in_gguf { ALL[index].gguf } else { ALL[index].name };
        if !name.is_empty() {
            names[count] = name;
            count += 1;
        }
        index += 1;
    }
    assert!(count == N);
    names
}

/// The architecture with this name in `config.json`.
pub fn named(name: &str) -> Option<&'static Architecture> {
    ALL.iter().find(|architecture| architecture.name == name)
}

/// The architecture with this name in GGUF files.
pub fn named_in_gguf(name: &str) -> Option<&'static Architecture> {
    ALL.iter().find(|architecture| architecture.gguf == name)
}
