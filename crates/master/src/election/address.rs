//! [`RegistryAddress`]: parsed value of the setting `registry`.
//!
//! | value | registry |
//! |---|---|
//! | `none` | none: a single master |
//! | `etcd://host:port[,host:port…]/prefix[?option=value[&option=value…]]` | etcd |
//! | `kubernetes://namespace/name` | the API server of the Kubernetes cluster in which this process runs |
//!
//! | option of etcd | value |
//! |---|---|
//! | `ca` | file with the CA certificates of the servers; enables TLS |
//! | `cert`, `key` | files with a client certificate and its key |
//! | `user` | user of etcd |
//! | `password_file` | file with its password; else it is in the variable [`ETCD_PASSWORD_VARIABLE`] |
//!
//! [`ETCD_PASSWORD_VARIABLE`]: super::ETCD_PASSWORD_VARIABLE

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::Arc;

use super::etcd::{ETCD_PASSWORD_VARIABLE, EtcdRegistry, EtcdUser};
use super::kubernetes::{KubernetesRegistry, KubernetesServer};
use super::registry::{Registry, RegistryError};

/// Address of a registry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum RegistryAddress {
    /// No registry: a single master hosts all groups.
    #[default]
    None,
    /// An etcd cluster.
    Etcd {
        /// Servers, as `host:port`.
        endpoints: Vec<String>,
        /// Prefix of all keys, without leading and trailing slashes.
        prefix: String,
        /// Files for TLS; `None`: no TLS.
        tls: Option<EtcdTlsFiles>,
        /// User; `None`: etcd has no authentication enabled, or knows the user by the client certificate.
        user: Option<EtcdUser>,
    },
    /// The API server of Kubernetes.
    Kubernetes {
        /// Namespace of the objects.
        namespace: String,
        /// Prefix of the names of the objects.
        name: String,
    },
}

/// Files for TLS to etcd, in PEM. New connections use their current content.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EtcdTlsFiles {
    /// CA certificates of the servers.
    pub ca: PathBuf,
    /// Client certificate and its key.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// Error of the parsing of an address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid registry address {text:?}: {reason}")]
pub struct RegistryAddressError {
    /// Address as given, without passwords.
    pub text: String,
    /// Reason, with the expected form.
    pub reason: String,
}

impl RegistryAddress {
    /// Creates a client of the registry; `None` for [`RegistryAddress::None`]. Does not connect: the first call does.
    /// Must be called inside a tokio runtime.
    pub fn connect(&self) -> Result<Option<Arc<dyn Registry>>, RegistryError> {
        match self {
            RegistryAddress::None => Ok(None),
            RegistryAddress::Etcd { endpoints, prefix, tls, user } => {
                let registry = EtcdRegistry::connect(endpoints, prefix, tls.as_ref(), user.as_ref())?;
                Ok(Some(Arc::new(registry)))
            }
            RegistryAddress::Kubernetes { namespace, name } => {
                let server = KubernetesServer::in_cluster()
                    .map_err(|reason| RegistryError::Unreachable { address: self.to_string(), reason })?;
                Ok(Some(Arc::new(KubernetesRegistry::connect(server, namespace, name)?)))
            }
        }
    }
}

impl FromStr for RegistryAddress {
    type Err = RegistryAddressError;

    fn from_str(text: &str) -> Result<RegistryAddress, RegistryAddressError> {
        let parsed = match text.split_once("://") {
            None if text.is_empty() || text == "none" => Ok(RegistryAddress::None),
            Some(("etcd", rest)) => etcd(rest),
            Some(("kubernetes", rest)) => kubernetes(rest),
            _ => Err("unknown scheme; use etcd://, kubernetes:// or \"none\"".into()),
        };
        parsed.map_err(|reason| RegistryAddressError { text: without_password(text), reason })
    }
}

/// Returns an address without the password that it should not have: errors are logged.
fn without_password(text: &str) -> String {
    let hide = |text: &str, start: &str, end: char| {
        let Some((before, rest)) = text.split_once(start) else { return text.to_owned() };
        match rest.split_once(end) {
            Some((_, after)) => format!("{before}{start}...{end}{after}"),
            None => format!("{before}{start}..."),
        }
    };
    let text = if text.contains('@') { hide(text, "://", '@') } else { text.to_owned() };
    hide(&text, "password=", '&')
}

