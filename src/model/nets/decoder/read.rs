//! Reads the description of a decoder from `config.json` or from the metadata of a GGUF file, whose values get their names
//! in `config.json` first. Decides which properties are refused.

use candle_core::quantized::gguf_file::Value as Metadata;
use serde::Deserialize;
use serde_json::{Map, Value, json};

use super::architectures::{Architecture, WITH_TEXT_PART, Windows, named, named_in_gguf};
use super::config::{
    Biases, DecoderConfig, Experts, LayerConfig, MAX_HEADS, MAX_LAYERS, QueryGrowth, at_most,
};
use super::rope::{Refusal, Rope, RopeBase, Rotation};
use crate::model::LoadError;
use crate::model::load::ModelFiles;
use crate::model::load::gguf::Gguf;
use crate::model::ops::Activation;

#[derive(Deserialize)]
struct RawConfig {
    hidden_size: usize,
    intermediate_size: usize,
    num_hidden_layers: usize,
    num_attention_heads: usize,
    num_key_value_heads: Option<usize>,
    head_dim: Option<usize>,
    vocab_size: usize,
    pad_token_id: Option<i64>,
    max_position_embeddings: usize,
    rms_norm_eps: f32,
    tie_word_embeddings: Option<bool>,
    hidden_act: Option<String>,
    attention_bias: Option<bool>,
    mlp_bias: Option<bool>,
    use_bidirectional_attention: Option<bool>,
    is_causal: Option<bool>,

    rope_theta: Option<f64>,
    rope_local_base_freq: Option<f64>,
    rope_scaling: Option<Map<String, Value>>,
    rope_parameters: Option<Map<String, Value>>,
    partial_rotary_factor: Option<f64>,
    /// As `partial_rotary_factor`, but a number of a head's numbers.
    rotary_dim: Option<usize>,
    original_max_position_embeddings: Option<usize>,
    no_rope_layers: Option<Vec<usize>>,
    no_rope_layer_interval: Option<usize>,

    use_sliding_window: Option<bool>,
    sliding_window: Option<usize>,
    max_window_layers: Option<usize>,
    sliding_window_pattern: Option<usize>,
    layer_types: Option<Vec<String>>,

    query_pre_attn_scalar: Option<f32>,
    attention_multiplier: Option<f32>,
    attn_logit_softcapping: Option<f32>,
    final_logit_softcapping: Option<f32>,
    embedding_multiplier: Option<f32>,
    residual_multiplier: Option<f32>,
    logits_scaling: Option<f32>,

    /// Files that were saved by transformers 5 have the other name.
    #[serde(alias = "num_local_experts")]
    num_experts: Option<usize>,
    num_experts_per_tok: Option<usize>,
    moe_intermediate_size: Option<usize>,
    norm_topk_prob: Option<bool>,
    decoder_sparse_step: Option<usize>,
    mlp_only_layers: Option<Vec<usize>>,
}

/// The names of values in the metadata of GGUF files, and in `config.json`.
const GGUF_NAMES: [(&str, &str); 22] = [
    ("block_count", "num_hidden_layers"),
    ("embedding_length", "hidden_size"),
    ("feed_forward_length", "intermediate_size"),
    ("attention.head_count", "num_attention_heads"),
    ("context_length", "max_position_embeddings"),
    ("attention.head_count_kv", "num_key_value_heads"),
    ("attention.key_length", "head_dim"),
    ("attention.layer_norm_rms_epsilon", "rms_norm_eps"),
    ("rope.freq_base", "rope_theta"),
    ("rope.freq_base_swa", "rope_local_base_freq"),
    ("rope.dimension_count", "rotary_dim"),
    ("attention.sliding_window", "sliding_window"),
    ("attention.sliding_window_pattern", "sliding_window_pattern"),
    ("attention.scale", "attention_multiplier"),
    ("attn_logit_softcapping", "attn_logit_softcapping"),
    ("final_logit_softcapping", "final_logit_softcapping"),
    ("embedding_scale", "embedding_multiplier"),
    ("residual_scale", "residual_multiplier"),
    ("logit_scale", "logits_scaling"),
    ("expert_count", "num_experts"),
    ("expert_used_count", "num_experts_per_tok"),
    ("expert_feed_forward_length", "moe_intermediate_size"),
];

