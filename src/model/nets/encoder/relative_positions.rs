//! DeBERTa's relative positions. Decides which vector of relative positions belongs to each distance, and projects
//! these vectors for each layer. Both depend on the weights alone, so they are computed on the host when the model is
//! loaded. Owns the vectors before their projections.

use std::sync::Arc;

use super::config::{NetworkConfig, RelativePositions};
use crate::model::LoadError;
use crate::model::load::weights::Weights;
use crate::model::ops::{Disentangled, Panels, layer_norm, multiply_rows};

type Loaded<T> = Result<T, LoadError>;

/// Reads the vectors of relative positions of each layer.
pub struct RelativeReader<'a> {
    weights: &'a Weights,
    config: &'a NetworkConfig,
    relative: RelativePositions,
    score_terms: usize,
    /// The vectors before their projections, `[2·span, hidden]`, packed as the right matrix of a product.
    vectors: Panels,
    /// The index of the vector of each distance, from -(`max_tokens` - 1) on.
    by_distance: Arc<[u32]>,
}

impl<'a> RelativeReader<'a> {
    /// Reads the vectors; none if the network has no relative positions.
    ///
    /// # Errors
    /// [`LoadError::File`] naming a tensor that is missing or has another shape.
    pub fn new(weights: &'a Weights, config: &'a NetworkConfig) -> Loaded<Option<Self>> {
        let Some((relative, score_terms)) =
            config.deberta.and_then(|deberta| Some((deberta.relative?, deberta.score_terms)))
        else {
            return Ok(None);
        };
        let (hidden, prefix) = (config.hidden, weights.prefix());
        let name = format!("{prefix}encoder.rel_embeddings.weight");
        let mut vectors = weights.values(&name, &[2 * relative.span, hidden])?;
        if relative.has_norm {
            let parameter = |name| weights.values(&format!("{prefix}encoder.LayerNorm.{name}"), &[hidden]);
            let mut normed = vec![0.0; vectors.len()];
            layer_norm(&vectors, &parameter("weight")?, &parameter("bias")?, config.eps, &mut normed);
            vectors = normed;
        }
        let last = config.max_tokens() as i64 - 1;
        let by_distance = (-last..=last).map(|distance| index_of(relative, distance)).collect();
        let vectors = Panels::new(&vectors, hidden);
        Ok(Some(Self { weights, config, relative, score_terms, vectors, by_distance }))
    }

    /// The vectors of one layer.
    ///
    /// # Errors
    /// As [`RelativeReader::new`].
    pub fn layer(&self, index: usize) -> Loaded<Disentangled> {
        let Self { relative, vectors, .. } = self;
        let (hidden, heads) = (self.config.hidden, self.config.heads);
        let read = |name: &str, shape: &[usize]| {
            let name = format!("{}encoder.layer.{index}.attention.self.{name}", self.weights.prefix());
            self.weights.values(&name, shape)
        };
        // The transposed product of the vectors and a projection, without its bias: `[hidden, 2·span]`. Vectors that
        // the model does not use are zeros.
        let projected = |is_used: bool, name: &str| {
            let mut rows = vec![0.0; hidden * vectors.width()];
            if is_used {
                let matrix = read(&format!("{name}.weight"), &[hidden, hidden])?;
                multiply_rows(&matrix, vectors, &mut rows, |_, _| {});
            }
            Ok::<_, LoadError>(rows)
        };
        let [key, query] = match relative.shares_projections {
            true => ["key_proj", "query_proj"],
            false => ["pos_key_proj", "pos_query_proj"],
        };
        // The bias of position keys is not read: it adds the same number to all scores of a query, so softmax removes
        // it.
        let position_keys = projected(relative.has_keys, key)?;
        let mut position_queries = projected(relative.has_queries, query)?;
        if relative.has_queries {
            let bias = read(&format!("{query}.bias"), &[hidden])?;
            let scale = 1.0 / ((hidden / heads * self.score_terms) as f32).sqrt();
            for (row, bias) in position_queries.chunks_exact_mut(vectors.width()).zip(bias) {
                row.iter_mut().for_each(|x| *x = (*x + bias) * scale);
            }
        }
        let k_bias = read("key_proj.bias", &[hidden])?;
        Ok(Disentangled::new(position_keys, &position_queries, k_bias, self.by_distance.clone()))
    }
}

/// The index of the vector of a distance, which is the key's position minus the query's.
fn index_of(relative: RelativePositions, distance: i64) -> u32 {
    let span = relative.span as i64;
    let size = match relative.farthest {
        None => distance.abs(),
        Some(farthest) => bucket(distance.unsigned_abs(), relative.span, farthest),
    };
    // The vectors are in the order of the query's position minus the key's.
    (span - distance.signum() * size).clamp(0, 2 * span - 1) as u32
}

/// The bucket of a distance without its sign. Distances up to half the number of buckets have a bucket each. Larger ones
/// share buckets, whose width grows with the logarithm of the distance. Numbers are f32 as in the reference library.
fn bucket(distance: u64, buckets: usize, farthest: usize) -> i64 {
    let middle = buckets / 2;
    if distance <= middle as u64 {
        return distance as i64;
    }
    let log = |number: f32| f64::from(number / middle as f32).ln() as f32;
    let share = log(distance as f32) / log((farthest - 1) as f32);
    (share * (middle - 1) as f32).ceil() as i64 + middle as i64
}
