//! When a cron expression comes due: time zones, daylight saving, leap days, and days given twice.

use awactl::engine::cron::Schedule;
use chrono::{DateTime, TimeDelta, Utc};

/// The first of them after `from`, as `day hour:minute offset`.
fn due(expression: &str, zone: &str, from: &str, n: usize) -> Vec<String> {
    let schedule = Schedule::parse(expression, zone).unwrap();
    let from: DateTime<Utc> = from.parse().unwrap();
    schedule
        .upcoming(from)
        .take(n)
        .map(|at| schedule.local(at)[8..].rsplit_once(' ').unwrap().0.replace(":00 ", " "))
        .collect()
}

/// (expression, from, what comes due next)
type Table<'a> = &'a [(&'a str, &'a str, &'a [&'a str])];

fn check(zone: &str, table: Table<'_>) {
    for (expression, from, expected) in table {
        assert_eq!(due(expression, zone, from, expected.len()), *expected, "{expression} in {zone} from {from}");
    }
}

const BERLIN: &str = "Europe/Berlin";
const NEW_YORK: &str = "America/New_York";
const LORD_HOWE: &str = "Australia/Lord_Howe";

#[test]
fn a_skipped_hour_fires_once_in_berlin() {
    let evening = "2026-03-28T22:00:00Z";
    check(
        BERLIN,
        &[
            ("30 2 * * *", evening, &["29 03:00 +02:00", "30 02:30 +02:00"]),
            ("0 2 * * *", evening, &["29 03:00 +02:00", "30 02:00 +02:00"]),
            ("59 2 * * *", evening, &["29 03:00 +02:00", "30 02:59 +02:00"]),
            ("0 3 * * *", evening, &["29 03:00 +02:00", "30 03:00 +02:00"]),
            ("*/15 2 * * *", evening, &["29 03:00 +02:00", "30 02:00 +02:00", "30 02:15 +02:00"]),
            ("0,30 2-3 * * *", evening, &["29 03:00 +02:00", "29 03:30 +02:00", "30 02:00 +02:00"]),
            ("0 */2 * * *", "2026-03-28T23:30:00Z", &["29 03:00 +02:00", "29 04:00 +02:00", "29 06:00 +02:00"]),
            ("30 2 29 3 *", "2026-01-01T00:00:00Z", &["29 03:00 +02:00", "29 02:30 +02:00"]),
            ("0 30 2 * * *", evening, &["29 03:00 +02:00", "30 02:30 +02:00"]),
        ],
    );
}

#[test]
fn a_doubled_hour_fires_once_in_berlin() {
    let evening = "2026-10-24T22:30:00Z";
    check(
        BERLIN,
        &[
            ("30 2 * * *", evening, &["25 02:30 +02:00", "26 02:30 +01:00"]),
            ("0 2 * * *", evening, &["25 02:00 +02:00", "26 02:00 +01:00"]),
            ("0 3 * * *", evening, &["25 03:00 +01:00", "26 03:00 +01:00"]),
            (
                "*/15 2 * * *",
                evening,
                &["25 02:00 +02:00", "25 02:15 +02:00", "25 02:30 +02:00", "25 02:45 +02:00", "26 02:00 +01:00"],
            ),
            (
                "*/30 1-3 * * *",
                "2026-10-24T23:50:00Z",
                &["25 02:00 +02:00", "25 02:30 +02:00", "25 03:00 +01:00", "25 03:30 +01:00"],
            ),
            ("30 2 25 10 *", evening, &["25 02:30 +02:00", "25 02:30 +02:00"]),
            // Asked for between the two, and at the very change.
            ("30 2 * * *", "2026-10-25T00:45:00Z", &["26 02:30 +01:00"]),
            ("30 2 * * *", "2026-10-25T01:00:00Z", &["26 02:30 +01:00"]),
            ("30 2 * * *", "2026-10-25T01:10:00Z", &["26 02:30 +01:00"]),
        ],
    );
}

