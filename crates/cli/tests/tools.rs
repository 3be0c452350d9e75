//! Commands that need no cluster: `doctor`, `completions`, traces, and every `--help`.

mod common;

use common::{Folder, Running, expect, moontide, printed, run, run_command};

#[test]
fn doctor_prints_text_and_json() {
    let shown = expect(0, &["doctor", "--master", "127.0.0.1:1"], b"");
    for part in ["ok       kernel", "shared memory", "io_uring", "→ start one with `moontide master`"] {
        assert!(shown.text().contains(part), "{part:?} is not in\n{}", shown.text());
    }
    let output = expect(0, &["doctor", "--json", "--master", "127.0.0.1:1"], b"").json();
    assert_eq!(output["ok"], true);
    let checks = output["checks"].as_array().unwrap();
    assert!(checks.len() >= 18);
    for check in checks {
        assert!(["ok", "limited", "missing"].contains(&check["state"].as_str().unwrap()), "{check}");
        assert_eq!(check["hint"].is_null(), check["state"] == "ok", "{check}");
    }
    let state = |name: &str| checks.iter().find(|check| check["name"] == name).unwrap()["state"].clone();
    assert_eq!(state("loopback"), "ok");
    assert_eq!(state("master"), "missing");
}

#[test]
fn doctor_detects_running_master() {
    let (_dev, lines) = Running::start(&["dev", "--port-base", "0", "--memory", "16MiB"]);
    let output = expect(0, &["doctor", "--json", "--master", printed(&lines, "grpc")], b"").json();
    let checks = output["checks"].as_array().unwrap();
    assert_eq!(checks.iter().find(|check| check["name"] == "master").unwrap()["state"], "ok");
}

/// Runs `doctor` with an environment, e.g. one that names drivers.
fn doctor_with(environment: &[(&str, &str)], arguments: &[&str]) -> common::Ended {
    let mut command = moontide(&[&["doctor", "--master", "127.0.0.1:1"], arguments].concat());
    let ended = run_command(
        {
            command.envs(environment.iter().copied());
            command
        },
        b"",
    );
    assert_eq!(ended.code, 0, "{}", ended.err);
    ended
}

#[test]
fn doctor_lists_gpu_devices_and_capabilities() {
    let mut fake = std::env::current_exe().unwrap();
    fake.pop();
    let fake = fake.join("libmoontide_fakedriver.so");
    let fake = fake.to_str().unwrap();
    let output = doctor_with(
        &[
            ("MOONTIDE_CUDA_LIB", fake),
            ("MOONTIDE_HIP_LIB", fake),
            ("MOONTIDE_FAKE_DRIVER", "devices=3,peers=0-1,atomics=1,granularity=2097152"),
        ],
        &[],
    );
    for (vendor, version, architecture) in
        [("cuda", "13.1", "sm_90"), ("hip", "7.1", "gfx942:sramecc+:xnack-")]
    {
        let lines: Vec<&str> = output
            .text()
            .lines()
            .skip_while(|line| !line.starts_with(&format!("limited  {vendor} ")))
            .collect();
        assert!(lines[0].ends_with(&format!("{version} from {fake}, 3 devices")), "{lines:?}");
        let shared = "8.0 GiB; shares by descriptor in steps of 2.0 MiB; atomics with the host";
        for (number, access) in
            ["access to 1", "access to 0", "no access to other devices"].iter().enumerate()
        {
            let line = format!("{number}: Fake device {number}, {architecture}, {shared}; {access}");
            assert_eq!(lines[number + 1].trim(), line);
        }
        assert!(lines[4].contains("→ not tested on real hardware"), "{lines:?}");
    }
    // An older device, and a driver that fails to initialize.
    let output = doctor_with(
        &[
            ("MOONTIDE_CUDA_LIB", fake),
            ("MOONTIDE_HIP_LIB", fake),
            ("MOONTIDE_FAKE_DRIVER", "vmm=0"),
            ("MOONTIDE_FAKE_DRIVER_FAIL", "hipInit:1:803"),
        ],
        &[],
    );
    let old = "shares by handle (no virtual memory management); atomics not with the host\n";
    assert!(output.text().contains(old), "{}", output.text());
    assert!(output.text().contains("hipInit failed with 803"), "{}", output.text());
}

