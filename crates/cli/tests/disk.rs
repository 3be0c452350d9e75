//! Command line of a node's disk: settings, `inspect disk`, `bench disk`, `bench trace`.

mod common;

use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Arc;

use common::{Ended, Folder, Running, expect, moontide, printed, run, run_command};
use moontide_disk::{
    AlignedBuf, BLOCK_BYTES, BackendConfig, BackendKind, EvictionPolicy, IoEngine, OsStorage, QueueConfig,
    RecordId, RecordSource, Storage,
};
use moontide_types::record::{DigestContext, Header, KeySection, RecordFlags, State, Word, trailer_crc};
use moontide_types::{Epoch, Key, ObjectId, Tenant, TenantGeneration};
use rustix::process::Signal;
use serde_json::Value;

#[test]
fn disk_settings_merge_file_environment_and_flags() {
    let folder = Folder::new("disk-config");
    let file = folder.file("node.toml");
    let text = "[disk]\ndir = \"/ssd/file\"\nbackend = \"offset\"\neviction_policy = \"lru\"\nlimit_bytes = \"1GiB\"\n\
                write_bytes_per_s = \"100MiB\"\n";
    std::fs::write(&file, text).unwrap();
    let arguments =
        ["node", "--print-config", "--config", &file, "--disk-limit", "3GiB", "--disk-io-engine", "posix"];
    let mut print = moontide(&arguments);
    print.env("MOONTIDE_NODE_DISK_LIMIT_BYTES", "2GiB").env("MOONTIDE_NODE_DISK_EVICTION_POLICY", "fifo");
    print.env("MOONTIDE_NODE_DISK_STAGING_BYTES", "64MiB");
    let config = run_command(print, b"");
    assert_eq!(config.code, 0, "{}", config.err);
    let lines: Vec<&str> = config.text().lines().collect();
    for line in [
        "[disk]",
        "dir = [\"/ssd/file\"]",
        "backend = \"offset\"",
        "limit_bytes = \"3GiB\"",
        "eviction_policy = \"fifo\"",
        "io_engine = \"posix\"",
        "write_bytes_per_s = \"100MiB\"",
        "staging_bytes = \"64MiB\"",
        "read_threads = 2",
    ] {
        assert!(lines.contains(&line), "{line} is not in\n{}", config.text());
    }
    // The printed file can be used as settings.
    std::fs::write(&file, &config.out).unwrap();
    assert_eq!(expect(0, &["node", "--print-config", "--config", &file], b"").out, config.out);
    // Flags replace the directories of the file.
    let several =
        ["node", "--print-config", "--config", &file, "--disk-dir", "/ssd/0", "--disk-dir", "/ssd/1"];
    let several = expect(0, &several, b"");
    assert!(several.text().contains("\ndir = [\"/ssd/0\", \"/ssd/1\"]\n"), "{}", several.text());
    // Without a directory there is no disk.
    let without = expect(0, &["node", "--print-config"], b"");
    assert!(without.text().contains("\ndir = []\n"), "{}", without.text());
}

#[test]
fn invalid_disk_settings_are_rejected() {
    for (arguments, named) in [
        (&["--disk-limit", "200GiB"][..], "disk.dir"),
        (&["--disk-dir", "/ssd", "--disk-limit", "1MiB"], "disk.limit_bytes"),
        (&["--disk-dir", "/ssd", "--disk-dir", "/ssd/1"], "one within another"),
        (&["--disk-dir", "/ssd", "--disk-staging", "1KiB"], "disk.staging_bytes"),
        (&["--disk-dir", "/ssd", "--disk-read-threads", "0"], "disk.read_threads"),
        (&["--disk-dir", "/ssd", "--disk-backend", "tape"], "bucket, file, offset"),
        (&["--disk-dir", "/ssd", "--disk-eviction-policy", "random"], "fifo"),
        (&["--disk-dir", "/ssd", "--disk-io-engine", "aio"], "posix"),
        (&["--disk-dir", "/ssd", "--disk-write-limit", "much"], "size"),
    ] {
        let ended = expect(2, &[&["node"], arguments].concat(), b"");
        assert!(ended.err.contains(named), "{arguments:?}: {}", ended.err);
    }
    expect(2, &["dev", "--disk-limit", "1GiB"], b"");
    let ended = expect(2, &["master", "--offload-admission", "none"], b"");
    assert!(ended.err.contains("accessed"), "{}", ended.err);
    let config = expect(0, &["master", "--print-config", "--offload-admission", "accessed"], b"");
    assert!(config.text().contains("\noffload_admission = \"accessed\"\n"));
    let ended = expect(2, &["master", "--offload", "never"], b"");
    assert!(ended.err.contains("evict, put"), "{}", ended.err);
    let config = expect(0, &["master", "--print-config", "--offload", "put"], b"");
    assert!(config.text().contains("\noffload = \"put\"\n"));
}

