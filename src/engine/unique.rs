//! Unique keys: which jobs count as the same, byte for byte as 0.5 decides it, so that jobs enqueued by either do.
//!
//! The key is the first 16 bytes of BLAKE3 over the kind and then, each after a zero byte and only if it is part of it, the
//! queue, the arguments as canonical JSON and the number of the period. Guarded by `tests/unique_keys.rs` (against vectors
//! of the real 0.5.7) and `tests/engine_unique.rs`.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use chrono::{DateTime, Utc};
use serde::de::{self, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Number, Value};

use super::duration;
use super::worker::RawJson;

/// What makes two jobs of one kind the same. Absent fields have 0.5's defaults.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "an object with `by_queue`, `by_args`, `by_period` and `states`, all of which may be left out"
)]
pub struct UniqueOptions {
    #[serde(default)]
    pub by_queue: bool,
    #[serde(default = "yes")]
    pub by_args: bool,
    /// The same again in the next period. Periods are counted from 1970-01-01 UTC; whole seconds.
    #[serde(default, deserialize_with = "period_of_json")]
    pub by_period: Option<Duration>,
    /// In which states a job keeps another one out.
    #[serde(default)]
    pub states: UniqueStates,
}

fn yes() -> bool {
    true
}

impl Default for UniqueOptions {
    fn default() -> Self {
        Self { by_queue: false, by_args: true, by_period: None, states: UniqueStates::default() }
    }
}

/// Why a text or a field says nothing about uniqueness.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UniqueError {
    #[error(
        "`{part}` is not a part of a unique key; use kind, queue, args, period=DURATION or states=STATE+STATE{hint}"
    )]
    Part { part: String, hint: String },
    #[error("`{part}` is given twice")]
    Twice { part: String },
    #[error("`{state}` is not a job state; use {}{hint}", STATES.join(", "))]
    State { state: String, hint: String },
    #[error("states must name at least one state")]
    NoStates,
    #[error(transparent)]
    Duration(#[from] duration::DurationError),
    #[error("the period must be a whole number of seconds, at least one, not `{text}`")]
    Period { text: String },
}

/// The states of a job, in the order of the enum `job_state`, which is that of the bits.
pub const STATES: [&str; 8] =
    ["scheduled", "available", "running", "completed", "retryable", "failed", "cancelled", "waiting_external"];

/// A set of job states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UniqueStates(u8);

impl Default for UniqueStates {
    /// All in which a job will still run, is running or ran well.
    fn default() -> Self {
        Self(0b0001_1111)
    }
}

impl UniqueStates {
    /// The set of these names.
    pub fn of<'a>(names: impl IntoIterator<Item = &'a str>) -> Result<Self, UniqueError> {
        let mut bits = 0;
        for name in names {
            let Some(n) = STATES.iter().position(|state| *state == name) else {
                return Err(UniqueError::State { state: name.to_owned(), hint: hint(name, &STATES) });
            };
            bits |= 1 << n;
        }
        if bits == 0 { Err(UniqueError::NoStates) } else { Ok(Self(bits)) }
    }

    /// The set whose bit n, counted from the least significant, is state n: as 0.5's Python clients write it.
    pub fn from_bits(bits: u8) -> Self {
        Self(bits)
    }
}

/// As PostgreSQL writes a `bit(8)`: the first state first.
impl fmt::Display for UniqueStates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:08b}", self.0.reverse_bits())
    }
}

impl<'de> Deserialize<'de> for UniqueStates {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let names = Vec::<String>::deserialize(deserializer)?;
        Self::of(names.iter().map(String::as_str)).map_err(de::Error::custom)
    }
}

fn period_of_json<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    struct Period(Duration);
    impl<'de> Deserialize<'de> for Period {
        fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
            struct PeriodVisitor;
            impl Visitor<'_> for PeriodVisitor {
                type Value = Period;
                fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str("a duration in whole seconds such as \"1h\"")
                }
                fn visit_str<E: de::Error>(self, text: &str) -> Result<Period, E> {
                    parse_period(text).map(Period).map_err(E::custom)
                }
            }
            deserializer.deserialize_str(PeriodVisitor)
        }
    }
    Ok(Option::<Period>::deserialize(deserializer)?.map(|Period(period)| period))
}

