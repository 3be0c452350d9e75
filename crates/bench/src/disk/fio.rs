//! The limit measured by `fio`, in separate files.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use super::tier::Case;
use super::{BATCH_BYTES, Measurement};
use crate::results::{BenchError, io};

/// Block size of sequential writes.
const WRITE_BLOCK_BYTES: u64 = 1 << 20;
/// Writes in flight: the default depth of the tier's queue.
const WRITE_DEPTH: usize = moontide_disk::QUEUE_DEPTH_DEFAULT;

/// Returns true if `fio` can be started.
pub(super) fn is_installed() -> bool {
    let version = Command::new("fio").arg("--version").stdin(Stdio::null()).output();
    version.is_ok_and(|output| output.status.success())
}

/// `fio` in a directory.
pub(super) struct Fio {
    dir: PathBuf,
    engine: &'static str,
    direct: bool,
    files: usize,
}

impl Fio {
    /// Uses the same kind of system calls as the tier.
    pub(super) fn new(dir: &Path, engine: &str, direct: bool) -> Fio {
        let engine = if engine == "uring" { "io_uring" } else { "psync" };
        Fio { dir: dir.to_owned(), engine, direct, files: 0 }
    }

    pub(super) fn write(&mut self, bytes: u64) -> Result<Measurement, BenchError> {
        let blocks = bytes.div_ceil(WRITE_BLOCK_BYTES);
        let synced = blocks.min(BATCH_BYTES / WRITE_BLOCK_BYTES);
        self.files += 1;
        let job = [
            format!("--filename={}", self.file(self.files - 1)),
            "--rw=write".into(),
            format!("--bs={WRITE_BLOCK_BYTES}"),
            format!("--size={}", blocks * WRITE_BLOCK_BYTES),
            format!("--iodepth={WRITE_DEPTH}"),
            format!("--fdatasync={synced}"),
            "--end_fsync=1".into(),
        ];
        self.run(&job, "write")
    }

    pub(super) fn read(&self, case: &Case) -> Result<Measurement, BenchError> {
        let files: Vec<String> = (0..self.files).map(|nth| self.file(nth)).collect();
        let job = [
            format!("--filename={}", files.join(":")),
            "--rw=randread".into(),
            "--readonly".into(),
            "--norandommap".into(),
            "--randrepeat=0".into(),
            format!("--bs={}", case.record_bytes),
            format!("--iodepth={}", case.depth),
            "--time_based".into(),
            format!("--runtime={}ms", case.span.as_millis().max(1)),
        ];
        self.run(&job, "read")
    }

    /// Returns a file name relative to the directory: fio splits paths at colons.
    fn file(&self, nth: usize) -> String {
        format!("fio-{nth}")
    }

    fn run(&self, job: &[String], side: &str) -> Result<Measurement, BenchError> {
        let output = Command::new("fio")
            .current_dir(&self.dir)
            .args(["--name=limit", "--output-format=json", "--eta=never", "--group_reporting"])
            .arg(format!("--ioengine={}", self.engine))
            .arg(format!("--direct={}", u8::from(self.direct)))
            .args(job)
            .stdin(Stdio::null())
            .output()
            .map_err(io("starting fio"))?;
        let failed = |reason: &str| {
            let stderr = String::from_utf8_lossy(&output.stderr);
            BenchError::Wrong(format!("fio {}: {reason} {stderr}", job.join(" ")))
        };
        if !output.status.success() {
            return Err(failed("failed:"));
        }
        parse(&output.stdout, side).ok_or_else(|| failed("unexpected output"))
    }
}

/// Parses the rate of `side` (read or write). Warnings may precede the JSON object.
fn parse(output: &[u8], side: &str) -> Option<Measurement> {
    let start = output.iter().position(|byte| *byte == b'{')?;
    let output_json: Value = serde_json::from_slice(&output[start..]).ok()?;
    let job = output_json["jobs"].get(0)?;
    let (bytes, ms) = (job[side]["io_bytes"].as_f64()?, job[side]["runtime"].as_f64()?);
    if job["error"].as_i64() != Some(0) || ms <= 0.0 {
        return None;
    }
    let cpu = (job["usr_cpu"].as_f64()? + job["sys_cpu"].as_f64()?) / 100.0;
    Some(Measurement { bytes_per_s: bytes / (ms / 1000.0), cpu })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fio_output_is_parsed_after_leading_warnings() {
        let output_json = br#"note: both iodepth >= 1 and synchronous I/O engine are selected
{"jobs": [{"error": 0, "usr_cpu": 5.0, "sys_cpu": 20.0, "read": {"io_bytes": 3000000, "runtime": 1500}}]}"#;
        assert_eq!(parse(output_json, "read"), Some(Measurement { bytes_per_s: 2e6, cpu: 0.25 }));
        assert_eq!(parse(output_json, "write"), None);
        assert_eq!(parse(b"fio: engine not found", "read"), None);
        let failed = br#"{"jobs": [{"error": 5, "usr_cpu": 5.0, "sys_cpu": 20.0, "read": {"io_bytes": 1, "runtime": 1}}]}"#;
        assert_eq!(parse(failed, "read"), None);
    }
}