#[test]
fn every_hour_goes_by_the_time_that_passes() {
    check(
        BERLIN,
        &[
            ("0 * * * *", "2026-03-28T23:30:00Z", &["29 01:00 +01:00", "29 03:00 +02:00", "29 04:00 +02:00"]),
            ("30 * * * *", "2026-03-28T23:45:00Z", &["29 01:30 +01:00", "29 03:30 +02:00", "29 04:30 +02:00"]),
            ("*/15 * * * *", "2026-03-29T00:40:00Z", &["29 01:45 +01:00", "29 03:00 +02:00", "29 03:15 +02:00"]),
            (
                "0 * * * *",
                "2026-10-24T22:30:00Z",
                &["25 01:00 +02:00", "25 02:00 +02:00", "25 02:00 +01:00", "25 03:00 +01:00"],
            ),
            ("*/15 * * * *", "2026-10-25T00:40:00Z", &["25 02:45 +02:00", "25 02:00 +01:00", "25 02:15 +01:00"]),
        ],
    );
    for zone in [BERLIN, NEW_YORK] {
        let schedule = Schedule::parse("*/15 * * * *", zone).unwrap();
        let from = "2026-01-01T00:00:00Z".parse().unwrap();
        let all: Vec<_> = schedule
            .upcoming(from)
            .take_while(|at| *at < "2027-01-01T00:00:00Z".parse::<DateTime<Utc>>().unwrap())
            .collect();
        assert!(all.windows(2).all(|two| two[1] - two[0] == TimeDelta::minutes(15)));
        assert_eq!(all.len(), 365 * 96 - 1);
    }
}

#[test]
fn new_york_changes_at_another_hour() {
    check(
        NEW_YORK,
        &[
            ("30 2 * * *", "2026-03-08T00:00:00Z", &["08 03:00 -04:00", "09 02:30 -04:00"]),
            ("0 * * * *", "2026-03-08T05:30:00Z", &["08 01:00 -05:00", "08 03:00 -04:00"]),
            ("*/15 * * * *", "2026-03-08T06:40:00Z", &["08 01:45 -05:00", "08 03:00 -04:00"]),
            ("30 1 * * *", "2026-11-01T04:00:00Z", &["01 01:30 -04:00", "02 01:30 -05:00"]),
            // 02:00 is when it becomes 01:00 again: it is shown once, an hour later.
            ("0 2 * * *", "2026-11-01T04:00:00Z", &["01 02:00 -05:00", "02 02:00 -05:00"]),
            ("0 * * * *", "2026-11-01T04:30:00Z", &["01 01:00 -04:00", "01 01:00 -05:00", "01 02:00 -05:00"]),
            ("*/15 1 * * *", "2026-11-01T05:20:00Z", &["01 01:30 -04:00", "01 01:45 -04:00", "02 01:00 -05:00"]),
        ],
    );
}

#[test]
fn lord_howe_changes_by_half_an_hour() {
    check(
        LORD_HOWE,
        &[
            ("15 2 * * *", "2026-10-03T12:00:00Z", &["04 02:30 +11:00", "05 02:15 +11:00"]),
            ("45 2 * * *", "2026-10-03T12:00:00Z", &["04 02:45 +11:00", "05 02:45 +11:00"]),
            ("15 * * * *", "2026-10-03T14:00:00Z", &["04 01:15 +10:30", "04 02:30 +11:00", "04 03:15 +11:00"]),
            ("*/15 * * * *", "2026-10-03T15:10:00Z", &["04 01:45 +10:30", "04 02:30 +11:00", "04 02:45 +11:00"]),
            ("45 1 * * *", "2026-04-04T12:00:00Z", &["05 01:45 +11:00", "06 01:45 +10:30"]),
            ("0 2 * * *", "2026-04-04T12:00:00Z", &["05 02:00 +10:30", "06 02:00 +10:30"]),
            (
                "*/15 * * * *",
                "2026-04-04T14:40:00Z",
                &["05 01:45 +11:00", "05 01:30 +10:30", "05 01:45 +10:30", "05 02:00 +10:30"],
            ),
        ],
    );
}