/// The number of values in [`GGUF_NAMES`], from the first on, that each file has.
const REQUIRED: usize = 5;

/// The names of values of rope scaling.
const GGUF_ROPE_NAMES: [(&str, &str); 8] = [
    ("rope.scaling.type", "rope_type"),
    ("rope.scaling.factor", "factor"),
    ("rope.scaling.original_context_length", "original_max_position_embeddings"),
    ("rope.scaling.attn_factor", "attention_factor"),
    ("rope.scaling.yarn_beta_fast", "beta_fast"),
    ("rope.scaling.yarn_beta_slow", "beta_slow"),
    ("rope.scaling.yarn_log_multiplier", "mscale_all_dim"),
    ("attention.temperature_scale", "llama_4_scaling_beta"),
];

impl DecoderConfig {
    /// Reads `config.json`.
    ///
    /// # Errors
    /// [`LoadError::File`] for an invalid file, [`LoadError::Unsupported`] naming a property that is not
    /// supported.
    pub fn read(files: &ModelFiles, source: &str) -> Result<Self, LoadError> {
        let refused = |reason| LoadError::Unsupported { model: source.to_owned(), reason };
        let mut fields: Map<String, Value> = files.required_json("config.json")?;
        let is_of = |fields: &Map<String, Value>, names: &[&str]| {
            fields.get("model_type").and_then(Value::as_str).is_some_and(|name| names.contains(&name))
        };
        if is_of(&fields, &WITH_TEXT_PART) {
            let Some(Value::Object(mut text)) = fields.remove("text_config") else {
                return Err(refused("config.json has no text_config".to_owned()));
            };
            if let Some(is_tied) = fields.remove("tie_word_embeddings") {
                text.entry("tie_word_embeddings").or_insert(is_tied);
            }
            fields = text;
        }
        let name = fields.get("model_type").and_then(Value::as_str).unwrap_or_default();
        let architecture =
            named(name).ok_or_else(|| refused(format!("model_type {name:?} is no decoder")))?;
        from_fields(architecture, fields).map_err(refused)
    }

    /// Reads the metadata of a GGUF file.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a value that is missing or impossible.
    pub fn from_gguf(gguf: &Gguf) -> Result<Self, LoadError> {
        let name = gguf.text("general.architecture").unwrap_or("(none)");
        let architecture = named_in_gguf(name)
            .ok_or_else(|| gguf.fault(format!("general.architecture {name:?} is no decoder")))?;
        let fields = gguf_fields(gguf, architecture)?;
        let mut config = from_fields(architecture, fields).map_err(|reason| gguf.fault(reason))?;
        config.is_tied = !gguf.has("output.weight");
        let has_bias = |names: &[&str]| names.iter().any(|name| gguf.has(&format!("blk.0.{name}.bias")));
        config.biases = Biases {
            qkv: has_bias(&["attn_q", "attn_qkv"]),
            out: has_bias(&["attn_output"]),
            feed_forward: has_bias(&["ffn_down"]),
        };
        let tokens =
            gguf.value("tokenizer.ggml.tokens").and_then(|tokens| tokens.to_vec().ok()).map_or(0, Vec::len);
        if tokens > config.vocabulary {
            let vectors = config.vocabulary;
            return Err(gguf.fault(format!("it has {tokens} tokens, and vectors for {vectors}")));
        }
        let scaled = |name: &str, frequencies: &[f32]| {
            let factors = gguf.vector(name, frequencies.len())?;
            Ok(frequencies.iter().zip(factors).map(|(frequency, factor)| frequency / factor).collect())
        };
        if gguf.has("rope_freqs.weight") {
            for rotation in &mut config.rotations {
                rotation.frequencies = scaled("rope_freqs.weight", &rotation.frequencies)?;
            }
        }
        Ok(config)
    }
}