#[test]
fn dev_cluster_supports_disk_and_deletes_it_on_exit() {
    let folder = Folder::new("dev-disk");
    let parent = folder.file("ssd");
    let (dev, lines) = Running::start(&[
        "dev",
        "--port-base",
        "0",
        "--memory",
        "64MiB",
        "--disk-dir",
        &parent,
        "--disk-limit",
        "128MiB",
    ]);
    let dir = printed(&lines, "disk").to_owned();
    assert!(dir.starts_with(&parent) && Path::new(&dir).join("node.id").is_file(), "{dir}");
    let master = printed(&lines, "grpc");
    expect(0, &["put", "hello", "-", "--master", master], b"world");
    assert_eq!(expect(0, &["get", "hello", "--master", master], b"").out, b"world");
    // Nothing was offloaded yet.
    let output = expect(0, &["inspect", "disk", "--dir", &dir, "--json"], b"").json();
    assert_eq!((&output["records"], &output["corrupt"]), (&Value::from(0), &Value::from(0)));
    assert_eq!(dev.stop(Signal::TERM), 0);
    assert!(!Path::new(&dir).exists() && Path::new(&parent).exists(), "the disk is removed with the process");
}

/// Payload of the records below: three blocks after a preamble of one block.
const PAYLOAD: usize = 10_000;
const FRONT: u64 = 4096;
const ESCAPE_KEY: &[u8] = b"model/\xff\x1b[2J";

/// A record in memory. The samples of `moontide_disk` would enable its feature `testing`, and the program would not be built
/// as it ships.
struct Record {
    header: Header,
    payload: AlignedBuf,
    digests: Vec<u8>,
    key: Vec<u8>,
}

impl Record {
    fn new(number: u8, key: &[u8]) -> Record {
        let mut payload = AlignedBuf::zeroed(PAYLOAD);
        payload.fill(number);
        let (id, version, len) = (ObjectId([number; 16]), Epoch::from_bits(1).unwrap(), PAYLOAD as u64);
        let mut digests = vec![];
        let root = DigestContext { id, version, stripe: 0, len }
            .payload(&payload[..PAYLOAD], |digest| digests.extend(digest.to_le_bytes()));
        let section = KeySection { tenant: Tenant::DEFAULT, key: Key::new(key).unwrap() };
        let mut key = vec![];
        section.encode(&mut key);
        let header = Header {
            flags: RecordFlags::NONE,
            id,
            word: Word::new(version, State::Ready),
            object_len: len,
            stripe_offset: 0,
            stripe_len: len,
            payload_offset: BLOCK_BYTES as u64,
            root,
            stripe_index: 0,
            stripe_count: 1,
            key_len: key.len() as u32,
            attributes_len: 0,
            trailer_crc: trailer_crc(&key, &[]),
            id_key: 0,
            tenant_generation: TenantGeneration(0),
        };
        Record { header, payload, digests, key }
    }

    fn source(&self) -> RecordSource<'_> {
        let Record { header, payload, digests, key } = self;
        RecordSource { header, payload: &payload[..PAYLOAD], digests, key, attributes: &[] }
    }
}