fn parse_period(text: &str) -> Result<Duration, UniqueError> {
    let period = duration::parse(text)?;
    if period.as_secs() == 0 || period.subsec_nanos() != 0 {
        return Err(UniqueError::Period { text: text.to_owned() });
    }
    Ok(period)
}

fn hint(given: &str, known: &[&str]) -> String {
    let near = known.iter().map(|k| (strsim::jaro_winkler(given, k), k)).max_by(|a, b| a.0.total_cmp(&b.0));
    near.filter(|n| n.0 > 0.8).map(|n| format!(" (did you mean {}?)", n.1)).unwrap_or_default()
}

/// `kind[,queue][,args][,period=1h][,states=available+running]`, in any order. The kind is always part of the key.
impl FromStr for UniqueOptions {
    type Err = UniqueError;

    fn from_str(text: &str) -> Result<Self, UniqueError> {
        let mut options = Self { by_args: false, ..Self::default() };
        let mut seen = Vec::new();
        for part in text.split(',') {
            let part = part.trim();
            let (name, value) = part.split_once('=').map_or((part, None), |(name, value)| (name, Some(value)));
            if seen.contains(&name) {
                return Err(UniqueError::Twice { part: name.to_owned() });
            }
            seen.push(name);
            match (name, value) {
                ("kind", None) => {}
                ("queue", None) => options.by_queue = true,
                ("args", None) => options.by_args = true,
                ("period", Some(value)) => options.by_period = Some(parse_period(value)?),
                ("states", Some(value)) => {
                    options.states = UniqueStates::of(value.split('+').filter(|state| !state.is_empty()))?;
                }
                _ => {
                    let hint = hint(name, &["kind", "queue", "args", "period=", "states="]);
                    return Err(UniqueError::Part { part: part.to_owned(), hint });
                }
            }
        }
        Ok(options)
    }
}

impl UniqueOptions {
    /// The key of a job enqueued at `now`, which is the database's time.
    pub fn key(&self, kind: &str, queue: &str, args: &RawJson, now: DateTime<Utc>) -> [u8; 16] {
        let period = self.by_period.map(|period| now.timestamp().div_euclid(period.as_secs() as i64));
        unique_key(kind, self.by_queue.then_some(queue), self.by_args.then_some(args), period)
    }
}

/// The key out of its parts; `period` is the number of the period.
pub fn unique_key(kind: &str, queue: Option<&str>, args: Option<&RawJson>, period: Option<i64>) -> [u8; 16] {
    let mut hash = blake3::Hasher::new();
    hash.update(kind.as_bytes());
    if let Some(queue) = queue {
        hash.update(&[0]).update(queue.as_bytes());
    }
    if let Some(args) = args {
        hash.update(&[0]).update(canonical(args).as_bytes());
    }
    if let Some(period) = period {
        hash.update(&[0]).update(&period.to_le_bytes());
    }
    let mut key = [0; 16];
    hash.finalize_xof().fill(&mut key);
    key
}

/// The one text of all that mean the same: no blanks, keys in the order of their bytes.
fn canonical(json: &RawJson) -> String {
    let mut out = String::with_capacity(json.as_str().len());
    // A RawJson is JSON; were it not, its text is still something to tell jobs apart by.
    match json.parse::<Value>() {
        Ok(value) => write_value(&value, &mut out),
        Err(_) => out.push_str(json.as_str()),
    }
    out
}

fn write_value(value: &Value, out: &mut String) {
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(true) => out.push_str("true"),
        Value::Bool(false) => out.push_str("false"),
        Value::Number(number) => write_number(number, out),
        Value::String(text) => write_string(text, out),
        Value::Array(items) => {
            out.push('[');
            for (n, item) in items.iter().enumerate() {
                if n > 0 {
                    out.push(',');
                }
                write_value(item, out);
            }
            out.push(']');
        }
        Value::Object(object) => {
            let mut members: Vec<_> = object.iter().collect();
            members.sort_unstable_by_key(|member| member.0);
            out.push('{');
            for (n, (key, member)) in members.into_iter().enumerate() {
                if n > 0 {
                    out.push(',');
                }
                write_string(key, out);
                out.push(':');
                write_value(member, out);
            }
            out.push('}');
        }
    }
}

