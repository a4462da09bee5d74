//! HTTP requests to the admin port, with a connection for each.
//!
//! With hyper, which the admin port's server needs anyway, rather than with a client library of its own.

use std::future::pending;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use http_body_util::{BodyExt as _, Full, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1;
use hyper::header::HOST;
use hyper::{Method, Request, StatusCode};
use hyper_util::rt::TokioIo;
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::config::Endpoint;

/// Maximum length of a response, in bytes: the service at the address may be a stranger.
const RESPONSE_MAX: usize = 10 << 20;

/// Response: its status, and its body if that is complete.
pub(super) type Response = (StatusCode, anyhow::Result<String>);

/// Destination of requests.
pub(super) struct Http {
    pub(super) endpoint: Endpoint,
    /// Settings for HTTPS. `None`: plain HTTP.
    pub(super) tls: Option<Arc<ClientConfig>>,
}

impl Http {
    /// Sends a request and waits for the response. `timeout` bounds the whole exchange.
    pub(super) fn send(
        &self,
        method: Method,
        path: &str,
        headers: &[(&str, String)],
        body: &[u8],
        timeout: Duration,
    ) -> anyhow::Result<Response> {
        let mut request = Request::builder().method(method).uri(path).header(HOST, self.endpoint.to_string());
        for (name, value) in headers {
            request = request.header(*name, value);
        }
        let request = request.body(Full::new(Bytes::copy_from_slice(body)))?;
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let response = runtime.block_on(async { tokio::time::timeout(timeout, self.exchange(request)).await });
        // A resolution of the name may still be in progress.
        runtime.shutdown_background();
        response.map_err(|_| anyhow!("no response within {timeout:?}"))?
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> anyhow::Result<Response> {
        let (host, port) = self.endpoint.parts();
        let stream = TcpStream::connect((host.as_str(), port)).await?;
        match &self.tls {
            Some(tls) => {
                let name = ServerName::try_from(host)?;
                exchange_on(TlsConnector::from(tls.clone()).connect(name, stream).await?, request).await
            }
            None => exchange_on(stream, request).await,
        }
    }
}

async fn exchange_on(
    stream: impl AsyncRead + AsyncWrite + Unpin,
    request: Request<Full<Bytes>>,
) -> anyhow::Result<Response> {
    let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await?;
    let exchange = async {
        let response = sender.send_request(request).await?;
        let status = response.status();
        let body = Limited::new(response.into_body(), RESPONSE_MAX).collect().await;
        let text = body
            .map_err(|error| anyhow!(error))
            .and_then(|body| String::from_utf8(body.to_bytes().into()).context("the text is not UTF-8"));
        anyhow::Ok((status, text))
    };
    // The request reports errors of the connection.
    let transfer = async {
        let _ = connection.await;
        pending::<anyhow::Result<Response>>().await
    };
    tokio::select! {
        response = exchange => response,
        never = transfer => never,
    }
}

/// Whether TLS has failed, rather than the connection or the service.
pub(super) fn is_of_tls(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        let inner = cause.downcast_ref::<std::io::Error>().and_then(std::io::Error::get_ref);
        cause.is::<rustls::Error>() || inner.is_some_and(|inner| inner.is::<rustls::Error>())
    })
}
