//! Prepared statements for a session that cannot keep any on the server: it prepares each anew, without a name, in the
//! message batch that runs it. To the driver above it looks as if the server remembered them.
//!
//! On the way out, Parse, Bind, Describe and Close lose their statement's name, and before a Bind or Describe whose statement was
//! not parsed in the same batch its Parse is put in. On the way back the answer to that Parse is left out. Everything else
//! goes through as it is.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A message's type and length.
const HEADER: usize = 5;

pub(in crate::engine) struct Unnamed<S> {
    inner: S,
    requests: Requests,
    replies: Replies,
    expected: VecDeque<Expected>,
}

/// An answer that is still to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Expected {
    ParseComplete {
        put_in: bool,
    },
    /// Ready again, after a Sync or after a Query.
    Ready {
        by_sync: bool,
    },
}

#[derive(Default)]
struct Requests {
    /// The session's first message has no type.
    begun: bool,
    /// Not yet looked at: less than a message.
    partial: BytesMut,
    /// Left of a message that goes through as it is.
    passing: usize,
    ready: BytesMut,
    /// Each statement's Parse after its name.
    statements: HashMap<Bytes, Bytes>,
    /// Which of them the server has without a name, in this batch.
    parsed: Option<Bytes>,
}

#[derive(Default)]
struct Replies {
    partial: BytesMut,
    passing: usize,
    ready: BytesMut,
}

impl<S> Unnamed<S> {
    pub fn new(inner: S) -> Self {
        Self { inner, requests: Requests::default(), replies: Replies::default(), expected: VecDeque::new() }
    }

    pub(super) fn inner(&self) -> &S {
        &self.inner
    }
}

/// Moves what is left of a message that goes through.
fn pass(partial: &mut BytesMut, passing: &mut usize, ready: &mut BytesMut) {
    let now = partial.len().min(*passing);
    ready.extend_from_slice(&partial.split_to(now));
    *passing -= now;
}

/// How long the message is that begins here, its type included.
fn message_length(header: &[u8]) -> usize {
    let length = u32::from_be_bytes([header[1], header[2], header[3], header[4]]);
    1 + (length as usize).max(4)
}

/// Cuts a text and its terminating zero off.
fn take_text(body: &mut Bytes) -> Option<Bytes> {
    let end = body.iter().position(|byte| *byte == 0)?;
    let text = body.split_to(end);
    body.advance(1);
    Some(text)
}

impl Requests {
    fn accept(&mut self, bytes: &[u8], expected: &mut VecDeque<Expected>) {
        self.partial.extend_from_slice(bytes);
        loop {
            pass(&mut self.partial, &mut self.passing, &mut self.ready);
            if self.partial.len() < HEADER {
                return;
            }
            if !self.begun {
                self.begun = true;
                let length = [self.partial[0], self.partial[1], self.partial[2], self.partial[3]];
                self.passing = u32::from_be_bytes(length) as usize;
                continue;
            }
            let length = message_length(&self.partial);
            let kind = self.partial[0];
            match kind {
                b'P' | b'B' | b'D' | b'C' => {
                    if self.partial.len() < length {
                        return;
                    }
                    let message = self.partial.split_to(length).freeze();
                    if self.rename(kind, message.slice(HEADER..), expected).is_none() {
                        // Not as the protocol has it: the server may say so.
                        self.ready.extend_from_slice(&message);
                    }
                }
                _ => {
                    if matches!(kind, b'S' | b'Q') {
                        expected.push_back(Expected::Ready { by_sync: kind == b'S' });
                        self.parsed = None;
                    }
                    self.passing = length;
                }
            }
        }
    }