#[test]
fn doctor_succeeds_and_reports_missing_gpu_drivers() {
    let output = doctor_with(&[], &["--json"]).json();
    let checks = output["checks"].as_array().unwrap();
    let found = |name: &str| checks.iter().find(|check| check["name"] == name);
    if found("cuda").is_none() && found("hip").is_none() {
        assert!(found("gpu").unwrap()["detail"].as_str().unwrap().ends_with("; no driver"));
    }
    // A driver that is references and missing is reported.
    let output = doctor_with(&[("MOONTIDE_CUDA_LIB", "/nowhere/libcuda.so.1")], &[]);
    assert!(output.text().contains("/nowhere/libcuda.so.1: cannot open"), "{}", output.text());
    assert!(output.text().contains("or name its library with MOONTIDE_CUDA_LIB"), "{}", output.text());
}

#[test]
fn completions_exist_for_every_supported_shell() {
    for shell in ["bash", "zsh", "fish"] {
        let script = expect(0, &["completions", shell], b"");
        for part in ["moontide", "doctor", "upsert"] {
            assert!(script.text().contains(part), "{part} is not completed in {shell}");
        }
    }
    expect(2, &["completions", "cmd"], b"");
}

#[test]
fn help_texts_have_examples_and_exit_codes() {
    for command in [
        &[][..],
        &["master"],
        &["node"],
        &["dev"],
        &["put"],
        &["get"],
        &["rm"],
        &["ls"],
        &["stat"],
        &["pin"],
        &["touch"],
        &["prefetch"],
        &["tenant"],
        &["tenant", "ls"],
        &["tenant", "quota"],
        &["evict"],
        &["segments"],
        &["segments", "drain"],
        &["node", "drain"],
        &["node", "undrain"],
        &["inspect"],
        &["doctor"],
        &["completions"],
        &["inspect", "disk"],
        &["bench", "meta"],
        &["bench", "disk"],
        &["bench", "transfer"],
        &["bench", "trace-gen"],
        &["bench", "load"],
        &["bench", "write-back"],
        &["bench", "trace-sessions"],
        &["bench", "policies"],
        &["bench", "trace-info"],
    ] {
        let help = expect(0, &[command, &["--help"]].concat(), b"");
        assert!(help.text().contains("Examples:\n  moontide "), "{command:?}:\n{}", help.text());
    }
    for command in
        ["put", "get", "rm", "ls", "stat", "pin", "touch", "prefetch", "tenant", "evict", "segments"]
    {
        let help = expect(0, &[command, "--help"], b"");
        assert!(help.text().contains("3 no such object, 4 the master cannot be reached"), "{command}");
    }
}

#[test]
fn commands_on_objects_print_client_config_and_reject_invalid_settings() {
    for command in ["put", "get", "rm", "ls", "stat", "pin", "touch", "prefetch"] {
        let printed = expect(0, &[command, "--print-config", "--timeout", "7s"], b"");
        for line in ["timeout = \"7s\"", "# Default: 30s", "hedge = \"adaptive\""] {
            assert!(printed.text().lines().any(|found| found == line), "{line}: {}", printed.text());
        }
        let wrong = expect(2, &[command, "--print-config", "--timeout", "soon"], b"");
        assert!(wrong.err.contains("--timeout") && wrong.err.contains("500ms"), "{}", wrong.err);
        let range = expect(2, &[command, "--print-config", "--timeout", "0s"], b"");
        assert!(
            range.err.contains("allowed is 1ms to 10m") && range.err.contains("--timeout"),
            "{}",
            range.err
        );
    }
    for command in ["put", "get", "rm", "stat"] {
        expect(2, &[command], b"");
    }
}

