//! The engine inside a program: enqueue in a transaction of one's own, work, and wait for an answer from elsewhere.
//!
//! `DATABASE_URL=postgres://… cargo run --example embed`, after `awactl migrate`. Then answer the token that it prints:
//! `SELECT awa.resolve_callback('TOKEN', 'resume', '"yes"')`.

use std::time::Duration;

use awactl::engine::enqueue::{BulkEnqueue, NewJob};
use awactl::engine::worker::{Fleet, FleetOptions, JobContext, Outcome, QueueOptions, RawJson, Registry, worker_fn};
use awactl::engine::{Schema, Target, connect};

async fn approve(ctx: JobContext) -> Outcome {
    let token = match ctx.register_callback(Duration::from_secs(600)).await {
        Ok(token) => token,
        Err(error) => return Outcome::retry(error.to_string()),
    };
    println!("job {} waits for an answer to {token}", ctx.job().id);
    match ctx.wait_for_callback(&token).await {
        Ok(answer) => {
            println!("job {} got {answer:?}", ctx.job().id);
            Outcome::Complete
        }
        Err(error) => Outcome::retry(error.to_string()),
    }
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    tracing_subscriber::fmt().init();
    let env = |name: &str| std::env::var(name).ok();
    let target = Target::parse(&std::env::var("DATABASE_URL")?, Schema::default(), "DATABASE_URL", &env)?;

    let mut session = connect(&target).await?;
    let bulk = BulkEnqueue::prepare(&session, &target.schema).await?;
    let mut job = NewJob::new("approve", RawJson::from_json(r#"{"order": 42}"#)?);
    job.queue = "approvals".into();
    let transaction = session.transaction().await?;
    // … whatever else belongs to it: the job is there if and only if this commits.
    bulk.run(&transaction, &[job]).await?;
    transaction.commit().await?;

    let mut registry = Registry::new();
    registry.insert(worker_fn("approve", approve))?;
    let fleet = Fleet::start(&target, registry, FleetOptions::new(vec![QueueOptions::new("approvals", 32)]));
    tokio::signal::ctrl_c().await?;
    fleet.shut_down().await;
    Ok(())
}
