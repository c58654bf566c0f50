//! JSON as text, exactly as PostgreSQL holds it, parsed only by whoever needs it.

use std::borrow::Cow;
use std::error::Error;
use std::fmt;

use bytes::{BufMut, BytesMut};
use serde::de::{DeserializeOwned, Error as _};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use serde_json::value::RawValue;
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, accepts, to_sql_checked};

/// One JSON document as text.
///
/// What comes from PostgreSQL is trusted; everything else enters through [`RawJson::from_json`] or
/// [`RawJson::from_serialize`], which refuse what `jsonb` would refuse.
#[derive(Clone, PartialEq, Eq)]
pub struct RawJson(Cow<'static, str>);

/// Why a text cannot be stored as `jsonb`.
#[derive(Debug, thiserror::Error)]
pub enum JsonError {
    /// Not JSON, nested over 127 levels, or a lone surrogate escape.
    #[error("not valid JSON: {0}")]
    Syntax(#[from] serde_json::Error),
    /// A string or key holds U+0000, which PostgreSQL's text cannot. `path` is like `$.a[3].b`.
    #[error("{path}: the character U+0000 cannot be stored in PostgreSQL")]
    Nul { path: String },
}

impl RawJson {
    /// `{}`; costs no allocation.
    pub const EMPTY_OBJECT: RawJson = RawJson(Cow::Borrowed("{}"));

    /// Takes a JSON text after checking that `jsonb` can hold it.
    pub fn from_json(text: &str) -> Result<Self, JsonError> {
        let value: Value = serde_json::from_str(text)?;
        let mut path = String::from("$");
        if holds_nul(&value, &mut path) {
            return Err(JsonError::Nul { path });
        }
        Ok(Self::from_trusted(text))
    }

    /// Serializes `value` and checks the result as [`RawJson::from_json`] does.
    pub fn from_serialize<T: Serialize + ?Sized>(value: &T) -> Result<Self, JsonError> {
        Self::from_json(&serde_json::to_string(value)?)
    }

    /// The text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Reads the document as a `T`.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, serde_json::Error> {
        serde_json::from_str(&self.0)
    }

    /// Whether this is `{}` as PostgreSQL writes it.
    pub fn is_empty_object(&self) -> bool {
        self.0 == "{}"
    }

    /// A part of a document that came from PostgreSQL.
    pub(crate) fn from_raw(raw: &RawValue) -> Self {
        Self::from_trusted(raw.get())
    }

    fn from_trusted(text: &str) -> Self {
        if text == "{}" {
            return Self::EMPTY_OBJECT;
        }
        Self(Cow::Owned(text.to_owned()))
    }
}

impl<'de> Deserialize<'de> for RawJson {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let raw = <&RawValue>::deserialize(deserializer)?;
        // What jsonb refuses beyond the grammar can only be written as an escape: no escape, nothing to look for.
        if raw.get().contains("\\u") {
            return Self::from_json(raw.get()).map_err(D::Error::custom);
        }
        Ok(Self::from_trusted(raw.get()))
    }
}

/// Whether a string in `value` holds U+0000; if so `path` ends at it.
fn holds_nul(value: &Value, path: &mut String) -> bool {
    let len = path.len();
    let found = match value {
        Value::String(text) => text.contains('\0'),
        Value::Array(items) => items.iter().enumerate().any(|(index, item)| {
            path.truncate(len);
            path.push_str(&format!("[{index}]"));
            holds_nul(item, path)
        }),
        Value::Object(fields) => fields.iter().any(|(key, item)| {
            path.truncate(len);
            path.push('.');
            path.push_str(&key.replace('\0', "\\u0000"));
            key.contains('\0') || holds_nul(item, path)
        }),
        Value::Null | Value::Bool(_) | Value::Number(_) => false,
    };
    if !found {
        path.truncate(len);
    }
    found
}

impl Default for RawJson {
    /// `{}`.
    fn default() -> Self {
        Self::EMPTY_OBJECT
    }
}

impl fmt::Debug for RawJson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Display for RawJson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl<'a> FromSql<'a> for RawJson {
    fn from_sql(ty: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        // Binary jsonb is its text behind one version byte.
        let text = match (ty == &Type::JSONB, raw) {
            (true, [1, text @ ..]) => text,
            (true, _) => return Err("jsonb of an unknown binary version".into()),
            (false, text) => text,
        };
        Ok(Self::from_trusted(std::str::from_utf8(text)?))
    }

    accepts!(JSON, JSONB);
}

impl ToSql for RawJson {
    fn to_sql(&self, ty: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        if ty == &Type::JSONB {
            out.put_u8(1);
        }
        out.put_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    accepts!(JSON, JSONB);
    to_sql_checked!();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jsonb_carries_its_version_byte_both_ways() {
        let json = RawJson::from_json(r#"{"a": [1, "é"]}"#).unwrap();
        for ty in [Type::JSON, Type::JSONB] {
            let mut wire = BytesMut::new();
            json.to_sql_checked(&ty, &mut wire).unwrap();
            assert_eq!(wire[0] == 1, ty == Type::JSONB);
            assert_eq!(RawJson::from_sql(&ty, &wire).unwrap(), json);
        }
        assert!(RawJson::from_sql(&Type::JSONB, b"\x02{}").is_err());
        assert!(RawJson::from_sql(&Type::JSONB, b"").is_err());
        assert!(RawJson::from_sql(&Type::JSON, b"\xff").is_err());
    }

    #[test]
    fn an_empty_object_is_recognised() {
        let json = RawJson::from_sql(&Type::JSONB, b"\x01{}").unwrap();
        assert!(json.is_empty_object());
        assert!(matches!(json.0, Cow::Borrowed(_)));
    }

    #[test]
    fn what_jsonb_refuses_is_refused_with_its_path() {
        let error = RawJson::from_json(r#"{"ok":"\\u0000","list":[1,{"name":"a\u0000b"}]}"#).unwrap_err().to_string();
        assert!(error.starts_with("$.list[1].name: "), "{error}");
        let error = RawJson::from_json(r#"[{},{"k\u0000":1}]"#).unwrap_err();
        assert!(error.to_string().starts_with("$[1].k\\u0000: "), "{error}");
        assert!(RawJson::from_json(r#"{"a":"\ud800"}"#).is_err());
        assert!(RawJson::from_json("{").is_err());
        assert!(RawJson::from_json(r#"{"ok":"\\u0000"}"#).is_ok());
    }
}