/// Creates a tier with eight records, one of them with a key that is not text; number 3 is removed.
fn make_tier(dir: &str, kind: BackendKind) {
    let storage: Arc<dyn Storage> = Arc::new(OsStorage::open(Path::new(dir), IoEngine::Auto).unwrap());
    let mut queue = storage.queue(&QueueConfig::default());
    let config = BackendConfig { limit_bytes: 64 << 20, eviction_policy: EvictionPolicy::Fifo };
    let (backend, _) = kind.open(Arc::clone(&storage), &mut *queue, config, &mut |_| {}).unwrap();
    let mut records: Vec<Record> =
        (0..7).map(|number| Record::new(number, format!("key-{number}").as_bytes())).collect();
    records.push(Record::new(7, ESCAPE_KEY));
    let sources: Vec<_> = records.iter().map(Record::source).collect();
    assert!(backend.write(&mut *queue, &sources).iter().all(Result::is_ok));
    let removed = RecordId::of(&records[3].header);
    backend.remove(&mut *queue, &[(removed.id, removed.version)]).unwrap();
}

fn inspect(code: i32, dir: &str, flags: &[&str]) -> Ended {
    expect(code, &[&["inspect", "disk", "--dir", dir], flags].concat(), b"")
}

/// File and offset of the record of a key.
fn location(dir: &str, key: &str) -> (String, u64) {
    let lines = inspect(0, dir, &["--all", "--json"]).json_lines();
    let found = lines.iter().find(|line| line["key"] == key).unwrap_or_else(|| panic!("{key}: {lines:?}"));
    let file = Path::new(dir).join(found["file"].as_str().unwrap());
    (file.to_str().unwrap().to_owned(), found["offset"].as_u64().unwrap())
}

fn flip(file: &str, at: u64) {
    let file = std::fs::OpenOptions::new().read(true).write(true).open(file).unwrap();
    let mut byte = [0];
    file.read_exact_at(&mut byte, at).unwrap();
    file.write_all_at(&[byte[0] ^ 1], at).unwrap();
    file.sync_all().unwrap();
}

#[test]
fn inspect_disk_lists_records_of_every_backend() {
    for kind in BackendKind::ALL {
        let folder = Folder::new(&format!("tier-{kind}"));
        let dir = folder.file("tier");
        make_tier(&dir, kind);

        for flags in [&["--json"][..], &["--json", "--verify"], &["--json", "--backend", kind.name()]] {
            let totals = inspect(0, &dir, flags).json();
            assert_eq!(totals["backend"], kind.name());
            assert_eq!(
                (totals["records"].as_u64(), totals["corrupt"].as_u64()),
                (Some(7), Some(0)),
                "{totals}"
            );
            assert!(totals["bytes"].as_u64().unwrap() >= 7 * PAYLOAD as u64, "{totals}");
            assert_eq!(totals["verified"], flags.contains(&"--verify"));
            // The file backend deletes the file of a removed record; the others keep it until they need the space.
            assert_eq!(totals["removed"], u64::from(kind != BackendKind::File), "{totals}");
        }
        let shown = inspect(0, &dir, &["--all", "--verify"]);
        for part in
            ["ok ", "key-0", "key-6", "model/%FF%1B[2J", "Records             7", "Verified ", kind.name()]
        {
            assert!(shown.text().contains(part), "{kind}: {part:?} is not in\n{}", shown.text());
        }
        assert!(!shown.out.contains(&0x1b), "control characters of a key reached the terminal");
        let lines = inspect(0, &dir, &["--all", "--json"]).json_lines();
        let keys =
            lines.iter().filter(|line| line["state"] == "ok").map(|line| line["key"].as_str().unwrap());
        let mut keys: Vec<_> = keys.collect();
        keys.sort_unstable();
        assert_eq!(keys, ["key-0", "key-1", "key-2", "key-4", "key-5", "key-6", "model/%FF%1B[2J"]);
    }
}

