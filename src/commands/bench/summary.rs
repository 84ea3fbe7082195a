//! The arithmetic of a report: exact percentiles, by sorting.

use serde::Serialize;

use crate::client::replies::rounded;

/// Summary of durations in milliseconds. A percentile is the smallest value that this percentage of values does
/// not exceed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(in crate::commands) struct Summary {
    pub(in crate::commands) mean: f64,
    pub(in crate::commands) p50: f64,
    pub(in crate::commands) p90: f64,
    pub(in crate::commands) p99: f64,
    pub(in crate::commands) p99_9: f64,
    pub(in crate::commands) max: f64,
}

impl Summary {
    /// None if there are no values.
    pub(in crate::commands) fn of(mut values: Vec<f64>) -> Option<Self> {
        values.sort_unstable_by(f64::total_cmp);
        let max = *values.last()?;
        let percentile = |thousandths: usize| {
            let rank = (values.len() * thousandths).div_ceil(1_000).max(1);
            values.get(rank - 1).copied().map_or(max, rounded)
        };
        let mean = rounded(values.iter().sum::<f64>() / values.len() as f64);
        let max = rounded(max);
        Some(Self {
            mean,
            p50: percentile(500),
            p90: percentile(900),
            p99: percentile(990),
            p99_9: percentile(999),
            max,
        })
    }
}

/// The size of a batch, weighted by the reporting task's share of the batch. The weights of a batch add up to 1 if all
/// of its tasks report it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(in crate::commands) struct Weighted {
    pub(in crate::commands) size: f64,
    pub(in crate::commands) share: f64,
}

/// Summary of the sizes of batches.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(in crate::commands) struct Sizes {
    pub(in crate::commands) mean: f64,
    pub(in crate::commands) p50: f64,
    pub(in crate::commands) max: f64,
}

impl Sizes {
    /// None if there are no values.
    pub(in crate::commands) fn of(mut sizes: Vec<Weighted>) -> Option<Self> {
        sizes.sort_unstable_by(|a, b| a.size.total_cmp(&b.size));
        let max = sizes.last()?.size;
        let total_share: f64 = sizes.iter().map(|it| it.share).sum();
        let mean = rounded(sizes.iter().map(|it| it.size * it.share).sum::<f64>() / total_share);
        let mut cumulative_share = 0.0;
        let median = sizes.iter().find(|it| {
            cumulative_share += it.share;
            cumulative_share * 2.0 >= total_share
        });
        Some(Self { mean, p50: median.map_or(max, |it| it.size), max })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_were_measured() {
        let values = (1..=1_000).rev().map(f64::from).collect();
        let summary = Summary::of(values).unwrap();
        let expected =
            Summary { mean: 500.5, p50: 500.0, p90: 900.0, p99: 990.0, p99_9: 999.0, max: 1_000.0 };
        assert_eq!(summary, expected);
    }

    #[test]
    fn one_value_is_every_percentile_and_no_values_have_no_summary() {
        let all = Summary { mean: 7.0, p50: 7.0, p90: 7.0, p99: 7.0, p99_9: 7.0, max: 7.0 };
        assert_eq!(Summary::of(vec![7.0]), Some(all));
        assert_eq!(Summary::of(Vec::new()), None);
        assert_eq!(Sizes::of(Vec::new()), None);
    }

    #[test]
    fn with_few_values_the_high_percentiles_are_the_maximum() {
        let summary = Summary::of(vec![3.0, 1.0, 2.0]).unwrap();
        assert_eq!((summary.p50, summary.p90, summary.p99_9), (2.0, 3.0, 3.0));
    }

    #[test]
    fn a_batch_counts_once_however_many_tasks_report_it() {
        let (of_four, alone) = (Weighted { size: 4.0, share: 0.25 }, Weighted { size: 1.0, share: 1.0 });
        let sizes = Sizes::of([&[of_four; 4][..], &[alone; 2]].concat()).unwrap();
        assert_eq!(sizes, Sizes { mean: 2.0, p50: 1.0, max: 4.0 });
    }
}
