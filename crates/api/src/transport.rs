//! The bytes of a connection, plain or through TLS.
//!
//! TLS is rustls' with the `ring` provider: TLS 1.2 and 1.3, no client certificates. ALPN offers HTTP/2 and
//! HTTP/1.1; without TLS the server speaks HTTP/1 only. Certificate and key are read once, at start.

use lockstep_core::limits::FLAG_FILE_BYTES_MAX;
use lockstep_core::{FileError, files};
use std::io;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer, pem};
use tokio_rustls::rustls::{self, ServerConfig};
use tokio_rustls::server::TlsStream;

/// The protocol's name in ALPN.
const HTTP_2: &[u8] = b"h2";
const HTTP_1_1: &[u8] = b"http/1.1";

/// Why a certificate and its key cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot use the {what}: {cause}")]
    Read {
        /// Which of the two.
        what: &'static str,
        /// Which file, and why.
        cause: FileError,
    },
    /// A file holds something else.
    #[error("{} holds no {what} in PEM form ({cause}); it must begin with -----BEGIN", path.display())]
    NoPem {
        /// Which of the two.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What is wrong.
        cause: String,
    },
    /// The two do not belong together, or are of a kind that is not known.
    #[error(
        "the certificate {} and the key {} cannot be used together: {cause}; \
         the first certificate of the file must be the one made for this key",
        cert.display(), key.display()
    )]
    Pair {
        /// The certificate's file.
        cert: PathBuf,
        /// The key's file.
        key: PathBuf,
        /// What is wrong.
        cause: rustls::Error,
    },
}

/// A certificate chain with its key, ready to accept connections. Cheap to clone; never printed.
#[derive(Clone)]
pub struct Tls(TlsAcceptor);

impl Tls {
    /// Reads PEM files: `cert` holds the server's certificate, then those that it was signed with; `key` its
    /// private key (PKCS#8, PKCS#1 or SEC1), not encrypted.
    pub fn from_files(cert: &Path, key: &Path) -> Result<Self, TlsError> {
        let chain_pem = read("certificate", cert)?;
        let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&chain_pem).collect();
        let chain = chain.map_err(no_pem("certificate", cert))?;
        if chain.is_empty() {
            return Err(no_pem("certificate", cert)(pem::Error::NoItemsFound));
        }
        let key_pem = read("private key", key)?;
        let private_key = PrivateKeyDer::from_pem_slice(&key_pem).map_err(no_pem("private key", key))?;
        let unusable = |cause| TlsError::Pair { cert: cert.into(), key: key.into(), cause };
        let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .map_err(unusable)?
            .with_no_client_auth()
            .with_single_cert(chain, private_key)
            .map_err(unusable)?;
        config.alpn_protocols = vec![HTTP_2.into(), HTTP_1_1.into()];
        Ok(Self(TlsAcceptor::from(Arc::new(config))))
    }
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Tls")
    }
}

fn read(what: &'static str, path: &Path) -> Result<Vec<u8>, TlsError> {
    files::read(path, FLAG_FILE_BYTES_MAX).map_err(|cause| TlsError::Read { what, cause })
}

fn no_pem(what: &'static str, path: &Path) -> impl Fn(pem::Error) -> TlsError {
    move |error| {
        let cause = match error {
            pem::Error::NoItemsFound => "there is none in it".into(),
            other => other.to_string(),
        };
        TlsError::NoPem { what, path: path.into(), cause }
    }
}

/// The two kinds of connections.
pub(crate) enum Transport {
    /// Bytes as they are.
    Plain(TcpStream),
    /// Bytes through TLS.
    Tls(Box<TlsStream<TcpStream>>),
}

impl Transport {
    /// Takes a connection; with `tls`, after the handshake, whose bytes come from a client that may never send
    /// them: the caller bounds the time.
    pub(crate) async fn accept(stream: TcpStream, tls: Option<&Tls>) -> io::Result<Self> {
        match tls {
            None => Ok(Self::Plain(stream)),
            Some(Tls(acceptor)) => Ok(Self::Tls(Box::new(acceptor.accept(stream).await?))),
        }
    }

    /// Whether the client chose HTTP/2.
    pub(crate) fn is_http_2(&self) -> bool {
        match self {
            Self::Plain(_) => false,
            Self::Tls(stream) => stream.get_ref().1.alpn_protocol() == Some(HTTP_2),
        }
    }

    /// Has the kernel throw away what it still holds for the client when the connection is dropped.
    pub(crate) fn reset_on_drop(&self) {
        let stream = match self {
            Self::Plain(stream) => stream,
            Self::Tls(stream) => stream.get_ref().0,
        };
        // Fails on a dead socket only, which holds nothing.
        let _ = stream.set_zero_linger();
    }

    /// Reads like a TCP stream: a client that drops a TLS connection without saying so ends it all the same.
    pub(crate) fn poll_read(&mut self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => match Pin::new(stream).poll_read(cx, buf) {
                Poll::Ready(Err(error)) if error.kind() == io::ErrorKind::UnexpectedEof => {
                    Poll::Ready(Ok(()))
                }
                other => other,
            },
        }
    }

    /// Whether several slices are written in one call.
    pub(crate) fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    /// Where to write.
    pub(crate) fn write_half(&mut self) -> Pin<&mut (dyn AsyncWrite + Send + Unpin)> {
        match self {
            Self::Plain(stream) => Pin::new(stream),
            Self::Tls(stream) => Pin::new(stream.as_mut()),
        }
    }
}