fn write_string(text: &str, out: &mut String) {
    out.push_str(&Value::from(text).to_string());
}

/// Written here and not by `serde_json`, whose versions differ in how they write floats: a key must outlive them.
fn write_number(number: &Number, out: &mut String) {
    if let Some(float) = number.as_f64().filter(|_| number.is_f64()) {
        write_float(float, out);
    } else {
        out.push_str(&number.to_string());
    }
}

/// The shortest digits that read back the same; plain for exponents of -5 to 15, else scientific with a sign.
fn write_float(float: f64, out: &mut String) {
    let text = format!("{float:e}");
    let (mantissa, exponent) = text.split_once('e').unwrap_or((&text, "0"));
    let exponent: i32 = exponent.parse().unwrap_or_default();
    let (sign, mantissa) = mantissa.strip_prefix('-').map_or(("", mantissa), |rest| ("-", rest));
    out.push_str(sign);
    if !(-5..=15).contains(&exponent) {
        out.push_str(&format!("{mantissa}e{exponent:+}"));
        return;
    }
    let digits = mantissa.replace('.', "");
    let whole = exponent + 1;
    if whole <= 0 {
        out.push_str(&format!("0.{}{digits}", "0".repeat(whole.unsigned_abs() as usize)));
    } else if digits.len() <= whole as usize {
        out.push_str(&format!("{digits:0<width$}.0", width = whole as usize));
    } else {
        let (whole, fraction) = digits.split_at(whole as usize);
        out.push_str(&format!("{whole}.{fraction}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_form_says_what_the_fields_say() {
        let read = |text: &str| text.parse::<UniqueOptions>().unwrap();
        assert_eq!(read("kind"), UniqueOptions { by_args: false, ..Default::default() });
        assert_eq!(read("args"), UniqueOptions::default());
        let all = read("kind, queue,args,period=1h,states=running+available");
        let json = r#"{"by_queue": true, "by_args": true, "by_period": "1h", "states": ["available", "running"]}"#;
        assert_eq!(all, serde_json::from_str(json).unwrap());
        assert_eq!(all.states.to_string(), "01100000");
        assert_eq!(UniqueStates::default().to_string(), "11111000");
        assert_eq!(serde_json::from_str::<UniqueOptions>("{}").unwrap(), UniqueOptions::default());
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (text, part) in [
            ("", "``"),
            ("kind,arg", "did you mean args"),
            ("period", "`period`"),
            ("args=1", "`args=1`"),
            ("args,args", "`args` is given twice"),
            ("states=", "at least one state"),
            ("states=avaliable", "did you mean available"),
            ("period=500ms", "`500ms`"),
            ("period=0s", "`0s`"),
            ("period=soon", "`soon`"),
        ] {
            let error = text.parse::<UniqueOptions>().unwrap_err().to_string();
            assert!(error.contains(part), "{text}: {error}");
        }
        for (json, part) in [
            (r#"{"by": 1}"#, "`by`"),
            (r#"{"states": ["nope"]}"#, "`nope`"),
            (r#"{"states": []}"#, "at least one"),
            (r#"{"by_period": "1500ms"}"#, "`1500ms`"),
            (r#"{"by_period": 60}"#, "60"),
        ] {
            let error = serde_json::from_str::<UniqueOptions>(json).unwrap_err().to_string();
            assert!(error.contains(part), "{json}: {error}");
        }
    }

    #[test]
    fn a_period_changes_the_key_exactly_at_its_end() {
        let options: UniqueOptions = "period=1h".parse().unwrap();
        let key = |seconds: i64| {
            options.key("k", "q", &RawJson::EMPTY_OBJECT, DateTime::from_timestamp(seconds, 0).unwrap_or_default())
        };
        assert_eq!(key(3600), key(7199));
        assert_ne!(key(7199), key(7200));
        assert_eq!(key(-1), key(-3600));
        assert_ne!(key(-1), key(0));
    }
}
