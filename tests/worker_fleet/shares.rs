//! How queues share a process: max_workers, weights, rate limits.

use std::time::{Duration, Instant};

use awactl::engine::worker::{Fleet, FleetOptions, Outcome, QueueOptions, Registry, worker_fn};

use crate::support::{Gate, Ground, fleet, one, queue, until, within};

/// Two queues whose jobs wait at a gate each.
async fn two_queues(ground: &Ground, weights: (u16, u16), max_workers: usize) -> (Fleet, Gate, Gate) {
    let (big, small) = (Gate::new(), Gate::new());
    let mut registry = Registry::new();
    for (kind, gate) in [("big", &big), ("small", &small)] {
        let gate = gate.clone();
        let handler = worker_fn(kind, move |_| {
            let gate = gate.clone();
            async move {
                gate.pass().await;
                Outcome::Complete
            }
        });
        registry.insert(handler).unwrap();
    }
    let queue = |name, weight| QueueOptions { weight, ..queue(name, 32) };
    let mut options = FleetOptions::new(vec![queue("big", weights.0), queue("small", weights.1)]);
    options.maintenance = None;
    options.max_workers = Some(max_workers);
    options.poll_interval = Duration::from_millis(20);
    (Fleet::start(&ground.target, registry, options), big, small)
}

async fn enqueue(ground: &Ground, queue: &str, n: i32) {
    ground.session.exec(&format!("SELECT @enqueue('{queue}', '{queue}') FROM generate_series(1, {n})")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn competing_queues_get_their_shares_and_an_idle_one_lends_its_own() {
    let ground = Ground::new().await;
    let (fleet, big, small) = two_queues(&ground, (3, 1), 4).await;
    enqueue(&ground, "small", 40).await;
    until("the small one has all places", || small.waiting() == 4).await;
    enqueue(&ground, "big", 40).await;
    until("the big one's jobs are here too", || fleet.stats().claimed >= 8 && fleet.stats().claims > 4).await;
    // Jobs of the small one end, and the big one gets its share back.
    let end = Instant::now() + crate::support::PATIENCE;
    while big.waiting() < 3 {
        assert!(Instant::now() < end, "the big queue never got its share");
        let running = big.waiting() + small.waiting();
        assert!(running <= 4, "{running} of 4");
        if small.waiting() > 1 && big.waiting() + small.waiting() == 4 {
            small.open(1);
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    until("all places are taken", || big.waiting() + small.waiting() == 4).await;
    // From now on it stays so, whoever's job ends.
    for gate in [&big, &small, &big, &big, &small, &big] {
        let before = gate.started() - gate.waiting();
        gate.open(1);
        until("it ended and another started", || {
            gate.started() - gate.waiting() == before + 1 && big.waiting() + small.waiting() == 4
        })
        .await;
        assert_eq!((big.waiting(), small.waiting()), (3, 1));
    }
    for gate in [&big, &small] {
        gate.open(40);
    }
    until("all complete", || fleet.stats().completed == 80).await;
    within(fleet.shut_down()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rate_limit_is_kept() {
    let ground = Ground::new().await;
    ground.session.enqueue("q", 100).await;
    let start = Instant::now();
    let fleet = fleet(&ground.target, one(|_| async { Outcome::Complete }), 32, |o| {
        o.queues[0].rate_limit = Some(50.0);
    });
    until("half a second's worth is done", || fleet.stats().completed >= 56).await;
    // One, then fifty a second and at most five saved up: never sooner, however fast the machine is.
    assert!(start.elapsed() >= Duration::from_secs(1), "{:?}", start.elapsed());
    within(fleet.shut_down()).await;
}