    fn rename(&mut self, kind: u8, mut body: Bytes, expected: &mut VecDeque<Expected>) -> Option<()> {
        match kind {
            b'P' => {
                let name = take_text(&mut body)?;
                self.send(b'P', &[b"\0", &body]);
                expected.push_back(Expected::ParseComplete { put_in: false });
                if !name.is_empty() {
                    self.statements.insert(name.clone(), body);
                }
                self.parsed = Some(name);
            }
            b'B' => {
                let portal = take_text(&mut body)?;
                let name = take_text(&mut body)?;
                self.parse(name, expected);
                self.send(b'B', &[&portal, b"\0\0", &body]);
            }
            b'D' | b'C' if body.first() == Some(&b'S') => {
                body.advance(1);
                let name = take_text(&mut body)?;
                if kind == b'D' {
                    self.parse(name, expected);
                } else {
                    self.statements.remove(&name);
                    self.parsed = None;
                }
                self.send(kind, &[b"S\0"]);
            }
            _ => return None,
        }
        Some(())
    }

    /// Makes sure that this statement is the one without a name.
    fn parse(&mut self, name: Bytes, expected: &mut VecDeque<Expected>) {
        if self.parsed.as_ref() == Some(&name) {
            return;
        }
        if let Some(parse) = self.statements.get(&name).cloned() {
            self.send(b'P', &[b"\0", &parse]);
            expected.push_back(Expected::ParseComplete { put_in: true });
            self.parsed = Some(name);
        }
    }

    fn send(&mut self, kind: u8, parts: &[&[u8]]) {
        let length: usize = parts.iter().map(|part| part.len()).sum();
        self.ready.put_u8(kind);
        self.ready.put_u32(length as u32 + 4);
        parts.iter().for_each(|part| self.ready.extend_from_slice(part));
    }
}

impl Replies {
    fn accept(&mut self, bytes: &[u8], expected: &mut VecDeque<Expected>) {
        self.partial.extend_from_slice(bytes);
        loop {
            pass(&mut self.partial, &mut self.passing, &mut self.ready);
            if self.partial.len() < HEADER {
                return;
            }
            let length = message_length(&self.partial);
            match self.partial[0] {
                b'1' => {
                    if let Some(Expected::ParseComplete { put_in }) = expected.front().copied() {
                        expected.pop_front();
                        if put_in {
                            self.partial.advance(HEADER);
                            continue;
                        }
                    }
                }
                // The server ignores the Sync that came along with the start of a COPY.
                b'G' => {
                    let next = expected.iter().position(|e| matches!(e, Expected::Ready { .. }));
                    if let Some(at) = next.filter(|at| expected[*at] == Expected::Ready { by_sync: true }) {
                        expected.remove(at);
                    }
                }
                // What an error kept from being answered is not answered any more.
                b'Z' => while let Some(Expected::ParseComplete { .. }) = expected.pop_front() {},
                _ => {}
            }
            self.passing = length;
        }
    }
}

impl<S: AsyncWrite + Unpin> Unnamed<S> {
    /// Writes all that is ready.
    fn poll_drain(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.requests.ready.is_empty() {
            let written = ready!(Pin::new(&mut self.inner).poll_write(cx, &self.requests.ready))?;
            if written == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.requests.ready.advance(written);
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Unnamed<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        ready!(this.poll_drain(cx))?;
        this.requests.accept(buf, &mut this.expected);
        // What does not get out now does so with the next write, or the flush.
        if let Poll::Ready(Err(error)) = this.poll_drain(cx) {
            return Poll::Ready(Err(error));
        }
        Poll::Ready(Ok(buf.len()))
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(cx))?;
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_drain(cx))?;
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Unnamed<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &mut *self;
        let mut chunk = [0; 8192];
        loop {
            if !this.replies.ready.is_empty() {
                let now = this.replies.ready.len().min(buf.remaining());
                buf.put_slice(&this.replies.ready.split_to(now));
                return Poll::Ready(Ok(()));
            }
            let mut chunk = ReadBuf::new(&mut chunk);
            ready!(Pin::new(&mut this.inner).poll_read(cx, &mut chunk))?;
            if chunk.filled().is_empty() {
                return Poll::Ready(Ok(()));
            }
            this.replies.accept(chunk.filled(), &mut this.expected);
        }
    }
}
