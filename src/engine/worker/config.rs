//! `workers.yaml`: which queues a worker process serves and what runs each kind of job.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::marker::PhantomData;
use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Deserialize;
use serde::de::value::MapAccessDeserializer;
use serde::de::{self, DeserializeSeed, Deserializer, MapAccess, Visitor};

use super::handler::{ANY_KIND, Registry, RegistryError, check_name};
use super::handlers::{Builtin, BuiltinWorker, Exec, ExecWorker, FlakyRule};
use crate::engine::fields::{reworded, some_whole, whole};
use crate::engine::{cron, duration};

/// The most jobs of one queue that a process runs at a time.
pub const MAX_WORKERS: u16 = 4096;

/// The greatest weight of a queue.
pub const MAX_WEIGHT: u16 = 1000;

const MAX_RATE: f64 = 1e6;

const DEFAULT_WORKERS: u16 = 32;

/// What a `workers.yaml` says.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, expecting = "a map with `queues`, `handlers`, `cron` and `max_workers`")]
pub struct Config {
    /// Jobs of all queues that run at a time, 1..=[`MAX_WORKERS`]; without it each queue has its own limit only.
    #[serde(default, deserialize_with = "some_whole::<_, _, 1, { MAX_WORKERS as i64 }>")]
    pub max_workers: Option<u16>,
    /// By queue.
    #[serde(default, deserialize_with = "queues")]
    pub queues: BTreeMap<String, QueueConfig>,
    /// By kind of job; `*` is for every kind without one of its own.
    #[serde(default, deserialize_with = "handlers")]
    pub handlers: BTreeMap<String, HandlerConfig>,
    /// Cron jobs by name, put in place when a worker starts. One that is no longer here stays until it is removed.
    #[serde(default, deserialize_with = "cron")]
    pub cron: BTreeMap<String, cron::Definition>,
}

/// How one queue is served.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(
    deny_unknown_fields,
    expecting = "a map with `workers`, `deadline`, `priority_aging`, `rate_limit`, `weight` and `lease_claim_receipts`"
)]
pub struct QueueConfig {
    /// Jobs that run at a time, 1..=[`MAX_WORKERS`]; 32 unless given.
    #[serde(default = "default_workers", deserialize_with = "whole::<_, _, 1, { MAX_WORKERS as i64 }>")]
    pub workers: u16,
    /// How long an attempt may take; longer than zero. Without one it may take for ever.
    #[serde(default, deserialize_with = "some_limit")]
    pub deadline: Option<Duration>,
    /// Jobs per second that a process starts at most; more than zero, at most a million.
    #[serde(default, deserialize_with = "rate")]
    pub rate_limit: Option<f64>,
    /// The queue's share when several compete for [`Config::max_workers`], 1..=[`MAX_WEIGHT`]; 1 unless given.
    #[serde(default = "default_weight", deserialize_with = "whole::<_, _, 1, { MAX_WEIGHT as i64 }>")]
    pub weight: u16,
    /// How long the head of a lower priority waits before it counts as one higher; a minute unless given.
    #[serde(default = "default_aging", deserialize_with = "some_limit")]
    pub priority_aging: Option<Duration>,
    /// False claims into `leases` instead of receipts (ADR-023); true unless given.
    #[serde(default = "yes")]
    pub lease_claim_receipts: bool,
}

fn default_aging() -> Option<Duration> {
    Some(Duration::from_secs(60))
}

fn yes() -> bool {
    true
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self {
            workers: DEFAULT_WORKERS,
            deadline: None,
            rate_limit: None,
            weight: default_weight(),
            priority_aging: default_aging(),
            lease_claim_receipts: true,
        }
    }
}

/// What runs the jobs of one kind.
#[derive(Debug, Clone, PartialEq)]
pub enum HandlerConfig {
    /// A program, see [`super::handlers`].
    Exec(Exec),
    /// A handler for trying and testing.
    Builtin(Builtin),
}

