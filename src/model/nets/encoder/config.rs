//! Reads the network's `config.json`: architecture and sizes. Decides which properties are supported. Refuses a
//! property with which the results would differ from those of the reference implementation.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

use crate::model::LoadError;
use crate::model::load::ModelFiles;
use crate::model::nets::names;
use crate::model::ops::Activation;

/// The architectures. They differ in the names of tensors and in how positions enter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// `bert`: with position embeddings.
    Bert,
    /// `roberta`, `xlm-roberta`, `camembert`: positions start after the padding id.
    Roberta,
    /// `distilbert`: as BERT, without token types.
    DistilBert,
    /// `mpnet`: as RoBERTa, with a relative attention bias.
    MpNet,
    /// `nomic_bert`: rotated queries and keys, gated feed-forward, no biases.
    Nomic,
    /// `modernbert`: as Nomic, but norms come before their sublayers, and most layers attend only to near tokens.
    ModernBert,
    /// `electra`: as BERT. The embeddings may be narrower than the layers.
    Electra,
    /// `t5`: the encoder of T5. Norms without means come before their sublayers; a relative attention bias and no biases
    /// of linear layers.
    T5,
    /// `deberta-v2`, also DeBERTa v3: as BERT, with disentangled attention.
    Deberta,
}

impl Family {
    /// The architectures by `model_type`.
    pub const ALL: [(&'static str, Self); 11] = [
        ("bert", Self::Bert),
        ("roberta", Self::Roberta),
        ("xlm-roberta", Self::Roberta),
        ("camembert", Self::Roberta),
        ("distilbert", Self::DistilBert),
        ("mpnet", Self::MpNet),
        ("nomic_bert", Self::Nomic),
        ("modernbert", Self::ModernBert),
        ("electra", Self::Electra),
        ("t5", Self::T5),
        ("deberta-v2", Self::Deberta),
    ];
    /// The names of the architectures.
    pub const NAMES: [&'static str; 11] = names(&Self::ALL);

    /// The prefix of tensor names if the file was saved from a model with a head.
    pub fn base(self) -> &'static str {
        match self {
            Self::Bert => "bert",
            Self::Roberta => "roberta",
            Self::DistilBert => "distilbert",
            Self::MpNet => "mpnet",
            Self::Nomic | Self::ModernBert => "model",
            Self::Electra => "electra",
            // The published files have no prefix.
            Self::T5 => "transformer",
            Self::Deberta => "deberta",
        }
    }

    /// The name of the token embeddings.
    pub fn token_embeddings(self) -> &'static str {
        match self {
            Self::ModernBert => "embeddings.tok_embeddings.weight",
            Self::T5 => "shared.weight",
            _ => "embeddings.word_embeddings.weight",
        }
    }
}

/// The largest sizes that are accepted, far above those of any model. Some sizes are not confirmed by the shape of any
/// tensor, and some determine how much memory is allocated.
const MAX_LAYERS: usize = 1 << 12;
const MAX_WIDTH: usize = 1 << 20;
const MAX_POSITIONS: usize = 1 << 17;
/// The vectors of relative positions are computed for each layer. This is the largest number of their numbers in all
/// layers: 1 GiB.
const MAX_RELATIVE_NUMBERS: usize = 1 << 28;

/// A network's sizes.
#[derive(Clone, Debug)]
pub struct NetworkConfig {
    /// Its architecture.
    pub family: Family,
    /// Width of a token's vector.
    pub hidden: usize,
    /// The width of the embeddings. If it is not that of a token's vector, a linear layer projects them.
    pub embedding: usize,
    /// Blocks of attention and feed-forward.
    pub layers: usize,
    /// Heads in a block.
    pub heads: usize,
    /// The inner width of a feed-forward sublayer.
    pub inner: usize,
    /// Number of token ids.
    pub vocabulary: usize,
    /// The number of position embeddings; without them, the largest number of tokens of a text.
    pub positions: usize,
    /// The padding id, for families whose positions start after this number.
    pub padding: Option<u32>,
    /// The number of token type embeddings; 0 if there are none.
    pub token_types: usize,
    /// Added to the variance in LayerNorm.
    pub eps: f32,
    /// The activation of a feed-forward sublayer.
    pub activation: Activation,
    /// Whether a feed-forward sublayer has a gate.
    pub is_gated: bool,
    /// The positional terms of each layer.
    pub position_terms: Vec<LayerPositionTerms>,
    /// Whether a head for labels takes the mean of the tokens' vectors instead of the first.
    pub head_uses_mean: bool,
    /// The properties of DeBERTa.
    pub deberta: Option<Deberta>,
}

