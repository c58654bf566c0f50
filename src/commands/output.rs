//! Results on standard output: a table for people, JSON or YAML for programs.

use std::ffi::OsString;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::Duration;

use clap::ValueEnum;
use comfy_table::{Cell, CellAlignment, ColumnConstraint, ContentArrangement, Row, Width, presets};
use serde::Serialize;

/// Width when nobody can tell: what a mail, a ticket or a CI log shows without wrapping.
const PIPED_WIDTH: u16 = 80;

/// No column of text is squeezed below this, however wide the others are: a table that is too wide can still be read.
const NARROWEST: u16 = 12;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Format {
    #[default]
    Table,
    Json,
    Yaml,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub enum Color {
    #[default]
    Auto,
    Always,
    Never,
}

impl Color {
    /// Needed before parsing, for the colours of usage errors; the last one given counts.
    pub fn from_arguments(arguments: impl IntoIterator<Item = OsString>) -> Self {
        let arguments: Vec<_> = arguments
            .into_iter()
            .map(|argument| argument.to_string_lossy().into_owned())
            .take_while(|argument| argument != "--")
            .collect();
        let mut color = Self::default();
        for (index, argument) in arguments.iter().enumerate() {
            let value = match argument.strip_prefix("--color") {
                Some("") => arguments.get(index + 1).map(String::as_str),
                Some(rest) => rest.strip_prefix('='),
                None => None,
            };
            if let Some(Ok(given)) = value.map(|value| Self::from_str(value, false)) {
                color = given;
            }
        }
        color
    }

    pub fn enabled(self, is_terminal: bool) -> bool {
        match self {
            Self::Always => true,
            Self::Never => false,
            Self::Auto => is_terminal && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty()),
        }
    }
}

#[derive(Debug, Clone, Copy)]
pub struct Output {
    format: Format,
    color: bool,
}

impl Output {
    pub fn new(format: Format, color: Color) -> Self {
        Self { format, color: color.enabled(io::stdout().is_terminal()) }
    }

    pub fn format(&self) -> Format {
        self.format
    }

    /// Whether standard output may hold colours.
    pub fn color(&self) -> bool {
        self.color
    }

    /// Prints `data`; `table` is only asked when people read it.
    pub fn print<T: Serialize>(&self, data: &T, table: impl FnOnce(&T) -> Table) -> anyhow::Result<Reader> {
        let mut text = match self.format {
            Format::Table => table(data).render(self.color),
            Format::Json => serde_json::to_string_pretty(data)?,
            Format::Yaml => serde_yaml::to_string(data)?,
        };
        if !text.ends_with('\n') {
            text.push('\n');
        }
        self.raw(text.as_bytes())
    }

    /// Prints bytes as they are (a script, a page). A reader that left early is no failure, but whoever prints again and
    /// again should stop then.
    pub fn raw(&self, bytes: &[u8]) -> anyhow::Result<Reader> {
        let mut stdout = io::stdout().lock();
        match stdout.write_all(bytes).and_then(|()| stdout.flush()) {
            Ok(()) => Ok(Reader::Reads),
            Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(Reader::Left),
            Err(error) => Err(error.into()),
        }
    }
}

/// Whether anybody still reads standard output (`| head` does not for long).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    Reads,
    Left,
}

/// A table of texts; columns named in `numbers` are aligned right.
pub struct Table {
    inner: comfy_table::Table,
    header: Vec<String>,
    numbers: Vec<usize>,
    whole: Vec<usize>,
    /// Columns to leave out: no row has said anything in them so far.
    idle: Vec<usize>,
    rows: usize,
    empty: &'static str,
    next: Option<Box<Table>>,
}

impl Table {
    pub fn new(header: &[&str]) -> Self {
        let mut inner = comfy_table::Table::new();
        let terminal = io::stdout().is_terminal();
        // Pseudo-terminals of CI systems often say that they are 0 columns wide.
        let width = inner.width().filter(|width| terminal && *width >= 40).unwrap_or(PIPED_WIDTH);
        inner.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
        Self {
            inner,
            header: header.iter().map(|name| (*name).to_owned()).collect(),
            numbers: Vec::new(),
            whole: Vec::new(),
            idle: Vec::new(),
            rows: 0,
            empty: "nothing to show",
            next: None,
        }
    }

