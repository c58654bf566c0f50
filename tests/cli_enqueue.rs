//! `awactl enqueue --file` on files that are not as they should be: what is said, what is counted, and that it ends.

mod cli_common;

use std::fmt::Write as _;
use std::fs;

use cli_common::{Ran, awactl, server};

fn database() -> String {
    let database = server().database("");
    let url = server().url("postgres", &database);
    assert_eq!(awactl(&[], &["--database-url", &url, "migrate"]).code, 0);
    url
}

fn enqueue_file(url: &str, bytes: impl AsRef<[u8]>, more: &[&str]) -> Ran {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), bytes).unwrap();
    let args = ["--database-url", url, "-o", "json", "enqueue", "--file", file.path().to_str().unwrap()];
    awactl(&[], &[&args[..], more].concat())
}

#[test]
fn more_lines_than_are_listed_are_counted_and_said_to_be_more() {
    let url = database();
    let mut lines = String::from("\n");
    for n in 0..130 {
        writeln!(lines, "{{\"kind\":\"a\",\"unique\":{{}}}}\n{{\"knd\":{n}}}").unwrap();
    }
    let ran = enqueue_file(&url, lines, &["--on-error", "skip"]);
    let report = ran.json();
    for (field, count) in [
        ("lines", 261),
        ("blank", 1),
        ("enqueued", 1),
        ("duplicates", 129),
        ("duplicate_lines_not_listed", 29),
        ("skipped", 130),
        ("bad_lines_not_listed", 30),
    ] {
        assert_eq!(report[field], count, "{field}: {report}");
    }
    assert_eq!(report["duplicate_lines"].as_array().unwrap().len(), 100);
    assert!(ran.stderr.contains("29 duplicates before these") && ran.stderr.contains("30 bad lines before these"));
}

#[test]
fn a_byte_order_mark_before_the_first_line_is_no_part_of_it() {
    let url = database();
    let ran = enqueue_file(&url, "\u{feff}{\"kind\":\"a\"}\r\n{\"kind\":\"a\"}\r\n", &[]);
    assert_eq!((ran.code, &ran.json()["enqueued"]), (0, &2.into()), "{ran:?}");
    let ran = enqueue_file(&url, "{\"kind\":\"a\"}\n\u{feff}{\"kind\":\"a\"}\n", &[]);
    assert!(ran.code == 1 && ran.stderr.contains("line 2: it is not a JSON object"), "{ran:?}");
}

#[test]
fn a_line_that_is_too_long_is_named_and_one_without_an_end_ends_it() {
    let url = database();
    let long = format!("{{\"kind\":\"a\",\"args\":\"{}\"}}", "x".repeat(16 << 20));
    let lines = format!("{{\"kind\":\"a\"}}\n{long}\n{{\"kind\":\"a\"}}\n");
    let ran = enqueue_file(&url, &lines, &["--batch", "1"]);
    assert!(ran.code == 1 && ran.stderr.contains("line 2: it is longer than 16 MiB"), "{ran:?}");
    assert_eq!((&ran.json()["enqueued"], &ran.json()["resume_from"]), (&1.into(), &2.into()));
    let ran = enqueue_file(&url, &lines, &["--on-error", "skip"]);
    assert_eq!((ran.code, &ran.json()["enqueued"], &ran.json()["skipped"]), (0, &2.into(), &1.into()), "{ran:?}");

    // No newline will ever come from there.
    for (on_error, why) in [("stop", "longer than 16 MiB"), ("skip", "no end within 64 MiB")] {
        let ran = awactl(&[], &["--database-url", &url, "enqueue", "--file", "/dev/zero", "--on-error", on_error]);
        assert!(ran.code == 1 && ran.stderr.contains("line 1: ") && ran.stderr.contains(why), "{ran:?}");
    }
}

#[test]
fn a_bad_line_names_its_field_and_what_is_allowed() {
    let url = database();
    for (line, said) in [
        (r#"{"kind":"a","priority":"high"}"#, "priority must be a whole number from 1 to 4, not the text \"high\""),
        (r#"{"kind":"a","max_attempts":70000}"#, "max_attempts must be a whole number from 1 to 1000, not `70000`"),
        (r#"{"kind":"a","run_at":"soon"}"#, "run_at must be a time such as 2026-01-31T09:00:00Z"),
        (r#"{"kind":"a","tags":["x",1]}"#, "tags[1] must be text, not `1`"),
        (r#"{"kind":"a","unique":{"by_period":60}}"#, "unique.by_period must be a duration in whole seconds"),
        (r#"{"kind":"a","unique":true}"#, "unique must be an object with `by_queue`"),
        (r#"{"kind":"a","qeue":"b"}"#, "line 1: unknown field `qeue`, allowed: `kind`, `queue`"),
        (r#"{"queue":"b"}"#, "line 1: `kind` is missing"),
        (r#"{"kind":"a""#, "it is not JSON: it ends within an object"),
    ] {
        let ran = enqueue_file(&url, line, &[]);
        assert!(ran.code == 1 && ran.stderr.contains(said), "{line}: {}", ran.stderr);
    }
}

#[test]
fn a_flag_that_is_no_number_or_out_of_range_says_what_it_must_be() {
    for (args, said) in [
        (&["enqueue", "a", "--priority", "9"][..], "a whole number from 1 to 4"),
        (&["enqueue", "a", "--max-attempts", "many"], "a whole number from 1 to 1,000"),
        (&["enqueue", "a", "--run-at", "soon"], "a time such as 2026-01-31T09:00:00Z"),
        (&["enqueue", "a", "--in", "-3s"], "`-3s` is not a duration"),
        (&["enqueue"], "KIND|--file"),
        (&["job", "show", "x"], "the id of a job is a whole number"),
        (&["inspect", "rings", "--watch=0"], "it must be longer than nothing"),
        (&["inspect", "rings", "--watch", "2s"], "as in --watch=INTERVAL"),
        (&["--embedded", "/nowhere", "migrate"], "as in --embedded=DIR"),
        (&["bench", "run", "x", "--time-scale", "0"], "a number above 0 and at most 100"),
    ] {
        let ran = awactl(&[], args);
        assert!(ran.code == 2 && ran.stderr.contains(said), "{args:?}: {}", ran.stderr);
    }
}
