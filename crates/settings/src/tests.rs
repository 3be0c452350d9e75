//! Tests of the mechanism with a small component: sources, sections, errors, values.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use moontide_types::NodeId;
use proptest::prelude::*;

use crate::*;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Policy {
    Fast,
    Fair,
}

choices! {
    /// Names of policies.
    enum PolicyNames for Policy { Policy::Fast => "fast", Policy::Fair => "fair" }
}

settings! {
    /// Settings of a test component.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub(crate) struct TestConfig {
        /// Number of workers.
        ///
        /// Each worker has its own queue.
        workers: u16 = 4, in 1..=64, "use one per core";
        /// Memory for objects.
        memory_bytes: u64 as Bytes = 1 << 30, alias "memory";
        /// Time without a heartbeat, in milliseconds.
        ttl_ms: u32 as Millis = 10_000, in 100.., "use a few heartbeats";
        /// Timeout of a call.
        timeout: Duration = Duration::from_secs(5);
        /// Addresses of the server.
        listen: Vec<SocketAddr> = Vec::new();
        /// Address of a master.
        master: String as HostPorts = "127.0.0.1:7400".into(), variable "TEST_MASTER";
        /// Id of the node.
        node_id: Option<NodeId> = None;
        /// Order of work.
        policy: Policy as PolicyNames = Policy::Fast;
        /// Use shared memory.
        shm: bool = true;
        /// Host label.
        host: String = "this-host".into(), shown "the host name";
    }
    sections {
        /// Disk tier.
        disk: TestDisk;
    }
    fields {
        /// Not a setting.
        token: u8 = 7;
    }
}

settings! {
    /// Settings of a test section.
    #[derive(Clone, Debug, PartialEq, Eq)]
    pub(crate) struct TestDisk {
        /// Directory.
        dir: PathBuf = PathBuf::new();
        /// Limit.
        limit_bytes: Option<u64> as Option<Bytes> = None;
        /// Threads.
        threads: usize = 2, in 1..=64, "use one or two";
    }
}

impl Component for TestConfig {
    const PREFIX: &'static str = "TEST_NODE_";
    const COMMAND: &'static str = "test node";

    fn check_rules(&self, errors: &mut Vec<InvalidSetting>) {
        if self.disk.as_ref().is_some_and(|disk| disk.dir.as_os_str().is_empty()) {
            errors.push(InvalidSetting::new("disk.dir", "is none", "set a directory"));
        }
    }
}

fn load_text(
    file: Option<&str>,
    environment: &[(&str, &str)],
    flags: &[(&str, &str)],
) -> Result<Loaded<TestConfig>, SettingsError> {
    let name = format!("moontide-settings-{}-{:?}.toml", std::process::id(), std::thread::current().id());
    let path = std::env::temp_dir().join(name.replace(['(', ')'], ""));
    if let Some(text) = file {
        std::fs::write(&path, text).unwrap();
    }
    let environment = environment.iter().map(|(name, text)| ((*name).to_owned(), (*text).to_owned()));
    let file = file.map(|_| path.as_path());
    let loaded = load(TestConfig::default(), file, environment, flags.iter().copied());
    let _ = std::fs::remove_file(&path);
    loaded
}

#[test]
fn flags_override_environment_and_environment_overrides_file() {
    let file = "workers = 1\nmemory_bytes = \"2GiB\"\nttl_ms = 500\n[disk]\ndir = \"/file\"\nthreads = 3\n";
    let environment = [
        ("TEST_NODE_MEMORY_BYTES", "3GiB"),
        ("TEST_NODE_TTL_MS", "2s"),
        ("TEST_NODE_DISK_DIR", "/variable"),
        ("TEST_MASTER", "a:1,b:2"),
        ("TEST_NODE_PORT", "tcp://10.0.0.1:7400"),
        ("PATH", "/bin"),
    ];
    let flags = [("ttl-ms", "3000"), ("disk-limit-bytes", "1GiB"), ("listen", "127.0.0.1:1,[::1]:2")];
    let loaded = load_text(Some(file), &environment, &flags).unwrap();
    let disk = TestDisk { dir: "/variable".into(), limit_bytes: Some(1 << 30), threads: 3 };
    let expected = TestConfig {
        workers: 1,
        memory_bytes: 3 << 30,
        ttl_ms: 3000,
        listen: vec!["127.0.0.1:1".parse().unwrap(), "[::1]:2".parse().unwrap()],
        master: "a:1,b:2".into(),
        disk: Some(disk),
        ..TestConfig::default()
    };
    assert_eq!(loaded.config, expected);
    assert_eq!(loaded.unknown_variables, ["TEST_NODE_PORT"]);
}