/// The properties that only DeBERTa has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deberta {
    /// Whether position embeddings are added to those of the tokens (`position_biased_input`).
    pub has_positions: bool,
    /// The number of terms of a score: scores are divided by the root of this number times the width of a head.
    pub score_terms: usize,
    /// Relative positions, if a score depends on them.
    pub relative: Option<RelativePositions>,
}

/// The vectors of relative positions, by which scores depend on the distance of a token from another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RelativePositions {
    /// Whether queries are multiplied by position keys (`c2p` in `pos_att_type`).
    pub has_keys: bool,
    /// Whether keys are multiplied by position queries (`p2c` in `pos_att_type`).
    pub has_queries: bool,
    /// Whether the layer's own projections make them (`share_att_key`); otherwise there are further projections.
    pub shares_projections: bool,
    /// Half the number of vectors: those of tokens before and of tokens after another one.
    pub span: usize,
    /// The distance from which on all tokens share a vector, if far tokens share vectors (`position_buckets`).
    pub farthest: Option<usize>,
    /// Whether LayerNorm is applied to the vectors before the projections (`norm_rel_ebd`).
    pub has_norm: bool,
}

/// The positional terms of a layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct LayerPositionTerms {
    /// The base (theta) of the rotary embedding.
    pub rotary: Option<f64>,
    /// The sliding window: the largest distance of a token that is attended to.
    pub window: Option<usize>,
}

/// `config.json`, with the model's files and name for errors.
struct RawConfig<'a> {
    fields: Map<String, Value>,
    files: &'a ModelFiles,
    source: &'a str,
}

impl RawConfig<'_> {
    /// The first of these fields that is present.
    fn optional<T: DeserializeOwned>(&self, names: &[&str]) -> Result<Option<T>, LoadError> {
        let found =
            names.iter().find_map(|name| Some((name, self.fields.get(*name).filter(|it| !it.is_null())?)));
        let Some((name, value)) = found else { return Ok(None) };
        serde_json::from_value(value.clone())
            .map(Some)
            .map_err(|error| self.fault(format!("{name} is {value}: {error}")))
    }

    fn required<T: DeserializeOwned>(&self, names: &[&str]) -> Result<T, LoadError> {
        self.optional(names)?.ok_or_else(|| self.fault(format!("{} is missing", names[0])))
    }

    /// Refuses a field with another value than `supported`. An absent field counts as `supported`.
    fn only(&self, name: &str, supported: &Value) -> Result<(), LoadError> {
        match self.fields.get(name) {
            Some(value) if value != supported && !value.is_null() => {
                Err(self.refused(format!("{name} is {value}; {supported} is supported")))
            }
            _ => Ok(()),
        }
    }

    fn fault(&self, reason: String) -> LoadError {
        match self.files.required("config.json") {
            Ok(path) => LoadError::File { path, reason },
            Err(error) => error,
        }
    }

    fn refused(&self, reason: String) -> LoadError {
        LoadError::Unsupported { model: self.source.into(), reason }
    }
}

impl NetworkConfig {
    /// Reads the `config.json` of the model `source`.
    ///
    /// # Errors
    /// [`LoadError::File`] for an invalid file, [`LoadError::Unsupported`] naming a property that is not
    /// supported.
    pub fn read(files: &ModelFiles, source: &str) -> Result<Self, LoadError> {
        let raw = RawConfig { fields: files.required_json("config.json")?, files, source };
        let kind: Option<String> = raw.optional(&["model_type"])?;
        let kind = kind.unwrap_or_else(|| "(none)".to_owned());
        let family = Family::ALL.iter().find(|(name, _)| *name == kind).map(|(_, family)| *family);
        let Some(family) = family else {
            let known = Family::ALL.map(|(name, _)| name).join(", ");
            return Err(raw.refused(format!("model_type is {kind:?}; supported are {known}")));
        };
        raw.only("is_decoder", &false.into())?;
        // The number of layers is checked before the rest, since the next step allocates a list with an entry for each
        // layer.
        let layers: Option<usize> =
            raw.optional(&["num_hidden_layers", "n_layers", "n_layer", "num_layers"])?;
        if let Some(layers) = layers.filter(|layers| *layers > MAX_LAYERS) {
            return Err(raw.fault(format!("it has {layers} layers; at most {MAX_LAYERS} are read")));
        }
        // Nomic's config uses GPT-2's names, and gives other meanings to the usual names.
        let config = match family {
            Family::Nomic => nomic(&raw),
            Family::T5 => t5(&raw),
            _ => usual(&raw, family),
        }?;
        config.check().map_err(|reason| raw.fault(reason))?;
        Ok(config)
    }

