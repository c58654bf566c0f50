//! Puts [`Unnamed`] between the driver and the network, at the one place where the driver lets a stream be replaced: where
//! others do TLS.

use std::convert::Infallible;
use std::future::{Future, Ready, ready};
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_postgres::tls::{ChannelBinding, MakeTlsConnect, TlsConnect, TlsStream};

use super::Unnamed;

/// Whatever this connector makes of the stream, with [`Unnamed`] on top.
#[derive(Clone)]
pub(in crate::engine) struct UnnamedOver<C>(pub C);

impl<S, C: MakeTlsConnect<S>> MakeTlsConnect<S> for UnnamedOver<C>
where
    C::TlsConnect: Send + 'static,
    <C::TlsConnect as TlsConnect<S>>::Future: Send + 'static,
    S: Send + 'static,
{
    type Stream = Unnamed<C::Stream>;
    type TlsConnect = UnnamedOver<C::TlsConnect>;
    type Error = C::Error;

    fn make_tls_connect(&mut self, domain: &str) -> Result<Self::TlsConnect, C::Error> {
        Ok(UnnamedOver(self.0.make_tls_connect(domain)?))
    }
}

impl<S, C: TlsConnect<S>> TlsConnect<S> for UnnamedOver<C>
where
    C::Future: Send + 'static,
{
    type Stream = Unnamed<C::Stream>;
    type Error = C::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Stream, C::Error>> + Send>>;

    fn connect(self, stream: S) -> Self::Future {
        let connected = self.0.connect(stream);
        Box::pin(async { Ok(Unnamed::new(connected.await?)) })
    }
}

impl<S: TlsStream + Unpin> TlsStream for Unnamed<S> {
    fn channel_binding(&self) -> ChannelBinding {
        self.inner().channel_binding()
    }
}

/// No TLS, by the name of one: asked for as `sslnegotiation=direct`, it leaves the stream as it is.
#[derive(Clone, Copy)]
pub(in crate::engine) struct Plain;

impl<S: AsyncRead + AsyncWrite + Unpin> MakeTlsConnect<S> for Plain {
    type Stream = PlainStream<S>;
    type TlsConnect = Self;
    type Error = Infallible;

    fn make_tls_connect(&mut self, _domain: &str) -> Result<Self, Infallible> {
        Ok(*self)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> TlsConnect<S> for Plain {
    type Stream = PlainStream<S>;
    type Error = Infallible;
    type Future = Ready<Result<PlainStream<S>, Infallible>>;

    fn connect(self, stream: S) -> Self::Future {
        ready(Ok(PlainStream(stream)))
    }
}

pub(in crate::engine) struct PlainStream<S>(S);

impl<S: AsyncRead + AsyncWrite + Unpin> TlsStream for PlainStream<S> {
    fn channel_binding(&self) -> ChannelBinding {
        ChannelBinding::none()
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PlainStream<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PlainStream<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
