//! The name of the schema the queue lives in, and the only way it gets into SQL text.

use std::fmt;
use std::fmt::Write as _;
use std::str::FromStr;

use super::error::{EngineError, Result};

/// PostgreSQL allows 63 bytes; the rest is room for names derived from it (channels, roles).
pub const MAX_SCHEMA_BYTES: usize = 48;

#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Schema(String);

impl Schema {
    pub const DEFAULT: &'static str = "awa";

    pub fn new(name: impl Into<String>) -> Result<Self> {
        let name = name.into();
        let refuse = |message: &str| Err(EngineError::invalid("schema", message));
        if name.is_empty() || name.len() > MAX_SCHEMA_BYTES {
            return refuse("a name of 1 to 48 bytes is allowed");
        }
        if name.contains('\0') {
            return refuse("a NUL character is not allowed in a name");
        }
        if name.starts_with("pg_") || name == "information_schema" {
            return refuse("names starting with pg_ and information_schema belong to PostgreSQL; use any other");
        }
        Ok(Self(name))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// As an SQL identifier, for statements the engine writes itself.
    pub fn quoted(&self) -> String {
        format!("\"{}\"", self.0.replace('"', "\"\""))
    }

    /// Puts the name into an SQL file: `{schema}` as an identifier, `{schema_literal}` as a
    /// string. Everything else in braces stays as it is.
    ///
    /// A name with special characters is written with Unicode escapes, so that `{schema}` is
    /// also right inside `$$` bodies, format strings and quoted dynamic SQL, where a quote, a
    /// percent sign or a dollar in the name would otherwise end or change the text around it. At
    /// the start of a literal, as in `'{schema}.queue_lanes'::regclass`, it is the literal that
    /// gets the escapes: what reads its value knows quoted identifiers, and no Unicode ones.
    pub fn render(&self, template: &str) -> String {
        let identifier = self.escaped('"');
        let literal = self.escaped('\'');
        let within_literal = if self.is_plain() { self.quoted() } else { escapes(&self.quoted()) };
        let mut out = String::with_capacity(template.len() + 1024);
        let mut rest = template;
        // One pass: a schema that is itself called "{schema}" must not be substituted again.
        while let Some(at) = rest.find("{schema") {
            out.push_str(&rest[..at]);
            rest = &rest[at..];
            let (placeholder, value) = if rest.starts_with("{schema}.") && out.ends_with('\'') {
                if !self.is_plain() {
                    out.insert_str(out.trim_end_matches('\'').len(), "U&");
                }
                ("{schema}", &within_literal)
            } else if rest.starts_with("{schema}") {
                ("{schema}", &identifier)
            } else if rest.starts_with("{schema_literal}") {
                ("{schema_literal}", &literal)
            } else {
                out.push('{');
                rest = &rest[1..];
                continue;
            };
            out.push_str(value);
            rest = &rest[placeholder.len()..];
        }
        out.push_str(rest);
        out
    }

    fn is_plain(&self) -> bool {
        self.0.chars().all(plain)
    }

    fn escaped(&self, quote: char) -> String {
        if self.is_plain() {
            return format!("{quote}{}{quote}", self.0);
        }
        format!("U&{quote}{}{quote}", escapes(&self.0))
    }
}

/// Whether a character means nothing to any text it may be put into.
fn plain(c: char) -> bool {
    c.is_ascii_alphanumeric() || matches!(c, '_' | ' ' | '-' | '.')
}

fn escapes(text: &str) -> String {
    let mut out = String::with_capacity(text.len() * 8);
    for c in text.chars() {
        if plain(c) {
            out.push(c);
        } else {
            let _ = write!(out, "\\+{:06X}", u32::from(c));
        }
    }
    out
}

impl Default for Schema {
    fn default() -> Self {
        Self(Self::DEFAULT.into())
    }
}

impl FromStr for Schema {
    type Err = EngineError;

    fn from_str(name: &str) -> Result<Self> {
        Self::new(name)
    }
}

impl fmt::Display for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for Schema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_postgresql_cannot_hold_are_refused_with_what_is_allowed() {
        for bad in ["", "a\0b", "pg_awa", "information_schema", &"x".repeat(49)] {
            let message = Schema::new(bad).unwrap_err().to_string();
            assert!(message.starts_with("schema is not valid: "), "{message}");
        }
        assert!(Schema::new("x".repeat(48)).is_ok());
    }

    #[test]
    fn plain_names_render_readably() {
        let schema = Schema::new("awa").unwrap();
        assert_eq!(
            schema.render("SELECT {schema_literal} FROM {schema}.t, '{}', '{schema_x}'"),
            "SELECT 'awa' FROM \"awa\".t, '{}', '{schema_x}'"
        );
    }

    #[test]
    fn special_characters_never_reach_the_text_unescaped() {
        let schema = Schema::new("a\"'%$$\\{schema}").unwrap();
        let text = schema.render("{schema}");
        let inner = text.strip_prefix("U&\"").unwrap().strip_suffix('"').unwrap();
        assert!(!inner.contains(['"', '\'', '%', '$', '{']), "{inner}");
        let text = schema.render("'{schema}.t'::regclass");
        let inner = text.strip_prefix("U&'").unwrap().strip_suffix(".t'::regclass").unwrap();
        assert!(inner.starts_with("\\+000022a\\+000022\\+000022"), "the name as a quoted identifier: {inner}");
        assert!(!inner.contains(['"', '\'', '%', '$', '{']), "{inner}");
        assert_eq!(schema.quoted(), "\"a\"\"'%$$\\{schema}\"");
    }
}
