//! An authority and certificates for tests.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::SystemTime;

use rcgen::{BasicConstraints, CertificateParams, IsCa, Issuer, KeyPair, SanType, date_time_ymd};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;

use crate::credentials::CredentialFiles;
use crate::identity::{Identity, Role};

/// A directory, which is removed on drop.
#[derive(Debug)]
pub struct Directory(PathBuf);

impl Directory {
    /// Creates an empty directory.
    #[expect(clippy::new_without_default, reason = "it has an effect")]
    pub fn new() -> Directory {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("moontide-auth-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&path).expect("a directory for temporary files");
        Directory(path)
    }

    /// Returns its path.
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// When a certificate is valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Validity {
    /// Now.
    Now,
    /// It has expired.
    Past,
    /// It is not valid yet.
    Future,
    /// Until a time, in whole seconds.
    Until(SystemTime),
}

/// A certificate authority.
pub struct Authority {
    issuer: Issuer<'static, KeyPair>,
    certificate: rcgen::Certificate,
}

impl std::fmt::Debug for Authority {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Authority")
    }
}

impl Authority {
    /// Creates an authority with a new key.
    #[expect(clippy::new_without_default, reason = "each one is different")]
    pub fn new() -> Authority {
        let mut params = CertificateParams::new(vec![]).expect("no names");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        let key = KeyPair::generate().expect("random numbers");
        // Two authorities have different names.
        let name = format!("Moontide test CA {:x?}", &key.public_key_raw()[1..9]);
        params.distinguished_name.push(rcgen::DnType::CommonName, name);
        let certificate = params.self_signed(&key).expect("valid parameters");
        Authority { issuer: Issuer::new(params, key), certificate }
    }

    /// Returns the certificate of the authority.
    pub fn certificate(&self) -> CertificateDer<'static> {
        self.certificate.der().clone()
    }

    /// Writes a certificate for a role in the cluster `test/cluster`, its key, and the certificate of the authority.
    pub fn issue(&self, directory: &Directory, name: &str, role: Role) -> CredentialFiles {
        let identity = Identity::new("test", "cluster", role).expect("a valid role");
        self.issue_identity(directory, name, &identity.to_string(), Validity::Now)
    }

    /// Returns a certificate for a role in the cluster `test/cluster`, as bytes.
    pub fn certificate_of(&self, directory: &Directory, role: Role) -> Vec<u8> {
        let files = self.issue(directory, "certificate", role);
        let certificate = CertificateDer::from_pem_file(&files.cert).expect("a certificate");
        certificate.to_vec()
    }

    /// Writes a certificate with any identity and validity, its key, and the certificate of the authority.
    pub fn issue_identity(
        &self,
        directory: &Directory,
        name: &str,
        identity: &str,
        validity: Validity,
    ) -> CredentialFiles {
        let mut params = CertificateParams::new(vec![]).expect("no names");
        params.subject_alt_names.push(SanType::URI(identity.try_into().expect("ASCII")));
        (params.not_before, params.not_after) = match validity {
            Validity::Now => (date_time_ymd(2020, 1, 1), date_time_ymd(2120, 1, 1)),
            Validity::Past => (date_time_ymd(2020, 1, 1), date_time_ymd(2021, 1, 1)),
            Validity::Future => (date_time_ymd(2119, 1, 1), date_time_ymd(2120, 1, 1)),
            Validity::Until(end) => (date_time_ymd(2020, 1, 1), end.into()),
        };
        let key = KeyPair::generate().expect("random numbers");
        let certificate = params.signed_by(&key, &self.issuer).expect("valid parameters");
        let write = |kind: &str, text: String| {
            let path = directory.path().join(format!("{name}-{kind}.pem"));
            std::fs::write(&path, text).expect("a file in a directory of our own");
            path
        };
        CredentialFiles {
            ca: write("ca", self.certificate.pem()),
            cert: write("cert", certificate.pem()),
            key: write("key", key.serialize_pem()),
        }
    }
}
