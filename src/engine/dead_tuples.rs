//! Dead tuples by table family, as the server's statistics have them, or counted exactly with pgstattuple.

use chrono::{DateTime, Utc};
use serde::Serialize;
use tokio_postgres::Client;

use super::error::{Refusal, Result};
use super::schema::Schema;

#[derive(Debug, Clone, Serialize)]
pub struct DeadTuplesReport {
    pub schema: String,
    /// Counted by pgstattuple rather than taken from the statistics.
    pub exact: bool,
    /// Of the schema's tables.
    pub total: i64,
    pub tables: Vec<TableDeadTuples>,
    /// Of `pg_class` and `pg_attribute`, which every TRUNCATE writes to; not part of `total`.
    pub catalog: i64,
}

#[derive(Debug, Clone, Serialize)]
pub struct TableDeadTuples {
    pub table: String,
    /// The partitioned table it belongs to, or itself.
    pub family: String,
    pub live: i64,
    pub dead: i64,
    pub bytes: i64,
    pub last_autovacuum: Option<DateTime<Utc>>,
}

impl DeadTuplesReport {
    /// One row a family, partitions added up.
    pub fn by_family(&self) -> Vec<TableDeadTuples> {
        let mut families: Vec<TableDeadTuples> = Vec::new();
        for table in &self.tables {
            match families.iter_mut().find(|f| f.family == table.family) {
                Some(family) => {
                    family.live += table.live;
                    family.dead += table.dead;
                    family.bytes += table.bytes;
                    family.last_autovacuum = family.last_autovacuum.max(table.last_autovacuum);
                }
                None => families.push(TableDeadTuples { table: table.family.clone(), ..table.clone() }),
            }
        }
        families
    }
}

/// Every table of the schema. `exact` reads each one whole, and needs the extension pgstattuple.
pub async fn dead_tuples(client: &Client, schema: &Schema, exact: bool) -> Result<DeadTuplesReport> {
    let counted = if exact {
        let sql =
            "SELECT quote_ident(n.nspname) FROM pg_extension AS e JOIN pg_namespace AS n ON n.oid = e.extnamespace
                   WHERE e.extname = 'pgstattuple'";
        let Some(row) = client.query_opt(sql, &[]).await? else {
            return Err(Refusal::new(
                "dead tuples cannot be counted exactly",
                "the extension pgstattuple is not installed in this database",
                "CREATE EXTENSION pgstattuple; or leave --exact out for the server's statistics",
            )
            .into());
        };
        let home: String = row.try_get(0)?;
        format!("(SELECT s.dead_tuple_count FROM {home}.pgstattuple(c.oid::regclass) AS s)")
    } else {
        // This session's own numbers are in by the next look; other sessions report within a second.
        client.batch_execute("SELECT pg_stat_force_next_flush()").await?;
        "pg_stat_get_dead_tuples(c.oid)".to_owned()
    };
    let sql = format!(
        "SELECT c.relname::text, coalesce(p.relname, c.relname)::text, pg_stat_get_live_tuples(c.oid), {counted},
                pg_total_relation_size(c.oid), pg_stat_get_last_autovacuum_time(c.oid)
         FROM pg_class AS c
         JOIN pg_namespace AS n ON n.oid = c.relnamespace
         LEFT JOIN pg_inherits AS i ON i.inhrelid = c.oid
         LEFT JOIN pg_class AS p ON p.oid = i.inhparent
         WHERE n.nspname = $1 AND c.relkind = 'r'
         ORDER BY 2, length(c.relname), 1"
    );
    let rows = client.query(&sql, &[&schema.as_str()]).await?;
    let table = |row: &tokio_postgres::Row| {
        Ok(TableDeadTuples {
            table: row.try_get(0)?,
            family: row.try_get(1)?,
            live: row.try_get(2)?,
            dead: row.try_get(3)?,
            bytes: row.try_get(4)?,
            last_autovacuum: row.try_get(5)?,
        })
    };
    let tables = rows.iter().map(table).collect::<Result<Vec<_>>>()?;
    let sql = "SELECT sum(pg_stat_get_dead_tuples(c))::bigint
               FROM unnest(ARRAY['pg_catalog.pg_class'::regclass, 'pg_catalog.pg_attribute']) AS c";
    let catalog = client.query_one(sql, &[]).await?.try_get(0)?;
    Ok(DeadTuplesReport {
        schema: schema.as_str().to_owned(),
        exact,
        total: tables.iter().map(|t| t.dead).sum(),
        tables,
        catalog,
    })
}
