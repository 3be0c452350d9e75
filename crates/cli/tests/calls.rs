//! `docs/calls.md` names only calls that exist, all calls of the masters, and for each name a test that makes the call.
//!
//! Rust names are checked by the compiler, commands by `--help`, routes by requests to a real master. The Python names are
//! checked by `python/tests/test_doc_calls.py`.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};

use common::{Running, TIMEOUT, expect, printed};
use moontide_client::{PutOptions, Store, WritePlan};
use moontide_node::Node;

/// Columns of the tables with names of calls, in order, as the lines of tests name them.
const COLUMNS: [&str; 5] = ["rust", "python", "cli", "http", "drop-in"];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn page() -> String {
    std::fs::read_to_string(root().join("docs/calls.md")).unwrap()
}

/// Rows of both tables; cells are lists of names.
fn rows(page: &str) -> Vec<Vec<Vec<String>>> {
    let is_row = |line: &&str| {
        line.starts_with("| ") && !line.starts_with("| call of") && !line.starts_with("| further")
    };
    let names =
        |cell: &str| -> Vec<String> { cell.split('`').skip(1).step_by(2).map(str::to_owned).collect() };
    let rows: Vec<_> = page
        .lines()
        .filter(is_row)
        .map(|line| {
            let cells: Vec<&str> = line.trim_matches('|').split('|').collect();
            assert_eq!(cells.len(), 2 + COLUMNS.len(), "{line}");
            cells.into_iter().map(names).collect()
        })
        .collect();
    assert!(rows.len() > 40, "{} rows", rows.len());
    rows
}

/// Names in a column.
fn column(page: &str, name: &str) -> BTreeSet<String> {
    let at = 2 + COLUMNS.iter().position(|column| *column == name).unwrap();
    rows(page).into_iter().flat_map(|mut row| std::mem::take(&mut row[at])).collect()
}

/// Names that the compiler has resolved.
fn rust_names() -> BTreeSet<String> {
    macro_rules! methods {
        ($($type:ident: $($method:ident)*;)*) => {
            [$($({
                // Compiles only if the type has it.
                #[allow(unused_imports, reason = "names the method")]
                let _ = <$type>::$method;
                concat!(stringify!($type), "::", stringify!($method))
            },)*)*]
        };
    }
    let methods = methods! {
        Store: connect put put_with put_batch get get_ref get_into get_batch get_batch_into get_range exists exists_batch
            remove remove_batch remove_by_prefix remove_by_regex remove_all touch set_pin prefetch list stat stat_batch
            get_location open_for_write evict invalidations object_id nodes tenants set_tenant_quota segments
            drain_segment drain_node undrain_node drain_progress metrics;
        WritePlan: commit abort;
        Node: start shutdown;
    };
    // It takes a closure, so that it is no value of a known type.
    let _ = |store: &Store, selection| {
        store
            .remove_selected(&selection, false, std::time::Duration::ZERO, |_| {})
            .map(|removal| removal.removed)
    };
    let _ = PutOptions::default();
    methods.into_iter().chain(["Store::remove_selected", "PutOptions"]).map(str::to_owned).collect()
}

#[test]
fn rust_names_of_the_page_exist_and_none_is_missing() {
    assert_eq!(column(&page(), "rust"), rust_names());
}

#[test]
fn commands_of_the_page_exist() {
    for name in column(&page(), "cli") {
        let words: Vec<&str> = name.split(' ').skip(1).filter(|word| !word.starts_with("--")).collect();
        let help = expect(0, &[&words[..], &["--help"]].concat(), b"");
        assert!(
            help.text().contains(&format!("Usage: moontide {}", words.join(" "))),
            "{name}:\n{}",
            help.text()
        );
        for flag in name.split(' ').filter(|word| word.starts_with("--")) {
            assert!(help.text().contains(flag), "{name}:\n{}", help.text());
        }
    }
}

/// Returns the status and the body of a response.
fn request(address: &str, method: &str, path: &str) -> (u16, String) {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    write!(stream, "{method} {path} HTTP/1.1\r\nHost: localhost\r\nmoontide-admin: 1\r\nConnection: close\r\nContent-Length: 0\r\n\r\n")
        .unwrap();
    let mut response = String::new();
    stream.read_to_string(&mut response).unwrap();
    let status = response.split(' ').nth(1).unwrap().parse().unwrap();
    (status, response)
}

#[test]
fn routes_of_the_page_exist() {
    let (running, lines) = Running::start(&["dev", "--port-base", "0", "--memory", "64MiB"]);
    let admin = printed(&lines, "admin").trim_start_matches("http://");
    let exists = |name: &str| {
        let (method, path) = name.split_once(' ').unwrap();
        let segments = path.split('/').map(|segment| if segment.starts_with('{') { "0" } else { segment });
        let (status, response) = request(admin, method, &segments.collect::<Vec<_>>().join("/"));
        status != 405 && !response.contains("no such endpoint")
    };
    let names = column(&page(), "http");
    assert!(names.len() > 20);
    for name in names {
        assert!(exists(&name), "{name} does not exist");
    }
    assert!(!exists("GET /nothing") && !exists("GET /touch"), "what does not exist is not found");
    drop(running);
}