/// The metadata of a GGUF file, by the names of `config.json`.
fn gguf_fields(gguf: &Gguf, architecture: &Architecture) -> Result<Map<String, Value>, LoadError> {
    let read = |name: &str| {
        let value = match gguf.value(&format!("{}.{name}", architecture.gguf))? {
            Metadata::String(text) => Value::from(text.as_str()),
            Metadata::F32(number) => Value::from(*number),
            Metadata::F64(number) => Value::from(*number),
            Metadata::Bool(is_set) => Value::from(*is_set),
            _ => Value::from(gguf.number(&format!("{}.{name}", architecture.gguf))?),
        };
        Some(value)
    };
    let mut fields = Map::new();
    for (index, (name, key)) in GGUF_NAMES.iter().enumerate() {
        match read(name) {
            Some(value) => drop(fields.insert((*key).to_owned(), value)),
            None if index < REQUIRED => {
                return Err(gguf.fault(format!("the metadata has no {}.{name}", architecture.gguf)));
            }
            None => {}
        }
    }
    let tokens = gguf.value("tokenizer.ggml.tokens").and_then(|tokens| tokens.to_vec().ok()).map(Vec::len);
    let vocabulary = read("vocab_size").or(tokens.map(Value::from)).unwrap_or_else(|| json!(0));
    fields.insert("vocab_size".to_owned(), vocabulary);
    fields.entry("rms_norm_eps").or_insert_with(|| json!(1e-5));
    // Phi-3's files have 0 for no window.
    if fields.get("sliding_window") == Some(&json!(0)) {
        fields.insert("sliding_window".to_owned(), Value::Null);
    }
    if let (Windows::Never, Some(window)) = (architecture.windows, fields.get("sliding_window"))
        && !window.is_null()
    {
        // OLMo 3's files have a window, and name the architecture of OLMo 2.
        let name = architecture.gguf;
        return Err(gguf.fault(format!(
            "{name}.attention.sliding_window is {window}, and {name} is read without windows"
        )));
    }
    // GGUF has no name for this: the architectures with experts that are read all divide the weights by their sum.
    fields.insert("norm_topk_prob".to_owned(), json!(true));
    let size = |key: &str| fields.get(key).and_then(Value::as_u64).unwrap_or_default();
    if let Some(layers) = architecture.gguf_layers_with_width_scale {
        let scalar = match size("num_hidden_layers") as usize == layers {
            true => size("hidden_size") / size("num_attention_heads").max(1),
            false => size("head_dim"),
        };
        fields.insert("query_pre_attn_scalar".to_owned(), json!(scalar));
    }
    let mut rope: Map<String, Value> =
        GGUF_ROPE_NAMES.iter().filter_map(|(name, key)| Some(((*key).to_owned(), read(name)?))).collect();
    if rope.get("rope_type") == Some(&json!("none")) {
        rope.remove("rope_type");
    }
    if rope.contains_key("mscale_all_dim") {
        rope.insert("mscale".to_owned(), json!(1.0));
    } else if rope.get("rope_type") == Some(&json!("yarn"))
        && let [Some(written), Some(factor)] =
            ["attention_factor", "factor"].map(|key| rope.get(key).and_then(Value::as_f64))
    {
        // llama.cpp multiplies what the file has with yarn's own factor.
        let own = if factor > 1.0 { 0.1 * factor.ln() + 1.0 } else { 1.0 };
        rope.insert("attention_factor".to_owned(), json!(written * own));
    }
    let factors =
        ["short", "long"].map(|kind| (format!("{kind}_factor"), format!("rope_factors_{kind}.weight")));
    for (key, tensor) in factors.iter().filter(|(_, tensor)| gguf.has(tensor)) {
        let width =
            fields.get("rotary_dim").or(fields.get("head_dim")).and_then(Value::as_u64).unwrap_or_default();
        rope.insert(key.clone(), gguf.vector(tensor, width as usize / 2)?.into());
        rope.insert("rope_type".to_owned(), json!("longrope"));
    }
    let mut numbers = fields.iter().chain(&rope);
    if let Some((key, _)) = numbers.find(|(key, value)| value.is_null() && *key != "sliding_window") {
        return Err(gguf.fault(format!("the metadata's value for {key} is not finite")));
    }
    if !rope.is_empty() {
        fields.insert("rope_scaling".to_owned(), rope.into());
    }
    Ok(fields)
}