fn etcd(rest: &str) -> Result<RegistryAddress, String> {
    const FORM: &str = "etcd://host:port[,host:port...]/prefix";
    let (rest, options) = rest.split_once('?').unwrap_or((rest, ""));
    let Some((servers, prefix)) = rest.split_once('/') else {
        return Err(format!("the prefix is missing ({FORM}); it separates clusters that share an etcd"));
    };
    let prefix = prefix.trim_matches('/');
    if prefix.is_empty() {
        return Err(format!("the prefix is empty ({FORM}); it separates clusters that share an etcd"));
    }
    let endpoints: Vec<String> = servers.split(',').map(str::to_owned).collect();
    for endpoint in &endpoints {
        let Some((host, port)) = endpoint.rsplit_once(':') else {
            return Err(format!("{endpoint:?} has no port ({FORM}); the default of etcd is 2379"));
        };
        // An IPv6 address is in brackets; other hosts with a colon or an @ are invalid.
        let bracketed = host.starts_with('[') && host.ends_with(']');
        if host.contains('@') {
            return Err(format!(
                "user and password do not belong before the host; add ?user=NAME&password_file=FILE, or ?user=NAME and set the \
                 variable {ETCD_PASSWORD_VARIABLE}"
            ));
        }
        if host.is_empty() || (!bracketed && host.contains([':', ' '])) {
            return Err(format!("{host:?} is no host ({FORM})"));
        }
        if !port.parse::<u16>().is_ok_and(|port| port > 0) {
            return Err(format!("{port:?} is no port ({FORM})"));
        }
    }
    let (tls, user) = options_of(options)?;
    Ok(RegistryAddress::Etcd { endpoints, prefix: prefix.into(), tls, user })
}

fn options_of(options: &str) -> Result<(Option<EtcdTlsFiles>, Option<EtcdUser>), String> {
    let (mut ca, mut cert, mut key, mut user, mut password_file) = (None, None, None, None, None);
    for option in options.split('&').filter(|option| !option.is_empty()) {
        let (name, value) = option.split_once('=').unwrap_or((option, ""));
        let target = match name {
            "ca" => &mut ca,
            "cert" => &mut cert,
            "key" => &mut key,
            "user" => &mut user,
            "password_file" => &mut password_file,
            "password" => {
                return Err(format!(
                    "a password on a command line can be read by others; use password_file=FILE, or the variable \
                     {ETCD_PASSWORD_VARIABLE}"
                ));
            }
            _ => {
                return Err(format!(
                    "{option:?} is none of ca=file, cert=file, key=file, user=name, password_file=file"
                ));
            }
        };
        if value.is_empty() {
            return Err(format!("{name} has no value"));
        }
        *target = Some(value);
    }
    let client = match (cert, key) {
        (Some(certificate), Some(key)) => Some((certificate.into(), key.into())),
        (None, None) => None,
        _ => return Err("cert and key must be given together".into()),
    };
    let tls = match (ca, client) {
        (Some(ca), client) => Some(EtcdTlsFiles { ca: ca.into(), client }),
        (None, None) => None,
        (None, Some(_)) => return Err("ca is missing: the file with the CA certificates of etcd".into()),
    };
    let user = match (user, password_file) {
        (Some(name), file) => Some(EtcdUser { name: name.into(), password_file: file.map(PathBuf::from) }),
        (None, None) => None,
        (None, Some(_)) => return Err("user is missing: the name to which the password belongs".into()),
    };
    Ok((tls, user))
}

fn kubernetes(rest: &str) -> Result<RegistryAddress, String> {
    const FORM: &str = "kubernetes://namespace/name";
    let Some((namespace, name)) = rest.split_once('/') else {
        return Err(format!("the name is missing ({FORM})"));
    };
    // Rules of Kubernetes names. "-identity" and "-master-4194303" are appended to the name; labels have at most 63
    // bytes.
    for (what, text, max) in [("namespace", namespace, 63), ("name", name, 45)] {
        let allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
        if text.is_empty() || text.len() > max || !text.chars().all(allowed) {
            return Err(format!(
                "{text:?} is no {what}: one to {max} lower-case letters, digits and hyphens ({FORM})"
            ));
        }
        if text.starts_with('-') || text.ends_with('-') {
            return Err(format!("the {what} {text:?} begins or ends with a hyphen ({FORM})"));
        }
    }
    Ok(RegistryAddress::Kubernetes { namespace: namespace.into(), name: name.into() })
}

