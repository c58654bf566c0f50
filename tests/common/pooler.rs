//! A transaction pooler, as small as one can be: a client has a server connection for the length of a transaction, and each
//! transaction another one where there is a choice. It knows nothing of prepared statements, settings or locks.

use std::collections::VecDeque;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use bytes::{BufMut, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinSet;

use super::server::server;

/// A message with its type and length.
type Frame = Vec<u8>;

pub struct Pooler {
    port: u16,
    database: String,
    /// Ends everything when dropped.
    _tasks: JoinSet<()>,
}

impl Pooler {
    /// In front of one database of the test server, with so many server connections.
    pub async fn start(database: &str, size: usize) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let socket = server().socket_dir().join(format!(".s.PGSQL.{}", server().tcp_port()));
        let pool = Arc::new(Pool {
            socket,
            database: database.to_owned(),
            places: Semaphore::new(size),
            idle: Mutex::default(),
        });
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut clients = JoinSet::new();
            while let Ok((stream, _)) = listener.accept().await {
                stream.set_nodelay(true).unwrap();
                clients.spawn(serve(stream, Arc::clone(&pool)));
                while clients.try_join_next().is_some() {}
            }
        });
        Self { port, database: database.to_owned(), _tasks: tasks }
    }

    pub fn url(&self) -> String {
        format!("postgresql://postgres@127.0.0.1:{}/{}?sslmode=disable", self.port, self.database)
    }
}

struct Pool {
    socket: PathBuf,
    database: String,
    places: Semaphore,
    /// The longest idle is next, so that a client rarely meets the same connection twice in a row.
    idle: Mutex<VecDeque<Backend>>,
}

struct Backend {
    frames: mpsc::UnboundedReceiver<Frame>,
    writer: Box<dyn AsyncWrite + Send + Unpin>,
}

impl Pool {
    /// An idle connection, or a new one: the caller holds a place.
    async fn take(&self) -> Option<Backend> {
        loop {
            let idle = self.idle.lock().unwrap().pop_front();
            match idle {
                Some(backend) if !backend.frames.is_closed() => return Some(backend),
                // The server ended it.
                Some(_) => {}
                None => return self.connect().await,
            }
        }
    }

    async fn connect(&self) -> Option<Backend> {
        let (mut reader, mut writer) = UnixStream::connect(&self.socket).await.ok()?.into_split();
        let mut startup = BytesMut::new();
        startup.put_i32(0);
        startup.put_i32(196_608);
        for text in ["user", "postgres", "database", &self.database, ""] {
            startup.put_slice(text.as_bytes());
            startup.put_u8(0);
        }
        let length = startup.len() as i32;
        startup[..4].copy_from_slice(&length.to_be_bytes());
        writer.write_all(&startup).await.ok()?;
        while read_frame(&mut reader).await?[0] != b'Z' {}
        Some(Backend { frames: frames(reader), writer: Box::new(writer) })
    }
}

async fn read_frame(reader: &mut (impl AsyncRead + Unpin)) -> Option<Frame> {
    let kind = reader.read_u8().await.ok()?;
    let length = reader.read_i32().await.ok()?;
    let mut frame = vec![0; 1 + length as usize];
    frame[0] = kind;
    frame[1..5].copy_from_slice(&length.to_be_bytes());
    reader.read_exact(&mut frame[5..]).await.ok()?;
    Some(frame)
}

/// Reads on its own, so that waiting for the next frame can be given up.
fn frames(mut reader: impl AsyncRead + Send + Unpin + 'static) -> mpsc::UnboundedReceiver<Frame> {
    let (sender, receiver) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        loop {
            tokio::select! {
                frame = read_frame(&mut reader) => {
                    let Some(frame) = frame else { return };
                    let _ = sender.send(frame);
                }
                () = sender.closed() => return,
            }
        }
    });
    receiver
}

async fn serve(mut stream: TcpStream, pool: Arc<Pool>) {
    if greet(&mut stream).await.is_none() {
        return;
    }
    let (reader, mut writer) = stream.into_split();
    let mut client = frames(reader);
    while let Some(first) = client.recv().await {
        if first[0] == b'X' {
            return;
        }
        let _place = pool.places.acquire().await.unwrap();
        let Some(mut backend) = pool.take().await else { return };
        // Whoever leaves a transaction open takes its connection along: what is not given back is closed.
        if transact(first, &mut client, &mut writer, &mut backend).await.is_none() {
            return;
        }
        pool.idle.lock().unwrap().push_back(backend);
    }
}

/// Passes messages on until the server is outside of a transaction and has answered everything.
async fn transact(
    first: Frame,
    client: &mut mpsc::UnboundedReceiver<Frame>,
    writer: &mut (impl AsyncWrite + Unpin),
    backend: &mut Backend,
) -> Option<()> {
    // Query and Sync are what ReadyForQuery answers.
    let mut unanswered = VecDeque::new();
    // The last message belongs to a batch whose Sync is still to come.
    let mut in_batch = false;
    let mut next = Some(first);
    loop {
        if let Some(frame) = next.take() {
            unanswered.extend(matches!(frame[0], b'Q' | b'S').then_some(frame[0]));
            in_batch = matches!(frame[0], b'P' | b'B' | b'D' | b'E' | b'C' | b'H');
            backend.writer.write_all(&frame).await.ok()?;
        }
        tokio::select! {
            frame = client.recv() => next = Some(frame.filter(|frame| frame[0] != b'X')?),
            frame = backend.frames.recv() => {
                let frame = frame?;
                writer.write_all(&frame).await.ok()?;
                match frame[0] {
                    // A Sync that came along with the start of a COPY is ignored.
                    b'G' if unanswered.front() == Some(&b'S') => drop(unanswered.pop_front()),
                    b'Z' => {
                        unanswered.pop_front();
                        if unanswered.is_empty() && !in_batch && frame[5] == b'I' {
                            return Some(());
                        }
                    }
                    _ => {}
                }
            }
        }
    }
}

/// Lets anybody in, by the start of a session; nothing else than that is taken (TLS is refused, a cancellation ignored).
async fn greet(stream: &mut TcpStream) -> Option<()> {
    loop {
        let length = stream.read_i32().await.ok()?;
        let mut body = vec![0; length as usize - 4];
        stream.read_exact(&mut body).await.ok()?;
        match i32::from_be_bytes(body[..4].try_into().unwrap()) {
            80_877_103 => stream.write_all(b"N").await.ok()?,
            196_608 => break,
            _ => return None,
        }
    }
    let mut hello = BytesMut::new();
    hello.put_slice(b"R\0\0\0\x08\0\0\0\0");
    for (name, value) in
        [("server_version", "15.0"), ("client_encoding", "UTF8"), ("standard_conforming_strings", "on")]
    {
        hello.put_u8(b'S');
        hello.put_i32((4 + name.len() + 1 + value.len() + 1) as i32);
        hello.put_slice(format!("{name}\0{value}\0").as_bytes());
    }
    hello.put_slice(b"K\0\0\0\x0c\0\0\0\x01\0\0\0\x01");
    hello.put_slice(b"Z\0\0\0\x05I");
    stream.write_all(&hello).await.ok()
}
