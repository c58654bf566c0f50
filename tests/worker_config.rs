//! `workers.yaml`: what it can say, and how it is told that it is wrong.

use std::collections::BTreeMap;
use std::io::Write;
use std::time::Duration;

use awactl::engine::worker::handlers::{Builtin, Exec, FlakyRule};
use awactl::engine::worker::{Config, ConfigError, HandlerConfig, QueueConfig};

fn error(text: &str) -> String {
    match Config::parse(text) {
        Ok(config) => panic!("accepted: {config:?}"),
        Err(error) => error.to_string(),
    }
}

/// Checks that the message has every one of `parts`.
#[track_caller]
fn assert_error(text: &str, parts: &[&str]) {
    let message = error(text);
    for part in parts {
        assert!(message.contains(part), "no {part:?} in {message:?}");
    }
}

#[test]
fn everything_it_can_say_is_read() {
    let config = Config::parse(
        r#"
max_workers: 40
queues:
  default: { workers: 8, deadline: 1h30m, rate_limit: 2.5, weight: 3 }
  plain: {}
  bare:
handlers:
  resize: { exec: [/usr/bin/convert, -, 5], timeout: 30s, env: {A: b, N: 1}, cwd: /tmp, clear_env: true }
  ping: { builtin: noop }
  slow: { builtin: sleep, duration: 100ms }
  shaky: { builtin: flaky, probability: 0.5 }
  shy: { builtin: flaky }
  "*": { builtin: echo }
"#,
    )
    .unwrap();

    assert_eq!(config.max_workers, Some(40));
    let default = QueueConfig::default();
    let everything = QueueConfig {
        workers: 8,
        deadline: Some(Duration::from_secs(5400)),
        rate_limit: Some(2.5),
        weight: 3,
        ..QueueConfig::default()
    };
    assert_eq!(config.queues["default"], everything);
    assert_eq!(config.queues["plain"], default);
    assert_eq!(config.queues["bare"], default);

    let handler = |kind: &str| config.handlers[kind].clone();
    assert_eq!(
        handler("resize"),
        HandlerConfig::Exec(Exec {
            argv: vec!["/usr/bin/convert".into(), "-".into(), "5".into()],
            env: BTreeMap::from([("A".into(), "b".into()), ("N".into(), "1".into())]),
            cwd: Some("/tmp".into()),
            timeout: Some(Duration::from_secs(30)),
            clear_env: true,
        })
    );
    assert_eq!(handler("slow"), HandlerConfig::Builtin(Builtin::Sleep { duration: Some(Duration::from_millis(100)) }));
    assert_eq!(handler("shaky"), HandlerConfig::Builtin(Builtin::Flaky(FlakyRule::Probability(0.5))));
    assert_eq!(handler("shy"), HandlerConfig::Builtin(Builtin::Flaky(FlakyRule::FailTimes(1))));

    let registry = config.registry().unwrap();
    assert_eq!(registry.kinds(), ["ping", "resize", "shaky", "shy", "slow"]);
    assert!(registry.handles_any());
    assert_eq!(registry.get("ping").unwrap().kind(), "ping");
    assert_eq!(registry.get("unheard of").unwrap().kind(), "*");
}

#[test]
fn an_empty_file_says_nothing() {
    for text in ["", "# nothing yet\n", "queues:\nhandlers:\n", "{}"] {
        let config = Config::parse(text).unwrap_or_else(|error| panic!("{text:?}: {error}"));
        assert_eq!(config, Config::default(), "{text:?}");
        assert!(config.registry().unwrap().is_empty());
    }
}

#[test]
fn the_example_works() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/examples/workers.yaml");
    let config = Config::load(path).unwrap();
    assert_eq!(config.queues["default"].workers, 32);
    assert!(config.registry().unwrap().get("ping").is_some());
}

#[test]
fn unknown_names_come_with_what_is_allowed_the_place_and_a_guess() {
    assert_error(
        "queues:\n  default:\n    worker: 3\n",
        &[
            "queues.default",
            "unknown field `worker`",
            "`workers`, `deadline`, `rate_limit`, `weight`",
            "line 3 column 5",
            "did you mean `workers`?",
        ],
    );
    assert_error(
        "handlers:\n  a: { builtin: nop }\n",
        &["handlers.a.builtin", "unknown builtin `nop`", "`flaky`", "line 2 column 17", "did you mean `noop`?"],
    );
    assert_error("handler: {}", &["unknown field `handler`", "did you mean `handlers`?"]);
    assert_error("queues:\n  default: { rate: 5 }", &["unknown field `rate`", "`workers`, `deadline`", "`rate_limit`"]);
    assert_error("[1]", &["a map with `queues`, `handlers`, `cron` and `max_workers`"]);
    assert_error("queues: { q: 5 }", &["queues.q", "a map with `workers`, `deadline`"]);
    assert!(!error("zebra: {}").contains("did you mean"));
}

#[test]
fn values_out_of_range_name_the_field_the_range_and_the_place() {
    for (workers, shown) in [("0", "`0`"), ("4097", "`4097`"), ("99999", "`99999`")] {
        assert_error(
            &format!("queues:\n  q:\n    workers: {workers}\n"),
            &["queues.q.workers", shown, "1 to 4096", "line 3 column 14"],
        );
    }
    for workers in ["-1", "1.5", "many"] {
        assert_error(
            &format!("queues:\n  q: {{ workers: {workers} }}\n"),
            &["queues.q.workers", workers, "1 to 4096", "line 2"],
        );
    }
    for deadline in ["30", "soon", "-5s", "4000d"] {
        assert_error(
            &format!("queues:\n  q:\n    deadline: {deadline}\n"),
            &["queues.q.deadline", deadline, "line 3 column 15"],
        );
    }
    assert_error("queues:\n  q: { deadline: 0s }\n", &["deadline", "longer than zero", "line 2"]);
    assert_error(
        "handlers:\n  a: { builtin: flaky, probability: 1.5 }\n",
        &["handlers.a", "`probability` is 1.5", "0.0 to 1.0", "line 2"],
    );
}