#[test]
fn every_call_of_the_protocol_is_on_the_page() {
    let proto = std::fs::read_to_string(root().join("crates/proto/proto/moontide/v1/control.proto")).unwrap();
    let calls = proto.lines().filter_map(|line| line.trim().strip_prefix("rpc ")?.split('(').next());
    let calls: BTreeSet<String> = calls.map(str::to_owned).collect();
    assert!(calls.len() > 25);
    let named: BTreeSet<String> =
        rows(&page()).into_iter().flat_map(|mut row| std::mem::take(&mut row[1])).collect();
    assert_eq!(named, calls);
}

/// Returns the code of a test, up to the first line at its own indentation.
fn test_code<'a>(source: &'a str, name: &str) -> Option<&'a str> {
    let start = source.find(&format!("fn {name}()")).or_else(|| source.find(&format!("def {name}(")))?;
    let rest = &source[start..];
    let body = rest.find('\n')? + 1;
    let is_end = |line: &str| line.starts_with(|c: char| !c.is_whitespace() && !")]".contains(c));
    let mut end = body;
    for line in rest[body..].split_inclusive('\n') {
        if is_end(line) {
            break;
        }
        end += line.len();
    }
    Some(&rest[..end])
}

/// Whether the code of a test makes a call.
fn makes_call(column: &str, name: &str, code: &str) -> bool {
    let words: Vec<&str> = name.split(' ').collect();
    match (column, name.split_once("::")) {
        ("cli", _) => {
            let (flags, subcommands): (Vec<&str>, Vec<&str>) =
                words[1..].iter().partition(|word| word.starts_with("--"));
            let code = code.split_whitespace().collect::<Vec<_>>().join(" ").replace("[ ", "[");
            let words = format!("[\"{}\"", subcommands.join("\", \""));
            // As arguments, not as the name of a JSON field; options may be given to a helper with the name of the command.
            let is_called = |before: char| {
                let helper = format!("{before}{}(", subcommands[subcommands.len() - 1]);
                code.contains(&format!("{before}{words}")) || !flags.is_empty() && code.contains(&helper)
            };
            ['&', ' ', '('].into_iter().any(is_called)
                && flags.iter().all(|flag| code.contains(&format!("\"{flag}\"")))
        }
        ("http", _) => {
            words[1].split('/').filter(|part| !part.starts_with('{')).all(|part| code.contains(part))
        }
        ("rust", Some((kind, function @ ("connect" | "start")))) => {
            code.contains(&format!("{kind}::{function}("))
        }
        ("rust", Some((_, method))) => code.contains(&format!(".{method}(")),
        // Types.
        _ if name.starts_with(char::is_uppercase) => code.contains(name),
        _ => code.contains(&format!(".{name}(")),
    }
}

#[test]
fn every_name_of_the_page_is_called_by_a_test() {
    let page = page();
    let (_, comment) = page.split_once("<!--").unwrap();
    let mut tests: BTreeMap<(&str, String), (&str, &str)> = BTreeMap::new();
    for line in comment.lines().filter(|line| line.contains(" | ")) {
        let [column, name, file, test] = line.split(" | ").collect::<Vec<_>>()[..] else { panic!("{line}") };
        assert!(tests.insert((column, name.to_owned()), (file, test)).is_none(), "twice: {line}");
    }
    for column_name in COLUMNS {
        for name in column(&page, column_name) {
            let (file, test) = tests
                .remove(&(column_name, name.clone()))
                .unwrap_or_else(|| panic!("no test of {column_name} {name}"));
            let source =
                std::fs::read_to_string(root().join(file)).unwrap_or_else(|error| panic!("{file}: {error}"));
            let code = test_code(&source, test).unwrap_or_else(|| panic!("{file} has no test {test}"));
            assert!(makes_call(column_name, &name, code), "{file}: {test} does not make the call {name}");
        }
    }
    assert!(tests.is_empty(), "tests of names that are not on the page: {tests:?}");
}

#[test]
fn calls_that_do_not_exist_are_found() {
    assert!(!makes_call("rust", "Store::put", "store.put_with(key)"));
    assert!(!makes_call("cli", "moontide segments drain", r#"&["segments"]"#));
    assert!(!makes_call("cli", "moontide pin", r#"stat()["pin"]"#));
    assert!(!makes_call("cli", "moontide put --pin", r#"&["put", "k"]"#));
    assert_eq!(test_code("fn a() {\n    x\n}\nfn b() {\n}\n", "a"), Some("fn a() {\n    x\n"));
    assert_eq!(
        test_code("def a(\n    x,\n):\n    y\n\n\ndef b():\n", "a").map(|code| code.contains('y')),
        Some(true)
    );
    assert_eq!(test_code("fn a() {}", "b"), None);
}