/// The description of an architecture with these values.
fn from_fields(
    architecture: &'static Architecture,
    fields: Map<String, Value>,
) -> Result<DecoderConfig, Refusal> {
    let defaults: Map<String, Value> = serde_json::from_str(architecture.defaults).unwrap_or_default();
    let mut all = json!({"hidden_act": "silu"});
    for (key, value) in defaults.into_iter().chain(fields) {
        // Gemma has both names, and the second counts, which comes later in the order of the names.
        let key = if key == "hidden_activation" { "hidden_act".to_owned() } else { key };
        if key != "hidden_act" || !value.is_null() {
            all[key] = value;
        }
    }
    let raw: RawConfig = serde_json::from_value(all).map_err(|error| error.to_string())?;
    raw.describe(architecture)?.checked()
}

impl RawConfig {
    fn describe(self, architecture: &'static Architecture) -> Result<DecoderConfig, Refusal> {
        let heads = self.num_attention_heads;
        let head_width = self.head_dim.unwrap_or(self.hidden_size / heads.max(1));
        at_most("head_dim", head_width, MAX_HEADS)?;
        at_most("the number of layers", self.num_hidden_layers, MAX_LAYERS)?;
        let is_gemma3 = architecture.name == "gemma3_text";
        if self.use_bidirectional_attention == Some(true) && !is_gemma3 {
            return Err(
                "use_bidirectional_attention is true, which is supported only for gemma3_text".to_owned()
            );
        }
        let (rotations, query_growth) = self.rotations(head_width)?;
        let attention_bias = self.attention_bias == Some(true);
        let scale = match (self.attention_multiplier, self.query_pre_attn_scalar) {
            (Some(multiplier), _) => multiplier,
            (None, Some(scalar)) => 1.0 / scalar.sqrt(),
            (None, None) => 1.0 / (head_width as f32).sqrt(),
        };
        Ok(DecoderConfig {
            architecture,
            layers: self.layers(architecture, rotations.len())?,
            hidden: self.hidden_size,
            inner: self.intermediate_size,
            heads,
            kv_heads: self.num_key_value_heads.unwrap_or(heads),
            head_width,
            vocabulary: self.vocab_size,
            // Some files have -1 for none.
            padding: self.pad_token_id.and_then(|id| u32::try_from(id).ok()),
            context: self.max_position_embeddings,
            eps: self.rms_norm_eps,
            biases: Biases {
                qkv: architecture.has_qkv_biases || attention_bias,
                out: attention_bias && !architecture.has_qkv_biases,
                feed_forward: self.mlp_bias == Some(true),
            },
            activation: self.activation(architecture)?,
            experts: self.experts()?,
            is_causal: !self.looks_both_ways(),
            rotations,
            query_growth,
            attention_scale: scale,
            attention_cap: self.attn_logit_softcapping.filter(|_| architecture.caps_scores),
            logit_cap: self.final_logit_softcapping,
            embedding_scale: match architecture.scales_embeddings {
                true => (self.hidden_size as f32).sqrt(),
                false => self.embedding_multiplier.unwrap_or(1.0),
            },
            residual_scale: self.residual_multiplier.unwrap_or(1.0),
            logit_divisor: self.logits_scaling.unwrap_or(1.0),
            is_tied: self.tie_word_embeddings == Some(true),
        })
    }

    fn activation(&self, architecture: &Architecture) -> Result<Activation, Refusal> {
        match self.hidden_act.as_deref().unwrap_or_default() {
            "silu" => Ok(Activation::Silu),
            "gelu" => Ok(architecture.gelu),
            "gelu_pytorch_tanh" | "gelu_new" => Ok(Activation::GeluTanh),
            other => Err(format!("hidden_act is {other:?}; silu, gelu and gelu_pytorch_tanh are supported")),
        }
    }