impl fmt::Display for RegistryAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RegistryAddress::None => f.write_str("none"),
            RegistryAddress::Etcd { endpoints, prefix, tls, user } => {
                write!(f, "etcd://{}/{prefix}", endpoints.join(","))?;
                let mut options: Vec<(&str, String)> = vec![];
                if let Some(EtcdTlsFiles { ca, client }) = tls {
                    options.push(("ca", ca.display().to_string()));
                    let client = client.iter().flat_map(|(cert, key)| [("cert", cert), ("key", key)]);
                    options.extend(client.map(|(name, file)| (name, file.display().to_string())));
                }
                if let Some(EtcdUser { name, password_file }) = user {
                    options.push(("user", name.clone()));
                    options.extend(
                        password_file.iter().map(|file| ("password_file", file.display().to_string())),
                    );
                }
                for (at, (name, value)) in options.iter().enumerate() {
                    write!(f, "{}{name}={value}", if at == 0 { '?' } else { '&' })?;
                }
                Ok(())
            }
            RegistryAddress::Kubernetes { namespace, name } => write!(f, "kubernetes://{namespace}/{name}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registry_address_round_trips() {
        for text in [
            "none",
            "etcd://a:2379/moontide",
            "etcd://a:2379,10.0.0.2:2380,[::1]:2381/some/where",
            "etcd://a:2379/moontide?ca=/etc/ca.pem",
            "etcd://a:2379/moontide?ca=/etc/ca.pem&cert=/etc/c.pem&key=/etc/k.pem",
            "etcd://a:2379/moontide?user=me",
            "etcd://a:2379/moontide?ca=/etc/ca.pem&user=me&password_file=/etc/password",
            "kubernetes://storage/moontide-0",
        ] {
            assert_eq!(text.parse::<RegistryAddress>().unwrap().to_string(), text);
        }
        assert_eq!("".parse(), Ok(RegistryAddress::None));
        let etcd = |prefix: &str| RegistryAddress::Etcd {
            endpoints: vec!["a:1".into()],
            prefix: prefix.into(),
            tls: None,
            user: None,
        };
        assert_eq!("etcd://a:1/x/".parse(), Ok(etcd("x")), "slashes at the end are dropped");
    }

    #[test]
    fn registry_address_error_states_reason() {
        for (text, reason) in [
            ("zookeeper://a:1/b", "unknown scheme"),
            ("a:2379", "unknown scheme"),
            ("etcd://a:2379", "prefix is missing"),
            ("etcd://a:2379/", "prefix is empty"),
            ("etcd://a/b", "has no port"),
            ("etcd://a:1,/b", "has no port"),
            ("etcd://:1/b", "is no host"),
            ("etcd://a:b:1/b", "is no host"),
            ("etcd://a:0/b", "is no port"),
            ("etcd://a:65536/b", "is no port"),
            ("etcd://me:secret@a:1/b", "add ?user=NAME&password_file=FILE"),
            ("etcd://a:1/b?user=me&password=secret", "password_file=FILE"),
            ("etcd://a:1/b?password=secret&user=me", "password=...&user=me"),
            ("etcd://a:1/b?password_file=f", "user is missing"),
            ("etcd://a:1/b?user=", "user has no value"),
            ("etcd://a:1/b?cert=c", "cert and key"),
            ("etcd://a:1/b?cert=c&key=k", "ca is missing"),
            ("etcd://a:1/b?tls=yes", "none of ca=file"),
            ("kubernetes://a", "name is missing"),
            ("kubernetes://a/B", "is no name"),
            ("kubernetes:///b", "is no namespace"),
            ("kubernetes://a/b-", "hyphen"),
        ] {
            let error = text.parse::<RegistryAddress>().unwrap_err().to_string();
            assert!(error.contains(reason), "{text}: {error}");
            assert!(!error.contains("secret"), "a password is in the log: {error}");
        }
    }
}