#[test]
fn printed_file_round_trips() {
    let flags = [
        ("node-id", "feed"),
        ("policy", "fair"),
        ("timeout", "1500ms"),
        ("listen", "127.0.0.1:1,[::1]:2"),
        ("shm", "off"),
        ("host", "a \"b\""),
        ("disk.dir", "/ssd"),
        ("disk.limit_bytes", "3MiB"),
    ];
    for flags in [&flags[..], &[]] {
        let config = load_text(None, &[], flags).unwrap().config;
        let printed = to_toml(&config, &TestConfig::default());
        assert_eq!(load_text(Some(&printed), &[], &[]).unwrap().config, config, "{printed}");
        let parts =
            ["# Each worker has its own queue.", "# Default: 1GiB", "# Default: the host name", "\n[disk]\n"];
        for part in parts {
            assert!(printed.contains(part), "{part} is not in\n{printed}");
        }
    }
}

#[test]
fn optional_section_is_absent_while_it_has_defaults() {
    assert_eq!(
        load_text(None, &[], &[("disk-threads", "2"), ("disk-dir", "none")]).unwrap().config.disk,
        None
    );
    let loaded = load_text(None, &[], &[("disk-threads", "3")]).unwrap();
    assert_eq!(loaded.check().unwrap_err().errors[0].setting, "disk.dir");
    let loaded = load_text(Some("[disk]\ndir = \"/ssd\""), &[], &[("disk-dir", "none")]).unwrap();
    assert_eq!(loaded.config.disk, None);
}

#[test]
fn invalid_value_names_source_setting_value_and_example() {
    let text = |result: Result<Loaded<TestConfig>, SettingsError>| result.unwrap_err().to_string();
    let cases = [
        (
            text(load_text(None, &[("TEST_NODE_WORKERS", "many")], &[])),
            ["variable TEST_NODE_WORKERS", "many", "e.g. 8"],
        ),
        (text(load_text(None, &[], &[("memory_bytes", "much")])), ["--memory-bytes", "much", "4GiB"]),
        (
            text(load_text(Some("shm = true\nttl_ms = \"soon\"\n"), &[], &[])),
            [".toml:2", "ttl_ms", "e.g. 2000 or 2s"],
        ),
        (
            text(load_text(Some("[disk]\nlimit_bytes = -1\n"), &[], &[])),
            ["disk.limit_bytes", "\"-1\"", "or none"],
        ),
        (text(load_text(Some("timeout = 5\n"), &[], &[])), ["timeout", "\"5\"", "500ms"]),
        (text(load_text(Some("policy = \"best\"\n"), &[], &[])), ["policy", "best", "one of fast, fair"]),
        (
            text(load_text(Some("wrokers = 4\n"), &[], &[])),
            ["wrokers", "no setting", "test node --print-config"],
        ),
        (text(load_text(Some("disk = \"/ssd\"\n"), &[], &[])), ["disk in", "no setting", "--print-config"]),
        (
            text(load_text(Some("[disk]\ndisk_dir = \"/ssd\"\n"), &[], &[])),
            ["disk.disk_dir", ":2", "no setting"],
        ),
        (text(load_text(Some("token = 1\n"), &[], &[])), ["token", "no setting", "--print-config"]),
        (
            text(load_text(Some("workers = \n"), &[], &[])),
            ["invalid configuration file", "line 1", "--print-config"],
        ),
        (text(load_text(None, &[], &[("speed", "1")])), ["--speed", "no setting", "--print-config"]),
    ];
    for (error, parts) in cases {
        for part in parts {
            assert!(error.contains(part), "{part} is not in: {error}");
        }
    }
    let missing = load(TestConfig::default(), Some(Path::new("/nowhere/at/all.toml")), [], []);
    assert!(text(missing).contains("/nowhere/at/all.toml"));
}