    fn experts(&self) -> Result<Option<Experts>, Refusal> {
        let Some(count) = self.num_experts.filter(|count| *count > 0) else { return Ok(None) };
        let used = self.num_experts_per_tok;
        let used =
            used.ok_or_else(|| format!("there are {count} experts, and num_experts_per_tok is missing"))?;
        let inner = self.moe_intermediate_size.unwrap_or(self.intermediate_size);
        Ok(Some(Experts { count, used, inner, is_normalised: self.norm_topk_prob == Some(true) }))
    }

    /// The rotations: one for all layers, or the first for layers without a window and the second for those with one.
    fn rotations(&self, head_width: usize) -> Result<(Vec<Rotation>, Option<QueryGrowth>), Refusal> {
        let fields = match (&self.rope_parameters, &self.rope_scaling) {
            (Some(parameters), Some(scaling))
                if scaling.iter().any(|(name, value)| parameters.get(name) != Some(value)) =>
            {
                // Libraries differ in which of them counts.
                let both = "config.json has rope_parameters and another rope_scaling; put the scaling into rope_parameters";
                return Err(both.to_owned());
            }
            (Some(fields), _) | (None, Some(fields)) => fields.clone(),
            (None, None) => Map::new(),
        };
        let read = |value: Value| {
            serde_json::from_value::<Option<Rope>>(value).map_err(|error| format!("rope_parameters: {error}"))
        };
        let [full, windowed] = ["full_attention", "sliding_attention"].map(|kind| fields.get(kind).cloned());
        let (full, windowed) = match (full, windowed) {
            (None, None) => (read(fields.into())?, None),
            (full, windowed) => (read(full.unwrap_or_default())?, read(windowed.unwrap_or_default())?),
        };
        let full = full.unwrap_or_default();
        let local = self.rope_local_base_freq.map(Rope::of_base);
        let all = std::iter::once(full.clone()).chain(windowed.or(local));
        let rotation = |mut rope: Rope| {
            let share = rope.partial_rotary_factor.or(self.partial_rotary_factor).unwrap_or(1.0);
            let width = self.rotary_dim.unwrap_or((head_width as f64 * share) as usize);
            if width == 0 || width > head_width || !width.is_multiple_of(2) {
                return Err(format!(
                    "{width} of the {head_width} numbers of a head cannot be rotated in pairs"
                ));
            }
            let outside = self.original_max_position_embeddings;
            rope.original_max_position_embeddings = outside.or(rope.original_max_position_embeddings);
            let theta = self.rope_theta.unwrap_or(10_000.0);
            rope.rotation(RopeBase { theta, width, context: self.max_position_embeddings })
        };
        let growth = full.llama_4_scaling_beta.filter(|beta| *beta != 0.0).map(|beta| {
            let original = full.original_max_position_embeddings.unwrap_or(self.max_position_embeddings);
            QueryGrowth { beta, original: original.max(1) }
        });
        Ok((all.map(rotation).collect::<Result<_, _>>()?, growth))
    }

    fn layers(&self, architecture: &Architecture, rotations: usize) -> Result<Vec<LayerConfig>, Refusal> {
        let count = self.num_hidden_layers;
        let is_windowed: Vec<bool> = match &self.layer_types {
            Some(types) if self.has_windows(architecture) => {
                if types.len() != count {
                    return Err(format!(
                        "layer_types has {} layers, and num_hidden_layers is {count}",
                        types.len()
                    ));
                }
                let is_windowed = |kind: &String| match kind.as_str() {
                    "sliding_attention" => Ok(true),
                    "full_attention" => Ok(false),
                    other => Err(format!(
                        "layer_types has {other:?}; sliding_attention and full_attention are supported"
                    )),
                };
                types.iter().map(is_windowed).collect::<Result<_, _>>()?
            }
            _ => self.default_windows(architecture)?,
        };
        // Windows are written otherwise where attention is not causal: as the largest distance, or for Gemma 3 as twice
        // that (modeling_gemma3.py and masking_utils.py of the transformers library).
        let window = self.sliding_window.map(|window| match self.use_bidirectional_attention {
            Some(true) => window / 2 + 1,
            _ if self.looks_both_ways() => window.saturating_add(1),
            _ => window,
        });
        let has_window = |index: usize| is_windowed[index].then_some(window).flatten();
        let is_rotated = |index: usize| match (&self.no_rope_layers, self.no_rope_layer_interval) {
            // 1 marks a layer that is rotated.
            (Some(layers), _) => layers.get(index).is_none_or(|layer| *layer != 0),
            (None, Some(interval)) if interval > 0 => !(index + 1).is_multiple_of(interval),
            _ => true,
        };
        let dense = self.mlp_only_layers.as_deref().unwrap_or_default();
        if dense.len() > count {
            return Err(format!(
                "mlp_only_layers has {} layers, and num_hidden_layers is {count}",
                dense.len()
            ));
        }
        let step = self.decoder_sparse_step.unwrap_or(1).max(1);
        let has_experts = |index: usize| {
            self.num_experts.is_some_and(|count| count > 0)
                && !dense.contains(&index)
                && (index + 1).is_multiple_of(step)
        };
        let layer = |index: usize| LayerConfig {
            window: has_window(index),
            rotation: is_rotated(index).then(|| usize::from(is_windowed[index]).min(rotations - 1)),
            has_experts: has_experts(index),
        };
        Ok((0..count).map(layer).collect())
    }