#[test]
fn inspect_disk_lists_corrupt_records_and_exits_with_1() {
    for kind in BackendKind::ALL {
        let folder = Folder::new(&format!("corrupt-{kind}"));
        let dir = folder.file("tier");
        make_tier(&dir, kind);
        let ((payload, payload_at), (header, header_at)) = (location(&dir, "key-1"), location(&dir, "key-5"));

        flip(&payload, payload_at + FRONT + 7000);
        assert_eq!(
            inspect(0, &dir, &["--json"]).json()["records"],
            7,
            "payloads must be read only with --verify"
        );
        let output = inspect(1, &dir, &["--json", "--verify"]).json_lines();
        let [corrupt, totals] = &output[..] else { panic!("{output:?}") };
        assert_eq!((&corrupt["key"], &corrupt["state"]), (&"key-1".into(), &"corrupt".into()));
        assert_eq!(corrupt["offset"], payload_at);
        assert!(corrupt["reason"].as_str().unwrap().contains("page 0"), "{corrupt}");
        assert_eq!((&totals["records"], &totals["corrupt"]), (&6.into(), &1.into()), "{totals}");

        flip(&header, header_at + 20);
        let shown = inspect(1, &dir, &["--verify"]);
        assert!(shown.text().contains("Corrupt             2"), "{kind}:\n{}", shown.text());
        assert!(
            shown.text().contains("key-1: ") && shown.err.contains("2 records are corrupt"),
            "{}",
            shown.err
        );
        // The footer of a bucket has copies of the headers; the other backends must read the corrupt one.
        let code = i32::from(kind != BackendKind::Bucket);
        let totals = inspect(code, &dir, &["--json"]).json_lines().pop().unwrap();
        assert_eq!(totals["corrupt"], code, "{kind}: {totals}");
    }
}

#[test]
fn inspect_disk_rejects_directory_without_tier() {
    let folder = Folder::new("no-tier");
    let dir = folder.file("plain");
    std::fs::create_dir(&dir).unwrap();
    assert!(inspect(2, &dir, &[]).err.contains("no files of a disk tier"));
    std::fs::write(folder.file("plain/0000000000000001.bucket"), b"short").unwrap();
    assert!(inspect(1, &dir, &[]).text().contains("the file is too short"));
    std::fs::write(folder.file("plain/data.moontide"), b"short").unwrap();
    assert!(inspect(2, &dir, &[]).err.contains("bucket and offset"));
    assert_eq!(inspect(1, &dir, &["--backend", "offset"]).text(), "", "the tier cannot be opened");
    let nowhere = folder.file("nowhere");
    inspect(2, &nowhere, &[]);
    assert!(!Path::new(&nowhere).exists(), "inspect must not create files");
    expect(2, &["inspect", "disk"], b"");
    expect(2, &["inspect", "disk", "--dir", &dir, "--backend", "tape"], b"");
}

/// A short run of the benchmark.
fn bench(folder: &Folder, flags: &[&str]) -> std::process::Command {
    let dir = folder.file("ssd");
    let small = ["bench", "disk", "--dir", &dir, "--size", "8MiB", "--rounds", "2", "--seconds", "0.02"];
    moontide(&[&small[..], flags].concat())
}

#[test]
fn disk_bench_without_fio_uses_baseline_loop() {
    let folder = Folder::new("bench-disk");
    for kind in BackendKind::ALL {
        let mut command = bench(&folder, &["--json", "--depths", "1,4", "--backend", kind.name()]);
        command.env("PATH", folder.file("empty"));
        let ended = run_command(command, b"");
        assert_eq!(ended.code, 0, "{kind}: {}", ended.err);
        assert!(ended.err.contains("fio is not installed"), "{}", ended.err);
        let lines = ended.json_lines();
        let cases: Vec<_> = lines
            .iter()
            .map(|l| (l["case"].as_str().unwrap(), l["bytes"].as_u64(), l["depth"].as_u64()))
            .collect();
        let of = |bytes| {
            [("write", Some(bytes), None), ("read", Some(bytes), Some(1)), ("read", Some(bytes), Some(4))]
        };
        assert_eq!(cases, [of(1 << 20), of(256 << 10)].concat());
        for line in &lines {
            assert_eq!((&line["limit"], &line["backend"]), (&"loop".into(), &kind.name().into()));
            for field in ["gb_per_s", "limit_gb_per_s", "ratio"] {
                assert!(line[field].as_f64().unwrap() > 0.0, "{field}: {line}");
            }
        }
        let left = std::fs::read_dir(folder.file("ssd")).unwrap().count();
        assert_eq!(left, 0, "files left behind");
    }
    let mut command = bench(&folder, &["--against", "fio"]);
    command.env("PATH", folder.file("empty"));
    assert_eq!(run_command(command, b"").code, 1);
}

