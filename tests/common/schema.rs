//! Loads the migrations into a database, under any schema name.

use super::guards;

pub fn quote_ident(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

pub fn quote_literal(text: &str) -> String {
    format!("'{}'", text.replace('\'', "''"))
}

/// One script with everything under migrations/v1000, in name order. Within a literal the quoted schema is escaped once
/// more: `'{schema}.ready_entries'::regclass`.
pub fn script(schema: &str) -> String {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/migrations/v1000");
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let text: String = files.iter().map(|f| std::fs::read_to_string(f).unwrap()).collect();
    let text = guards::take_out(text);
    let ident = quote_ident(schema);
    let body = text
        .replace("{schema_literal}", &quote_literal(schema))
        .replace("'{schema}.", &format!("'{}.", ident.replace('\'', "''")))
        .replace("{schema}", &ident);
    format!("BEGIN; CREATE SCHEMA {ident}; {body}; COMMIT;")
}
