//! `moontide node` as a supervisor sees it: lines, settings, signals, exit codes.

mod common;

use common::{Folder, Running, expect, run_command, told};
use rustix::process::Signal;

#[test]
fn a_node_joins_a_master_and_leaves_in_order() {
    let (_dev, lines) = Running::start(&["dev", "--port-base", "0", "--memory", "64MiB"]);
    let master = told(&lines, "grpc");
    for signal in [Signal::TERM, Signal::INT] {
        let arguments =
            ["node", "--master", master, "--memory", "64MiB", "--node", "00000000feed0001", "--rack", "r1"];
        let (node, told_by_node) = Running::start(&arguments);
        assert_eq!(told(&told_by_node, "node"), "00000000feed0001");
        assert!(told(&told_by_node, "tcp").starts_with("127.0.0.1:"));
        let door = told(&told_by_node, "door").to_owned();
        assert!(std::fs::metadata(&door).is_ok(), "{door}");
        let admin = told(&told_by_node, "admin");
        assert!(expect(0, &["inspect", "--admin", admin], b"").text().contains("feed0001"));

        // Two nodes: two copies have room.
        expect(0, &["put", "twice", "--replicas", "2", "--master", master], b"value");
        let stat = expect(0, &["stat", "twice", "--json", "--master", master], b"").json();
        assert_eq!(stat["replicas"], 2);

        assert_eq!(node.stop(signal), 0);
        assert!(std::fs::metadata(&door).is_err(), "the door goes with the node");
        assert_eq!(expect(0, &["get", "twice", "--master", master], b"").out, b"value");
        expect(0, &["rm", "twice", "--master", master], b"");
    }
}

#[test]
fn a_node_without_a_master_says_so() {
    let ended = expect(4, &["node", "--master", "127.0.0.1:1"], b"");
    assert!(ended.err.contains("moontide master"), "{}", ended.err);
}

#[test]
fn wrong_settings_have_their_own_exit_code() {
    for arguments in [
        &["node", "--memory-bytes", "much"][..],
        &["node", "--memory-bytes", "1"],
        &["node", "--listen", "here"],
        &["node", "--listen", "0.0.0.0:0"],
        &["node", "--node", "0"],
        &["node", "--config", "/nowhere/at/all.toml"],
        &["dev", "--memory", "much"],
        &["dev", "--port-base", "65535"],
    ] {
        let ended = expect(2, arguments, b"");
        assert!(!ended.err.is_empty(), "{arguments:?}");
    }
}

#[test]
fn the_printed_configuration_is_what_is_in_force() {
    let folder = Folder::new("node-config");
    let file = folder.file("node.toml");
    std::fs::write(&file, "memory_bytes = \"2GiB\"\nrack = \"file\"\nzone = \"file\"\nhost = \"file\"\n")
        .unwrap();
    let mut print = common::moontide(&["node", "--print-config", "--config", &file, "--rack", "flag"]);
    print.env("MOONTIDE_NODE_RACK", "environment").env("MOONTIDE_NODE_ZONE", "environment");
    let printed = run_command(print, b"");
    assert_eq!(printed.code, 0, "{}", printed.err);
    for line in ["memory_bytes = 2147483648", "rack = \"flag\"", "zone = \"environment\"", "host = \"file\""]
    {
        assert!(
            printed.text().lines().any(|printed| printed == line),
            "{line} is not in\n{}",
            printed.text()
        );
    }
    // It is a file that can be used.
    std::fs::write(&file, &printed.out).unwrap();
    let again = expect(0, &["node", "--print-config", "--config", &file], b"");
    assert_eq!(again.out, printed.out);
    std::fs::write(&file, "memory = 1\n").unwrap();
    assert!(expect(2, &["node", "--config", &file], b"").err.contains("--print-config"));
}
