//! Clusters with certificates: what works with them, and who is refused. Real processes, and certificates of `moontide certs`.

mod common;

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use common::{Ended, Folder, Running, moontide, printed, run_command};
use moontide_auth::Credentials;

/// A master and two nodes with certificates, and a directory with those of others.
struct SecureCluster {
    folder: Folder,
    master: String,
    admin: String,
    /// Data-plane addresses of the nodes.
    nodes: Vec<String>,
    /// Admin addresses of the nodes.
    node_admins: Vec<String>,
    _running: Vec<Running>,
}

/// Time until a change of files is seen everywhere: processes look at most once in a second.
const LOOK: Duration = Duration::from_millis(1500);

impl SecureCluster {
    fn start() -> SecureCluster {
        let folder = Folder::new("secure");
        certs(&["init", &folder.file("certs"), "--cluster", "prod"]);
        let roles = ["master", "node/one", "node/two", "operator", "scraper", "tenant/acme", "tenant/beta"];
        certs(&[&["issue", &folder.file("certs")], &roles[..]].concat());
        let words = |role: &str, words: &[&str]| -> Vec<String> {
            words.iter().map(|word| (*word).to_owned()).chain(flags(&folder, role)).collect()
        };
        let start = |all: Vec<String>| {
            // The last line of each.
            let last = if all[0] == "master" { "admin" } else { "ready" };
            Running::start_until(&all.iter().map(String::as_str).collect::<Vec<_>>(), last)
        };
        let any = "127.0.0.1:0";
        let listen = ["master", "--grpc-listen", any, "--frame-listen", any, "--admin-listen", any];
        let (running, lines) = start(words("master", &listen));
        let (master, admin) = (printed(&lines, "grpc").to_owned(), printed(&lines, "admin").to_owned());
        let (mut all, mut nodes, mut node_admins) = (vec![running], vec![], vec![]);
        for name in ["one", "two"] {
            let role = node_file(&folder, name);
            let (running, lines) =
                start(words(&role, &["node", "--master", &master, "--memory-bytes", "64MiB"]));
            nodes.push(printed(&lines, "tcp").to_owned());
            node_admins.push(printed(&lines, "admin").to_owned());
            all.push(running);
        }
        SecureCluster { folder, master, admin, nodes, node_admins, _running: all }
    }

    /// Runs a command with the certificate of a role.
    fn run(&self, role: &str, words: &[&str], input: &[u8]) -> Ended {
        let mut command = moontide(words);
        command.args(["--master", &self.master]).args(flags(&self.folder, role));
        run_command(command, input)
    }
}

fn certs(words: &[&str]) {
    common::expect(0, &[&["certs"], words].concat(), b"");
}

/// Returns the name of the files of a node with this name.
fn node_file(_folder: &Folder, name: &str) -> String {
    let identity: moontide_auth::Identity =
        format!("spiffe://moontide.local/moontide/prod/node/{name}").parse().unwrap();
    identity.role().to_string().replace('/', "-")
}

/// Returns the flags with the certificate of a role.
fn flags(folder: &Folder, role: &str) -> Vec<String> {
    let role = role.replace('/', "-");
    [
        ("--ca", folder.file("certs/ca.pem")),
        ("--cert", folder.file(&format!("certs/{role}.pem"))),
        ("--key", folder.file(&format!("certs/{role}-key.pem"))),
    ]
    .into_iter()
    .flat_map(|(flag, value)| [flag.to_owned(), value])
    .collect()
}

