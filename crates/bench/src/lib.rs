//! The benchmarks of Moontide: the library behind `moontide bench`.
//!
//! # Benchmarks
//!
//! | folder | subcommands | measures | baseline |
//! |---|---|---|---|
//! | `meta` | `meta` | a master's index: memory, lookups, eviction, reports; gRPC and frame server | plain TCP echo |
//! | `transfer` | `transfer` | transfers between two processes, over TCP and shared memory | plain sockets, copies |
//! | `disk` | `disk` | reads and writes of a disk tier | `fio`, or the I/O engine without records |
//! | `ep` | `ep` | dispatch and combine between local ranks | plain copies |
//! | `policies` | `policies` | hit rates of eviction policies on a trace | LRU, S3-FIFO, ARC, W-TinyLFU, Belady |
//! | `push` | `push` | writes of pages into another process's memory | plain copies |
//! | `store` | `local`, `remote`, `load`, `mixed`, `trace` | the store from the view of an application | plain copies, plain sockets; `mixed` and `trace`: none |
//! | `blocks` | `blocks` | paged KV cache: operations, prefix sharing, restore | a locked `Vec`, plain copies |
//! | `failover` | `failover` | recovery time after a master is killed and restarted | none: absolute times |
//! | `drain` | `moves` | a node is emptied under load: rate, latency of gets | bare sockets; gets without a drain |
//! | `join` | `moves` | a node that joins full ones is filled: time, latency of gets | gets before it joined |
//! | `rolling` | `moves` | all nodes restart, each after a drain: hit rate | hit rate before |
//! | `fanout` | `moves` | hosts read the same objects: rate with copies of them | rate without copies |
//! | `masters` | `masters` | three masters; failover and rebalancing | one master |
//! | `trace` | `trace-gen`, `trace-sessions`, `trace-info` | nothing; generates, converts and summarizes traces for `store` and `blocks` | none |
//!
//! `docs/performance.md` has the results and the commands that reproduce them.
//!
//! # Structure of a benchmark
//!
//! 1. The folder's main file has the arguments, their examples for `--help`, and `run`.
//! 2. A fixture starts what is measured: a cluster of child processes, or a data structure in this process.
//! 3. Every repeat measures both sides, the measured code and its baseline, with the same sizes, threads and order of
//!    operations. The order of the sides rotates ([`interleave`]). A ratio compares two consecutive measurements, so
//!    that a machine that becomes slower or faster affects both sides.
//! 4. The result is one line of JSON ([`ResultRow`]) on standard output: the median of the ratios, their range
//!    (largest − smallest) / median, and both absolute rates ([`compared`]). Progress goes to standard error. `disk` and
//!    `ep` print a table unless `--json` is given.
//! 5. A row may have a target. With `--gate` a benchmark fails if a result misses its target by more than a factor of
//!    two.
//!
//! This is a complete benchmark. It compares a copy in pieces of one page with a copy at once:
//!
//! ```
//! use std::time::Duration;
//!
//! use moontide_bench::{BenchError, ResultRow, compared, interleave, timed};
//!
//! fn main() -> Result<(), BenchError> {
//!     const PAGE: usize = 4096;
//!     let from = vec![7u8; 1 << 20];
//!     let mut to = vec![0u8; from.len()];
//!     let [pages, whole] = interleave(3, |side, _repeat| {
//!         let copy = || {
//!             match side {
//!                 0 => to.chunks_mut(PAGE).zip(from.chunks(PAGE)).for_each(|(to, from)| to.copy_from_slice(from)),
//!                 _ => to.copy_from_slice(&from),
//!             }
//!             std::hint::black_box(&mut to);
//!             Ok(())
//!         };
//!         // One caller, for two milliseconds.
//!         timed(vec![copy], Duration::from_millis(2), from.len() as u64)
//!     })?;
//!     assert_eq!(pages.over(&whole).len(), 3, "one ratio per repeat");
//!     let row = ResultRow::new("copy", "pages").with("page_bytes", PAGE);
//!     let row = compared(row, &pages, &whole, Some(0.9));
//!     assert!(row.to_string().contains("\"ratio_range\":"));
//!     row.print();
//!     Ok(())
//! }
//! ```
//!
//! # Use
//!
//! [`command()`] defines the subcommands and [`run`] executes one. The caller must be the program `moontide`: benchmarks
//! start masters, nodes and further ranks as child processes of `std::env::current_exe()`.
//!
//! [`format_bytes`], [`http`] and [`Scratch`] are the code that the other commands of `moontide` share
//! with the benchmarks.
//!
//! Reading order: `command`, `results`, `measure`, `process`, then the folder of a benchmark; `push` is the shortest with
//! a child process and a baseline.

mod command;

mod measure;
mod results;

mod arguments;
pub mod http;
mod plot;
mod process;
mod scratch;

mod blocks;
mod disk;
mod ep;
mod failover;
mod masters;
mod meta;
mod moves;
mod policies;
mod push;
mod store;
mod trace;
mod transfer;

pub use arguments::format_bytes;
pub use command::{command, run};
pub use measure::{Run, RunSeries, compared, interleave, timed};
pub use results::{BenchError, ResultRow};
pub use scratch::Scratch;