/// Why a `workers.yaml` cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read `{}`: {source}", path.display())]
    Read { path: PathBuf, source: io::Error },
    /// The message names the field, what is allowed, and the line and column, counted from 1.
    #[error("{}{message}", place(path.as_deref()))]
    Invalid { path: Option<PathBuf>, message: String },
}

fn place(path: Option<&Path>) -> String {
    path.map_or_else(String::new, |path| format!("`{}`: ", path.display()))
}

impl Config {
    /// Reads the file at `path`.
    pub fn load(path: impl AsRef<Path>) -> Result<Self, ConfigError> {
        let path = path.as_ref();
        let text =
            std::fs::read_to_string(path).map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        Self::parse(&text).map_err(|error| match error {
            ConfigError::Invalid { message, .. } => ConfigError::Invalid { path: Some(path.to_owned()), message },
            other => other,
        })
    }

    /// Reads the text of such a file. An empty one serves no queue and has no handler.
    pub fn parse(text: &str) -> Result<Self, ConfigError> {
        let config: Result<Option<Self>, _> = serde_yaml::from_str(text);
        match config {
            Ok(config) => Ok(config.unwrap_or_default()),
            Err(error) => Err(ConfigError::Invalid { path: None, message: reworded(&error.to_string()) }),
        }
    }

    /// The handlers, ready to run.
    pub fn registry(&self) -> Result<Registry, RegistryError> {
        let mut registry = Registry::new();
        for (kind, handler) in &self.handlers {
            match handler {
                HandlerConfig::Exec(exec) => {
                    registry.insert(ExecWorker::new(kind, exec.clone()))?;
                }
                HandlerConfig::Builtin(builtin) => {
                    registry.insert(BuiltinWorker::new(kind, builtin.clone()))?;
                }
            }
        }
        Ok(registry)
    }
}

/// A handler as it is written; which fields go together is checked afterwards.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawHandler {
    exec: Option<Vec<String>>,
    builtin: Option<BuiltinName>,
    timeout: Option<Limit>,
    env: Option<BTreeMap<String, String>>,
    cwd: Option<PathBuf>,
    clear_env: Option<bool>,
    duration: Option<AnyDuration>,
    #[serde(default, deserialize_with = "some_whole::<_, _, 0, { u32::MAX as i64 }>")]
    fail_times: Option<u32>,
    probability: Option<f64>,
}

impl RawHandler {
    fn resolve(mut self) -> Result<HandlerConfig, String> {
        match (self.exec.take(), self.builtin.take()) {
            (Some(argv), None) => {
                self.refuse_all_but(
                    &["timeout", "env", "cwd", "clear_env"],
                    "`exec`, which takes `timeout`, `env`, `cwd` and `clear_env`",
                )?;
                self.exec(argv).map(HandlerConfig::Exec)
            }
            (None, Some(BuiltinName(name))) => self.builtin(name).map(HandlerConfig::Builtin),
            (Some(_), Some(_)) => Err("has both `exec` and `builtin`; give one".into()),
            (None, None) => Err(format!(
                "has neither `exec: [PROGRAM, ARGUMENT, …]` nor `builtin: NAME` ({})",
                Builtin::NAMES.join(", ")
            )),
        }
    }

