//! `moontide node` from the view of a supervisor: output, settings, signals, exit codes.

mod common;

use common::{Folder, Running, expect, printed, run_command};
use rustix::process::Signal;

#[test]
fn node_joins_master_and_exits_cleanly_on_signal() {
    let (_dev, lines) = Running::start(&["dev", "--port-base", "0", "--memory", "64MiB"]);
    let master = printed(&lines, "grpc");
    for signal in [Signal::TERM, Signal::INT] {
        let arguments = [
            "node",
            "--master",
            master,
            "--memory",
            "64MiB",
            "--node-id",
            "00000000feed0001",
            "--rack",
            "r1",
        ];
        let (node, node_lines) = Running::start(&arguments);
        assert_eq!(printed(&node_lines, "node"), "00000000feed0001");
        assert!(printed(&node_lines, "tcp").starts_with("127.0.0.1:"));
        let socket = printed(&node_lines, "shm").to_owned();
        assert!(std::fs::metadata(&socket).is_ok(), "{socket}");
        let admin = printed(&node_lines, "admin");
        assert!(expect(0, &["inspect", "--admin", admin], b"").text().contains("feed0001"));

        // Two nodes: two replicas can be placed.
        expect(0, &["put", "twice", "--replicas", "2", "--master", master], b"value");
        let stat = expect(0, &["stat", "twice", "--json", "--master", master], b"").json();
        assert_eq!(stat["replicas"], 2);

        assert_eq!(node.stop(signal), 0);
        assert!(std::fs::metadata(&socket).is_err(), "the socket is removed with the node");
        assert_eq!(expect(0, &["get", "twice", "--master", master], b"").out, b"value");
        expect(0, &["rm", "twice", "--master", master], b"");
    }
}

#[test]
fn node_without_reachable_master_exits_with_4() {
    let ended = expect(4, &["node", "--master", "127.0.0.1:1"], b"");
    assert!(ended.err.contains("moontide master"), "{}", ended.err);
}

#[test]
fn invalid_settings_exit_with_2() {
    for arguments in [
        &["node", "--memory-bytes", "much"][..],
        &["node", "--memory-bytes", "1"],
        &["node", "--listen", "here"],
        &["node", "--listen", "0.0.0.0:0"],
        &["node", "--node-id", "0"],
        &["node", "--config", "/nowhere/at/all.toml"],
        &["dev", "--memory", "much"],
        &["dev", "--port-base", "65535"],
    ] {
        let ended = expect(2, arguments, b"");
        assert!(!ended.err.is_empty(), "{arguments:?}");
    }
}

#[test]
fn print_config_prints_effective_settings_and_round_trips() {
    let folder = Folder::new("node-config");
    let file = folder.file("node.toml");
    std::fs::write(&file, "memory_bytes = \"2GiB\"\nrack = \"file\"\nzone = \"file\"\nhost = \"file\"\n")
        .unwrap();
    let mut print = common::moontide(&["node", "--print-config", "--config", &file, "--rack", "flag"]);
    print.env("MOONTIDE_NODE_RACK", "environment").env("MOONTIDE_NODE_ZONE", "environment");
    let config = run_command(print, b"");
    assert_eq!(config.code, 0, "{}", config.err);
    for line in ["memory_bytes = \"2GiB\"", "rack = \"flag\"", "zone = \"environment\"", "host = \"file\""] {
        assert!(config.text().lines().any(|printed| printed == line), "{line} is not in\n{}", config.text());
    }
    // The printed file can be used as settings.
    std::fs::write(&file, &config.out).unwrap();
    let again = expect(0, &["node", "--print-config", "--config", &file], b"");
    assert_eq!(again.out, config.out);
    std::fs::write(&file, "memory = 1\n").unwrap();
    assert!(expect(2, &["node", "--config", &file], b"").err.contains("--print-config"));
}

#[test]
fn example_config_files_are_valid_and_take_effect() {
    for (command, name) in [("master", "master.toml"), ("node", "node.toml")] {
        let path = format!("{}/../../examples/config/{name}", env!("CARGO_MANIFEST_DIR"));
        let printed = expect(0, &[command, "--config", &path, "--print-config"], b"");
        let text = std::fs::read_to_string(&path).unwrap();
        let names =
            text.lines().filter(|line| !line.starts_with('#')).filter_map(|line| line.split_once(" = "));
        let mut count = 0;
        for (name, _) in names {
            let is_set = printed.text().lines().any(|line| line.starts_with(&format!("{name} = ")));
            assert!(is_set, "{path}: {name} is not in\n{}", printed.text());
            count += 1;
        }
        assert!(count > 5, "{path} has {count} settings");
    }
}