#[test]
fn tenants_store_and_read_their_own_objects_only() {
    let cluster = SecureCluster::start();
    let bytes: Vec<u8> = (0..3_000_000u32).map(|n| (n * 7 / 5) as u8).collect();
    for shm in ["true", "false"] {
        let key = format!("key-{shm}");
        let put = cluster.run("tenant/acme", &["put", &key, "-", "--shm", shm], &bytes);
        assert_eq!(put.code, 0, "{}", put.err);
        let got = cluster.run("tenant/acme", &["get", &key, "--shm", shm], b"");
        assert!(got.code == 0 && got.out == bytes, "{}", got.err);
        assert_eq!(cluster.run("tenant/beta", &["get", &key], b"").code, 3, "no object of this tenant");
    }
    // A request that names another tenant is refused by the master, too: here by a client that does not look.
    let other = cluster.run("tenant/beta", &["get", "key-true", "--tenant", "acme"], b"");
    assert!(other.code != 0 && other.err.contains("certificate is for tenant beta"), "{}", other.err);
    // An operator may act for any tenant.
    let listed = cluster.run("operator", &["ls", "--tenant", "acme"], b"");
    assert_eq!(listed.text().lines().count(), 2, "{}", listed.err);
    // Calls of operators are refused by name.
    let quota = cluster.run("tenant/acme", &["tenant", "quota", "acme", "--bytes", "1GiB"], b"");
    assert_eq!(quota.code, 1);
    assert!(quota.err.contains("tenant/acme may not call"), "{}", quota.err);
    assert_eq!(cluster.run("operator", &["tenant", "quota", "acme", "--bytes", "1GiB"], b"").code, 0);
    let removed = cluster.run("tenant/acme", &["rm", "key-true"], b"");
    assert_eq!(removed.code, 0, "{}", removed.err);
}

#[test]
fn peers_without_a_certificate_of_the_cluster_reach_nothing() {
    let cluster = SecureCluster::start();
    // Without TLS.
    let mut plain = moontide(&["ls", "--master", &cluster.master]);
    plain.env_remove("MOONTIDE_CA");
    let ended = run_command(plain, b"");
    assert_eq!(ended.code, 4, "{}", ended.err);
    // Of another authority, which calls the cluster the same.
    let other = Folder::new("secure-other");
    certs(&["init", &other.file("certs"), "--cluster", "prod"]);
    certs(&["issue", &other.file("certs"), "operator"]);
    for ca in [cluster.folder.file("certs/ca.pem"), other.file("certs/ca.pem")] {
        let words =
            ["ls", "--master", &cluster.master, "--ca", &ca, "--cert", &other.file("certs/operator.pem")];
        let mut command = moontide(&words);
        command.args(["--key", &other.file("certs/operator-key.pem")]);
        let ended = run_command(command, b"");
        assert_eq!(ended.code, 4, "{}", ended.err);
    }
    // A node cannot act as a client, and a scraper not as an operator.
    assert_ne!(cluster.run(&node_file(&cluster.folder, "one"), &["ls"], b"").code, 0);
    assert_ne!(cluster.run("scraper", &["ls"], b"").code, 0);
    // Bytes without TLS get no answer of the protocol from any port.
    let frame = [b"MTF1\x01\x00\x20\x00".as_slice(), &[0; 300]].concat();
    for address in cluster.nodes.iter().chain([&cluster.master]) {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        stream.write_all(&frame).unwrap();
        let mut answer = vec![];
        let _ = stream.read_to_end(&mut answer);
        assert!(!answer.starts_with(b"MTF1") && answer.len() < 100, "{address}: {answer:?}");
    }
}

#[test]
fn admin_pages_are_for_operators_and_scrapers_but_health_is_for_everybody() {
    let cluster = SecureCluster::start();
    let address = cluster.admin.strip_prefix("https://").expect("a page over TLS");
    let status = |role: Option<&str>, request: &str| http_status(&cluster.folder, role, address, request);
    for (request, allowed) in [
        ("GET /health", &[None, Some("scraper"), Some("operator"), Some("tenant/acme")][..]),
        ("GET /metrics", &[Some("scraper"), Some("operator")]),
        ("GET /get_all_nodes", &[Some("operator")]),
        ("POST /evict?target_permille=1000", &[Some("operator")]),
    ] {
        for role in [None, Some("scraper"), Some("operator"), Some("tenant/acme")] {
            let expected = if allowed.contains(&role) { 200 } else { 403 };
            assert_eq!(status(role, request), expected, "{request} by {role:?}");
        }
    }
}