#[test]
fn names_are_checked() {
    let long = "x".repeat(201);
    for section in ["queues", "handlers"] {
        assert_error(
            &format!("{section}:\n  ok: {{ }}\n  {long}: {{}}\n")
                .replace("ok: { }", if section == "queues" { "ok: {}" } else { "ok: {builtin: noop}" }),
            &[section, "201 characters", "1 to 200", "line 3 column 3"],
        );
        assert_error(&format!("{section}:\n  \"\": {{}}\n"), &[section, "0 characters", "1 to 200"]);
        assert_error(&format!("{section}:\n  \"a\\nb\": {{}}\n"), &[section, "`a\\nb`", "control character"]);
    }
    let widest = "é".repeat(200);
    Config::parse(&format!("queues: {{ {widest}: {{}} }}")).unwrap();
    assert_error("queues:\n  a: {}\n  b: {}\n  a: {}\n", &["`a` is there twice", "line 4 column 3"]);
    assert_error("queues:\n  \"*\": {}\n", &["`*`", "named in full"]);
}

#[test]
fn a_handler_is_one_thing_with_its_own_fields() {
    for (handler, parts) in [
        ("{}", &["neither `exec", "noop, sleep, echo, fail, flaky"][..]),
        ("{ exec: [a], builtin: noop }", &["both `exec` and `builtin`"]),
        ("{ exec: [] }", &["`exec` names no program"]),
        ("{ exec: [\"\"] }", &["`exec` names no program"]),
        ("{ exec: [\"a\\0b\"] }", &["U+0000"]),
        ("{ exec: ls -l }", &["exec", "must be a list"]),
        ("{ exec: [a], env: { \"A=B\": c } }", &["`env`", "`A=B`", "no `=`"]),
        ("{ exec: [a], env: { AWA_JOB_ID: 1 } }", &["AWA_JOB_ID", "worker sets"]),
        ("{ exec: [a], timeout: 0s }", &["longer than zero"]),
        ("{ exec: [a], duration: 1s }", &["`duration` does not go with `exec`", "`clear_env`"]),
        ("{ builtin: noop, timeout: 1s }", &["`timeout` does not go with builtin `noop`", "nothing more"]),
        ("{ builtin: sleep, probability: 1 }", &["`probability` does not go", "only `duration`"]),
        ("{ builtin: flaky, probability: 1, fail_times: 2 }", &["exclude each other"]),
        ("noop", &["handler such as"]),
    ] {
        let mut parts = parts.to_vec();
        parts.extend(["handlers.k", "line 2"]);
        assert_error(&format!("handlers:\n  k: {handler}\n"), &parts);
    }
}

#[test]
fn a_file_that_cannot_be_used_is_named() {
    let missing = Config::load("/nonexistent/workers.yaml").unwrap_err();
    assert!(matches!(missing, ConfigError::Read { .. }));
    assert!(missing.to_string().contains("`/nonexistent/workers.yaml`"));

    let mut file = tempfile::NamedTempFile::new().unwrap();
    file.write_all(b"queues: [\n").unwrap();
    let invalid = Config::load(file.path()).unwrap_err().to_string();
    assert!(invalid.contains(file.path().to_str().unwrap()) && invalid.contains("line "), "{invalid}");
}

#[test]
fn cron_jobs_are_read_with_their_defaults_and_checked() {
    let config = Config::parse(
        "cron:\n  nightly: { schedule: '30 2 * * *', kind: report }\n  \"tick\": { schedule: '*/5 * * * *', kind: tick, timezone: Europe/Berlin, args: { n: [1, ~] }, tags: [a] }\n",
    )
    .unwrap();
    let nightly = &config.cron["nightly"];
    assert_eq!(
        (&*nightly.timezone, &*nightly.queue, nightly.priority, nightly.max_attempts),
        ("UTC", "default", 2, 25)
    );
    assert!(nightly.args.is_empty_object() && nightly.metadata.is_empty_object());
    assert_eq!(config.cron["tick"].args.as_str(), r#"{"n":[1,null]}"#);
    assert_error("cron:\n  a: { schedule: '* * * *', kind: k }\n", &["cron.a", "\"* * * *\"", "line 2"]);
    assert_error("cron:\n  a: { schedule: '* * * * *', kind: k, timezone: Mars }\n", &["\"Mars\"", "line 2"]);
    assert_error("cron:\n  a: { schedule: '* * * * *', kin: k }\n", &["unknown field `kin`", "did you mean `kind`?"]);
    assert_error("cron:\n  a: { kind: k }\n", &["`schedule` is missing"]);
    assert_error("cron:\n  a: { schedule: '@daily', kind: k, args: { a: \"\\0\" } }\n", &["U+0000"]);
}

#[test]
fn rates_weights_and_the_common_limit_have_bounds() {
    for (setting, part) in [
        ("rate_limit: 0", "more than 0"),
        ("rate_limit: -1", "jobs per second"),
        ("rate_limit: .nan", "more than 0"),
        ("rate_limit: many", "jobs per second"),
        ("weight: 0", "1 to 1000"),
        ("weight: 1.5", "1 to 1000"),
    ] {
        assert_error(&format!("queues: {{ a: {{ {setting} }} }}"), &[part]);
    }
    assert_error("max_workers: 0", &["1 to 4096"]);
    let whole = Config::parse("queues: { a: { rate_limit: 10 } }").unwrap();
    assert_eq!(whole.queues["a"].rate_limit, Some(10.0));
}