    /// Whether there are position embeddings.
    pub fn has_positions(&self) -> bool {
        match self.deberta {
            Some(deberta) => deberta.has_positions,
            None => !matches!(self.family, Family::Nomic | Family::ModernBert | Family::T5),
        }
    }

    /// The largest number of tokens of a text, by the number of positions.
    pub fn max_tokens(&self) -> usize {
        self.positions.saturating_sub(self.padding.map_or(0, |id| id as usize + 1))
    }

    fn check(&self) -> Result<(), String> {
        let Self { hidden, heads, positions, .. } = *self;
        for (name, size, max) in [
            ("the width", hidden, MAX_WIDTH),
            ("embedding_size", self.embedding, MAX_WIDTH),
            ("the width of the feed-forward sublayer", self.inner, MAX_WIDTH),
            ("max_position_embeddings", positions, MAX_POSITIONS),
        ] {
            if size > max {
                return Err(format!("{name} is {size}; at most {max} is read"));
            }
        }
        if !self.eps.is_finite() || self.eps < 0.0 {
            return Err(format!("the epsilon of the norms is {}; it must be a number from 0", self.eps));
        }
        if hidden == 0 || heads == 0 || hidden % heads != 0 {
            return Err(format!("hidden_size {hidden} does not divide into {heads} heads"));
        }
        if let Some(relative) = self.deberta.and_then(|deberta| deberta.relative) {
            relative.check(self.layers, hidden)?;
        }
        if self.position_terms.iter().any(|it| it.rotary.is_some()) && hidden / heads % 2 != 0 {
            return Err(format!("heads of {} numbers cannot be rotated in pairs", hidden / heads));
        }
        if self.max_tokens() == 0 {
            return Err(format!("max_position_embeddings is {positions}: no room for a text"));
        }
        Ok(())
    }
}

fn usual(raw: &RawConfig<'_>, family: Family) -> Result<NetworkConfig, LoadError> {
    raw.only("position_embedding_type", &"absolute".into())?;
    let layers = raw.required(&["num_hidden_layers", "n_layers"])?;
    let padding = match family {
        Family::Roberta => Some(raw.optional(&["pad_token_id"])?.unwrap_or(1)),
        // The reference implementation has this number in its code.
        Family::MpNet => Some(1),
        _ => None,
    };
    let token_types = match family {
        Family::Bert | Family::Roberta | Family::Electra | Family::Deberta => {
            raw.optional(&["type_vocab_size"])?.unwrap_or(0)
        }
        _ => 0,
    };
    let activation: Option<String> = raw.optional(&["hidden_act", "activation", "hidden_activation"])?;
    let (eps, position_terms) = if family == Family::ModernBert {
        for bias in ["attention_bias", "mlp_bias", "norm_bias", "classifier_bias"] {
            raw.only(bias, &false.into())?;
        }
        // The heads for labels and for masked tokens have this activation.
        raw.only("classifier_activation", &"gelu".into())?;
        (raw.optional(&["norm_eps"])?.unwrap_or(1e-5), modern_layers(raw, layers)?)
    } else {
        let usual_eps = if family == Family::Deberta { 1e-7 } else { 1e-12 };
        let eps = raw.optional(&["layer_norm_eps"])?.unwrap_or(usual_eps);
        (eps, vec![LayerPositionTerms::default(); layers])
    };
    let pooling: Option<String> = raw.optional(&["classifier_pooling"])?;
    let hidden = raw.required(&["hidden_size", "dim"])?;
    // The reference implementation has these defaults in its code.
    let embedding = match family {
        Family::Electra => raw.optional(&["embedding_size"])?.unwrap_or(128),
        Family::Deberta => raw.optional(&["embedding_size"])?.unwrap_or(hidden),
        _ => hidden,
    };
    let heads = raw.required(&["num_attention_heads", "n_heads"])?;
    Ok(NetworkConfig {
        family,
        hidden,
        embedding,
        layers,
        heads,
        inner: raw.required(&["intermediate_size", "hidden_dim"])?,
        vocabulary: raw.required(&["vocab_size"])?,
        positions: raw.required(&["max_position_embeddings"])?,
        padding,
        token_types,
        eps,
        activation: match activation.as_deref() {
            None | Some("gelu") => Activation::Gelu,
            Some("gelu_new" | "gelu_pytorch_tanh") => Activation::GeluTanh,
            Some("relu") => Activation::Relu,
            Some(other) => {
                let known = "gelu, gelu_new, gelu_pytorch_tanh and relu are supported";
                return Err(raw.refused(format!("hidden_act is {other:?}; {known}")));
            }
        },
        is_gated: family == Family::ModernBert,
        position_terms,
        head_uses_mean: pooling.as_deref() == Some("mean"),
        deberta: (family == Family::Deberta).then(|| deberta(raw, hidden, heads)).transpose()?,
    })
}