#[test]
fn inspect_reads_pages_over_tls_with_an_operators_certificate() {
    let cluster = SecureCluster::start();
    let page = &cluster.node_admins[0];
    let address = page.strip_prefix("https://").expect("a page over TLS");
    let inspect = |role: Option<&str>, admin: &str| {
        let mut command = moontide(&["inspect", "--json", "--admin", admin]);
        command.args(role.map(|role| flags(&cluster.folder, role)).unwrap_or_default());
        run_command(command, b"")
    };
    for admin in [page.as_str(), address] {
        let shown = inspect(Some("operator"), admin);
        assert_eq!(shown.code, 0, "{admin}: {}", shown.err);
        assert!(!shown.json()["segments"].as_array().unwrap().is_empty());
    }
    // The variables do as the flags do.
    let mut command = moontide(&["inspect", "--admin", address, "0"]);
    let all = flags(&cluster.folder, "operator");
    command.envs([("MOONTIDE_CA", &all[1]), ("MOONTIDE_CERT", &all[3]), ("MOONTIDE_KEY", &all[5])]);
    let shown = run_command(command, b"");
    assert!(shown.code == 0 && shown.text().contains("=== Segment 0 ==="), "{}", shown.err);
    // Without a certificate, the error says what to do.
    for admin in [page.as_str(), address, &format!("http://{address}")] {
        let refused = inspect(None, admin);
        assert_eq!(refused.code, 4, "{admin}: {}", refused.err);
        assert!(refused.err.contains("uses TLS; set ca, cert and key"), "{admin}: {}", refused.err);
    }
    // Pages are for operators; the answer names the role.
    let refused = inspect(Some("tenant/acme"), page);
    assert!(refused.code == 1 && refused.err.contains("tenant/acme may not call"), "{}", refused.err);
    // With a part of the settings, the error names the others.
    let partial = common::run(&["inspect", "--admin", page, "--ca", &all[1]], b"");
    assert!(partial.code == 2 && partial.err.contains("cert"), "{}", partial.err);
    // A server of another authority is refused.
    let other = Folder::new("secure-inspect");
    certs(&["init", &other.file("certs"), "--cluster", "prod"]);
    certs(&["issue", &other.file("certs"), "operator"]);
    let mut command = moontide(&["inspect", "--admin", page]);
    command.args(flags(&other, "operator"));
    let refused = run_command(command, b"");
    assert!(refused.code == 4 && refused.err.contains("invalid peer certificate"), "{}", refused.err);
}

/// Makes a request over TLS, with or without a certificate. Returns the status.
fn http_status(folder: &Folder, role: Option<&str>, address: &str, request: &str) -> u32 {
    let mut curl = std::process::Command::new("curl");
    let (method, path) = request.split_once(' ').unwrap();
    // The name in the certificate is an identity, not that of the host: curl is told not to compare it.
    curl.args(["-s", "-k", "-o", "/dev/null", "-w", "%{http_code}", "--max-time", "20", "-X", method]);
    curl.args(["-H", "moontide-admin: 1"]);
    if let Some(role) = role {
        let all = flags(folder, role);
        curl.args(["--cert", &all[3], "--key", &all[5]]);
    }
    let done = curl.arg(format!("https://{address}{path}")).output().expect("curl is installed");
    String::from_utf8(done.stdout).unwrap().parse().unwrap()
}