    /// One thing, a line for each of its facts.
    pub fn facts<V: ToString>(facts: impl IntoIterator<Item = (&'static str, V)>) -> Self {
        let mut table = Self::new(&[]).whole(&[0]);
        for (name, value) in facts {
            table.row([name.to_owned(), value.to_string()]);
        }
        table
    }

    pub fn numbers(mut self, columns: &[usize]) -> Self {
        self.numbers = columns.to_vec();
        self
    }

    /// Columns that are never broken into lines.
    pub fn whole(mut self, columns: &[usize]) -> Self {
        self.whole = columns.to_vec();
        self
    }

    /// Leaves out those of `columns` in which every row is empty or 0.
    pub fn without_idle(mut self, columns: &[usize]) -> Self {
        self.idle = columns.to_vec();
        self
    }

    /// Another table below this one.
    pub fn then(mut self, next: Table) -> Self {
        self.next = Some(Box::new(match self.next.take() {
            Some(middle) => middle.then(next),
            None => next,
        }));
        self
    }

    /// Another table below this one, if it has rows.
    pub fn then_if_any(self, next: Table) -> Self {
        if next.rows == 0 { self } else { self.then(next) }
    }

    /// What to say instead of a table without rows.
    pub fn when_empty(mut self, text: &'static str) -> Self {
        self.empty = text;
        self
    }

    pub fn row<C: Into<String>>(&mut self, cells: impl IntoIterator<Item = C>) -> &mut Self {
        let cells = cells.into_iter().enumerate().map(|(column, cell)| {
            let text = printable(cell.into());
            if !text.is_empty() && text != "0" {
                self.idle.retain(|idle| *idle != column);
            }
            let cell = Cell::new(text);
            if self.numbers.contains(&column) { cell.set_alignment(CellAlignment::Right) } else { cell }
        });
        self.inner.add_row(Row::from(cells.collect::<Vec<_>>()));
        self.rows += 1;
        self
    }

    fn render(mut self, color: bool) -> String {
        if let Some(next) = self.next.take() {
            return format!("{}\n\n{}", self.render(color), next.render(color));
        }
        if self.rows == 0 {
            return self.empty.to_owned();
        }
        if !self.header.is_empty() {
            let cells = self.header.iter().enumerate().map(|(column, name)| {
                let mut cell = Cell::new(name);
                if self.numbers.contains(&column) {
                    cell = cell.set_alignment(CellAlignment::Right);
                }
                if color {
                    cell = cell.add_attribute(comfy_table::Attribute::Bold);
                }
                cell
            });
            self.inner.set_header(cells.collect::<Vec<_>>());
        }
        if color {
            self.inner.enforce_styling();
        } else {
            self.inner.force_no_tty();
        }
        let widths = self.inner.column_max_content_widths();
        for (column, width) in self.inner.column_iter_mut().zip(widths) {
            column.set_padding((0, 2));
            // Numbers and times cannot be read in pieces.
            let index = column.index;
            column.set_constraint(if self.idle.contains(&index) {
                ColumnConstraint::Hidden
            } else if self.numbers.contains(&index) || self.whole.contains(&index) {
                ColumnConstraint::ContentWidth
            } else {
                ColumnConstraint::LowerBoundary(Width::Fixed(width.min(NARROWEST)))
            });
        }
        let lines = self.inner.lines().map(|line| line.trim_end().to_owned());
        lines.collect::<Vec<_>>().join("\n")
    }
}

/// With control characters, but for the ends of lines, and what turns the direction of writing shown as `\u{1b}`: a producer's
/// text must not steer an operator's terminal.
pub fn printable(text: String) -> String {
    let steers =
        |c: char| c != '\n' && c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if !text.contains(steers) {
        return text;
    }
    text.chars().fold(String::new(), |mut shown, c| {
        match c {
            '\t' => shown.push(' '),
            c if steers(c) => shown.extend(c.escape_unicode()),
            c => shown.push(c),
        }
        shown
    })
}

/// 12,345,678
pub fn thousands(number: i64) -> String {
    let digits = number.unsigned_abs().to_string();
    let mut text = String::new();
    for (index, digit) in digits.chars().enumerate() {
        if index > 0 && (digits.len() - index).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    if number < 0 {
        text.insert(0, '-');
    }
    text
}

/// 2026-01-31 09:00:00Z
pub fn short_time(at: chrono::DateTime<chrono::Utc>) -> String {
    at.format("%F %TZ").to_string()
}

/// 1.5 MiB
pub fn human_bytes(bytes: u64) -> String {
    const UNITS: [&str; 6] = ["KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let mut value = bytes as f64 / 1024.0;
    let mut unit = 0;
    // 1023.95 would be shown as 1024.0 of the smaller unit.
    while value >= 1023.95 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    format!("{value:.1} {}", UNITS[unit])
}

/// 850 ms, 12.3 s, 4 min 05 s, 2 h 10 min, 3 d 4 h
pub fn human_duration(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0 if duration.subsec_millis() == 0 && !duration.is_zero() => {
            format!("{} µs", duration.as_micros())
        }
        0 => format!("{} ms", duration.as_millis()),
        1..60 => format!("{}.{} s", seconds, duration.subsec_millis() / 100),
        60..3_600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{} h {:02} min", seconds / 3_600, seconds % 3_600 / 60),
        _ if seconds % 86_400 < 3_600 => format!("{} d", seconds / 86_400),
        _ => format!("{} d {} h", seconds / 86_400, seconds % 86_400 / 3_600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_would_steer_a_terminal_is_shown_instead() {
        let mut table = Table::new(&["kind"]);
        table.row(["\u{1b}]0;title\u{7}a\tb\u{202e}c"]);
        let text = table.render(false);
        assert!(text.contains(r"\u{1b}]0;title\u{7}a b\u{202e}c"), "{text}");
        assert!(!text.contains('\u{1b}'));
    }

    #[test]
    fn numbers_are_written_for_people() {
        for (number, text) in [
            (0, "0"),
            (999, "999"),
            (1_000, "1,000"),
            (-12_345_678, "-12,345,678"),
            (i64::MIN, "-9,223,372,036,854,775,808"),
        ] {
            assert_eq!(thousands(number), text);
        }
        for (bytes, text) in [
            (0, "0 B"),
            (1_023, "1023 B"),
            (1_024, "1.0 KiB"),
            (1_048_575, "1.0 MiB"),
            (1_572_864, "1.5 MiB"),
            (u64::MAX, "16.0 EiB"),
        ] {
            assert_eq!(human_bytes(bytes), text);
        }
        for (millis, text) in [
            (0, "0 ms"),
            (850, "850 ms"),
            (12_345, "12.3 s"),
            (245_000, "4 min 05 s"),
            (7_800_000, "2 h 10 min"),
            (273_600_000, "3 d 4 h"),
            (2_592_000_000, "30 d"),
        ] {
            assert_eq!(human_duration(Duration::from_millis(millis)), text);
        }
        assert_eq!(human_duration(Duration::from_micros(7)), "7 µs");
    }

    #[test]
    fn piped_tables_stay_within_80_columns() {
        let mut table = Table::new(&["name", "rows", "why"]).numbers(&[1]);
        table.row(["ready_entries".to_owned(), thousands(1_234_567), "long ".repeat(40)]);
        let text = table.render(false);
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
        assert!(text.contains("1,234,567"), "{text}");
        assert!(!text.contains('\u{1b}'), "{text}");
    }

    #[test]
    fn a_wide_table_breaks_neither_numbers_nor_words_into_letters() {
        let mut table = Table::new(&["name", "n", "m", "at", "why", "idle"]).numbers(&[1, 2]).whole(&[3]);
        table = table.without_idle(&[5]);
        let row = [
            "notifications_transactional",
            "123,456,789,012",
            "98,765,432,109",
            "2026-01-31 09:00:00",
            "a long reason",
        ];
        table.row(row.into_iter().chain(["0"]));
        let text = table.render(false);
        for whole in [&row[1..4], &["notificat", "reason"]].concat() {
            assert!(text.contains(whole), "{text}");
        }
        assert!(!text.contains("idle"), "{text}");
    }

    #[test]
    fn the_last_color_argument_counts() {
        let color = |arguments: &[&str]| Color::from_arguments(arguments.iter().map(OsString::from));
        assert_eq!(color(&["x"]), Color::Auto);
        assert_eq!(color(&["x", "--color", "never"]), Color::Never);
        assert_eq!(color(&["x", "--color=never", "--color=always"]), Color::Always);
        assert_eq!(color(&["x", "--", "--color=never"]), Color::Auto);
    }
}
