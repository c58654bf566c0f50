//! TLS as libpq's `sslmode` means it, on rustls.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::{verify_server_cert_signed_by_trust_anchor, verify_server_name};
use rustls::crypto::{CryptoProvider, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::pem::PemObject as _;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme};
use tokio_postgres_rustls::MakeRustlsConnect;

use super::error::{EngineError, Result};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SslMode {
    Disable,
    Allow,
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

impl SslMode {
    const NAMES: &[(&str, SslMode)] = &[
        ("disable", Self::Disable),
        ("allow", Self::Allow),
        ("prefer", Self::Prefer),
        ("require", Self::Require),
        ("verify-ca", Self::VerifyCa),
        ("verify-full", Self::VerifyFull),
    ];
}

impl FromStr for SslMode {
    type Err = EngineError;

    fn from_str(text: &str) -> Result<Self> {
        Self::NAMES.iter().find(|(name, _)| *name == text).map(|(_, mode)| *mode).ok_or_else(|| {
            EngineError::invalid("sslmode", "allowed are disable, allow, prefer, require, verify-ca, verify-full")
        })
    }
}

impl fmt::Display for SslMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.iter().find(|(_, mode)| mode == self);
        f.write_str(name.map_or("?", |(name, _)| name))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TlsOptions {
    pub mode: SslMode,
    /// A PEM file, or `system` for the operating system's store.
    pub root_cert: Option<String>,
    /// The client's own certificate and key, both PEM files.
    pub client_cert: Option<(PathBuf, PathBuf)>,
    /// Where libpq looks when no root certificate is named (`~/.postgresql/root.crt`).
    pub default_root_cert: Option<PathBuf>,
}

/// How much of the server's certificate is checked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Check {
    Nothing,
    Chain,
    ChainAndName,
}

impl TlsOptions {
    pub fn connector(&self) -> Result<MakeRustlsConnect> {
        let provider = Arc::new(rustls::crypto::ring::default_provider());
        let check = match self.mode {
            SslMode::VerifyFull => Check::ChainAndName,
            SslMode::VerifyCa => Check::Chain,
            // As in libpq: naming a root certificate means wanting it checked.
            SslMode::Require if self.root_cert.is_some() => Check::Chain,
            _ => Check::Nothing,
        };
        let verifier = Verifier {
            check,
            trusted: if check == Check::Nothing { Vec::new() } else { self.trusted()? },
            provider: provider.clone(),
        }
        .with_roots()?;
        let builder = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .map_err(|error| EngineError::invalid("sslmode", error.to_string()))?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(verifier));
        let config = match &self.client_cert {
            None => builder.with_no_client_auth(),
            Some((cert, key)) => builder
                .with_client_auth_cert(
                    read_certs("sslcert", cert)?,
                    PrivateKeyDer::from_pem_file(key).map_err(|error| unreadable("sslkey", key, &error))?,
                )
                .map_err(|error| EngineError::invalid("sslcert", error.to_string()))?,
        };
        Ok(MakeRustlsConnect::new(config))
    }

    fn trusted(&self) -> Result<Vec<CertificateDer<'static>>> {
        match self.root_cert.as_deref() {
            Some("system") => native_certs(),
            Some(file) => read_certs("sslrootcert", Path::new(file)),
            None => match self.default_root_cert.as_deref() {
                Some(file) if file.exists() => read_certs("sslrootcert", file),
                _ => native_certs(),
            },
        }
    }
}

fn read_certs(field: &str, path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let certs: Vec<_> = CertificateDer::pem_file_iter(path)
        .and_then(Iterator::collect)
        .map_err(|error| unreadable(field, path, &error))?;
    if certs.is_empty() {
        return Err(EngineError::invalid(field, format!("{} holds no PEM certificate", path.display())));
    }
    Ok(certs)
}

fn unreadable(field: &str, path: &Path, error: &dyn fmt::Display) -> EngineError {
    EngineError::invalid(field, format!("a readable PEM file is needed, {}: {error}", path.display()))
}

fn native_certs() -> Result<Vec<CertificateDer<'static>>> {
    let found = rustls_native_certs::load_native_certs();
    if found.certs.is_empty() {
        return Err(EngineError::invalid("sslrootcert", "the system's certificate store is empty; name a PEM file"));
    }
    Ok(found.certs)
}

struct Verifier {
    check: Check,
    trusted: Vec<CertificateDer<'static>>,
    provider: Arc<CryptoProvider>,
}

impl Verifier {
    fn with_roots(self) -> Result<VerifierWithRoots> {
        let mut roots = RootCertStore::empty();
        let (_, unusable) = roots.add_parsable_certificates(self.trusted.iter().cloned());
        if self.check != Check::Nothing && roots.is_empty() {
            return Err(EngineError::invalid(
                "sslrootcert",
                format!("none of its {unusable} certificates can be used as a root"),
            ));
        }
        Ok(VerifierWithRoots { inner: self, roots })
    }
}

struct VerifierWithRoots {
    inner: Verifier,
    roots: RootCertStore,
}

impl fmt::Debug for VerifierWithRoots {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Verifier({:?})", self.inner.check)
    }
}

impl ServerCertVerifier for VerifierWithRoots {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        let Verifier { check, trusted, provider } = &self.inner;
        if *check == Check::Nothing {
            return Ok(ServerCertVerified::assertion());
        }
        let parsed = ParsedCertificate::try_from(end_entity)?;
        // A self-signed server certificate given as its own root is trusted as it is; webpki
        // would refuse it, because such certificates usually call themselves a CA.
        if !trusted.iter().any(|cert| cert == end_entity) {
            verify_server_cert_signed_by_trust_anchor(
                &parsed,
                &self.roots,
                intermediates,
                now,
                provider.signature_verification_algorithms.all,
            )?;
        }
        if *check == Check::ChainAndName {
            verify_server_name(&parsed, server_name)?;
        }
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.inner.provider.signature_verification_algorithms;
        verify_tls12_signature(message, cert, dss, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        let algorithms = &self.inner.provider.signature_verification_algorithms;
        verify_tls13_signature(message, cert, dss, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.provider.signature_verification_algorithms.supported_schemes()
    }
}