#[test]
fn certificates_are_renewed_without_a_restart_and_a_removed_authority_is_refused() {
    let cluster = SecureCluster::start();
    let files = cluster.folder.file("certs");
    let old = std::fs::read_to_string(cluster.folder.file("certs/ca.pem")).unwrap();
    assert_eq!(cluster.run("tenant/acme", &["put", "key", "-"], b"bytes").code, 0);

    // New certificates for all, in the order of the documentation: both authorities, then certificates, then one authority.
    let next = Folder::new("secure-next");
    certs(&["init", &next.file("certs"), "--cluster", "prod"]);
    let new = std::fs::read_to_string(next.file("certs/ca.pem")).unwrap();
    std::fs::write(cluster.folder.file("certs/ca.pem"), format!("{old}{new}")).unwrap();
    std::thread::sleep(LOOK);
    let kept = cluster.folder.file("old-acme");
    std::fs::create_dir(&kept).unwrap();
    for name in ["tenant-acme.pem", "tenant-acme-key.pem"] {
        std::fs::copy(format!("{files}/{name}"), format!("{kept}/{name}")).unwrap();
    }
    std::fs::copy(next.file("certs/ca-key.pem"), format!("{files}/ca-key.pem")).unwrap();
    std::fs::copy(next.file("certs/ca.pem"), next.file("ca-only.pem")).unwrap();
    let roles = ["master", "node/one", "node/two", "tenant/acme"];
    certs(&[&["issue", &next.file("certs")], &roles[..]].concat());
    for role in
        ["master", &node_file(&cluster.folder, "one"), &node_file(&cluster.folder, "two"), "tenant-acme"]
    {
        for kind in ["-key.pem", ".pem"] {
            let staged = format!("{files}/{role}{kind}.new");
            std::fs::copy(next.file(&format!("certs/{role}{kind}")), &staged).unwrap();
            std::fs::rename(&staged, format!("{files}/{role}{kind}")).unwrap();
        }
    }
    std::thread::sleep(LOOK);
    let got = cluster.run("tenant/acme", &["get", "key", "--shm", "false"], b"");
    assert!(got.code == 0 && got.out == b"bytes", "{}", got.err);
    std::fs::write(cluster.folder.file("certs/ca.pem"), &new).unwrap();
    std::thread::sleep(LOOK);
    // The first connection after the change may be the one that sees it.
    let until = Instant::now() + Duration::from_secs(20);
    loop {
        let mut command = moontide(&["get", "key", "--master", &cluster.master]);
        command.args(["--ca", &cluster.folder.file("certs/ca.pem")]);
        command.args(["--cert", &format!("{kept}/tenant-acme.pem")]);
        command.args(["--key", &format!("{kept}/tenant-acme-key.pem")]);
        let ended = run_command(command, b"");
        if ended.code == 4 {
            break;
        }
        assert!(
            Instant::now() < until,
            "a certificate of the removed authority is still accepted: {}",
            ended.err
        );
        std::thread::sleep(Duration::from_millis(200));
    }
    let got = cluster.run("tenant/acme", &["get", "key", "--shm", "false"], b"");
    assert!(got.code == 0 && got.out == b"bytes", "{}", got.err);
}

#[test]
fn process_with_the_certificate_of_another_role_does_not_start() {
    let folder = Folder::new("secure-roles");
    certs(&["init", &folder.file("certs")]);
    certs(&["issue", &folder.file("certs"), "master", "operator", "node/one"]);
    let start = |command: &str, role: &str| {
        let mut command = moontide(&[command]);
        command.args(flags(&folder, role));
        run_command(command, b"")
    };
    let master = start("master", "operator");
    assert!(master.code != 0 && master.err.contains("not of a master"), "{}", master.err);
    let node = start("node", "master");
    assert!(node.code != 0 && node.err.contains("not of a node"), "{}", node.err);
    // Keys are readable by their owner only.
    use std::os::unix::fs::PermissionsExt;
    let mode = std::fs::metadata(folder.file("certs/master-key.pem")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let files = moontide_auth::CredentialFiles {
        ca: folder.file("certs/ca.pem").into(),
        cert: folder.file("certs/master.pem").into(),
        key: folder.file("certs/master-key.pem").into(),
    };
    assert_eq!(Credentials::load(files).unwrap().info().identity.cluster(), "main");
}
