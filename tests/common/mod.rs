//! Shared by the engine's tests: a database of its own for each test, and sessions on it.
#![allow(dead_code)]

pub mod guards;
pub mod pooler;
pub mod schema;
pub mod server;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::OnceCell;
use tokio::task::JoinHandle;
use tokio_postgres::types::{FromSql, ToSql};
use tokio_postgres::{Client, Error, NoTls, Row};

pub const ODD: &str = "My \"odd' %s schema";
type Params<'a> = &'a [&'a (dyn ToSql + Sync)];

fn config(database: &str) -> tokio_postgres::Config {
    let mut config = server::server().config();
    config.dbname(database).application_name("awa-test");
    config
}

async fn connect(database: &str) -> Client {
    let (client, connection) =
        config(database).connect(NoTls).await.unwrap_or_else(|e| panic!("connect to {database}: {e}"));
    tokio::spawn(connection);
    client
}

/// Made once in this binary, by whichever test comes first. (Each test has its own runtime: no client may be kept.)
async fn template(schema: &str) -> &'static str {
    static PLAIN: OnceCell<()> = OnceCell::const_new();
    static STRANGE: OnceCell<()> = OnceCell::const_new();
    let (cell, name) = if schema == ODD { (&STRANGE, "template_odd") } else { (&PLAIN, "template_awa") };
    cell.get_or_init(|| async {
        connect("postgres").await.batch_execute(&format!("CREATE DATABASE {name}")).await.unwrap();
        let client = connect(name).await;
        client.batch_execute(&schema::script(schema)).await.unwrap_or_else(|e| panic!("migrations: {e:?}"));
        drop(client);
        let admin = connect("postgres").await;
        let gone = format!("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = '{name}')");
        while !admin.query_one(&gone, &[]).await.unwrap().get::<_, bool>(0) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
    name
}

/// A database with the schema loaded, for one test.
pub struct Db {
    name: String,
    schema: String,
    admin: Session,
}

impl Db {
    pub async fn new() -> Db {
        Db::with_schema("awa").await
    }

    pub async fn odd() -> Db {
        Db::with_schema(ODD).await
    }

    async fn with_schema(schema: &str) -> Db {
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let template = template(schema).await;
        let name = format!("test_{}", COUNT.fetch_add(1, Ordering::Relaxed));
        connect("postgres").await.batch_execute(&format!("CREATE DATABASE {name} TEMPLATE {template}")).await.unwrap();
        let schema = schema::quote_ident(schema);
        let admin = Session { client: Arc::new(connect(&name).await), schema: schema.clone() };
        Db { name, schema, admin }
    }

    pub fn config(&self) -> tokio_postgres::Config {
        config(&self.name)
    }

    pub async fn session(&self) -> Session {
        Session { client: Arc::new(connect(&self.name).await), schema: self.schema.clone() }
    }

    /// Polls until the query says true.
    pub async fn until(&self, condition: &str) {
        for _ in 0..24_000 {
            if self.admin.one::<bool>(condition).await {
                return;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        panic!("never became true: {condition}");
    }

    /// Until that backend really waits for a lock.
    pub async fn until_waiting(&self, pid: i32) {
        self.until(&format!("SELECT EXISTS (SELECT FROM pg_locks WHERE pid = {pid} AND NOT granted)")).await
    }

    pub async fn until_gone(&self, pid: i32) {
        self.until(&format!("SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = {pid})")).await
    }

    pub async fn one<T: for<'a> FromSql<'a>>(&self, sql: &str) -> T {
        self.admin.one(sql).await
    }

    pub async fn exec(&self, sql: &str) {
        self.admin.exec(sql).await
    }
}

/// One connection; clones share it. In SQL, `@` before a name stands for the schema and a dot.
#[derive(Clone)]
pub struct Session {
    pub client: Arc<Client>,
    schema: String,
}

/// What a claim gave for one lane and slot.
#[derive(Clone, Debug)]
pub struct Batch {
    pub id: i64,
    pub claim_slot: i16,
    pub priority: i16,
    pub jobs: Vec<i64>,
    pub leases: Vec<i64>,
    pub attempts: Vec<i16>,
}

/// One attempt, as complete and close_attempts want it named.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Attempt {
    pub slot: i16,
    pub receipt: i64,
    pub job: i64,
    pub lease: i64,
}

impl Batch {
    pub fn attempts(&self) -> Vec<Attempt> {
        (0..self.jobs.len())
            .map(|n| Attempt {
                slot: self.claim_slot,
                receipt: self.id * 1024 + n as i64,
                job: self.jobs[n],
                lease: self.leases[n],
            })
            .collect()
    }
}

pub fn jobs(batches: &[Batch]) -> Vec<i64> {
    batches.iter().flat_map(|b| b.jobs.clone()).collect()
}

pub fn attempts(batches: &[Batch]) -> Vec<Attempt> {
    batches.iter().flat_map(Batch::attempts).collect()
}

impl Session {
    pub fn sql(&self, sql: &str) -> String {
        let mut parts = sql.split('@');
        let mut out = parts.next().unwrap().to_owned();
        for part in parts {
            match part.starts_with(|c: char| c.is_ascii_lowercase()) {
                true => out.push_str(&format!("{}.", self.schema)),
                false => out.push('@'),
            }
            out.push_str(part);
        }
        out
    }

    pub async fn exec(&self, sql: &str) {
        self.try_exec(sql).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"))
    }

    pub async fn try_exec(&self, sql: &str) -> Result<(), Error> {
        self.client.batch_execute(&self.sql(sql)).await
    }

    pub async fn rows(&self, sql: &str, params: Params<'_>) -> Result<Vec<Row>, Error> {
        self.client.query(&self.sql(sql), params).await
    }

    pub async fn one<T: for<'a> FromSql<'a>>(&self, sql: &str) -> T {
        self.rows(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e:?}"))[0].get(0)
    }

    pub async fn all<T: for<'a> FromSql<'a>>(&self, sql: &str) -> Vec<T> {
        self.rows(sql, &[]).await.unwrap_or_else(|e| panic!("{sql}: {e:?}")).iter().map(|r| r.get(0)).collect()
    }

    /// Runs the statement on its own task, for one that will wait.
    pub fn spawn(&self, sql: &str) -> JoinHandle<Result<Vec<Row>, Error>> {
        let (this, sql) = (self.clone(), sql.to_owned());
        tokio::spawn(async move { this.rows(&sql, &[]).await })
    }

    pub async fn pid(&self) -> i32 {
        self.one("SELECT pg_backend_pid()").await
    }

    /// n jobs, one transaction (or the open one).
    pub async fn enqueue(&self, queue: &str, n: i32) -> Vec<i64> {
        self.all(&format!(
            "SELECT r.job_id FROM @enqueue_many((SELECT array_agg(ROW('k', '{queue}', NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)::@new_job)
             FROM generate_series(1, {n}))) AS r")).await
    }

    /// None: the lane was busy.
    pub async fn try_claim(&self, queue: &str, limit: i32, probe: bool) -> Result<Option<Vec<Batch>>, Error> {
        let sql = "SELECT batch_id, claim_slot, priority, job_ids, run_leases, attempts
                   FROM @claim($1, $2, NULL, 'tester', $3)";
        let rows = self.rows(sql, &[&queue, &limit, &probe]).await?;
        if rows.len() == 1 && rows[0].get::<_, Option<i64>>(0).is_none() {
            return Ok(None);
        }
        Ok(Some(
            rows.iter()
                .map(|r| Batch {
                    id: r.get(0),
                    claim_slot: r.get(1),
                    priority: r.get(2),
                    jobs: r.get(3),
                    leases: r.get(4),
                    attempts: r.get(5),
                })
                .collect(),
        ))
    }

    pub async fn claim(&self, queue: &str, limit: i32) -> Vec<Batch> {
        self.try_claim(queue, limit, false).await.unwrap().expect("the lane is not busy")
    }

    pub async fn probe(&self, queue: &str, limit: i32) -> Vec<Batch> {
        self.try_claim(queue, limit, true).await.unwrap().expect("the lane is not busy")
    }

    /// The losers: (place, reason).
    pub async fn complete(&self, attempts: &[Attempt]) -> Vec<(i32, String)> {
        self.try_complete(attempts).await.unwrap()
    }

    pub async fn try_complete(&self, a: &[Attempt]) -> Result<Vec<(i32, String)>, Error> {
        let (slots, receipts, jobs, leases) = columns(a);
        let rows = self
            .rows("SELECT place, reason FROM @complete($1, $2, $3, $4)", &[&slots, &receipts, &jobs, &leases])
            .await?;
        Ok(rows.iter().map(|r| (r.get(0), r.get(1))).collect())
    }

    /// Each part is one run: the first attempt names the slot, receipt and lease, all of them the jobs.
    pub async fn complete_runs(&self, runs: &[&[Attempt]]) -> Vec<(i32, String)> {
        let firsts: Vec<Attempt> = runs.iter().map(|r| r[0]).collect();
        let (slots, receipts, _, leases) = columns(&firsts);
        let stops: Vec<i32> = runs
            .iter()
            .scan(0, |stop, r| {
                *stop += r.len() as i32;
                Some(*stop)
            })
            .collect();
        let jobs: Vec<i64> = runs.iter().flat_map(|r| r.iter().map(|a| a.job)).collect();
        let sql = "SELECT place, reason FROM @complete_runs($1, $2, $3, $4, $5)";
        let rows = self.rows(sql, &[&slots, &receipts, &leases, &stops, &jobs]).await.unwrap();
        rows.iter().map(|r| (r.get(0), r.get(1))).collect()
    }

    /// Every attempt with the same outcome, error and delay.
    pub async fn close(&self, a: &[Attempt], outcome: &str, error: Option<&str>, delay: &str) -> Vec<(i32, String)> {
        self.try_close(a, outcome, error, delay).await.unwrap()
    }

    pub async fn try_close(
        &self,
        a: &[Attempt],
        outcome: &str,
        error: Option<&str>,
        delay: &str,
    ) -> Result<Vec<(i32, String)>, Error> {
        let (slots, receipts, jobs, leases) = columns(a);
        let n = a.len();
        let sql = format!(
            "SELECT place, reason FROM @close_attempts($1, $2, $3, $4, array_fill('{outcome}'::@job_state, ARRAY[{n}]),
            $5, array_fill('{delay}'::interval, ARRAY[{n}]), array_fill(NULL::jsonb, ARRAY[{n}]))"
        );
        let rows = self.rows(&sql, &[&slots, &receipts, &jobs, &leases, &vec![error; n]]).await?;
        Ok(rows.iter().map(|r| (r.get(0), r.get(1))).collect())
    }

    /// (pruned, reason, detail)
    pub async fn prune(&self, ring: &str, slot: i32) -> (bool, String, String) {
        let rows = self
            .rows(&format!("SELECT pruned, reason, detail FROM @prune('{ring}', {slot}::smallint)"), &[])
            .await
            .unwrap();
        (
            rows[0].get(0),
            rows[0].get::<_, Option<String>>(1).unwrap_or_default(),
            rows[0].get::<_, Option<String>>(2).unwrap_or_default(),
        )
    }

    /// (rotated, slot, reason)
    pub async fn rotate(&self, ring: &str) -> (bool, i16, String) {
        let rows = self.rows(&format!("SELECT rotated, slot, reason FROM @rotate('{ring}', true)"), &[]).await.unwrap();
        (
            rows[0].get(0),
            rows[0].get::<_, Option<i16>>(1).unwrap_or(-1),
            rows[0].get::<_, Option<String>>(2).unwrap_or_default(),
        )
    }

    /// Prunes what can be; the slots that were, and the reasons of the others.
    pub async fn prune_all(&self, ring: &str) -> (Vec<i16>, Vec<(i16, String)>) {
        let (mut done, mut kept) = (vec![], vec![]);
        for slot in self.all::<i16>(&format!("SELECT slot FROM @ring_slots('{ring}') WHERE state = 'sealed'")).await {
            match self.prune(ring, slot.into()).await {
                (true, ..) => done.push(slot),
                (false, reason, _) => kept.push((slot, reason)),
            }
        }
        (done, kept)
    }

    /// Claims and completes until the queue gives nothing more.
    pub async fn drain(&self, queue: &str) -> Vec<i64> {
        let mut all = vec![];
        loop {
            let batches = self.probe(queue, 1024).await;
            if batches.is_empty() {
                return all;
            }
            assert_eq!(self.complete(&attempts(&batches)).await, []);
            all.extend(jobs(&batches));
        }
    }
}

fn columns(a: &[Attempt]) -> (Vec<i16>, Vec<i64>, Vec<i64>, Vec<i64>) {
    (
        a.iter().map(|x| x.slot).collect(),
        a.iter().map(|x| x.receipt).collect(),
        a.iter().map(|x| x.job).collect(),
        a.iter().map(|x| x.lease).collect(),
    )
}

pub fn sorted(mut ids: Vec<i64>) -> Vec<i64> {
    ids.sort();
    ids
}
