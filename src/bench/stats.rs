//! Percentiles and histograms of times.

use std::time::Duration;

use serde_json::{Map, Value, json};

/// Buckets of a histogram in each doubling.
const PER_OCTAVE: f64 = 4.0;

/// Times of one kind, in microseconds, ascending.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Times(Vec<f64>);

impl FromIterator<Duration> for Times {
    fn from_iter<I: IntoIterator<Item = Duration>>(times: I) -> Self {
        times
            .into_iter()
            .map(|time| time.as_secs_f64() * 1e6)
            .collect()
    }
}

impl FromIterator<f64> for Times {
    fn from_iter<I: IntoIterator<Item = f64>>(times: I) -> Self {
        let mut times: Vec<f64> = times.into_iter().filter(|time| time.is_finite()).collect();
        times.sort_by(f64::total_cmp);
        Self(times)
    }
}

impl Times {
    /// How many.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The time that a share of them does not exceed, microseconds (nearest rank); 0 of none.
    #[must_use]
    pub fn quantile(&self, share: f64) -> f64 {
        let rank = (share * self.0.len() as f64).ceil().max(1.0) as usize;
        let at = rank.min(self.0.len()).saturating_sub(1);
        self.0.get(at).copied().unwrap_or(0.0)
    }

    /// The middle one.
    #[must_use]
    pub fn median(&self) -> f64 {
        self.quantile(0.5)
    }

    /// The shortest.
    #[must_use]
    pub fn min(&self) -> f64 {
        self.0.first().copied().unwrap_or(0.0)
    }

    /// The longest.
    #[must_use]
    pub fn max(&self) -> f64 {
        self.0.last().copied().unwrap_or(0.0)
    }

    /// Percentiles under the names that reports know: `p50_us`, `p90_us`, `p99_us`, `p999_us`,
    /// `max_us`, each after `prefix`.
    pub fn percentiles_into(&self, prefix: &str, more: &mut Map<String, Value>) {
        for (name, share) in [("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("p999", 0.999)] {
            more.insert(format!("{prefix}{name}_us"), rounded(self.quantile(share)));
        }
        more.insert(format!("{prefix}max_us"), rounded(self.max()));
    }

    /// How many lie in each bucket, as `[upper end in microseconds, count]`, from the first bucket
    /// that has some to the last; the ends are a fourth of a doubling apart.
    #[must_use]
    pub fn histogram(&self) -> Value {
        let bucket = |time: &f64| (time.max(0.01).log2() * PER_OCTAVE).floor() as i32;
        let mut buckets: Vec<(i32, u64)> = Vec::new();
        for time in &self.0 {
            let bucket = bucket(time);
            match buckets.last_mut() {
                Some((last, count)) if *last == bucket => *count += 1,
                _ => buckets.push((bucket, 1)),
            }
        }
        buckets
            .iter()
            .map(|(bucket, count)| {
                let end = f64::from(bucket + 1) / PER_OCTAVE;
                json!([rounded(end.exp2()), count])
            })
            .collect()
    }
}

/// A number with as many digits as anybody reads.
#[must_use]
pub fn rounded(number: f64) -> Value {
    let rounded = (number * 1000.0).round() / 1000.0;
    json!(if rounded.is_finite() { rounded } else { 0.0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_nearest_rank() {
        let times: Times = (1..=1000).rev().map(f64::from).collect();
        assert_eq!(times.median(), 500.0);
        assert_eq!(times.quantile(0.99), 990.0);
        assert_eq!(times.quantile(0.999), 999.0);
        assert_eq!((times.min(), times.max()), (1.0, 1000.0));
        assert_eq!(Times::default().quantile(0.5), 0.0);
        let one: Times = [Duration::from_micros(7)].into_iter().collect();
        assert_eq!((one.quantile(0.0), one.quantile(1.0)), (7.0, 7.0));
    }

    #[test]
    fn what_is_no_number_is_left_out() {
        let times: Times = [1.0, f64::NAN, f64::INFINITY].into_iter().collect();
        assert_eq!(times.len(), 1);
        assert_eq!(rounded(f64::NAN), json!(0.0));
    }

    #[test]
    fn a_histogram_holds_every_time_below_its_end() {
        let times: Times = [1.0, 1.1, 2.0, 40.0, 41.0, 1000.0].into_iter().collect();
        let histogram = times.histogram();
        let buckets: Vec<(f64, u64)> = serde_json::from_value(histogram).unwrap();
        assert_eq!(buckets.iter().map(|bucket| bucket.1).sum::<u64>(), 6);
        assert!(buckets.is_sorted_by(|a, b| a.0 < b.0));
        assert!(buckets.last().unwrap().0 >= 1000.0);
        assert!(buckets.first().unwrap().0 >= 1.1);
    }

    #[test]
    fn percentiles_have_their_names() {
        let mut more = Map::new();
        let times: Times = [3.0].into_iter().collect();
        times.percentiles_into("idle_", &mut more);
        assert_eq!(more["idle_p999_us"], json!(3.0));
        assert_eq!(more.len(), 5);
    }
}