/// A list of names, in one text with `|` between them, or as a list of texts.
#[derive(Deserialize)]
#[serde(untagged)]
enum Names {
    One(String),
    Several(Vec<String>),
}

/// Reads DeBERTa's own properties. A property that is absent has the value that the transformers library gives it.
fn deberta(raw: &RawConfig<'_>, hidden: usize, heads: usize) -> Result<Deberta, LoadError> {
    raw.only("conv_kernel_size", &0.into())?;
    raw.only("pooler_hidden_act", &"gelu".into())?;
    raw.only("pooler_hidden_size", &hidden.into())?;
    raw.only("attention_head_size", &(hidden / heads.max(1)).into())?;
    let names = |field: &str, known: [&str; 2]| {
        let names = match raw.optional(&[field])? {
            None => Vec::new(),
            Some(Names::One(names)) => names.split('|').map(|name| name.trim().to_lowercase()).collect(),
            Some(Names::Several(names)) => names,
        };
        match names.iter().find(|name| !known.contains(&&***name)) {
            None => Ok(known.map(|name| names.iter().any(|found| found == name))),
            Some(other) => {
                let [first, second] = known;
                Err(raw.refused(format!("{field} has {other:?}; {first} and {second} are supported")))
            }
        }
    };
    let [has_keys, has_queries] = names("pos_att_type", ["c2p", "p2c"])?;
    let [has_norm, _] = names("norm_rel_ebd", ["layer_norm", "none"])?;
    let is_relative = raw.optional(&["relative_attention"])?.unwrap_or(false);
    // Numbers below 1 mean that the property is absent.
    let number = |field: &str| {
        let number: Option<i64> = raw.optional(&[field])?;
        Ok::<_, LoadError>(
            number.and_then(|number| usize::try_from(number).ok()).filter(|number| *number > 0),
        )
    };
    let farthest = match number("max_relative_positions")? {
        Some(farthest) => farthest,
        None => raw.required(&["max_position_embeddings"])?,
    };
    let buckets = number("position_buckets")?;
    let relative = RelativePositions {
        has_keys,
        has_queries,
        shares_projections: raw.optional(&["share_att_key"])?.unwrap_or(false),
        span: buckets.unwrap_or(farthest),
        farthest: buckets.map(|_| farthest),
        has_norm,
    };
    Ok(Deberta {
        has_positions: raw.optional(&["position_biased_input"])?.unwrap_or(true),
        score_terms: 1 + usize::from(has_keys) + usize::from(has_queries),
        relative: (is_relative && (has_keys || has_queries)).then_some(relative),
    })
}

impl RelativePositions {
    fn check(self, layers: usize, hidden: usize) -> Result<(), String> {
        let Self { span, farthest, .. } = self;
        let numbers = [4, layers, hidden].iter().try_fold(span, |product, size| product.checked_mul(*size));
        if numbers.is_none_or(|numbers| numbers > MAX_RELATIVE_NUMBERS) {
            return Err(format!(
                "max_relative_positions or position_buckets is {span}: {layers} layers would have more than \
                 {MAX_RELATIVE_NUMBERS} numbers for relative positions"
            ));
        }
        match farthest {
            // The distances from half the buckets to the farthest one share the other buckets.
            Some(farthest) if span < 2 || farthest < span / 2 + 2 => Err(format!(
                "position_buckets is {span}, and max_relative_positions {farthest}: no room for buckets"
            )),
            _ => Ok(()),
        }
    }
}

