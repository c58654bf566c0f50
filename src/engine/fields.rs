//! Fields of what people write, `workers.yaml`, scenarios and lines of jobs: visitors that name what is allowed, and serde's
//! messages in words that need no knowledge of Rust.

use std::fmt;
use std::marker::PhantomData;

use chrono::{DateTime, Utc};
use serde::de::{self, Deserialize, Deserializer, Unexpected, Visitor};

/// A whole number from `MIN` to `MAX`, for `#[serde(deserialize_with)]`.
pub fn whole<'de, D, T, const MIN: i64, const MAX: i64>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<i64>,
{
    struct Whole<T, const MIN: i64, const MAX: i64>(PhantomData<T>);
    impl<T: TryFrom<i64>, const MIN: i64, const MAX: i64> Visitor<'_> for Whole<T, MIN, MAX> {
        type Value = T;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            match MAX {
                i64::MAX => write!(f, "a whole number, {MIN} or more"),
                _ => write!(f, "a whole number from {MIN} to {MAX}"),
            }
        }
        fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
            let allowed = Some(number).filter(|number| (MIN..=MAX).contains(number));
            let read = allowed.and_then(|number| T::try_from(number).ok());
            read.ok_or_else(|| E::invalid_value(Unexpected::Signed(number), &self))
        }
        fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
            match i64::try_from(number) {
                Ok(number) => self.visit_i64(number),
                Err(_) => Err(E::invalid_value(Unexpected::Unsigned(number), &self)),
            }
        }
    }
    // Checking inside the visit, not after it, lets a format attach the value's own position.
    deserializer.deserialize_i64(Whole::<T, MIN, MAX>(PhantomData))
}

/// As [`whole`], for a field that may be left out.
pub fn some_whole<'de, D, T, const MIN: i64, const MAX: i64>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: TryFrom<i64>,
{
    struct Inner<T, const MIN: i64, const MAX: i64>(T);
    impl<'de, T: TryFrom<i64>, const MIN: i64, const MAX: i64> Deserialize<'de> for Inner<T, MIN, MAX> {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            whole::<D, T, MIN, MAX>(deserializer).map(Self)
        }
    }
    Ok(Option::<Inner<T, MIN, MAX>>::deserialize(deserializer)?.map(|Inner(number)| number))
}

/// What [`parse_time`] reads, for messages.
pub const TIME: &str = "a time such as 2026-01-31T09:00:00Z or 2026-01-31T10:00:00+01:00";

/// A time as RFC 3339 has it.
pub fn parse_time(text: &str) -> Option<DateTime<Utc>> {
    DateTime::parse_from_rfc3339(text).ok().map(|time| time.to_utc())
}

/// As [`parse_time`], for `#[serde(deserialize_with)]`; null is none.
pub fn some_time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<DateTime<Utc>>, D::Error> {
    struct Time(DateTime<Utc>);
    impl<'de> Deserialize<'de> for Time {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct TimeVisitor;
            impl Visitor<'_> for TimeVisitor {
                type Value = Time;
                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str(TIME)
                }
                fn visit_str<E: de::Error>(self, text: &str) -> Result<Time, E> {
                    let time = parse_time(text).map(Time);
                    time.ok_or_else(|| E::invalid_value(Unexpected::Str(text), &self))
                }
            }
            deserializer.deserialize_str(TimeVisitor)
        }
    }
    Ok(Option::<Time>::deserialize(deserializer)?.map(|Time(time)| time))
}

/// serde's message, which may have a path before it and a place behind it, for people; adds the allowed name nearest to an
/// unknown one. What it does not know it leaves as it is.
pub fn reworded(message: &str) -> String {
    let Some((start, kind, mark)) =
        MARKS.iter().filter_map(|(mark, kind)| Some((message.find(mark)?, *kind, *mark))).min_by_key(|m| m.0)
    else {
        return message.to_owned();
    };
    let path = message[..start].trim_end_matches(": ");
    let rest = &message[start + mark.len()..];
    let (rest, place) = match rest.rfind(" at line ") {
        Some(at) => (&rest[..at], format!(" ({})", rest[at + " at ".len()..].trim())),
        None => (rest, String::new()),
    };
    let on = if path.is_empty() { String::new() } else { format!("{path}: ") };
    match kind {
        Kind::Value if rest.ends_with("expected map with a single key") => {
            format!("{on}it must have one field alone{place}")
        }
        Kind::Value => {
            let (found, wanted) = rest.rsplit_once(", expected ").unwrap_or((rest, "something else"));
            let what = if path.is_empty() { "it" } else { path };
            format!("{what} must be {}, not {}{place}", wanted_words(wanted), found_words(found))
        }
        Kind::Length => {
            let (found, wanted) = rest.rsplit_once(", expected ").unwrap_or((rest, "another number"));
            format!("{on}there must be {wanted}, not {found}{place}")
        }
        Kind::Missing => format!("{on}`{}` is missing{place}", rest.trim_matches('`')),
        Kind::Twice => format!("{on}`{}` is there twice{place}", rest.trim_matches('`')),
        Kind::Unknown => {
            let what = mark.trim_end_matches('`').replace("variant", "value");
            let (name, allowed) = rest.split_once('`').unwrap_or((rest, ""));
            let allowed: Vec<&str> = allowed.split('`').skip(1).step_by(2).collect();
            let listed = allowed.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ");
            let listed = if listed.is_empty() { "none is allowed".to_owned() } else { format!("allowed: {listed}") };
            let nearest = allowed.iter().map(|known| (strsim::damerau_levenshtein(name, known), known)).min();
            let guess = match nearest {
                Some((distance, known)) if distance <= 1 + known.len() / 4 => format!("; did you mean `{known}`?"),
                _ => String::new(),
            };
            // Some paths already end with the name that is not known.
            let on = on.strip_suffix(&format!("{name}: ")).map_or(&*on, |on| on.trim_end_matches('.'));
            let on = on.strip_suffix(": ").unwrap_or(on);
            let on = if on.is_empty() { String::new() } else { format!("{on}: ") };
            format!("{on}{what}`{name}`, {listed}{place}{guess}")
        }
    }
}