#[test]
fn disk_bench_prints_table() {
    let folder = Folder::new("bench-disk-table");
    let ended = run_command(bench(&folder, &["--records", "64K", "--depths", "2", "--against", "loop"]), b"");
    assert_eq!(ended.code, 0, "{}", ended.err);
    let lines: Vec<&str> = ended.text().lines().collect();
    assert_eq!(lines.len(), 4, "{}", ended.text());
    assert!(lines[0].contains("bucket backend") && lines[0].contains("the limit is loop"), "{}", lines[0]);
    assert!(lines[2].starts_with("write   64.0 KiB     -") && lines[3].starts_with("read    64.0 KiB     2"));
    let much = run(&["bench", "disk", "--size", "8000T", "--dir", &folder.file("ssd")], b"");
    assert!(much.code == 1 && much.err.contains("--size"), "{}", much.err);
}

/// Replays recorded traffic against a node with a disk.
fn replay(folder: &Folder, flags: &[&str]) -> Ended {
    let trace = concat!(env!("CARGO_MANIFEST_DIR"), "/../bench/tests/traces/agents_24.jsonl");
    let dir = folder.file("ssd");
    let small = ["bench", "trace", trace, "--engines", "1"];
    let sizes = ["--block", "16KiB", "--memory", "4MiB", "--disk", "256MiB", "--dir", &dir];
    let ended = run(&[&small[..], &sizes, flags].concat(), b"");
    assert_eq!(ended.code, 0, "{}", ended.err);
    ended
}

#[test]
fn trace_bench_counts_hits_and_writes_of_disk() {
    let folder = Folder::new("bench-trace");
    let result = replay(&folder, &["--remote", "--requests", "450"]).json();
    let number = |name: &str| result[name].as_f64().unwrap_or_else(|| panic!("no {name} in {result}"));
    // The disk has space for all blocks. Memory has not, so that all but its last ones were written.
    assert!(number("hit_rate") > number("ideal_hit_rate") - 0.02, "{result}");
    assert!(number("disk_share") > 0.0 && number("written_per_hit") > 0.0, "{result}");
    assert_eq!((number("wrong"), number("failed")), (0.0, 0.0), "{result}");
    assert_eq!(std::fs::read_dir(folder.file("ssd")).unwrap().count(), 0, "files left behind");
}

#[test]
fn trace_bench_shows_hits_after_restart_of_node() {
    let folder = Folder::new("bench-restart");
    let plot = folder.file("restart.svg");
    let lines =
        replay(&folder, &["--requests", "200", "--restart-after", "100", "--plot", &plot]).json_lines();
    let rates = |case: &str| -> Vec<f64> {
        let is_later = |line: &&Value| line["case"] == case && line["requests_from"].as_u64() >= Some(100);
        lines.iter().filter(is_later).map(|line| line["hit_rate"].as_f64().unwrap()).collect()
    };
    let [kept, lost, running] = ["kept", "lost", "running"].map(rates);
    assert!(kept.len() >= 5 && kept.len() == lost.len() && kept.len() == running.len(), "{lines:?}");
    let sum = |rates: &[f64]| rates.iter().sum::<f64>();
    assert!(sum(&kept) > sum(&lost) && sum(&running) > sum(&lost), "{kept:?}, {lost:?}, {running:?}");
    let plot = std::fs::read_to_string(&plot).unwrap();
    assert!(["disk kept", "disk lost", "not restarted"].iter().all(|row| plot.contains(row)), "{plot}");
    let late = run(&["bench", "trace", "no such file", "--restart-after", "1"], b"");
    assert!(late.code == 2 && late.err.contains("--disk"), "{}", late.err);
}