#[test]
fn drain_moves_all_objects_and_undrain_ends_it() {
    let (_dev, lines) = Running::start(&["dev", "--port-base", "0", "--memory", "64MiB"]);
    let master = printed(&lines, "grpc");
    let id = "00000000feed0002";
    let (node, _) = Running::start(&["node", "--master", master, "--memory", "64MiB", "--node-id", id]);
    for n in 0..40 {
        expect(0, &["put", &format!("key-{n}"), "--master", master], &vec![n; 100_000]);
    }
    let on_node = || {
        let of = |n: u8| expect(0, &["stat", &format!("key-{n}"), "--json", "--master", master], b"").json();
        (0..40).filter(|&n| of(n)["stripes"].to_string().contains(id)).count()
    };
    assert!(on_node() > 0);

    let drained = expect(0, &["node", "drain", id, "--json", "--master", master], b"").json();
    assert_eq!((&drained["empty"], &drained["bytes_left"]), (&true.into(), &0.into()), "{drained}");
    assert!(drained["bytes_gone"].as_u64().unwrap() > 0, "{drained}");
    assert_eq!(on_node(), 0);
    let again = expect(0, &["node", "drain", id, "--master", master], b"");
    assert_eq!(again.text(), format!("node {id} is empty: 0 B moved\n"));
    for n in 0..40 {
        assert_eq!(expect(0, &["get", &format!("key-{n}"), "--master", master], b"").out, vec![n; 100_000]);
    }

    let undrained = expect(0, &["node", "undrain", id, "--master", master], b"");
    assert_eq!(undrained.text(), format!("node {id} gets new objects again\n"));
    let unknown = expect(3, &["node", "drain", "00000000feed0009", "--master", master], b"");
    assert!(unknown.err.contains(id), "the error names the nodes: {}", unknown.err);
    expect(2, &["node", "drain", "feed", "--master", master], b"");
    expect(4, &["node", "drain", id, "--master", "127.0.0.1:1"], b"");
    assert_eq!(node.stop(Signal::TERM), 0);
}

#[test]
fn drain_that_cannot_end_exits_with_1() {
    let (_dev, lines) = Running::start(&["dev", "--port-base", "0", "--memory", "64MiB"]);
    let (master, id) = (printed(&lines, "grpc"), printed(&lines, "node"));
    expect(0, &["put", "key", "--master", master], b"value");
    let ended = expect(1, &["node", "drain", id, "--wait", "1s", "--master", master], b"");
    assert!(ended.err.contains("left on the node"), "there is no other node: {}", ended.err);
    assert_eq!(expect(0, &["get", "key", "--master", master], b"").out, b"value");
    let at_once = expect(0, &["node", "drain", id, "--wait", "0s", "--master", master], b"");
    assert!(at_once.text().contains("drains"), "{}", at_once.text());
}

#[test]
fn node_moves_its_objects_before_it_stops_if_told() {
    let (_dev, lines) = Running::start(&["dev", "--port-base", "0", "--memory", "64MiB"]);
    let master = printed(&lines, "grpc");
    let arguments = ["node", "--master", master, "--memory", "64MiB", "--drain-on-stop", "30s"];
    let (node, _) = Running::start(&arguments);
    for n in 0..40 {
        expect(0, &["put", &format!("key-{n}"), "--master", master], &vec![n; 100_000]);
    }
    assert_eq!(node.stop(Signal::TERM), 0);
    for n in 0..40 {
        assert_eq!(expect(0, &["get", &format!("key-{n}"), "--master", master], b"").out, vec![n; 100_000]);
    }
}

#[test]
fn bulk_removal_waits_for_a_node_that_does_not_answer() {
    let (_dev, lines) = Running::start(&["dev", "--port-base", "0", "--memory", "64MiB"]);
    let master = printed(&lines, "grpc");
    let (node, _) = Running::start(&["node", "--master", master, "--memory", "64MiB"]);
    for n in 0..5 {
        expect(0, &["put", &format!("k/{n}"), "--replicas", "2", "--master", master], b"value");
    }
    node.signal(Signal::STOP);
    let command = ["rm", "--prefix", "k/", "--master", master];
    let ended = expect(1, &[&command[..], &["--wait", "1s"]].concat(), b"");
    assert!(ended.err.contains("5 objects are removed") && ended.err.contains("again"), "{}", ended.err);
    assert_eq!(expect(0, &["ls", "--master", master], b"").text(), "", "no call finds them any more");
    node.signal(Signal::CONT);
    assert_eq!(expect(0, &[&command[..], &["--json"]].concat(), b"").json()["kept"], 0);
    assert_eq!(node.stop(Signal::TERM), 0);
}
