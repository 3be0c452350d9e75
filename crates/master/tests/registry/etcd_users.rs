//! Users of etcd and their tokens, and certificates that are replaced, with real servers.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use moontide_auth::testing::Directory;
use moontide_master::election::{RegistryAddress, RegistryError};
use rcgen::{BasicConstraints, CertificateParams, DnType, IsCa, Issuer, KeyPair};
use tokio::time::sleep;
use tonic::client::Grpc;
use tonic::codegen::http::uri::PathAndQuery;
use tonic::transport::{Channel, Endpoint};
use tonic::{Request, Status};
use tonic_prost::ProstCodec;

use crate::conformance::{at, document, recovers, term};
use crate::etcd::Etcd;

const USER: &str = "moontide";
const ROLE: &str = "moontide";
const PREFIX: &str = "some/prefix";

/// Timeout of waits; long, because test machines are slow and busy.
const TIMEOUT: Duration = Duration::from_secs(30);

/// Messages of the service that manages users, as far as used here.
mod auth {
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Empty {}

    /// Of a new user, a change of its password, and the request for a token.
    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct NameAndPassword {
        #[prost(string, tag = "1")]
        pub(super) name: String,
        #[prost(string, tag = "2")]
        pub(super) password: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Name {
        #[prost(string, tag = "1")]
        pub(super) name: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Grant {
        #[prost(string, tag = "1")]
        pub(super) user: String,
        #[prost(string, tag = "2")]
        pub(super) role: String,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Permission {
        /// 2: read and write.
        #[prost(int32, tag = "1")]
        pub(super) kind: i32,
        #[prost(bytes = "vec", tag = "2")]
        pub(super) key: Vec<u8>,
        #[prost(bytes = "vec", tag = "3")]
        pub(super) range_end: Vec<u8>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct GrantPermission {
        #[prost(string, tag = "1")]
        pub(super) role: String,
        #[prost(message, optional, tag = "2")]
        pub(super) permission: Option<Permission>,
    }

    #[derive(Clone, PartialEq, prost::Message)]
    pub(super) struct Token {
        #[prost(string, tag = "2")]
        pub(super) token: String,
    }
}

use auth::{Empty, Grant, GrantPermission, Name, NameAndPassword, Permission, Token};

/// Calls of an administrator of etcd.
struct Administrator {
    channel: Channel,
    token: Option<String>,
}

impl Administrator {
    fn connect(etcd: &Etcd) -> Administrator {
        let server = Endpoint::from_shared(format!("http://{}", etcd.endpoints())).unwrap();
        Administrator { channel: server.connect_lazy(), token: None }
    }

    async fn call<M, R>(&self, name: &str, message: M) -> Result<R, Status>
    where
        M: prost::Message + 'static,
        R: prost::Message + Default + 'static,
    {
        let mut grpc = Grpc::new(self.channel.clone());
        grpc.ready().await.unwrap();
        let mut request = Request::new(message);
        if let Some(token) = &self.token {
            request.metadata_mut().insert("token", token.parse().unwrap());
        }
        let path = PathAndQuery::try_from(format!("/etcdserverpb.Auth/{name}")).unwrap();
        Ok(grpc.unary(request, path, ProstCodec::<M, R>::default()).await?.into_inner())
    }

    async fn done(&self, name: &str, message: impl prost::Message + 'static) {
        let _: Empty = self.call(name, message).await.unwrap();
    }

    async fn log_in(&mut self) {
        // etcd refuses even this call with an old token.
        self.token = None;
        let login = NameAndPassword { name: "root".into(), password: "of root".into() };
        let token: Token = self.call("Authenticate", login).await.unwrap();
        self.token = Some(token.token);
    }

    /// Adds a user with a role.
    async fn add(&self, user: &str, password: &str, role: &str) {
        self.done("UserAdd", NameAndPassword { name: user.into(), password: password.into() }).await;
        self.done("UserGrantRole", Grant { user: user.into(), role: role.into() }).await;
    }

    /// Adds users, and a role with the keys under the prefix.
    async fn add_users(&self, password: &str) {
        self.done("RoleAdd", Name { name: "root".into() }).await;
        self.add("root", "of root", "root").await;
        self.done("RoleAdd", Name { name: ROLE.into() }).await;
        let (key, range_end) = (format!("{PREFIX}/").into_bytes(), format!("{PREFIX}0").into_bytes());
        let permission = Some(Permission { kind: 2, key, range_end });
        self.done("RoleGrantPermission", GrantPermission { role: ROLE.into(), permission }).await;
        self.add(USER, password, ROLE).await;
    }

    async fn enable(&mut self) {
        self.done("AuthEnable", Empty {}).await;
        self.log_in().await;
    }

    async fn change_password(&self, password: &str) {
        let change = NameAndPassword { name: USER.into(), password: password.into() };
        self.done("UserChangePassword", change).await;
    }
}

/// Returns the options of the address of a user whose password is in a file.
fn user(file: &Path) -> String {
    format!("?user={USER}&password_file={}", file.display())
}

/// A directory with a file that has a password.
fn password_file(password: &str) -> (Directory, PathBuf) {
    let directory = Directory::new();
    let file = directory.path().join("password");
    std::fs::write(&file, format!("{password}\n")).unwrap();
    (directory, file)
}

fn denied(error: RegistryError) -> String {
    assert!(matches!(error, RegistryError::Denied { .. }), "{error}");
    error.to_string()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn user_with_password_makes_all_calls_and_others_are_denied() {
    let Some(etcd) = Etcd::start(1).await else { return };
    let mut administrator = Administrator::connect(&etcd);
    administrator.add_users("secret").await;
    let (_directory, file) = password_file("secret");
    // Without authentication enabled, the user does no harm.
    let early = etcd.open_with(PREFIX, &user(&file));
    assert!(early.write(None, &document()).await.unwrap());
    administrator.enable().await;

    let registry = etcd.open_with(PREFIX, &user(&file));
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    let snapshot = registry.read().await.unwrap();
    let (version, current) = snapshot.document.clone().unwrap();
    assert!(registry.write(Some(&version), &current.with_next_term().unwrap().0).await.unwrap());
    assert!(registry.renew(term(1)).await.unwrap());
    // A registry that was opened before gets a token, too.
    assert_eq!(early.read().await.unwrap().members.len(), 1);
    // A watch wakes up by a change, and not before.
    let seen = registry.read().await.unwrap();
    let started = Instant::now();
    let (_, ()) = tokio::join!(
        async {
            sleep(Duration::from_millis(500)).await;
            early.join(term(2), &at(2), Duration::from_secs(60)).await.unwrap();
        },
        registry.changed(&seen, TIMEOUT)
    );
    let waited = started.elapsed();
    assert!(waited >= Duration::from_millis(500) && waited < TIMEOUT / 2, "{waited:?}");
    registry.remove(term(1)).await.unwrap();
    registry.remove(term(2)).await.unwrap();
    assert!(registry.read().await.unwrap().members.is_empty());

    // Without a user.
    let error = denied(etcd.open(PREFIX).read().await.unwrap_err());
    assert!(error.contains("user name is empty"), "{error}");
    // With a wrong password.
    std::fs::write(&file, "guess").unwrap();
    let error = denied(etcd.open_with(PREFIX, &user(&file)).read().await.unwrap_err());
    assert!(error.contains("wrong password in") && error.contains("password"), "{error}");
    assert!(error.contains(file.to_str().unwrap()) && !error.contains("guess"), "{error}");
    // Under a prefix for which the user has no rights.
    std::fs::write(&file, "secret").unwrap();
    let error = denied(etcd.open_with("other/prefix", &user(&file)).read().await.unwrap_err());
    assert!(error.contains("permission denied"), "{error}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn token_is_renewed_after_expiry_restart_and_changes_of_users() {
    let flags = ["--auth-token-ttl=1".to_owned()];
    let Some(mut etcd) = Etcd::start_with(1, &flags, "").await else { return };
    let mut administrator = Administrator::connect(&etcd);
    administrator.add_users("secret").await;
    administrator.enable().await;
    let (_directory, file) = password_file("secret");
    let registry = etcd.open_with(PREFIX, &user(&file));
    assert!(registry.write(None, &document()).await.unwrap());
    registry.join(term(1), &at(1), Duration::from_secs(600)).await.unwrap();

    // A compare-and-swap is never repeated, but one whose token is refused was not executed.
    let next = || async {
        let (version, current) = registry.read().await.unwrap().document.unwrap();
        (version, current.with_next_term().unwrap().0)
    };
    // Expired: etcd forgets a token that was not used for a second.
    let (version, document) = next().await;
    sleep(Duration::from_secs(4)).await;
    assert!(registry.write(Some(&version), &document).await.unwrap());
    // Older than a change of users.
    let (version, document) = next().await;
    administrator.log_in().await;
    administrator.add("another", "password", ROLE).await;
    assert!(registry.write(Some(&version), &document).await.unwrap());
    // Replaced password: the file has the new one.
    std::fs::write(&file, "another secret").unwrap();
    administrator.log_in().await;
    administrator.change_password("another secret").await;
    assert!(registry.renew(term(1)).await.unwrap());
    // Replaced in etcd only.
    administrator.log_in().await;
    administrator.change_password("third secret").await;
    let error = denied(registry.read().await.unwrap_err());
    assert!(error.contains("wrong password in"), "{error}");
    std::fs::write(&file, "third secret").unwrap();
    assert!(registry.renew(term(1)).await.unwrap());
    // Forgotten with a restart.
    etcd.servers[0].kill();
    etcd.servers[0].restart();
    assert_eq!(recovers(&registry).await.members.len(), 1);
    assert!(registry.renew(term(1)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn missing_password_is_an_error_of_the_start_that_names_the_file_and_the_variable() {
    let connect = |query: &str| {
        let address: RegistryAddress = format!("etcd://127.0.0.1:1/{PREFIX}{query}").parse().unwrap();
        denied(address.connect().unwrap_err())
    };
    let error = connect("?user=moontide&password_file=/nowhere/password");
    assert!(error.contains("/nowhere/password"), "{error}");
    if std::env::var_os("MOONTIDE_ETCD_PASSWORD").is_none() {
        let error = connect("?user=moontide");
        assert!(error.contains("MOONTIDE_ETCD_PASSWORD") && error.contains("password_file"), "{error}");
    }
}

/// An authority for etcd and its clients.
struct Authority {
    issuer: Issuer<'static, KeyPair>,
    pem: String,
}

impl Authority {
    fn new(name: &str) -> Authority {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let pem = params.self_signed(&key).unwrap().pem();
        Authority { issuer: Issuer::new(params, key), pem }
    }

    /// Writes a certificate and its key: `<name>.pem` and `<name>-key.pem`. Replaces earlier ones as tools do, by a rename.
    fn issue(&self, directory: &Path, name: &str) {
        let mut params = CertificateParams::new(vec!["127.0.0.1".into()]).unwrap();
        params.distinguished_name.push(DnType::CommonName, name);
        let key = KeyPair::generate().unwrap();
        let certificate = params.signed_by(&key, &self.issuer).unwrap();
        replace(&directory.join(format!("{name}-key.pem")), &key.serialize_pem());
        replace(&directory.join(format!("{name}.pem")), &certificate.pem());
    }
}

fn replace(path: &Path, content: &str) {
    let new = path.with_extension("new");
    std::fs::write(&new, content).unwrap();
    std::fs::rename(&new, path).unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn certificates_for_etcd_are_replaced_without_a_restart() {
    let directory = Directory::new();
    let file = |name: &str| directory.path().join(name).display().to_string();
    let old = Authority::new("old authority");
    replace(&directory.path().join("ca.pem"), &old.pem);
    replace(&directory.path().join("etcd-ca.pem"), &old.pem);
    old.issue(directory.path(), "etcd");
    old.issue(directory.path(), "master");
    let flags = [
        format!("--cert-file={}", file("etcd.pem")),
        format!("--key-file={}", file("etcd-key.pem")),
        format!("--trusted-ca-file={}", file("etcd-ca.pem")),
        "--client-cert-auth".to_owned(),
    ];
    let query = format!("?ca={}&cert={}&key={}", file("ca.pem"), file("master.pem"), file("master-key.pem"));
    let Some(mut etcd) = Etcd::start_with(1, &flags, &query).await else { return };
    let registry = etcd.open(PREFIX);
    assert!(registry.write(None, &document()).await.unwrap());
    registry.join(term(1), &at(1), Duration::from_secs(600)).await.unwrap();
    let without = etcd.open_with(PREFIX, &format!("?ca={}", file("ca.pem")));
    without.read().await.expect_err("etcd needs a certificate of its clients");

    // etcd gets a new authority for its clients and for itself; the master has the old files yet.
    let new = Authority::new("new authority");
    etcd.servers[0].kill();
    replace(&directory.path().join("etcd-ca.pem"), &new.pem);
    new.issue(directory.path(), "etcd");
    etcd.servers[0].restart();
    let until = Instant::now() + TIMEOUT;
    let error = loop {
        let error = registry.read().await.unwrap_err().to_string();
        if error.contains("certificate") {
            break error;
        }
        assert!(Instant::now() < until, "etcd did not start: {error}");
        sleep(Duration::from_millis(50)).await;
    };
    assert!(error.contains("UnknownIssuer"), "{error}");
    // Files that cannot be used change nothing; the key alone does not belong to the certificate.
    replace(&directory.path().join("ca.pem"), "no certificate");
    registry.read().await.unwrap_err();
    // With all new files, the same object reads again.
    replace(&directory.path().join("ca.pem"), &new.pem);
    let error = registry.read().await.unwrap_err();
    println!("with the old client certificate: {error}");
    new.issue(directory.path(), "master");
    assert_eq!(recovers(&registry).await.members.len(), 1);
    assert!(registry.renew(term(1)).await.unwrap());
}
