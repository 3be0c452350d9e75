//! `moontide dev` with `put`, `get`, `rm`, `ls`, `stat` and `inspect`, as used by users and scripts.

mod common;

use common::{Folder, Running, expect, printed, run};
use moontide_client::{Store, StoreConfig};
use rustix::process::Signal;

/// A separate cluster per test, so that tests do not see each other's objects.
struct Dev {
    running: Running,
    lines: Vec<String>,
}

impl Dev {
    fn start() -> Dev {
        let (running, lines) = Running::start(&["dev", "--port-base", "0", "--memory", "128MiB"]);
        Dev { running, lines }
    }

    fn master(&self) -> &str {
        printed(&self.lines, "grpc")
    }

    fn with_master<'a>(&'a self, arguments: &[&'a str]) -> Vec<&'a str> {
        [arguments, &["--master", self.master()]].concat()
    }

    fn expect(&self, code: i32, arguments: &[&str], input: &[u8]) -> common::Ended {
        expect(code, &self.with_master(arguments), input)
    }

    fn ok(&self, arguments: &[&str]) -> common::Ended {
        self.expect(0, arguments, b"")
    }
}

/// Pseudo-random bytes.
fn sample(len: usize) -> Vec<u8> {
    (0..len as u64).map(|n| (n.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
}

#[test]
fn put_get_round_trips_stdin_files_and_ranges() {
    let dev = Dev::start();
    let folder = Folder::new("round-trip");

    let put = dev.expect(0, &["put", "hello", "-"], b"world\n");
    assert_eq!(put.text(), "stored hello (6 B)\n");
    assert_eq!(dev.ok(&["get", "hello"]).out, b"world\n");

    // An existing object is kept, unless --upsert is given.
    let again = dev.expect(0, &["put", "hello", "--json"], b"other").json();
    assert_eq!(again["outcome"], "already_exists");
    assert_eq!(dev.ok(&["get", "hello"]).out, b"world\n");
    dev.expect(0, &["put", "hello", "--upsert"], b"other");
    assert_eq!(dev.ok(&["get", "hello"]).out, b"other");

    // Files, with an odd size.
    let (source, target) = (folder.file("source"), folder.file("target"));
    let bytes = sample(3_000_001);
    std::fs::write(&source, &bytes).unwrap();
    dev.ok(&["put", "big", &source, "--stripes", "3", "--ttl", "1h", "--pin", "soft"]);
    let got = dev.ok(&["get", "big", "-o", &target, "--json"]).json();
    assert_eq!(got["bytes"], 3_000_001);
    assert!(std::fs::read(&target).unwrap() == bytes, "the file differs");

    for (range, expected) in [
        ("0:10", &bytes[..10]),
        ("1000000:5000", &bytes[1_000_000..1_005_000]),
        ("2999991:", &bytes[2_999_991..]),
        ("2999991:1GiB", &bytes[2_999_991..]),
        ("3000001:", &[]),
    ] {
        assert!(dev.ok(&["get", "big", "--range", range]).out == expected, "{range}");
    }
    dev.expect(2, &["get", "big", "--range", "3000002:1"], b"");

    // Empty objects are valid.
    dev.expect(0, &["put", "empty"], b"");
    assert_eq!(dev.ok(&["get", "empty"]).out, b"");

    assert_eq!(dev.running.stop(Signal::INT), 0);
}

#[test]
fn pinned_objects_are_shown_and_hard_ones_are_removed_by_force_only() {
    let dev = Dev::start();
    for pin in ["none", "soft", "hard"] {
        dev.expect(0, &["put", pin, "--pin", pin], b"x");
        assert_eq!(dev.ok(&["stat", pin, "--json"]).json()["pin"], pin);
        let removed = dev.expect(i32::from(pin == "hard"), &["rm", pin, "--json"], b"").json();
        assert_eq!(removed["refused"], u8::from(pin == "hard"), "{pin}");
    }
    assert_eq!(dev.ok(&["ls"]).text(), "hard\n");
    assert_eq!(dev.ok(&["rm", "hard", "--force", "--json"]).json()["removed"], 1);
}

#[test]
fn ls_stat_and_rm_handle_existing_and_missing_objects() {
    let dev = Dev::start();
    for (key, value) in [("model/a", "1"), ("model/b", "22"), ("other", "333")] {
        dev.expect(0, &["put", key], value.as_bytes());
    }
    assert_eq!(dev.ok(&["ls"]).text(), "model/a\nmodel/b\nother\n");
    assert_eq!(dev.ok(&["ls", "model/"]).text(), "model/a\nmodel/b\n");
    let listed = dev.ok(&["ls", "-l", "--json"]).json_lines();
    assert_eq!(listed.len(), 3);
    assert_eq!((&listed[1]["key"], &listed[1]["bytes"]), (&"model/b".into(), &2.into()));
    assert!(dev.ok(&["ls", "-l", "other"]).text().contains(" 3 1 ready   none other"));

    let stat = dev.ok(&["stat", "model/b", "--json"]).json();
    assert_eq!(stat["bytes"], 2);
    assert_eq!(stat["replicas"], 1);
    assert_eq!(stat["writing"], false);
    assert_eq!(stat["stripes"][0]["node"], printed(&dev.lines, "node"));
    assert_eq!(stat["expires_unix_ms"], serde_json::Value::Null);
    assert!(dev.ok(&["stat", "model/b"]).text().contains("length   2 (2 B)"));

    // A missing key is reported; the other objects are removed.
    let removed = dev.expect(3, &["rm", "model/a", "nothing", "--json"], b"");
    assert_eq!(
        removed.json(),
        serde_json::json!({ "removed": 1, "pending": 0, "missing": ["nothing"], "refused": 0 })
    );
    assert!(removed.err.contains("nothing"), "{}", removed.err);
    assert_eq!(dev.ok(&["rm", "--prefix", "model/"]).text(), "removed 1\n");
    assert!(dev.expect(2, &["rm", "--regex", "("], b"").err.contains("not a regular expression"));
    assert_eq!(dev.ok(&["rm", "--regex", "^o.*x$"]).text(), "removed 0\n");
    assert_eq!(dev.ok(&["ls"]).text(), "other\n");
    dev.expect(2, &["rm", "--prefix", ""], b"");
    dev.expect(2, &["rm", "--regex", ""], b"");
    assert_eq!(dev.ok(&["ls", "--tenant", "other"]).text(), "");
    assert_eq!(dev.ok(&["rm", "--regex", "^o.*r$"]).text(), "removed 1\n");
    assert_eq!(dev.ok(&["ls"]).text(), "");
    dev.expect(0, &["put", "again"], b"x");
    assert_eq!(dev.ok(&["rm", "--all", "--json"]).json(), serde_json::json!({ "removed": 1, "kept": 0 }));
    assert_eq!(dev.ok(&["ls"]).text(), "");
    assert_eq!(dev.running.stop(Signal::TERM), 0);
}

#[test]
fn pin_touch_and_prefetch_reach_existing_objects_and_name_missing_ones() {
    let dev = Dev::start();
    for key in ["a", "b", "c"] {
        dev.expect(0, &["put", key], b"x");
    }
    assert_eq!(dev.ok(&["pin", "a", "b", "--class", "hard"]).text(), "pinned 2\n");
    assert_eq!(dev.ok(&["stat", "a", "--json"]).json()["pin"], "hard");
    let evicted = dev.ok(&["evict", "--usage", "0%", "--json"]).json();
    assert_eq!(evicted["objects"], 1, "c is not pinned");
    assert_eq!(dev.ok(&["ls"]).text(), "a\nb\n");
    assert_eq!(dev.ok(&["pin", "a", "--class", "none"]).text(), "pinned 1\n");
    assert_eq!(dev.ok(&["touch", "a", "b"]).text(), "touched 2\n");
    assert_eq!(dev.ok(&["prefetch", "a"]).text(), "prefetched 1\n");

    for command in
        [&["pin", "b", "gone", "--class", "soft"][..], &["touch", "b", "gone"], &["prefetch", "b", "gone"]]
    {
        let ended = dev.expect(3, &[command, &["--json"]].concat(), b"");
        assert_eq!(ended.json()["missing"], serde_json::json!(["gone"]));
        assert!(ended.err.contains("no such object: gone"), "{}", ended.err);
    }
    assert_eq!(dev.ok(&["stat", "b", "--json"]).json()["pin"], "soft", "the others are changed");
    assert!(dev.ok(&["evict", "--usage", "0"]).text().starts_with("evicted 2 objects"));
    for command in [
        &["pin", "a"][..],
        &["pin", "--class", "hard"],
        &["pin", "a", "--class", "x"],
        &["touch"],
        &["evict"],
    ] {
        dev.expect(2, command, b"");
    }
    dev.expect(2, &["evict", "--usage", "101%"], b"");
}

#[test]
fn tenants_are_listed_and_limited() {
    let dev = Dev::start();
    let quota = dev.ok(&["tenant", "quota", "team-a", "--bytes", "1MiB", "--objects", "100"]);
    assert_eq!(quota.text(), "tenant team-a: at most 1.0 MiB of memory, at most 100 of objects\n");
    for n in 0..30 {
        let key = n.to_string();
        dev.expect(0, &["put", &key, "--tenant", "team-a"], &sample(100_000));
    }
    let listed = dev.ok(&["tenant", "ls", "--json"]).json_lines();
    let team = listed.iter().find(|tenant| tenant["tenant"] == "team-a").unwrap();
    assert_eq!((&team["bytes_max"], &team["objects_max"]), (&(1 << 20).into(), &100.into()));
    let objects = team["objects"].as_u64().unwrap();
    assert!((1..30).contains(&objects), "older objects were evicted: {objects}");
    assert!(dev.ok(&["tenant", "ls"]).text().contains("of 1.0 MiB"));

    // The limit that is not named stays.
    dev.ok(&["tenant", "quota", "team-a", "--bytes", "0"]);
    let listed = dev.ok(&["tenant", "ls", "--json"]).json_lines();
    let team = listed.iter().find(|tenant| tenant["tenant"] == "team-a").unwrap();
    assert_eq!((&team["bytes_max"], &team["objects_max"]), (&0.into(), &100.into()));
    dev.expect(2, &["tenant", "quota", "team-a"], b"");
    dev.expect(2, &["tenant", "quota", "no spaces", "--bytes", "1"], b"");
    dev.expect(2, &["tenant"], b"");
}

#[test]
fn segments_are_listed_and_drained() {
    let dev = Dev::start();
    dev.expect(0, &["put", "k"], &sample(100_000));
    let node = printed(&dev.lines, "node");
    let segments = dev.ok(&["segments", "--node", node, "--json"]).json_lines();
    assert!(!segments.is_empty());
    let live: u64 = segments.iter().map(|segment| segment["live_bytes"].as_u64().unwrap()).sum();
    assert!(live >= 100_000, "{live}");
    assert!(dev.ok(&["segments"]).text().contains(" serving "));
    let segment = segments[0]["segment"].to_string();
    dev.ok(&["segments", "drain", node, &segment, "--evict"]);
    assert!(dev.ok(&["segments"]).text().contains(" draining "));
    let unknown = dev.expect(3, &["segments", "drain", node, "4000"], b"");
    assert!(unknown.err.contains("no segment 4000"), "{}", unknown.err);
    assert_eq!(dev.ok(&["segments", "--node", "0000000000000001"]).text(), "");
}

#[test]
fn ls_returns_more_keys_than_one_page() {
    let dev = Dev::start();
    let store = Store::connect(StoreConfig::new(dev.master())).unwrap();
    for number in 0..2500 {
        store.put(format!("many/{number:04}").as_bytes(), b"x").unwrap();
    }
    let some = dev.ok(&["ls", "many/", "--limit", "1200"]);
    assert_eq!(some.text().lines().count(), 1200);
    assert!(some.err.contains("there are more"), "{}", some.err);
    let all = dev.ok(&["ls", "many/", "--limit", "0"]);
    let mut keys: Vec<&str> = all.text().lines().collect();
    keys.sort_unstable();
    keys.dedup();
    assert_eq!(keys.len(), 2500);
    let exactly = dev.ok(&["ls", "many/", "--limit", "2500"]);
    assert_eq!((exactly.text().lines().count(), exactly.err.as_str()), (2500, ""));
    assert_eq!(dev.ok(&["rm", "--prefix", "many/"]).text(), "removed 2500\n");
    assert_eq!(dev.ok(&["ls"]).text(), "");
}

#[test]
fn escaped_keys_with_arbitrary_bytes_round_trip() {
    let dev = Dev::start();
    dev.expect(0, &["put", "--escaped", "odd%FF%0Akey"], b"value");
    let listed = dev.ok(&["ls"]);
    assert_eq!(listed.text(), "odd%FF%0Akey\n");
    assert_eq!(dev.ok(&["get", "--escaped", listed.text().trim_end()]).out, b"value");
    dev.expect(3, &["get", "odd%FF%0Akey"], b"");
    dev.expect(2, &["get", "--escaped", "odd%F"], b"");
    dev.ok(&["rm", "--escaped", "odd%FF%0Akey"]);
}

#[test]
fn inspect_shows_memory_layout_of_node() {
    let dev = Dev::start();
    dev.expect(0, &["put", "drawn"], &sample(1 << 20));
    let stat = dev.ok(&["stat", "drawn", "--json"]).json();
    let segment = stat["stripes"][0]["segment"].to_string();
    let admin = printed(&dev.lines, "node-admin");

    let node = expect(0, &["inspect", "--admin", admin], b"");
    assert!(node.text().contains(printed(&dev.lines, "node")), "{}", node.text());
    assert_eq!(
        node.text().lines().count(),
        2 + 1,
        "a title, a head and a line per group, of which there is one"
    );

    let drawn = expect(0, &["inspect", "--admin", admin, &segment, "--width", "100"], b"");
    for part in ["Fragmentation: 0.00", "1 live, 0 writing, 0 draining", "  ####", "  drawn\n"] {
        assert!(drawn.text().contains(part), "{part:?} is not in\n{}", drawn.text());
    }
    assert!(drawn.text().lines().filter(|line| line.starts_with("  #")).all(|line| line.len() <= 100));

    let page = expect(0, &["inspect", "--admin", admin, &segment, "--json"], b"").json();
    assert_eq!(page["records"][0]["key"], "drawn");
    expect(3, &["inspect", "--admin", admin, "4000000"], b"");
    expect(4, &["inspect", "--admin", "127.0.0.1:1"], b"");
    // The admin endpoints of a master differ from those of a node.
    expect(1, &["inspect", "--admin", printed(&dev.lines, "admin")], b"");
}

#[test]
fn exit_codes_match_documentation() {
    let dev = Dev::start();
    let unreachable = ["--master", "127.0.0.1:1"];
    for command in [
        &["get", "k"][..],
        &["put", "k"],
        &["rm", "k"],
        &["ls"],
        &["stat", "k"],
        &["pin", "k", "--class", "soft"],
        &["touch", "k"],
        &["prefetch", "k"],
        &["tenant", "ls"],
        &["tenant", "quota", "t", "--bytes", "1GiB"],
        &["evict", "--usage", "50%"],
        &["segments"],
    ] {
        let ended = run(&[command, &unreachable].concat(), b"");
        assert_eq!(ended.code, 4, "{command:?}: {}", ended.err);
        assert!(ended.err.contains("moontide master"), "error without advice: {}", ended.err);
    }
    for command in [&["get", "nothing"][..], &["stat", "nothing"], &["rm", "nothing"]] {
        dev.expect(3, command, b"");
    }
    for command in [
        &["get"][..],
        &["get", ""],
        &["get", "k", "--json"],
        &["get", "k", "--range", "4"],
        &["get", "k", "--tenant", ""],
        &["put", "k", "--ttl", "soon"],
        &["put", "k", "--replicas", "9"],
        &["rm"],
        &["rm", "k", "--all"],
        &["ls", "--limit", "-1"],
    ] {
        dev.expect(2, command, b"");
    }
    dev.expect(1, &["put", "k", "/nowhere/at/all"], b"");
    dev.expect(1, &["put", "k", "/"], b"");
    // A miss does not change the output file.
    let folder = Folder::new("miss");
    let file = folder.file("kept");
    std::fs::write(&file, "kept").unwrap();
    dev.expect(3, &["get", "nothing", "-o", &file], b"");
    assert_eq!(std::fs::read_to_string(&file).unwrap(), "kept");
}

#[test]
fn master_and_tenant_are_read_from_environment() {
    let dev = Dev::start();
    let mut put = common::moontide(&["put", "by-environment"]);
    put.env("MOONTIDE_MASTER", dev.master()).env("MOONTIDE_TENANT", "other");
    assert_eq!(common::run_command(put, b"x").code, 0);
    dev.expect(3, &["get", "by-environment"], b"");
    assert_eq!(dev.ok(&["get", "by-environment", "--tenant", "other"]).out, b"x");
}