/// Returns ModernBERT's layers, from a file written by version 4 or 5 of the transformers library. One layer of every
/// `global_attn_every_n_layers` attends to the whole text, the others to a window.
fn modern_layers(raw: &RawConfig<'_>, layers: usize) -> Result<Vec<LayerPositionTerms>, LoadError> {
    let every = raw.optional(&["global_attn_every_n_layers"])?.unwrap_or(3_usize).max(1);
    let kinds: Option<Vec<String>> = raw.optional(&["layer_types"])?;
    let window = raw.optional(&["local_attention"])?.unwrap_or(128_usize) / 2;
    let parameters: Value = raw.optional(&["rope_parameters"])?.unwrap_or_default();
    let theta = |kind: &str, older: &str, default: f64| {
        let newer = parameters[kind]["rope_theta"].as_f64();
        Ok::<_, LoadError>(newer.or(raw.optional(&[older])?).unwrap_or(default))
    };
    let global = LayerPositionTerms {
        rotary: Some(theta("full_attention", "global_rope_theta", 160_000.0)?),
        window: None,
    };
    let local = LayerPositionTerms {
        rotary: Some(theta("sliding_attention", "local_rope_theta", 10_000.0)?),
        window: Some(window),
    };
    let is_global = |index: usize| match kinds.as_ref().and_then(|kinds| kinds.get(index)) {
        Some(kind) => kind == "full_attention",
        None => index.is_multiple_of(every),
    };
    Ok((0..layers).map(|index| if is_global(index) { global } else { local }).collect())
}

fn nomic(raw: &RawConfig<'_>) -> Result<NetworkConfig, LoadError> {
    let no = Value::from(false);
    for name in ["prenorm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "use_rms_norm", "causal"] {
        raw.only(name, &no)?;
    }
    for name in ["parallel_block", "rotary_emb_interleaved"] {
        raw.only(name, &no)?;
    }
    raw.only("activation_function", &"swiglu".into())?;
    raw.only("rotary_emb_fraction", &1.0.into())?;
    raw.only("rotary_scaling_factor", &Value::Null)?;
    let (layers, hidden) = (raw.required(&["n_layer"])?, raw.required(&["n_embd"])?);
    let rotary = Some(raw.optional(&["rotary_emb_base"])?.unwrap_or(10_000.0));
    Ok(NetworkConfig {
        family: Family::Nomic,
        hidden,
        embedding: hidden,
        layers,
        heads: raw.required(&["n_head"])?,
        inner: raw.required(&["n_inner"])?,
        vocabulary: raw.required(&["vocab_size"])?,
        positions: raw.required(&["n_positions"])?,
        padding: None,
        token_types: raw.optional(&["type_vocab_size"])?.unwrap_or(0),
        eps: raw.optional(&["layer_norm_epsilon"])?.unwrap_or(1e-12),
        activation: Activation::Silu,
        is_gated: true,
        position_terms: vec![LayerPositionTerms { rotary, window: None }; layers],
        head_uses_mean: false,
        deberta: None,
    })
}

/// The number of buckets of distances, and the first distance of the last bucket, of MPNet and T5.
pub const DISTANCE_BUCKETS: usize = 32;
const MAX_DISTANCE: usize = 128;