#[test]
fn value_outside_of_its_range_is_reported_with_hint_and_source() {
    let file = "workers = 0\n[disk]\ndir = \"/ssd\"\nthreads = 65\n";
    let loaded = load_text(Some(file), &[("TEST_NODE_TTL_MS", "99")], &[]).unwrap();
    let invalid = loaded.check().unwrap_err().to_string();
    for part in [
        "workers is 0, allowed is 1 to 64: use one per core (set by workers in ",
        "ttl_ms is 99, allowed is at least 100: use a few heartbeats (set by environment variable TEST_NODE_TTL_MS)",
        "disk.threads is 65, allowed is 1 to 64: use one or two (set by disk.threads in ",
    ] {
        assert!(invalid.contains(part), "{part} is not in: {invalid}");
    }
    assert_eq!(loaded.config.token, 7);
    assert_eq!(TestConfig::default().check(), Ok(()));
}

#[test]
fn sizes_are_parsed_with_binary_units() {
    for (text, bytes) in [
        ("0", 0),
        ("131072", 131_072),
        ("64K", 65_536),
        ("4GiB", 4 << 30),
        ("1 MiB", 1 << 20),
        ("2t", 2 << 40),
    ] {
        assert_eq!(parse_size(text), Ok(bytes), "{text}");
    }
    for wrong in ["", "K", "-1", "1.5G", "4GB", "99999999999T", "1KiBx"] {
        assert!(parse_size(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn durations_are_parsed_with_units() {
    for (text, ms) in [
        ("250ms", 250),
        ("30s", 30_000),
        ("5m", 300_000),
        ("2h", 7_200_000),
        ("1d", 86_400_000),
        ("2000us", 2),
    ] {
        assert_eq!(parse_duration(text), Ok(Duration::from_millis(ms)), "{text}");
    }
    for wrong in ["", "5", "s", "-1s", "1.5s", "99999999999999999999s", "999999999999999999d"] {
        assert!(parse_duration(wrong).is_err(), "{wrong}");
    }
}

#[test]
fn other_values_are_parsed() {
    assert_eq!(Millis::parse("2s"), Some(2000));
    assert_eq!(Millis::parse("2500us"), None);
    assert_eq!(Millis::parse("4294967296"), None);
    assert_eq!(<Option<Bytes>>::parse("none"), Some(None));
    assert_eq!(NodeId::parse("0xfeed"), Some(NodeId(0xfeed)));
    for wrong in ["", "node-7", "+1", "11112222333344445"] {
        assert_eq!(NodeId::parse(wrong), None, "{wrong}");
    }
    for right in ["10.0.0.1:1", "master-0.example:7400", "[2001:db8::1]:7400"] {
        assert!(is_host_and_port(right), "{right}");
    }
    for wrong in ["host", "host:0", ":7401", "::1:7400", "http://host:7400", "a b:1", "[]:1", "[::1:1"] {
        assert!(!is_host_and_port(wrong), "{wrong}");
    }
    for right in ["host", "master-0.example", "10.0.0.1", "a_b"] {
        assert!(is_host_name(right), "{right}");
    }
    let long = "a".repeat(254);
    for wrong in ["", "host:7402", "http://host", "a b", "a,b", "*", "[::1]", &long] {
        assert!(!is_host_name(wrong), "{wrong}");
    }
}

proptest! {
    #[test]
    fn text_forms_round_trip(bytes: u64, us in 0..u64::MAX / 1000, id: u64, ms: u32) {
        prop_assert_eq!(Bytes::parse(&Bytes::text(&bytes)), Some(bytes));
        let duration = Duration::from_micros(us);
        prop_assert_eq!(Duration::parse(&Duration::text(&duration)), Some(duration));
        prop_assert_eq!(NodeId::parse(&NodeId::text(&NodeId(id))), Some(NodeId(id)));
        prop_assert_eq!(Millis::parse(&Millis::text(&ms)), Some(ms));
    }
}
