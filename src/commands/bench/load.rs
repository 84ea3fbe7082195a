//! The load: which bodies are published, in which order, and when. Everything follows from the seed. Bodies and
//! arrivals have separate random numbers, so that the same texts can be published at another rate.

use std::ops::RangeInclusive;
use std::time::Duration;

use rand::rngs::Xoshiro256PlusPlus;
use rand::seq::SliceRandom as _;
use rand::{RngExt as _, SeedableRng as _};

use crate::commands::requests::Request;
use crate::model::family::{MakeSample, Sample};
use crate::protocol::batch_line::RequestBody;
use crate::protocol::requests::count_inputs;

/// The words of the texts. Each is one token for the tokenizer of English BERT models.
const WORDS: [&str; 48] = [
    "queue", "message", "tide", "carries", "a", "the", "worker", "of", "light", "and", "reads", "slowly",
    "candle", "holder", "wall", "evening", "letter", "answers", "under", "river", "stone", "window",
    "before", "market", "paper", "engine", "keeps", "turning", "small", "garden", "between", "station",
    "night", "book", "open", "road", "winter", "signal", "quiet", "table", "copper", "bridge", "season",
    "number", "morning", "field", "salt", "far",
];
/// The exponent of the distribution of lengths. It makes most texts short: the mean of `u^7` for a uniform `u` is 1/8,
/// so the mean length is the shortest plus an eighth of the range.
const SKEW: f64 = 7.0;
/// XORed with the seed, so that arrivals and bodies have different random numbers.
const ARRIVALS_SALT: u64 = 0x5eed_a441_7a15;

/// A request to publish.
#[derive(Clone, Debug, PartialEq)]
pub(in crate::commands) struct Work {
    pub(in crate::commands) url: Option<String>,
    pub(in crate::commands) body: RequestBody,
    pub(in crate::commands) inputs: usize,
}

/// An endless sequence of bodies.
pub(in crate::commands) enum Bodies {
    /// Tasks made of random texts.
    Texts { random: Xoshiro256PlusPlus, words: RangeInclusive<usize>, inputs: usize, sample: Box<MakeSample> },
    /// Bodies of a file, in a new random order in each round.
    File { random: Xoshiro256PlusPlus, works: Vec<Work>, next: usize },
}

impl Bodies {
    /// Tasks that `sample` makes of `inputs` texts, each with a number of words from the range.
    pub(super) fn texts(
        seed: u64,
        words: RangeInclusive<usize>,
        inputs: usize,
        sample: Box<MakeSample>,
    ) -> Self {
        Self::Texts { random: Xoshiro256PlusPlus::seed_from_u64(seed), words, inputs, sample }
    }

    /// Each of `requests` once per round. None if there are no requests.
    pub(super) fn of_file(seed: u64, requests: Vec<Request>) -> Option<Self> {
        let work = |Request { url, body, .. }| Work { url, inputs: count_inputs(&body), body };
        let works: Vec<Work> = requests.into_iter().map(work).collect();
        let next = works.len();
        (next > 0).then(|| Self::File { random: Xoshiro256PlusPlus::seed_from_u64(seed), works, next })
    }
}

impl Iterator for Bodies {
    type Item = Work;

    fn next(&mut self) -> Option<Work> {
        match self {
            Self::Texts { random, words, inputs, sample } => {
                let texts: Vec<String> = (0..*inputs).map(|_| random_text(random, words)).collect();
                let Sample { url, body, inputs } = sample(&texts);
                Some(Work { url: url.map(str::to_owned), body, inputs })
            }
            Self::File { random, works, next } => {
                if *next == works.len() {
                    works.shuffle(random);
                    *next = 0;
                }
                *next += 1;
                works.get(*next - 1).cloned()
            }
        }
    }
}

fn random_text(random: &mut Xoshiro256PlusPlus, words: &RangeInclusive<usize>) -> String {
    let lengths = (words.end() - words.start() + 1) as f64;
    let length = words.start() + (random.random::<f64>().powf(SKEW) * lengths) as usize;
    let word = |_| WORDS[random.random_range(0..WORDS.len() as u32) as usize];
    (0..length).map(word).collect::<Vec<_>>().join(" ")
}

/// The due times of an open loop's tasks, from its start: a Poisson process.
pub(super) struct Arrivals {
    random: Xoshiro256PlusPlus,
    /// Mean arrivals per second.
    rate: f64,
    /// The due time of the latest task, in seconds.
    due: f64,
}