    fn exec(self, argv: Vec<String>) -> Result<Exec, String> {
        if argv.first().is_none_or(String::is_empty) {
            return Err("`exec` names no program; its first item must".into());
        }
        if argv.iter().any(|item| item.contains('\0')) {
            return Err("`exec` has an item with the character U+0000; none may have it".into());
        }
        let env = self.env.unwrap_or_default();
        for (name, value) in &env {
            if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
                return Err(format!(
                    "`env`: `{}` cannot be set: a name is not empty and has no `=`, and neither \
                     name nor value has the character U+0000",
                    name.escape_debug()
                ));
            }
            if name.starts_with("AWA_JOB_") {
                return Err(format!("`env`: `{name}` cannot be set: the worker sets the names in AWA_JOB_"));
            }
        }
        Ok(Exec {
            argv,
            env,
            cwd: self.cwd,
            timeout: self.timeout.map(|Limit(limit)| limit),
            clear_env: self.clear_env.unwrap_or_default(),
        })
    }

    fn builtin(self, name: &str) -> Result<Builtin, String> {
        let (allowed, takes): (&[&str], _) = match name {
            "sleep" => (&["duration"], "takes only `duration`"),
            "flaky" => (&["fail_times", "probability"], "takes only `fail_times` or `probability`"),
            _ => (&[], "takes nothing more"),
        };
        self.refuse_all_but(allowed, &format!("builtin `{name}`, which {takes}"))?;
        Ok(match name {
            "noop" => Builtin::Noop,
            "sleep" => Builtin::Sleep { duration: self.duration.map(|AnyDuration(duration)| duration) },
            "echo" => Builtin::Echo,
            "fail" => Builtin::Fail,
            "flaky" => Builtin::Flaky(FlakyRule::from_fields(self.fail_times, self.probability)?.unwrap_or_default()),
            other => return Err(format!("there is no builtin `{other}`")),
        })
    }

    fn refuse_all_but(&self, allowed: &[&str], of: &str) -> Result<(), String> {
        let given = [
            ("timeout", self.timeout.is_some()),
            ("env", self.env.is_some()),
            ("cwd", self.cwd.is_some()),
            ("clear_env", self.clear_env.is_some()),
            ("duration", self.duration.is_some()),
            ("fail_times", self.fail_times.is_some()),
            ("probability", self.probability.is_some()),
        ];
        match given.iter().find(|(name, given)| *given && !allowed.contains(name)) {
            Some((name, _)) => Err(format!("`{name}` does not go with {of}")),
            None => Ok(()),
        }
    }
}

// The visitors below check inside the visit, because only an error that leaves a visit gets the
// position of the value it is about.

impl<'de> Deserialize<'de> for HandlerConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct HandlerVisitor;
        impl<'de> Visitor<'de> for HandlerVisitor {
            type Value = HandlerConfig;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a handler such as `{exec: [PROGRAM]}` or `{builtin: noop}`")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<HandlerConfig, A::Error> {
                RawHandler::deserialize(MapAccessDeserializer::new(map))?.resolve().map_err(de::Error::custom)
            }
        }
        deserializer.deserialize_map(HandlerVisitor)
    }
}

/// One of [`Builtin::NAMES`].
struct BuiltinName(&'static str);

impl<'de> Deserialize<'de> for BuiltinName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NameVisitor;
        impl Visitor<'_> for NameVisitor {
            type Value = BuiltinName;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "one of {}", Builtin::NAMES.join(", "))
            }
            fn visit_str<E: de::Error>(self, text: &str) -> Result<BuiltinName, E> {
                match Builtin::NAMES.iter().find(|name| **name == text) {
                    Some(name) => Ok(BuiltinName(name)),
                    None => Err(E::custom(format!(
                        "unknown builtin `{text}`, expected one of {}",
                        Builtin::NAMES.map(|name| format!("`{name}`")).join(", ")
                    ))),
                }
            }
        }
        deserializer.deserialize_str(NameVisitor)
    }
}

fn default_workers() -> u16 {
    DEFAULT_WORKERS
}

fn default_weight() -> u16 {
    1
}

fn rate<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<f64>, D::Error> {
    struct RateVisitor;
    impl Visitor<'_> for RateVisitor {
        type Value = f64;
        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            write!(f, "jobs per second, more than 0 and at most {MAX_RATE}")
        }
        fn visit_u64<E: de::Error>(self, number: u64) -> Result<f64, E> {
            self.visit_f64(number as f64)
        }
        fn visit_f64<E: de::Error>(self, number: f64) -> Result<f64, E> {
            if number > 0.0 && number <= MAX_RATE {
                return Ok(number);
            }
            Err(E::invalid_value(de::Unexpected::Float(number), &self))
        }
    }
    deserializer.deserialize_f64(RateVisitor).map(Some)
}

