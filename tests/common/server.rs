//! A throw-away PostgreSQL for the tests of one binary, started on first use and stopped when the process exits.

use std::sync::OnceLock;

use awactl::engine::embedded::{Embedded, Options};

/// The server of this test binary.
pub fn server() -> &'static Embedded {
    static SERVER: OnceLock<&'static Embedded> = OnceLock::new();
    SERVER.get_or_init(|| {
        // A thread of its own: the caller is inside a test's runtime, which ends with that test.
        std::thread::spawn(|| {
            let options = Options::ephemeral()
                .setting("max_connections", "400")
                .setting("max_prepared_transactions", "20")
                .setting("max_locks_per_transaction", "256")
                .setting("shared_buffers", "64MB")
                .setting("autovacuum", "off")
                .setting("full_page_writes", "off")
                .setting("fsync", "off");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(Embedded::start(options)).unwrap().leak_until_exit()
        })
        .join()
        .unwrap()
    })
}