fn t5(raw: &RawConfig<'_>) -> Result<NetworkConfig, LoadError> {
    raw.only("relative_attention_num_buckets", &DISTANCE_BUCKETS.into())?;
    raw.only("relative_attention_max_distance", &MAX_DISTANCE.into())?;
    let layers = raw.required(&["num_layers"])?;
    let hidden: usize = raw.required(&["d_model"])?;
    let (heads, width): (usize, usize) = (raw.required(&["num_heads"])?, raw.required(&["d_kv"])?);
    if heads.checked_mul(width) != Some(hidden) {
        let reason =
            format!("num_heads × d_kv is {heads} × {width}; only d_model, which is {hidden}, is supported");
        return Err(raw.refused(reason));
    }
    let feed_forward: Option<String> = raw.optional(&["feed_forward_proj"])?;
    let (is_gated, activation) = match feed_forward.as_deref() {
        None | Some("relu") => (false, Activation::Relu),
        // The reference implementation takes the approximation by tanh for this name.
        Some("gated-gelu") => (true, Activation::GeluTanh),
        Some("gated-silu") => (true, Activation::Silu),
        Some(other) => {
            let known = "relu, gated-gelu and gated-silu are supported";
            return Err(raw.refused(format!("feed_forward_proj is {other:?}; {known}")));
        }
    };
    Ok(NetworkConfig {
        family: Family::T5,
        hidden,
        embedding: hidden,
        layers,
        heads,
        inner: raw.required(&["d_ff"])?,
        vocabulary: raw.required(&["vocab_size"])?,
        // The network has no limit. T5 was trained with texts of this length.
        positions: raw.optional(&["n_positions"])?.unwrap_or(512),
        padding: None,
        token_types: 0,
        eps: raw.optional(&["layer_norm_epsilon"])?.unwrap_or(1e-6),
        activation,
        is_gated,
        position_terms: vec![LayerPositionTerms::default(); layers],
        head_uses_mean: false,
        deberta: None,
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_property_of_deberta_that_is_not_computed_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().to_str().unwrap();
        let read = |change: (&str, Value)| {
            let mut config = json!({
                "model_type": "deberta-v2", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
                "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512,
                "relative_attention": true, "position_buckets": 256, "max_relative_positions": -1,
                "pos_att_type": "p2c|c2p", "norm_rel_ebd": "layer_norm", "conv_kernel_size": 0,
            });
            config[change.0] = change.1;
            std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
            NetworkConfig::read(&ModelFiles::locate(source).unwrap(), source)
                .map_err(|error| error.to_string())
        };
        let relative = read(("type_vocab_size", 0.into())).unwrap().deberta.unwrap().relative.unwrap();
        assert_eq!((relative.span, relative.farthest, relative.has_norm), (256, Some(512), true));
        let relative = read(("position_buckets", (-1).into())).unwrap().deberta.unwrap().relative.unwrap();
        assert_eq!((relative.span, relative.farthest), (512, None));
        for (name, value) in [
            ("conv_kernel_size", json!(3)),
            ("pos_att_type", json!(["c2p", "p2p"])),
            ("norm_rel_ebd", json!("batch_norm")),
            ("pooler_hidden_act", json!("tanh")),
            ("pooler_hidden_size", json!(32)),
            ("attention_head_size", json!(32)),
            ("embedding_size", json!(1_u64 << 40)),
            ("position_buckets", json!(1_u64 << 40)),
            ("max_relative_positions", json!(100)),
        ] {
            let error = read((name, value.clone())).unwrap_err();
            let named = value.as_array().map_or(&value, |names| &names[1]).to_string();
            assert!(error.contains(name) && error.contains(&named), "{name}: {error}");
        }
    }

    #[test]
    fn an_impossible_size_is_refused_before_memory_is_allocated() {
        let t5 = json!({
            "model_type": "t5", "d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 2, "vocab_size": 100,
        });
        let folder = tempfile::tempdir().unwrap();
        let source = folder.path().to_str().unwrap();
        let read = |config: &Value| {
            std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();
            NetworkConfig::read(&ModelFiles::locate(source).unwrap(), source)
                .map_err(|error| error.to_string())
        };
        let modern = json!({
            "model_type": "modernbert", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
            "num_attention_heads": 4, "vocab_size": 100, "max_position_embeddings": 512,
        });
        let nomic = json!({
            "model_type": "nomic_bert", "n_embd": 64, "n_inner": 128, "n_layer": 2, "n_head": 4, "vocab_size": 100,
            "n_positions": 512, "activation_function": "swiglu", "rotary_emb_fraction": 1.0,
        });
        for (config, names) in [
            (modern, ["hidden_size", "intermediate_size", "num_hidden_layers", "max_position_embeddings"]),
            (nomic, ["n_embd", "n_inner", "n_layer", "n_positions"]),
            (t5, ["d_ff", "num_layers", "n_positions", "d_ff"]),
        ] {
            assert!(read(&config).is_ok());
            for name in names {
                let mut config = config.clone();
                config[name] = (1_u64 << 40).into();
                let error = read(&config).unwrap_err();
                assert!(error.contains("1099511627776") && error.contains("read"), "{name}: {error}");
            }
        }
    }
}
