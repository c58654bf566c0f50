//! Which databases a bench may fill with its own jobs.

use tokio_postgres::Client;

use crate::engine::Target;
use crate::engine::error::{Refusal, Result};

/// Says that a bench may run there.
#[derive(Debug)]
pub struct Allowed {
    /// Nobody's jobs are in the schema, so that it may be a bench's own from now on.
    unused: bool,
}

/// Refuses a database that holds somebody's tables, or jobs that no bench made, unless it is `named`; and one where a bench
/// was killed, whose jobs the next would find among its own. Looks only: to be asked before anything is installed.
pub async fn allow(client: &Client, target: &Target, named: bool) -> Result<Allowed> {
    let schema = target.schema.as_str();
    let sql = "SELECT (SELECT format('%s.%s', n.nspname, c.relname)
                       FROM pg_class AS c
                       JOIN pg_namespace AS n ON n.oid = c.relnamespace
                       WHERE c.relkind IN ('r', 'p', 'm', 'f') AND n.nspname <> $1
                         AND n.nspname !~ '^pg_' AND n.nspname <> 'information_schema'
                         AND NOT EXISTS (
                             SELECT FROM pg_depend AS d
                             WHERE d.classid = 'pg_class'::regclass AND d.objid = c.oid AND d.deptype = 'e')
                       ORDER BY 1
                       LIMIT 1),
                      to_regclass(format('%I.queue_lanes', $1)) IS NOT NULL,
                      EXISTS (
                          SELECT FROM pg_namespace AS n
                          WHERE n.nspname = $1 AND obj_description(n.oid, 'pg_namespace') = 'made by awactl bench')";
    let row = client.query_one(sql, &[&schema]).await?;
    let (foreign, installed, ours): (Option<String>, bool, bool) = (row.try_get(0)?, row.try_get(1)?, row.try_get(2)?);
    let used = installed && {
        let sql = "SELECT EXISTS (SELECT FROM {schema}.queue_lanes) OR EXISTS (SELECT FROM {schema}.deferred_jobs)";
        client.query_one(&target.schema.render(sql), &[]).await?.try_get(0)?
    };
    if used && ours {
        refuse_leftovers(client, target).await?;
    }
    let why = match foreign {
        Some(table) => Some(format!("it holds the table {table}, and a bench loads the whole server")),
        None if used && !ours => {
            Some(format!("schema {schema} has queues, and a bench would fill them with its own jobs"))
        }
        None => None,
    };
    match why {
        Some(why) if !named => Err(Refusal::new(
            "this database was not made by a bench",
            why,
            format!(
                "leave the target out for a private server, or name the database: --allow-target {}",
                target.dbname()
            ),
        )
        .into()),
        _ => Ok(Allowed { unused: !used }),
    }
}

async fn refuse_leftovers(client: &Client, target: &Target) -> Result<()> {
    let sql = "SELECT coalesce(sum(c.job_count), 0)::bigint FROM {schema}.queue_counts() AS c
               WHERE c.state NOT IN ('completed', 'failed', 'cancelled', 'dlq')";
    let left: i64 = client.query_one(&target.schema.render(sql), &[]).await?.try_get(0)?;
    if left == 0 {
        return Ok(());
    }
    let schema = target.schema.quoted();
    Err(Refusal::new(
        "this database was left in the middle of a bench",
        format!("{left} jobs of it are not finished, and would be counted as jobs that nobody enqueued"),
        format!("DROP SCHEMA {schema} CASCADE there; a bench makes it again"),
    )
    .into())
}

impl Allowed {
    /// Marks the installed schema as a bench's own, which the next bench may fill without being told to.
    pub async fn mark(&self, client: &Client, target: &Target) -> Result<()> {
        if self.unused {
            client.batch_execute(&target.schema.render(include_str!("../../../migrations/bench/mark.sql"))).await?;
        }
        Ok(())
    }
}
