//! [`DiskSettings`]: what can be set of a node's disk. In the file they are the table `[disk]`, without the `disk_` that
//! flags and variables have in front.
//!
//! A directory turns the disk on. Any other setting without one makes a disk without a directory, which
//! [`NodeConfig::validate`](moontide_node::NodeConfig::validate) refuses: a limit that limits nothing is a mistake.

use std::path::PathBuf;
use std::str::FromStr;

use clap::Args as ClapArgs;
use moontide_node::{BackendKind, DiskConfig, EngineChoice, EvictionOrder};
use serde::{Deserialize, Deserializer};

use super::{Printed, Size, quoted, set};

/// What can be set. The names are those of [`DiskConfig`].
#[derive(Clone, Debug, Default, ClapArgs, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct DiskSettings {
    /// Directory on an SSD for what does not fit into memory; without one there is no disk
    #[arg(long, env = "MOONTIDE_NODE_DISK_DIR", value_name = "DIR")]
    #[serde(rename = "dir")]
    disk_dir: Option<PathBuf>,
    /// How records stand in it: "bucket", "file" or "offset"
    #[arg(long, env = "MOONTIDE_NODE_DISK_BACKEND", value_name = "NAME")]
    #[serde(rename = "backend")]
    disk_backend: Option<Backend>,
    /// Most bytes on the disk, as 200GiB; nine tenths of what is free unless set
    #[arg(long, visible_alias = "disk-limit", env = "MOONTIDE_NODE_DISK_LIMIT_BYTES", value_name = "SIZE")]
    #[serde(rename = "limit_bytes")]
    disk_limit_bytes: Option<Size>,
    /// Who leaves a full disk first: "fifo", what was written first, or "lru", what was not used for longest
    #[arg(long, env = "MOONTIDE_NODE_DISK_ORDER", value_name = "ORDER")]
    #[serde(rename = "order")]
    disk_order: Option<Order>,
    /// By which calls it is read and written: "uring", "posix", or "auto" for the first where the system allows it
    #[arg(long, env = "MOONTIDE_NODE_DISK_ENGINE", value_name = "NAME")]
    #[serde(rename = "engine")]
    disk_engine: Option<Engine>,
    /// Most bytes written per second, as 500MiB; 0 for as fast as it goes
    #[arg(
        long,
        visible_alias = "disk-write-limit",
        env = "MOONTIDE_NODE_DISK_WRITE_BYTES_PER_S",
        value_name = "SIZE"
    )]
    #[serde(rename = "write_bytes_per_s")]
    disk_write_bytes_per_s: Option<Size>,
    /// Memory for what comes from disk on its way to readers
    #[arg(
        long,
        visible_alias = "disk-staging",
        env = "MOONTIDE_NODE_DISK_STAGING_BYTES",
        value_name = "SIZE"
    )]
    #[serde(rename = "staging_bytes")]
    disk_staging_bytes: Option<Size>,
    /// Threads that read from the disk
    #[arg(long, env = "MOONTIDE_NODE_DISK_LOAD_THREADS", value_name = "N")]
    #[serde(rename = "load_threads")]
    disk_load_threads: Option<usize>,
}

impl DiskSettings {
    /// Puts what is given over what is there.
    pub(super) fn apply(self, config: &mut Option<DiskConfig>) {
        let DiskSettings {
            disk_dir,
            disk_backend,
            disk_limit_bytes,
            disk_order,
            disk_engine,
            disk_write_bytes_per_s,
            disk_staging_bytes,
            disk_load_threads,
        } = self;
        let before = config.clone().unwrap_or_else(|| DiskConfig::new(""));
        let mut disk = before.clone();
        set(&mut disk.dir, disk_dir);
        set(&mut disk.backend, disk_backend.map(|backend| backend.0));
        set(&mut disk.limit_bytes, disk_limit_bytes.map(|size| Some(size.0)));
        set(&mut disk.order, disk_order.map(|order| order.0));
        set(&mut disk.engine, disk_engine.map(|engine| engine.0));
        set(&mut disk.write_bytes_per_s, disk_write_bytes_per_s.map(|size| size.0));
        set(&mut disk.staging_bytes, disk_staging_bytes.map(|size| size.0));
        set(&mut disk.load_threads, disk_load_threads);
        // Settings that say what is so already, without a directory, are no wish for a disk.
        if config.is_some() || disk != before {
            *config = Some(disk);
        }
    }
}

/// The settings of a disk as they stand in the table.
pub(super) fn to_toml(disk: &DiskConfig) -> Vec<Printed> {
    let named = |name: &'static str, value: Option<String>| Printed { name, value };
    let dir = (!disk.dir.as_os_str().is_empty()).then(|| quoted(&disk.dir.to_string_lossy()));
    vec![
        named("dir", dir),
        named("backend", Some(quoted(disk.backend.name()))),
        named("limit_bytes", disk.limit_bytes.map(|bytes| bytes.to_string())),
        named("order", Some(quoted(Order(disk.order).name()))),
        named("engine", Some(quoted(&disk.engine.to_string()))),
        named("write_bytes_per_s", Some(disk.write_bytes_per_s.to_string())),
        named("staging_bytes", Some(disk.staging_bytes.to_string())),
        named("load_threads", Some(disk.load_threads.to_string())),
    ]
}

from_text!(Backend, Order, Engine);

/// How records stand on the disk.
#[derive(Clone, Copy, Debug)]
struct Backend(BackendKind);

impl FromStr for Backend {
    type Err = String;

    fn from_str(text: &str) -> Result<Backend, String> {
        text.parse().map(Backend).map_err(|unknown: moontide_disk::UnknownBackend| unknown.to_string())
    }
}

/// Who leaves a full disk first.
#[derive(Clone, Copy, Debug)]
struct Order(EvictionOrder);

impl Order {
    fn name(self) -> &'static str {
        match self.0 {
            EvictionOrder::Fifo => "fifo",
            EvictionOrder::Lru => "lru",
        }
    }
}

impl FromStr for Order {
    type Err = String;

    fn from_str(text: &str) -> Result<Order, String> {
        let all = [EvictionOrder::Fifo, EvictionOrder::Lru].map(Order);
        let found = all.into_iter().find(|order| order.name() == text);
        found.ok_or_else(|| format!("{text:?} is neither fifo nor lru"))
    }
}

/// By which calls the disk is used.
#[derive(Clone, Copy, Debug)]
struct Engine(EngineChoice);

impl FromStr for Engine {
    type Err = String;

    fn from_str(text: &str) -> Result<Engine, String> {
        text.parse().map(Engine).map_err(|unknown: moontide_disk::UnknownEngine| unknown.to_string())
    }
}
