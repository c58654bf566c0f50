//! Durations as people write them: `250ms`, `30s`, `5m`, `1h30m`, `2d`.

use std::fmt;
use std::time::Duration;

use serde::de::{self, Deserializer, Visitor};

/// The longest duration accepted anywhere. PostgreSQL could store more, but past ten years it is
/// a typing error, and adding it to a timestamp must never overflow.
pub const MAX: Duration = Duration::from_secs(3650 * 24 * 60 * 60);

/// Why a text is no duration. The message holds the text and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum DurationError {
    /// Not the grammar: a missing or unknown unit, no number, a sign.
    #[error("`{text}` is not a duration such as 250ms, 30s, 5m, 1h30m or 2d: {reason}")]
    Syntax { text: String, reason: String },
    /// Longer than [`MAX`].
    #[error("`{text}` is longer than 3650 days, the longest duration allowed")]
    TooLong { text: String },
}

/// Reads a duration of one or more `<number><unit>` groups; a bare number has no unit and is refused.
pub fn parse(text: &str) -> Result<Duration, DurationError> {
    let parsed = humantime::parse_duration(text)
        .map_err(|error| DurationError::Syntax { text: text.to_owned(), reason: error.to_string() })?;
    if parsed > MAX {
        return Err(DurationError::TooLong { text: text.to_owned() });
    }
    Ok(parsed)
}

/// Writes a duration the way [`parse`] reads it, groups separated by a space.
pub fn format(duration: Duration) -> impl fmt::Display {
    humantime::format_duration(duration)
}

/// For `#[serde(deserialize_with)]`: a string as [`parse`] reads it.
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    deserializer.deserialize_str(DurationVisitor { zero: true })
}

/// As [`deserialize`], but longer than zero: for limits, where zero would let nothing happen.
pub fn deserialize_limit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    deserializer.deserialize_str(DurationVisitor { zero: false })
}

// Checking inside the visit, not after it, lets a format attach the scalar's own position.
struct DurationVisitor {
    zero: bool,
}

impl Visitor<'_> for DurationVisitor {
    type Value = Duration;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a duration such as 250ms, 30s, 5m, 1h30m or 2d")
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<Duration, E> {
        match parse(text) {
            Ok(Duration::ZERO) if !self.zero => Err(E::custom(format!("`{text}`: must be longer than zero"))),
            parsed => parsed.map_err(E::custom),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_what_people_write() {
        for (text, millis) in
            [("250ms", 250), ("30s", 30_000), ("5m", 300_000), ("1h30m", 5_400_000), ("2d", 172_800_000), ("0s", 0)]
        {
            assert_eq!(parse(text), Ok(Duration::from_millis(millis)), "{text}");
        }
    }

    #[test]
    fn refuses_what_has_no_unit_no_number_or_no_end() {
        for text in ["", "30", "s", "-5s", "5 parsecs", "99999999999999999999s", "4000d"] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(&format!("`{text}`")), "{error}");
        }
    }

    #[test]
    fn writes_what_it_reads() {
        let duration = Duration::from_millis(5_400_250);
        assert_eq!(parse(&format(duration).to_string()), Ok(duration));
    }
}
