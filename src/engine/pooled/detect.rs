//! Whether an address leads through a transaction pooler.

use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio_postgres::Client;

use super::Plain;
use crate::engine::connect::{Session, simple_row};
use crate::engine::error::{EngineError, Result};

/// The process id that the session was told when it began. A server tells that of the backend; a pooler, which has no backend
/// to go with the session, one of its own making.
pub(in crate::engine) async fn told_pid(client: &Client) -> Result<i32> {
    // The driver keeps it to itself, but for cancelling: so read what it would send.
    let (ours, mut theirs) = duplex(64);
    let read = async {
        // The answer it waits for where TLS was used.
        theirs.write_all(b"S").await?;
        let mut sent = Vec::new();
        theirs.read_to_end(&mut sent).await?;
        Ok::<_, std::io::Error>(sent)
    };
    let token = client.cancel_token();
    let (sent, asked) = tokio::join!(read, token.cancel_query_raw(ours, Plain));
    asked?;
    // A request is its length, its code, the process id and a secret.
    let pid =
        sent.ok().and_then(|sent| sent.last_chunk::<16>().map(|r| i32::from_be_bytes([r[8], r[9], r[10], r[11]])));
    pid.ok_or_else(|| EngineError::Unreachable {
        target: "the server".into(),
        why: "it told no process id".into(),
        source: None,
    })
}

/// Whether two sessions that are open at once are moved from backend to backend, rather than each having its own. In this order
/// neither a pooler that takes the last used connection next nor one that takes the longest idle gets past it.
pub(in crate::engine) async fn swaps_connections(a: &Session, b: &Session) -> Result<bool> {
    let mut seen: [Option<String>; 2] = [None, None];
    for turn in [0, 0, 1, 1, 0, 1] {
        let row = simple_row([a, b][turn], "SELECT pg_backend_pid()").await?;
        let pid = row.get(0).map(str::to_owned);
        if seen[1 - turn] == pid || (seen[turn].is_some() && seen[turn] != pid) {
            return Ok(true);
        }
        seen[turn] = pid;
    }
    Ok(false)
}
