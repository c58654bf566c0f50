//! What is in the database before anything is changed: facts only, no opinion.

use serde::Serialize;
use tokio_postgres::GenericClient;

use super::super::error::Result;
use super::super::schema::Schema;

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Applied {
    pub version: i32,
    pub checksum: String,
    /// Version of the awactl that applied it.
    pub awactl: String,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    pub schema: String,
    pub database: String,
    pub role: String,
    pub server_version_num: i32,
    pub server_version: String,
    pub encoding: String,
    pub in_recovery: bool,
    pub read_only: bool,
    pub schema_exists: bool,
    pub can_create_schema: bool,
    pub can_use_schema: bool,
    pub can_create_in_schema: bool,
    /// Version tables that are there but may not be read by this role.
    pub unreadable: Vec<String>,
    /// Relations, functions and types in the schema; the first few by name.
    pub object_count: i64,
    pub objects: Vec<String>,
    pub has_version_table: bool,
    pub has_peer_version_table: bool,
    pub applied: Vec<Applied>,
    /// Highest version in the 0.5/peer table.
    pub peer_version: Option<i32>,
    /// 0.5 workers that reported within the last minute.
    pub live_05_runtimes: i64,
}

const SERVER: &str = "
SELECT current_database()::text, current_user::text,
       current_setting('server_version_num')::int, current_setting('server_version'),
       current_setting('server_encoding'), pg_is_in_recovery(),
       current_setting('transaction_read_only') = 'on',
       has_database_privilege(current_database(), 'CREATE'), n.oid IS NOT NULL,
       coalesce(has_schema_privilege(n.oid, 'USAGE'), false),
       coalesce(has_schema_privilege(n.oid, 'CREATE'), false)
FROM (SELECT 1) AS one LEFT JOIN pg_namespace AS n ON n.nspname = $1";

// Catalogs only: readable by everybody, even without USAGE on the schema.
const OBJECTS: &str = "
WITH ns AS (SELECT oid FROM pg_namespace WHERE nspname = $1), o AS (
    SELECT c.relname::text AS name FROM pg_class AS c, ns
    WHERE c.relnamespace = ns.oid AND c.relkind IN ('r', 'p', 'v', 'm', 'S', 'f')
    UNION ALL
    SELECT p.proname::text || '()' FROM pg_proc AS p, ns WHERE p.pronamespace = ns.oid
    UNION ALL
    SELECT t.typname::text FROM pg_type AS t, ns
    WHERE t.typnamespace = ns.oid AND t.typtype IN ('e', 'd'))
SELECT count(*), coalesce((array_agg(name ORDER BY name))[1:5], '{}') FROM o";

const READABLE: &str = "
SELECT c.relname::text, has_table_privilege(c.oid, 'SELECT')
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = $1
  AND c.relname IN ('awactl_version', 'schema_version', 'runtime_instances')";

pub async fn probe(client: &impl GenericClient, schema: &Schema) -> Result<Facts> {
    let name = schema.as_str();
    let server = client.query_one(SERVER, &[&name]).await?;
    let objects = client.query_one(OBJECTS, &[&name]).await?;
    let tables = client.query(READABLE, &[&name]).await?;
    let can_use_schema: bool = server.get(9);
    let mut facts = Facts {
        schema: name.to_owned(),
        database: server.get(0),
        role: server.get(1),
        server_version_num: server.get(2),
        server_version: server.get(3),
        encoding: server.get(4),
        in_recovery: server.get(5),
        read_only: server.get(6),
        can_create_schema: server.get(7),
        schema_exists: server.get(8),
        can_use_schema,
        can_create_in_schema: server.get(10),
        unreadable: Vec::new(),
        object_count: objects.get(0),
        objects: objects.get(1),
        has_version_table: false,
        has_peer_version_table: false,
        applied: Vec::new(),
        peer_version: None,
        live_05_runtimes: 0,
    };
    for row in tables {
        let (table, granted): (String, bool) = (row.get(0), row.get(1));
        match table.as_str() {
            "awactl_version" => facts.has_version_table = true,
            "schema_version" => facts.has_peer_version_table = true,
            _ => {}
        }
        if granted && can_use_schema {
            read(client, schema, &table, &mut facts).await?;
        } else {
            facts.unreadable.push(table);
        }
    }
    Ok(facts)
}

async fn read(client: &impl GenericClient, schema: &Schema, table: &str, facts: &mut Facts) -> Result<()> {
    let quoted = schema.quoted();
    match table {
        "awactl_version" => {
            let sql = format!("SELECT version, checksum, awactl FROM {quoted}.awactl_version ORDER BY version");
            let rows = client.query(&sql, &[]).await?;
            facts.applied = rows
                .iter()
                .map(|row| Applied { version: row.get(0), checksum: row.get(1), awactl: row.get(2) })
                .collect();
        }
        // A stranger's table may have the same name, with other columns: look before reading.
        "schema_version" if has_columns(client, schema, table, &["version"]).await? => {
            let sql = format!("SELECT max(version)::int FROM {quoted}.schema_version");
            facts.peer_version = client.query_one(&sql, &[]).await?.get(0);
        }
        "runtime_instances"
            if has_columns(client, schema, table, &["last_seen_at", "storage_capability", "shutting_down"]).await? =>
        {
            let sql = format!(
                "SELECT count(*) FROM {quoted}.runtime_instances
                 WHERE last_seen_at > now() - interval '1 minute'
                   AND storage_capability = 'canonical' AND NOT shutting_down"
            );
            facts.live_05_runtimes = client.query_one(&sql, &[]).await?.get(0);
        }
        _ => {}
    }
    Ok(())
}

async fn has_columns(client: &impl GenericClient, schema: &Schema, table: &str, columns: &[&str]) -> Result<bool> {
    let row = client
        .query_one(
            "SELECT count(*) = $3 FROM pg_attribute AS a
             JOIN pg_class AS c ON c.oid = a.attrelid
             JOIN pg_namespace AS n ON n.oid = c.relnamespace
             WHERE n.nspname = $1 AND c.relname = $2 AND a.attname = ANY($4) AND NOT a.attisdropped
               AND (a.attname <> 'version' OR a.atttypid IN ('int2'::regtype, 'int4'::regtype, 'int8'::regtype))",
            &[&schema.as_str(), &table, &i64::try_from(columns.len()).unwrap_or(i64::MAX), &columns],
        )
        .await?;
    Ok(row.get(0))
}
