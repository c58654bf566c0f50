//! Loads the migrations into a database, under any schema name.

use awactl::engine::Schema;

use super::guards;

pub fn quote_ident(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// One script with everything under migrations/v1000, in name order, rendered as `awactl migrate` does.
pub fn script(schema: &str) -> String {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/migrations/v1000");
    let mut files: Vec<_> = std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    files.sort();
    let text: String = files.iter().map(|f| std::fs::read_to_string(f).unwrap()).collect();
    let body = Schema::new(schema).unwrap().render(&guards::take_out(text));
    format!("BEGIN; CREATE SCHEMA {}; {body}; COMMIT;", quote_ident(schema))
}
