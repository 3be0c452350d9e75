//! `moontide master` from the view of a user or a supervisor: output, signals, exit codes.

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Output, Stdio};

use rustix::process::{Pid, Signal, kill_process};

fn moontide(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_moontide"));
    command.args(arguments).stdin(Stdio::null());
    command
}

fn output(arguments: &[&str]) -> Output {
    moontide(arguments).output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

const FREE: [&str; 6] =
    ["--grpc-listen", "127.0.0.1:0", "--frame-listen", "127.0.0.1:0", "--admin-listen", "127.0.0.1:0"];

/// Starts a master on free ports; returns the three lines that it prints when it serves.
fn start() -> (Child, [String; 3]) {
    let arguments: Vec<&str> = ["master"].into_iter().chain(FREE).collect();
    let mut child = moontide(&arguments).stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let lines = [(); 3].map(|()| lines.next().unwrap().unwrap());
    (child, lines)
}

#[test]
fn master_exits_with_0_on_sigterm_and_sigint() {
    for signal in [Signal::TERM, Signal::INT] {
        let (mut child, lines) = start();
        assert!(lines[0].starts_with("grpc 127.0.0.1:"), "{lines:?}");
        assert!(lines[1].starts_with("frame 127.0.0.1:"), "{lines:?}");
        assert!(lines[2].starts_with("admin http://127.0.0.1:"), "{lines:?}");
        kill_process(Pid::from_child(&child), signal).unwrap();
        assert_eq!(child.wait().unwrap().code(), Some(0), "{signal:?}");
    }
}

#[test]
fn port_in_use_fails_and_names_address() {
    let (mut child, lines) = start();
    let taken = lines[0].strip_prefix("grpc ").unwrap();
    let mut arguments: Vec<&str> = ["master"].into_iter().chain(FREE).collect();
    arguments[2] = taken;
    let second = output(&arguments);
    assert_eq!(second.status.code(), Some(1));
    assert!(text(&second.stderr).contains(taken), "{}", text(&second.stderr));
    kill_process(Pid::from_child(&child), Signal::TERM).unwrap();
    child.wait().unwrap();
}

#[test]
fn usage_errors_exit_with_2() {
    for arguments in [
        &["master", "--no-such-flag"][..],
        &["master", "--groups", "many"],
        &["master", "--groups", "0"],
        &["master", "--config", "/nowhere/at/all.toml"],
        &["no-such-command"],
    ] {
        let output = output(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(!output.stderr.is_empty(), "{arguments:?}");
    }
}

#[test]
fn print_config_prints_effective_settings() {
    let path = std::env::temp_dir().join(format!("moontide-cli-{}.toml", std::process::id()));
    std::fs::write(&path, "groups = 4\nsession_ttl_ms = 2000\n").unwrap();
    let arguments = [
        "master",
        "--print-config",
        "--config",
        path.to_str().unwrap(),
        "--eviction-high-watermark-permille",
        "800",
        "--eviction-low-watermark-permille",
        "700",
    ];
    let output = moontide(&arguments).env("MOONTIDE_MASTER_SESSION_TTL_MS", "3000").output().unwrap();
    let _ = std::fs::remove_file(&path);
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let printed = text(&output.stdout);
    for line in
        ["groups = 4", "session_ttl_ms = 3000", "eviction_high_watermark_permille = 800", "# Default: 980"]
    {
        assert!(printed.lines().any(|printed| printed == line), "{line} is not in\n{printed}");
    }
}

#[test]
fn help_lists_flags_variables_and_examples() {
    let output = output(&["master", "--help"]);
    assert_eq!(output.status.code(), Some(0));
    let help = text(&output.stdout);
    for part in ["--grpc-listen", "--data-dir", "--print-config", "Examples:", "MOONTIDE_MASTER_GROUPS"] {
        assert!(help.contains(part), "{part} is not in\n{help}");
    }
}