/// A duration, see [`duration::deserialize`].
struct AnyDuration(Duration);

impl<'de> Deserialize<'de> for AnyDuration {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        duration::deserialize(deserializer).map(Self)
    }
}

/// A duration longer than zero, see [`duration::deserialize_limit`].
struct Limit(Duration);

impl<'de> Deserialize<'de> for Limit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        duration::deserialize_limit(deserializer).map(Self)
    }
}

fn some_limit<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    Ok(Option::<Limit>::deserialize(deserializer)?.map(|Limit(limit)| limit))
}

fn queues<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, QueueConfig>, D::Error> {
    let check = |name: &str| {
        if name == ANY_KIND {
            return Err("is no queue; `*` is for handlers, a queue is named in full".into());
        }
        check_name(name)
    };
    // `default:` with nothing behind it is a queue with every setting left alone.
    let queues: BTreeMap<String, Option<QueueConfig>> = deserializer.deserialize_map(Named::new("queues", check))?;
    Ok(queues.into_iter().map(|(name, queue)| (name, queue.unwrap_or_default())).collect())
}

fn handlers<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, HandlerConfig>, D::Error> {
    deserializer.deserialize_map(Named::new("handlers", check_name))
}

fn cron<'de, D: Deserializer<'de>>(deserializer: D) -> Result<BTreeMap<String, cron::Definition>, D::Error> {
    let jobs: BTreeMap<String, CronJob> = deserializer.deserialize_map(Named::new("cron jobs", check_name))?;
    Ok(jobs.into_iter().map(|(name, CronJob(job))| (name, job)).collect())
}

/// A definition whose schedule can be read.
struct CronJob(cron::Definition);

impl<'de> Deserialize<'de> for CronJob {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct CronVisitor;
        impl<'de> Visitor<'de> for CronVisitor {
            type Value = CronJob;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a cron job such as `{schedule: \"0 2 * * *\", kind: report}`")
            }
            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<CronJob, A::Error> {
                let job = cron::Definition::deserialize(MapAccessDeserializer::new(map))?;
                job.parse().map_err(de::Error::custom)?;
                Ok(CronJob(job))
            }
        }
        deserializer.deserialize_map(CronVisitor)
    }
}

type NameCheck = fn(&str) -> Result<(), String>;

/// A map by names that are checked and come only once.
struct Named<V> {
    what: &'static str,
    check: NameCheck,
    values: PhantomData<V>,
}

impl<V> Named<V> {
    fn new(what: &'static str, check: NameCheck) -> Self {
        Self { what, check, values: PhantomData }
    }
}

impl<'de, V: Deserialize<'de>> Visitor<'de> for Named<V> {
    type Value = BTreeMap<String, V>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a map of {} by name", self.what)
    }

    // The key alone, as when everything below it is commented out.
    fn visit_unit<E: de::Error>(self) -> Result<Self::Value, E> {
        Ok(BTreeMap::new())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
        let mut named = BTreeMap::new();
        while let Some(name) = map.next_key_seed(Name { check: self.check, taken: &named })? {
            let value = map.next_value()?;
            named.insert(name, value);
        }
        Ok(named)
    }
}

struct Name<'a, V> {
    check: NameCheck,
    taken: &'a BTreeMap<String, V>,
}

impl<'de, V> DeserializeSeed<'de> for Name<'_, V> {
    type Value = String;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<String, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl<V> Visitor<'_> for Name<'_, V> {
    type Value = String;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a name")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<String, E> {
        let checked = match self.taken.contains_key(name) {
            true => Err("is there twice".into()),
            false => (self.check)(name),
        };
        checked.map_err(|reason| E::custom(format!("`{}` {reason}", name.escape_debug())))?;
        Ok(name.to_owned())
    }
}