#[derive(Clone, Copy)]
enum Kind {
    Value,
    Length,
    Missing,
    Twice,
    Unknown,
}

const MARKS: [(&str, Kind); 8] = [
    ("invalid type: ", Kind::Value),
    ("invalid value: ", Kind::Value),
    ("invalid length ", Kind::Length),
    ("missing field ", Kind::Missing),
    ("duplicate field ", Kind::Twice),
    ("unknown field `", Kind::Unknown),
    ("unknown variant `", Kind::Unknown),
    ("unknown builtin `", Kind::Unknown),
];

fn wanted_words(wanted: &str) -> String {
    let words = match wanted {
        "a boolean" => "true or false",
        "a string" => "text",
        "a sequence" => "a list",
        "f32" | "f64" => "a number",
        "u8" | "u16" | "u32" | "u64" | "usize" => "a whole number, 0 or more",
        "i8" | "i16" | "i32" | "i64" => "a whole number",
        other => other,
    };
    words.to_owned()
}

fn found_words(found: &str) -> String {
    match found {
        "sequence" => return "a list".to_owned(),
        "map" => return "a map".to_owned(),
        "unit value" | "null" | "Option value" => return "nothing".to_owned(),
        _ => {}
    }
    for (mark, words) in [("string ", "the text "), ("integer ", ""), ("floating point ", ""), ("boolean ", "")] {
        if let Some(value) = found.strip_prefix(mark) {
            return format!("{words}{value}");
        }
    }
    found.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_serde_says_is_said_for_people() {
        for (serde, people) in [
            (
                "queues.a.workers: invalid type: string \"x, expected y\", expected u16 at line 1 column 29",
                "queues.a.workers must be a whole number, 0 or more, not the text \"x, expected y\" (line 1 column 29)",
            ),
            ("invalid type: null, expected a string", "it must be text, not nothing"),
            ("a: missing field `b` at line 2 column 1", "a: `b` is missing (line 2 column 1)"),
            ("duplicate field `b`", "`b` is there twice"),
            (
                "unknown field `qeue`, expected one of `kind`, `queue` at line 1 column 3",
                "unknown field `qeue`, allowed: `kind`, `queue` (line 1 column 3); did you mean `queue`?",
            ),
            ("load: unknown variant `zzz`, expected `a` or `b`", "load: unknown value `zzz`, allowed: `a`, `b`"),
            ("a.b: unknown field `b`, expected `cde`", "a: unknown field `b`, allowed: `cde`"),
            ("b: unknown field `b`, there are no fields", "unknown field `b`, none is allowed"),
            ("load: invalid value: map, expected map with a single key", "load: it must have one field alone"),
            ("did not find expected ',' at line 2 column 1", "did not find expected ',' at line 2 column 1"),
        ] {
            assert_eq!(reworded(serde), people);
        }
    }

    #[test]
    fn a_whole_number_says_its_range() {
        #[derive(Debug, serde::Deserialize)]
        struct One {
            #[serde(deserialize_with = "whole::<_, _, 1, 4>")]
            _n: i16,
        }
        for bad in ["0", "5", "1.5", "\"x\"", "null", "99999999999999999999", "-1"] {
            let error = serde_json::from_str::<One>(&format!("{{\"_n\":{bad}}}")).unwrap_err().to_string();
            assert!(error.contains("expected a whole number from 1 to 4"), "{error}");
        }
        assert_eq!(serde_json::from_str::<One>("{\"_n\":4}").unwrap()._n, 4);
    }
}