    /// Whether a token attends to the tokens on either side.
    fn looks_both_ways(&self) -> bool {
        self.use_bidirectional_attention == Some(true) || self.is_causal == Some(false)
    }

    /// Whether some layers may have a window.
    fn has_windows(&self, architecture: &Architecture) -> bool {
        match architecture.windows {
            Windows::Never => false,
            Windows::Always | Windows::Alternating => true,
            Windows::IfUsed => self.use_sliding_window == Some(true),
        }
    }

    /// Which layers have a window, in files without `layer_types`.
    fn default_windows(&self, architecture: &Architecture) -> Result<Vec<bool>, Refusal> {
        let layers = 0..self.num_hidden_layers;
        Ok(match architecture.windows {
            Windows::Never if self.use_sliding_window == Some(true) => {
                return Err("use_sliding_window is true, and only false is supported".to_owned());
            }
            Windows::Never => layers.map(|_| false).collect(),
            Windows::Always => layers.map(|_| true).collect(),
            Windows::IfUsed => {
                let first = self.max_window_layers.unwrap_or_default();
                layers.map(|layer| self.has_windows(architecture) && layer >= first).collect()
            }
            Windows::Alternating => {
                let pattern = self.sliding_window_pattern.unwrap_or_default();
                if pattern == 0 {
                    return Err("sliding_window_pattern is 0, and must be at least 1".to_owned());
                }
                layers.map(|layer| !(layer + 1).is_multiple_of(pattern)).collect()
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use candle_core::quantized::gguf_file;

    use super::*;

    fn read(model_type: &str, changes: &[(&str, Value)]) -> Result<DecoderConfig, String> {
        let mut fields = json!({
            "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4,
            "head_dim": 16, "vocab_size": 100, "max_position_embeddings": 512, "rms_norm_eps": 1e-5,
        });
        changes.iter().for_each(|(name, value)| fields[*name] = value.clone());
        let Value::Object(fields) = fields else { panic!("an object") };
        from_fields(named(model_type).unwrap(), fields)
    }

    fn windows(config: &DecoderConfig) -> Vec<Option<usize>> {
        config.layers.iter().map(|layer| layer.window).collect()
    }

    #[test]
    fn an_impossible_size_is_refused_before_memory_is_allocated() {
        assert_eq!(read("llama", &[]).unwrap().rotations[0].frequencies.len(), 8);
        for (name, message) in [
            ("hidden_size", "the width is"),
            ("intermediate_size", "the width of the feed-forward sublayer is"),
            ("num_hidden_layers", "the number of layers is"),
            ("num_attention_heads", "the number of heads is"),
            ("num_key_value_heads", "the number of heads of keys is"),
            ("head_dim", "head_dim is"),
            ("vocab_size", "the vocabulary is"),
            ("max_position_embeddings", "the context is"),
        ] {
            for size in [1_u64 << 32, u64::MAX] {
                let error = read("llama", &[(name, size.into())]).unwrap_err();
                assert!(error.starts_with(message) && error.ends_with("is read"), "{name}: {error}");
            }
        }
    }

    #[test]
    fn what_the_description_does_not_have_is_refused_by_name() {
        let experts = [("num_experts", json!(4)), ("num_experts_per_tok", json!(5))];
        for (model_type, changes, message) in [
            ("llama", vec![("hidden_act", json!("relu2"))], "hidden_act is \"relu2\""),
            ("llama", vec![("use_sliding_window", json!(true))], "use_sliding_window is true"),
            (
                "llama",
                vec![("rope_scaling", json!({"type": "dynamic", "factor": 2}))],
                "rope scaling \"dynamic\"",
            ),
            ("llama", vec![("rope_scaling", json!({"type": "linear"}))], "rope scaling linear lacks factor"),
            ("llama", vec![("rope_scaling", json!({"type": "linear", "factor": 0}))], "factor is 0"),
            (
                "phi3",
                vec![("rope_scaling", json!({"type": "longrope", "short_factor": [1.0]}))],
                "long_factor",
            ),
            ("mistral", vec![("sliding_window", json!(0))], "sliding_window is 0"),
            ("gemma2", vec![("use_bidirectional_attention", json!(true))], "use_bidirectional_attention"),
            ("gemma2", vec![("layer_types", json!(["sliding_attention"]))], "layer_types has 1 layers"),
            ("gemma2", vec![("layer_types", json!(vec!["chunked_attention"; 6]))], "chunked_attention"),
            ("qwen3_moe", experts.to_vec(), "num_experts_per_tok is 5, and num_experts 4"),
            ("phi3", vec![("partial_rotary_factor", json!(0.2))], "3 of the 16 numbers of a head"),
            (
                "qwen3_moe",
                vec![
                    ("num_experts", json!(4)),
                    ("num_experts_per_tok", json!(1)),
                    ("mlp_only_layers", json!(vec![1; 7])),
                ],
                "mlp_only_layers has 7 layers",
            ),
            (
                "qwen3",
                vec![
                    ("rope_parameters", json!({"rope_type": "default", "rope_theta": 1e6})),
                    ("rope_scaling", json!({"rope_type": "yarn", "factor": 4.0})),
                ],
                "rope_parameters and another rope_scaling",
            ),
        ] {
            let error = read(model_type, &changes).unwrap_err();
            assert!(error.contains(message), "{model_type} {changes:?}: {error}");
        }
    }

    #[test]
    fn windows_are_where_the_architecture_or_the_file_has_them() {
        let (none, some) = (None, Some(24));
        let window = ("sliding_window", json!(24));
        for (model_type, changes, expected) in [
            ("llama", vec![window.clone()], [none; 6]),
            ("mistral", vec![window.clone()], [some; 6]),
            ("mistral", vec![("sliding_window", Value::Null)], [none; 6]),
            ("mistral", vec![], [Some(4096); 6]),
            ("qwen2", vec![window.clone(), ("max_window_layers", json!(2))], [none; 6]),
            (
                "qwen2",
                vec![window.clone(), ("use_sliding_window", json!(true)), ("max_window_layers", json!(4))],
                [none, none, none, none, some, some],
            ),
            // Without max_window_layers the library takes 28.
            ("qwen2", vec![window.clone(), ("use_sliding_window", json!(true))], [none; 6]),
            ("gemma2", vec![window.clone()], [some, none, some, none, some, none]),
            ("gemma3_text", vec![window.clone()], [some, some, some, some, some, none]),
        ] {
            assert_eq!(windows(&read(model_type, &changes).unwrap()), expected, "{model_type} {changes:?}");
        }
        // 0 is no window where windows are not in use.
        let unused = [("sliding_window", json!(0)), ("use_sliding_window", json!(false))];
        assert_eq!(windows(&read("qwen3", &unused).unwrap()), [none; 6]);
        assert_eq!(read("gemma3_text", std::slice::from_ref(&window)).unwrap().window(), None);
        assert_eq!(read("mistral", &[window]).unwrap().window(), some);
    }

    #[test]
    fn scores_are_bounded_where_the_reference_library_bounds_them() {
        let caps = [("attn_logit_softcapping", json!(3.0)), ("final_logit_softcapping", json!(12.0))];
        let of = |name| read(name, &caps).map(|config| (config.attention_cap, config.logit_cap)).unwrap();
        assert_eq!(of("gemma2"), (Some(3.0), Some(12.0)));
        assert_eq!(of("gemma3_text"), (None, Some(12.0)));
    }

    #[test]
    fn windows_of_attention_both_ways_are_distances() {
        let both_ways = ("use_bidirectional_attention", json!(true));
        let gemma = read("gemma3_text", &[both_ways, ("sliding_window", json!(512))]).unwrap();
        assert_eq!(
            (gemma.is_causal, gemma.layers[0].window, gemma.layers[5].window),
            (false, Some(257), None)
        );
        let not_causal = ("is_causal", json!(false));
        let mistral = read("mistral", &[not_causal.clone(), ("sliding_window", json!(24))]).unwrap();
        assert_eq!((mistral.is_causal, mistral.layers[0].window), (false, Some(25)));
        let qwen = read("qwen2", &[not_causal, ("use_sliding_window", json!(false))]).unwrap();
        assert_eq!((qwen.is_causal, qwen.layers[0].window), (false, None));
        assert!(read("qwen2", &[("is_causal", json!(true))]).unwrap().is_causal);
    }

    #[test]
    fn values_that_published_files_leave_out_are_those_of_the_architecture() {
        // As in google/gemma-3-4b-it.
        let mut fields = Map::new();
        for (name, value) in [
            ("hidden_size", json!(2560)),
            ("intermediate_size", json!(10240)),
            ("num_hidden_layers", json!(34)),
            ("rope_scaling", json!({"factor": 8.0, "rope_type": "linear"})),
            ("sliding_window", json!(1024)),
        ] {
            fields.insert(name.to_owned(), value);
        }
        let config = from_fields(named("gemma3_text").unwrap(), fields).unwrap();
        assert_eq!((config.heads, config.kv_heads, config.head_width), (8, 4, 256));
        assert_eq!((config.vocabulary, config.context, config.is_tied), (262_208, 131_072, true));
        let [full, local] = &*config.rotations else { panic!("{:?}", config.rotations) };
        assert_eq!((full.frequencies[0], local.frequencies[0]), (0.125, 1.0));
        assert_eq!(config.attention_scale, 1.0 / 16.0);
    }

    #[test]
    fn an_impossible_size_in_a_gguf_file_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("m.gguf");
        let sizes = GGUF_NAMES[..REQUIRED].iter().map(|(name, _)| *name).chain(["vocab_size"]);
        let sizes: Vec<String> = sizes.map(|name| format!("llama.{name}")).collect();
        let read_with = |impossible: &str, more: &[(&str, &gguf_file::Value)]| {
            let value = |name: &String| match name.ends_with(impossible) {
                true => gguf_file::Value::U32(u32::MAX),
                false => gguf_file::Value::U32(4),
            };
            let architecture = gguf_file::Value::String("llama".to_owned());
            let values: Vec<(&String, gguf_file::Value)> =
                sizes.iter().map(|name| (name, value(name))).collect();
            let values: Vec<_> = values.iter().map(|(name, value)| (name.as_str(), value)).collect();
            let others = [
                ("general.architecture", &architecture),
                ("llama.attention.key_length", &gguf_file::Value::U32(2)),
            ];
            let values = [&values[..], &others, more].concat();
            gguf_file::write(&mut std::fs::File::create(&path).unwrap(), &values, &[]).unwrap();
            DecoderConfig::from_gguf(&Gguf::read(&path).unwrap()).map_err(|error| error.to_string())
        };
        let read = |impossible: &str| read_with(impossible, &[]);
        assert_eq!(read("none").unwrap().vocabulary, 4);
        for name in &sizes {
            let error = read(name).unwrap_err();
            assert!(error.ends_with("is read"), "{name}: {error}");
        }
        let window = ("llama.attention.sliding_window", &gguf_file::Value::U32(4096));
        let error = read_with("none", &[window]).unwrap_err();
        assert!(error.contains("llama.attention.sliding_window is 4096"), "{error}");
    }
}