#[test]
fn same_seed_generates_same_trace_bytes() {
    let folder = Folder::new("trace");
    let (first, second) = (folder.file("first.jsonl"), folder.file("second.jsonl"));
    let generate = |seed: &str, file: &str| {
        expect(
            0,
            &["bench", "trace-gen", "--users", "40", "--requests", "500", "--seed", seed, "-o", file],
            b"",
        )
        .json()
    };
    let summary = generate("7", &first);
    assert_eq!(generate("7", &second), summary);
    let bytes = std::fs::read(&first).unwrap();
    assert_eq!(std::fs::read(&second).unwrap(), bytes);
    generate("8", &second);
    assert_ne!(std::fs::read(&second).unwrap(), bytes);

    assert_eq!(expect(0, &["bench", "trace-info", &first], b"").json(), summary);
    let piped = expect(
        0,
        &["bench", "trace-gen", "--users", "40", "--requests", "500", "--seed", "7", "-o", "-"],
        b"",
    );
    assert!(piped.out == bytes, "output to standard output differs");
    check_naively(std::str::from_utf8(&bytes).unwrap(), &summary);
}

/// Recomputes the summary from the lines of the trace.
fn check_naively(trace: &str, summary: &serde_json::Value) {
    let mut lines = trace.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    let header = lines.next().unwrap();
    assert_eq!(header["moontide_trace"], 1);
    let (mut cache, mut sessions): (Vec<String>, Vec<u64>) = (vec![], vec![]);
    let (mut requests, mut references, mut hits, mut tokens) = (0u64, 0u64, 0u64, 0u64);
    for request in lines {
        requests += 1;
        tokens += request["input_tokens"].as_u64().unwrap();
        sessions.push(request["session"].as_u64().unwrap());
        let blocks: Vec<String> = request["blocks"]
            .as_array()
            .unwrap()
            .iter()
            .map(|block| block.as_str().unwrap().to_owned())
            .collect();
        references += blocks.len() as u64;
        hits += blocks.iter().take_while(|block| cache.contains(block)).count() as u64;
        for block in blocks {
            if !cache.contains(&block) {
                cache.push(block);
            }
        }
    }
    sessions.sort_unstable();
    sessions.dedup();
    let distinct = cache.len() as u64;
    assert_eq!(summary["requests"], requests);
    assert_eq!(summary["sessions"], sessions.len());
    assert_eq!(summary["input_tokens"], tokens);
    assert_eq!(summary["blocks"], references);
    assert_eq!(summary["distinct_blocks"], distinct);
    assert_eq!(summary["working_set_bytes"], distinct * 131_072);
    let rate = summary["ideal_hit_rate"].as_f64().unwrap();
    assert!((rate - hits as f64 / references as f64).abs() < 1e-6, "{rate}");
    assert!((0.3..0.99).contains(&rate), "sessions share prefixes: {rate}");
}

#[test]
fn invalid_trace_and_generator_options_are_rejected() {
    let folder = Folder::new("broken-trace");
    let file = folder.file("broken.jsonl");
    let header = r#"{"moontide_trace":1,"block_bytes":131072,"block_tokens":512,"seed":7}"#;
    std::fs::write(&file, format!("{header}\n{{\"at_ms\": 1}}\n")).unwrap();
    let ended = expect(1, &["bench", "trace-info", &file], b"");
    assert!(ended.err.contains("line 2"), "{}", ended.err);
    for wrong in
        [&["--users", "0"][..], &["--requests", "0"], &["--zipf", "NaN"], &["--rate", "0"], &["--end", "2"]]
    {
        let given = ["bench", "trace-gen", "--seed", "1", "-o", "-"];
        let rest: Vec<&str> =
            ["--users", "1", "--requests", "1"].into_iter().filter(|a| !wrong.contains(a)).collect();
        let ended = run(&[&given[..], wrong, &rest].concat(), b"");
        assert_eq!(ended.code, 2, "{wrong:?}: {}", ended.err);
    }
}

/// The objects of all tenants were evicted, although the caller named one.
#[test]
fn commands_about_all_tenants_refuse_a_tenant() {
    for command in [&["evict", "--usage", "0%"][..], &["segments"]] {
        let ended = expect(2, &[command, &["--tenant", "a"]].concat(), b"");
        assert!(ended.err.contains("all tenants"), "{}", ended.err);
    }
}