#[test]
fn a_midnight_or_a_whole_day_that_is_skipped_fires_once() {
    check("Asia/Beirut", &[("0 0 * * *", "2026-03-28T12:00:00Z", &["29 01:00 +03:00", "30 00:00 +03:00"])]);
    check("Pacific/Apia", &[("0 12 30 12 *", "2011-12-01T00:00:00Z", &["31 00:00 +14:00", "30 12:00 +14:00"])]);
}

#[test]
fn a_daily_time_fires_once_a_day_all_year() {
    for zone in [BERLIN, NEW_YORK, LORD_HOWE] {
        for hour in 0..4 {
            for minute in [0, 15, 30, 45] {
                let schedule = Schedule::parse(&format!("{minute} {hour} * * *"), zone).unwrap();
                let from = "2026-01-01T17:00:00Z".parse().unwrap();
                let mut days: Vec<_> =
                    schedule.upcoming(from).take(365).map(|at| schedule.local(at)[..10].to_owned()).collect();
                days.dedup();
                assert_eq!(days.len(), 365, "{hour}:{minute} in {zone}");
                let first: chrono::NaiveDate = days[0].parse().unwrap();
                let last: chrono::NaiveDate = days[364].parse().unwrap();
                assert_eq!(last - first, TimeDelta::days(364), "{hour}:{minute} in {zone}");
            }
        }
    }
}

#[test]
fn calendars_are_kept() {
    let dates = |expression: &str, from: &str, n| -> Vec<String> {
        let schedule = Schedule::parse(expression, "UTC").unwrap();
        schedule.upcoming(from.parse().unwrap()).take(n).map(|at| at.format("%F").to_string()).collect()
    };
    assert_eq!(dates("0 0 29 2 *", "2026-01-01T00:00:00Z", 3), ["2028-02-29", "2032-02-29", "2036-02-29"]);
    assert_eq!(dates("0 0 29 2 *", "2097-01-01T00:00:00Z", 1), ["2104-02-29"], "2100 is no leap year");
    // Either kind of day is enough when both are given.
    assert_eq!(
        dates("0 0 13 * 5", "2026-11-27T12:00:00Z", 4),
        ["2026-12-04", "2026-12-11", "2026-12-13", "2026-12-18"]
    );
    assert_eq!(dates("0 0 31 * *", "2026-01-31T12:00:00Z", 2), ["2026-03-31", "2026-05-31"]);
    assert_eq!(dates("0 0 * * 7", "2026-11-30T00:00:00Z", 1), dates("0 0 * * SUN", "2026-11-30T00:00:00Z", 1));
    assert_eq!(dates("@weekly", "2026-11-30T00:00:00Z", 1), ["2026-12-06"]);
    assert_eq!(
        due("*/20 * * * * *", "UTC", "2026-01-01T00:00:00.5Z", 3),
        ["01 00:00:20 +00:00", "01 00:00:40 +00:00", "01 00:01 +00:00"]
    );
}

#[test]
fn what_is_no_schedule_is_refused_by_name() {
    for (expression, zone, named) in [
        ("nonsense", "UTC", "nonsense"),
        ("60 * * * *", "UTC", "60 * * * *"),
        ("* * * *", "UTC", "* * * *"),
        ("", "UTC", "cron expression"),
        ("* * * * *", "Mars/Olympus", "Mars/Olympus"),
        ("* * * * *", "", "timezone"),
        ("* * * * *", "../../etc/passwd", "timezone"),
    ] {
        let error = Schedule::parse(expression, zone).unwrap_err().to_string();
        assert!(error.contains(named), "{error}");
    }
    assert_eq!(Schedule::parse("0 0 30 2 *", "UTC").unwrap().next_after(Utc::now()), None, "there is no 30 February");
}
