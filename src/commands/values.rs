//! Values of flags: clap's own messages are Rust's ("invalid digit found in string", "9 is not in 1..=4").

use std::time::Duration;

use chrono::{DateTime, Utc};

use super::output::thousands;
use crate::engine::{duration, fields};

/// A whole number from `min` to `max`.
pub fn whole<T: TryFrom<i64>>(
    min: i64,
    max: i64,
) -> impl Fn(&str) -> Result<T, String> + Clone + Send + Sync + 'static {
    move |text| {
        let number = text.parse::<i64>().ok().filter(|number| (min..=max).contains(number));
        number
            .and_then(|number| T::try_from(number).ok())
            .ok_or_else(|| format!("it must be a whole number from {} to {}", thousands(min), thousands(max)))
    }
}

/// The id of a job.
pub fn job_id(text: &str) -> Result<i64, String> {
    text.parse().map_err(|_| "the id of a job is a whole number".to_owned())
}

/// A time as RFC 3339 has it.
pub fn time(text: &str) -> Result<DateTime<Utc>, String> {
    fields::parse_time(text).ok_or_else(|| format!("it must be {}", fields::TIME))
}

/// A duration that is not zero.
pub fn some_time(text: &str) -> Result<Duration, String> {
    let parsed = duration::parse(text).map_err(|e| e.to_string())?;
    if parsed.is_zero() { Err("it must be longer than nothing".into()) } else { Ok(parsed) }
}