impl Arrivals {
    /// Arrivals at an average rate of `rate` tasks per second.
    pub(super) fn new(seed: u64, rate: f64) -> Self {
        Self { random: Xoshiro256PlusPlus::seed_from_u64(seed ^ ARRIVALS_SALT), rate, due: 0.0 }
    }

    pub(super) fn next(&mut self) -> Duration {
        self.due -= (1.0 - self.random.random::<f64>()).ln() / self.rate;
        Duration::try_from_secs_f64(self.due).unwrap_or(Duration::MAX)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value as Json;

    use super::*;
    use crate::model::tasks::embed;

    fn texts(seed: u64) -> Vec<Work> {
        Bodies::texts(seed, 2..=254, 1, Box::new(embed::FAMILY.sample)).take(2_000).collect()
    }

    #[test]
    fn the_same_seed_makes_the_same_load_and_another_seed_another() {
        assert_eq!(texts(1), texts(1));
        assert_ne!(texts(1), texts(2));
        let arrivals = |seed| {
            let mut arrivals = Arrivals::new(seed, 5.0);
            (0..100).map(|_| arrivals.next()).collect::<Vec<_>>()
        };
        assert_eq!(arrivals(1), arrivals(1));
        assert_ne!(arrivals(1), arrivals(2));
    }

    #[test]
    fn texts_are_within_their_bounds_mostly_short_and_35_tokens_on_average() {
        let count = |work: &Work| {
            let body: Json = serde_json::from_slice(&work.body).unwrap();
            body["input"].as_str().unwrap().split(' ').count()
        };
        let mut lengths: Vec<usize> = texts(1).iter().map(count).collect();
        lengths.sort_unstable();
        assert!(lengths[0] >= 2 && lengths[1_999] <= 254 && lengths[1_999] > 200);
        // Each text has two special tokens.
        let mean = 2.0 + lengths.iter().sum::<usize>() as f64 / 2_000.0;
        assert!((32.0..38.0).contains(&mean), "{mean}");
        assert!(lengths[1_000] < 8, "the median is {}", lengths[1_000]);
        let fixed = Bodies::texts(3, 7..=7, 1, Box::new(embed::FAMILY.sample)).take(50);
        assert!(fixed.into_iter().all(|work| count(&work) == 7));
    }

    #[test]
    fn a_task_of_several_texts_lists_them() {
        let work = Bodies::texts(1, 2..=9, 3, Box::new(embed::FAMILY.sample)).next().unwrap();
        let body: Json = serde_json::from_slice(&work.body).unwrap();
        assert_eq!((body["input"].as_array().unwrap().len(), work.inputs), (3, 3));
    }

    #[test]
    fn each_round_publishes_every_body_of_a_file_once_in_a_new_order() {
        let requests = || (0..20).map(|n| crate::commands::requests::embed(&n.to_string())).collect();
        let drawn: Vec<Work> = Bodies::of_file(1, requests()).unwrap().take(40).collect();
        let sorted = |works: &[Work]| {
            let mut bodies: Vec<_> = works.iter().map(|work| work.body.bytes.clone()).collect();
            bodies.sort();
            bodies
        };
        assert_eq!(sorted(&drawn[..20]), sorted(&drawn[20..]));
        assert_ne!(drawn[..20], drawn[20..]);
        let again: Vec<Work> = Bodies::of_file(1, requests()).unwrap().take(40).collect();
        assert_eq!(drawn, again);
        assert!(Bodies::of_file(1, Vec::new()).is_none());
    }

    #[test]
    fn arrivals_are_a_poisson_process_of_the_given_rate() {
        let mut arrivals = Arrivals::new(1, 50.0);
        let times: Vec<f64> = (0..10_000).map(|_| arrivals.next().as_secs_f64()).collect();
        let rate = 10_000.0 / times[9_999];
        assert!((48.0..52.0).contains(&rate), "{rate}");
        // The standard deviation of a Poisson process's gaps equals their mean.
        let gaps: Vec<f64> = times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        let mean = gaps.iter().sum::<f64>() / gaps.len() as f64;
        let deviation = (gaps.iter().map(|gap| (gap - mean).powi(2)).sum::<f64>() / gaps.len() as f64).sqrt();
        assert!((0.9..1.1).contains(&(deviation / mean)), "{deviation} of {mean}");
    }
}
