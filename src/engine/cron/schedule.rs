//! When a cron expression comes due in a time zone, daylight saving included.
//!
//! The expression is matched against the wall clock alone, as if there were no time zones; this file says which instant a
//! wall clock time is. A time that the clock skips comes due once, when the clock has jumped, however many such times there
//! are; a time that the clock shows twice comes due once, the first time. Both as cron(8) does, and as it does, an
//! expression for every hour of the day goes by the time that passes instead: it neither runs twice when an hour is skipped
//! nor stands still while one repeats. Guarded by the tables in `tests/engine_cron_schedule.rs`.

use chrono::{DateTime, FixedOffset, Offset as _, TimeDelta, Utc};
use croner::Cron;
use croner::parser::CronParser;
use jiff::Timestamp;
use jiff::tz::{TimeZone, TimeZoneDatabase};

use crate::engine::error::{EngineError, Result};

const HOUR: i32 = 3600;

/// What the fields of an expression hold, in the order of one that has all seven.
const FIELDS: [(&str, &str); 7] = [
    ("second", "0 to 59"),
    ("minute", "0 to 59"),
    ("hour", "0 to 23"),
    ("day of month", "1 to 31, or L"),
    ("month", "1 to 12, or JAN to DEC"),
    ("day of week", "0 to 7, or SUN to SAT"),
    ("year", "1 to 9999"),
];

/// A cron expression in a time zone.
#[derive(Debug, Clone)]
pub struct Schedule {
    cron: Cron,
    zone: TimeZone,
    every_hour: bool,
}

impl Schedule {
    /// Five fields (minute, hour, day of month, month, day of week), six with seconds before them, seven with years after,
    /// or a nickname such as `@daily`; and an IANA time zone.
    pub fn parse(expression: &str, timezone: &str) -> Result<Self> {
        // Steps such as 5/10 are what 0.5 took.
        let parser = CronParser::builder().sloppy_ranges(true).build();
        let cron = parser
            .parse(expression)
            .map_err(|_| EngineError::invalid("cron expression", why_none(&parser, expression)))?;
        let zone = TimeZoneDatabase::bundled().get(timezone).map_err(|_| {
            EngineError::invalid("timezone", format!("{timezone:?} is none; name it like Europe/Berlin, or UTC"))
        })?;
        let every_hour = (0..24).all(|hour| cron.pattern.hours.values().contains(&hour));
        Ok(Self { cron, zone, every_hour })
    }

    /// The first instant after `after` at which it comes due; `None` when there is none.
    pub fn next_after(&self, after: DateTime<Utc>) -> Option<DateTime<Utc>> {
        let mut from = after;
        let mut inclusive = false;
        // One turn a stretch of constant offset from UTC.
        loop {
            let at = timestamp(from)?;
            let offset = self.zone.to_offset(at).seconds();
            let mut wall = from + seconds(offset);
            if let Some(floor) = self.end_of_repetition(at, offset).filter(|floor| wall < *floor) {
                (wall, inclusive) = (floor, true);
            }
            let wall = self.cron.find_next_occurrence(&wall, inclusive).ok()?;
            let due = wall - seconds(offset);
            let Some(change) = self.zone.following(at).next() else {
                return Some(due);
            };
            let changed_at = datetime(change.timestamp())?;
            if due < changed_at {
                return Some(due);
            }
            let gap = change.offset().seconds() - offset;
            // What is skipped comes due at the jump. Not for every hour of the day and a gap of whole hours: then each
            // skipped time has its like after the gap.
            let makes_up = !self.every_hour || gap % HOUR != 0;
            if makes_up && wall < changed_at + seconds(offset + gap) {
                return Some(changed_at);
            }
            (from, inclusive) = (changed_at, true);
        }
    }

    /// The next ones, in order.
    pub fn upcoming(&self, after: DateTime<Utc>) -> impl Iterator<Item = DateTime<Utc>> {
        std::iter::successors(self.next_after(after), |at| self.next_after(*at))
    }

    /// How the zone's wall clock shows `at`, with its offset from UTC and its abbreviation.
    pub fn local(&self, at: DateTime<Utc>) -> String {
        let Some(info) = timestamp(at).map(|at| self.zone.to_offset_info(at)) else {
            return String::new();
        };
        let offset = FixedOffset::east_opt(info.offset().seconds()).unwrap_or(Utc.fix());
        format!("{} {}", at.with_timezone(&offset).format("%Y-%m-%d %H:%M:%S %:z"), info.abbreviation())
    }

    /// Up to where the wall clock shows what it showed before `at`'s stretch, if nothing may come due by that again.
    fn end_of_repetition(&self, at: Timestamp, offset: i32) -> Option<DateTime<Utc>> {
        if self.every_hour {
            return None;
        }
        // The one that begins at `at` itself, too.
        let change = self.zone.preceding(at.checked_add(jiff::SignedDuration::from_nanos(1)).ok()?).next()?;
        let before = change.timestamp().checked_sub(jiff::SignedDuration::from_nanos(1)).ok()?;
        let offset_before = self.zone.to_offset(before).seconds();
        (offset_before > offset).then(|| datetime(change.timestamp()).map(|at| at + seconds(offset_before)))?
    }
}

fn seconds(n: i32) -> TimeDelta {
    TimeDelta::seconds(n.into())
}

fn timestamp(at: DateTime<Utc>) -> Option<Timestamp> {
    Timestamp::new(at.timestamp(), at.timestamp_subsec_nanos() as i32).ok()
}

fn datetime(at: Timestamp) -> Option<DateTime<Utc>> {
    DateTime::from_timestamp(at.as_second(), at.subsec_nanosecond() as u32)
}

/// Why an expression is none: its first field that the parser refuses, among others that it takes.
fn why_none(parser: &CronParser, expression: &str) -> String {
    let fields: Vec<&str> = expression.split_whitespace().collect();
    let names = match fields.len() {
        5 => &FIELDS[1..6],
        6 => &FIELDS[..6],
        7 => &FIELDS[..],
        _ => {
            return format!(
                "{expression:?} is none; give minute, hour, day of month, month and day of week, such as \"30 2 * * *\"; \
                 seconds may stand before them"
            );
        }
    };
    for (at, (field, (name, allowed))) in fields.iter().zip(names).enumerate() {
        let alone: Vec<&str> = (0..fields.len()).map(|other| if other == at { field } else { "*" }).collect();
        if parser.parse(&alone.join(" ")).is_err() {
            return format!(
                "{expression:?} is none: its {name} is {field:?}; allowed are {allowed}, lists, ranges and steps"
            );
        }
    }
    format!("{expression:?} is none")
}
